"""What others put on a model: wrappers of forward, hooks, hooks of accelerate, replaced layers, copies, other types of numbers.

With a plan they are called as without one, or the plan is refused. Whoever is removed first, nothing is lost.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import TOWERS, images, make_reid_model, make_tower
from tests.support.states import assert_untouched, snapshot
from tokensieve import UserError
from tokensieve.cutting.handle import Handle
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower

OPENING = {"attention": "anchor@2:8(k=3)", "inside": "grid@2.attn:8", "sizes": "pool@1:8"}  # plans that open block 2
CLOSED = "grid@2:8"  # a plan that runs the stock block 2, and cuts its output
pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> nn.Module:
    return make_tower(request.param)


def encode(tower: nn.Module) -> Tensor:
    with torch.no_grad():
        return encode_image(tower, images(2, 0))


def block_of(tower: nn.Module) -> Any:
    """Block 2 of the tower."""
    return open_tower(tower).blocks[1].module


def attention_of(tower: nn.Module) -> Any:
    return open_tower(tower).blocks[1].attention


def wrap(module: Any, calls: list[Any]) -> None:
    inner = module.forward

    @functools.wraps(inner)
    def loud(*args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return inner(*args, **kwargs)

    module.forward = loud


def hook_by_accelerate(module: Any, calls: list[Any]) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Count(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    add_hook_to_module(module, Count())


# --- wrappers that were there before the plan ---------------------------------------------------------------------


@pytest.mark.parametrize("plan", OPENING.values(), ids=OPENING)
@pytest.mark.parametrize("find", [block_of, attention_of])
def test_a_wrapper_that_the_plan_would_skip_is_refused(tower: nn.Module, find: Callable[..., Any], plan: str) -> None:
    module = find(tower)
    wrap(module, [])
    before = snapshot(tower)
    with pytest.raises(UserError, match=rf"block 2 .*{type(module).__name__}\.forward was replaced by .*test_wrappers\.loud"):
        tokensieve.apply(tower, plan)
    assert_untouched(tower, before)


def test_a_wrapper_that_came_while_the_plan_was_off_is_refused_when_it_is_attached_again(tower: nn.Module) -> None:
    handle = tokensieve.apply(tower, OPENING["attention"])
    handle.remove()
    wrap(block_of(tower), [])
    with pytest.raises(UserError, match="was replaced by"):
        handle.attach()
    assert not handle.is_attached


def test_a_wrapper_of_a_block_that_stays_whole_is_called(tower: nn.Module) -> None:
    with tokensieve.apply(tower, CLOSED):
        expected = encode(tower)
    calls: list[Any] = []
    wrap(block_of(tower), calls)
    wrap(attention_of(tower), calls)
    with tokensieve.apply(tower, CLOSED):
        assert torch.equal(encode(tower), expected)
    assert calls == [block_of(tower), attention_of(tower)]


def test_a_replaced_pooling_that_the_plan_would_skip_is_refused() -> None:
    for family, name in (("open_clip", "_global_pool"), ("timm", "pool")):
        tower: Any = make_tower(family)
        setattr(tower, name, functools.partial(getattr(tower, name)))
        before = snapshot(tower)
        with pytest.raises(UserError, match=f"{name} was replaced"):
            tokensieve.apply(tower, "resize(size=24) + pool@2:8")
        assert_untouched(tower, before)
        with tokensieve.apply(tower, CLOSED):
            encode(tower)


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
def test_hooks_of_accelerate_stay_around_the_blocks_of_a_plan(tower: nn.Module, plan: str) -> None:
    """So a model that accelerate has spread over devices gets its inputs on the right one."""
    from accelerate.hooks import remove_hook_from_module

    stock = encode(tower)
    with tokensieve.apply(tower, plan):
        expected = encode(tower)
    calls: list[Any] = []
    modules = [block_of(tower), attention_of(tower)]
    for module in modules:
        hook_by_accelerate(module, calls)
    before = snapshot(tower)
    with tokensieve.apply(tower, plan):
        assert torch.equal(encode(tower), expected) and calls == modules
    assert_untouched(tower, before)
    calls.clear()
    handle = tokensieve.apply(tower, plan)
    for module in modules:
        remove_hook_from_module(module)
    assert torch.equal(encode(tower), expected) and not calls
    handle.remove()
    assert torch.equal(encode(tower), stock) and torch.equal(encode(copy.deepcopy(tower)), stock)


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
def test_an_offloaded_model(plan: str) -> None:
    """accelerate keeps the weights elsewhere, and loads those of each layer while it runs."""
    from accelerate import cpu_offload

    tower = make_tower("hf")
    with tokensieve.apply(tower, plan):
        expected = encode(tower)
    cpu_offload(tower, execution_device=torch.device("cpu"))
    assert next(tower.parameters()).device.type == "meta"
    with tokensieve.apply(tower, plan):
        assert torch.equal(encode(tower), expected)


@pytest.mark.parametrize("plan", OPENING.values(), ids=OPENING)
def test_a_wrapper_that_comes_after_the_plan(tower: nn.Module, plan: str) -> None:
    """On a block it is called. On the attention of a block that is run in two halves it would be skipped."""
    calls: list[Any] = []
    with tokensieve.apply(tower, plan):
        expected = encode(tower)
        wrap(block_of(tower), calls)
        assert torch.equal(encode(tower), expected) and calls == [block_of(tower)]
        wrap(attention_of(tower), calls)
        with pytest.raises(UserError, match=r"forward was replaced by .*loud.*wrap the whole block"):
            encode(tower)


# --- wrappers that are taken off while a plan is on ---------------------------------------------------------------


@pytest.mark.parametrize("plan", [CLOSED, "pool@1:8", "grid@1:8 + grid@3:4"])
def test_a_plan_that_somebody_has_taken_off_a_block_is_noticed(tower: nn.Module, plan: str) -> None:
    """A wrapper that restores the forward it has saved takes the plan off that block."""
    stock = encode(tower)
    for block in open_tower(tower).blocks[:3]:
        handle = tokensieve.apply(tower, plan)
        expected = encode(tower)
        if "forward" not in vars(block.module):
            handle.remove()
            continue  # a block that the plan does not change
        vars(block.module).pop("forward")
        with pytest.raises((UserError, RuntimeError), match=r"the plan did not run.*apply it again|size of tensor"):
            encode(tower)  # a stock block with rotary angles fails itself
        assert handle.kept is None and handle.ledger == []
        handle.remove()
        assert torch.equal(encode(tower), stock)
        handle.attach()
        assert torch.equal(encode(tower), expected)
        handle.remove()


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_a_plan_that_somebody_has_taken_off_a_decoder_layer_is_noticed(number: int) -> None:
    model, inputs = vlm_models.llava(), vlm_models.prompts((1,), (4,))
    with torch.no_grad(), tokensieve.apply(model, "grid@llm.1:8 + grid@llm.4:4") as handle:
        expected = model(**inputs).logits
        vars(model.model.language_model.layers[number]).pop("forward")
        for call in (model, functools.partial(model.generate, max_new_tokens=2)):
            with pytest.raises(UserError, match=f"layer {number} of the decoder ran without the plan"):
                call(**inputs)
        assert handle.kept is None
        handle.remove()
        handle.attach()
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("plan", ["grid@llm.1:8", "grid@1:8"])
def test_a_plan_that_somebody_has_taken_off_a_decoder_is_noticed(plan: str) -> None:
    model, inputs = vlm_models.llava(), vlm_models.prompts((1,), (4,))
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        vars(model.model.language_model).pop("forward")
        with pytest.raises(UserError, match="the decoder ran without the plan"):
            model(**inputs)
        assert handle.kept is None


def test_a_head_whose_attention_somebody_has_taken_away_is_noticed() -> None:
    model: Any = make_reid_model()
    with torch.no_grad(), tokensieve.apply(model, "anchor@out:4(k=2)"):
        vars(open_tower(model).blocks[-1].module).pop("forward")
        with pytest.raises(UserError, match="the block before it ran without the plan"):
            model.encode({"RGB": images(1, 0, (32, 16))})


# --- hooks of torch -----------------------------------------------------------------------------------------------


def output_projection(attention: Any) -> nn.Linear:
    return next(getattr(attention, name) for name in ("out_proj", "o_proj", "proj") if hasattr(attention, name))


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_that_changes_the_output_of_an_attention(tower: nn.Module, plan: str, with_kwargs: bool) -> None:
    def silence(module: Any, args: Any, *others: Any) -> Any:
        out = others[-1]
        return (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0

    silent = copy.deepcopy(tower)
    with torch.no_grad():
        for parameter in output_projection(attention_of(silent)).parameters():
            parameter.zero_()
    attention_of(tower).register_forward_hook(silence, with_kwargs=with_kwargs)
    torch.testing.assert_close(encode(tower), encode(silent))  # the stock models
    with tokensieve.apply(tower, plan), tokensieve.apply(silent, plan):
        torch.testing.assert_close(encode(tower), encode(silent))


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_that_changes_the_input_of_an_attention(tower: nn.Module, plan: str, with_kwargs: bool) -> None:
    def half(module: Any, args: Any, kwargs: Any = None) -> Any:
        halved = tuple(value / 2 if isinstance(value, Tensor) else value for value in args)
        if not with_kwargs:
            return halved
        named = {key: value / 2 if key == "hidden_states" else value for key, value in kwargs.items()}
        return halved, named

    if not with_kwargs and isinstance(tower, make_tower("hf").__class__):
        pytest.skip("this attention gets its input by name")
    halved = copy.deepcopy(tower)
    block = block_of(halved)
    norm = next(getattr(block, name) for name in ("ln_1", "layer_norm1", "norm1") if hasattr(block, name))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.div_(2)
    attention_of(tower).register_forward_pre_hook(half, with_kwargs=with_kwargs)
    torch.testing.assert_close(encode(tower), encode(halved))  # the stock models
    with tokensieve.apply(tower, plan) as one, tokensieve.apply(halved, plan) as other:
        torch.testing.assert_close(encode(tower), encode(halved))
        assert torch.equal(one.kept, other.kept)


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
def test_hooks_of_a_block_run(tower: nn.Module, plan: str) -> None:
    called: list[str] = []
    block_of(tower).register_forward_pre_hook(lambda *_: called.append("before"))
    block_of(tower).register_forward_hook(lambda *_: called.append("after"))
    with tokensieve.apply(tower, plan):
        encode(tower)
    assert called == ["before", "after"]


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
def test_attentions_of_transformers_are_those_of_every_layer(plan: str) -> None:
    """transformers collects them with hooks of its own."""
    model: Any = make_tower("hf")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model.vision_model(images(2, 0), output_attentions=True).attentions
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        out = model.vision_model(images(2, 0), output_attentions=True)
        sizes = {row.layer: row.tokens_out for row in handle.ledger}
    assert len(out.attentions) == len(stock) == 4
    until = 1 if plan == OPENING["sizes"] else 2  # the blocks before the first cut
    torch.testing.assert_close(out.attentions[:until], stock[:until])
    n = 36
    for number, weights in enumerate(out.attentions, start=1):
        assert weights.shape == (2, 4, 1 + n, 1 + n) and torch.isfinite(weights).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1 + n))
        n = sizes.get(str(number), sizes.get(f"{number}.attn", n))


def test_hooks_of_attention_maps_of_timm_are_refused() -> None:
    tower: Any = make_tower("timm")
    seen: list[Any] = []
    for block in tower.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda *_: seen.append(1))
    with tokensieve.apply(tower, CLOSED):
        encode(tower)
    assert len(seen) == 4
    with tokensieve.apply(tower, OPENING["attention"]), pytest.raises(UserError, match="hooks, which the plan would skip"):
        encode(tower)


def test_backward_hooks_of_an_attention_that_the_plan_would_skip_are_refused(tower: nn.Module) -> None:
    attention_of(tower).register_full_backward_hook(lambda *_: None)
    with tokensieve.apply(tower, OPENING["attention"]), pytest.raises(UserError, match="backward hooks"):
        encode(tower)


# --- replaced layers ----------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with a small trained matrix beside it, as PEFT replaces layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.added(x)
        return out


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
@pytest.mark.parametrize("family", ["timm", "timm_map", "hf"])  # the others use the weights of layers, and not the layers
def test_layers_that_were_replaced(family: str, plan: str) -> None:
    tower = make_tower(family)
    attention = attention_of(tower)
    name = "q_proj" if hasattr(attention, "q_proj") and attention.q_proj is not None else "qkv"
    for late in (False, True):
        base = getattr(attention, name)
        handle = tokensieve.apply(tower, plan)
        if late:
            setattr(attention, name, Adapted(base))
        else:
            handle.remove()
            setattr(attention, name, Adapted(base))
            handle.attach()
        adapted = getattr(attention, name)
        reduced = encode(tower)
        handle.remove()
        with torch.no_grad():
            merged = copy.deepcopy(tower)
            joint = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
            joint.load_state_dict(base.state_dict())
            joint.weight += adapted.added.weight
            setattr(attention_of(merged), name, joint)
        with tokensieve.apply(merged, plan):
            torch.testing.assert_close(reduced, encode(merged), rtol=1e-4, atol=1e-5)
        setattr(attention, name, base)


@pytest.mark.parametrize("plan", OPENING.values(), ids=OPENING)
def test_parametrised_weights(tower: nn.Module, plan: str) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    doubled = copy.deepcopy(tower)
    with torch.no_grad():
        output_projection(attention_of(doubled)).weight.mul_(2)
    torch.nn.utils.parametrize.register_parametrization(output_projection(attention_of(tower)), "weight", Double())
    with tokensieve.apply(tower, plan), tokensieve.apply(doubled, plan):
        assert torch.equal(encode(tower), encode(doubled))


def test_another_attention_of_open_clip_is_refused() -> None:
    tower: Any = make_tower("open_clip")
    tower.transformer.resblocks[1].attn = Adapted(nn.Linear(32, 32))
    with pytest.raises(tokensieve.Uncuttable, match="its attention is a Adapted"):
        tokensieve.apply(tower, CLOSED)


# --- copies -------------------------------------------------------------------------------------------------------


def save(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps, save])
@pytest.mark.parametrize("kind", ["tower", "vlm", "reid"])
def test_copies_are_refused_while_a_plan_is_on(kind: str, copying: Callable[[Any], Any]) -> None:
    model: Any = {"tower": lambda: make_tower("timm"), "vlm": vlm_models.llava, "reid": make_reid_model}[kind]()
    before = snapshot(model)
    with tokensieve.apply(model, "grid@1:4"):
        with pytest.raises(UserError, match="cannot be copied"):
            copying(model)
        saved = model.state_dict()
    assert_untouched(model, before)
    assert list(saved) == list(before[0])
    copying(model)


def test_what_a_removed_plan_leaves_in_the_hands_of_others_can_be_copied(tower: nn.Module) -> None:
    stock = encode(tower)
    with tokensieve.apply(tower, CLOSED):
        saved = block_of(tower).forward
    block_of(tower).forward = saved  # as a wrapper does that is taken off
    for made in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower)), tower):
        assert torch.equal(encode(made), stock)
        with tokensieve.apply(made, OPENING["attention"]):
            encode(made)
        assert torch.equal(encode(made), stock)


def replicate(module: nn.Module) -> Any:
    """What torch.nn.DataParallel does for each device, without the devices."""
    replica: Any = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicate(child)
    for name, parameter in module._parameters.items():
        replica._parameters[name] = parameter
    return replica


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED, "resize(size=24)"])
def test_data_parallel_replicas_are_refused(tower: nn.Module, plan: str) -> None:
    """They would run the blocks of the original, with its weights."""
    stock = encode(tower)
    with tokensieve.apply(tower, plan), pytest.raises(UserError, match="DataParallel"):
        replicate(tower)
    assert torch.equal(encode(replicate(tower)), stock)


def test_data_parallel_replicas_of_other_models_are_refused() -> None:
    for model, plan in ((vlm_models.llava(), "random@llm.1:8"), (make_reid_model(), "random@out:4")):
        with tokensieve.apply(model, plan), pytest.raises(UserError, match="DataParallel"):
            replicate(model)
        replicate(model)


# --- the model changes while a plan is on -------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*OPENING.values(), CLOSED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_of_the_weights_may_change_while_a_plan_is_on(tower: nn.Module, plan: str, dtype: torch.dtype) -> None:
    x = images(2, 0).to(dtype)

    def run() -> tuple[Tensor, Any]:
        with torch.no_grad():
            return encode_image(tower, x), handle.kept

    handle: Handle = tokensieve.apply(tower, plan)
    tower.to(dtype)
    late = run()
    handle.remove()
    handle = tokensieve.apply(tower, plan)
    early = run()
    assert torch.equal(late[0], early[0]) and torch.equal(late[1], early[1]) and late[0].dtype == dtype


def test_training_may_be_switched_on_and_off_while_a_plan_is_on(tower: nn.Module) -> None:
    with tokensieve.apply(tower, OPENING["sizes"]):
        expected = encode(tower)
        tower.train()
        encode_image(tower, images(2, 0)).sum().backward()
        tower.eval()
        assert torch.equal(encode(tower), expected)
        tower.requires_grad_(False)
        assert not encode_image(tower, images(2, 0)).requires_grad and torch.equal(encode(tower), expected)


def test_a_part_follows_the_device_of_the_model_and_must_be_float32() -> None:
    from tokensieve.methods.registry import get_method
    from tokensieve.testing import fresh_part

    tower = make_tower("timm")
    part = fresh_part(get_method("learned"), 32)
    with tokensieve.apply(tower, "learned@2:8", weights={"learned": part}) as handle:
        encode(tower)
        step = handle.plan.steps[0]
        assert handle._chooser.part(step, torch.device("cpu")) is part
        part.bfloat16()
        with pytest.raises(UserError, match=r"learned are torch\.bfloat16.*float32"):
            encode(tower)
        part.float()
        encode(tower)
        handle._chooser.part(step, torch.device("meta"))
        assert {parameter.device.type for parameter in part.parameters()} == {"meta"}
