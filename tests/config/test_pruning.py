"""Files of two-stage VLM pruning: counts of tokens by layers and ratios, and what contradicts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.original_pruning import ORIGINAL
from tests.support.paths import ROOT
from tokensieve import config, training
from tokensieve.cli import main
from tokensieve.config.model_shape import model_shape
from tokensieve.config.pruning import Pruning, PruningTraining
from tokensieve.config.pruning_steps import DeepLearning

SEVEN = (8, 12, 16, 20, 24, 28, 31)


@pytest.mark.parametrize("layers", [(5, 15, 25), (20, 25, 31), SEVEN, (9,)])
def test_layers_alone_have_counts_that_fall_by_one_ratio(layers):
    counts = Pruning(pruning_layers=layers).pruned(576)
    assert len(counts) == len(layers) and counts[-1] == 100
    before = (288, *counts)
    ratios = [b / a for a, b in itertools.pairwise(before)]
    assert max(ratios) - min(ratios) < 0.01  # rounding to whole tokens
    assert not Pruning(pruning_layers=layers).check_counts(576, 32)


def test_the_last_count_follows_the_merger_or_is_given():
    assert Pruning(pruning_layers=(5, 15, 25), merge_ratio=0.4).pruned(576)[-1] == 80  # the same share of 231
    assert Pruning(pruning_layers=(5, 15, 25), merger_type="none").pruned(576)[-1] == 100
    for last in (50, [50], "50"):
        assert Pruning.model_validate({"pruning_layers": SEVEN, "target_prune_tokens": last}).pruned(576)[-1] == 50
    assert Pruning(pruning_layers=(1, 2), target_prune_tokens=(0.25,)).pruned(576) == (144, 72)


def test_shares_are_of_the_tokens_that_arrive_rounded_up_as_in_plans():
    made = Pruning(pruning_layers=(1, 2, 3), target_prune_tokens=(0.5, 0.5, 0.1))
    assert made.pruned(49) == (13, 7, 1) and not made.check_counts(49, 4)  # 25 arrive
    mixed = Pruning(pruning_layers=(1, 2), target_prune_tokens=(20, 0.5))
    assert mixed.pruned(49) == (20, 10) and mixed.target_prune_tokens == (20, 0.5)


def test_counts_stay_apart_where_few_tokens_are_left():
    layers = tuple(range(8))
    assert Pruning(pruning_layers=layers, target_merge_tokens=9).pruned(49) == (8, 7, 6, 5, 4, 3, 2, 1)
    (problem,) = Pruning(pruning_layers=layers, target_merge_tokens=8).check_counts(49, 8)
    assert problem == "pruning_layers: 8 tokens are too few for 8 layers that prune; give fewer layers"


def test_a_share_that_prunes_nothing_is_told_with_its_layer():
    (problem,) = Pruning(pruning_layers=(1, 3), target_prune_tokens=(2, 0.9)).check_counts(49, 4)
    assert problem.startswith("target_prune_tokens: 2 are all the tokens that arrive there (layer 3)")
    (problem,) = Pruning(pruning_layers=(1, 3), target_prune_tokens=(0.1, 9)).check_counts(49, 4)
    assert problem == "target_prune_tokens: 9 are more than the 3 tokens that arrive there (layer 3)"


@pytest.mark.parametrize("bad", [[2.5, 1], [0, 1], [-3], [True, 1], ["many"]])
def test_neither_counts_nor_shares(bad):
    with pytest.raises(ValidationError):
        Pruning.model_validate({"pruning_layers": [1, 2], "target_prune_tokens": bad})


@pytest.mark.parametrize("value, kept", [(1, 1), (5, 5), ("all", "all")])
def test_how_many_checkpoints_are_kept_does_not_decide_the_result(value, kept):
    some, others = (
        PruningTraining.model_validate(
            {"dataset_settings": {"name": "embedded"}, "trainer_settings": {"dl_settings": {"keep_checkpoints": n}}}
        )
        for n in (value, 2)
    )
    assert some.keep_checkpoints == kept and some.recipe() == others.recipe()


@pytest.mark.parametrize("bad", [0, -1, "some", True, 1.5, None])
def test_no_number_of_checkpoints(bad):
    with pytest.raises(ValidationError, match=r"a number of checkpoints, at least 1, or all|not numbers"):
        DeepLearning.model_validate({"keep_checkpoints": bad})


SHIPPED = (ROOT / "configs/vision_token_pruning.yaml").read_text()


def validated(tmp_path, capsys, **changes):
    """What `tokensieve validate` prints for the file that ships, with other values of some keys (None: the line is gone)."""
    path, text = tmp_path / "file.yaml", SHIPPED
    for key, value in changes.items():
        line, *_ = [line for line in text.splitlines() if line.strip().startswith(f"{key}:")]
        text = text.replace(line + "\n", "" if value is None else f"  {key}: {value}\n")
    path.write_text(text)
    main(["validate", str(path)])
    printed = capsys.readouterr().out.splitlines()
    numbers = {line.split(":")[0].strip(): n for n, line in enumerate(text.splitlines(), 1)}
    return [line.removeprefix(f"{path}:") for line in printed if ": no f" not in line], numbers


def test_a_merge_ratio_alone_is_enough(tmp_path, capsys):
    """Of a model that is not on this disk: it is known to show 576 tokens to 32 layers."""
    assert validated(tmp_path, capsys, merge_ratio=0.4, target_merge_tokens=None)[0] == []
    assert Pruning(merge_ratio=0.4).merged(576) == 231
    for ratio, target in ((0.6, 346), (0.4, 230)):  # the pairs of the original document
        assert validated(tmp_path, capsys, merge_ratio=ratio, target_merge_tokens=target)[0] == []


def test_a_ratio_and_a_count_that_contradict_are_two_lines(tmp_path, capsys):
    printed, numbers = validated(tmp_path, capsys, merge_ratio=0.4)
    first, second = numbers["merge_ratio"], numbers["target_merge_tokens"]
    assert printed == [
        f"{first}: method_settings.merge_ratio: 0.4 keeps 231 of 576 tokens and contradicts target_merge_tokens (288); "
        "remove one of the two lines",
        f"{second}: method_settings.target_merge_tokens: 288 contradicts merge_ratio (0.4: 231 of 576 tokens); "
        "remove one of the two lines",
    ]


def test_counts_are_checked_without_the_model(tmp_path, capsys):
    printed, numbers = validated(tmp_path, capsys, name="someone/unknown", target_prune_tokens="[300, 150, 100]")
    at = numbers["target_prune_tokens"]
    assert printed == [
        f"{at}: method_settings.target_prune_tokens: 300 are more than the 288 tokens that arrive there (layer 10)"
    ]
    printed, numbers = validated(tmp_path, capsys, pruning_layers="[10, 20, 32]")
    assert printed[0].startswith(
        f"{numbers['pruning_layers']}: method_settings.pruning_layers: [32] beyond the language model's 32"
    )


def test_a_model_that_was_downloaded_is_known_by_its_configuration(tmp_path):
    folder = tmp_path / "models--someone--llava"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "snapshots/abc/config.json").write_text('{"image_seq_length": 49, "text_config": {"num_hidden_layers": 4}}')
    assert model_shape("someone/llava", str(tmp_path)) == (49, 4)
    (tmp_path / "config.json").write_text('{"model_type": "llava_next", "image_seq_length": 576, "text_config": {}}')
    assert model_shape(str(tmp_path)) is None  # its number of tokens varies
    assert model_shape("someone/else", str(tmp_path)) is None and model_shape("no such folder/at/all") is None


def test_the_original_file_lacks_its_data_and_is_told_what_to_paste(tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text(ORIGINAL)
    assert main(["train", str(path), "--output", str(tmp_path / "out")]) == 2
    first, _, block = capsys.readouterr().err.partition("\n\n")
    assert first == (
        f"tokensieve: error: {path}: line 1: dataset_settings: missing; "
        "paste the lines below and adapt them, or use --data embedded"
    )
    main(["validate", str(path)])
    assert capsys.readouterr().out.endswith(block)
    path.write_text(ORIGINAL + block)
    made = config.load(path)
    assert made.dataset_settings.name == "vqav2" and made.dataset_settings.val.limit == 2000
    assert [key for key, _ in made.check_files()] == [
        f"dataset_settings.{split}.{key}" for split in ("train", "val") for key in ("questions", "annotations", "images")
    ]  # and nothing else is wrong


def test_the_original_file_takes_the_embedded_questions(tmp_path, monkeypatch):
    path, got = tmp_path / "file.yaml", []
    path.write_text(ORIGINAL)
    monkeypatch.setattr(training, "run", lambda file, overrides, **_: got.append(config.load(file, overrides)) or tmp_path)
    assert main(["train", str(path), "--data", "embedded", "--quiet"]) == 0
    assert got[0].dataset_settings.name == "embedded" and not list(got[0].check_files())
    assert got[0].method_settings.pruned(576) == (202, 142, 100)
    path.write_text(SHIPPED)
    main(["train", str(path), "--data", "embedded", "--quiet"])
    assert got[1].dataset_settings.name == "embedded" and got[1].dataset_settings.train.questions is None


def test_shares_for_models_whose_numbers_of_tokens_vary():
    layers = (1, 2, 3)
    assert Pruning(pruning_layers=layers, target_prune_tokens=(0.5, 0.6, 0.7)).shares() == (0.5, 0.6, 0.7)
    for given, total in (((0.125,), 0.125), (None, 100 / 576)):
        shares = Pruning(pruning_layers=layers, target_prune_tokens=given).shares()
        assert len(set(shares)) == 1 and np.prod(shares) == pytest.approx(total)
    assert Pruning(pruning_layers=layers, target_prune_tokens=(30, 0.6, 0.7)).shares() is None
