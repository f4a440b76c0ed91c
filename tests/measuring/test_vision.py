"""bench: what is reported is measured, and the oracle is cut where the plan is cut."""

import json
import math

import pytest
import timm
import torch

import tokensieve
from tests.support import hf_models
from tokensieve import UserError
from tokensieve.measuring import break_even, memory, vision
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.oracle import oracle
from tokensieve.methods.registry import get_method


def test_oracle_cuts_at_the_same_places_to_the_same_numbers(tiny_clip):
    model = tiny_clip.make()[0]
    images = torch.randn(2, 3, 48, 32)
    for plan in ("anchor@2(k=2,m=4)", "anchor@1.attn:10(k=2,rest=fuse) + pool@3:4", "random@0:50%"):
        with torch.no_grad(), tokensieve.apply(model, plan) as handle:
            model.encode_image(images)
        with torch.no_grad(), tokensieve.apply(model, oracle(handle)) as ideal:
            model.encode_image(images)
        assert ideal.ledger == handle.ledger


def test_bench_measures_and_writes(tiny_clip, tmp_path, capsys):
    output = tmp_path / "bench.json"
    plans = ["anchor@1(k=1,m=3)", "random@1:4", "anchor(k=20,m=20)"]
    rows = vision.run(tiny_clip.name, "", plans, [1, 3], repeats=2, device="cpu", output=str(output))
    assert [(row["plan"], row["batch_size"]) for row in rows] == [(plan, batch) for batch in (1, 3) for plan in plans]
    for row in rows:
        for key in (
            "seconds_full",
            "seconds",
            "seconds_oracle",
            "speedup",
            "speedup_oracle",
            "realized",
            "peak_mib",
            "peak_mib_full",
        ):
            assert math.isfinite(row[key]) and row[key] > 0
        assert row["gflops"] < row["gflops_full"] or row["notes"]
        assert row["changed"] is (row["plan"] != "anchor(k=20,m=20)")
        for name in ("speedup", "speedup_oracle", "realized"):
            assert 0 < row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row["clock"] == "cpu" and all(row[f"wall_seconds{end}"] > 0 for end in ("", "_full", "_oracle"))
    written = json.loads(output.read_text())
    assert written["rows"] == rows and written["machine"]["threads"] == 1 and list(written["pays_from_batch"]) == plans
    table = capsys.readouterr().out
    assert "interleaved" in table and "anchor@1" in table and f"{rows[0]['realized']:.3f}" in table
    assert "random@1:4 pays " in table and "(measured: 1, 3)" in table
    assert table.count("(changed") == 2 and table.count("note: ") == 1 and "everything is kept" in table


def test_with_several_threads_wall_time_counts(tiny_clip, monkeypatch):
    """The threads are not really started: processes that later tests fork would wait for them."""
    counts = [1]
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    (row,) = vision.run(tiny_clip.name, "", ["random@1:4"], [1], repeats=1, device="cpu", quiet=True, threads=2)
    assert row["clock"] == "wall" and row["seconds"] == row["wall_seconds"] and counts == [1, 2, 1]


def test_the_break_even_point_of_a_tower_is_found_by_growing_images(monkeypatch, tmp_path, capsys):
    seen = []

    def measured(net, images, plans, repeats, quiet, weights):
        n = (images.shape[-1] // 16) ** 2
        with torch.no_grad(), tokensieve.apply(net, plans[0]) as handle:
            net(images)
        seen.append((len(images), n, handle.ledger[0].tokens_out))
        return [
            {"batch_size": len(images), "vision_tokens": n, "speedup": 1.5 if n * len(images) > 20 else 0.5, "seconds_full": 1}
        ]

    monkeypatch.setattr(break_even.encoding, "measure", measured)
    monkeypatch.setattr(break_even, "TOWER_SIDES", (2, 4, 6))
    net = timm.create_model("test_vit", num_classes=0).eval()  # 10 x 10 patches
    build = lambda size: timm.create_model("test_vit", num_classes=0, img_size=size).eval()  # noqa: E731
    point = break_even.tower_break_even(net, build, tokensieve.Plan.parse("random@1:30"), [1, 4])
    assert point["plan"] == "random@1:30%" and point["vision_tokens"] == {"1": 36, "4": 16}
    assert [kept for size, _, kept in seen if size == 1] == [2, 5, 11]
    with pytest.raises(UserError, match="size of images"):
        break_even.tower_break_even(net, build, tokensieve.Plan.parse("resize(scale=0.5) + random@1:5"), [1])


def test_bench_measures_models_of_every_type(tmp_path):
    plans = ["anchor@1(k=1,m=3)", "anchor@1:4(k=1,rest=merge)"]
    for model_type, model in (("hf", hf_models.save("clip", tmp_path)), ("timm", "test_vit")):
        rows = vision.run(model, "", plans, [2], repeats=1, device="cpu", quiet=True, model_type=model_type)
        assert [row["plan"] for row in rows] == plans and all(row["model_type"] == model_type for row in rows)
        assert all(row["layers"][0]["tokens_out"] == 4 and row["gflops"] < row["gflops_full"] for row in rows)
    with pytest.raises(UserError, match="ResNet"):
        vision.run("resnet10t", "", plans, [1], repeats=1, device="cpu", model_type="timm")


def test_weights_of_trained_methods_go_to_the_plans_that_use_them(tiny_clip):
    part = get_method("learned").part(32)
    plans = ["learned@1:4", "anchor@1(k=1,m=3)"]
    rows = vision.run(tiny_clip.name, "", plans, [1], repeats=1, device="cpu", quiet=True, weights={"learned": part})
    assert [row["layers"][0]["tokens_out"] for row in rows] == [4, 4]


def test_bench_refuses_a_bad_plan_before_it_measures(tiny_clip):
    with pytest.raises(UserError, match="Did you mean"):
        vision.run(tiny_clip.name, "", ["anchr"], [1], repeats=1)


def test_flops_of_attention_are_counted(tiny_clip):
    """By hand: projections, attention and MLP of every block, the patches and the projection of CLS."""
    model = tiny_clip.make()[0]
    t, d, mlp, depth, n = 25, 32, 128, 4, 24
    block = 2 * t * d * 3 * d + 2 * 2 * t * t * d + 2 * t * d * d + 2 * 2 * t * d * mlp
    by_hand = depth * block + 2 * n * (3 * 8 * 8) * d + 2 * d * 16
    assert gflops(lambda: model.encode_image(torch.randn(1, 3, 48, 32))) == pytest.approx(by_hand / 1e9)
    assert torch.backends.mha.get_fastpath_enabled()


def test_peak_memory_sees_the_largest_moment():
    def call():
        a = torch.ones(1 << 20)  # 4 MiB
        b = a + 1
        del a
        return (b + 1).sum()

    assert memory.peak_memory(call, torch.device("cpu")) == pytest.approx(8, abs=0.1)
