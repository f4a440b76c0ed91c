"""The file of S5: its keys, the field's recipe as defaults, mistakes with their lines, and what a search makes of it."""

import shutil
import subprocess
import sys

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.reid_folders import write_rgbnt201
from tokensieve import config
from tokensieve.cli import main
from tokensieve.config import document
from tokensieve.errors import UserError
from tokensieve.reid.config import ReidTraining
from tokensieve.search.space import with_values

CONFIGS = ROOT / "configs"

GOOD = """\
MODEL:
  USE_SDTPS: True
  SDTPS_SPARSE_RATIO: 0.5
  SDTPS_AGGR_RATIO: 0.4
  SDTPS_BETA: 0.25
  SDTPS_USE_GUMBEL: False
DATASETS:
  NAMES: 'embedded-reid'
DATALOADER:
  NUM_INSTANCE: 4
SOLVER:
  IMS_PER_BATCH: 32
  BASE_LR: 3.5e-4
  WARMUP_EPOCHS: 10
OUTPUT_DIR: out
"""


def told(tmp_path, text):
    """The lines and messages of a file's mistakes."""
    path = tmp_path / "file.yml"
    path.write_text(text)
    try:
        config.load(path)
    except document.ConfigErrors as mistakes:
        return [line.removeprefix(f"{path}:") for line in mistakes.lines]
    return []


def check_recipe(made):
    """Spec S5, the recipe of RGBNT201."""
    model, seen, how = made.MODEL, made.INPUT, made.SOLVER
    assert (model.USE_SDTPS, model.plan, model.SDTPS_USE_GUMBEL) == (True, "sdtps@out", False)
    assert (model.SDTPS_SPARSE_RATIO, model.SDTPS_AGGR_RATIO, model.SDTPS_BETA) == (0.5, 0.4, 0.25)
    assert (model.LIBRARY, model.TRANSFORMER_TYPE, model.PRETRAINED) == ("open_clip", "ViT-B-16-quickgelu", "openai")
    assert model.STRIDE_SIZE in (None, (16, 16)) and model.MODALITIES == ("RGB", "NI", "TI")
    assert (model.SHARED_BACKBONE, model.SIE_CAMERA) == (True, True)
    assert (model.ID_LOSS_WEIGHT, model.TRIPLET_LOSS_WEIGHT, model.LABEL_SMOOTH) == (0.25, 1.0, 0.1)
    assert (how.IMS_PER_BATCH, made.DATALOADER.NUM_INSTANCE) == (64, 8)
    assert (how.OPTIMIZER_NAME, how.BASE_LR, how.BACKBONE_LR, how.WEIGHT_DECAY) == ("Adam", 3.5e-4, 5e-6, 1e-4)
    assert (how.SCHEDULE, how.WARMUP_EPOCHS, how.MAX_EPOCHS, how.SEED) == ("cosine", 10, 50, 1111)
    assert how.MIXED_PRECISION == "auto"
    assert (seen.PROB, seen.PADDING, seen.RE_PROB) == (0.5, 10, 0.5)
    assert seen.PIXEL_MEAN == seen.PIXEL_STD == (0.5, 0.5, 0.5)


def test_the_defaults_and_the_files_that_ship_are_the_field_s_recipe():
    made = ReidTraining()
    check_recipe(made)
    assert ReidTraining.model_validate({"MODEL": {"LIBRARY": "timm"}}).MODEL.PRETRAINED == ""
    assert made.INPUT.SIZE == (256, 128) and made.DATASETS.NAMES == "RGBNT201"
    for name, size in (("RGBNT201", (256, 128)), ("RGBNT100", (128, 256)), ("MSVR310", (128, 256))):
        shipped = config.load(CONFIGS / name / "DeMo_SDTPS.yml")
        check_recipe(shipped)
        assert name == shipped.DATASETS.NAMES and size == shipped.INPUT.SIZE and shipped.task == "reid"
    small, before = (config.load(CONFIGS / f"embedded_reid{more}.yml") for more in ("", "_pretrain"))
    assert small.MODEL.ARGUMENTS == before.MODEL.ARGUMENTS and small.INPUT.SIZE == before.INPUT.SIZE
    assert (small.MODEL.plan, before.MODEL.plan) == ("sdtps@out", "none")


def test_a_good_file_is_summed_up(tmp_path, capsys):
    path = tmp_path / "my.yml"
    path.write_text(GOOD)
    assert main(["validate", str(path)]) == 0
    assert "ok: a vision transformer learns to re-identify by several modalities" in capsys.readouterr().out


@pytest.mark.parametrize(
    "was, now, line",
    [
        ("SDTPS_BETA: 0.25", "SDTPS_BTEA: 0.25", "5: MODEL.SDTPS_BTEA: unknown key; .* Did you mean 'SDTPS_BETA'?"),
        ("SDTPS_BETA: 0.25", "SDTPS_BETA: 0.7", "5: MODEL.SDTPS_BETA: input should be less than or equal to 0.5"),
        ("SDTPS_SPARSE_RATIO: 0.5", "SDTPS_SPARSE_RATIO: 1", "3: MODEL.SDTPS_SPARSE_RATIO: input should be less than 1"),
        ("SOLVER:", "SLOVER:", "11: SLOVER: unknown key; .* Did you mean 'SOLVER'?"),
        ("IMS_PER_BATCH: 32", "IMS_PER_BATCH: 30", "12: SOLVER.IMS_PER_BATCH: 30 is not a multiple of .*: 4; write 32"),
        ("IMS_PER_BATCH: 32", "IMS_PER_BATCH: 4", "12: SOLVER.IMS_PER_BATCH: 4 are a single identity"),
        ("IMS_PER_BATCH: 32", "IMS_PER_BATCH: True", "12: SOLVER.IMS_PER_BATCH: true and false are not numbers"),
        ("WARMUP_EPOCHS: 10", "WARMUP_EPOCHS: 50", "14: SOLVER.WARMUP_EPOCHS: 50 is not less than the 50 of MAX_EPOCHS"),
        ("'embedded-reid'", "RGBNT2001", "8: DATASETS.NAMES: 'RGBNT2001' is not one of .* Did you mean 'RGBNT201'?"),
        (
            "USE_SDTPS: True",
            "USE_SDTPS: True\n  PLAN: random@out:26",
            "2: MODEL.USE_SDTPS: True and PLAN: random@out:26 contradict",
        ),
        ("USE_SDTPS: True", "USE_SDTPS: False\n  PLAN: sdtps@6", "2: MODEL.USE_SDTPS: False and PLAN: sdtps@6 contradict"),
        ("USE_SDTPS: True", "PLAN: sdpts@6", "2: MODEL.PLAN: .*sdpts.* Did you mean 'sdtps@6'?"),
        ("USE_SDTPS: True", "MODALITIES: [RGB, RGB]", "2: MODEL.MODALITIES: RGB, RGB: list each of them once"),
        ("USE_SDTPS: True", "MODALITIES: [RGB, NIR]", "2: MODEL.MODALITIES.1: 'NIR' is not one of RGB, NI, TI"),
        ("USE_SDTPS: True", "MODALITIES: []", "2: MODEL.MODALITIES: "),
        ("USE_SDTPS: True", "ARGUMENTS: {depth: 6}", "2: MODEL.ARGUMENTS: only timm's models take them"),
        ("USE_SDTPS: True", "ARGUMENTS: {depth: '.nan'}", "2: MODEL.ARGUMENTS.depth: '.nan' is not a word; write numbers"),
        ("USE_SDTPS: True", "ARGUMENTS: {depth: '6'}", "2: MODEL.ARGUMENTS.depth: '6' is not a word; write numbers"),
        ("USE_SDTPS: True", "ARGUMENTS: {depth: .nan}", "2: MODEL.ARGUMENTS.depth: .nan is not a finite number"),
        ("USE_SDTPS: True", "ARGUMENTS: {depth: 10000000}", "2: MODEL.ARGUMENTS.depth: 10000000 is not between 0 and"),
        ("USE_SDTPS: True", "ARGUMENTS: {depth: {a: 1}}", "2: MODEL.ARGUMENTS.depth: a list inside a list, or keys"),
        (
            "USE_SDTPS: True",
            "ID_LOSS_WEIGHT: 0\n  TRIPLET_LOSS_WEIGHT: 0",
            "2: MODEL.ID_LOSS_WEIGHT: 0, as .* nothing to learn",
        ),
        ("OUTPUT_DIR: out", "output: out", "15: output: unknown key"),
        ("OUTPUT_DIR: out", "search_settings: {enable: true}", "15: search_settings.space: .*SOLVER.BASE_LR: {low"),
    ],
)
def test_a_mistake_has_its_line(tmp_path, was, now, line):
    import re

    (found,) = told(tmp_path, GOOD.replace(was, now, 1))
    number, message = line.split(": ", 1)
    assert found.startswith(f"{number}: ") and re.match(message.replace("?", r"\?"), found.removeprefix(f"{number}: "))


def test_yaml_as_the_field_writes_it(tmp_path):
    text = GOOD.replace("BASE_LR: 3.5e-4", "BASE_LR: '0.00035'\n  MIXED_PRECISION: no\n  CLIP: 1").replace("True", "true")
    assert told(tmp_path, text) == []
    made = config.load(tmp_path / "file.yml")
    assert (made.SOLVER.BASE_LR, made.SOLVER.MIXED_PRECISION, made.SOLVER.CLIP) == (3.5e-4, "no", 1.0)


def test_the_plan_of_the_switches():
    plans = [
        ({}, "sdtps@out"),
        ({"USE_SDTPS": False}, "none"),
        ({"PLAN": "random@out:26"}, "random@out:26"),
        ({"USE_SDTPS": True, "PLAN": "sdtps@6"}, "sdtps@6"),
        ({"USE_SDTPS": False, "PLAN": "none"}, "none"),
    ]
    for given, plan in plans:
        assert ReidTraining.model_validate({"MODEL": given}).MODEL.plan == plan


def test_data_that_is_not_there_is_told_with_its_line(tmp_path, capsys):
    path = tmp_path / "file.yml"
    path.write_text(GOOD.replace("'embedded-reid'", f"RGBNT201\n  ROOT_DIR: {tmp_path}"))
    assert main(["validate", str(path)]) == 2
    said = capsys.readouterr().out
    assert said.startswith(f"{path}:7: DATASETS: RGBNT201") and "train_171" in said and "--" not in said
    assert "give its folder as DATASETS.ROOT_DIR" in said


def test_validate_tells_what_is_odd_in_the_data_and_refuses_identities_of_the_test(tmp_path, capsys):
    folder = write_rgbnt201(tmp_path / "RGBNT201")
    (folder / "test" / "NI" / "000007_cam1_0_00.jpg").unlink()
    path = tmp_path / "file.yml"
    path.write_text(GOOD.replace("'embedded-reid'", f"RGBNT201\n  ROOT_DIR: {tmp_path}\n  VAL_IDENTITIES: 2"))
    assert main(["validate", str(path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: ok: ")
    assert second.startswith(f"{path}: note: DATASETS: RGBNT201: shots without a file of NI (NI): 1 (test/RGB/000007_cam1")
    path.write_text(path.read_text().replace("MODEL:", "MODEL:\n  MODALITIES: [RGB, TI]"))
    assert main(["validate", str(path)]) == 0 and "note" not in capsys.readouterr().out
    for modality in ("RGB", "NI", "TI"):
        shutil.copy(folder / "train_171" / modality / "000001_cam1_0_00.jpg", folder / "test" / modality)
    assert main(["validate", str(path)]) == 2
    assert f"{path}:8: DATASETS: identities both in training and test: 1 (1)" in capsys.readouterr().out


def test_the_learning_rates_of_a_run():
    how = ReidTraining().SOLVER
    rates = [how.rate(step, 500, 100) for step in range(500)]
    assert rates[0] == pytest.approx(0.01 + 0.99 / 100) and rates[99] == 1.0 == max(rates)
    assert rates[299] == pytest.approx(0.5, abs=0.01) and 0.002 < rates[-1] < 0.003
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)
    constant = how.model_copy(update={"SCHEDULE": "constant"})
    assert {constant.rate(step, 500, 0) for step in range(500)} == {1.0}


def test_a_search_finds_the_folder_and_the_objective(tmp_path):
    space = {
        "SOLVER.BASE_LR": {"low": 1e-4, "high": 1e-3, "log": True},
        "MODEL.PLAN": {"choices": ["sdtps@out", "grid@out:26"]},
    }
    data = yaml.safe_load(GOOD) | {"search_settings": {"enable": True, "space": space}}
    del data["MODEL"]["USE_SDTPS"]
    path = tmp_path / "search.yml"
    path.write_text(yaml.safe_dump(data))
    made = config.load(path)
    assert made.searches and [objective.name for objective in made.search_settings.objectives] == ["mAP"]
    trial = with_values(data, {"SOLVER.BASE_LR": 2e-4, "MODEL.PLAN": "grid@out:26"}, (made.output_key, tmp_path / "trials/0"))
    path.write_text(yaml.safe_dump(trial))
    one = config.load(path)
    assert one.output == tmp_path / "trials/0" and not one.searches
    assert (one.SOLVER.BASE_LR, one.MODEL.plan) == (2e-4, "grid@out:26")


def test_what_decides_the_result_is_in_the_recipe():
    """And where and how the work is done is not."""
    made = ReidTraining()
    recipe = made.recipe()
    assert "OUTPUT_DIR" not in recipe and "search_settings" not in recipe
    for section, key in (("SOLVER", "DEVICE"), ("DATALOADER", "NUM_WORKERS"), ("DATASETS", "ROOT_DIR")):
        assert key not in recipe[section]
    assert recipe["SOLVER"]["BASE_LR"] == 3.5e-4 and recipe["MODEL"]["SDTPS_BETA"] == 0.25


PUBLISHED = """\
MODEL:
  TRANSFORMER_TYPE: 'ViT-B-16'
  STRIDE_SIZE: [ 16, 16 ]
  SIE_CAMERA: True
  DIRECT: 1
  SIE_COE: 1.0
  ID_LOSS_WEIGHT: 0.25
  TRIPLET_LOSS_WEIGHT: 1.0
  GLOBAL_LOCAL: False
  HDM: False
  ATM: False
  USE_SDTPS: True
  SDTPS_SPARSE_RATIO: 0.5
  SDTPS_AGGR_RATIO: 0.4
  SDTPS_BETA: 0.25
  SDTPS_USE_GUMBEL: False
  SDTPS_GUMBEL_TAU: 5.0
  SDTPS_LOSS_WEIGHT: 2.0
  HEAD: 4
INPUT:
  SIZE_TRAIN: [ 256, 128 ]
  SIZE_TEST: [ 256, 128 ]
  PROB: 0.5
  RE_PROB: 0.5
  PADDING: 10
DATALOADER:
  SAMPLER: 'softmax_triplet'
  NUM_INSTANCE: 8
  NUM_WORKERS: 14
DATASETS:
  NAMES: ('RGBNT201')
  ROOT_DIR: '..'
SOLVER:
  BASE_LR: 0.00035
  WARMUP_ITERS: 3
  MAX_EPOCHS: 50
  OPTIMIZER_NAME: 'Adam'
  IMS_PER_BATCH: 64
  EVAL_PERIOD: 1
TEST:
  IMS_PER_BATCH: 128
  RE_RANKING: 'no'
  WEIGHT: ''
  NECK_FEAT: 'before'
  FEAT_NORM: 'yes'
  MISS: "nothing"
OUTPUT_DIR: '..'
"""


def test_a_file_of_the_authors_loads(tmp_path):
    path = tmp_path / "DeMo_SDTPS.yml"
    path.write_text(PUBLISHED)
    made = config.load(path)
    assert made.INPUT.SIZE == (256, 128) and made.SOLVER.WARMUP_EPOCHS == 3 and made.DATASETS.NAMES == "RGBNT201"
    assert (made.MODEL.SDTPS_GUMBEL_TAU, made.MODEL.SDTPS_LOSS_WEIGHT, made.MODEL.plan) == (5.0, 2.0, "sdtps@out")
    assert made.MODEL.TRANSFORMER_TYPE == "ViT-B-16-quickgelu"  # the activation of OpenAI's weights
    assert made.unused_note().startswith("MODEL.GLOBAL_LOCAL, MODEL.HDM, MODEL.ATM, MODEL.HEAD: not used")
    again = tmp_path / "again.yml"
    again.write_text(PUBLISHED.replace("SIZE_TEST: [ 256, 128 ]", "").replace("'yes'", "True").replace("'no'", "False"))
    assert config.load(again).recipe() == made.recipe()
    assert config.load(CONFIGS / "RGBNT201" / "DeMo_SDTPS.yml").unused_note() == ""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("HDM: False", "HDM: True", "11: MODEL.HDM: True: tokensieve has no hierarchical decoupling module; write HDM: False"),
        ("ATM: False", "ATM: 1", "12: MODEL.ATM: 1: tokensieve has no attention-triggered mixture of experts"),
        ("GLOBAL_LOCAL: False", "GLOBAL_LOCAL: True", "10: MODEL.GLOBAL_LOCAL: True: tokensieve has no fusion"),
        ("DIRECT: 1", "DIRECT: 0", "6: MODEL.DIRECT: 0: the modalities of a branch are concatenated"),
        ("SIZE_TEST: [ 256, 128 ]", "SIZE_TEST: [ 128, 128 ]", "23: INPUT.SIZE_TEST: [128, 128] and SIZE_TRAIN: [256, 128]"),
        ("'softmax_triplet'", "'softmax'", "28: DATALOADER.SAMPLER: 'softmax': batches have several objects"),
        ('MISS: "nothing"', 'MISS: "r"', "47: TEST.MISS: 'r': tokensieve eval --task reid --modalities NI,TI"),
        ("FEAT_NORM: 'yes'", "FEAT_NORM: 'no'", "46: TEST.FEAT_NORM: 'no': features are compared at unit length"),
        ("('RGBNT201')", "('RGBNT20')", "32: DATASETS.NAMES: 'RGBNT20' is not one of RGBNT201"),
        ("HEAD: 4", "HEADS: 4", "20: MODEL.HEADS: unknown key"),
        ("FEAT_NORM: 'yes'", "FEAT_NRM: 'yes'", "46: TEST.FEAT_NRM: unknown key"),
        ("SIZE_TEST: [ 256, 128 ]", "", "22: INPUT.SIZE_TRAIN.0: input should be greater than or equal to 1"),
        ("WARMUP_ITERS: 3", "WARMUP_ITERS: 50", "36: SOLVER.WARMUP_ITERS: 50 is not less than the 50 of MAX_EPOCHS"),
    ],
)
def test_what_a_file_of_the_authors_asks_for_and_is_not_here(tmp_path, old, new, says):
    assert old in PUBLISHED
    text = PUBLISHED.replace(old, new) if new else PUBLISHED.replace(old, "").replace("[ 256, 128 ]", "[ 0, 128 ]")
    (line,) = told(tmp_path, "# as published\n" + text)
    assert line.startswith(says)


def test_values_of_the_command_line_replace_those_of_the_file(tmp_path):
    path = tmp_path / "file.yml"
    path.write_text(PUBLISHED)
    values = {"MODEL.SDTPS_BETA": "0.3", "SOLVER.BASE_LR": "1e-4", "MODEL.STRIDE_SIZE": "[16, 16]", "SOLVER.MAX_STEPS": "null"}
    made = config.load(path, {**values, "MODEL.PLAN": "sdtps@6", "MODEL.HDM": "False"})
    assert (made.MODEL.SDTPS_BETA, made.SOLVER.BASE_LR, made.MODEL.plan) == (0.3, 1e-4, "sdtps@6")
    short = tmp_path / "short.yml"
    short.write_text("DATASETS: {NAMES: embedded-reid}\n")
    assert config.load(short, {"SOLVER.SEED": "5"}).SOLVER.SEED == 5  # of a section that the file does not have
    with pytest.raises(document.ConfigErrors, match=r"MODEL.SDTPS_BETA \(command line\): input should be less than or equal"):
        config.load(path, {"MODEL.SDTPS_BETA": "0.7"})
    with pytest.raises(document.ConfigErrors, match=r"MODEL.SDTPS_BETTA \(command line\): unknown key"):
        config.load(path, {"MODEL.SDTPS_BETTA": "0.7"})
    with pytest.raises(UserError, match=r"OUTPUT_DIR.name: .* has no such key"):
        config.load(path, {"OUTPUT_DIR.name": "x"})


def test_train_net_is_train(tmp_path):
    """As the scripts of the field call it, in a process of its own."""
    path = tmp_path / "file.yml"
    path.write_text(GOOD)
    command = [sys.executable, "-m", "tokensieve.train_net", "--config_file", str(path), "MODEL.SDTPS_BETA", "0.7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "MODEL.SDTPS_BETA (command line)" in done.stderr
