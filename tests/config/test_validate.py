"""`tokensieve validate`: every mistake of a file at once, each with its line, its key, and what is near."""

import pytest

from tests.support.paths import ROOT
from tokensieve import config
from tokensieve.cli import main
from tokensieve.config import document
from tokensieve.errors import UserError

CONFIGS = ROOT / "configs"

GOOD = """\
task: clip
output: out
optimizer:
  lr: 1e-3
  warmup: 2
phases:
  - {steps: 3, batch: 4}
  - steps: 3
    canvas: 56
"""

PRUNING = """\
dataset_settings: {name: embedded}
backbone_settings: {name: somewhere/on-the-hub}
trainer_settings:
  dl_settings:
    optimizers:
      token_merger: {lr: "2e-05"}
method_settings:
  merger_type: simple
  pruning_layers: [2, 5]
  target_prune_tokens: [60, 40]
"""


def told(tmp_path, text):
    """The lines and messages of a file's mistakes."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    try:
        config.load(path)
    except document.ConfigErrors as mistakes:
        assert "\n" not in str(mistakes)
        return [line.removeprefix(f"{path}:") for line in mistakes.lines]
    return []


def test_all_at_once_by_line(tmp_path, capsys):
    wrong = GOOD.replace("output: out", "ouput: out").replace("lr: 1e-3", "lr: fast").replace("warmup: 2", "warmpu: 2")
    wrong = wrong.replace("batch: 4", "batch: true").replace("canvas: 56", "canvas: 50\n    canvas: 56\ntreads: 2\nzebra: 1")
    path = tmp_path / "my file.yaml"
    path.write_text(wrong)
    assert main(["validate", str(path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{path}:").split(": ")[:2] for line in lines] == [
        ["1", "output"],
        ["2", "ouput"],
        ["4", "optimizer.lr"],
        ["5", "optimizer.warmpu"],
        ["7", "phases.0.batch"],
        ["10", "phases.1.canvas"],
        ["11", "treads"],
        ["12", "zebra"],
    ]
    for line, words in (
        (0, "missing"),
        (1, "Did you mean 'output'?"),
        (2, "number"),
        (3, "Did you mean 'warmup'?"),
        (4, "True"),
    ):
        assert words in lines[line]
    assert "first in line 9" in lines[5] and "Did you mean 'threads'?" in lines[6] and "allowed are" in lines[7]


def test_good_files_are_summed_up_and_bad_ones_do_not_hide_them(tmp_path, capsys):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD + "search_settings: {n_trials: 3, space: {optimizer.lr: {low: 1e-4, high: 1e-2}}}\n")
    bad.write_text("task: clp\n")
    assert main(["validate", str(bad), str(good), str(tmp_path / "none.yaml")]) == 2
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{bad}:1: task: 'clp'") and "Did you mean 'clip'?" in first
    assert second == f"{good}: ok: a CLIP learns scenes and their captions; 3 trials over optimizer.lr (not turned on)"
    assert "no file" in third
    assert main(["validate", str(good)]) == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_the_files_that_ship_are_valid(path):
    config.load(path)


def test_train_tells_the_same(tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text(GOOD.replace("steps: 3\n", "stpes: 3\n"))
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "line 8: phases.1.stpes: unknown key" in said and "Did you mean 'steps'?" in said


@pytest.mark.parametrize(
    "was, now, line",
    [
        ("task: clip", "task: [", "3: not valid YAML"),
        ("  lr: 1e-3", "  lr: 1e-3\n lr: 2", "5: not valid YAML"),
        ("lr: 1e-3", "lr: -1", "4: optimizer.lr: input should be greater than 0 (got -1)"),
        ("warmup: 2", "warmup: 2000", "5: optimizer.warmup: 2000 is not less than the 6 steps"),
        ("canvas: 56", "canvas: 56\n    several: 0.5", "8: phases.1: several > 0 needs canvas: 112"),
        ("task: clip", "task: clip\nmodel_type: timm", "2: model_type: unknown key"),
        ("  warmup: 2", "  warmup: 2\n  steps: 3", "6: optimizer.steps: unknown key; allowed are lr,"),
        ("steps: 3, batch: 4", "steps: 3, batch: 4.5", "7: phases.0.batch: input should be a valid integer"),
        ("task: clip", "task: clip\nmanager_settings: {mode: optna}", "2: manager_settings.mode: 'optna' is not one of"),
        (
            "task: clip",
            "task: clip\nmanager_settings: {storage: study.db}",
            "2: manager_settings.storage: 'study.db' is not a URL of a database",
        ),
        (
            "task: clip",
            "task: clip\nmanager_settings:\n  available_gpus: [0]\n  gpus_per_subtask: 2",
            "4: manager_settings.gpus_per_subtask: 2 are more than the 1",
        ),
        (
            "task: clip",
            "task: clip\nmanager_settings:\n  available_gpus: [0, 1]\n  gpus_per_subtask: 2",
            "4: manager_settings.gpus_per_subtask: this is trained by one process",
        ),
    ],
)
def test_a_mistake_has_its_line(tmp_path, was, now, line):
    (found,) = told(tmp_path, GOOD.replace(was, now, 1))
    assert found.startswith(line)


def test_what_misspelt_keys_hide_is_told_too(tmp_path):
    """With the name that the file has."""
    found = told(tmp_path, GOOD.replace("warmup: 2", "warmpu: 2000"))
    assert len(found) == 2 and any("5: optimizer.warmpu: 2000 is not less than the 6 steps" in one for one in found)
    assert len(told(tmp_path, GOOD.replace("warmup: 2", "warmpu: 2"))) == 1  # and nothing else is


def test_an_unknown_key_is_not_checked_as_the_one_that_it_resembles(tmp_path):
    (found,) = told(tmp_path, GOOD.replace("  lr: 1e-3", "  lr: 1e-3\n  clipp: 'yes'"))
    assert found.startswith("5: optimizer.clipp: unknown key")
    (found,) = told(tmp_path, GOOD.replace("task: clip", "task: clip\nmodels: [a, b]"))
    assert found.startswith("2: models: unknown key")


def test_a_default_that_does_not_fit_is_told_as_one(tmp_path):
    (found,) = told(tmp_path, GOOD.replace("  warmup: 2\n", ""))
    assert found.startswith("3: optimizer.warmup: 100 is not less than the 6 steps")
    assert found.endswith("(this is the default: the file has no such key)")


def test_numbers_in_quotes_are_numbers(tmp_path):
    assert told(tmp_path, GOOD.replace("1e-3", "'1e-3'")) == []
    path = tmp_path / "pruning.yaml"
    path.write_text(PRUNING)
    assert config.load(path).trainer_settings.dl_settings.optimizers.token_merger.lr == 2e-5


def test_anchors_and_merge_keys_are_no_duplicates(tmp_path):
    text = GOOD.replace(
        "  - {steps: 3, batch: 4}\n  - steps: 3", "  - &first {steps: 3, batch: 4}\n  - <<: *first\n    steps: 3"
    )
    assert told(tmp_path, text) == []
    assert told(tmp_path, "task: clip\nx: &x [*x]\n")


@pytest.mark.parametrize(
    "was, now, line",
    [
        ("[2, 5]", "[5, 2]", "9: method_settings.pruning_layers: [5, 2] do not ascend"),
        ("[60, 40]", "[60, 50, 40]", "10: method_settings.target_prune_tokens: 3 counts for 2 pruning layers"),
        ("merger_type: simple", "merger_type: smple", "8: method_settings.merger_type: 'smple' is not one of none, simple"),
        ("method_settings:", "method_setings:", "7: method_setings: unknown key"),
        ("  merger_type: simple", "  batch_size: 3", "8: method_settings.batch_size: unknown key"),
    ],
)
def test_a_pruning_is_known_by_its_sections(tmp_path, was, now, line):
    assert told(tmp_path, PRUNING) == []
    (found,) = told(tmp_path, PRUNING.replace(was, now))
    assert found.startswith(line)


def test_a_key_in_the_wrong_section_is_sent_home(tmp_path):
    (found,) = told(tmp_path, PRUNING.replace("  merger_type: simple", "  batch_size: 3"))
    assert found.endswith("It belongs to trainer_settings.dl_settings.batch_size.")


def test_several_mistakes_of_one_section_are_several(tmp_path):
    found = told(tmp_path, PRUNING.replace("[2, 5]", "[5, 2, 7]"))
    assert [one.split(": ")[1] for one in found] == ["method_settings.pruning_layers", "method_settings.target_prune_tokens"]


def test_what_is_not_there_is_told_with_its_line_before_anything_starts(tmp_path, capsys):
    path, model = tmp_path / "file.yaml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"image_seq_length": 49, "text_config": {"num_hidden_layers": 4}}')
    data = "dataset_settings:\n  name: jsonl\n  train: {questions: nowhere.jsonl}\n  val:\n    questions: nowhere.jsonl"
    path.write_text(PRUNING.replace("dataset_settings: {name: embedded}", data).replace("somewhere/on-the-hub", str(model)))
    assert main(["validate", str(path)]) == 2
    lines = [line.removeprefix(f"{path}:") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "3: dataset_settings.train.questions: no file 'nowhere.jsonl'" and lines[1].startswith("5: ")
    assert lines[2].startswith("13: method_settings.pruning_layers: [5] beyond the language model's 4 layers")
    assert lines[3].startswith("14: method_settings.target_prune_tokens: 60 are more than the 25 tokens")
    assert main(["train", str(path), "--output", str(tmp_path / "out")]) == 2
    assert "line 3: dataset_settings.train.questions: no file" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_either_switch_turns_a_search_on(tmp_path):
    path = tmp_path / "file.yaml"
    for text, searches in (("", False), ("manager_settings: {mode: optuna}", True), ("search_settings: {enable: true}", True)):
        space = "space: {optimizer.lr: {low: 1e-4, high: 1e-2}}"
        if "enable" in text:
            text = text.replace("}", f", {space}}}")
        else:
            text += f"\nsearch_settings: {{{space}}}"
        path.write_text(GOOD + text)
        assert config.load(path).searches is searches


@pytest.mark.parametrize("switch", ["manager_settings: {mode: optuna}", "search_settings: {enable: true}"])
def test_a_search_for_nothing_is_told_with_a_key_of_the_file(tmp_path, switch):
    (found,) = told(tmp_path, GOOD + switch)
    assert "search_settings.space: names nothing to search; for example space: {optimizer.lr: " in found
    assert told(tmp_path, PRUNING + switch) == []  # it has a space by default


def test_what_bad_values_hide_is_told_too_and_nothing_that_only_their_absence_makes(tmp_path):
    bad = PRUNING.replace("[2, 5]", "[6, 3, 9]").replace("[60, 40]", "[10, 20, 30]") + "  temperature: abc\n"
    keys = [one.split(": ")[1].removeprefix("method_settings.") for one in told(tmp_path, bad)]
    assert keys == ["pruning_layers", "target_prune_tokens", "temperature"]
    assert len(told(tmp_path, PRUNING.replace("[2, 5]", "[2, five]"))) == 1  # not: 2 counts for the default's 3 layers
    assert len(told(tmp_path, PRUNING + "  temperature: abc\n  temperature_min: 2\n")) == 1
    files = "{name: vqav2, train: {questions: a}, val: {images: b, split: test}}"
    lines = told(tmp_path, PRUNING.replace("{name: embedded}", files))
    assert [line.split(": ")[1] for line in lines] == [f"dataset_settings.{key}" for key in ("train", "val", "val.split")]


@pytest.mark.parametrize(
    "was, now, line",
    [
        (
            "{name: embedded}",
            "{name: embedded, val: {split: test}}",
            "1: dataset_settings.val.split: test is reserved for the final results",
        ),
        (
            "dl_settings:",
            "dl_settings:\n    max_steps: 9\n    warmup_steps: 9",
            "6: trainer_settings.dl_settings.warmup_steps: 9 is",
        ),
        ("type: simple", "type: question_aware\n  merger_hidden: 30", "9: method_settings.merger_hidden: 30 cannot be divided"),
        ("[60, 40]", "[60, 60]", "10: method_settings.target_prune_tokens: [60, 60] do not descend"),
    ],
)
def test_a_pruning_that_cannot_be(tmp_path, was, now, line):
    (found,) = told(tmp_path, PRUNING.replace(was, now))
    assert found.startswith(line)


def test_no_without_quotes_is_a_word(tmp_path):
    path = tmp_path / "pruning.yaml"
    path.write_text(PRUNING.replace("dl_settings:", "dl_settings:\n    mixed_precision: no"))
    assert config.load(path).trainer_settings.dl_settings.mixed_precision == "no"


def test_a_file_without_a_task(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("output: x\n")
    with pytest.raises(UserError, match=r"task: missing; one of captions, clip, .*; or write method_settings, or MODEL"):
        config.load(path)


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ("task: clip", "task: [clip]", "1: task: ['clip'] is not one of captions"),
        ("task: clip", "task: {a: 1}", "1: task: {'a': 1} is not one of captions"),
        ("task: clip", "task: clip\nseed: \0", "2: not valid YAML (the character U+0000 is not allowed)"),
        ("task: clip", "task: clip\nseed: " + "[" * 5000, "2: more than 20 sections and lists are nested here"),
        ("output: out", "output: !!timestamp x", "2: output: the tag !!timestamp is not allowed"),
        ("output: out", 'output: "a\\nb"', "2: output: the character U+000A is not allowed here"),
        ("output: out", 'output: "a\\0b"', "2: output: the character U+0000 is not allowed"),
        ("output: out", "output: " + "x" * 5000, "2: output: a text of 5,000 letters"),
        ("output: out", "output: ''", "2: output: give a path"),
        ("lr: 1e-3", "lr: !!int ''", "4: optimizer.lr: '' is no value of the tag !!int"),
        ("lr: 1e-3", "lr: 1e308", "4: optimizer.lr: input should be less than or equal to 1000 (got 1e+308)"),
        ("lr: 1e-3", "lr: '1e400'", "4: optimizer.lr: input should be a finite number (got '1e400')"),
        ("lr: 1e-3", "lr: '.nan'", "4: optimizer.lr: input should be a valid number"),
        ("lr: 1e-3", "lr: .nan", "4: optimizer.lr: .nan is not a finite number"),
        ("steps: 3\n", f"steps: {10**30}\n", "8: phases.1.steps: input should be less than or equal to 1000000000"),
        ("steps: 3\n", f"steps: {'9' * 100_000}\n", "8: phases.1.steps: a number of 100,000 letters"),
        (
            "batch: 4",
            f"batch: {2**63}",
            "7: phases.0.batch: input should be less than or equal to 1000000 (got 9223372036854775808)",
        ),
        ("task: clip", "task: clip\n1: x", "2: 1: unknown key"),
        ("task: clip", "task: clip\n? [a]\n: x", "2: a list or a section cannot be a key"),
        ("task: clip", "task: clip\nmodel: 2024", "2: model: input should be a valid string (got 2024); write it in quotes"),
        ("  lr: 1e-3\n  warmup: 2\n", "  - 1\n", "3: optimizer: expected keys and values (got [1])"),
        ("task: clip", f"task: clip\n{'k' * 300}: 1", "2: a key of 300 letters; at most 200 are allowed"),
    ],
    ids=range(22),
)
def test_nonsense_is_one_short_line(tmp_path, was, now, line):
    (found,) = told(tmp_path, GOOD.replace(was, now, 1))
    assert found.startswith(line) and len(found) < 400 and found.isprintable()


@pytest.mark.parametrize(
    "values", ["{low: -.inf, high: .inf}", "{low: '-inf', high: 'inf'}", "{low: 1e-300, high: 1e300}", "{low: x, high: 2}"]
)
@pytest.mark.parametrize("key", ["optimizer.lr", "optimizer.warmup"])
def test_a_range_without_ends_is_told(tmp_path, key, values):
    found = told(tmp_path, GOOD + f"search_settings: {{space: {{{key}: {values}}}}}\n")
    assert found and all(one.startswith(f"10: search_settings.space.{key}") for one in found)
    assert told(tmp_path, GOOD + "search_settings: {space: {optimizer.warmup: {low: '0.5', high: 2}}}")  # text, but not whole
    (found,) = told(tmp_path, GOOD + "search_settings: {space: {optimizer.lr: {low: 0, high: 1, step: 1e-300}}}")
    assert found.startswith("10: search_settings.space.optimizer.lr.step: 1e-300 makes more than 1e+09 values")


def test_an_alias_bomb_is_refused_at_once(tmp_path):
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )
    (found,) = told(tmp_path, GOOD + bomb)
    assert "more than 10,000 keys and values, with all aliases written out" in found


def test_many_errors_are_counted(tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text(GOOD + "".join(f"key_{n}: 1\n" for n in range(300)))
    assert main(["validate", str(path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 51 and lines[-1] == f"{path}: and 250 more errors"
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 2000 and "more, which tokensieve validate lists" in said


def test_a_large_file_and_no_file_are_refused_before_they_are_read(tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text("#" * 2**20 + "\ntask: clip\n")
    assert main(["validate", str(path), str(tmp_path), "a\0b", "x" * 5000]) == 2
    large, folder, nul, long = capsys.readouterr().out.splitlines()
    assert (
        "1,048,588 bytes, more than 1,048,576" in large
        and "directory" in folder.lower()
        and "no file 'a?b'" in nul
        and len(long) < 500
    )


def test_a_switch_in_quotes_turns_a_search_on(tmp_path):
    (found,) = told(tmp_path, GOOD + "search_settings: {enable: 'yes'}\n")
    assert "names nothing to search" in found


def test_values_of_the_command_line_that_cannot_be(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(GOOD)
    for key, value, message in (
        ("optimizer.lr", ".inf", r"optimizer.lr \(command line\): .inf is not a finite number"),
        ("optimizer.lr", "1e308", r"optimizer.lr \(command line\): input should be less than or equal to 1000"),
        ("optimizer.lr", "[" * 100, r"optimizer.lr \(command line\): more than 20 sections"),
        ("phases.0.level", "[0, 7]", r"phases.0.level.1 \(command line\): input should be less than"),
        ("optimiser.lr", "1", r"optimiser \(command line\): unknown key"),
        ("output", "a\0b", r"output \(command line\): the character U\+0000 is not allowed"),
        ("phases.7.steps", "3", "phases.7.steps: .* has no such key"),
        ("phases.²", "3", "phases.²: .* has no such key"),
        ("", "3", "'' is not a key"),
        ("a..b", "3", "'a..b' is not a key"),
        ("\x1b[2J", "3", "is not a key"),
        ("a." * 50 + "a", "3", "is not a key"),
        ("task", "[clip]", r"task \(command line\): \['clip'\] is not one of"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            config.load(path, {key: value})
        assert "\n" not in str(caught.value) and str(caught.value).isprintable()
    path.write_text(GOOD.replace("1e-3", ".nan"))
    assert config.load(path, {"optimizer.lr": "0.1"}).optimizer.lr == 0.1  # what it replaces does not matter


def test_values_of_the_command_line_do_not_reach_other_uses_of_an_alias(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(GOOD.replace("{steps: 3, batch: 4}\n", "&one {steps: 3, batch: 4}\n  - *one\n"))
    assert [phase.batch for phase in config.load(path, {"phases.0.batch": "8"}).phases] == [8, 4, 64]
