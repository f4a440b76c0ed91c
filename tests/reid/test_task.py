"""`tokensieve eval --task reid` as a user runs it, on a tiny model with random weights and tiny data sets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.processes import two_processes
from tests.support.ranking_reference import slow_ranking
from tests.support.reid_folders import write_msvr310, write_rgbnt100, write_rgbnt201
from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.cutting.handle import apply
from tokensieve.embedded.people import dataset
from tokensieve.evaluation import planned_model
from tokensieve.plan import Plan
from tokensieve.reid import data as reid_data
from tokensieve.reid import layouts, loading
from tokensieve.reid.build import build
from tokensieve.reid.model import ReidModel, Settings
from tokensieve.reid.task import combination_name, default_plans, parse_modalities, select_modalities

Run = Callable[..., SimpleNamespace]
ALL = [("RGB", "NI", "TI"), ("RGB", "NI"), ("RGB", "TI"), ("NI", "TI"), ("RGB",), ("NI",), ("TI",)]


def make(plan: str = "sdtps@out", **changed: Any) -> ReidModel:
    """Two blocks of width 32, 8 x 4 patches; random weights, the score MLPs far from even."""
    torch.manual_seed(0)
    arguments = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
    settings = Settings("timm", "vit_tiny_patch16_224", (64, 32), arguments=arguments, plan=plan, cameras=8, **changed)
    return build(settings).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    loading.save(make(), folder)
    return str(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_rgbnt201(folder / "RGBNT201")
    write_rgbnt100(folder / "RGBNT100")
    write_msvr310(folder / "MSVR310")
    return folder


@pytest.fixture
def run(model: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*flags) -> .err .out .by_plan; the tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def go(*flags: object, expect: int = 0) -> SimpleNamespace:
        given = [str(flag) for flag in flags]
        defaults = {"--model": model, "--dataset": "RGBNT201", "--dataset_root": str(root), "--num_workers": "0"}
        defaults |= {"--batch_size": "3", "--output": "out/"}
        rest = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
        code = main(["eval", *given, *rest])
        said = capsys.readouterr()
        assert code == expect, said.err
        made = {path.name: json.loads(path.read_text()) for path in sorted(Path("out").glob("*.json"))}
        return SimpleNamespace(
            err=said.err, out=said.out, files=made, by_plan={row["reduction"]["plan"]: row for row in made.values()}
        )

    return go


load = cache(loading.load)


def slow_numbers(model: str, root: Path, name: str, plan: str, modalities: tuple[str, ...]) -> tuple[float, float]:
    """mAP and rank-1 by one batch of all, and loops."""
    loaded, sides = load(model), []
    for split in ("query", "gallery"):
        data = reid_data.load(name, root, split)
        images: list[Any] = [loaded.transform(data.read(index)) for index in range(len(data))]
        inputs = {m: torch.stack([image[m] for image in images]) for m in modalities}
        inputs["cameras"] = torch.tensor([shot.camera for shot in data.shots])
        with apply(loaded.model, plan, seed=0) as sieve, torch.inference_mode(), sieve.call(samples=torch.arange(len(data))):
            features = loaded.model.encode(inputs)
        groups = [shot.camera if data.rule == "camera" else shot.scene for shot in data.shots]
        sides.append((features.tolist(), [shot.pid for shot in data.shots], groups))
    (queries, ids, groups), (gallery, gallery_ids, gallery_groups) = sides
    found = [one for one in slow_ranking(queries, gallery, ids, gallery_ids, groups, gallery_groups) if one]
    return sum(ap for ap, _ in found) / len(found), sum(first == 1 for _, first in found) / len(found)


def unwrapped(text: str) -> str:
    """Titles of tables are broken where the model's path is long."""
    return " ".join(text.split())


@pytest.mark.slow
def test_by_default_a_model_is_compared_with_controls_by_every_combination(run: Run, model: str, root: Path) -> None:
    done = run()
    assert set(done.by_plan) == {"sdtps@out", "none", "random@out:7", "grid@out:7", "anchor@out:7"}
    for plan, row in done.by_plan.items():
        numbers, cut = row["metrics"], row["reduction"]
        assert row["task"] == "reid" and (cut["tokens_in"], cut["tokens_out"]) == (32, 32 if plan == "none" else 7)
        assert len(numbers["cmc"]) == 50 and numbers["cmc"][0] == numbers["rank_1"] and numbers["cmc"][-1] == 1.0
        assert 0 < numbers["mAP"] <= 1 and numbers["mAP_stderr"] >= 0 and numbers["rank_1"] <= numbers["rank_10"]
        assert numbers["mAP"] == numbers["mAP_RGB+NI+TI"] and numbers["rank_1"] == numbers["rank_1_RGB+NI+TI"]
        for some in ALL:
            ap, first = slow_numbers(model, root, "RGBNT201", plan, some)
            assert numbers[f"mAP_{combination_name(some)}"] == pytest.approx(ap, abs=1e-6), (plan, some)
            assert numbers[f"rank_1_{combination_name(some)}"] == pytest.approx(first), (plan, some)
    about = done.by_plan["none"]["run"]
    assert about["rule"] == "same identity and camera excluded" and about["model_type"] == "reid"
    assert (about["n_queries"], about["n_gallery"], about["n_left_out"]) == (8, 8, 0) and about["samples"] == {"test": 8}
    assert about["modalities"] == [",".join(some) for some in ALL]
    assert (
        "mAP / rank-1 in percent, with these modalities alone" in done.out and "RGB+TI" in done.out and "objects/s" in done.out
    )


def test_what_a_plan_costs_is_that_of_all_modalities(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[str], bool]] = []
    real = planned_model.PlannedModel.__call__

    def watched(self: Any, images: Any, samples: Any = None, timed: bool = True) -> Any:
        before = len(self.times)
        made = real(self, images, samples, timed)
        seen.append(({*images} - {"cameras"}, len(self.times) > before))
        return made

    monkeypatch.setattr(planned_model.PlannedModel, "__call__", watched)
    whole = run("--plan", "none", "--compare", "random@1:7").by_plan
    assert len(seen) > 2 and all(timed == (names == {"RGB", "NI", "TI"}) for names, timed in seen)
    full, cut = (whole[plan]["reduction"] for plan in ("none", "random@1:7"))
    assert cut["gflops"] < full["gflops"] == cut["gflops_full"] and cut["images_per_second"] > 0
    alone = run("--plan", "none", "--compare", "random@1:7", "--modalities", "RGB").by_plan["none"]["reduction"]
    assert alone["gflops"] == pytest.approx(full["gflops"] / 3)


def test_modalities_asked_for_are_those_of_the_result(run: Run, model: str, root: Path) -> None:
    done = run("--plan", "sdtps@out", "--modalities", "NI+RGB", "NI")
    (row,) = done.by_plan.values()
    assert row["run"]["modalities"] == ["RGB,NI", "NI"]
    assert row["metrics"]["mAP"] == pytest.approx(slow_numbers(model, root, "RGBNT201", "sdtps@out", ("RGB", "NI"))[0])
    assert {name for name in row["metrics"] if name.startswith("mAP_")} == {
        *("mAP_stderr", "mAP_RGB+NI", "mAP_NI", "mAP_plain", "mAP_tokens")
    }
    out = run("--plan", "sdtps@out", "--modalities", "NI").out
    assert "modalities alone" not in out and "RGBNT201 by NI, 8 objects" in unwrapped(out)
    for name in ("mAP", "rank_1", "rank_5", "rank_10"):
        assert name.replace("_", "-") in out
    metrics = run("--plan", "sdtps@out", "--modalities", "NI").by_plan["sdtps@out"]["metrics"]
    shown = [f"{100 * metrics[name]:.1f}" for name in ("mAP", "rank_1", "rank_5", "rank_10")]
    assert any(re.findall(r"[\d.]+", line) == shown for line in out.splitlines() if "sdtps" in line)


def test_the_first_modalities_asked_for_are_the_headline(run: Run, model: str, root: Path) -> None:
    """Also what is timed, and what is counted, is of them alone: no union of what was asked for is looked at."""
    done = run("--plan", "sdtps@out", "--modalities", "TI", "RGB")
    (row,) = done.by_plan.values()
    numbers = row["metrics"]
    assert row["run"]["headline"] == "TI" and numbers["mAP"] == numbers["mAP_TI"] and numbers["rank_1"] == numbers["rank_1_TI"]
    assert numbers["mAP"] == pytest.approx(slow_numbers(model, root, "RGBNT201", "sdtps@out", ("TI",))[0])
    assert "mAP_RGB" in numbers and "mAP_RGB+TI" not in numbers
    assert "RGBNT201 by TI, 8 objects" in unwrapped(done.out)
    alone = run("--plan", "sdtps@out", "--modalities", "TI").by_plan["sdtps@out"]
    for name in ("mAP", "mAP_plain", "mAP_tokens", "cmc"):
        assert numbers[name] == alone["metrics"][name]
    for name in ("gflops", "gflops_full"):
        assert row["reduction"][name] == alone["reduction"][name]


def test_only_what_modalities_say_is_kept(model: str, root: Path) -> None:
    loaded = load(model)
    made: Any = loaded.model
    data = reid_data.load("RGBNT201", root, "query")
    inputs = {name: image[None] for name, image in loaded.transform(data.read(0)).items()}
    whole = made.encode(inputs)
    assert torch.equal(select_modalities(whole, made, ("RGB", "NI", "TI")), whole)
    some = made.encode({name: inputs[name] for name in ("RGB", "TI")})
    kept = select_modalities(some, made, ("RGB", "TI"))
    assert kept.shape[1] == whole.shape[1] * 2 // 3 and torch.equal(kept, some[some != 0][None])


def test_branches_are_also_told_alone(run: Run, model: str, root: Path, tmp_path: Path) -> None:
    """What a model says that was made to compare by one branch only."""
    both = run("--plan", "sdtps@out", "--modalities", "RGB,NI,TI").by_plan["sdtps@out"]["metrics"]
    for branch in ("plain", "tokens"):
        made = loading.read(model)
        made.settings = replace(made.settings, feature=branch)
        loading.save(made, tmp_path / branch)
        ap, first = slow_numbers(str(tmp_path / branch), root, "RGBNT201", "sdtps@out", ("RGB", "NI", "TI"))
        assert (both[f"mAP_{branch}"], both[f"rank_1_{branch}"]) == (pytest.approx(ap, abs=1e-6), pytest.approx(first))


@pytest.mark.parametrize(("name", "rule", "queries"), [("RGBNT100", "camera", 4), ("MSVR310", "scene", 4)])
def test_query_and_gallery_of_their_own_are_two_passes(
    run: Run, model: str, root: Path, name: str, rule: str, queries: int
) -> None:
    (row,) = run("--dataset", name, "--plan", "sdtps@out", "--modalities", "RGB,NI,TI").by_plan.values()
    assert row["run"]["rule"] == f"same identity and {rule} excluded" and row["run"]["samples"]["query"] == queries
    ap, first = slow_numbers(model, root, name, "sdtps@out", ALL[0])
    assert row["metrics"]["mAP"] == pytest.approx(ap, abs=1e-6) and row["metrics"]["rank_1"] == pytest.approx(first)
    assert row["run"]["n_queries"] == queries and row["run"]["n_gallery"] == row["run"]["samples"]["gallery"]


def test_validation_identities(run: Run, root: Path) -> None:
    flags = ("--split", "val", "--plan", "none", "--modalities", "RGB")
    assert "give --val_identities N" in run(*flags, expect=2).err
    (row,) = run(*flags, "--val_identities", "2").by_plan.values()
    assert row["run"]["n_queries"] == 8 and row["run"]["val_identities"] == 2 and row["run"]["split"] == "val"
    loading.save(make(data="RGBNT201", val_identities=3), Path("told"))
    (row,) = run("--model", "told", *flags, "--output", "told/").files.values()
    assert json.loads(next(Path("told").glob("RGBNT201*.json")).read_text())["run"]["val_identities"] == 3
    assert "held out 3 identities of RGBNT201" in run("--model", "told", *flags, "--val_identities", "2", expect=2).err
    loading.save(make(data="RGBNT201"), Path("none"))
    assert "held out 0 identities" in run("--model", "none", *flags, "--val_identities", "2", expect=2).err


def test_broken_images_and_queries_without_an_answer_are_counted(run: Run, tmp_path: Path) -> None:
    folder = write_rgbnt201(tmp_path / "here" / "RGBNT201") / "test"
    (folder / "NI" / "000007_cam1_0_00.jpg").write_bytes(b"no image")
    for modality in layouts.MODALITIES:  # identity 8 is left with one camera
        for number in ("00", "01"):
            (folder / modality / f"000008_cam2_0_{number}.jpg").unlink()
    flags = ("--dataset_root", tmp_path / "here", "--plan", "none", "--modalities", "RGB,NI")
    assert "more than --max_broken 0.01 allows" in run(*flags, expect=2).err
    done = run(*flags, "--max_broken", "0.3")
    (row,) = done.by_plan.values()
    assert "cannot read test/NI/000007_cam1_0_00.jpg" in done.err and row["run"]["n_skipped"] == 1
    assert "RGBNT201: 2 of 5 queries have no right answer in the gallery (none of another camera) and are left out" in done.err
    assert (row["run"]["n_queries"], row["run"]["n_gallery"], row["run"]["n_left_out"]) == (5, 5, 2)
    few = run(*flags, "--max_broken", "0.3", "--limit", "4")  # of one identity
    (row,) = few.by_plan.values()
    assert row["run"]["n_queries"] == 3 and row["metrics"]["mAP"] == 1.0


def test_shots_that_are_left_out_count_as_broken(run: Run, tmp_path: Path) -> None:
    folder = write_rgbnt201(tmp_path / "here" / "RGBNT201") / "test"
    (folder / "NI" / "000007_cam1_0_00.jpg").unlink()
    (folder / "RGB" / "seven.jpg").write_bytes(b"")
    (folder / "RGB" / "000008_cam2_0_00.jpg").write_bytes(b"no image")
    flags = ("--dataset_root", tmp_path / "here", "--plan", "none", "--modalities", "RGB,NI")
    err = run(*flags, "--max_broken", "0.1", expect=2).err
    assert "of 9 shots of RGBNT201 (query) 1 lack a modality and 1 are misnamed, more than --max_broken 0.1 allows" in err
    assert "RGBNT201: files whose names have no identity and camera: 1 (test/RGB/seven.jpg)" in err
    assert "3 of 9 images" in run(*flags, "--max_broken", "0.3", expect=2).err  # together with those that cannot be read
    done = run(*flags, "--max_broken", "0.4")
    (row,) = done.by_plan.values()
    about = row["run"]
    assert (about["n_incomplete"], about["n_misnamed"], about["n_skipped"], about["n_queries"]) == (1, 1, 3, 6)
    assert "cannot read test/RGB/000007_cam1_0_00.jpg: a modality is missing" in done.err


def test_cameras_are_compared_before_the_first_batch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(make().settings, cameras=4)
    loading.save(build(settings).eval(), Path("four"))
    monkeypatch.setattr(reid_data.ReidData, "read", None)
    done = run("--model", "four", "--dataset", "RGBNT100", expect=2)
    assert "camera 8 of a model that was trained on 4 (1, 2, ...)" in done.err and "MODEL.SIE_CAMERA: False" in done.err


def test_results_are_folded_and_reported(run: Run, root: Path) -> None:
    run("--plan", "sdtps@out", "--compare", "none")
    assert main(["build", "out", "--output", "all.csv"]) == 0 and main(["report", "out"]) == 0
    names = Path("all.csv").read_text().splitlines()[0].split(",")
    assert names.index("mAP") < names.index("mAP_stderr") < names.index("rank_1") < names.index("cmc") < names.index("plan")
    page = Path("report.html").read_text()
    assert "<h2>" in page and "mAP, %" in page and "--modalities RGB,NI,TI RGB,NI" in page
    assert "tokensieve show RGBNT201:0 --model" in page and f"--model_type reid --dataset_root {root} --plan" in page
    assert "made by the same settings: skipped" in run("--plan", "sdtps@out", "--compare", "none", "--skip_existing").err


def test_the_embedded_model_and_people_are_the_default(
    run: Run, model: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "reid_path", lambda name: Path(model))
    monkeypatch.setattr(dataset, "folder", lambda name, root_given=None: root / "RGBNT201")
    assert main(["eval", "--task", "reid", "--num_workers", "0", "--quiet"]) == 0, capsys.readouterr().err
    names = sorted(path.name for path in Path("results").iterdir())
    assert len(names) == 5 and names[0] == f"embedded-reid__{embedded.REID}_en_reid_anchor@out-7.json"
    assert main(["eval", "--model", model, "--plan", "none", "--num_workers", "0", "--quiet", "--output", "own.json"]) == 0
    assert json.loads(Path("own.json").read_text())["dataset"] == "embedded-reid"  # the folder tells its task


def test_a_model_that_ships_and_is_not_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "reid_path", lambda name: tmp_path / "nothing")
    assert f"{embedded.REID} is missing from this installation" in run("--model", embedded.REID, expect=2).err


def test_plans_that_a_model_is_compared_under() -> None:
    plans, remarks = default_plans(make("none"))
    assert [str(plan) for plan in plans] == ["none"] and not remarks
    plans, _ = default_plans(make("random@1:16 + sdtps@out"))
    assert [str(plan) for plan in plans[:3]] == ["random@1:16 + sdtps@out", "none", "random@1:16 + random@out:7"]
    plans, remarks = default_plans(make(shared=False))
    assert [str(plan) for plan in plans] == ["sdtps@out", "none", "random@out:7", "grid@out:7"]
    assert len(remarks) == 1 and remarks[0].startswith("anchor@out:7 is not compared: ")
    assert [str(plan) for plan in default_plans(make("random@out:7"))[0]].count("random@out:7") == 1
    assert Plan.parse("anchor@out:7") in default_plans(make())[0]


def test_every_combination_is_compared_once() -> None:
    assert parse_modalities(None, ("RGB", "NI", "TI")) == ALL and parse_modalities(None, ("RGB",)) == [("RGB",)]
    assert parse_modalities(["TI,RGB", "RGB+TI", "NI"], ("RGB", "NI", "TI")) == [("RGB", "TI"), ("NI",)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "ViT-B-32"], "ViT-B-32 .*sieve-reid-6"),
        (["--model", "ViT-B-32", "--task", "reid"], "ViT-B-32 .*sieve-reid-6"),
        (["--model", "siev-reid-6"], "Did you mean 'sieve-reid-6'"),
        (["--model", "."], "config.json"),
        (["--pretrained", "openai"], "--pretrained openai: .*leave it out"),
        (["--task", "vqa"], "RGBNT201 has objects, but the task vqa needs questions"),
        (["--task", "linear_probe"], "has objects, but the task linear_probe needs labels: give --task reid"),
        (
            ["--dataset", "embedded"],
            "a re-identification model recognises objects: give --dataset embedded-reid, not embedded",
        ),
        (["--task", "reid", "--dataset", "embedded"], "embedded has labels, but the task reid needs objects"),
        (["--dataset", "RGBNT201", "embedded-questions"], "in a separate run"),
        (["--model_type", "hf"], "needs reid"),
        (["--dataset", "rgbnt210"], "Did you mean 'RGBNT201'"),
        (["--dataset", "embedded-ried"], "Did you mean 'embedded-reid'"),
        (["--modalities", "RBG,NI"], "'RBG' is not one of the model's, RGB, NI, TI. Did you mean 'RGB'"),
        (["--modalities", "ti"], "Did you mean 'TI'"),
        (["--dataset_root", "nowhere"], "RGBNT201 .*given on request"),
        (["--split", "train"], "--split train: re-identification has test"),
        (["--val_identities", "3"], "--split val only"),
        (["--language", "de"], "--language de"),
        (["--token_fusion", "mean"], "--token_fusion mean"),
        (["--skip_load"], "--skip_load works with"),
        (["--plan", "random@9:7"], "9"),
        (["--limit", "1", "--plan", "none"], "none of the 1 queries has a right answer"),
    ],
)
def test_mistakes_are_explained(run: Run, flags: list[str], said: str) -> None:
    done = run(*flags, expect=2)
    last = done.err.splitlines()[-1]
    assert re.search(said, last) and last.startswith("tokensieve: error: ") and not done.files


def test_data_without_a_modality_is_told(run: Run, tmp_path: Path) -> None:
    folder = write_rgbnt201(tmp_path / "here" / "RGBNT201")
    (folder / "test" / "TI").rename(folder / "test" / "thermal")
    flags = ("--dataset_root", tmp_path / "here", "--plan", "none")
    assert "test/TI" in run(*flags, expect=2).err
    assert run(*flags, "--modalities", "RGB,NI", "RGB").by_plan["none"]["run"]["n_queries"] == 8


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(run: Run, model: str, root: Path, tmp_path: Path) -> None:
    flags = ["--plan", "random@1:7", "--compare", "sdtps@out", "--dataset", "MSVR310", "--dataset_root", str(root)]
    alone = {name: row["metrics"] for name, row in run(*flags).by_plan.items()}
    shared = tmp_path / "shared"
    rest = ["--model", model, "--num_workers", "0", "--batch_size", "3", "--output", f"{shared}/"]
    done = two_processes(["-m", "tokensieve", "eval", *flags, *rest, "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(file.read_text()) for file in shared.glob("*.json")]
    assert {row["reduction"]["plan"]: row["metrics"] for row in rows} == alone and rows[0]["run"]["processes"] == 2
