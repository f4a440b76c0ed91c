"""`tokensieve bench` of a re-identification model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokensieve.cli import main


def test_bench_measures_objects_in_all_modalities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bench.json"
    words = ["bench", "--model_type", "reid", "--batch_size", "2", "--repeats", "1", "--output", str(output)]
    assert main(words) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["model"], row["model_type"], row["plan"], row["batch_size"]) == ("sieve-reid-6", "reid", "sdtps@out", 2)
    assert row["vision_tokens"] == 128 and row["changed"] and row["layers"][0]["tokens_out"] == 26 and row["seconds"] > 0
    assert "sdtps@out" in capsys.readouterr().out
    for flag in (["--break_even"], ["--image_size", "64"]):
        assert main([*words[:3], *flag]) == 2
        assert "leave it out" in capsys.readouterr().err
