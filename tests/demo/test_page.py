"""What the page gets: samples, plans with cuts and errors, what the model says, times, the picture, code that runs."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient
from PIL import Image

import tokensieve
from tokensieve.cli import main
from tokensieve.demo.session import Session
from tokensieve.drawing.stages import DROPPED
from tokensieve.embedded.datasets import EmbeddedScenes
from tokensieve.models import features


@pytest.fixture(scope="module")
def setup(session: Session) -> dict[str, Any]:
    return session.setup("")


def test_setup_offers_methods_that_fit(setup: dict[str, Any], session: Session) -> None:
    names = {method["name"] for method in setup["methods"]}
    assert {"cover", "anchor", "tome", "random", "resize", "learned"} <= names
    assert not {"fastv", "sdtps", "none"} & names  # there is no decoder; weights of another model
    assert [place["where"] for place in setup["places"]] == [*map(str, range(9)), "out"]
    assert len(setup["samples"]) == 6 and setup["models"] == ["sieve-vit-8", "sieve-llava-8", "sieve-reid-6"]
    assert "sieve-vit-9" not in setup["models"]
    with pytest.raises(tokensieve.errors.UserError, match="Did you mean 'sieve-vit-8'"):
        session.subject("sieve-vit-9")


def test_a_run_is_what_apply_does(client: TestClient, session: Session, ask: Any) -> None:
    answer = client.post("/api/run", json=ask(plans=["anchor@4:40"])).json()
    loaded = session.subject("sieve-vit-8").loaded
    image = EmbeddedScenes("test")[3][0]
    batch = loaded.transform(image)[None]
    with torch.inference_mode():
        full = features.encode_image(loaded.model, batch)
        with tokensieve.apply(loaded.model, "anchor@4:40") as handle:
            cut = features.encode_image(loaded.model, batch)
    (outcome,) = answer["plans"]
    (stage,) = outcome["images"]["image"]["stages"]
    assert handle.kept is not None
    kept = [patch for patch, state in enumerate(stage["states"]) if state > DROPPED]
    assert kept == sorted(handle.kept[0].tolist()) and stage["tokens_out"] == 40
    assert stage["where"] == "after block 4" and len(stage["scores"]) == 196
    assert outcome["says"]["likeness"] == pytest.approx(float(torch.cosine_similarity(full, cut)), abs=1e-5)
    assert sum(row["share"] for row in outcome["says"]["rows"]) == pytest.approx(1, abs=1e-4)
    assert outcome["gflops"] < answer["full"]["gflops"]
    assert answer["full"]["images"]["image"]["stages"] == []


def test_groups_have_one_tint_each(client: TestClient, ask: Any) -> None:
    band = client.post("/api/run", json=ask()).json()["plans"][0]["images"]["image"]
    (stage,) = band["stages"]
    groups, tints = np.array(stage["groups"]), np.array(stage["tints"])
    assert len(set(stage["groups"])) == 32 and band["grid"] == [14, 14]
    for group in set(stage["groups"]):
        assert len(set(tints[groups == group])) == 1
    assert len(band["columns"]) == len(band["rows"]) == 15


def test_mistakes_have_their_place_in_what_was_typed(client: TestClient, ask: Any) -> None:
    plans = ["  anhcor@4:40", "cover@99:3"]
    answer = client.post("/api/run", json=ask(plans=plans)).json()
    first, second = (plan["error"] for plan in answer["plans"])
    assert first["position"] == 2 and first["meant"] == "anchor@4:40" and "Did you mean" not in first["message"]
    assert answer["code"] is None and answer["full"]["gflops"] > 0
    assert second["position"] is None and "99" in second["message"]  # a plan, but not of this model
    good = client.post("/api/run", json=ask(plans=["cover@4:32", "nothing+"])).json()
    assert "error" in good["plans"][1] and good["code"]["command"].endswith("--model_type open_clip")


@pytest.mark.parametrize(
    "plan", ["", " ", "@", "@/etc/passwd", "@tune.json", "none@4", "cover@99:3", "cover@4:", "🙂", "\x00", "cover" * 500]
)
def test_no_plan_is_too_odd(client: TestClient, ask: Any, plan: str) -> None:
    answer = client.post("/api/run", json=ask(plans=[plan]))
    assert answer.status_code == 200
    error = answer.json()["plans"][0]["error"]
    assert (
        error["message"] and "root:" not in error["message"] and (error["position"] is None or error["position"] <= len(plan))
    )


def test_files_of_this_machine_are_not_read(client: TestClient, ask: Any, tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text('{"best": {"plan": "cover@4:32"}}')
    error = client.post("/api/run", json=ask(plans=[f" @{tmp_path}/tune.json"])).json()["plans"][0]["error"]
    assert error["message"].startswith("the page reads no files")


@pytest.mark.parametrize(
    ("plan", "place", "budget"),
    [
        ("cover@4:32", "4", {"kind": "keep", "amount": 32}),
        ("cover:25%", "4", {"kind": "share", "amount": 25}),
        ("tome:-16", None, {"kind": "remove", "amount": 16}),
        ("grid@-2:64", "7", {"kind": "keep", "amount": 64}),
        ("anchor@out:40", "out", {"kind": "keep", "amount": 40}),
        ("resize(scale=0.5)", None, {"kind": "scale", "amount": 0.5}),
    ],
)
def test_sliders_know_the_parts_of_a_plan(
    client: TestClient, ask: Any, plan: str, place: str | None, budget: dict[str, Any]
) -> None:
    (outcome,) = client.post("/api/run", json=ask(plans=[plan])).json()["plans"]
    (step,) = outcome["steps"]
    assert step["place"] == place and step["budget"] == budget and step["text"] == plan


def test_typed_texts_are_compared(client: TestClient, ask: Any) -> None:
    answer = client.post("/api/run", json=ask(prompt="a blue circle\n\n a red star \na blue circle")).json()
    rows = answer["full"]["says"]["rows"]
    assert [row["text"] for row in rows] == ["a blue circle", "a red star"] and rows[0]["similarity"] > rows[1]["similarity"]
    assert client.post("/api/run", json=ask(prompt="\n".join(map(str, range(65))))).status_code == 422
    assert client.post("/api/run", json=ask(prompt="x" * 301)).status_code == 422


def test_times_are_measured_for_plans_that_fit(client: TestClient, ask: Any) -> None:
    answer = client.post("/api/measure", json=ask(plans=["cover@4:32", "wrong"], batch=1)).json()
    assert answer["plans"][1] is None and answer["plans"][0]["seconds"] > 0 and answer["rounds"] >= 3
    assert answer["full"]["speedup"] == 1
    assert client.post("/api/measure", json=ask(batch=1000)).status_code == 422


def test_an_uploaded_image_with_a_name_that_looks_like_code(client: TestClient, ask: Any, photo: bytes, tmp_path: Path) -> None:
    name = client.post("/api/images", content=photo).json()["image"]
    evil = "a'; rm -rf $HOME; '<b>.jpg"
    answer = client.post("/api/run", json=ask(images={"image": name}, files={"image": evil})).json()
    words = shlex.split(answer["code"]["command"])
    assert words[:3] == ["tokensieve", "show", evil] and words[3:5] == ["--plan", "cover@4:32"]
    compile(answer["code"]["python"], "page", "exec")
    assert repr(evil) in answer["code"]["python"]
    band = answer["plans"][0]["images"]["image"]
    assert band["size"] == [90, 60] and band["unseen"]  # the model sees the square in the middle
    picture = client.post("/api/picture", json=ask(images={"image": name}, files={"image": evil}))
    assert Image.open(io.BytesIO(picture.content)).format == "PNG"


def test_samples_and_images_are_checked(client: TestClient, ask: Any) -> None:
    for images in ({"image": "sample:999999"}, {"image": "sample:-1"}, {"other": "sample:3"}, {}):
        assert client.post("/api/run", json=ask(images=images)).status_code == 422
    assert client.get("/api/sample?model=sieve-vit-8&number=3&slot=image").headers["content-type"] == "image/png"
    assert client.get("/api/sample?model=sieve-vit-8&number=4&slot=image").status_code == 422
    assert client.get("/api/sample?model=sieve-vit-8&number=x&slot=image").status_code == 422


@pytest.mark.slow
def test_the_code_for_a_sample_runs(client: TestClient, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = client.post("/api/run", json=ask(prompt="a blue circle\na red star")).json()["code"]
    exec(compile(code["python"], "page", "exec"), {})
    assert (tmp_path / "kept.png").exists()
    assert main(shlex.split(code["command"])[1:]) == 0
    assert list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_a_vision_language_model_answers(client: TestClient, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup = client.get("/api/setup", params={"model": "sieve-llava-8"}).json()
    assert {"fastv", "cover"} <= {method["name"] for method in setup["methods"]} and setup["kind"] == "question"
    assert [place["where"] for place in setup["places"]][-1].startswith("llm.")
    sample = setup["samples"][0]
    body = ask(
        model="sieve-llava-8",
        images={"image": f"sample:{sample['number']}"},
        prompt=sample["prompt"],
        plans=["cover@out:16", "fastv"],
    )
    answer = client.post("/api/run", json=body).json()
    assert answer["full"]["says"]["answer"] == answer["full"]["says"]["expected"] == answer["plans"][0]["says"]["answer"]
    assert answer["plans"][0]["gflops"] < answer["full"]["gflops"]
    assert client.post("/api/measure", json=body | {"batch": 1}).json()["plans"][1]["seconds"] > 0
    exec(compile(answer["code"]["python"], "page", "exec"), {})
    assert (tmp_path / "kept.png").exists()
    for wrong in ("", "what is <image>?", "x" * 2001):
        assert client.post("/api/run", json=body | {"prompt": wrong}).status_code == 422


@pytest.mark.slow
def test_people_are_found_again(client: TestClient, ask: Any, photo: bytes) -> None:
    setup = client.get("/api/setup", params={"model": "sieve-reid-6"}).json()
    assert setup["slots"] == ["RGB", "NI", "TI"] and "sdtps" in {method["name"] for method in setup["methods"]}
    number = setup["samples"][0]["number"]
    images = {slot: f"sample:{number}" for slot in setup["slots"]}
    body = ask(model="sieve-reid-6", images=images, plans=[setup["plan"], "cover@3:26"])
    answer = client.post("/api/run", json=body).json()
    assert answer["full"]["says"]["people"][0]["match"] and len(answer["full"]["says"]["people"]) == 5
    assert set(answer["plans"][0]["images"]) == {"RGB", "NI", "TI"}
    assert client.post("/api/picture", json=body).content.startswith(b"\x89PNG")
    name = client.post("/api/images", content=photo).json()["image"]
    alone = client.post("/api/run", json=body | {"images": {"RGB": name}, "files": {"RGB": "a.jpg"}}).json()
    assert list(alone["full"]["images"]) == ["RGB"] and not alone["full"]["says"]["known"]
    assert "RGB=a.jpg" in alone["code"]["command"]
