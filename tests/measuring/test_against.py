"""bench --against: what counts as slower or faster, and which files are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tokensieve import UserError
from tokensieve.measuring import against


def row(speedup: float, low: float | None = None, high: float | None = None, **more: Any) -> dict[str, Any]:
    made = {"model": "M", "plan": "anchor:60", "batch_size": 16, "speedup": speedup, **more}
    return made if low is None else made | {"speedup_low": low, "speedup_high": high}


def phases(first: float, decode: float | None, **more: Any) -> dict[str, Any]:
    return {"model": "V", "plan": "grid@llm.2:64", "batch_size": 1, "speedup": {"first": first, "decode": decode}} | more


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [
        (row(2.0, 1.9, 2.1), row(1.5, 1.4, 1.6), "slower"),
        (row(1.5, 1.4, 1.6), row(2.0, 1.9, 2.1), "faster"),
        (row(2.0, 1.9, 2.1), row(1.9, 1.8, 2.0), "same"),  # the quartiles overlap
        (row(2.0, 2.0, 2.0), row(1.95, 1.95, 1.95), "same"),  # one round: less than the least spread of both
        (row(2.0), row(1.9, 1.89, 1.91), "slower"),  # a file without quartiles
        (row(2.0), row(1.97, 1.96, 1.98), "same"),
        (row(2.0, 1.9, 2.1), row(2.0, 1.9, 2.1), "same"),
        (phases(2.0, 1.1), phases(1.5, 1.1), "slower"),
        (phases(2.0, 1.1), phases(2.0, 1.4), "faster"),
        (phases(2.0, None), phases(2.0, 1.4), "same"),
    ],
)
def test_changes_beyond_the_spread_are_found(before: dict[str, Any], now: dict[str, Any], outcome: str) -> None:
    found = against.compare([before], [now])
    counts = {"slower": len(found.slower), "faster": len(found.faster), "same": found.same}
    assert counts == {"slower": 0, "faster": 0, "same": 0, outcome: 1} and not found.missing and not found.new


def test_the_comparison_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    before = [row(2.0), row(3.0, plan="gone\x1b[31m"), row(1.0, batch_size=4), phases(2.0, 1.2)]
    now = [row(1.0), row(1.5, batch_size=4), row(1.0, model="N"), phases(1.0, 1.2)]
    against.print_comparison("old.json", against.compare(before, now))
    assert capsys.readouterr().out.splitlines() == [
        "slower: M, anchor:60, batch 16: 2.00x, now 1.00x",
        "slower: V, grid@llm.2:64, batch 1, first: 2.00x, now 1.00x",
        "faster: M, anchor:60, batch 4: 1.00x, now 1.50x",
        "missing: M, gone?[31m, batch 16",
        "new: N, anchor:60, batch 16",
        "against old.json: 2 slower, 1 faster, 0 rows the same, 1 rows missing, 1 new",
    ]


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [1]}',
        '{"rows": [{"model": "M", "plan": "p", "batch_size": true, "speedup": 1}]}',
        '{"rows": [{"model": "M", "plan": "p", "batch_size": 1, "speedup": "fast"}]}',
        '{"rows": [{"model": "M", "plan": ["p"], "batch_size": 1, "speedup": 1.0}]}',
        '{"rows": [{"model": "M", "plan": "p", "batch_size": 1, "speedup": 0}]}',
        '{"rows": [{"model": "M", "plan": "p", "batch_size": 1, "speedup": NaN}]}',
        '{"rows": [{"model": "M", "plan": "p", "batch_size": 1, "speedup": 1%s}]}' % ("0" * 400),
    ],
)
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(content)
    with pytest.raises(UserError, match="no result of tokensieve bench"):
        against.read(str(file))


def test_files_that_are_no_json_or_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{")
    for name in ("old.json", "nowhere.json"):
        with pytest.raises(UserError, match=name):
            against.read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["bench_ViT-B-16.json", "time_vlm.json"])
def test_files_of_earlier_versions_are_read(name: str) -> None:
    """They have no quartiles."""
    path = ROOT / "benchmarks" / "results" / name
    read = against.read(str(path))
    found = against.compare(read, json.loads(path.read_text())["rows"])
    assert found.same == len(read) and not found.slower and not found.missing
