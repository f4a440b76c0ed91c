"""Answers questions with the parts that `vlm.sh` trained and with controls at the same counts, and compares them question by
question. Tower outputs are shared by all plans (the cache of the trainings).

python benchmarks/vlm_accuracy.py FOLDER --split test --output benchmarks/results/trained_vlm.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.data import vqa
from tokensieve.data.vqa_items import VqaItem
from tokensieve.files import write_json
from tokensieve.methods.cross import Heads
from tokensieve.methods.merger import Merger
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.vlm import open_vlm
from tokensieve.tasks.vqa import answering
from tokensieve.tasks.vqa.scores import soft_score
from tokensieve.training.pruning.tower_cache import TowerCache

MERGED = ((79, 48, 28, 14), (40, 24, 12, 6), (24, 12, 6, 3))
BUDGETS = dict(zip(("shipped", "tight", "tighter"), MERGED, strict=True))
SHIP = "the parts that ship"
PARTS = "merger@out + cross@llm.3,6,9(rest=merge)"
WIDER = "merger@out:79 + cross@llm.3:48(rest=merge) + cross@llm.6:28(rest=merge) + cross@llm.9:14(rest=merge)"
# The variants of vlm_variants.py, the budget of each, and the plan if it is not the one of the training.
TRAINED = (
    ("shipped", "shipped", None),
    ("tight", "shipped", WIDER),
    ("tight", "tight", None),
    ("tighter", "tighter", None),
    ("tighter_hard", "tighter", None),
    ("tighter_adversarial", "tighter", None),
    ("original", "original", None),
)


def controls(width: int) -> list[tuple[str, str, str, dict[str, nn.Module]]]:
    """Budget, title, plan and parts of everything that is not trained."""
    rows: list[tuple[str, str, str, dict[str, nn.Module]]] = [
        ("", "full model", "none", {}),
        ("shipped", SHIP, PARTS, {}),
    ]
    for name, (merged, *left) in BUDGETS.items():
        torch.manual_seed(0)
        top = Merger(width, width, "simple", 128, merged, 0.1).eval()
        start = {
            "merger": Merger(width, width, "simple", 128, merged, 0.1, choice="spread").eval(),
            "cross": Heads(width, (3, 6, 9), 64, 4, left, merged, choice="spread").eval(),
        }
        drawn = " + ".join(f"random@llm.{3 * i}:{n}(rest=merge)" for i, n in enumerate(left, 1))
        covered = " + ".join(f"cover@llm.{3 * i}:{n}" for i, n in enumerate(left, 1))
        rows += [
            (name, "untrained merger, random pruning, rest merged", f"merger@out + {drawn}", {"merger": top}),
            (name, "`cover`", f"cover@out:{merged} + {covered}", {}),
            (name, "the parts before training", PARTS, start),
        ]
    torch.manual_seed(0)
    merger = Merger(width, width, "simple", 128, 98, 0.1).eval()
    drawn = " + ".join(f"random@llm.{layer}:{n}" for layer, n in ((4, 68), (7, 51), (11, 34)))
    return [*rows, ("original", "untrained merger, random pruning, rest dropped", f"merger@out + {drawn}", {"merger": merger})]


def main(folder: Path, split: str, limit: int | None, output: Path, only_trained: bool) -> None:
    loaded = load_vlm.load()
    opened = open_vlm(loaded.model)
    assert opened is not None
    cache = TowerCache(folder / "tower_cache", opened.tower, loaded.fingerprint)
    data = vqa.load("embedded", split=split, limit=limit)

    def ask(plan: str, weights: Any) -> Tensor:
        """The score of every question."""
        references: list[list[str]] = []

        def items() -> Iterator[VqaItem]:
            for i in range(len(data)):
                item = data[i]
                references.append(item.answers)
                yield item

        with cache, tokensieve.apply(loaded.model, plan, weights=weights or None):
            answers = answering.answer_questions(loaded.model, loaded.processor, items(), 50, 4)
        return torch.tensor([soft_score(*pair) for pair in zip(answers, references, strict=True)], dtype=torch.float64)

    rows: list[dict[str, Any]] = []
    scores: dict[tuple[str, str], list[Tensor]] = {}

    def add(budget: str, title: str, seed: int | None, plan: str, score: Tensor, **more: Any) -> None:
        scores.setdefault((budget, title), []).append(score)
        numbers = {"accuracy": float(score.mean()), "stderr": float(score.std() / len(score) ** 0.5)}
        rows.append({"budget": budget, "title": title, "seed": seed, "plan": plan} | numbers | more)
        print(
            f"{budget:9} {title} {'' if seed is None else seed}: {numbers['accuracy']:.4f} +- {numbers['stderr']:.4f}",
            flush=True,
        )

    for budget, title, plan, parts in controls(opened.decoder.width):
        if not only_trained or title == SHIP:
            add(budget, title, None, plan, ask(plan, parts))
    for variant, budget, other_plan in TRAINED:
        for run in sorted(folder.glob(f"{variant}-?")):
            if (run / "card.json").exists():
                plan = other_plan or json.loads((run / "card.json").read_text())["plan"]
                result = json.loads((run / "result.json").read_text())
                names = () if other_plan else ("llm_flops_cut", "tokens_cut_over_layers", "tokens_cut_at_end")
                title = f"trained: {variant}" + (", used with these counts" if other_plan else "")
                costs = {name: result[name] for name in names}
                add(budget, title, int(run.name[-1]), plan, ask(plan, str(run)), **costs)
    compared = []
    for (budget, title), mine in scores.items():
        if title.startswith("trained"):
            for (other, control), theirs in scores.items():
                if control.startswith("trained") or other not in (budget, ""):
                    continue
                gap = torch.stack(mine).mean(0) - theirs[0]  # of each question, mean over the seeds
                numbers = {"difference": float(gap.mean()), "stderr": float(gap.std() / len(gap) ** 0.5)}
                compared.append({"budget": budget, "title": title, "seeds": len(mine), "control": control} | numbers)
    write_json(output, {"split": split, "questions": len(data), "rows": rows, "compared": compared})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only_trained", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    main(given.folder, given.split, given.limit, given.output, given.only_trained)
