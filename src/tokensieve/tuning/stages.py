"""The two stages of a search: many plans on few images with predicted cost, then few on all images with measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokensieve.errors import UserError
from tokensieve.plan import Plan
from tokensieve.tasks.fidelity.measures import mean_and_stderr
from tokensieve.tuning.costs import Costs
from tokensieve.tuning.evaluator import Evaluator
from tokensieve.tuning.front import at_speed, choose, pareto, slope, thin_out
from tokensieve.tuning.space import CONTROLS, RESIZE, Candidate, Space
from tokensieve.tuning.study import Measured, Record, Trial

GOALS = (0.8, 1.5)  # of the target: the range of predicted speed-ups that is searched
GROUP = 4  # plans that are timed together
FINALISTS, ON_FRONT, CORRECTED = 8, 5, 3
CLOSE = 0.015  # a measured speed-up that far above the target is not corrected
REJECTED = 6  # attempts for each trial; plans that cannot be made are rejected

Report = Callable[[str], Any]
Wanted = tuple[Plan, Candidate, float | None]  # a plan, what it was made of, and for which speed-up


@dataclass(frozen=True)
class Goal:
    """What is wanted: a speed-up, a number of tokens, or both."""

    speedup: float | None
    keep: int | None


@dataclass
class Tuning:
    """A search under way."""

    evaluator: Evaluator
    space: Space
    costs: Costs
    record: Record
    goal: Goal
    n_images: int
    n_cheap: int
    rounds: int
    deadline: float  # seconds of Record.seconds after which nothing new begins
    report: Report = lambda text: None

    # --- many plans on few images

    def search(self, trials: int, until: float) -> None:
        """Cheap trials until there are so many, or the time is over. The seeds are always tried."""
        at_goal = {} if self.goal.keep is not None else {"goal": self.goal.speedup}
        seeds = [{**seed, **at_goal} for seed in self.space.seeds()]
        self.record.enqueue(seeds)
        attempts = REJECTED * trials
        while len(self.record.trials) < trials and attempts > 0:
            if self.record.seconds > until and len(self.record.trials) >= min(trials, len(seeds) // 2):
                break
            attempts -= 1
            trial = self.record.ask()
            candidate = self.space.suggest(trial)
            goal = self._suggest_goal(trial)
            plan = self._plan(candidate, goal)
            row = None if plan is None else self._try(plan, candidate, goal)
            if row is None:
                self.record.reject(trial)
                continue
            self.record.add(trial, [math.log(max(row.distance, 1e-9)), row.speedup], row)
            self.report(self._best_text())

    def _suggest_goal(self, trial: Any) -> float | None:
        if self.goal.keep is not None:
            return None
        assert self.goal.speedup is not None
        low, high = (share * self.goal.speedup for share in GOALS)
        return float(trial.suggest_float("goal", min(self.goal.speedup, max(1.05, low)), high, log=True))

    def _plan(self, candidate: Candidate, goal: float | None) -> Plan | None:
        try:
            if self.goal.keep is not None:
                return self.costs.at_keep(candidate, self.goal.keep)
            assert goal is not None
            return self.costs.at_goal(candidate, goal)
        except UserError:  # the position does not suit the method
            return None

    def _try(self, plan: Plan, candidate: Candidate, goal: float | None) -> Trial | None:
        known = next((row for row in self.record.trials if row.plan == str(plan)), None)
        if known is not None:
            return known
        try:
            values, handle = self.evaluator.measures(plan, self.n_cheap)
            gflops = self.evaluator.gflops(plan)
        except UserError:
            return None
        mean, stderr = mean_and_stderr(next(iter(values.values())))
        if not math.isfinite(mean):
            return None
        ledger = handle.ledger
        tokens = ledger[-1].tokens_out if ledger else self.space.outline.tokens
        speedup = self.costs.speedup(plan, candidate.method)
        return Trial(str(plan), candidate.to_json(), goal, speedup, mean, stderr, gflops, tokens)

    def _best_text(self) -> str:
        best = choose(self._trials(), lambda row: row.distance, lambda row: row.speedup, self.goal.speedup)
        return "" if best is None else f"{best.plan} {best.distance:.4g}"

    # --- few plans on all images

    def measure(self) -> None:
        """Controls and the best candidates on all images, with measured times; then with budgets corrected by these times."""
        controls = self.controls()
        finalists = self.finalists()
        first = [*finalists[:2], *controls, *finalists[2:]]
        self._measure_all(first, always=2 + len(controls))
        if self.goal.keep is None:
            for always in (1, 0):
                self._measure_all(self._corrected(), always)

    def measure_first(self) -> None:
        """A few of the best candidates and the controls, whose times correct the predictions for the rest of the search."""
        if not self.record.rows:
            self._measure_all([*self.finalists()[:3], *self.controls()], always=2)
            self.recalibrate()

    def recalibrate(self) -> None:
        """Corrects the predictions by all plans that were measured so far."""
        rows = [(row.candidate["method"], Plan.parse(row.plan), row.speedup) for row in self.record.rows]
        self.costs.calibrate(rows)

    def _trials(self) -> list[Trial]:
        """The cheap trials with the speed-ups that are predicted by now."""
        predict = self.costs.speedup
        return [replace(t, speedup=predict(Plan.parse(t.plan), t.candidate["method"])) for t in self.record.trials]

    def measured_plans(self) -> int:
        """How many plans the second stage measures at most, for the progress bar."""
        return FINALISTS + ON_FRONT + len(CONTROLS) + 2 + 2 * CORRECTED

    def controls(self) -> list[Wanted]:
        """Resizing alone, random and grid, at the goal."""
        made: list[Wanted] = []
        if not self.space.outline.no_resize_reason:
            least, most = max(1, math.ceil(self.space.outline.side / 2)), self.space.outline.side
            with_resize = Space(self.space.outline, (), True, self.space.keep)
            costs = Costs(with_resize, self.costs.coefficients, self.costs.exponents)
            plan = costs.at_keep(Candidate(0, RESIZE), self.goal.keep) if self.goal.keep is not None else None
            if self.goal.speedup is not None and self.goal.keep is None:
                plan = costs.at_goal(Candidate(0, RESIZE), self.goal.speedup) or with_resize.plan(Candidate(least, RESIZE))
            if plan is not None:
                side = plan.image_step.options["size"] // self.space.outline.patch if plan.image_step else most
                made.append((plan, Candidate(side, RESIZE), self.goal.speedup))
                if self.goal.keep is None and side + 1 < most:  # the next larger image, which is a little slower
                    larger = Candidate(side + 1, RESIZE)
                    made.append((with_resize.plan(larger), larger, self.goal.speedup))
        for name in CONTROLS:
            fitting = [each for position in self._control_positions() if (each := self._control(name, position)) is not None]
            if fitting:  # the position at which it may keep about a quarter
                quarter = self.space.outline.tokens / 4
                plan, candidate, _ = min(fitting, key=lambda each: abs(math.log(each[2] / quarter)))
                made.append((plan, candidate, self.goal.speedup))
        return made

    def _control_positions(self) -> list[str]:
        """With a number of tokens: the output of a tower that has one, else half the depth. With a speed-up: all."""
        positions = self.space.positions
        if self.goal.keep is None:
            return positions
        return ["out"] if "out" in positions else positions[-1:]

    def _control(self, name: str, position: str) -> tuple[Plan, Candidate, int] | None:
        """The control at a position, at the goal, and how many tokens it keeps."""
        candidate = Candidate(self.space.outline.side, name, position)
        plan = self._plan(candidate, self.goal.speedup)
        if plan is None:
            return None
        blocks, layers = self.space.outline.counts(plan)
        return plan, candidate, (layers or blocks)[-1]

    def finalists(self) -> list[Wanted]:
        """The best candidates of the cheap trials at the goal, and the front of the others."""
        trials = self._trials()
        if not trials:
            return []
        if self.goal.keep is not None:
            ranked = sorted(trials, key=lambda row: row.distance)
            fast = [row for row in ranked if self.goal.speedup is None or row.speedup >= self.goal.speedup]
            chosen: list[tuple[Trial, float | None]] = [(row, None) for row in fast or ranked]
        else:
            assert self.goal.speedup is not None
            target, steepness = self.goal.speedup, slope(trials, _distance, _speedup)
            ranked = sorted(trials, key=lambda row: at_speed(row.distance, row.speedup, target, steepness))
            chosen = [(row, target) for row in ranked]
        made: dict[str, Wanted] = {}
        for row, goal in chosen:
            candidate = Candidate.read(row.candidate)
            plan = Plan.parse(row.plan) if goal is None else self._plan(candidate, goal)
            if plan is not None and len(made) < FINALISTS:
                made.setdefault(str(plan), (plan, candidate, goal))
        for row in thin_out(pareto(trials, _distance, _speedup), _speedup, ON_FRONT):
            made.setdefault(row.plan, (Plan.parse(row.plan), Candidate.read(row.candidate), row.goal))
        return list(made.values())

    def _corrected(self) -> list[Wanted]:
        """The best measured candidates with the budget that should meet the target exactly, by what was measured."""
        assert self.goal.speedup is not None
        target = self.goal.speedup
        rows = [row for row in self.record.rows if row.goal is not None]
        steepness = slope(rows, self._mean, _speedup)
        rows.sort(key=lambda row: at_speed(self._mean(row), row.speedup, target, steepness))
        made: list[Wanted] = []
        for row in rows:
            candidate = Candidate.read(row.candidate)
            if candidate.method == RESIZE or 0 <= row.speedup / target - 1 < CLOSE:
                continue
            own = Costs(self.space, self.costs.coefficients)
            own.calibrate([(candidate.method, Plan.parse(row.plan), row.speedup)])
            plan = own.at_goal(candidate, target * (1 + CLOSE / 2))
            if plan is not None:
                made.append((plan, candidate, target))
        return made[:CORRECTED]

    def _measure_all(self, wanted: Sequence[Wanted], always: int) -> None:
        """Measures the plans that are not measured yet, in groups; after the deadline only the first `always`."""
        done = {row.plan for row in self.record.rows}
        left = [each for each in wanted if str(each[0]) not in done]
        while left:
            if self.record.seconds > self.deadline:
                left = [each for each in left if any(each is one for one in wanted[:always])]
            group, left = left[:GROUP], left[GROUP:]
            if group:
                self._measure_group(group)

    def _measure_group(self, group: Sequence[Wanted]) -> None:
        usable, found = [], []
        for each in group:
            try:
                found.append(self.evaluator.measures(each[0], self.n_images))
                usable.append(each)
            except UserError:  # it does not suit the model
                continue
        if not usable:
            return
        times = self.evaluator.speedups([plan for plan, _, _ in usable], self.rounds)
        for (plan, candidate, goal), (values, handle), row in zip(usable, found, times, strict=True):
            ledger = handle.ledger
            measured = Measured(
                str(plan),
                "control" if candidate.is_control else "search",
                candidate.to_json(),
                goal,
                row["speedup"],
                row["speedup_oracle"],
                row["seconds"],
                row["seconds_full"],
                self.evaluator.gflops(plan),
                ledger[-1].tokens_out if ledger else self.space.outline.tokens,
                {name: value.tolist() for name, value in values.items()},
                handle.notes,
            )
            self.record.add_measured(measured, self._mean(measured))
            best = self._best()
            self.report("" if best is None else f"{best.plan} {self._mean(best):.4g}")

    def _best(self) -> Measured | None:
        return choose(self.record.rows, self._mean, _speedup, self.goal.speedup)

    @staticmethod
    def _mean(row: Measured) -> float:
        values = next(iter(row.values.values()))
        return sum(values) / len(values)


def calibration_plans(space: Space, costs: Costs, goal: Goal) -> dict[str, Plan]:
    """One plan of each method, about as fast as the goal, to be timed."""
    plans: dict[str, Plan] = {}
    target = goal.speedup or 1.5
    middle = len(space.positions) // 2
    for method in space.methods:
        for position in sorted(space.positions, key=lambda place: abs(space.positions.index(place) - middle)):
            candidate = Candidate(space.outline.side, method, position)
            try:
                plan = costs.at_goal(candidate, target)
            except UserError:
                continue
            if plan is not None:
                plans[method] = plan
                break
    if space.with_resize:
        smaller = costs.at_goal(Candidate(0, RESIZE), target)
        if smaller is not None:
            plans[RESIZE] = smaller
    return plans


def _distance(row: Trial) -> float:
    return row.distance


def _speedup(row: Trial | Measured) -> float:
    return row.speedup
