"""Standard streams that are closed, full, gone or of another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tokensieve.terminal import streams

METHODS = [sys.executable, "-m", "tokensieve", "methods"]


def closer(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """A file that is opened does not take the place of a stream."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import os\nwith open('opened', 'w') as file:\n    file.write(str(file.fileno()))")
    done = subprocess.run(
        [*METHODS, "--plugin", str(plugin)], cwd=tmp_path, capture_output=True, text=True, preexec_fn=closer(*closed)
    )
    assert done.returncode == 0 and not done.stderr and bool(done.stdout) == (1 not in closed)
    assert int((tmp_path / "opened").read_text()) > 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", [["methods"], ["--help"]])
def test_a_full_disk_behind_standard_output_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*METHODS[:3], *words], stdout=full, stderr=subprocess.PIPE, text=True)
    problem = "tokensieve: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, problem)
    with open("/dev/full", "w") as full:
        done = subprocess.run([*METHODS[:3], "methodz"], stdout=subprocess.PIPE, stderr=full, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_letters_that_a_stream_does_not_know(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("print('10 \u00b1 1 \\udcff')", encoding="utf-8")
    for encoding, text in (("ascii", b"10 \\xb1 1 \\udcff"), ("utf-8", "10 \u00b1 1 \\udcff".encode())):
        variables = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([*METHODS, "--plugin", str(plugin)], capture_output=True, env=variables)
        assert done.returncode == 0 and done.stdout.startswith(text) and not done.stderr


def test_messages_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    streams.say("no file \x1b[31mred\x07\nplan:")
    assert capsys.readouterr().err == "no file ?[31mred?\nplan:\n"


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert [streams.finish(code) for code in (0, None, 143, "a text")] == [0, 0, 143, 1]
    assert capsys.readouterr().err == "a text\n"
