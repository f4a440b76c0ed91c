"""Checkpoints: whole or not there, and never silently changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal

import numpy as np
import pytest
import torch

from tests.support.states import same
from tokensieve.errors import UserError
from tokensieve.training import checkpoint, random_state

STATE = {
    "model": {"weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)},
    "optimizer": {"state": {0: {"step": 4}, 1: {"velocity": torch.ones(2)}}, "betas": (0.9, 0.98)},
    "nothing": None,
    "list": [1, "two", True],
}


def test_what_is_saved_comes_back(tmp_path):
    checkpoint.save(tmp_path / "a run, with ünicode", 7, STATE)
    found, broken = checkpoint.latest(tmp_path / "a run, with ünicode")
    assert found is not None and found.step == 7 and not broken
    assert same(found.state, STATE)


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, {"x": torch.tensor(step)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("keep, kept", [(1, [10]), (3, [2, 3, 10]), (None, [1, 2, 3, 10])])
def test_as_many_as_wanted_are_kept(tmp_path, keep, kept):
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, {}, {"maker": {"x": torch.ones(1)}}, keep=keep)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{step:08d}" for step in kept]
    assert {path.name for path in tmp_path.glob("*.pt")} == {f"maker_step_{step}.pt" for step in kept}


def test_a_run_that_went_back_leaves_the_steps_it_came_from(tmp_path):
    for step in (2, 4, 6):
        checkpoint.save(tmp_path, step, {}, keep=None)
    assert checkpoint.at_step(tmp_path, 2).step == 2
    checkpoint.save(tmp_path, 3, {"x": 1}, keep=None)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000003"]
    with pytest.raises(UserError, match="has no checkpoint of step 4; there are those of the steps 2, 3"):
        checkpoint.at_step(tmp_path, 4)
    (tmp_path / "step-00000003/state.json").write_text("")
    with pytest.raises(UserError, match=r"state\.json differs from what was written"):
        checkpoint.at_step(tmp_path, 3)


def test_parts_lie_beside_the_state(tmp_path):
    for save in (checkpoint.save, checkpoint.save_best):
        folder = save(tmp_path, 1, {"x": torch.ones(1)}, None, {"merger.safetensors": b"part"})
        assert (folder / "merger.safetensors").read_bytes() == b"part" and checkpoint.load(folder).step == 1


def test_state_dicts_go_with_their_checkpoints_and_those_of_others_stay(tmp_path):
    mine = {"maker": {"weight": torch.ones(2)}}
    for name in ("maker_step_7.pt", "teacher_step_1.pt"):
        (tmp_path / name).write_text("another's")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {}, mine)
    left = {path.name for path in tmp_path.glob("*.pt")}
    assert left == {"maker_step_2.pt", "maker_step_3.pt", "maker_step_7.pt", "teacher_step_1.pt"}


def test_no_run_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path / "nowhere") == (None, [])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize(
    "harm", [_flip, lambda p: p.write_bytes(p.read_bytes()[:-4]), lambda p: p.unlink(), lambda p: p.write_bytes(b"")]
)
def test_a_harmed_file_is_noticed_and_the_one_before_is_taken(tmp_path, name, harm):
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([1.0])})
    checkpoint.save(tmp_path, 2, {"x": torch.tensor([2.0])})
    if name == "manifest.json" and harm is _flip:  # its last byte is a line end: change a hash instead
        path = tmp_path / "step-00000002" / name
        digests = json.loads(path.read_text())
        path.write_text(json.dumps({key: value[::-1] for key, value in digests.items()}))
    else:
        harm(tmp_path / "step-00000002" / name)
    found, broken = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1 and found.state["x"].item() == 1
    assert len(broken) == 1 and "step-00000002" in str(broken[0])


def test_a_pickle_is_never_opened(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([1.0])})
    folder = tmp_path / "step-00000001"
    torch.save({"x": 1}, folder / "tensors.safetensors")
    digests = {name: checkpoint._digest(folder / name) for name in ("tensors.safetensors", "state.json")}
    (folder / "manifest.json").write_text(json.dumps(digests))
    with pytest.raises(checkpoint.BrokenCheckpoint):
        checkpoint.load(folder)


def _rewrite(folder, state, manifest=None):
    """Another state.json, with the right hash."""
    (folder / "state.json").write_text(state)
    digests = {name: checkpoint._digest(folder / name) for name in ("tensors.safetensors", "state.json")}
    (folder / "manifest.json").write_text(json.dumps(digests) if manifest is None else manifest)


@pytest.mark.parametrize(
    "state",
    [
        *("[", "[" * 100_000, "[" * 900 + "]" * 900, "3", "null", "{}", "[]", "\ud800", "NaN"),
        *(
            '{"step": -1, "state": {}}',
            '{"step": true, "state": {}}',
            '{"step": 1.0, "state": {}}',
            '{"step": "1", "state": {}}',
        ),
        *('{"step": 2, "state": {}}', '{"step": 1e999, "state": {}}', '{"step": ' + "9" * 5000 + ', "state": {}}'),
        *('{"step": 1}', '{"step": 1, "state": {"": 3}}', '{"step": 1, "state": {"": ["tensor", "y"]}}'),
        *('{"step": 1, "state": {"": ["tensor", []]}}', '{"step": 1, "state": {"": ["pairs", [[[], 1]]]}}'),
    ],
)
def test_a_state_of_any_content_is_a_broken_checkpoint(tmp_path, state):
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([1.0])})
    _rewrite(tmp_path / "step-00000001", state.encode("utf-8", "replace").decode())
    with pytest.raises(checkpoint.BrokenCheckpoint) as caught:
        checkpoint.load(tmp_path / "step-00000001")
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()
    assert checkpoint.latest(tmp_path)[0] is None


@pytest.mark.parametrize("manifest", ["[]", "3", "{}", "[" * 100_000, '{"tensors.safetensors": 3}', "x" * (2 << 20)])
def test_a_manifest_of_any_content_is_a_broken_checkpoint(tmp_path, manifest):
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([1.0])})
    _rewrite(tmp_path / "step-00000001", "{}", manifest)
    with pytest.raises(checkpoint.BrokenCheckpoint):
        checkpoint.load(tmp_path / "step-00000001")


def test_names_that_are_no_steps_are_left_alone(tmp_path):
    others = ("step-abc", "step-", "step-99999999999999999999", "step-1", "step-٣٣٣٣٣٣٣٣", "step-0000000012", "step--0000012")
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000090").write_text("a file")
    (tmp_path / "step-00000091").symlink_to(tmp_path / "nowhere")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"x": torch.tensor(step)})
    found, broken = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 3 and not broken
    assert {path.name for path in tmp_path.iterdir()} == {
        *others,
        *("step-00000090", "step-00000091", "step-00000002", "step-00000003"),
    }
    with pytest.raises(UserError, match=r"there are those of the steps 2, 3$"):
        checkpoint.at_step(tmp_path, 90)


def test_pipes_links_and_files_in_place_of_folders_do_no_harm(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "inside").mkdir(parents=True)
    run = tmp_path / "run"
    checkpoint.save(run, 1, {"x": torch.tensor([1.0])})
    (run / "step-00000002").symlink_to(elsewhere)
    (run / ".unfinished-step-00000003").symlink_to(elsewhere)
    (run / ".replaced-step-00000001").write_text("a file")
    (run / "step-00000003").write_text("a file")
    pipe = run / "step-00000005"
    pipe.mkdir()
    for name in ("manifest.json", "state.json", "tensors.safetensors"):
        os.mkfifo(pipe / name)
    found, broken = checkpoint.latest(run)
    assert found is not None and found.step == 1 and len(broken) == 2
    checkpoint.save(run, 3, {"x": torch.tensor([3.0])}, keep=1)
    assert [path.name for path in run.iterdir()] == ["step-00000003"] and (elsewhere / "inside").is_dir()
    assert checkpoint.load(run / "step-00000003").step == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_not_written(tmp_path, bad):
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([1.0])})
    with pytest.raises(FloatingPointError, match="x"):
        checkpoint.save(tmp_path, 2, {"x": torch.tensor([1.0, bad])})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def in_a_fork(work) -> int:
    """The exit code of `work` done in a process of its own (negative: the signal that ended it)."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("moment", ["save_file", "_digest", "_sync"])
def test_killed_while_saving_leaves_the_one_before(tmp_path, monkeypatch, moment):
    """SIGKILL right before the tensors, the hashes or the syncing: whatever lies there is not taken for a checkpoint."""
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([1.0])})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert in_a_fork(lambda: checkpoint.save(tmp_path, 2, {"x": torch.tensor([2.0])})) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    found, broken = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1 and not broken
    checkpoint.save(tmp_path, 3, {"x": torch.tensor([3.0])})  # and what was left over is cleared away
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_disk_full_while_saving_is_an_error_and_leaves_the_one_before(tmp_path):
    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            checkpoint.save(tmp_path, 2, {"x": torch.zeros(10_000)})
        except OSError:
            os._exit(7)

    checkpoint.save(tmp_path, 1, {"x": torch.zeros(10)})
    assert in_a_fork(fill) == 7
    found, broken = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1 and not broken


def test_generators_go_on_where_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    state = random_state.generators()
    drawn = random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()
    packed: dict = {}
    plain = json.loads(json.dumps(checkpoint._pack(state, "", packed)))
    random_state.restore_generators(checkpoint._unpack(plain, packed))
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()) == drawn
