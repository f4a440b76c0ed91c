"""One model with a plan in several threads: calls that fail, calls inside hooks; every result is that of one thread alone."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.attack import Attack
from tests.hostile.engine import KINDS, applied, call_of, make_inputs, model_of
from tests.support.states import same
from tokensieve.cutting.handle import Handle

Case = tuple[Callable[[], Any], Tensor]  # a call, and the indices of its samples


class Stop(BaseException):
    """What a hook raises; like KeyboardInterrupt it is no Exception."""


class Hook:
    """A hook that does something once in the threads that ask for it."""

    def __init__(self) -> None:
        self.wish = threading.local()

    def __call__(self, *_: Any) -> None:
        action, self.wish.action = getattr(self.wish, "action", None), None
        if action is not None:
            action()


def run(handle: Handle, case: Case) -> tuple[Any, ...]:
    call, samples = case
    with torch.inference_mode(), handle.call(samples=samples):
        return call(), handle.ledger, handle.kept, handle.groups, handle.samples


def _one_try(rng: random.Random, folder: Path) -> None:
    kind = rng.choice(KINDS)
    model = model_of(kind)
    cases: list[Case] = []
    for _ in range(rng.randint(2, 4)):
        inputs, n = make_inputs(rng, kind)
        cases.append((call_of(model, kind, inputs, generates=rng.random() < 0.3), torch.arange(n) + rng.randrange(100)))
    hook, interval = Hook(), sys.getswitchinterval()
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    mark = rng.choice(norms).register_forward_hook(hook)
    try:
        with applied(model, rng, kind) as handle:
            with ThreadPoolExecutor(1) as pool:
                alone = list(pool.map(lambda case: run(handle, case), cases))
            sys.setswitchinterval(1e-5)
            _compare(rng, handle, hook, cases, alone)
    finally:
        sys.setswitchinterval(interval)
        mark.remove()


def _compare(rng: random.Random, handle: Handle, hook: Hook, cases: list[Case], alone: list[Any]) -> None:
    n_threads = rng.randint(2, 6)
    orders = [[(rng.randrange(len(cases)), rng.choice("cccfgn")) for _ in range(rng.randint(2, 4))] for _ in range(n_threads)]
    barrier = threading.Barrier(n_threads)

    def work(order: list[tuple[int, str]]) -> None:
        barrier.wait()
        for number, kind in order:
            inner = (number + 1) % len(cases)
            if kind in "fg":
                _check_failing(handle, hook, cases[number], cases[inner] if kind == "g" else None)
                continue
            if kind == "n":
                hook.wish.action = lambda inner=inner: _check(run(handle, cases[inner]), alone[inner], "a call inside a call")
            _check(run(handle, cases[number]), alone[number], f"a call ({handle.plan})")
            hook.wish.action = None

    with ThreadPoolExecutor(n_threads) as pool:
        for done in [pool.submit(work, order) for order in orders]:
            done.result()


def _check(got: Any, wanted: Any, what: str) -> None:
    assert same(got, wanted), f"{what} differs: ledger {got[1]}, alone {wanted[1]}"


def _check_failing(handle: Handle, hook: Hook, case: Case, inner: Case | None) -> None:
    """A call that fails leaves no record, also if a call inside it has succeeded."""

    def stop() -> None:
        if inner is not None:
            run(handle, inner)
        raise Stop

    hook.wish.action = stop
    try:
        run(handle, case)
    except Stop:
        assert handle.ledger == [] and handle.kept is None and handle.samples is None, "a failed call left a record"
    hook.wish.action = None  # the hook's module may not be part of this call


ATTACKS = (Attack("threads", "one model with a plan in several threads", _one_try, per_thousand=200, short=25),)
