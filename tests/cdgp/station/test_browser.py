"""In a real browser: the first login, an upload, reviews by keyboard, bulk, undo, two at once."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, update
from tests.cdgp.station.serving import PASSWORD, Served, grey, over_http, stub_load

from cdgp.station import drawing
from cdgp.station.intake import add_line
from cdgp.station.schema import claims, images, reviews
from cdgp.station.service import Station

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT = 60_000
"""Milliseconds until a page that should say something is silent: far beyond a busy machine."""
playwright.expect.set_options(timeout=WAIT)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Served, str, str]]:
    """A station behind a real server, its address, and the administrator's one-time password."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "station.toml").write_text("audit_share = 0.0\nreserve_gib = 0.0\n")
    with over_http(Station(tmp_path / "home", load=stub_load)) as served:
        yield served


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def signed_in(browser: Any, address: str, name: str, password: str) -> Any:
    """A page of a browser window of its own; what its scripts complain of ends the test."""
    page = browser.new_context().new_page()
    page.set_default_timeout(WAIT)
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda m: page.complaints.append(m.text) if "Security" in m.text else None)
    page.goto(f"{address}/login")
    page.fill("[name=name]", name)
    page.fill("[name=password]", password)
    page.click("main button")
    return page


def counted(served: Served, verdict: str) -> int:
    with served.station.store.read() as connection:
        query = select(func.count()).where(images.c.verdict == verdict)
        return connection.execute(query).scalar_one()


def saved(page: Any, text: str) -> None:
    """Wait until the page says so."""
    playwright.expect(page.locator("#saved")).to_have_text(text)


def test_from_the_first_login_to_reviews_by_keyboard(
    site: tuple[Served, str, str], browser: Any, tmp_path: Path
) -> None:
    served, address, password = site
    expect = playwright.expect
    page = signed_in(browser, address, "admin", password)
    expect(page).to_have_url(f"{address}/password")
    page.fill("[name=old]", password)
    page.fill("[name=new]", PASSWORD)
    page.click("main button")
    expect(page).to_have_url(f"{address}/")

    # A line, and its images through the page; without a model a person is asked for all of them.
    page.goto(f"{address}/settings")
    page.fill("form[action='/lines'] [name=name]", "a")
    page.click("form[action='/lines'] button")
    page.goto(f"{address}/")
    count = 16
    files = [grey(tmp_path, 10 * number) for number in range(count)]
    page.set_input_files("[name=files]", files)
    page.click("#upload button")
    expect(page.locator("#uploaded")).to_contain_text(f"{count} taken in")
    served.wait()

    page.goto(f"{address}/queue?line=1")
    expect(page.locator("#grid .tile")).to_have_count(count)
    page.keyboard.press("Enter")  # one image
    for _ in range(4):
        page.keyboard.press("g")
    page.keyboard.press("d")
    saved(page, "5 saved ✓")
    assert (counted(served, "good"), counted(served, "defective")) == (4, 1)
    page.keyboard.press("z")
    page.keyboard.press("z")
    expect(page.locator("#depth")).to_have_text(f"{count - 3} to review")
    assert (counted(served, "good"), counted(served, "defective")) == (3, 0)
    expect(page.locator("figcaption")).to_contain_text("image 4 ·")

    # The viewer: full size stays from one image to the next, the map and the boxes go on and off.
    width = page.locator("img.base").evaluate("image => image.offsetWidth")
    page.keyboard.press("1")
    page.keyboard.press("j")
    assert page.locator("img.base").evaluate("image => image.offsetWidth") == 20 < width
    assert "full.jpg" in page.locator("img.base").get_attribute("src")
    page.keyboard.press("1")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")

    # Bulk, in the grid.
    expect(page.locator("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#grid")).to_be_visible()
    page.keyboard.press("Shift+X")
    saved(page, "3 saved ✓, 13 selected")
    page.keyboard.press("x")
    saved(page, "3 saved ✓, 12 selected")
    page.keyboard.press("u")
    saved(page, "15 saved ✓")
    assert counted(served, "unsure") == 12
    assert page.complaints == []


def test_two_browsers_share_a_queue_and_a_lost_race_is_told(
    site: tuple[Served, str, str], browser: Any, tmp_path: Path
) -> None:
    served, address, _ = site
    served.person("engineer").post("/lines", data={"name": "a"})
    served.model(0.0, 0.0, 1.0)
    one, two = served.person("operator", "one"), served.person("operator", "two")
    for number in range(50):
        one.upload(grey(tmp_path, 5 * number, number))
    served.wait()
    pages = [signed_in(browser, address, name, PASSWORD) for name in ("one", "two")]
    for page in pages:
        page.goto(f"{address}/queue?line=1")
        page.wait_for_selector(".tile")
    first, second = [
        {tile.get_attribute("src") for tile in page.query_selector_all("#grid img")}
        for page in pages
    ]
    assert (len(first), len(second)) == (40, 10)
    assert not first & second
    # The map is drawn over the image, and bare while Space is held.
    pages[0].keyboard.press("Enter")
    heat = pages[0].locator("img.heat")
    assert heat.evaluate("map => getComputedStyle(map).visibility") == "visible"
    pages[0].keyboard.down(" ")
    assert heat.evaluate("map => getComputedStyle(map).visibility") == "hidden"
    pages[0].keyboard.up(" ")
    pages[0].keyboard.press("h")
    assert heat.evaluate("map => getComputedStyle(map).visibility") == "hidden"
    # Somebody without a page takes the second image of the first one's list.
    with served.station.store.write() as connection:
        connection.execute(claims.delete())
    assert two.review("good", {"id": 2, "version": 0}).status_code == 200
    for _ in range(3):
        pages[0].keyboard.press("d")
    playwright.expect(pages[0].locator("#problem")).to_contain_text(
        "Image 2: somebody has reviewed"
    )
    saved(pages[0], "2 saved ✓")
    with served.station.store.read() as connection:
        rows = connection.execute(select(reviews.c.image_id, reviews.c.verdict))
        assert sorted(map(tuple, rows)) == [(1, "defective"), (2, "good"), (3, "defective")]
    # A verdict on the page of an image, and back.
    pages[0].goto(f"{address}/images/2")
    pages[0].keyboard.press("d")
    verdict = pages[0].locator("dt:text-is('Verdict') + dd")
    playwright.expect(verdict).to_have_text("defective")
    pages[0].wait_for_load_state("networkidle")  # the page is loaded anew, its script too
    pages[0].keyboard.press("z")
    playwright.expect(verdict).to_have_text("good")
    assert pages[0].complaints == pages[1].complaints == []


def test_sliders_compare_promote_and_roll_back(
    site: tuple[Served, str, str], browser: Any, tmp_path: Path
) -> None:
    served, address, _ = site
    with served.station.store.write() as connection:
        served.line = add_line(connection, "test", "a")
    served.model(0.0, 0.0, 1.0)
    operator = served.person("operator")
    for level in range(20, 240, 20):
        operator.upload(grey(tmp_path, level))
    served.wait()
    for image in operator.claim(served.line):
        operator.review("defective" if image["id"] > 7 else "good", image)
    with served.station.store.write() as connection:
        connection.execute(update(images).values(audit=True, split="calibration"))
        connection.execute(update(images).where(images.c.id % 2 == 0).values(split="test"))
    served.station.trials.wake.set()
    (served.station.candidates / "next.onnx").write_text("0.1")
    served.person("engineer")
    page = signed_in(browser, address, "engineer", PASSWORD)
    page.goto(f"{address}/threshold")
    while "Overkill" not in page.inner_text("#effect"):  # held-out images are scored by and by
        page.reload()
    page.locator("[data-of=reject_above]").fill("0.3")
    effect = page.locator("#effect")
    playwright.expect(effect).to_contain_text("0 and 0.3")
    playwright.expect(effect).to_contain_text("2 of 4: 50.0 %")  # of 20, 60, 100, 140: two above
    assert page.input_value("[name=reject_above]") == "0.3"
    page.fill("[name=reason]", "less to review")
    page.click("text=Save")
    playwright.expect(page.locator("main")).to_contain_text("live with 0.0 and 0.3")
    page.goto(f"{address}/models")
    page.click("text=Add candidate")
    page.click("text=Compare with live")
    while "changed decisions" not in page.inner_text("main"):
        page.reload()
    page.fill("[name=reason]", "finds more")
    page.click("text=Make live with")
    playwright.expect(page.locator("main")).to_contain_text("finds more")
    page.locator("text=Roll back to it").first.click()
    playwright.expect(page.locator("main")).to_contain_text("back to policy 2")
    page.goto(f"{address}/jobs")
    page.goto(f"{address}/drift")
    assert page.complaints == []


def test_a_region_is_drawn_with_the_mouse_and_shown_to_the_next(
    site: tuple[Served, str, str], browser: Any, tmp_path: Path
) -> None:
    served, address, _ = site
    served.person("engineer").post("/lines", data={"name": "a"})
    one, _ = served.person("operator", "one"), served.person("operator", "two")
    for level in (50, 100):
        one.upload(grey(tmp_path, level))
    served.wait()
    page = signed_in(browser, address, "one", PASSWORD)
    page.goto(f"{address}/queue?line=1")
    page.wait_for_selector(".tile")
    page.keyboard.press("Enter")
    box = page.locator("canvas.drawing").bounding_box()

    def drag(*points: tuple[float, float]) -> None:
        """From pixel to pixel of the image."""
        places = [(box["x"] + x * box["width"] / 20, box["y"] + y * box["height"] / 16)
                  for x, y in points]  # fmt: skip
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place, steps=4)
        page.mouse.up()

    drag((1, 1), (9, 9))  # no tool: nothing happens
    page.keyboard.press("r")
    drag((2, 3), (12, 9))
    drag((15, 10), (18, 14))
    page.keyboard.press("z")  # the second one
    page.keyboard.press("e")
    for _ in range(20):
        page.keyboard.press("[")
    drag((6, 6), (8, 6))
    page.keyboard.press("e")  # the tool is put away, and what was drawn is saved
    playwright.expect(page.locator("#drawn")).to_have_text("drawing saved ✓")
    page.keyboard.press("d")
    saved(page, "1 saved ✓")
    with served.station.store.read() as connection:
        found = drawing.newest(connection, [1, 2])
    assert set(found) == {1}
    expected = np.zeros((16, 20), np.bool_)
    expected[3:9, 2:12] = True
    marked = drawing.mask(found[1].shapes, (16, 20))
    erased = expected & ~marked
    assert not (marked & ~expected).any()
    assert erased[5:7, 6:8].all() and erased.sum() < 16

    # The next person sees it, on the page of the image; who was slower is told and sees the other.
    other = signed_in(browser, address, "two", PASSWORD)
    other.goto(f"{address}/images/1")
    ink = """sheet => {
        const { data } = sheet.getContext("2d").getImageData(0, 0, 1280, 1024);
        let count = 0;
        for (let i = 3; i < data.length; i += 4) count += data[i] > 127;
        return count;
    }"""
    seen = other.locator("canvas.drawing").evaluate(ink)
    assert seen == pytest.approx(marked.sum() * 64 * 64, rel=0.1)
    version = found[1].version
    body = {"version": version, "shapes": []}
    assert one.post("/api/v1/images/1/drawing", json=body).status_code == 200
    box = other.locator("canvas.drawing").bounding_box()
    page = other
    page.keyboard.press("p")
    drag((10, 12), (14, 12))
    page.keyboard.press("p")
    playwright.expect(page.locator("#problem")).to_contain_text("one has drawn on it")
    assert page.locator("canvas.drawing").evaluate(ink) == 0
    with served.station.store.read() as connection:
        assert drawing.newest(connection, [1])[1].version == version + 1
    assert page.complaints == []
