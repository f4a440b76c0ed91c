"""Results of a search: the best files, a table of all trials, and plots of how the objectives depend on the keys."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.config import yaml_tree
from tokensieve.config.search import Search
from tokensieve.errors import printable
from tokensieve.files import csv_cell, write_text
from tokensieve.measuring import terminal
from tokensieve.search import space
from tokensieve.search.study import distinct_trials, first_number

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


def write(study: optuna.Study, data: Mapping[str, Any], settings: Search, output_key: str, folder: Path) -> bool:
    """Write trials.csv and, if a trial was completed, the best files and plots. Returns whether one was."""
    write_text(folder / "trials.csv", table(study, settings))
    best = best_trials(study, settings)
    if not best:
        return False
    for old in [folder / "best.yaml", *folder.glob("best_*.yaml")]:
        old.unlink(missing_ok=True)
    for rank, trial in enumerate(best, 1):
        name = "best" if len(settings.objectives) == 1 else f"best_{rank}"
        made = space.with_values(data, chosen(trial, settings), (output_key, folder / name))
        head = f"# Trial {first_number(trial)} of the study {printable(study.study_name)}: {reached(trial, settings)}\n"
        write_text(folder / f"{name}.yaml", head + yaml_tree.write(made))
    from tokensieve.search import pictures

    pictures.draw(study, settings, folder)
    return True


def best_trials(study: optuna.Study, settings: Search) -> list[FrozenTrial]:
    """The best trial; with several objectives the Pareto front, sorted by the first one."""
    if not any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
        return []
    if len(settings.objectives) == 1:
        return [study.best_trial]
    sign = 1 if settings.objectives[0].direction == "minimize" else -1
    return sorted(study.best_trials, key=lambda trial: sign * trial.values[0])


def chosen(trial: FrozenTrial, settings: Search) -> dict[str, Any]:
    """The values of a trial, as in its file."""
    values = {}
    for key, value in trial.params.items():
        choices = settings.space[key].choices
        if choices is not None:
            value = {space.storable(choice): choice for choice in choices}[value]
        elif isinstance(value, float):
            value = float(f"{value:.12g}")
        values[key] = value
    return values


def reached(trial: FrozenTrial, settings: Search) -> str:
    return ", ".join(
        f"{objective.name} {value:.6g}" for objective, value in zip(settings.objectives, trial.values, strict=True)
    )


def table(study: optuna.Study, settings: Search) -> str:
    """All trials as CSV; one that was started several times is one row."""
    best = {trial.number for trial in best_trials(study, settings)}
    objectives, keys = [objective.name for objective in settings.objectives], list(settings.space)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(csv_cell, ["trial", "state", "best", *objectives, *keys, "seconds", "retries", "reason"]))
    for trial in distinct_trials(study):
        state, span = trial.state.name.lower(), trial.duration
        values_of = chosen(trial, settings)
        values: Sequence[Any] = trial.values if state == "complete" else [""] * len(objectives)
        row = [
            *(first_number(trial), state, "yes" if trial.number in best else ""),
            *values,
            *(space.storable(values_of.get(key, "")) for key in keys),
            round(span.total_seconds(), 1) if span else "",
            len(trial.system_attrs.get("retry_history", [])),
            "" if state == "complete" else trial.user_attrs.get("reason", ""),
        ]
        writer.writerow(map(csv_cell, row))
    return file.getvalue()


def show(study: optuna.Study, settings: Search, folder: Path) -> None:
    """Print the best trials as a table, and how many of the others were pruned or failed."""
    from rich.table import Table

    trials = distinct_trials(study)
    ends = {state: sum(trial.state.name.lower() == state for trial in trials) for state in ("complete", "pruned", "fail")}
    title = f"{study.study_name}: {ends['complete']} trials complete, {ends['pruned']} pruned, {ends['fail']} failed"
    shown = Table(title=title, title_justify="left")
    shown.add_column("trial", justify="right")
    for objective in settings.objectives:
        shown.add_column(f"{objective.name}\n({objective.direction})", justify="right", no_wrap=True)
    for name in space.short_names(settings.space).values():
        shown.add_column(name, justify="right")
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    best = best_trials(study, settings)
    if len(settings.objectives) == 1:  # the best trial alone shows little
        sign = 1 if settings.objectives[0].direction == "minimize" else -1
        best = sorted(complete, key=lambda trial: sign * trial.values[0])[:5]
    for trial in best:
        values = [space.short(trial.params[key]) for key in settings.space]
        shown.add_row(str(first_number(trial)), *(f"{value:.6g}" for value in trial.values), *values)
    terminal.print_table(shown)
    files = "best.yaml" if len(settings.objectives) == 1 else ", ".join(f"best_{rank}.yaml" for rank in range(1, len(best) + 1))
    print(f"{files}, trials.csv, pictures and the trials in {folder}")
