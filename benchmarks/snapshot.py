"""What every command says and writes, before and after a change that must not change it (modules that move, say).

    python benchmarks/snapshot.py take FOLDER [--only NAME ...]
    python benchmarks/snapshot.py compare BEFORE AFTER

Runs small commands offline on what ships, each a process with one thread, two at a time, and stores exit code, stdout,
stderr and files of each entry as one text. Times, dates, fingerprints, temporary paths are masked; floats have five digits,
pictures 32 x 32 grey values. PYTHONPATH decides which source is run. Snapshots compare on one machine with the same libraries.
"""

from __future__ import annotations

import argparse
import base64
import csv
import difflib
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent

PROBE = """
import inspect, warnings
from pathlib import Path
import open_clip, torch, tokensieve
warnings.simplefilter("ignore")
print(sorted(tokensieve.__all__), dir(tokensieve) == sorted(tokensieve.__all__))
for name in sorted(tokensieve.__all__):
    value = getattr(tokensieve, name)
    print(name, inspect.signature(value if inspect.isfunction(value) else value.__init__) if callable(value) else value)
shipped = {path.name: path for path in Path(tokensieve.__file__).parent.rglob("s*-v*.*")}
open_clip.add_model_config(shipped["sieve-vit-8.json"])
model = open_clip.create_model("sieve-vit-8", pretrained=str(shipped["scenes-v1.safetensors"])).eval()
torch.manual_seed(0)
images = torch.randn(3, 3, 112, 112)
def first(values):
    return [round(value, 4) for value in values.flatten()[:6].tolist()]
def checksum(index):
    return None if index is None else int((index.flatten() * torch.arange(1, index.numel() + 1)).sum())
with torch.no_grad():
    for plan in ("none", "anchor@6(k=10,m=50,alpha=0.5)", "random@3,5:70%", "grid@-2:64(rest=merge)", "pool@*.attn:-8",
                 "learned:32(rest=merge)", "grid:32(rest=fuse)", "anchor@3:98 + pool@6:32", "anchor@out(rest=zero)"):
        with tokensieve.apply(model, plan) as handle:
            print(plan, tokensieve.Plan.parse(plan), first(model.encode_image(images)))
        print("  ", handle.ledger, checksum(handle.kept), checksum(handle.groups), handle.notes)
    feature, tokens = tokensieve.get_image_features_with_tokens(model, images)
    block, whole = model.visual.transformer.resblocks[-1], torch.randn(2, 197, 128)
    anchors = tokensieve.select_anchor_tokens(whole, 5, attention=block)
    print(first(feature), first(tokens), anchors.tolist())
    print(first(tokensieve.compute_importance_scores(whole, anchors, attention=block)))
    print(first(tokensieve.compute_diversity_scores(whole, anchors, attention=block)))
    print(checksum(tokensieve.select_tokens_with_scoring(whole, attention=block)))
    print(first(tokensieve.apply_token_selection(whole).sum(0)))
    print(first(tokensieve.PrunedVisionEncoder(model, k_anchors=5, top_m=20)(images)))
    with tokensieve.apply_pruning_to_model(model, prune_layer=2) as handle:
        print(first(model.encode_image(images)), handle.ledger)
    print(first(model.encode_image(images)))
for wrong in ("ancho:3", "anchor@99:3", "anchor@llm.2:3", "sdtps@out"):
    try:
        tokensieve.apply(model, wrong)
    except tokensieve.UserError as error:
        print(type(error).__name__, error)
"""

# The shipped file of each training, and what makes it tiny.
TRAININGS = """
clip: [embedded_clip.yaml, {threads: 1, workers: 0, optimizer: {warmup: 1}, evaluate: false, phases: [
  {steps: 2, batch: 4, canvas: 24, level: [0, 1]}, {steps: 1, batch: 4, several: 0.5}]}]
captions: [embedded_coca.yaml, {pictures: 8, batch: 4, steps: 3, optimizer: {warmup: 1}, evaluate: false}]
llava: [embedded_llava.yaml, {layers: 4, horizon: 3, optimizer: {warmup: 1}, evaluate: false, phases: [
  {steps: 1, batch: 2, questions: 0}, {steps: 2, batch: 2, questions: 4, layers: 2}]}]
selector: [learned_selector.yaml, {steps: 3, batch: 4, val_images: 8, workers: 0, optimizer: {warmup: 1}}]
pruning: [embedded_vlm.yaml, &pruning {dataset_settings: {train: {limit: 12}, val: {limit: 4}},
  trainer_settings: {dl_settings: {max_steps: 3, batch_size: 2, warmup_steps: 1, evaluate_every: 2, checkpoint_every: 2}}}]
reid: [embedded_reid.yml, {DATASETS: {VAL_IDENTITIES: 4}, SOLVER: {MAX_STEPS: 3, IMS_PER_BATCH: 8, WARMUP_EPOCHS: 0.01}}]
search: [embedded_vlm.yaml, {<<: *pruning, search_settings: {n_trials: 2,
  space: {method_settings.merge_ratio: {low: 0.3, high: 0.6}}}}]
"""
WRONG = "task: clip\noutput: out\nmodle: x\nthreads: 0\noptimizer: {lr: -1, warmup: 9}\nphases: [{steps: 3, canvas: 20}]\n"

# Entries, the longest first, and the commands of each, which run one after another in a folder of its own. The people of
# embedded-reid are drawn by the first command that shows them, so all that needs them is one entry; PROBE is the code above.
ENTRIES = """
reid: show embedded-reid:12 --output kept.png
reid: show embedded-reid:12 --gallery --ranks 3 --output gallery.png
reid: eval --task reid --limit 40 --modalities RGB,NI,TI RGB --plan sdtps@out --compare none SMALL
reid: train tiny.yaml --output run
eval-captioning: eval --task captioning --dataset embedded-captions --model sieve-coca-8 --limit 6 --plan grid:60 SMALL
eval-classification: eval --task zeroshot_classification --limit 40 --plan anchor:60 --compare none SMALL
eval-retrieval: eval --dataset embedded-captions --recall_k 1 5 --limit 40 --plan "anchor:60(rest=merge)" --compare none SMALL
eval-probe: eval --task linear_probe --limit 40 --fewshot_k 1 --val_proportion 0.25 --plan random:60 --compare none SMALL
eval-selection: eval --dataset embedded-selection --limit 20 --plan pool:49 --compare none SMALL
eval-vqa: eval --task vqa --limit 24 --plan VLM --compare none SMALL
eval-S1: eval --enable_token_selection --token_selection_k 15 --token_fusion mean --limit 20 --compare none SMALL
eval-S2: eval --enable_pruning --k_anchors 5 --prune_layer 3 --limit 20 --dump_classnames --dump_templates SMALL
eval-fusion: eval --plan "learned:32(rest=merge)" --compare none --token_fusion weighted --limit 40 SMALL --num_workers 2
search: search tiny.yaml --output run
train-pruning: train tiny.yaml --output run
train-clip: train tiny.yaml --output run
train-clip: train tiny.yaml --output run --resume
train-captions: train tiny.yaml --output run
train-llava: train tiny.yaml --output run
train-selector: train tiny.yaml --output run
bench: bench --model sieve-vit-8 --plan anchor:60 grid:60 --batch_size 1 --repeats 1 --output rows.json
bench: bench --model_type vlm --plan VLM --batch_size 1 --repeats 1 --new_tokens 3 --output vlm.json
show: show embedded:3 embedded:17 --plan "anchor@2:120 + anchor@4:60(rest=merge)" --compare random:60 --output kept.png
show: show embedded:3 --question "what colour is the circle ?" --plan VLM --output asked.png
families: families --output families.md
errors: evil ; eval --limt 3 ; eval --plan ancho:60 ; eval --dataset cifar11 ; eval --model ViT-B-99
errors: eval --task vqa --dataset embedded ; show embedded:99999 ; train nowhere.yaml ; build nowhere.json
validate: validate CONFIGS ; validate wrong.yaml nowhere.yaml
api: PROBE
methods: methods
help: --help ; --version ; eval --help ; build --help ; methods --help ; bench --help ; train --help
help: validate --help ; search --help ; show --help ; report --help ; families --help
report: build results --output table.csv
report: report results --images 1 --title snapshot --output page.html
"""
SHORT = {
    "SMALL": "--batch_size 20 --num_workers 0 --output results/{plan}.json",
    "VLM": "'merger@out + cross@llm.3,6,9(rest=merge)'",
    "CONFIGS": " ".join(sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("configs/**/*.y*ml"))),
}


def entries() -> dict[str, list[str]]:
    """The commands of each entry by its name."""
    made: dict[str, list[str]] = {}
    for name, commands in (line.split(": ", 1) for line in ENTRIES.strip().splitlines()):
        for command in commands.split(" ; "):
            made.setdefault(name, []).append(" ".join(SHORT.get(word, word) for word in command.split(" ")))
    return made


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with some changed, key by key."""
    deep = {key: merged(settings[key], value) for key, value in changes.items() if isinstance(settings.get(key), dict)}
    return {**settings, **changes, **deep}


def prepare(name: str, folder: Path) -> None:
    """What must be in the folder of an entry before its commands run."""
    trainings = yaml.safe_load(TRAININGS)
    if (kind := name.removeprefix("train-")) in trainings:
        file, changes = trainings[kind]
        settings = merged(yaml.safe_load((ROOT / "configs" / file).read_text()), changes)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    if name == "validate":
        shutil.copytree(ROOT / "configs", folder / "configs")
        (folder / "wrong.yaml").write_text(WRONG)
    if name == "report":  # of results whose times are all 1, so that all of the page can be compared
        (folder / "results").mkdir()
        for path in sorted(folder.parent.glob("*/results/*.json")):
            result, file = settled(json.loads(path.read_text())), f"{path.parts[-3]}_{path.name}"
            result["run"]["key"] = file  # results of one key are shown once
            (folder / "results" / file).write_text(json.dumps(result))


# ------------------------------------------------------------------------------------------------------------------ masks

MEASURED = re.compile(r"second|speed|realized|peak|^(run_)?(key|versions|time)$")  # names of values that differ from run to run
PROGRESS = re.compile(r"\d+%\||\d+(it|img|step|shot|class)/s|^\s*$")


def settled(value: Any, mask: bool = False) -> Any:
    """JSON with what is measured masked and floats of five digits."""
    if isinstance(value, dict):
        return {name: settled(item, mask or bool(MEASURED.search(name))) for name, item in value.items()}
    if isinstance(value, list):
        return [settled(item, mask) for item in value]
    if isinstance(value, str):
        return "#" if mask else value
    if value is None or isinstance(value, bool):
        return value
    return 1.0 if mask else float(f"{value:.5g}") if isinstance(value, float) else value


def masked(text: str, work: Path) -> str:
    """Text without paths, dates, fingerprints and more digits than are compared."""
    text = re.sub(r"(?<!\S)\S*/tokensieve/\S+\.py:\d+: ", "SOURCE: ", text)
    for path, word in ((work, "WORK"), (ROOT, "REPOSITORY"), (Path(sys.prefix), "ENVIRONMENT")):
        text = text.replace(str(path), word)
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?", "DATE", text)
    text = re.sub(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "FINGERPRINT", text)
    text = re.sub(r"(\w*seconds\w*|speedup\w*) +[\d.]+", r"\1 #", text)
    return re.sub(r"(?<![\w.])\d+\.\d{4,}(e-?\d+)?", lambda found: f"{float(found[0]):.5g}", text)


def table(text: str) -> str:
    """Tables without columns of times; the widths of columns, which follow from them, do not matter."""
    lines, drop = [], set[int]()
    for line in text.splitlines():
        cells = re.split("[┃│]", line)
        if line.startswith("┏"):
            drop = set()
        if line.startswith("┃"):
            drop |= {place for place, cell in enumerate(cells) if re.search(r"/s$|speed-up", cell.strip())}
        kept = "|".join(cell for place, cell in enumerate(cells) if len(cells) == 1 or place not in drop)
        if not re.match("[┏┡└─]", line.strip()):
            lines.append(" ".join(kept.split()))
    return "\n".join(lines)


def picture(content: bytes) -> str:
    """Size and 32 x 32 means of grey, a letter each."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.BOX)) // 16
    return "\n".join([f"picture {image.size}", *("".join(f"{value:x}" for value in row) for row in grey)])


def told(path: Path, work: Path) -> str:
    """What is compared of a file."""
    mask = functools.partial(masked, work=work)
    if "checkpoints" in path.parts or path.suffix in (".pt", ".npz"):
        return ""  # that it is there; what was learned is compared where the training exports it
    if path.suffix in (".json", ".jsonl"):
        rows = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        return "\n".join(mask(json.dumps(settled(json.loads(row)), indent=1, ensure_ascii=False)) for row in rows)
    if path.suffix == ".csv":
        columns = list(csv.DictReader(io.StringIO(path.read_text())))
        return "\n".join(mask(json.dumps(settled(row), indent=1, ensure_ascii=False)) for row in columns)
    if path.suffix == ".png":
        return picture(path.read_bytes())
    if path.suffix == ".safetensors":
        held = sorted(load_file(path).items())
        return "\n".join(f"{name} {value.dtype} {value.shape} {np.abs(value.astype(float)).mean():.4g}" for name, value in held)
    if path.suffix == ".html":
        drawn = r"data:image/\w+;base64,([A-Za-z0-9+/=]+)"
        page = re.sub(drawn, lambda found: picture(base64.b64decode(found[1])), path.read_text())
        return mask(page.replace("><", ">\n<"))
    if path.suffix in (".md", ".yaml", ".log", ".txt"):
        drop = re.compile(f"{PROGRESS.pattern}|{MEASURED.pattern}" if path.suffix == ".log" else "(?!)")
        return mask("\n".join(line for line in path.read_text().replace("\r", "\n").splitlines() if not drop.search(line)))
    return f"{path.stat().st_size} bytes"


def files(folder: Path) -> list[Path]:
    """What is compared by content: not curves and databases, which are full of times, nor the drawn people."""
    left = ("tfevents", "study.db", "/cache/", "/features/")
    return sorted(path for path in folder.rglob("*") if path.is_file() and not any(word in str(path) for word in left))


# --------------------------------------------------------------------------------------------------------------- commands


def source() -> str:
    """The tokensieve that is run. If a folder of PYTHONPATH is gone, an installed one would be run unnoticed: an error."""
    missing = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and not Path(place).is_dir()]
    found = importlib.util.find_spec("tokensieve")
    if missing or found is None or not Path(str(found.origin)).exists():
        raise SystemExit(f"no source to run: {', '.join(missing) or 'tokensieve'} is not there")
    return str(found.origin)


def run(name: str, commands: list[str], work: Path, target: Path) -> None:
    """Run the commands of an entry, store what they said and wrote."""
    began, folder = time.monotonic(), work / name
    folder.mkdir()
    prepare(name, folder)
    given = set(files(folder))
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(str(Path(place).resolve()) for place in places)
    variables = {
        **{"PYTHONPATH": path, "COLUMNS": "160", "TOKENSIEVE_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9"},
    }
    parts, codes = [], []
    for command in commands:
        words = ["-c", PROBE] if command == "PROBE" else ["-m", "tokensieve", *shlex.split(command)]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=600
        )
        source()  # still there
        codes.append(done.returncode)
        said = masked(done.stdout, work)
        if command.startswith(("eval", "bench", "search")) and "--help" not in command:
            said = table(said)
        if command.startswith("bench") and "--help" not in command:  # the numbers that are not times are in the JSON
            said = re.sub(r"(?<=\s)[\d.][\d.e/>x+-]*", "#", said)
        errors = [line for line in done.stderr.replace("\r", "\n").splitlines() if not PROGRESS.search(line)]
        parts.append(f"$ {command}\nexit code {done.returncode}\n{said}\n[stderr]\n" + masked("\n".join(errors), work))
    for file in files(folder):
        if file not in given:
            parts.append(f"[file {masked(str(file.relative_to(folder)), work)}]\n{told(file, work)}")
    drawn = sorted((folder / "cache").rglob("*.jpg"))
    if drawn:
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in drawn)).hexdigest()
        parts.append(f"[{len(drawn)} drawn files]\n{digest}")
    (target / f"{name}.txt").write_text("\n\n".join(parts) + "\n")
    print(f"{name:<24} {time.monotonic() - began:6.1f} s  exit {' '.join(map(str, codes))}", flush=True)


def take(target: Path, only: list[str]) -> None:
    """Run all entries, or those whose names begin with a word of `only`; the report also needs what it reports."""
    chosen = {name: lines for name, lines in entries().items() if not only or name.startswith(tuple(only))}
    if "report" in chosen:
        chosen = {name: lines for name, lines in entries().items() if name in chosen or name.startswith(("eval", "reid"))}
    target.mkdir(parents=True, exist_ok=True)
    print(f"of {source()}", flush=True)
    last = {"report": chosen.pop("report")} if "report" in chosen else {}
    with tempfile.TemporaryDirectory() as work:
        for group in (chosen, last):
            with ThreadPoolExecutor(2) as pool:
                running = [pool.submit(run, name, lines, Path(work).resolve(), target) for name, lines in group.items()]
                for one in running:
                    one.result()


def compare(before: Path, after: Path) -> int:
    """Tell for each entry whether it is the same, or how it differs; the exit code."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.txt")})
    differ = 0 if names else 1
    for name in names:
        old, new = (path.read_text().splitlines() if path.exists() else [] for path in (before / name, after / name))
        lines = list(difflib.unified_diff(old, new, str(before / name), str(after / name), n=1, lineterm=""))
        print(f"{name.removesuffix('.txt'):<24} {'differs' if lines else 'same'}")
        differ |= bool(lines)
        print("".join(f"    {line[:200]}\n" for line in lines[:30]), end="")
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("take")
    taking.add_argument("folder", type=Path)
    taking.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(entries())}")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args.before, args.after)
    take(args.folder, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
