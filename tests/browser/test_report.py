"""Reports in a browser: tables that are sorted, points that say what they are; nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import PATIENCE
from tests.support.paths import ROOT
from tokensieve.cli import main

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=PATIENCE)


@pytest.mark.parametrize("width", [1280, 375])
def test_leaderboard_page(browser: Any, tmp_path: Path, screenshot: Callable[[Any, str], None], width: int) -> None:
    file = tmp_path / "page.html"
    folder = ROOT / "benchmarks" / "results" / "leaderboard"
    assert main(["leaderboard", "page", "--folder", str(folder), "--output", str(file)]) == 0
    context = browser.new_context(viewport={"width": width, "height": 900})
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(file.as_uri())
    table = page.locator("table.sortable").first
    head = table.locator("thead th", has_text="GFLOPs")

    def numbers() -> list[float]:
        column = table.locator("thead th").evaluate_all("heads => heads.findIndex(head => head.textContent === 'GFLOPs')")
        return [float(text) for text in table.locator(f"tbody td:nth-child({column + 1})").all_inner_texts()]

    head.locator("button").focus()
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    assert numbers() == sorted(numbers(), reverse=True)
    head.locator("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert numbers() == sorted(numbers())
    point = page.locator("figure.chart .point").first
    point.focus()
    tip = page.locator("figure.chart .tip").first
    expect(tip).to_be_visible()
    assert tip.inner_text() == point.get_attribute("aria-label")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if width > 1000:
        assert page.evaluate("[...document.querySelectorAll('.wide')].every(one => one.scrollWidth <= one.clientWidth)")
    screenshot(page, f"leaderboard-{width}")
    context.close()
    assert not problems
