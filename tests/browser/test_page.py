"""What users do on the page: an own image, sliders, a mistake, two plans, a phone, the dark, the keyboard alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image

from tests.browser.conftest import PATIENCE, Open

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=PATIENCE)
Save = Callable[[Any, str], None]


def shown(page: Any) -> dict[str, Any]:
    """The settings of what the page shows."""
    names = ("model", "images", "prompt", "plans")
    return dict(zip(names, json.loads(page.locator("body").get_attribute("data-shown")), strict=True))


def wait_for_plans(page: Any, *plans: str) -> None:
    """Until the page shows these plans."""
    words = json.dumps(list(plans), ensure_ascii=False, separators=(",", ":"))
    page.locator(f"body[data-shown$={json.dumps(words + ']')}]").wait_for()


def cost(page: Any, row: int) -> list[str]:
    """A row of the table of costs: tokens, GFLOPs, time, speed-up."""
    return [cell.strip() for cell in page.locator("#cost tbody tr").nth(row).locator("td").all_inner_texts()]


def pixels(page: Any, selector: str) -> np.ndarray:
    """What a canvas shows, (h, w, 3)."""
    return np.asarray(Image.open(io.BytesIO(page.locator(selector).first.screenshot())).convert("RGB")).astype(int)


def fits(page: Any) -> bool:
    """Whether nothing is wider than the window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A file whose name holds markup."""
    path = tmp_path / "<img src=x onerror=alert(1)> photo.jpg"
    shades = np.linspace(0, 255, 240 * 160 * 3).reshape(160, 240, 3)
    Image.fromarray(shades.astype(np.uint8)).save(path, "JPEG")
    return path


def test_first_look(open_page: Open, screenshot: Save) -> None:
    page = open_page()
    expect(page.locator("#says table")).to_be_visible()
    assert cost(page, 0)[0] == "196" and cost(page, 1)[0] == "32"
    page.locator("#cost-note", has_text="median of").wait_for()  # the times come after the picture
    assert cost(page, 1)[3].endswith("×") and cost(page, 1)[2].endswith(("ms", "s"))
    assert fits(page)
    kept, image = pixels(page, ".views canvas >> nth=1"), pixels(page, ".views canvas >> nth=0")
    assert np.abs(kept[: len(image)] - image[: len(kept)]).mean() > 5  # something is drawn on the image
    screenshot(page, "desktop-light")


def test_upload(open_page: Open, photo: Path, screenshot: Save) -> None:
    page = open_page()
    alerts: list[str] = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    page.locator(".drop input").set_input_files(photo)
    expect(page.locator(".drop.chosen")).to_contain_text(photo.name)
    page.locator("body:not([data-shown*='sample:'])").wait_for()
    assert "sample" not in parse_qs(urlsplit(page.url).fragment)
    page.locator("details summary").click()
    expect(page.locator("#command")).to_contain_text(photo.name)
    with page.expect_download() as download:
        page.locator("#save").click()
    assert Image.open(download.value.path()).format == "PNG"
    screenshot(page, "upload")
    page.locator(".drop input").set_input_files({"name": "broken.jpg", "mimeType": "image/jpeg", "buffer": b"nothing"})
    expect(page.locator("#status.bad")).to_contain_text("cannot be used")
    assert not alerts


def test_sliders(open_page: Open) -> None:
    page = open_page("#model=sieve-vit-8&sample=24&plan=anchor%404%3A40")
    before = pixels(page, ".views canvas >> nth=1")
    page.locator("input.budget").fill("20")
    wait_for_plans(page, "anchor@4:20")
    assert cost(page, 1)[0] == "20" and "20 tokens" in page.locator(".budget-value").inner_text()
    after = pixels(page, ".views canvas >> nth=1")
    assert before.shape == after.shape and np.abs(before - after).max() > 30
    page.locator("input.place").fill("6")
    wait_for_plans(page, "anchor@6:20")
    expect(page.locator(".cut")).to_contain_text("after block 6: 196 → 20")
    page.locator("select.method").select_option("tome")
    page.locator("body[data-shown*='tome']").wait_for()
    expect(page.locator(".strip button")).to_have_count(8)
    page.locator(".strip button").first.click()
    expect(page.locator(".cut")).to_contain_text("inside block 1")
    assert parse_qs(urlsplit(page.url).fragment)["plan"] == ["tome"]


def test_mistake(open_page: Open, screenshot: Save) -> None:
    page = open_page()
    page.locator("input.text").fill("anhcor@4:40")
    expect(page.locator(".error mark")).to_have_text("a")
    expect(page.locator("input.text")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".reason")).to_contain_text("no method named 'anhcor'")
    screenshot(page, "mistake")
    page.locator(".meant").click()
    wait_for_plans(page, "anchor@4:40")
    expect(page.locator(".error")).to_be_hidden()
    page.locator("input.text").fill("anchor@4:40(q=3)")
    expect(page.locator(".error mark")).to_have_text("q")


def test_newer_text_is_asked_for_after_an_error(open_page: Open) -> None:
    page = open_page()
    held: list[Any] = []
    page.route("**/api/run", lambda route: route.continue_() if held else held.append(route))
    page.locator("#prompt").fill("x" * 301)
    while not held:
        page.wait_for_timeout(50)
    page.locator("#prompt").fill("a red circle")
    page.wait_for_timeout(1000)  # longer than the page waits for the next key
    held[0].continue_()
    page.locator("body[data-shown*='a red circle']").wait_for()
    expect(page.locator("#status.bad")).to_be_hidden()


def test_two_plans_and_their_link(open_page: Open, screenshot: Save) -> None:
    page = open_page("#model=sieve-vit-8&sample=24&plan=anchor%404%3A40&prompt=a+white+star%0Aa+blue+ring")
    expect(page.locator("#says tbody tr")).to_have_count(2)
    page.locator(".add:visible").click()
    wait_for_plans(page, "anchor@4:40", "random@4:40")
    expect(page.locator("article.plan")).to_have_count(2)
    expect(page.locator("#says thead th")).to_have_count(4)
    page.locator("article.b input.text").fill("cover@4:40")
    wait_for_plans(page, "anchor@4:40", "cover@4:40")
    page.locator("#cost-note", has_text="median of").wait_for()
    screenshot(page, "two-plans")
    assert fits(page)
    again = open_page(f"#{urlsplit(page.url).fragment}")
    assert shown(again) == shown(page)
    page.locator("article.a .remove").click()
    wait_for_plans(page, "cover@4:40")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone(open_page: Open, screenshot: Save, dark: bool) -> None:
    page = open_page("#model=sieve-vit-8&sample=24&plan=anchor%404%3A40&plan=cover%404%3A40", width=375, height=720, dark=dark)
    page.locator("#cost-note", has_text="median of").wait_for()
    assert fits(page)
    for selector in ("#cost table", "#says table", ".views", ".controls"):
        box = page.locator(selector).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 375, selector
    for box in (target.bounding_box() for target in page.locator("button:visible").all()):
        assert box["height"] >= 24  # large enough for a finger
    screenshot(page, f"phone-{'dark' if dark else 'light'}")


def test_dark(open_page: Open, screenshot: Save) -> None:
    link = "#model=sieve-vit-8&sample=24&plan=anchor%404%3A40"
    colours = [open_page(link, dark=dark).evaluate("getComputedStyle(document.body).backgroundColor") for dark in (False, True)]
    light, dark = (sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) for colour in colours)
    assert light > 700 and dark < 120
    page = open_page(link, dark=True)
    page.locator("#cost-note", has_text="median of").wait_for()
    screenshot(page, "desktop-dark")


def test_keyboard_only(open_page: Open) -> None:
    page = open_page("#model=sieve-vit-8&sample=24&plan=anchor%404%3A40")

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"the Tab key does not lead to {selector}")

    tab_to(".drop input")
    tab_to(".samples button[data-number='17']")
    page.keyboard.press("Enter")
    page.locator("body[data-shown*='sample:17']").wait_for()
    tab_to("input.text")
    page.keyboard.press("End")
    page.keyboard.press("Backspace")
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    wait_for_plans(page, "anchor@4:44")
    tab_to("input.budget")
    page.keyboard.press("ArrowRight")
    wait_for_plans(page, "anchor@4:45")
    tab_to("input.place")
    page.keyboard.press("ArrowLeft")
    wait_for_plans(page, "anchor@3:45")
    tab_to(".views canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".readout")).to_contain_text("row 1, column 2")
    tab_to("#copy-command")
    page.keyboard.press("Enter")
    expect(page.locator("#took")).not_to_be_empty()


def test_skipping_to_the_plans_changes_nothing(open_page: Open, photo: Path) -> None:
    page = open_page("#model=sieve-vit-8&plan=anchor%404%3A40")
    page.locator(".drop input").set_input_files(photo)
    page.locator("body:not([data-shown*='sample:'])").wait_for()
    before, link = shown(page), page.url
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "plans"
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('#plans').contains(document.activeElement)")
    page.wait_for_timeout(500)
    assert shown(page) == before and page.url == link
    expect(page.locator(".drop.chosen")).to_contain_text(photo.name)


def test_pictures_come_in_two_tabs_at_once(open_page: Open) -> None:
    pages = [open_page("#model=sieve-reid-6"), open_page("#model=sieve-reid-6")]
    for page in pages:
        expect(page.locator(".people")).to_have_count(2)
    for _ in range(3):
        for page in pages:
            page.locator("input.text").press("End")
            page.keyboard.type(" ")
    for page in pages:
        page.locator("#cost-note", has_text="median of").wait_for()
        page.wait_for_function("[...document.images].every(image => image.complete && image.naturalWidth)")


def test_questions_and_people(open_page: Open, screenshot: Save) -> None:
    page = open_page("#model=sieve-llava-8")
    expect(page.locator(".answers dd")).to_have_count(2)
    answer = page.locator(".answers dd").first.inner_text()
    page.locator("#prompt").fill("is there a red heart?")
    page.locator("body[data-shown*='red heart']").wait_for()
    assert page.locator(".answers dd").first.inner_text() != answer
    screenshot(page, "question")
    page.locator("#model").select_option("sieve-reid-6")
    expect(page.locator(".people")).to_have_count(2)
    expect(page.locator(".people li.match").first).to_be_visible()
    page.locator("#cost-note", has_text="median of").wait_for()
    assert fits(page)
    screenshot(page, "people")
