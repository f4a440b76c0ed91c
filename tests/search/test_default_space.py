"""A search of two-stage pruning that names no space has one, whose values all make valid files."""

import pytest
import yaml

from tests.support.original_pruning import ORIGINAL
from tests.support.paths import ROOT
from tokensieve import config
from tokensieve.cli import main
from tokensieve.config import search_space
from tokensieve.search import space, workers

optuna = pytest.importorskip("optuna")
SHIPPED = (ROOT / "configs/vision_token_pruning.yaml").read_text()
EMBEDDED = (ROOT / "configs/embedded_vlm.yaml").read_text()


def written(tmp_path, text, **settings):
    """The file with a search turned on by nothing but enable and n_trials."""
    data = yaml.safe_load(text) | {
        "manager_settings": {"mode": "optuna"},
        "search_settings": {"enable": True, "n_trials": 3},
        "dataset_settings": {"name": "embedded"},
    }
    for key, value in settings.items():
        data["method_settings"][key] = value
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(data))
    return path, data


@pytest.mark.parametrize("text", [ORIGINAL, SHIPPED, EMBEDDED], ids=["original", "shipped", "embedded"])
def test_what_it_draws_is_valid_and_varies(tmp_path, text):
    path, data = written(tmp_path, text)
    made = config.load(path)
    drawn: dict[str, set] = {}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(12):
        trial = study.ask()
        kinds = {key: search_space.number_type(type(made), key) for key in made.search_settings.space}
        values = {key: space.suggest(trial, key, dim, kinds[key]) for key, dim in made.search_settings.space.items()}
        path.write_text(yaml.safe_dump(space.with_values(data, values, ("output", tmp_path / "out"))))
        tried = config.load(path)
        assert not list(tried.check_files()), values
        assert tried.method_settings.merge_ratio == values["method_settings.merge_ratio"]
        for key, value in values.items():
            drawn.setdefault(key.split("settings.")[-1], set()).add(str(value))
    adversarial = ["adv_loss_weight"] if made.method_settings.adv_loss_weight else []  # what is off stays off
    assert {key for key, values in drawn.items() if len(values) > 1} == {
        *("merge_ratio", "pruning_layers", "task_loss_weight", "merge_sparsity_weight", *adversarial),
        *(f"optimizers.{group}.lr" for group in ("token_merger", "layer_pruners", "discriminator")),
    }


def test_what_the_file_leaves_out_is_not_searched_and_rates_are_around_its_own(tmp_path):
    path, _ = written(tmp_path, ORIGINAL, merger_type="none", adv_loss_weight=0, target_merge_tokens=None)
    found = config.load(path).search_settings.space
    assert not {"method_settings.merge_ratio", "method_settings.adv_loss_weight"} & set(found)
    rates = found["trainer_settings.dl_settings.optimizers.discriminator.lr"]
    assert (rates.low, rates.high, rates.log) == (5e-5, 5e-3, True)
    path, _ = written(tmp_path, ORIGINAL, merger_type="simple", pruning_layers=[])
    assert "method_settings.pruning_layers" not in config.load(path).search_settings.space


def test_the_search_writes_its_space_down(tmp_path, capsys):
    path, _ = written(tmp_path, ORIGINAL)
    searching = workers.Searching(path, tmp_path / "out", quiet=False)
    searching.open()
    assert "search_settings.space is not given; searching merge_ratio, pruning_layers" in capsys.readouterr().err
    kept = yaml.safe_load((tmp_path / "out/search.yaml").read_text())
    assert set(kept["search_settings"]["space"]) == set(searching.search.space)
    assert config.load(tmp_path / "out/search.yaml").search_settings.space == searching.search.space
    main(["validate", str(path)])
    assert "; 3 trials over method_settings.merge_ratio, " in capsys.readouterr().out


def test_a_space_that_is_given_stays(tmp_path):
    path, data = written(tmp_path, ORIGINAL)
    data["search_settings"]["space"] = {"method_settings.task_loss_weight": {"low": 1, "high": 2}}
    path.write_text(yaml.safe_dump(data))
    assert list(config.load(path).search_settings.space) == ["method_settings.task_loss_weight"]
