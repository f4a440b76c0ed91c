"""Which methods are one graph: every method of the registry compiled and exported on small towers of five families.

    python benchmarks/export_matrix.py                     # resumable: what is in a file is not measured again
    python benchmarks/export_matrix.py --family CLIP       # one of the families

Several methods share a plan, each at a block of its own; if that fails, each is tried alone. Outputs are compared with those
of eager mode: torch.compile(fullgraph=True) and torch.export, each with one graph for batches of any size. Methods that say
they cannot be in a graph are tried alone on open_clip. On open_clip the graphs are run in ONNX Runtime too; translating them to
ONNX takes ten times as long as the rest. Those that need more than the image are left out. Random weights, float32, one file
for each family.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve import files, provenance
from tokensieve.errors import one_line
from tokensieve.exporting import graph, verify
from tokensieve.exporting.encoders import ImageEncoder
from tokensieve.exporting.limits import OUTSIDE, no_file_reason, no_graph_reason, no_onnx_reason
from tokensieve.methods.registry import Method, get_method, list_methods
from tokensieve.models.registry import open_tower
from tokensieve.plan import Plan
from tokensieve.testing import tiny_models
from tokensieve.training.learned_selector.learner import build_part

SIDE = 64  # pixels: 8 x 8 patches
DEPTH = 7  # blocks; nothing is cut behind the last, where a CLS feature does not change
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "open_clip": lambda: tiny_models.open_clip_model(image_size=SIDE, layers=DEPTH).visual,
    "timm": lambda: tiny_models.timm_model(img_size=SIDE, depth=DEPTH, global_pool="avg"),
    "CLIP": lambda: tiny_models.hf_model("CLIPVision", image_size=SIDE, num_hidden_layers=7),
    "SigLIP": lambda: tiny_models.hf_model("SiglipVision", image_size=SIDE, num_hidden_layers=7),
    "DINOv2": lambda: tiny_models.hf_model("Dinov2", image_size=SIDE, num_hidden_layers=7),
}
THOROUGH = "open_clip"  # where ONNX Runtime is tried, and methods that say they cannot be in a graph
TOGETHER = 6  # methods of a plan
BUDGETS = {"pyramiddrop": ":60%", "atc": ":50%", "sdtps": ""}  # where it is no number of tokens to remove
BATCHES = (2, 5)
RESULTS = Path(__file__).parent / "results"


def plan_of(names: list[str]) -> str:
    """A plan that removes four tokens by each method, each at a block of its own; last those that need earlier blocks."""
    ordered = sorted(names, key=lambda name: get_method(name).layers is not None)
    return " + ".join(f"{name}@{at}{BUDGETS.get(name, ':-4')}" for at, name in enumerate(ordered, DEPTH - len(names)))


def has_module(method: Method) -> bool:
    """It has trained weights, and a tower is all that they are made for."""
    return method.part is not None and "inputs" not in method.needs and "question" not in method.needs


@contextmanager
def planned(family: str, names: list[str]) -> Iterator[tuple[ImageEncoder, tokensieve.Handle]]:
    """A tower with a plan of these methods; trained parts have random weights."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    plan = plan_of(names)
    learned = [get_method(name) for name in names if has_module(get_method(name))]
    parts = {method.name: build_part(method, open_tower(model), [Plan.parse(plan)]).eval() for method in learned}
    with torch.no_grad(), tokensieve.apply(model, plan, weights=parts or None) as handle:
        yield ImageEncoder(model).eval(), handle


def compiled(encoder: nn.Module) -> Callable[[Tensor], Tensor]:
    """The encoder compiled as one graph for batches of any size; another graph is an error."""
    torch._dynamo.reset()
    run: Any = torch.compile(encoder, fullgraph=True, backend="eager")
    first = images(3)
    torch._dynamo.mark_dynamic(first, 0)
    run(first)

    def call(x: Tensor) -> Tensor:
        with torch.compiler.set_stance("fail_on_recompile"):
            out: Tensor = run(x)
        return out

    return call


def exported(encoder: nn.Module) -> Callable[[Tensor], Tensor]:
    """The program of torch.export."""
    module: Any = graph.trace(encoder, images(3)).module()
    return module


def in_onnx(encoder: ImageEncoder) -> Callable[[Tensor], Tensor]:
    """ONNX Runtime on the CPU."""
    run = verify.run_onnx(graph.onnx_file(graph.trace(encoder, images(3)), {}, encoder.outputs))
    return lambda x: run(x)[0]


ENGINES: dict[str, Callable[[ImageEncoder], Callable[[Tensor], Tensor]]] = {
    "compile": compiled,
    "export": exported,
    "onnx": in_onnx,
}
REASONS = {"compile": no_graph_reason, "export": no_file_reason, "onnx": no_onnx_reason}


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(batch))


def attempt(family: str, names: list[str], engine: str) -> dict[str, Any]:
    """What came of it: the largest difference from eager mode, as a share of the largest number, or the error."""
    row: dict[str, Any] = {"methods": names, "engine": engine}
    try:
        with planned(family, names) as (encoder, handle):
            run, differences = ENGINES[engine](encoder), []
            for batch in BATCHES:
                with handle.call(samples=torch.arange(batch)):  # a graph counts the images of each batch from 0
                    wanted = encoder(images(batch))
                differences.append(float((run(images(batch)) - wanted).abs().max() / wanted.abs().max()))
            ledger = [[line.layer, line.tokens_in, line.tokens_out] for line in handle.ledger]
        return row | {"difference": max(differences), "ledger": ledger, "error": ""}
    except Exception as error:  # a graph that cannot be made raises any kind
        return row | {"error": f"{type(error).__name__}: {one_line(error, 300)}"}


def measure(family: str) -> None:
    """Measures what is not in the file of a family."""
    path = RESULTS / f"export_matrix_{family}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(tuple(row["methods"]), row["engine"]): row for row in rows}

    def once(names: list[str], engine: str) -> str:
        key = (tuple(names), engine)
        if key not in known:
            row = known[key] = attempt(family, names, engine)
            about = {"family": family, "rows": list(known.values()), "versions": provenance.versions()}
            files.write_json(path, about)
            print(family, engine, *names, row["error"] or f"{row['difference']:.0e}", flush=True)
        return str(known[key]["error"])

    methods = [m for m in list_methods() if not m.on_image and m.name != "none" and not OUTSIDE.keys() & set(m.needs)]
    for engine, reason in REASONS.items():
        if engine == "onnx" and family != THOROUGH:
            continue
        able = [method.name for method in methods if not reason(method)]
        groups = [able[start : start + TOGETHER] for start in range(0, len(able), TOGETHER)]
        failed = [name for names in groups if once(names, engine) for name in names]
        refused = [method.name for method in methods if reason(method)] if family == THOROUGH and engine != "onnx" else []
        for name in [*failed, *refused]:
            once([name], engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for family in args.family:
        measure(family)


if __name__ == "__main__":
    main()
