"""`tokensieve bench --suite`: plans of every kind on models of every family, and memory over the number of tokens."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.device import find_device, to_device
from tokensieve.errors import UserError, did_you_mean, short
from tokensieve.measuring import encoding, generation
from tokensieve.measuring.clock import describe_machine, torch_threads, watch
from tokensieve.measuring.growth import SIDES, TINY_SIDES, measure_growth
from tokensieve.measuring.results import check_output, warn, write
from tokensieve.measuring.rounds import detached_handle
from tokensieve.measuring.suite_models import SuiteModel, suite_models, tiny_suite_models
from tokensieve.measuring.tables import print_growth, print_suite_rows
from tokensieve.plan import Plan

OUTPUT = "results/bench_suite.json"
ROUNDS = {1: 7, 4: 4, 16: 2}  # by batch size
QUICK_ROUNDS = {1: 1, 2: 1}
NEW_TOKENS = 8
GROWTH_GFLOPS = 2000  # of the memory section, for the expected time
REST = 1.0  # the work beside the rounds, as a number of rounds: memory, warm-up
CHOSEN = ("plan", "pretrained", "image_size", "weights", "break_even")  # flags that the suite sets itself


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`tokensieve bench --suite`; the rows."""
    for flag in CHOSEN:
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --suite, which has its own models and plans.")
    output = args.output or OUTPUT
    return run(args.model, args.batch_size, args.repeats, args.quick, args.device, output, args.quiet, args.threads)


def run(
    model: str | None = None,
    batch_sizes: Sequence[int] | None = None,
    repeats: int | None = None,
    quick: bool = False,
    device: str | None = None,
    output: str | None = OUTPUT,
    quiet: bool = False,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """Measures the suite, or one model of it; prints a table, writes JSON to output, returns the rows.

    repeats: rounds, by default fewer for larger batches; quick: tiny models and one round, to try the suite itself.
    """
    models = _choose(tiny_suite_models() if quick else suite_models(), model)
    defaults = QUICK_ROUNDS if quick else ROUNDS
    rounds = {size: repeats or defaults.get(size, min(defaults.values())) for size in batch_sizes or defaults}
    check_output(output)
    where = find_device(device)
    with torch_threads(threads, where):
        with_growth = model is None and not quick
        began, works = time.monotonic(), [_work(each, size, count) for each in models for size, count in rounds.items()]
        steps = _Steps(works + [GROWTH_GFLOPS * with_growth] * (model is None), quiet)
        steps.tell(f"{_minutes(_expected(models, rounds, with_growth, where))} expected, if nothing else runs")
        rows = []
        for each in models:
            torch.manual_seed(0)
            net = each.build().to(where).eval()
            for size, count in rounds.items():
                steps.start(f"{each.name}, batch {size}")
                about = {"model": each.name, "device": str(where)}
                rows += [about | row for row in _measure(each, net, size, count, where)]
        growth = []
        if model is None:
            steps.start("memory")
            growth = measure_growth(TINY_SIDES if quick else SIDES, where)
        machine = describe_machine(rows)
        suite = {"quick": quick, "seconds": time.monotonic() - began}
        write(output, {"suite": suite, "rows": rows, "memory": growth, "machine": machine})
    if not quiet:
        print_suite_rows(rows)
        print_growth(growth)
    warn(machine)
    return rows


def _choose(models: list[SuiteModel], name: str | None) -> list[SuiteModel]:
    found = [model for model in models if name in (None, model.name)]
    if not found:
        names = [model.name for model in models]
        hint = did_you_mean(str(name), names)
        raise UserError(f"--model {short(name)}: the suite has {', '.join(names)}.{hint}")
    return found


def _measure(each: SuiteModel, net: nn.Module, size: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """The rows of a model at one batch size, with the case of each plan."""
    if each.prompts is None:
        images = encoding.noise_images(net, size)
        rows = encoding.measure(net, images, [Plan.parse(plan) for plan in each.plans.values()], rounds)
    else:
        handles = [detached_handle(net, plan) for plan in each.plans.values()]
        inputs = to_device(each.prompts(net, size), device)
        rows = generation.measure_all(net, inputs, handles, rounds, NEW_TOKENS, what=("oracle", "memory"))
    kind = "tower" if each.prompts is None else "vlm"
    return [{"kind": kind, "case": case} | row for case, row in zip(each.plans, rows, strict=True)]


def _expected(models: Sequence[SuiteModel], rounds: Mapping[int, int], with_growth: bool, device: torch.device) -> float:
    """The seconds that the suite takes, from its operations and the speed of this machine at matrix products."""
    a, b = torch.randn(512, 768, device=device), torch.randn(768, 3072, device=device)
    calls = 20
    watch(lambda: a @ b, device)  # warm-up
    seconds = watch(lambda: [a @ b for _ in range(calls)], device).counted(device)
    speed = calls * 2 * 512 * 768 * 3072 / seconds / 1e9  # GFLOPs per second
    work = sum(_work(model, size, count) for model in models for size, count in rounds.items())
    return (work + GROWTH_GFLOPS * with_growth) / speed


def _work(model: SuiteModel, size: int, rounds: int) -> float:
    """GFLOPs of a model at one batch size. A plan and its oracle cost about half of the full model each."""
    return model.gflops * (1 + len(model.plans)) * size * (rounds + REST)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"about {minutes} minute{'s' * (minutes > 1)}" if minutes >= 1 else "less than a minute"


class _Steps:
    """Lines on stderr that tell what is measured, and how long the rest takes at the speed so far."""

    def __init__(self, works: Sequence[float], quiet: bool) -> None:
        self.works, self.quiet, self.done, self.began = works, quiet, 0, time.monotonic()

    def start(self, name: str) -> None:
        done, left = sum(self.works[: self.done]), sum(self.works[self.done :])
        seconds = (time.monotonic() - self.began) * left / done if done else None
        self.done += 1
        rest = "" if seconds is None else f", {_minutes(seconds)} left"
        self.tell(f"[{self.done}/{len(self.works)}] {name}{rest}")

    def tell(self, text: str) -> None:
        if not self.quiet:
            print(f"tokensieve: {text}", file=sys.stderr, flush=True)
