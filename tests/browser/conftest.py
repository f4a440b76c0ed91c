"""The page of `tokensieve demo` in a real browser. `make test-page` runs these tests; plain pytest leaves them out.

TOKENSIEVE_BROWSER is the browser (default: chromium, wherever it is), TOKENSIEVE_SCREENSHOTS a folder for pictures of the page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 240_000  # milliseconds: a machine may be slow and busy
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Open = Callable[..., Any]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only `make test-page` asks for a browser."""
    return None if os.environ.get("TOKENSIEVE_PAGE_TESTS") else True


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server of the page is: another process, as users start it."""
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with open(log, "w") as output:
        command = [sys.executable, "-m", "tokensieve", "demo", "--port", "0", "--device", "cpu"]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        end = time.monotonic() + PATIENCE / 1000
        while not (found := re.search(r"open (http://127\.0\.0\.1:\d+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield found[1]
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("TOKENSIEVE_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "there is no chromium: set TOKENSIEVE_BROWSER to a browser's file"
    with sync_playwright() as playwright:
        # Playwright gives every browser a new profile, which it deletes afterwards
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=list(FLAGS), timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Open]:
    """Opens the page, waits until it shows something, and checks at the end that it reported no error and asked nobody else."""
    contexts, problems, asked = [], [], []

    def open_page(link: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/{link}")
        page.locator("body[data-shown]").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [line for line in problems if "422" not in line], problems
    assert all(url.startswith((address, "blob:")) for url in asked), asked


@pytest.fixture
def screenshot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any, str], None]:
    """Saves a picture of the whole page."""
    folder = Path(os.environ.get("TOKENSIEVE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)

    def save(page: Any, name: str) -> None:
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return save
