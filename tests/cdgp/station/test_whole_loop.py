"""The whole loop in a browser, on solar cells and with real models: from the first login to a model
that the reviews have taught, and back."""

import csv
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from tests.cdgp.station.serving import PASSWORD, over_http
from tests.cdgp.station.test_browser import browser, pytestmark, signed_in  # noqa: F401

from cdgp.audit.duplicates import near_duplicates
from cdgp.cli.demo import solar_cells
from cdgp.data.manifest import Sample
from cdgp.data.scan import scan
from cdgp.station import trail
from cdgp.station.schema import images
from cdgp.station.service import Station
from cdgp.workflows import Run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("elpv_dataset", reason="the images of solar cells are not installed")
REVIEWS = 50


def unlike_cells() -> list[Sample]:
    """Half good, half defective, and no two alike: those would stop the retraining as a leak."""
    cells = solar_cells(REVIEWS)
    clusters, _ = near_duplicates(scan(cells, 65535).stats)
    alike = {position for cluster in clusters for position in cluster}
    single = [s for position, s in enumerate(cells.samples) if position not in alike]
    by_label = [[s for s in single if s.defective is label] for label in (False, True)]
    return [s for some in by_label for s in some[: REVIEWS // 2]]


@pytest.mark.slow
def test_reviews_teach_the_next_model(
    tmp_path: Path,
    tiny_run: Run,
    browser: Any,  # noqa: F811
) -> None:
    expect = playwright.expect
    cells = unlike_cells()
    truth = {s.image.name: s.defective for s in cells}
    assert tiny_run.folder is not None and len(truth) == REVIEWS
    home = tmp_path / "home"
    home.mkdir()
    # The settings of the tiny run: a few steps at 64 x 64. All parts are of the random share.
    (home / "station.toml").write_text(
        "audit_share = 1.0\ntest_share = 0.3\ncalibration_share = 0.3\nreserve_gib = 0.0\n"
        f'train = ["--config", "{tiny_run.folder / "config.json"}"]\n'
    )
    station = Station(home)
    shutil.copy(tiny_run.folder / "model.safetensors", station.candidates / "first.safetensors")
    with over_http(station) as (served, address, password):
        page = signed_in(browser, address, "admin", password)
        page.fill("[name=old]", password)
        page.fill("[name=new]", PASSWORD)
        page.click("main button")
        page.goto(f"{address}/settings")
        page.fill("form[action='/lines'] [name=name]", "cells")
        page.click("form[action='/lines'] button")

        # A first model, which asks a person about everything.
        page.goto(f"{address}/models")
        page.click("text=Add candidate")
        page.click("text=Compare with live")
        page.fill("[name=accept_below]", "0")
        page.fill("[name=reject_above]", "1")
        page.click("main button:text-is('Compare')")
        page.fill("[name=reason]", "the first model")
        page.click("text=Make live with 0 and 1")
        expect(page.locator("main")).to_contain_text("accept below 0.0, reject above 1.0")

        page.goto(f"{address}/")
        page.set_input_files("[name=files]", [s.image for s in cells])
        page.click("#upload button")
        expect(page.locator("#uploaded")).to_contain_text(f"{REVIEWS} taken in")
        served.wait()

        # Fifty reviews by keyboard; one of them is wrong, and undone.
        page.goto(f"{address}/queue?line=1")
        page.wait_for_selector(".tile")
        page.keyboard.press("Enter")
        caption = page.locator("figcaption")
        for done in range(REVIEWS):
            name = caption.inner_text().split(" · ")[1]
            key = "d" if truth[name] else "g"
            if done == 10:
                page.keyboard.press("g" if key == "d" else "d")
                expect(page.locator("#saved")).to_contain_text(f"{done + 1} saved")
                page.keyboard.press("z")
                expect(page.locator("#saved")).to_contain_text(f"{done} saved")
                expect(caption).to_contain_text(name)
            page.keyboard.press(key)
            expect(page.locator("#saved")).to_contain_text(f"{done + 1} saved ✓")
        with station.store.read() as connection:
            rows = connection.execute(select(images.c.label, images.c.verdict)).all()
        assert {label: verdict == "defective" for label, verdict in rows} == truth

        # Retraining is a job; what it leaves is a candidate, and the live model stays.
        page.goto(f"{address}/jobs")
        page.click("main button:text-is('Retrain')")
        expect(page.locator("main")).to_contain_text("finished", timeout=300_000)
        page.goto(f"{address}/models")
        while page.locator("main a:has-text('Compare with live')").count() == 0:
            page.reload()
        page.click("main a:has-text('Compare with live')")
        while "changed decisions" not in page.inner_text("main"):
            page.reload()
        page.fill("[name=reason]", "taught by fifty reviews")
        page.click("main button:has-text('Make live with')")
        expect(page.locator("main")).to_contain_text("taught by fifty reviews")
        page.locator("text=Roll back to it").first.click()
        expect(page.locator("main")).to_contain_text("back to policy 1")

        # The audit trail leaves as a table whose chain of hashes anybody can follow.
        page.goto(f"{address}/audit")
        with page.expect_download() as download:
            page.click("text=Download as CSV")
        text = Path(download.value.path()).read_text(encoding="utf-8")
        assert page.complaints == []
    entries = list(csv.DictReader(io.StringIO(text)))
    told = [entry["action"] for entry in entries]
    assert (told.count("reviewed"), told.count("review taken back")) == (REVIEWS + 1, 1)
    assert "retraining asked for" in told
    assert "back to policy 1" in {entry["why"] for entry in entries[-3:]}
    previous = ""
    for entry in entries:
        assert entry["previous"] == previous
        sealed = [int(entry["id"]), *(entry[name] for name in trail.COLUMNS[1:-1])]
        previous = hashlib.sha256(json.dumps(sealed, ensure_ascii=False).encode()).hexdigest()
        assert entry["hash"] == previous
