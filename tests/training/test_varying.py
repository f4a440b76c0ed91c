"""Heads alone are trained for models whose images have different numbers of vision tokens, with shares instead of counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tokensieve
from tests.support.pruning_worker import learner
from tests.support.varying_vlms import save_varying
from tests.support.vqa_files import jsonl
from tokensieve import UserError
from tokensieve.tasks.vqa.answering import ask
from tokensieve.training.pruning import export

HEADS = {
    "merger_type": "none",
    "pruning_layers": [1, 3],
    "target_prune_tokens": [0.5, 0.4],
    "hard_share": 1.0,
    "prune_rest": "merge",
}


@pytest.fixture(scope="module", params=["llava_next", "qwen2_vl"])
def varying(request, tmp_path_factory):
    return save_varying(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Questions about images of two sizes."""
    root = tmp_path_factory.mktemp("questions")
    file = jsonl(root)
    from PIL import Image

    image = Image.open(root / "a/1.png").convert("RGB")
    image.resize((40, 18)).save(root / "a/1.png")
    image.resize((46, 46)).save(root / "a/0.png")
    files = {"questions": str(file)}
    return {"name": "jsonl", "train": files, "val": files}


def test_heads_learn_and_are_used_at_shares(varying, questions, tmp_path):
    made = learner(
        varying, how={"batch_size": 3, "epochs": 3}, method=HEADS | {"max_vision_tokens": 20}, dataset_settings=questions
    )
    assert made.vision_tokens is None and str(made.plan) == (
        "cover@llm.0:20 + cross@llm.1:50%(rest=merge) + cross@llm.3:40%(rest=merge)"
    )
    batch, _ = next(made._loader(0))
    counts = (batch.inputs["input_ids"] == made.model.config.image_token_id).sum(1)
    assert len(set(counts.tolist())) > 1, "images of one size show nothing"
    losses = made.step(0)
    assert all(np.isfinite(value) for value in losses.values())
    for name, parameter in made.parts["cross"].named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    measured = made.evaluate(1)
    assert "accuracy_soft" not in measured and 0 <= measured["accuracy_hard"] <= 1 and np.isfinite(measured["loss"])
    entering = min(20, measured["avg_original_tokens"])
    first = int(np.ceil(entering / 2))
    left = (measured["tokens_after_layer_1"], measured["tokens_after_layer_3"])
    assert left == (first, int(np.ceil(first * 0.4)))
    for name, content in export.part_files(made, 1).items():
        (tmp_path / name).write_bytes(content)
    item = made.val_data[0]
    with tokensieve.apply(made.model, str(made.plan), weights=tmp_path) as handle:
        made.model.generate(**ask(made.processor, [item]), max_new_tokens=2)
    assert handle.ledger[-1].tokens_out == left[1]


def test_what_needs_a_fixed_number_of_tokens_is_told_at_once(varying, questions):
    with pytest.raises(UserError) as told:
        learner(varying, method={"pruning_layers": [1, 9], "hard_share": 0.5}, dataset_settings=questions)
    for words in (
        "[9] beyond the language model's 4 layers",
        "merger_type: question_aware needs a fixed number of vision tokens; write none",
        "target_prune_tokens: counts need a fixed number of vision tokens; give shares such as 0.7",
        "hard_share: 0.5 trains soft masks, which need a fixed number of tokens; write 1.0",
    ):
        assert words in str(told.value)


def test_the_question_of_each_size_is_whole(varying, questions):
    """Padding and different images change neither the words nor the answers of a batch."""
    made = learner(varying, how={"batch_size": 3}, method=HEADS, dataset_settings=questions)
    items = [made.val_data[i] for i in range(3)]
    together = made.collate(items, torch.arange(3))
    for b, item in enumerate(items):
        alone = made.collate([item], torch.arange(1))
        for mask in ("question", "words"):
            row, single = getattr(together, mask)[b], getattr(alone, mask)[0]
            assert torch.equal(together.inputs["input_ids"][b][row], alone.inputs["input_ids"][0][single])
