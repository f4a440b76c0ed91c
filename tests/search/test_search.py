"""A search tries what its file says, in so many trials as it says, whatever is killed; and what it writes can be used."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.paths import ROOT
from tokensieve import config, files, search
from tokensieve.config import document
from tokensieve.config.search import Dimension, Manager, Objective
from tokensieve.errors import UserError
from tokensieve.search import results, space, workers
from tokensieve.search import trial as search_trial
from tokensieve.search.study import RETRIES, first_number

optuna = pytest.importorskip("optuna")
TOY = ROOT / "tests" / "support" / "toy_search.py"

FILE = """
task: clip
output: unused
optimizer: {lr: "1e-3", warmup: 2}
phases:
  - {steps: 50, batch: 64}
manager_settings: {mode: optuna, n_workers: 2}
search_settings:
  enable: true
  n_trials: 4
  seed: 3
  pruner: none
  objectives: [{name: score, direction: maximize}]
  space:
    optimizer.lr: {low: 1e-5, high: 1e-1, log: true}
    optimizer.weight_decay: {low: 0, high: 2, step: 0.1}
    phases.0.batch: {low: 16, high: 64, step: 16}
    phases.0.level: {choices: [[0.0, 1.0], [1.0, 1.0]]}
"""


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(workers, "WORKER", (str(TOY),))
    monkeypatch.setattr(workers, "PAUSE", 0.05)


@pytest.fixture
def faults(monkeypatch):
    return lambda **wish: monkeypatch.setenv("TOY", json.dumps(wish))


def written(folder, text=FILE):
    path = folder / "toy search.yaml"
    path.write_text(text)
    return path


def rows(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def tries(folder, trial):
    """Of each time a trial was begun: the process and the step."""
    return [tuple(map(int, row.split())) for row in (folder / "trials" / str(trial) / "tries").read_text().splitlines()]


# --------------------------------------------------------------------------------------------------------- whole searches


def test_values_reach_their_keys_and_the_best_file_is_whole(tmp_path):
    folder = search.run(written(tmp_path), tmp_path / "out", quiet=True)
    found = rows(folder)
    assert [row["trial"] for row in found] == ["0", "1", "2", "3"] and {row["state"] for row in found} == {"complete"}
    for row in found:
        made = config.load(folder / "trials" / row["trial"] / "config.yaml")
        assert made.optimizer.lr == pytest.approx(float(row["optimizer.lr"])) and 1e-5 <= made.optimizer.lr <= 1e-1
        assert made.optimizer.weight_decay == float(f"{float(row['optimizer.weight_decay']):.1f}")
        assert made.phases[0].batch in (16, 32, 48, 64) and list(made.phases[0].level) == json.loads(row["phases.0.level"])
        assert not made.searches and made.optimizer.warmup == 2
    assert len({row["optimizer.lr"] for row in found}) == 4
    best = config.load(folder / "best.yaml")
    top = max(found, key=lambda row: float(row["score"]))
    assert best.optimizer.lr == pytest.approx(float(top["optimizer.lr"])) and top["best"] == "yes"
    assert not best.searches and best.output == folder / "best"
    for picture in ("history.png", "importances.png", "parallel.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_trial_goes_on_from_its_checkpoint(tmp_path, faults):
    faults(fault={"1": "killed"})
    folder = search.run(written(tmp_path, FILE.replace("pruner: none", "pruner: median")), tmp_path / "out", quiet=True)
    found = rows(folder)
    assert len(found) == 4 and {row["state"] for row in found} == {"complete"}
    assert [row["retries"] for row in found] == ["0", "1", "0", "0"]
    (one, start), (other, again) = tries(folder, 1)
    assert one != other and (start, again) == (0, 1)
    study = optuna.load_study(study_name="toy search", storage=f"sqlite:///{folder}/study.db")
    cut, whole = [trial for trial in study.trials if first_number(trial) == 1]
    assert cut.state.name == "FAIL" and "signal 9" in cut.user_attrs["reason"]
    assert whole.params == cut.params and set(whole.intermediate_values) == {0, 1, 2}


def test_a_trial_that_fails_or_is_invalid_says_why_and_the_search_goes_on(tmp_path, faults):
    faults(fault={"0": "fails", "1": "breaks"})
    text = FILE.replace("high: 64, step: 16", "high: 64, step: 16}\n    optimizer.warmup: {choices: [2, 70]")
    folder = search.run(written(tmp_path, text.replace("seed: 3", "seed: 4")), tmp_path / "out", quiet=True)
    found = rows(folder)
    assert len(found) == 4 and found[0]["reason"] == "nothing to learn"
    assert found[1]["state"] == "fail" and found[1]["reason"] == "its process ended with 3: no such library"
    invalid = [row for row in found if row["optimizer.warmup"] == "70"]
    assert invalid and all(row["state"] == "pruned" for row in invalid)
    assert all("optimizer.warmup: 70 is not less than the 50 steps" in row["reason"] for row in invalid)
    assert config.load(folder / "best.yaml").optimizer.warmup == 2


@pytest.mark.slow
def test_a_search_of_failures_ends(tmp_path, faults):
    faults(fault={str(trial): "fails" for trial in range(9)})
    with pytest.raises(UserError, match=r"first \d trials failed.*nothing to learn"):
        search.run(written(tmp_path, FILE.replace("n_trials: 4", "n_trials: 9")), tmp_path / "out", quiet=True)
    assert len([row for row in rows(tmp_path / "out") if row["state"] == "fail"]) < 6


@pytest.mark.slow
def test_ctrl_c_ends_all_and_the_same_command_goes_on(tmp_path, faults):
    faults(fault={"0": "hangs", "1": "hangs"})
    folder = tmp_path / "out"
    command = [sys.executable, str(TOY), "search", str(written(tmp_path)), "--output", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    _wait_until(lambda: all((folder / "trials" / n / "step").exists() for n in "01"), process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130 and "run the same command again to continue" in told
    assert not any(_lives(tries(folder, trial)[0][0]) for trial in (0, 1))
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0
    assert [(row["state"], row["retries"]) for row in rows(folder)] == [("complete", "1")] * 2 + [("complete", "0")] * 2
    assert [start for _, start in tries(folder, 0)] == [0, 1]


@pytest.mark.slow
def test_a_killed_search_leaves_no_workers_and_its_trials_are_done_by_the_next(tmp_path, faults):
    faults(fault={"0": "hangs", "1": "hangs"})
    folder = tmp_path / "out"
    command = [sys.executable, str(TOY), "search", str(written(tmp_path)), "--output", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _wait_until(lambda: all((folder / "trials" / n / "step").exists() for n in "01"), process)
    process.kill()
    process.wait()
    _wait_until(lambda: not any(_lives(tries(folder, trial)[0][0]) for trial in (0, 1)))
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0
    assert [(row["state"], row["retries"]) for row in rows(folder)] == [("complete", "1")] * 2 + [("complete", "0")] * 2


@pytest.mark.slow
def test_a_killed_search_leaves_no_trial_of_several_processes(tmp_path, faults):
    faults(fault={"0": "hangs"}, processes=2)
    folder = tmp_path / "out"
    command = [sys.executable, str(TOY), "search", str(written(tmp_path)), "--output", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _wait_until(lambda: (folder / "trials/0/tries").exists() and len(tries(folder, 0)) == 2, process)
    process.kill()
    process.wait()
    _wait_until(lambda: not any(_lives(pid) for pid, _ in tries(folder, 0)), seconds=180)


@pytest.mark.slow
def test_several_objectives_give_a_front_of_whole_files(tmp_path):
    text = FILE.replace("{name: score, direction: maximize}", "{name: score}, {name: time.all, direction: minimize}")
    folder = search.run(written(tmp_path, text.replace("n_trials: 4", "n_trials: 6")), tmp_path / "out", quiet=True)
    front = sorted((float(row["score"]), float(row["time.all"])) for row in rows(folder) if row["best"])
    assert [time for _, time in front] == sorted(time for _, time in front)
    files = [folder / f"best_{rank}.yaml" for rank in range(1, len(front) + 1)]
    assert [config.load(file).phases[0].batch / 10 for file in files] == [time for _, time in front[::-1]]
    assert not (folder / f"best_{len(front) + 1}.yaml").exists() and (folder / "pareto.png").exists()


def _wait_until(done, process=None, seconds=180):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.02)


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # in a container nobody may collect what is dead
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


# ------------------------------------------------------------------------------------------------------------------ parts


def begun(tmp_path, text=FILE):
    """A study, its file and its settings, as the search makes them."""
    searching = workers.Searching(written(tmp_path, text), tmp_path / "out", quiet=True)
    searching.open()
    return searching, searching.study


def finished(value, steps=(), **params):
    lr = optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)
    return optuna.create_trial(
        values=value if isinstance(value, list) else [value],
        params={"optimizer.lr": 1e-3} | params,
        distributions={"optimizer.lr": lr},
        intermediate_values=dict(enumerate(steps)),
    )


def test_a_trial_behind_the_others_is_pruned_by_what_was_measured_on_the_way(tmp_path):
    searching, study = begun(tmp_path, FILE.replace("n_trials: 4", "n_trials: 9").replace("pruner: none", "pruner: median"))
    study.add_trials([finished(1.0, steps=(0.5, 1.0))] * 5)
    ahead, behind = (search_trial.reporter(searching.snapshot, searching.next_trial()._trial_id) for _ in range(2))
    ahead(0, {"score": 0.6})
    behind(0, {"other": 0.1})
    with pytest.raises(UserError, match=r"pruned: score 0\.1 after step 1"):
        behind(1, {"score": 0.1})


def test_a_report_that_the_database_does_not_take_is_told_to_all_processes(tmp_path, monkeypatch):
    searching, _ = begun(tmp_path, FILE.replace("pruner: none", "pruner: median"))
    report = search_trial.reporter(searching.snapshot, searching.next_trial()._trial_id)

    def gone(*_):
        raise optuna.exceptions.StorageInternalError("the server\nis gone")

    monkeypatch.setattr(optuna.trial.Trial, "report", gone)
    with pytest.raises(UserError, match=r"step 3: .*score could not be written .*\(the server is gone\)"):
        report(3, {"score": 0.5})


def test_a_trial_that_dies_again_and_again_is_given_up_and_said_to_be(tmp_path, monkeypatch):
    searching, study = begun(tmp_path)
    searching.bar, said = SimpleNamespace(set_postfix_str=len), []
    monkeypatch.setattr(searching, "print", said.append)
    for _ in range(RETRIES + 1):
        trial = searching.next_trial()
        number = first_number(study.trials[trial.number])
        searching.restart(workers.Running(trial, number, tmp_path, workers.Slot("here"), None), "killed")
    assert all("started again" in one for one in said[:-1]) and "given up after 5 restarts" in said[-1]
    assert len({first_number(trial) for trial in study.trials}) == 1


def test_trials_are_as_many_as_asked_for_also_after_more_are_asked_for(tmp_path):
    searching, study = begun(tmp_path)
    study.add_trials([finished(1.0)] * 3)
    assert searching.next_trial() is not None and searching.next_trial() is None
    searching.search = searching.search.model_copy(update={"n_trials": 5})
    assert searching.next_trial() is not None and searching.next_trial() is None


def test_a_second_search_in_the_same_folder_is_refused_and_writes_nothing(tmp_path):
    folder = tmp_path / "out"
    with (
        files.FolderLock(folder, "a search"),
        pytest.raises(UserError, match=r"a search already runs in .*/out \(this process"),
    ):
        search.run(written(tmp_path), folder, quiet=True)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_results_are_written_before_another_search_may_start(tmp_path, monkeypatch):
    def write(*_):
        with pytest.raises(UserError, match="a search already runs"):
            files.FolderLock(tmp_path / "out", "a search").acquire()
        return True

    monkeypatch.setattr(results, "write", write)
    search.run(written(tmp_path, FILE.replace("n_trials: 4", "n_trials: 1")), tmp_path / "out", quiet=True)


def test_a_study_goes_on_only_with_the_same_search(tmp_path):
    begun(tmp_path)
    begun(tmp_path, FILE.replace("n_trials: 4", "n_trials: 9"))
    for was, now, told in (
        ("high: 1e-1", "high: 1e-2", "another space"),
        ("name: score", "name: cost", "another objectives"),
        ("steps: 50", "steps: 60", "another other keys"),
    ):
        with pytest.raises(UserError, match=told):
            begun(tmp_path, FILE.replace(was, now))


def test_an_objective_that_was_not_measured_is_named(tmp_path):
    (tmp_path / "result.json").write_text('{"score": 1, "time": {"all": 2.5}, "lost": null}')
    assert space.objective_values(tmp_path, [Objective(name="score"), Objective(name="time.all")]) == [1.0, 2.5]
    with pytest.raises(UserError, match=r"no number 'scor'.*Did you mean 'score'\?"):
        space.objective_values(tmp_path, [Objective(name="scor")])
    with pytest.raises(ValueError, match="lost is not finite"):
        space.objective_values(tmp_path, [Objective(name="lost")])


def test_keys_are_set_where_they_stand_or_would_stand():
    made = space.with_values({"phases": [{"steps": 1}]}, {"phases.0.steps": 5, "optimizer.lr": 0.1}, ("output", Path("out")))
    assert made == {"phases": [{"steps": 5}], "optimizer": {"lr": 0.1}, "output": "out"}
    with pytest.raises(UserError, match="write the whole list out"):
        space.with_values({"phases": [{"steps": 1}]}, {"phases.1.steps": 5}, ("output", Path("out")))


def test_gpus_are_given_to_workers_in_groups():
    def made(gpus, **settings):
        return [
            (place.variables["CUDA_VISIBLE_DEVICES"], place.processes)
            for place in workers.find_slots(Manager(**settings), gpus)
        ]

    assert made(list("0123"), available_gpus=(0, 1, 2, 3), gpus_per_subtask=2) == [("0,1", 2), ("2,3", 2)]
    assert made(["4", "GPU-a", "7"], available_gpus=(0, 1, 2), gpus_per_subtask=2) == [("4,GPU-a", 2)]  # one is left over
    assert made(list("01"), available_gpus=(1, 0)) == [("1", 1), ("0", 1)]
    assert made(list("01"), available_gpus=(0, 1), n_workers=1) == [("0", 1)]
    assert made([], available_gpus=(0, 1), gpus_per_subtask=2, n_workers=3) == [("", 1)] * 3
    with pytest.raises(UserError, match=r"\[2\] do not exist; there are \[0, 1\]"):
        made(list("01"), available_gpus=(0, 2))
    (place,) = workers.find_slots(Manager(available_gpus=(0, 1), gpus_per_subtask=2), list("01"))
    assert "--nproc-per-node=2" in place.command(Path("a"), Path("b"), 1)


def test_choices_that_are_lists_come_back_as_lists(tmp_path):
    searching, study = begun(tmp_path)
    trial = searching.next_trial()
    tried = space.suggest(trial, "phases.0.level", searching.search.space["phases.0.level"], None)
    assert tried in searching.search.space["phases.0.level"].choices
    assert results.chosen(study.trials[trial.number], searching.search)["phases.0.level"] == tried
    assert space.suggest(trial, "x", Dimension(low=0.1, high=0.5, step=0.1), float) in (0.1, 0.2, 0.3, 0.4, 0.5)


def test_what_is_wrong_with_a_search_is_told_before_the_first_trial_with_its_line(tmp_path):
    text = FILE.replace("    optimizer.lr: {", "    optimiser.lr: {").replace(
        "phases.0.batch: {low: 16", "phases.0.batch: {low: 1.5"
    )
    text = text.replace("optimizer.weight_decay: {low", "model: {low").replace("phases.0.level: {choices", "output: {choices")
    with pytest.raises(document.ConfigErrors) as caught:
        search.run(written(tmp_path, text), tmp_path / "out", quiet=True)
    for line, words in (
        (15, "Did you mean 'optimizer.lr'?"),
        (16, "is not a number"),
        (17, "whole number"),
        (18, "same for all"),
    ):
        assert any(f"yaml:{line}: " in one and words in one for one in caught.value.lines), words
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="names nothing to search"):
        search.run(written(tmp_path, FILE[: FILE.index("  space:")]), tmp_path / "out", quiet=True)


def test_without_optuna_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r'pip install "tokensieve\[search\]"'):
        search.run(written(tmp_path), tmp_path / "out")


def test_a_database_that_cannot_be_opened(tmp_path):
    text = FILE.replace("mode: optuna,", "mode: optuna, storage: 'sqlite:////nowhere/at/all.db',")
    with pytest.raises(UserError, match=r"storage: sqlite://\.\.\. cannot be opened"):
        search.run(written(tmp_path, text), tmp_path / "out", quiet=True)


def test_cells_of_the_table_are_not_run():
    study = optuna.create_study()
    trial = study.ask({"optimizer.lr": optuna.distributions.CategoricalDistribution(["=1+1"])})
    trial.set_user_attr("reason", "@SUM(1)")
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    settings = SimpleNamespace(
        objectives=[Objective(name="loss", direction="minimize")], space={"optimizer.lr": Dimension(choices=("=1+1",))}
    )
    (row,) = csv.DictReader(results.table(study, settings).splitlines())
    assert (row["optimizer.lr"], row["reason"]) == ("'=1+1", "'@SUM(1)")
