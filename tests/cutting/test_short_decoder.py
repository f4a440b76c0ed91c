"""The decoder stays short between cuts: the same states as with all tokens after every layer, and no waiting for tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tokensieve
from tests.support.vlm_models import GRID, llava, prompts
from tokensieve import UserError
from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle
from tokensieve.methods.registry import describe
from tokensieve.models.registry import open_vlm
from tokensieve.plan import Budget, Plan, Step, Where

N = GRID**2
PLANS = (
    "grid@llm.2:10",
    "random@llm.0:20 + grid@llm.2:10 + anchor@llm.5:4(k=2)",
    "grid@out:20 + grid@llm.1:10(rest=merge)",
    "cover@2:12 + cover@llm.3:5",
)


def lengths_of_layers(model: Any, batch: dict[str, Tensor], **arguments: Any) -> list[int]:
    """The number of tokens that every layer returns, seen from inside of the layers."""
    found: list[int] = []
    layers = model.model.language_model.layers
    handles = [layer.mlp.register_forward_hook(lambda _m, _a, out: found.append(out.shape[1])) for layer in layers]
    try:
        with torch.no_grad():
            model(**batch, **arguments)
    finally:
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_reading_between_layers_changes_nothing(plan: str) -> None:
    """Recorded hidden states have the original length; logits and answers are those of the short way, bit for bit."""
    model, batch = llava(), prompts((1, 2), (5, 3))
    with torch.no_grad(), tokensieve.apply(model, plan) as handle, handle.call(samples=torch.arange(3)):
        short = model(**batch).logits
        whole = model(**batch, output_hidden_states=True)
        again = model(**batch).logits  # the hooks that recorded are still there, but ask for nothing
    assert torch.equal(short, whole.logits) and torch.equal(short, again)
    assert all(state.shape[1] == batch["input_ids"].shape[1] for state in whole.hidden_states)


def test_layers_between_cuts_return_the_tokens_that_are_left() -> None:
    model, batch = llava(), prompts((1,), (5,))
    length, layers = batch["input_ids"].shape[1], model.model.language_model.layers
    shapes: dict[int, int] = {}
    with torch.no_grad(), tokensieve.apply(model, "grid@llm.2:10 + grid@llm.4:6"):
        for number, layer in enumerate(layers):  # an attribute, as PEFT sets it: not a hook
            planned = layer.forward

            def forward(*args: Any, _planned: Any = planned, _number: int = number, **kwargs: Any) -> Any:
                out = _planned(*args, **kwargs)
                shapes[_number] = out.shape[1]
                return out

            layer.forward = forward
        model(**batch)
        for layer in layers:
            del layer.forward
    text = length - N
    assert shapes == {0: length, 1: length, 2: text + 10, 3: text + 10, 4: text + 6, 5: length}


def test_a_hook_on_a_layer_sees_all_tokens() -> None:
    model, batch = llava(), prompts((1,), (5,))
    found: list[int] = []
    hook = model.model.language_model.layers[3].register_forward_hook(lambda _m, _a, out: found.append(out.shape[1]))
    with torch.no_grad(), tokensieve.apply(model, PLANS[0]):
        seen = model(**batch).logits
        hook.remove()
        assert torch.equal(seen, model(**batch).logits)
    assert found == [batch["input_ids"].shape[1]]
    with tokensieve.apply(model, PLANS[0]):
        assert lengths_of_layers(model, batch)[3] == found[0] - N + 10


def test_fewer_layers_than_the_decoder_has() -> None:
    """Early exit sets the number of layers to run in the config; the last one that runs returns all tokens."""
    model, batch = llava(), prompts((1,), (5,))
    model.model.language_model.config.num_hidden_layers = 4
    with torch.no_grad(), tokensieve.apply(model, PLANS[0]):
        assert model(**batch).logits.shape[1] == batch["input_ids"].shape[1]


class Conversions(TorchDispatchMode):
    """Counts how often a tensor becomes a number of Python, or decides a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "aten.equal.", "is_nonzero")):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("words", [(5, 5), (5, 2)], ids=["even", "padded"])
def test_a_decode_step_waits_for_no_tensor(plan: str, words: tuple[int, int]) -> None:
    model, batch = llava(), prompts((1, 1), words)
    decoder = model.model.language_model

    def count() -> list[list[str]]:
        """The conversions in each pass of the decoder."""
        steps: list[list[str]] = []
        planned = decoder.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with Conversions() as counter:
                out = planned(*args, **kwargs)
            steps.append(counter.found)
            return out

        decoder.forward = forward
        with torch.no_grad():
            model.generate(**batch, max_new_tokens=4, do_sample=False)
        decoder.__dict__.pop("forward")
        return steps

    stock = count()
    handle = tokensieve.apply(model, plan)
    planned = decoder.__dict__["forward"]
    steps = count()
    decoder.forward = planned
    handle.remove()
    assert len(steps) == 4 and len(steps[0]) > len(stock[0])  # reading the prompt groups its images
    assert steps[1:] == stock[1:]


def test_a_prompt_without_padding_needs_no_mask() -> None:
    model, batch = llava(), prompts((1, 1), (5, 5))
    masks: list[Any] = []
    model.model.language_model.layers[4].self_attn.register_forward_pre_hook(
        lambda _m, _a, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    with tokensieve.apply(model, "grid@llm.2:10"):
        model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert masks == [None, None, None]


# --- attention on demand ----------------------------------------------------------------------------------------------


def seen_by_a_method(model: Any, batch: dict[str, Tensor], plan: str, option: str, look: Any) -> list[Any]:
    """What `look` finds in the view of a method at layer 3, after the steps of a plan."""
    found: list[Any] = []

    def method(view: View, keep: int) -> Reduction:
        found.append(look(view))
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    step = Step(describe(method, needs=("attention",)), Where.parse("llm.3"), Budget.parse("3"), (("attention", option),))
    with torch.no_grad(), Handle(model, Plan((*Plan.parse(plan).steps, step))):
        model(**batch)
    return found


@pytest.mark.parametrize("plan", ["none", "grid@llm.1:20", "cover@out:14"])
def test_the_attention_of_the_previous_layer_is_the_one_that_it_used(plan: str) -> None:
    """The row of the last token is what eager attention records in layer 2."""
    model, batch = llava("llama", "eager"), prompts((1, 1), (5, 3))
    rows = torch.cat(seen_by_a_method(model, batch, plan, "previous", lambda view: view.attention.cls_row()))
    with torch.no_grad():
        if plan == "none":
            recorded = model(**batch, output_attentions=True).attentions[2]
        else:
            with tokensieve.apply(model, plan):
                recorded = model(**batch, output_attentions=True).attentions[2]
    last = recorded.mean(1)[:, -1]  # (B, T)
    for row, (mine, theirs) in enumerate(zip(rows, last, strict=True)):
        n = mine.shape[0]
        padding = int((batch["attention_mask"][row] == 0).sum()) if plan == "none" else None
        start = None if padding is None else padding + int((batch["input_ids"][row, padding:] == 63).nonzero()[0])
        windows = theirs.unfold(0, n, 1) if start is None else theirs[None, start : start + n]
        assert float((windows - mine).abs().amax(1).min()) < 1e-5


def test_queries_are_computed_only_if_they_are_asked_for() -> None:
    model, batch = llava(), prompts((1,), (5,))
    calls: list[int] = []
    projection = open_vlm(model).decoder.layers[3].self_attn.q_proj  # type: ignore[union-attr]
    projection.register_forward_hook(lambda _m, _a, out: calls.append(out.shape[1]))
    seen_by_a_method(model, batch, "none", "layer", lambda view: view.attention.cls_row())
    assert calls[0] == 1  # of the last token; then the layer itself
    calls.clear()
    seen_by_a_method(model, batch, "none", "layer", lambda view: view.attention.columns(torch.zeros((1, 1), dtype=torch.long)))
    assert calls[:2] == [1, 1 + N]
    calls.clear()
    seen_by_a_method(model, batch, "none", "previous", lambda view: view.attention.row_lse())
    assert len(calls) == 1  # the layer itself


def test_previous_attention_needs_a_previous_layer() -> None:
    model, batch = llava(), prompts((1, 1), (5, 3))
    with pytest.raises(UserError, match=r"use @llm\.1"):
        tokensieve.apply(model, "anchor@llm.0:10(k=4,attention=previous)")
    with pytest.raises(UserError, match="decoder layers"):
        Plan.parse("anchor@2:10(k=4,attention=previous)")
    with torch.no_grad(), tokensieve.apply(model, "anchor@llm.2:10(k=4,attention=previous)") as handle:
        model.generate(**batch, max_new_tokens=3, do_sample=False)
        previous = handle.kept
    with torch.no_grad(), tokensieve.apply(model, "anchor@llm.2:10(k=4)") as handle:
        model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert previous is not None and previous.shape == (2, 10) and not torch.equal(previous, handle.kept)


def test_features_of_another_call_are_noticed() -> None:
    """By their first and last tokens, also if the tower dropped what was there."""
    model, one, two = llava(), prompts((1,), (5,)), prompts((1,), (5,), seed=1)
    with torch.no_grad(), tokensieve.apply(model, "cover@2:5"):
        features = model.model.get_image_features(pixel_values=one["pixel_values"])
        model.model.get_image_features(pixel_values=two["pixel_values"])
        with pytest.raises(UserError, match="not those computed last"):
            model.model.get_placeholder_mask(
                one["input_ids"],
                inputs_embeds=model.get_input_embeddings()(one["input_ids"]),
                image_features=torch.cat(tuple(features.pooler_output)),
            )
