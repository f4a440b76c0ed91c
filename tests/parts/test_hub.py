"""Reducers: saved, shared and loaded as one thing; damaged or foreign folders are refused by name; offline is said at once."""

import json
import os
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tokensieve
from tests.support import vlm_models
from tokensieve import Plan, Reducers, UserError, cli, files
from tokensieve.methods.registry import get_method
from tokensieve.models import loading
from tokensieve.parts import files as part_files
from tokensieve.parts import folders, resolve
from tokensieve.testing import fresh_part

PLAN = "learned@4:32(rest=merge)"
IMAGES = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return loading.load("sieve-vit-8", "scenes-v1").model.requires_grad_(False)


@pytest.fixture
def reducers(model):
    part = fresh_part(get_method("learned"), 128)
    rows = [SimpleNamespace(layer="4", tokens_in=196, tokens_out=32)]
    trained = {"model": "user/clip", "dataset": "mine|yours", "steps": 3}
    return Reducers.of(model, PLAN, {"learned": part}, trained=trained, tokens=rows, measured={PLAN: {"acc1": 0.51, "n": 10}})


@pytest.fixture
def saved(reducers, tmp_path):
    folder = tmp_path / "ein Ordner, ü"
    assert reducers.save_pretrained(folder) is None
    return folder


@torch.no_grad()
def feature(model, plan, weights):
    with tokensieve.apply(model, plan, weights=weights):
        return model.encode_image(IMAGES)


def refused(call, *args, **given):
    with pytest.raises(UserError) as caught:
        call(*args, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_loaded_is_what_was_saved(model, reducers, saved):
    again = Reducers.from_pretrained(saved)
    assert again.plan == reducers.plan == Plan.parse(PLAN) and list(again) == ["learned"] and len(again) == 1
    assert again.trained == reducers.trained and again.tokens == reducers.tokens and again.measured == reducers.measured
    assert part_files.part_checksum(again["learned"]) == part_files.part_checksum(reducers["learned"])
    assert "learned" in repr(again) and "user/clip" in repr(again)
    with pytest.raises(KeyError, match="Did you mean 'learned'"):
        again["lerned"]


def test_every_way_to_use_them_gives_the_same_features(model, reducers, saved):
    goal = feature(model, PLAN, {"learned": reducers["learned"]})
    again = Reducers.from_pretrained(str(saved))
    for weights in (reducers, again, saved, str(saved), [str(saved)], saved / "learned.safetensors"):
        assert torch.equal(feature(model, reducers.plan, weights), goal)
    assert not torch.equal(feature(model, PLAN, None), goal)  # the ones that ship


def test_the_folder_is_plain_files_and_says_what_it_is(saved):
    assert sorted(file.name for file in saved.iterdir()) == ["README.md", "config.json", "learned.safetensors"]
    config = json.loads((saved / "config.json").read_text())
    assert (
        config["plan"] == PLAN
        and config["base_model"] == "user/clip"
        and config["methods"]["learned"]["settings"] == {"width": 128}
    )
    assert config["tokens"] == [{"layer": "4", "tokens_in": 196, "tokens_out": 32}] and config["versions"]["tokensieve"]
    _, front, body = (saved / "README.md").read_text().split("---\n", 2)
    told = yaml.safe_load(front)
    assert told["library_name"] == "tokensieve" and told["base_model"] == "user/clip"
    assert told["pipeline_tag"] == "image-feature-extraction" and {"tokensieve", "learned"} <= set(told["tags"])
    assert f'--plan "{PLAN}"' in body and "acc1 | 0.51" in body and "mine\\|yours" in body


def test_the_card_of_a_vlm_names_its_task_and_no_base_that_is_not_on_the_hub():
    vlm = vlm_models.llava()
    made = Reducers.of(vlm, "learned@out:9", {"learned": fresh_part(get_method("learned"), 24)}, trained={"model": "a folder"})
    front = yaml.safe_load(made.card().split("---\n")[1])
    assert front["pipeline_tag"] == "image-text-to-text" and "base_model" not in front
    assert len(made.headers["learned"]["decoder"]) == 6


def test_saving_again_changes_nothing_and_loses_nothing(model, reducers, saved, capsys):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    Reducers.from_pretrained(saved).save_pretrained(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    (saved / "README.md").write_text("my own words")
    other = Reducers.of(model, PLAN, {"learned": fresh_part(get_method("learned"), 128, seed=1)})
    other.save_pretrained(saved)
    assert (saved / "README.md.1").read_text() == "my own words" and "README.md.1" in capsys.readouterr().err
    assert (saved / "learned.safetensors.1").read_bytes() == before["learned.safetensors"]
    assert part_files.part_checksum(Reducers.from_pretrained(saved)["learned"]) == part_files.part_checksum(other["learned"])


def test_a_file_that_older_saving_left_is_not_used(model, reducers, saved):
    """The configuration says what belongs to the reducers, not what lies around."""
    torch.save({"a": 1}, saved / "stray.safetensors")
    assert set(resolve.load_parts(Plan.parse(PLAN), model, saved)) == {"learned"}


def test_reducers_of_another_model_are_refused(reducers, saved):
    other = loading.load("sieve-vit-8", "").model
    for weights in (reducers, saved):
        assert "was trained on user/clip, and this model" in refused(tokensieve.apply, other, PLAN, weights=weights)


def test_what_does_not_fit_the_model_is_told_when_reducers_are_made(model):
    part = fresh_part(get_method("learned"), 64)
    assert "width 64" in refused(Reducers.of, model, PLAN, {"learned": part})
    assert "does not use it" in refused(Reducers.of, model, "anchor:60", {"learned": part})


# ------------------------------------------------------------------------------------------------------- damaged folders


def test_damage_is_told_by_name(model, saved):
    weights = saved / "learned.safetensors"
    whole, config = weights.read_bytes(), (saved / "config.json").read_text()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "learned.safetensors: damaged" in refused(Reducers.from_pretrained, saved)
    flipped = bytearray(whole)
    flipped[-999] ^= 16
    weights.write_bytes(flipped)
    for call in (lambda: Reducers.from_pretrained(saved), lambda: feature(model, PLAN, saved)):
        assert "damaged, it is not as it was saved" in refused(call)
    weights.write_bytes(pickle.dumps({"a": 1}))
    assert "not a safetensors file" in refused(Reducers.from_pretrained, saved)
    weights.unlink()
    assert "no file" in refused(Reducers.from_pretrained, saved)
    weights.write_bytes(whole)
    first = config.replace(folders.FORMAT, folders.FIRST_FORMAT)  # without a checksum of its own
    for broken, told in (
        (config[:100], "damaged, or not JSON"),
        ("[1]", "not of tokensieve's reducers"),
        ('{"model_type": "clip"}', "not of tokensieve's reducers"),
        (config.replace('"plan"', '"plam"'), "has no plan"),
        (config.replace('"learned": {', '"../learned": {'), "is no name of a method"),
        (config.replace('"learned": {', '"lerned": {'), "damaged, it is not as it was saved"),
        (config.replace("learned@4:32", "learned@5:32"), "damaged, it is not as it was saved"),
        (config.replace('"tokens": [', '"tokens": [3, '), "its tokens are not a list of tables"),
        (config.replace('"steps": 3', '"steps": NaN'), "a number that is not finite"),
        (first.replace('"learned": {', '"lerned": {'), "no file"),
        (first.replace(PLAN, "lerned@4:32"), "Did you mean 'learned@4:32'"),
    ):
        (saved / "config.json").write_text(broken)
        assert told in refused(Reducers.from_pretrained, saved)
    (saved / "config.json").unlink()
    assert "no config.json" in refused(Reducers.from_pretrained, saved)
    assert feature(model, PLAN, saved).shape == (2, 128)  # a folder of parts is one all the same


def test_folders_of_the_first_version_still_load_and_are_saved_in_the_new_form(model, reducers, saved):
    """Their checksums were those of the tensors."""
    weights, config = saved / "learned.safetensors", json.loads((saved / "config.json").read_text())
    about, tensors = part_files.read_part_file(weights)
    old = {**about, "format": part_files.FIRST_FORMAT, "sha256": part_files.part_checksum(tensors)}
    save_file(tensors, weights, metadata={part_files.HEADER: json.dumps(old)})
    config["methods"]["learned"]["sha256"] = old["sha256"]
    del config["sha256"]
    (saved / "config.json").write_text(json.dumps(config | {"format": folders.FIRST_FORMAT}))
    again = Reducers.from_pretrained(saved)
    assert torch.equal(feature(model, PLAN, saved), feature(model, PLAN, reducers))
    again.save_pretrained(saved)
    assert part_files.read_part_file(weights).about == about
    assert json.loads((saved / "config.json").read_text()) == reducers.config()


def test_saving_that_was_interrupted_is_found(model, saved, monkeypatch):
    """The new weights are there, the configuration is the old one."""
    other = Reducers.of(model, PLAN, {"learned": fresh_part(get_method("learned"), 128, seed=1)})

    written = files.replace_file

    def stopped(path, content):
        if path.name == "README.md":
            raise KeyboardInterrupt
        written(path, content)

    monkeypatch.setattr("tokensieve.parts.hub.replace_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(saved)
    assert "saving it was interrupted" in refused(Reducers.from_pretrained, saved)
    assert "saving it was interrupted" in refused(feature, model, PLAN, saved)


def test_foreign_weights_under_a_known_name_are_refused(saved):
    save_file(load_file(saved / "learned.safetensors"), saved / "learned.safetensors")
    assert "not the trained part of a method" in refused(Reducers.from_pretrained, saved)


def test_a_folder_that_cannot_be_written_is_told(reducers, tmp_path):
    (tmp_path / "taken").write_text("a file")
    assert "cannot write" in refused(reducers.save_pretrained, tmp_path / "taken")


# -------------------------------------------------------------------------------------------------------------- the Hub


def test_a_folder_needs_no_network(saved, monkeypatch):
    monkeypatch.setattr(folders, "fetch", lambda *a, **k: pytest.fail("the Hub was asked"))
    monkeypatch.chdir(saved.parent.parent)
    relative = os.path.relpath(saved)  # looks like an id
    assert list(Reducers.from_pretrained(relative)) == ["learned"]


def test_offline_an_id_is_refused_at_once(model, monkeypatch):
    monkeypatch.setattr("tokensieve.models.loading.hub.hub_is_reachable", lambda: False)
    start = time.monotonic()
    for call in (
        lambda: Reducers.from_pretrained("no-such-user/reducers"),
        lambda: feature(model, PLAN, "no-such-user/reducers"),
    ):
        told = refused(call)
        assert "no file or folder 'no-such-user/reducers'" in told and "cannot be reached" in told
    assert time.monotonic() - start < 30  # a miss that is retried takes longer; a busy machine, some seconds


def test_what_was_fetched_before_is_found_offline(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("tokensieve.models.loading.hub.hub_is_reachable", lambda: False)
    commit = "a" * 40
    snapshot = tmp_path / "cache" / "models--user--mine" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    saved.rename(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(commit)
    for revision in (None, "main", commit):
        assert list(Reducers.from_pretrained("user/mine", cache_dir=tmp_path / "cache", revision=revision)) == ["learned"]


def test_online_a_repository_is_fetched_and_refusals_are_told(saved, monkeypatch, model):
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    asked = []

    def snapshot_download(repo_id, **given):
        asked.append((repo_id, given))
        if repo_id == "user/gone":
            raise HFValidationError("there is\nno such thing")
        return str(saved)

    monkeypatch.setattr("tokensieve.models.loading.hub.hub_is_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    made = Reducers.from_pretrained("user/mine", revision="v1", token="secret", cache_dir="there")
    assert torch.equal(feature(model, PLAN, "user/mine"), feature(model, PLAN, made))
    repo, given = asked[0]
    assert repo == "user/mine" and given["revision"] == "v1" and given["token"] == "secret" and given["cache_dir"] == "there"
    assert not given["local_files_only"] and all("pt" not in pattern.split(".") for pattern in given["allow_patterns"])
    assert "the Hub does not give it: there is no such thing" in refused(Reducers.from_pretrained, "user/gone")


def test_pushing_uploads_these_files_alone(reducers, tmp_path, monkeypatch):
    import huggingface_hub

    done = []

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, private, exist_ok):
            assert exist_ok and private
            return SimpleNamespace(repo_id=f"user/{repo_id}")

        def upload_folder(self, **given):
            done.append(given)
            return SimpleNamespace(commit_url="https://hub/commit")

    (tmp_path / "notes.txt").write_text("private")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr("tokensieve.models.loading.hub.hub_is_reachable", lambda: True)
    folder = tmp_path / "mine"
    assert reducers.save_pretrained(folder, push_to_hub=True, private=True, license="mit") == "https://hub/commit"
    (given,) = done
    assert given["repo_id"] == "user/mine" and set(given["allow_patterns"]) == {
        "README.md",
        "config.json",
        "learned.safetensors",
    }
    assert "license: mit" in (folder / "README.md").read_text()
    monkeypatch.setattr("tokensieve.models.loading.hub.hub_is_reachable", lambda: False)
    told = refused(reducers.save_pretrained, tmp_path / "kept", push_to_hub=True, repo_id="user/mine")
    assert "saved in" in told and Reducers.from_pretrained(tmp_path / "kept")


@pytest.mark.slow
def test_the_command_line_takes_a_folder(saved, tmp_path):
    common = ["eval", "--limit", "8", "--num_workers", "0", "--quiet", "--plan", PLAN, "--output", str(tmp_path / "x.json")]
    assert cli.main([*common, "--weights", str(saved)]) == 0
    done = json.loads((tmp_path / "x.json").read_text())["reduction"]
    assert done["applied"] and done["trained"] == resolve.parts_fingerprint(Reducers.from_pretrained(saved))


def test_reducers_of_a_vlm_generate_the_same_from_a_folder_and_by_half(tmp_path):
    """Merger and pruner heads together, as Reducers, as a folder; and the heads alone from the same folder."""
    vlm, inputs, plan = vlm_models.llava(), vlm_models.prompts(), "merger@out + cross@llm.2,4"
    merger = get_method("merger").part(width=24, question_width=32, kind="question_aware", keep=18).eval()
    heads = get_method("cross").part(width=32, layers=[2, 4], d_internal=16, heads=2, keep=[9, 4]).eval()
    made = Reducers.of(vlm, plan, {"merger": merger, "cross": heads})
    made.save_pretrained(tmp_path / "mine")
    told = []
    for weights in (made, str(tmp_path / "mine"), Reducers.from_pretrained(tmp_path / "mine")):
        with tokensieve.apply(vlm, plan, weights=weights) as handle:
            told.append(vlm.generate(**inputs, max_new_tokens=4, do_sample=False))
        assert [row.tokens_out for row in handle.ledger] == [18, 9, 4]
    assert torch.equal(told[0], told[1]) and torch.equal(told[0], told[2])
    with tokensieve.apply(vlm, "cross@llm.2,4", weights=tmp_path / "mine") as handle:
        vlm.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert [row.tokens_in for row in handle.ledger] == [36, 9]
    other = vlm_models.llava(seed=1)
    assert "is another or has other weights" in refused(tokensieve.apply, other, plan, weights=tmp_path / "mine")
    assert "needs trained weights" in refused(tokensieve.apply, vlm, plan)
