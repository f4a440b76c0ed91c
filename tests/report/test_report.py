"""The report: one page, the numbers of the files, nothing from outside, nothing unescaped."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tokensieve import Reduction, View, method, report
from tokensieve.cli.parser import parse
from tokensieve.errors import UserError
from tokensieve.methods import REGISTRY
from tokensieve.report import examples, fields, sections
from tokensieve.report.page import SCRIPT

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Tags that are closed in order, addresses, cells and words of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data", "action")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if any(tag in self.open for tag in ("td", "th")):
            self.rows[-1][-1] += data


def result(plan: str = "anchor:60", **changes: Any) -> dict[str, Any]:
    """A result of eval as it is written."""
    made: dict[str, Any] = {
        "dataset": "embedded",
        "model": "big-model",
        "pretrained": "tag",
        "task": "zeroshot_classification",
        "metrics": {"acc1": 0.553, "acc5": 0.8745, "acc1_stderr": 0.00786, "acc5_stderr": 0.00524},
        "language": "en",
        "reduction": {
            "plan": plan,
            "applied": plan != "none",
            "changed": plan != "none",
            "reason": "the plan is none" if plan == "none" else None,
            "layers": [],
            "token_fusion": "cls",
            "tokens_in": 196,
            "tokens_out": 196 if plan == "none" else 60,
            "gflops": 0.7883 if plan == "none" else 0.5036,
            "gflops_full": 0.7883,
            "images_per_second": 100.0 if plan == "none" else 160.0,
            "images_per_second_full": 100.0,
            "notes": [],
        },
        "run": {
            "versions": {"tokensieve": "0.1.0", "torch": "2.13.0"},
            "seed": 7,
            "split": "test",
            "limit": 50,
            "device": "cpu",
            "dtype": "float32",
            "amp": False,
            "batch_size": 32,
            "workers": None,
            "n_samples": 50,
            "weights": "57fc5ccb",
        },
    }
    for name, value in changes.items():
        where = next((made[part] for part in ("reduction", "run") if name in made[part]), made)
        where[name] = value
    return made


def page_of(*found: dict[str, Any], **options: Any) -> tuple[str, Reader]:
    page = report.build(list(found), **({"images": 0} | options))
    reader = Reader(page)
    assert reader.open == []
    return page, reader


def check_self_contained(page: str, reader: Reader) -> None:
    assert all(address.startswith(("#", "data:image/")) for address in reader.addresses)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    assert reader.tags.count("script") == 1 and page.count(f"<script>{SCRIPT}</script>") == 1  # its own, and no other may run
    mark = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{mark}'" in page and "</script" not in SCRIPT.lower()
    assert not reader.handlers
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style and "@font-face" not in style
    assert "default-src 'none'" in page


# --------------------------------------------------------------------------------------------------------------------- numbers


def test_numbers_are_those_of_the_files() -> None:
    folder = ROOT / "benchmarks" / "results"
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("default_*.json"))]
    page, reader = page_of(*found)
    check_self_contained(page, reader)
    rows = {row[1].strip(): row for row in reader.rows if len(row) == 7}
    assert len(rows) == 1 + len(found)  # and the head
    for one in found:
        done, row = one["reduction"], rows[one["reduction"]["plan"]]
        tokens = f"{done['tokens_in']} → {done['tokens_out']}" if done["plan"] != "none" else "196"
        assert row[2] == tokens
        assert row[3] == f"{100 * one['metrics']['acc1']:.2f} ± {100 * one['metrics']['acc1_stderr']:.2f}"
        assert row[4] == f"{done['gflops']:.3g}" and row[5] == f"{done['images_per_second']:.1f}"
        assert row[6] == f"{done['images_per_second'] / done['images_per_second_full']:.2f}×"


def test_full_model_comes_first_then_many_tokens_to_few() -> None:
    _, reader = page_of(result("random:32", tokens_out=32), result("anchor:98", tokens_out=98), result("none"))
    assert [row[1].strip() for row in reader.rows if len(row) == 7][1:] == ["none", "anchor:98", "random:32"]


def test_a_section_for_each_model_data_set_task_and_language() -> None:
    found = [
        result(),
        result("none"),
        result(model="other"),
        result(dataset="cars"),
        result(task="linear_probe", metrics={"lp_acc1": 0.5}),
        result(language="ja"),
    ]
    page, reader = page_of(*found)
    assert reader.tags.count("section") == 5
    assert "big-model (tag) on embedded, zeroshot_classification, ja" in page
    assert [address for address in reader.addresses if address.startswith("#s")] == [f"#s{number}" for number in range(1, 6)]
    assert all(f"id='s{number}'" in page for number in range(1, 6))


def headings(*found: dict[str, Any]) -> list[str]:
    return [
        name.removeprefix("big-model (tag) on embedded, zeroshot_classification") for name, _ in sections.group_sections(found)
    ]


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"limit": None}, {"limit": 24}, [", limit not given", ", limit 24"]),
        ({"split": "test"}, {"split": "val"}, [", split test", ", split val"]),
        ({"seed": 0}, {"seed": 3}, [", seed 0", ", seed 3"]),
        ({"fewshot_k": -1}, {"fewshot_k": 16}, [", fewshot_k -1", ", fewshot_k 16"]),
        ({"recall_k": [5]}, {"recall_k": [1, 5]}, [", recall_k 5", ", recall_k 1 5"]),
        (
            {"dtype": "float32", "amp": False},
            {"dtype": "bfloat16", "amp": True},
            [", dtype float32", ", dtype bfloat16"],
        ),
        ({"weights": "ab" * 16}, {"weights": "cd" * 16}, [", weights abababab", ", weights cdcdcdcd"]),
        (
            {"weights": f"{'ab' * 16}-{'12' * 8}"},
            {"weights": f"{'ab' * 16}-{'34' * 8}"},
            [", weights abababab-12121212", ", weights abababab-34343434"],
        ),
        (
            {"data": ["ab" * 16, "01" * 16]},
            {"data": ["ab" * 16, "23" * 16]},
            [", data abababab 01010101", ", data abababab 23232323"],
        ),
        ({"limit": None, "data": "ab" * 16}, {"limit": 24, "data": "cd" * 16}, [", limit not given", ", limit 24"]),
        ({"seed": 1, "limit": 5}, {"seed": 2, "limit": 6}, [", limit 5, seed 1", ", limit 6, seed 2"]),
    ],
)
def test_other_experiments_are_other_sections(one: dict[str, Any], other: dict[str, Any], named: list[str]) -> None:
    """What differs is named: settings always, fingerprints where nothing else tells the sections apart."""
    found = [result("none"), result(), result("none"), result()]
    for row, changes in zip(found, (one, one, other, other), strict=True):
        row["run"] |= changes
    assert headings(*found) == named
    assert [len(rows) for _, rows in sections.group_sections(found)] == [2, 2]


def test_what_is_no_other_experiment_stays_in_one_section() -> None:
    older, clip_benchmark = result("grid:60", seed=0, limit=None), result("pool:49", seed=0, limit=None)
    older["run"] |= {"normalize": True}
    clip_benchmark["run"] = {name: clip_benchmark["run"][name] for name in ("dtype", "weights")}
    found = [result(seed=0, limit=None, batch_size=2, device="cuda"), older, clip_benchmark]
    found[0]["run"] |= {"threads": 8, "processes": 4, "classifiers": [], "model_type": "open_clip"}
    found[0]["reduction"]["trained"] = "learned:1"
    assert headings(*found) == [""]


@pytest.mark.parametrize(
    ("task", "metrics", "main"),
    [
        ("zeroshot_classification", {"acc5": 0.9, "acc1": 0.5}, "acc1"),
        ("zeroshot_classification", {"mean_average_precision": 0.4}, "mean_average_precision"),
        ("linear_probe", {"lp_acc5": 0.9, "lp_acc1": 0.7}, "lp_acc1"),
        (
            "zeroshot_retrieval",
            {"text_retrieval_recall@5": 0.5, "image_retrieval_recall@1_stderr": 0.1, "image_retrieval_recall@1": 0.4},
            "image_retrieval_recall@1",
        ),
        ("image_caption_selection", {"text_acc": 0.9, "acc": 0.6}, "acc"),
        ("captioning", {"Bleu_1": 0.4, "CIDEr": 1.1}, "CIDEr"),
        ("something_new", {"words": "many", "goodness": 3}, "goodness"),
        (None, {}, None),
    ],
)
def test_main_metric_of_each_task(task: str | None, metrics: dict[str, Any], main: str | None) -> None:
    found = [result(task=task, metrics=metrics)]
    assert fields.main_metric(found) == main
    _, reader = page_of(*found)
    head = next(row for row in reader.rows if row[0] == "#")
    assert main is None or head[3].startswith(main)
    assert ("%" in head[3]) == (main not in ("CIDEr", "goodness", None))
    assert main != "CIDEr" or next(row for row in reader.rows if len(row) == 7 and row[0] == "1")[3] == "1.1"


def test_unmeasured_throughput_is_a_dash_and_leaves_the_other_plot() -> None:
    cached = {"images_per_second": None, "images_per_second_full": None}
    page, reader = page_of(result("none", **cached), result(**cached))
    assert page.count('<svg class="plot"') == 1 and "not measured" in page
    assert [row[5:] for row in reader.rows if len(row) == 7][1:] == [["–", "–"]] * 2
    page, _ = page_of(result("none"), result(**cached))
    assert page.count('<svg class="plot"') == 2 and "1 without such a measurement left out" in page


@pytest.mark.parametrize("odd", [None, "fast", True, float("inf"), []])
def test_odd_values_are_dashes(odd: Any) -> None:
    _, reader = page_of(result(gflops=odd, images_per_second=odd, tokens_out=None, metrics={"acc1": 0.5, "acc1_stderr": odd}))
    (row,) = [row for row in reader.rows if len(row) == 7][1:]
    assert row[2:] == ["–", "50.00", "–", "–", "–"]


def test_results_of_clip_benchmark_itself() -> None:
    page, reader = page_of({"dataset": "cars", "model": "m", "pretrained": "", "metrics": {"acc1": 0.25}})
    (row,) = [row for row in reader.rows if len(row) == 7][1:]
    assert row[1:4] == [" none", "–", "25.00"] and "m on cars" in page


def test_same_run_under_two_names_is_one_row() -> None:
    one, other = result(), result()
    one["run"]["key"] = other["run"]["key"] = "abc"
    _, reader = page_of(one, other)
    assert len([row for row in reader.rows if len(row) == 7]) == 2


def test_the_newest_of_equal_settings_is_shown_and_older_ones_are_counted() -> None:
    found = [result(metrics={"acc1": value}) for value in (0.1, 0.2, 0.3)]
    for row, is_newest in zip(found, (False, True, False), strict=True):
        row["run"] |= {"key": "abc", "newest": is_newest, "time": "2026-01-01T00:00:00+00:00"}
    page, reader = page_of(*found, result("none"))
    assert [row[3] for row in reader.rows if len(row) == 7][1:] == ["55.30 ± 0.79", "20.00"]
    assert "2 results" in page and "not shown: 2 older, with the same settings as one that is shown" in page
    told = {row[0] for row in reader.rows if len(row) == 2}
    assert not {"time", "newest", "key"} & told
    page, _ = page_of(result("none"))
    assert "older" not in page


@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"a": 1}},
        {"task": ["reid"], "seed": {}, "limit": [[]], "batch_size": {"x": [1]}},
        {"images_per_second": 1e-320, "gflops": 5e-324},
        {"metrics": {"acc1": 1e-320, "acc1_stderr": 1e-300}},
    ],
)
def test_values_of_no_use_are_no_error(changes: dict[str, Any]) -> None:
    page, reader = page_of(result(**changes), result("none"))
    assert len([row for row in reader.rows if len(row) == 7]) >= 3 and "nan" not in page


def test_a_folder_that_eval_refuses_is_left_out_of_the_command() -> None:
    row = result(task="reid", dataset="RGBNT201")
    row["run"]["arguments"] = {"dataset_root": "{dataset:>99999999999}"}
    page, _ = page_of(row, images=1)
    shown = page[page.index("tokensieve show") :]
    assert "RGBNT201" in shown and "--dataset_root" not in shown


def test_fusion_is_part_of_the_plan() -> None:
    fused = result()
    fused["reduction"] |= {"token_fusion": "weighted", "token_fusion_weight": 0.7}
    _, reader = page_of(result(), fused)
    assert [row[1].strip() for row in reader.rows if len(row) == 7][1:] == ["anchor:60", "anchor:60, fusion weighted 0.7"]


def test_what_was_not_applied_is_said() -> None:
    page, _ = page_of(result(applied=False, reason="it is a ResNet", notes=["a note"]))
    assert "anchor:60 was not applied: it is a ResNet" in page and "a note" in page
    page, _ = page_of(result("none", token_fusion="mean"))
    assert "not applied" not in page


def test_a_plan_that_changed_nothing_is_marked_in_the_table_and_explained() -> None:
    page, reader = page_of(result("none"), result(changed=False, reason="no token was removed <b>"), result("random:60"))
    assert "anchor:60 changed nothing: no token was removed &lt;b&gt;. Its numbers are those of the full model." in page
    assert [row[1].strip() for row in reader.rows if len(row) == 7][1:] == ["none", "anchor:60 (changed nothing)", "random:60"]
    page, reader = page_of(result(applied=False, changed=False, reason="it is a ResNet"))
    assert [row[1].strip() for row in reader.rows if len(row) == 7][1:] == ["anchor:60 (not applied)"]
    page, _ = page_of(result("none", applied=False, changed=False, reason="the plan is none"), result(changed=None))
    assert "changed nothing" not in page and "not applied" not in page


# ------------------------------------------------------------------------------------------------------------------ the page


def test_hostile_names_are_words() -> None:
    evil = "<script>alert('x')</script><img src=http://evil.example/a.png onerror=alert(1)>\"'&{0}{style}"
    found = [
        result(
            evil, model=evil, dataset=evil, pretrained=evil, task=evil, language=evil, device=evil, dtype=evil, notes=[evil]
        ),
        result("none", metrics={evil: 1.0, "acc1": 0.5}, applied=evil, reason=evil, tokens_in=evil, tokens_out=3),
    ]
    found[0]["metrics"] = {evil: 0.5}
    page, reader = page_of(*found, title=evil, images=2)
    check_self_contained(page, reader)
    assert "img" not in reader.tags and any(evil in word for word in reader.words)


def test_title_and_plots() -> None:
    page, reader = page_of(result(), result("none"), title="Mine & yours")
    assert "<title>Mine &amp; yours</title>" in page and "<h1>Mine &amp; yours</h1>" in page
    assert page.count('<svg class="plot"') == 2
    assert any("anchor:60: acc1 55.30 ± 0.79" in word for word in reader.words)
    assert 'class="mark k-none"' in page and 'class="mark k-0"' in page and 'class="error' in page


def test_declared_controls_are_marked() -> None:
    def my_control(view: View, keep: int) -> Reduction:
        raise NotImplementedError

    method(summary="a control of a plug-in", control=True)(my_control)
    try:
        page, _ = page_of(*(result(f"{name}:60") for name in ("anchor", "random", "grid", "pool", "my_control", "unknown")))
    finally:
        REGISTRY.remove("my_control")
    for name in ("random", "grid", "pool", "my_control"):
        assert f" {name} (control)</span>" in page
    assert " anchor</span>" in page and " unknown</span>" in page
    assert '<circle class="mark k-control-0"' in page and '<polygon class="mark k-control-2"' in page


def test_many_points_are_numbered() -> None:
    found = [result(f"anchor:{number}", tokens_out=number) for number in range(60, 70)]
    page, _ = page_of(*found)
    labels = re.findall(r'<text class="label"[^>]*>([^<]*)</text>', page)
    assert sorted(map(int, labels)) == sorted([*range(1, 11)] * 2)


def commands(page: str) -> list[list[str]]:
    reader = Reader(page)
    lines = [line for words in reader.words for line in words.splitlines() if line.startswith("tokensieve eval")]
    return [shlex.split(line) for line in lines]


def test_commands_repeat_the_rows() -> None:
    """What the page says to type is understood by the command line and means the settings of the file."""
    other = result("anchor(k=10,m=50)", language="ja", batch_size=64)
    other["reduction"] |= {"token_fusion": "weighted", "token_fusion_weight": 0.7, "token_fusion_temperature": 0.5}
    other["run"] |= {"recall_k": [1, 5], "amp": True}
    page, _ = page_of(result("none"), result(), other)
    together, first, second, alone, third = (parse(words[1:]) for words in commands(page))
    assert (together.plan, together.compare) == ("none", ["anchor:60"])
    assert [first.plan, second.plan, third.plan] == ["none", "anchor:60", "anchor(k=10,m=50)"]
    for args in (together, first, second):
        assert (args.model, args.pretrained, args.dataset, args.task) == (
            ["big-model"],
            ["tag"],
            ["embedded"],
            "zeroshot_classification",
        )
        assert (args.seed, args.limit, args.batch_size, args.device, args.amp) == (7, 50, 32, "cpu", None)
    assert vars(third) == vars(alone)
    assert (third.language, third.token_fusion, third.token_fusion_weight) == (["ja"], "weighted", 0.7)
    assert third.token_fusion_temperature == 0.5
    assert (third.recall_k, third.amp, third.batch_size) == ([1, 5], True, 64)


def test_commands_hold_the_arguments_that_results_are_not_known_by() -> None:
    given: dict[str, Any] = {
        "dataset_root": "my data/{dataset}",
        "weights": ["one's.safetensors", "b"],
        "custom_classname_file": "names.json",
        "custom_template_file": "prompts $1.json",
        "load_clfs": ["a.pt", "b.pt"],
        "annotation_file": "captions.json",
        "max_broken": 0.5,
    }
    found = [result("none"), result("learned:60"), result("nonsense:3")]
    for row in found:
        row["run"] |= {"arguments": given, "model_type": "hf"}
    page, _ = page_of(*found)
    together, none, learned, nonsense = (parse(words[1:]) for words in commands(page))
    assert {name: getattr(together, name) for name in given} == given == {name: getattr(learned, name) for name in given}
    assert none.weights is None and nonsense.weights is None, "eval refuses weights that no plan asks for"
    assert {name: getattr(none, name) for name in given} == given | {"weights": None}
    assert together.model_type == "hf" and together.compare == ["learned:60", "nonsense:3"]


@pytest.mark.parametrize("held_out", [{"val_split": "val"}, {"val_proportion": 0.2}])
def test_commands_hold_the_settings_of_the_linear_probe(held_out: dict[str, Any]) -> None:
    row = result(task="linear_probe", metrics={"lp_acc1": 0.5})
    usual = {"train_split": "train", "val_split": None, "val_proportion": None, "fewshot_k": -1, "fewshot_epochs": 10}
    usual |= {"fewshot_lr": 0.1, "normalize": True}
    row["run"] |= usual
    words = commands(page_of(row)[0])[0]
    assert not {f"--{name}" for name in usual} & set(words)
    changed = {"train_split": "more", "fewshot_k": 16, "fewshot_epochs": 3, "fewshot_lr": 0.01, "normalize": False} | held_out
    row["run"] |= changed
    args = parse(commands(page_of(row)[0])[0][1:])
    for name, value in (usual | changed).items():
        several = value is not None and name in ("train_split", "val_split", "val_proportion")
        assert getattr(args, name) == ([value] if several else value), name


def test_settings_are_told() -> None:
    _, reader = page_of(result(), result("none", batch_size=64))
    told = {row[0]: row[1] for row in reader.rows if len(row) == 2}
    assert told["versions torch"] == "2.13.0" and told["weights"] == "57fc5ccb" and told["dtype"] == "float32"
    assert set(told["batch_size"].split(" | ")) == {"32", "64"}
    assert "key" not in told


# -------------------------------------------------------------------------------------------------------------------- pictures


def test_models_that_do_not_ship_get_a_command() -> None:
    page, reader = page_of(result("none"), result(), images=2)
    assert "No pictures" in page and "img" not in reader.tags
    assert "tokensieve show IMAGE --model big-model --pretrained tag --plan none --compare anchor:60" in page


def test_models_that_ship_get_pictures() -> None:
    shipped = {"model": "sieve-vit-8", "pretrained": "scenes-v1"}
    found = [result("none", **shipped), result(**shipped), result("pool:49", **shipped), result("nonsense:3", **shipped)]
    page, reader = page_of(*found, images=1)
    check_self_contained(page, reader)
    (address,) = [address for address in reader.addresses if address.startswith("data:image/webp;base64,")]
    assert len(address) > 10_000
    assert "nonsense:3 is not drawn" in page and "made with others" in page  # the fingerprint is another model's
    page, reader = page_of(*found, images=0)
    assert "img" not in reader.tags and "What the plans keep" not in page
    page, _ = page_of(result("none", **shipped), images=1)
    assert "no plan here cuts anything" in page


def test_trained_weights_of_the_pictures_are_those_of_the_results_or_it_is_said(tmp_path: Path) -> None:
    import torch

    from tokensieve.models import loading
    from tokensieve.parts import files as part_files
    from tokensieve.parts import resolve
    from tokensieve.plan import Plan

    shipped = {"model": "sieve-vit-8", "pretrained": "scenes-v1"}
    plan, model = Plan.parse("learned:20"), loading.load("sieve-vit-8", "scenes-v1").model
    own = resolve.load_parts(plan, model)
    mark = resolve.parts_fingerprint(own)
    other = resolve.load_parts(plan, model)["learned"]
    with torch.no_grad():
        for value in other.parameters():
            value.neg_()
    file = tmp_path / "other.safetensors"
    part_files.save_part(file, "learned", other, model, {})

    def drawn(trained: str | None, **arguments: Any) -> tuple[list[str], bool]:
        row = result("learned:20", **shipped)
        row["reduction"] |= {"trained": trained} if trained else {}
        row["run"] |= {"arguments": arguments}
        page, reader = page_of(row, images=1)
        return [address for address in reader.addresses if address.startswith("data:")], "learned:20 is drawn with" in page

    usual, said = drawn(mark)
    assert not said and len(usual) == 1
    assert drawn(None) == (usual, False)  # older results do not tell
    assert drawn(resolve.parts_fingerprint({"learned": other})) == (usual, True)
    theirs, said = drawn(resolve.parts_fingerprint({"learned": other}), weights=[str(file)])
    assert not said and theirs != usual
    assert drawn(mark, weights=[str(file)]) == (usual, False)  # the file is another now
    for gone in ([str(tmp_path / "gone.safetensors")], [3], "x", [str(tmp_path)[:1] + "\0"]):
        assert drawn(resolve.parts_fingerprint({"learned": other}), weights=gone) == (usual, True)


# --------------------------------------------------------------------------------------------------------------------- command


def arguments(files: list[str], output: Path, **flags: Any) -> argparse.Namespace:
    return argparse.Namespace(
        files=files, output=str(output), **({"title": None, "images": 0, "plots": None, "quiet": False} | flags)
    )


def test_command_reads_folders_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = tmp_path / "results", tmp_path / "report.html"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(result()))
    (folder / "b.json").write_text('{"no": "result"}')
    report.run(arguments([str(folder)], output))
    said = capsys.readouterr()
    assert said.out == f"{output}\n" and "left out" in said.err
    before = output.read_bytes()
    report.run(arguments([str(folder)], output))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results"]
    report.run(arguments([str(folder)], output, title="Another"))
    assert (tmp_path / "report.html.1").read_bytes() == before and b"Another" in output.read_bytes()


def test_plots_are_files_too(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for number, plan in enumerate(["none", "anchor:60", "random:60", "cover@2:56"]):
        (results / f"{number}.json").write_text(
            json.dumps(result(plan, metrics={"acc1": 0.5 + number / 10, "acc1_stderr": 0.01}))
        )
    report.run(arguments([str(results)], tmp_path / "report.html", plots=str(tmp_path / "plots")))
    files = sorted((tmp_path / "plots").iterdir())
    assert [file.name for file in files] == ["1-gflops.png", "1-gflops.svg", "1-time.png", "1-time.svg"]
    assert files[0].read_bytes()[:4] == b"\x89PNG" and "cover@2:56" in files[1].read_text()


def test_rows_of_as_many_tokens_are_sorted_by_quality() -> None:
    rows = [result(plan, metrics={"acc1": value}) for plan, value in (("a:60", 0.2), ("b:60", 0.9), ("none", 0.1))]
    ((_, ordered),) = sections.group_sections([*rows, result("c:98", tokens_out=98, metrics={"acc1": 0.0})])
    assert [row["reduction"]["plan"] for row in ordered] == ["none", "c:98", "b:60", "a:60"]


def test_pictures_are_of_the_images_of_the_run() -> None:
    shown = examples._own_images(result(dataset="embedded", limit=30), 5)
    assert [name for name, _, _ in shown] == ["embedded:3", "embedded:11", "embedded:19", "embedded:27", "embedded:0"]
    other = examples._own_images(result(dataset="embedded-captions", task="zeroshot_retrieval", limit=3), 2)
    assert [name for name, _, _ in other] == ["embedded-captions:0", "embedded-captions:1"]
    assert other[0][1].size == shown[0][1].size and other[0][1].tobytes() != shown[0][1].tobytes()
    page, reader = page_of(result(model="sieve-vit-8", pretrained="scenes-v1", dataset="nothing-there"), images=1)
    assert "No pictures" in page and "img" not in reader.tags


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text("[1]")
    empty = tmp_path / "empty"
    empty.mkdir()
    for files, said in (
        ([str(tmp_path / "absent.json")], "cannot read"),
        ([str(tmp_path / "bad.json")], "is not JSON"),
        ([str(tmp_path / "other.json")], "is not a result of eval"),
        ([str(empty)], "no result in"),
    ):
        with pytest.raises(UserError, match=said):
            report.run(arguments(files, tmp_path / "r.html"))
    with pytest.raises(UserError, match="it is a folder"):
        report.run(arguments([str(empty)], empty))
    with pytest.raises(UserError, match="at most 100"):
        report.build([result()], images=101)
    assert not (tmp_path / "r.html").exists()
