"""A trial on several GPUs is a training in as many processes; here two without any GPU."""

import csv

import pytest
import yaml

from tests.support.pruning_worker import settings
from tokensieve import search
from tokensieve.search import workers

optuna = pytest.importorskip("optuna")


@pytest.mark.slow
def test_two_processes_train_a_trial_and_leave_it_together_when_it_is_pruned(tmp_path, backbone, monkeypatch):
    two = workers.Slot("two processes", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, processes=2)
    monkeypatch.setattr(workers, "WORKER", ("-m", "tokensieve.search.trial"))
    monkeypatch.setattr(workers, "find_slots", lambda *_: [two])
    key = "method_settings.task_loss_weight"
    made = settings(backbone, how={"epochs": 1, "evaluate_every": 1, "batch_size": 2, "checkpoint_every": 1})
    made["search_settings"] = {"n_trials": 7, "space": {key: {"low": 1, "high": 50}}}
    path = tmp_path / "pruning.yaml"
    path.write_text(yaml.safe_dump(made))
    searching = workers.Searching(path, tmp_path / "out", quiet=True)
    searching.open()
    ranges = {key: optuna.distributions.FloatDistribution(1, 50)}
    for steps in ({6: 1.0}, *([{2: 2.0, 6: 1.0}] * 5)):  # by now accuracies of 2 after step 2 are usual
        searching.study.add_trial(
            optuna.create_trial(value=1.0, params={key: 2.0}, distributions=ranges, intermediate_values=steps)
        )
    search.run(path, tmp_path / "out", quiet=True)
    (row,) = [row for row in csv.DictReader((tmp_path / "out/trials.csv").open()) if row["trial"] == "6"]
    log = (tmp_path / "out/trials/6/worker.log").read_text()
    assert row["state"] == "pruned" and "after step 2 is behind other trials" in row["reason"], (row, log)
    assert (tmp_path / "out/trials/6/checkpoints").exists() and "Traceback" not in log
