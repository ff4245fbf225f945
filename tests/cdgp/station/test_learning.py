"""Candidates are judged by held-out images alone, and nothing becomes live by itself."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update
from tests.cdgp.station.serving import Served, grey, serving, stub_score

from cdgp.station import compare, trail
from cdgp.station.candidates import held_out
from cdgp.station.pipeline import Policy, live_policy
from cdgp.station.schema import candidates, images, trials

LEVELS = range(10, 250, 12)


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A station whose images are all drawn at random, and none of whose are trained on."""
    monkeypatch.setattr("cdgp.station.candidates.LOOK", 0.02)
    with serving(
        tmp_path / "home", "audit_share = 1.0\ntest_share = 1.0\ncalibration_share = 0.0"
    ) as it:
        yield it


def judged(served: Served, folder: Path) -> dict[int, Path]:
    """Scored images with a verdict: bright ones are defective; their files by id."""
    operator, found = served.person("operator"), {}
    for level in LEVELS:
        path = grey(folder, level)
        found[operator.upload(path)["id"]] = path
    served.wait()
    for image, level in zip(operator.claim(served.line), LEVELS, strict=True):
        assert operator.review("defective" if level > 130 else "good", image).status_code == 200
    return found


def settled(served: Served) -> None:
    """Wait until all models have scored all held-out images."""
    models = {model for model, _, _ in served.station.trials._models()}
    while True:
        with served.station.store.read() as connection:
            held = connection.scalars(
                select(images.c.id).where(held_out(served.line, "calibration", "test"))
            ).all()
            done = connection.execute(select(trials.c.image_id, trials.c.model_id)).fetchall()
        if {(image, model) for image in held for model in models} <= {tuple(row) for row in done}:
            return
        time.sleep(0.02)


def candidate(served: Served, offset: float) -> int:
    """Add a stub as a candidate, and let it score; its id."""
    (served.station.candidates / f"candidate-{offset}.onnx").write_text(str(offset))
    form = {"file": f"candidate-{offset}.onnx"}
    engineer = served.person("engineer")
    assert engineer.post(f"/lines/{served.line}/candidates", data=form).status_code == 303
    settled(served)
    with served.station.store.read() as connection:
        newest = select(candidates.c.id).order_by(candidates.c.id.desc()).limit(1)
        return int(connection.execute(newest).scalar_one())


def test_a_candidate_is_compared_on_the_same_images(drawn: Served, tmp_path: Path) -> None:
    drawn.model(0.0, 0.4, 0.6)
    files = judged(drawn, tmp_path)
    key = candidate(drawn, 0.2)
    asked = {"accept_below": 0.45, "reject_above": 0.7}
    told = drawn.person("viewer").get(f"/api/v1/candidates/{key}", params=asked).json()
    assert (told["scored"], told["of"]) == (len(files), len(files))
    labels = [level > 130 for level in LEVELS]
    before, after = ([stub_score(p, offset) for p in files.values()] for offset in (0.0, 0.2))
    policies = Policy(0.4, 0.6), Policy(0.45, 0.7)
    changed = [
        (str(key), policies[0].decide(a), policies[1].decide(b))
        for key, a, b in zip(files, before, after, strict=True)
        if policies[0].decide(a) != policies[1].decide(b)
    ]
    found = told["comparison"]
    assert [(c["image"], c["before"], c["after"]) for c in found["changes"]] == changed
    assert changed
    overkill = sum(
        policies[1].decide(s) == "reject" for s, bad in zip(after, labels, strict=True) if not bad
    )
    assert found["candidate"]["overkill"]["images"] == overkill
    own = compare.compare(
        [str(image) for image in files], labels, compare.Side(before, policies[0]),
        compare.Side(after, policies[1]), [drawn.row(image).group_name for image in files],
    )  # fmt: skip
    assert own.overkill is not None
    assert found["overkill"]["low"] == pytest.approx(own.overkill.low)
    text = drawn.person("viewer").get(f"/candidates/{key}", params=asked).text
    assert f"{len(changed)} changed decisions" in text
    assert re.findall(r'href="/images/(\d+)"', text) == [image for image, _, _ in changed]
    assert 'name="reason"' not in text  # a viewer makes nothing live
    for place in set(re.findall(r'src="(/images/[^"]+)"', text)):
        assert drawn.person("viewer").get(place).status_code == 200, place


def test_only_judged_images_of_the_random_share_and_the_test_split_count(
    drawn: Served, tmp_path: Path
) -> None:
    drawn.model(0.0)
    others = {"audit": False, "split": "fit", "verdict": "unsure", "removed_at": 1.0}
    files = judged(drawn, tmp_path)
    with drawn.station.store.write() as connection:
        for image, (name, value) in zip(files, others.items(), strict=False):
            changed = update(images).where(images.c.id == image)
            connection.execute(changed.values({name: value}))
        calibrates = update(images).where(images.c.id == max(files))
        connection.execute(calibrates.values(split="calibration"))
    key = candidate(drawn, 0.1)
    told = drawn.person("viewer").get(f"/api/v1/candidates/{key}").json()
    assert told["of"] == told["comparison"]["images"] == len(LEVELS) - len(others) - 1


def test_promotion_needs_a_reason_and_rollback_is_one_click(drawn: Served, tmp_path: Path) -> None:
    drawn.model(0.0, 0.4, 0.6)
    key = candidate(drawn, 0.2)

    def live() -> tuple[str, float, float]:
        with drawn.station.store.read() as connection:
            row = live_policy(connection, drawn.line)
        assert row
        return row.name, row.accept_below, row.reject_above

    before = live()
    assert before[0] == "plus-0.0.onnx"  # the candidate is none yet
    engineer, operator = drawn.person("engineer"), drawn.person("operator")
    text = engineer.get(f"/candidates/{key}").text
    place, form = f"/lines/{drawn.line}/policy", _fields(text, "/policy")
    assert operator.post(place, data={**form, "reason": "better"}).status_code == 403
    assert engineer.post(place, data={**form, "reason": " "}).status_code == 400
    assert live() == before
    done = engineer.post(place, data={**form, "reason": "fewer escapes"})
    assert (done.status_code, done.headers["location"]) == (303, f"/models?line={drawn.line}")
    assert live() == ("candidate-0.2.onnx", 0.4, 0.6)
    page = engineer.get(f"/models?line={drawn.line}").text
    assert "Roll back" not in operator.get(f"/models?line={drawn.line}").text
    assert engineer.post(place, data=_fields(page, "/policy")).status_code == 303
    assert live() == before
    with drawn.station.store.read() as connection:
        told = [e for e in trail.entries(connection) if e["action"] == "policy set"]
    assert [e["why"] for e in told] == ["a test", "fewer escapes", "back to policy 1"]


def _fields(text: str, action: str) -> dict[str, str]:
    """The hidden fields of a page's first form that posts to a place."""
    (found, *_) = re.findall(
        rf'<form[^>]*method="post" action="[^"]*{action}".*?</form>', text, re.S
    )
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', found))


def test_a_run_that_was_trained_on_test_images_is_refused(drawn: Served, tmp_path: Path) -> None:
    drawn.model(0.0)
    first, *_ = judged(drawn, tmp_path)
    run = drawn.station.candidates / "run"
    run.mkdir()
    (run / "model.safetensors").write_text("0.3")
    engineer, place = drawn.person("engineer"), f"/lines/{drawn.line}/candidates"
    table = "image,label,split,sha256\nx,good,{split}," + drawn.row(first).digest + "\n"
    (run / "manifest.csv").write_text(table.format(split="fit"))
    refused = engineer.post(place, data={"file": "run"})
    assert refused.status_code == 400
    assert f"image {first}" in refused.text
    (run / "manifest.csv").write_text(table.format(split="test"))
    assert engineer.post(place, data={"file": "run"}).status_code == 303
    assert "<td>run</td>" in engineer.get("/models").text
    for outside in ("../run", "missing", "/etc/passwd"):
        assert engineer.post(place, data={"file": outside}).status_code == 404


def test_an_image_that_a_candidate_cannot_score_holds_nothing_up(
    drawn: Served, tmp_path: Path
) -> None:
    drawn.model(0.0)
    first, *_ = judged(drawn, tmp_path)
    with drawn.station.store.write() as connection:
        connection.execute(
            update(images).where(images.c.id == first).values(digest="0" * 64)  # its file is away
        )
    key = candidate(drawn, 0.1)
    told = drawn.person("viewer").get(f"/api/v1/candidates/{key}").json()
    assert (told["scored"], told["of"]) == (len(LEVELS) - 1, len(LEVELS))


def test_thresholds_tell_what_they_do_and_would_have_done(drawn: Served, tmp_path: Path) -> None:
    drawn.model(0.0, 0.0, 1.0)
    files = judged(drawn, tmp_path)
    with drawn.station.store.write() as connection:
        connection.execute(update(images).values(split="calibration"))
        last = max(files)
        connection.execute(update(images).where(images.c.id == last).values(decided_at=1.0))
    settled(drawn)
    scores = [stub_score(path, 0.0) for path in files.values()]
    bad = [level > 130 for level in LEVELS]
    policy = Policy(0.3, 0.45)
    asked = {"line": drawn.line, "accept_below": 0.3, "reject_above": 0.45}
    viewer = drawn.person("viewer")
    text = " ".join(viewer.get("/threshold/effect", params=asked).text.split())
    pairs = list(zip(scores, bad, strict=True))
    overkill = sum(policy.decide(s) == "reject" for s, b in pairs if not b)
    assert 0 < overkill < bad.count(False)
    assert f"Overkill: good, rejected</dt><dd>{overkill} of {bad.count(False)}" in text
    day = [policy.decide(score) for score in scores[:-1]]
    for word, decision in (
        ("accepted", "accept"),
        ("asked about", "unsure"),
        ("rejected", "reject"),
    ):
        assert f"<dt>{word}</dt><dd>{day.count(decision)} of {len(day)}" in text, word
    assert f"it was {len(day)}</dd> <dt>rejected" in text  # all were unsure
    heights = re.findall(r'<rect class="(\w+)" x="([\d.]+)" .*?height="([\d.]+)"', text)
    counts = {(bool(b), int(50 * s)) for s, b in pairs}
    assert {(c == "defective", round(float(x) / 10)) for c, x, _ in heights} == counts
    wrong = {**asked, "accept_below": 0.9}
    assert viewer.get("/threshold/effect", params=wrong).status_code == 400
    page = viewer.get("/threshold", params={"max_false_rejects": 40, "max_doubts": 60}).text
    own = compare.choose_thresholds(
        scores, bad, [drawn.row(image).group_name for image in files], 0.4, 0.6
    )
    assert f"reject_above={own.reject_above}" in page
    assert "None can be proposed" in viewer.get("/threshold").text  # 1 % needs 99 good groups
    assert 'name="reason"' not in page
    engineer = drawn.person("engineer")
    form = _fields(engineer.get("/threshold").text, "/policy") | {
        "accept_below": "0.3", "reject_above": "0.45", "reason": "too much to review",
    }  # fmt: skip
    done = engineer.post(f"/lines/{drawn.line}/policy", data=form)
    assert done.headers["location"] == f"/threshold?line={drawn.line}"
    with drawn.station.store.read() as connection:
        live = live_policy(connection, drawn.line)
    assert live and (live.name, live.reject_above) == ("plus-0.0.onnx", 0.45)
