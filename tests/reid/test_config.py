"""The file of S5: its keys, the field's recipe as defaults, mistakes with their lines, and what a search makes of it."""

import shutil

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.reid_folders import write_rgbnt201
from tokensieve import config
from tokensieve.cli import main
from tokensieve.config import document
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
