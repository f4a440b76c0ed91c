"""Plans and the wrappers and hooks of others, put on a model and taken off in any order.

Wrappers and hooks here change nothing, but count their calls. So after every step the output is known: that of a clean twin of
the model under the same plan. A plan may be refused while somebody's wrapper is in its way. At the end, when everything was
taken off in a random order, the model is the stock model again.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tests.hostile.attack import Attack, check_message
from tests.hostile.engine import random_plan
from tests.support import vlm_models
from tests.support.engine_models import TOWERS, images, make_reid_model, make_tower
from tokensieve import UserError
from tokensieve.cutting.handle import Handle
from tokensieve.errors import PlanWarning
from tokensieve.models.features import encode_image
from tokensieve.models.patching import Patch
from tokensieve.models.registry import open_tower

KINDS = (*TOWERS, *TOWERS, "reid", "vlm")
_made: dict[str, tuple[Any, Any]] = {}


def _model(kind: str) -> tuple[Any, Any]:
    """A model and its clean twin. A model whose try failed is not used again."""
    if kind not in _made:
        make: Callable[[], Any] = {"vlm": vlm_models.llava, "reid": make_reid_model}.get(kind, lambda: make_tower(kind))
        _made[kind] = make(), make()
    return _made[kind]


class Wrapper:
    """A wrapper on a module's forward, by one of the usual ways."""

    def __init__(self, module: Any, way: str) -> None:
        self.module, self.way, self.calls = module, way, 0
        self.had_own = "forward" in vars(module)
        self.saved = module.forward
        if way == "accelerate":
            self._hook()
            return

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.saved(*args, **kwargs)

        if way == "wraps":
            forward = functools.wraps(self.saved)(forward)
        self.forward: Any = functools.partial(forward) if way == "partial" else forward
        module.forward = self.forward

    def _hook(self) -> None:
        from accelerate.hooks import ModelHook, add_hook_to_module

        outer = self

        class Count(ModelHook):
            def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
                outer.calls += 1
                return args, kwargs

        add_hook_to_module(self.module, Count())
        self.forward = vars(self.module)["forward"]

    @property
    def is_outermost(self) -> bool:
        return _without_removed_plans(vars(self.module).get("forward")) is self.forward

    def take_off(self) -> None:
        if self.way == "accelerate":
            from accelerate.hooks import remove_hook_from_module

            remove_hook_from_module(self.module)
        elif self.had_own:
            self.module.forward = self.saved
        else:
            del self.module.forward


class Hook:
    """A forward hook, or one before it."""

    def __init__(self, module: nn.Module, before: bool, with_kwargs: bool) -> None:
        self.module, self.calls = module, 0
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        self.mark = register(self._count, with_kwargs=with_kwargs)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def take_off(self) -> None:
        self.mark.remove()


class Scene:
    """A model, and what stands on it."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng, self.kind = rng, kind
        self.model, self.twin = _model(kind)
        self.handle: Handle | None = None
        self.plan = "none"
        self.wrappers: list[Wrapper] = []
        self.hooks: list[Hook] = []
        self.lost = False  # somebody has put back a forward that they had saved, and thrown the plan off a module
        tower = open_tower(self.model)
        blocks = [block for block in tower.blocks if block is not None]
        self.attentions = [block.attention for block in blocks]
        self.modules: list[Any] = [block.module for block in blocks] + self.attentions
        self.owner = tower.entries[0].owner  # what opens a call
        self.modules.append(self.model.head if kind == "reid" else self.owner)
        if kind == "vlm":
            self.modules += [*self.model.model.language_model.layers, self.model.model.language_model, self.model]
        self.inputs = self._inputs()
        self.stock = self._run(self.model, None)
        self.states = [dict(vars(module)) for module in self.model.modules()]

    def _inputs(self) -> Any:
        if self.kind == "vlm":
            return vlm_models.prompts((1, 2), (3, 4), seed=self.rng.randrange(9))
        seed, size = self.rng.randrange(9), (32, 16) if self.kind == "reid" else (48, 48)
        return {"RGB": images(2, seed, size)} if self.kind == "reid" else images(2, seed, size)

    def _run(self, model: Any, handle: Handle | None) -> Tensor:
        n = 3 if self.kind == "vlm" else 2
        with torch.no_grad(), nullcontext() if handle is None else handle.call(samples=torch.arange(n)):
            if self.kind == "vlm":
                out: Tensor = model(**self.inputs).logits
                return out
            if self.kind == "reid":
                return model.encode(self.inputs)
            return encode_image(model, self.inputs) if self.kind == "hf" else model(self.inputs)

    # --- steps ----------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        if self.handle is not None:
            return
        plan = random_plan(self.rng, self.kind)
        try:
            tokensieve.apply(self.twin, plan).remove()
        except UserError:
            return  # it does not fit this kind of model
        before = [dict(vars(module)) for module in self.model.modules()]
        try:
            self.handle, self.plan, self.lost = tokensieve.apply(self.model, plan), plan, False
        except UserError as error:
            check_message(str(error))
            assert "was replaced by" in str(error) and self.wrappers, f"{plan}: {error}"
            after = [dict(vars(module)) for module in self.model.modules()]
            assert _same_states(before, after), f"{plan} was refused, and left something behind"

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle, self.plan, self.lost = None, "none", False

    def attach_again(self) -> None:
        """The same handle, off and on."""
        if self.handle is not None:
            self.handle.remove()
            self.lost = False
            try:
                self.handle.attach()
            except UserError as error:
                assert "was replaced by" in str(error) and self.wrappers, str(error)
                self.handle, self.plan = None, "none"

    def wrap(self) -> None:
        module = self.rng.choice(self.modules)
        ways = ["plain", "wraps", "partial"]
        if not any(wrapper.module is module for wrapper in self.wrappers):
            ways.append("accelerate")
        self.wrappers.append(Wrapper(module, self.rng.choice(ways)))

    def unwrap(self) -> None:
        """Takes off a wrapper that nothing was put on since."""
        free = [wrapper for wrapper in self.wrappers if wrapper.is_outermost]
        if free:
            wrapper = self.rng.choice(free)
            wrapper.take_off()
            self.wrappers.remove(wrapper)

    def unwrap_rudely(self) -> None:
        """Takes off a wrapper with a plan on it: what it had saved is put back, and the plan is thrown off this module."""
        if self.handle is None:
            self.wrap()
            self.apply()
        mine = [wrapper for wrapper in self.wrappers if self._is_under_plan(wrapper)]
        if mine:
            wrapper = self.rng.choice(mine)
            wrapper.take_off()
            self.wrappers.remove(wrapper)
            self.lost = True

    def _is_under_plan(self, wrapper: Wrapper) -> bool:
        there = vars(wrapper.module).get("forward")
        is_ours = isinstance(there, MethodType) and isinstance(there.__self__, Patch) and there.__self__.is_active
        newest = [each for each in self.wrappers if each.module is wrapper.module][-1]
        return is_ours and newest is wrapper and wrapper.way != "accelerate" and wrapper.module is not self.owner

    def hook(self) -> None:
        self.hooks.append(Hook(self.rng.choice(self.modules), self.rng.random() < 0.5, self.rng.random() < 0.5))

    def unhook(self) -> None:
        if self.hooks:
            self.hooks.pop(self.rng.randrange(len(self.hooks))).take_off()

    def fail(self) -> None:
        """A call that fails leaves no record."""
        inputs, bad = self.inputs, torch.zeros(2, 1, 4, 4)
        named = {"vlm": {**inputs, "pixel_values": bad} if self.kind == "vlm" else {}, "reid": {"RGB": bad}}
        self.inputs = named.get(self.kind, bad)
        try:
            self._run(self.model, self.handle)
            raise ZeroDivisionError("nonsense was encoded")
        except (AttributeError, TypeError, ValueError, RuntimeError, AssertionError):
            assert self.handle is None or self.handle.kept is None, "a failed call left a record"
        finally:
            self.inputs = inputs

    def copy(self) -> None:
        way = self.rng.choice((copy.copy, copy.deepcopy, _pickle))
        try:
            made = way(self.model)
        except UserError as error:
            assert "cannot be copied" in str(error) and self.handle is not None, str(error)
            return
        except (AttributeError, TypeError, pickle.PicklingError):
            has_local = self.wrappers or self.hooks or self.kind in ("hf", "vlm")  # transformers has hooks of its own
            assert has_local and way is not copy.copy, f"{way.__name__} failed"
            return
        assert self.handle is None or way is copy.copy, f"a model with a plan was copied by {way.__name__}"
        if self.handle is None and not self.wrappers:
            assert torch.equal(self._run(made, None), self.stock), "the copy is another model"

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        counts = [each.calls for each in (*self.wrappers, *self.hooks)]
        if self.lost:
            self._check_lost()
            return
        expected = self._expect()
        try:
            got = self._run(self.model, self.handle)
        except UserError as error:  # a plan cannot call what stands on the attention of a block that it runs in two halves
            check_message(str(error))
            late = any(wrapper.module in self.attentions and wrapper.way != "accelerate" for wrapper in self.wrappers)
            assert "wrap the whole block" in str(error) and late and self.handle is not None, str(error)
            assert self.handle.kept is None, "a failed call left a record"
            return
        assert torch.equal(got, expected), f"another output under {self.plan}"
        for each, before in zip((*self.wrappers, *self.hooks), counts, strict=True):
            assert each.calls > before, f"{type(each).__name__} on {type(each.module).__name__} was not called: {self.plan}"

    def _check_lost(self) -> None:
        """What somebody has thrown off is noticed, or was not needed."""
        assert self.handle is not None
        try:
            got = self._run(self.model, self.handle)
        except (UserError, RuntimeError) as error:  # a stock block may itself fail with fewer tokens
            if isinstance(error, UserError):
                check_message(str(error))
            assert self.handle.kept is None, "a failed call left a record"
            return
        assert torch.equal(got, self._expect()), f"{self.plan} was thrown off a module, and nobody said so"

    def _expect(self) -> Tensor:
        with tokensieve.apply(self.twin, self.plan) as handle:
            return self._run(self.twin, handle)

    def take_everything_off(self) -> None:
        """In a random order; wrappers of one module from the outside to the inside."""
        while self.handle is not None or self.wrappers or self.hooks:
            self.rng.choice((self.remove, self.unwrap, self.unhook))()
            if not self.lost and self.rng.random() < 0.3:
                self.check()
            if self.handle is None and self.wrappers and not any(wrapper.is_outermost for wrapper in self.wrappers):
                raise AssertionError("a wrapper cannot be reached any more")
        assert torch.equal(self._run(self.model, None), self.stock), "not the stock model"
        for module, before in zip(self.model.modules(), self.states, strict=True):
            now = dict(vars(module))
            left = now.pop("forward", None)  # accelerate, and wrappers that put back what they saved, leave one
            assert left is None or _is_stock(left, module), f"{type(module).__name__} has another forward"
            vars(module).pop("forward", None)
            assert now.keys() == before.keys() - {"forward"}, now.keys() ^ before.keys()


def _pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _same_states(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(a.keys() == b.keys() and all(a[key] is b[key] for key in a) for a, b in zip(one, other, strict=True))


def _is_stock(forward: Any, module: Any) -> bool:
    """Whether this is the forward of the module's class."""
    return getattr(_without_removed_plans(forward), "__func__", None) is type(module).forward


def _without_removed_plans(forward: Any) -> Any:
    """What is called in the end: somebody who wrapped a plan that was removed since puts it back when they go."""
    while isinstance(forward, MethodType) and isinstance(forward.__self__, Patch) and not forward.__self__.is_active:
        forward = forward.__self__.function
    return forward


STEPS = (
    *(Scene.apply, Scene.apply, Scene.remove, Scene.attach_again, Scene.wrap, Scene.wrap, Scene.unwrap, Scene.unwrap_rudely),
    *(Scene.unwrap_rudely, Scene.hook, Scene.unhook, Scene.fail, Scene.copy),
)


def _one_try(rng: random.Random, folder: Path) -> None:
    kind = rng.choice(KINDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        scene = Scene(rng, kind)
        try:
            for _ in range(rng.randint(2, 8)):
                rng.choice(STEPS)(scene)
                scene.check()
            scene.take_everything_off()
        except BaseException:
            _made.pop(kind)
            raise


ATTACKS = (Attack("wrappers", "plans, wrappers and hooks of others, in any order", _one_try, per_thousand=500, short=60),)
