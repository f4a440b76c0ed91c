"""bench of a vision-language model: phases are separate, FLOPs are those counted by hand, the model is left as it was."""

import json
import math
import time

import pytest
import torch

import tokensieve
from tests.support import vlm_models
from tokensieve import UserError, cli
from tokensieve.measuring import break_even, generation, phases, rounds, vision
from tokensieve.measuring.flops import gflops, gflops_within
from tokensieve.measuring.shares import in_shares, token_share
from tokensieve.methods.registry import get_method
from tokensieve.models.registry import open_vlm
from tokensieve.parts import files as part_files
from tokensieve.plan import Budget
from tokensieve.tasks.vqa.answering import prefill
from tokensieve.testing import fresh_part

PLAN = "random@out:50% + random@llm.2,4:50%"


@pytest.fixture(scope="module")
def model():
    return vlm_models.llava()


@pytest.fixture(scope="module")
def row(model):
    return generation.measure(model, generation.prompts(model, 2, 6), PLAN, repeats=2, new_tokens=3)


def test_a_row_tells_every_phase_of_plan_and_full_model(row):
    assert row["plan"] == PLAN and row["batch_size"] == 2 and row["vision_tokens"] == 36 and row["prompt_tokens"] == 42
    assert [(cut["layer"], cut["tokens_in"], cut["tokens_out"]) for cut in row["layers"]] == [
        ("out", 36, 18),
        ("llm.2", 18, 9),
        ("llm.4", 9, 5),
    ]
    for seconds in (row["seconds"], row["seconds_full"]):
        assert set(seconds) == set(phases.PHASES)
        assert all(value > 0 for phase, value in seconds.items() if phase != "selection")
    assert set(row["seconds_oracle"]) == set(generation.REALIZED) and row["no_oracle_reason"] is None
    assert row["seconds"]["selection"] > 0 == row["seconds_full"]["selection"]
    for name, ratios in (("speedup", generation.RATIOS), ("realized", generation.REALIZED)):
        assert set(row[name]) == set(ratios)
        for phase in ratios:
            assert 0 < row[f"{name}_low"][phase] <= row[name][phase] <= row[f"{name}_high"][phase] < math.inf
    assert row["clock"] == "cpu" and all(row[f"wall_seconds{end}"] > 0 for end in ("", "_full", "_oracle"))
    assert 0 < row["peak_mib"] < row["peak_mib_full"]
    assert row["cache_full"]["tokens"] == [42] * 6 and row["cache"]["tokens"] == [24, 24, 15, 15, 11, 11]
    assert row["cache"]["mib"] == pytest.approx(2 * 2 * 2 * 8 * 4 * 100 / 2**20)  # k and v, prompts, heads, d, bytes, tokens
    json.dumps(row, allow_nan=False)


def test_phases_of_one_run_are_parts_of_it(model):
    with phases.Meter(open_vlm(model), None, time.perf_counter) as meter:
        phases.generate_answer(model, generation.prompts(model, 1, 4), 3)()
    assert 0 < meter.tower + meter.prefill < meter.first and len(meter.decode) == 2
    with phases.Meter(open_vlm(model), rounds.detached_handle(model, PLAN), time.perf_counter, observes=False) as meter:
        phases.generate_answer(model, generation.prompts(model, 1, 4), 3)()
    assert meter.selection == 0 < meter.tower + meter.prefill < meter.first and len(meter.decode) == 2


@pytest.mark.parametrize("what", [(), ("phases",), ("oracle", "memory"), ("gflops",)])
def test_only_what_is_asked_for_is_measured(model, what):
    row = generation.measure(model, generation.prompts(model, 1, 4), PLAN, 1, 2, what=what)
    timed = set(phases.PHASES) if "phases" in what else set(generation.REALIZED)
    assert set(row["seconds"]) == timed and set(row["speedup"]) == timed & set(generation.RATIOS)
    assert ("gflops" in row) == ("gflops" in what) and (row["peak_mib"] is None) == ("memory" not in what)
    assert (row["realized"]["first"] is None) == (row["no_oracle_reason"] == "it was not measured") == ("oracle" not in what)
    assert row["cache"]["tokens"] == [22, 22, 13, 13, 9, 9]


def test_flops_are_those_of_the_shapes(row):
    """By hand: projections, attention over all pairs, MLP, of every layer at the length it runs on; the head is not in it."""
    d, inner, heads, groups, head = 32, 48, 4, 2, 8

    def layer(t):
        qkvo = 2 * t * d * (2 * heads + 2 * groups) * head
        return qkvo + 2 * 2 * t * t * heads * head + 3 * 2 * t * d * inner

    assert row["gflops_full"]["prefill"] == pytest.approx(6 * layer(42) / 1e9)
    assert row["gflops"]["prefill"] == pytest.approx(2 * (layer(24) + layer(15) + layer(11)) / 1e9)
    d, inner, t = 24, 32, 37
    block = 4 * 2 * t * d * d + 2 * 2 * t * t * d + 2 * 2 * t * d * inner
    tower = 4 * block + 2 * 36 * (3 * 4 * 4) * d  # the last block runs too, though its tokens are not taken
    projector = 2 * 36 * (24 * 32 + 32 * 32)
    assert row["gflops_full"]["tower"] == pytest.approx((tower + projector) / 1e9)
    assert row["gflops_full"]["selection"] == row["gflops"]["selection"] == 0  # drawing lots takes no products


def test_the_work_of_trained_parts_is_the_selections(model):
    part = fresh_part(get_method("learned"), 24)
    row = generation.measure(model, generation.prompts(model, 1, 4), "learned@out:9", 1, 2, weights={"learned": part})
    linear = 2 * 24 * 128
    own = linear * (1 + 36 + 36) + 36 * 2 * (2 * 128 + 128) + 2 * 36 * 128  # ask; answer, token; cues, out; shares
    assert own / 1e9 <= row["gflops"]["selection"] <= 1.2 * own / 1e9  # and a few products of cosine and of CLS
    assert row["gflops_full"]["selection"] == 0


def test_a_clock_that_counts_calls_shows_which_phase_is_which(model):
    """Selection is only what the plan adds, and decode steps are told one by one."""
    inputs = generation.prompts(model, 1, 4)
    slow = []

    def clock():
        return float(len(slow))

    def busy(module, *_):
        slow.extend([0] * 100)

    with tokensieve.apply(model, PLAN) as handle:
        pass
    vlm = open_vlm(model)
    hook = vlm.decoder.layers[3].mlp.register_forward_hook(busy)
    try:
        for arm in (None, handle):
            with phases.Meter(vlm, arm, clock) as meter:
                phases.generate_answer(model, inputs, 4)()
            assert (meter.tower, meter.selection, meter.prefill, meter.decode) == (0, 0, 100, [100, 100, 100])
    finally:
        hook.remove()
    choose = handle._chooser.choose
    handle._chooser.choose = lambda *args: (busy(None), choose(*args))[1]
    with phases.Meter(vlm, handle, clock) as meter:
        phases.generate_answer(model, inputs, 4)()
    assert (meter.tower, meter.selection, meter.prefill, meter.decode) == (0, 300, 0, [0, 0, 0])


@pytest.mark.parametrize(
    "seam", ["_get_features", "_run_inner", "_merge", "_generate", "layers.run_decoder", "layers._start_pass"]
)
def test_whatever_the_plan_adds_around_the_decoder_is_selection(model, seam):
    passed = []

    def slow(function):
        return lambda *args, **kwargs: (passed.extend([0] * 100), function(*args, **kwargs))[1]

    with tokensieve.apply(model, PLAN) as handle:
        pass
    owner = handle._decoder.layers if seam.startswith("layers.") else handle._decoder
    name = seam.removeprefix("layers.")
    setattr(owner, name, slow(getattr(owner, name)))
    with phases.Meter(open_vlm(model), handle, lambda: float(len(passed))) as meter:
        phases.generate_answer(model, generation.prompts(model, 1, 4), 2)()
    assert (meter.tower, meter.selection, meter.prefill) == (0, 100, 0)


@pytest.mark.parametrize("plan", ["anchor@out:18", "anchor@llm.2:18", "random@1:18 + anchor@llm.1:9"])
def test_gflops_are_those_that_an_evaluation_tells(model, plan):
    """One prompt: `llm` with what the plan does in it, `all` with what it does anywhere."""
    inputs = generation.prompts(model, 1, 4)
    work = generation.measure(model, inputs, plan, 1, 1)["gflops"]
    with tokensieve.apply(model, plan):
        everything, language = gflops_within(lambda: prefill(model, inputs), model, model.model.language_model)
    assert work["llm"] == pytest.approx(language) and work["all"] == pytest.approx(everything)
    assert (work["llm"] > work["prefill"]) == ("anchor@llm" in plan) and work["selection"] > 0


def test_gflops_of_prompts_with_unequal_numbers_of_images(model, row):
    unequal = generation.measure(model, vlm_models.prompts((2, 1), (5, 5)), PLAN, 1, 1)
    assert unequal["gflops_full"]["tower"] == pytest.approx(1.5 * row["gflops_full"]["tower"])


def test_pixels_that_are_not_one_row_a_prompt_are_counted_whole():
    qwen, inputs = vlm_models.relative("qwen2_vl")
    row = generation.measure(qwen, inputs, "random@llm.1:50%", 1, 1)
    visual = gflops(lambda: qwen.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]))
    assert row["gflops_full"]["tower"] == row["gflops"]["tower"] == pytest.approx(visual / 2)
    assert row["gflops"]["llm"] < row["gflops_full"]["llm"]


def attached(model):
    return [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in model.modules()]


def test_the_model_and_a_handle_are_left_as_they_were(model):
    inputs = vlm_models.prompts()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before, hooks = model(**inputs).logits, attached(model)  # transformers hooks its own layers when they first run
        generation.measure(model, inputs, PLAN, 1, 2)
        assert torch.equal(model(**inputs).logits, before)
        with tokensieve.apply(model, PLAN) as handle:
            cut = model(**inputs).logits
            generation.measure(model, inputs, handle, 1, 1)
            handle.restart()  # the same random choices again
            assert torch.equal(model(**inputs).logits, cut) and not torch.equal(cut, before)
        assert torch.equal(model(**inputs).logits, before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert attached(model) == hooks and not any("forward" in module.__dict__ for module in model.modules())


def test_an_error_under_measurement_leaves_nothing_behind(model, monkeypatch):
    with tokensieve.apply(model, PLAN) as handle:
        pass
    monkeypatch.setattr(generation, "split_phases", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generation.measure(model, generation.prompts(model, 1, 4), handle, 1, 1)
    assert "forward" not in model.model.language_model.layers[2].__dict__ and not handle.is_attached


def test_the_break_even_point_is_found_by_growing_images(model, monkeypatch):
    seen = []

    def measured(twin, inputs, handles, repeats, new_tokens, **given):
        size, n = len(inputs["input_ids"]), int((inputs["input_ids"] == vlm_models.IMAGE).sum(1)[0])
        (handle,) = handles
        with torch.no_grad(), handle:
            twin(**inputs)
        seen.append((size, n, handle.ledger[-1].tokens_out))
        ratio = {1: {4: 1.1, 16: 0.9, 36: 1.2, 64: 1.3}, 2: dict.fromkeys((4, 16, 36, 64), 0.8)}[size][n]
        about = {"batch_size": size, "vision_tokens": n, "prompt_tokens": inputs["input_ids"].shape[1]}
        return [about | {"speedup": {"first": ratio}, "seconds_full": {"first": 1.0}}]

    monkeypatch.setattr(break_even, "measure_all", measured)
    point = break_even.break_even(model, PLAN, (1, 2), (2, 4, 6, 8), text_tokens=4)
    assert point["vision_tokens"] == {"1": 36, "2": None} and "random" in point["weights"]
    assert [n for size, n, _ in seen if size == 1] == [4, 16, 36, 64]
    assert [kept for size, _, kept in seen if size == 1] == [1, 2, 5, 8]  # ceil of a half, three times over
    assert point["plan"] == "random@out:50% + random@llm.2:50% + random@llm.4:50%"


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ("anchor@out:9(k=3,rest=fuse)", "anchor@out:25%(k=3,rest=fuse)"),
        ("anchor@out:9(k=3,rest=fuse) + random@llm.1:5", "anchor@out:25%(k=3,rest=fuse) + random@llm.1:50%"),
        ("random@2:30 + random@2:15", "random@2:83.33% + random@2:50%"),
        ("random@llm.2:30 + random@llm.2:15", "random@llm.2:83.33% + random@llm.2:50%"),
        ("anchor@out(k=4,m=6)", "anchor@out:27.77%(k=4)"),
        ("random@out:-8 + random@llm.-1:40", "random@out:77.77%"),
    ],
)
def test_a_plan_in_shares_keeps_on_its_own_model_what_it_kept(model, plan, shares):
    def left(plan):
        with torch.no_grad(), rounds.detached_handle(model, plan, None) as handle:
            model(**generation.prompts(model, 1, 4))
        return [row for row in handle.ledger if row.tokens_in > row.tokens_out]

    vlm = open_vlm(model)
    made = in_shares(rounds.detached_handle(model, plan, None), vlm.tower, vlm.decoder.depth, generation.image_tokens(vlm))
    assert str(made) == shares and left(shares) == left(plan)


def test_a_share_of_tokens_keeps_their_count_whatever_they_are_of():
    for n in (7, 196, 576, 12_345):
        for keep in (1, 2, n // 3, n - 1):
            share = token_share(keep, n)
            assert share.count(n) == keep == Budget.parse(str(share)).count(n)


def test_models_made_for_the_break_even_point_leave_the_generator_alone(model):
    before = torch.get_rng_state()
    one, other = (break_even._twin(model, side).state_dict() for side in (2, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_command_measures_prints_and_writes(model, tmp_path, capsys, monkeypatch):
    from types import SimpleNamespace

    from tokensieve.models.loading import vlm as load_vlm

    monkeypatch.setattr(load_vlm, "load", lambda name, device: SimpleNamespace(model=model))
    monkeypatch.setattr(break_even, "SIDES", (2, 3))
    output = tmp_path / "x.json"
    line = ["bench", "--model_type", "vlm", "--model", "tiny", "--plan", "random@out:50%", "--batch_size", "1", "2"]
    line += ["--repeats", "1", "--new_tokens", "2", "--text_tokens", "4", "--break_even", "--output", str(output)]
    assert cli.main([*line, "--device", "cpu"]) == 0
    told, written = capsys.readouterr().out, json.loads(output.read_text())
    assert [row["batch_size"] for row in written["rows"]] == [1, 2] and written["versions"]["tokensieve"]
    assert len(written["break_even"][0]["rows"]) == 4
    assert "random@out:50%" in told and "Break-even" in told and "random weights" in told
    assert written["pays_from_batch"].keys() == {"random@out:50%"} and "random@out:50% pays " in told
    lines = told.splitlines()
    (full,) = (line.split() for line in lines if line.split()[:2] == ["1", "full"])
    (ratio, _) = (line.split() for line in lines if line.split()[:1] == ["ratio"])
    costs = written["rows"][0]["gflops_full"]
    assert full[-4:-2] == [f"{costs['llm']:.3f}", f"{costs['all']:.3f}"]
    faster = [written["rows"][0]["speedup"][name] for name in generation.RATIOS if name != "prompt"]
    assert ratio[1:7] == [f"{value:.2f}x" for value in faster]
    assert cli.main([*line, "--image_size", "32"]) == 2
    assert "--image_size" in capsys.readouterr().err


def test_what_is_no_vlm_is_refused(tiny_clip):
    with pytest.raises(UserError, match="not a vision-language model"):
        generation.measure(tiny_clip.make()[0], {"input_ids": torch.zeros(1, 1)}, PLAN)


def test_parts_of_another_model_serve_to_measure_one_with_random_weights(tiny_clip, tmp_path):
    trained = tiny_clip.make()[0]
    part_files.save_part(tmp_path / "x.safetensors", "learned", fresh_part(get_method("learned"), 32), trained, {})
    given = {"repeats": 1, "device": "cpu", "quiet": True, "weights": [str(tmp_path / "x.safetensors")]}
    (row,) = vision.run(tiny_clip.name, "", ["learned@1:4"], [1], **given)
    assert row["layers"][0]["tokens_out"] == 4
