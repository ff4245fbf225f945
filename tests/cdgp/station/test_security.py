"""Nobody does what they may not: roles on every route, forged requests, guesses, injections."""

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select, update
from tests.cdgp.station.serving import PASSWORD, Served, grey, serving

from cdgp.station import accounts, trail
from cdgp.station.accounts import ROLES
from cdgp.station.schema import login_failures, sessions, tokens, users

LEAST = {
    ("GET", "/"): "viewer",
    ("GET", "/lines/status"): "viewer",
    ("GET", "/queue"): "operator",
    ("GET", "/images/{image_id}"): "viewer",
    ("GET", "/images/{image_id}/{name}"): "viewer",
    ("GET", "/bins"): "viewer",
    ("GET", "/audit"): "viewer",
    ("GET", "/audit.csv"): "engineer",
    ("GET", "/settings"): "engineer",
    ("GET", "/metrics"): "viewer",
    ("GET", "/login"): None,
    ("POST", "/login"): None,
    ("POST", "/logout"): "viewer",
    ("GET", "/password"): "viewer",
    ("POST", "/password"): "viewer",
    ("POST", "/lines"): "engineer",
    ("POST", "/models"): "engineer",
    ("POST", "/lines/{line_id}/policy"): "engineer",
    ("GET", "/models"): "viewer",
    ("POST", "/lines/{line_id}/candidates"): "engineer",
    ("GET", "/candidates/{candidate_id}"): "viewer",
    ("GET", "/api/v1/candidates/{candidate_id}"): "viewer",
    ("GET", "/jobs"): "viewer",
    ("POST", "/lines/{line_id}/jobs"): "engineer",
    ("GET", "/jobs/{job_id}"): "viewer",
    ("GET", "/jobs/{job_id}/status"): "viewer",
    ("POST", "/jobs/{job_id}/cancel"): "engineer",
    ("POST", "/jobs/{job_id}/retry"): "engineer",
    ("GET", "/threshold"): "viewer",
    ("GET", "/threshold/effect"): "viewer",
    ("GET", "/drift"): "viewer",
    ("POST", "/alarms/{alarm_id}/acknowledge"): "operator",
    ("POST", "/tokens"): "administrator",
    ("POST", "/tokens/{token_id}/revoke"): "administrator",
    ("POST", "/users"): "administrator",
    ("POST", "/users/{user_id}"): "administrator",
    ("POST", "/users/{user_id}/password"): "administrator",
    ("POST", "/api/v1/images"): "operator",
    ("GET", "/api/v1/images/{image_id}"): "viewer",
    ("GET", "/api/v1/images/{image_id}/drawing"): "viewer",
    ("POST", "/api/v1/images/{image_id}/drawing"): "operator",
    ("POST", "/api/v1/queue/claim"): "operator",
    ("POST", "/api/v1/reviews"): "operator",
    ("POST", "/api/v1/reviews/undo"): "operator",
}
"""The least role for every route; None for everybody. A new route has to be added here."""
REFUSED = (303, 401, 403)


def routes(app: Any) -> list[APIRoute]:
    """All routes of the application, of routers that it includes too."""
    found, open_ = [], list(app.routes)
    while open_:
        route = open_.pop()
        if isinstance(route, APIRoute):
            found.append(route)
        else:
            open_ += getattr(getattr(route, "original_router", None), "routes", [])
    return found


def test_every_route_has_its_least_role(served: Served) -> None:
    known = {(m, route.path) for route in routes(served.app) for m in route.methods or ()}
    assert known == set(LEAST)


@pytest.mark.parametrize("role", [None, *ROLES])
def test_roles_get_where_they_may_and_nowhere_else(served: Served, role: str | None) -> None:
    """A request without content is answered by the guard, or by the route behind it."""
    person = served.person(role) if role else None
    if person:
        served.person("administrator")
    for (method, path), least in sorted(LEAST.items(), key=lambda item: item[0][1] == "/logout"):
        filled = re.sub(r"{\w+_id}", "999", path).replace("{name}", "x")
        client = person.client if person else served.client()
        headers = {"X-CSRF-Token": person.csrf} if person else {}
        # A body of the right kind, so that it is the guard that answers first.
        body: dict[str, Any] = {"json": {}} if "/api/" in path else {"data": {"x": "y"}}
        body = {} if method == "GET" else body
        answer = client.request(method, filled, headers=headers, **body)
        allowed = least is None or (role is not None and ROLES.index(role) >= ROLES.index(least))
        refused = answer.status_code in (401, 403) or (
            answer.status_code == 303
            and answer.headers["location"] == "/login"
            and path != "/logout"
        )
        assert refused != allowed, (method, path, role, answer.status_code)
        assert answer.status_code < 500, (method, path)


def test_a_change_needs_the_csrf_token_and_an_origin_of_its_own(served: Served) -> None:
    person = served.person("engineer")
    form = {"name": "forged"}
    ours = {"X-CSRF-Token": person.csrf}
    wrong = [
        {},
        {"X-CSRF-Token": ""},
        {"X-CSRF-Token": served.person("administrator").csrf},
        {**ours, "Origin": "https://evil.example"},
        {**ours, "Origin": "null"},
        {**ours, "Sec-Fetch-Site": "cross-site"},
        {**ours, "Origin": "http://testserver.evil.example"},
    ]
    for headers in wrong:
        assert person.client.post("/lines", data=form, headers=headers).status_code == 403, headers
    assert "forged" not in person.get("/settings").text
    right = {**ours, "Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    assert person.client.post("/lines", data=form, headers=right).status_code == 303
    in_form = {"name": "by form", "csrf": person.csrf}
    assert person.client.post("/lines", data=in_form).status_code == 303


def test_a_login_from_a_foreign_page_is_refused(served: Served) -> None:
    served.person("viewer")
    form = {"name": "viewer", "password": PASSWORD}
    answer = served.client().post("/login", data=form, headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_headers_and_cookie(served: Served) -> None:
    person = served.person("viewer")
    for path in ("/", "/static/queue.js", "/login", "/nothing", "/api/v1/images/1"):
        headers = person.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    form = {"name": "viewer", "password": PASSWORD}
    cookie = served.client().post("/login", data=form).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_pages_have_no_inline_scripts_or_styles(served: Served, tmp_path: Path) -> None:
    served.model(0.0)
    image = served.person("operator").upload(grey(tmp_path, 10), wait=20)["id"]
    person = served.person("administrator")
    for path in ("/", f"/queue?line={served.line}", f"/images/{image}", "/bins", "/audit",
                 "/settings", "/password", "/login", "/models", "/jobs", "/drift",
                 "/threshold"):  # fmt: skip
        answer = person.get(path)
        assert answer.status_code == 200, path
        assert not re.search(
            r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|javascript:", answer.text
        )


def test_a_session_is_new_with_each_login(served: Served) -> None:
    served.person("viewer")
    client = served.client()
    client.cookies.set("cdgp_station", "chosen by somebody else")
    form = {"name": "viewer", "password": PASSWORD}
    first = client.post("/login", data=form).cookies["cdgp_station"]
    second = client.post("/login", data=form).cookies["cdgp_station"]
    assert len({first, second, "chosen by somebody else"}) == 3
    with served.station.store.read() as connection:
        kept = list(connection.scalars(select(sessions.c.digest)))
    assert first not in kept
    assert accounts.digest_of(first) in kept


def test_a_session_ends_with_sign_out_idleness_and_a_new_password(served: Served) -> None:
    person = served.person("viewer")
    other = served.sign_in("viewer")
    form = {"old": PASSWORD, "new": "another long password"}
    assert person.post("/password", data=form).status_code == 303
    assert person.get("/").status_code == 200
    assert other.get("/").status_code == 303
    with served.station.store.write() as connection:
        connection.execute(update(sessions).values(seen_at=1.0))
    assert person.get("/").status_code == 303
    again = served.sign_in("viewer", "another long password")
    cookie = again.client.cookies["cdgp_station"]
    assert again.post("/logout").status_code == 303
    again.client.cookies.set("cdgp_station", cookie)
    assert again.get("/").status_code == 303


def test_somebody_who_is_locked_out_is_out_at_once(served: Served) -> None:
    person, boss = served.person("operator"), served.person("administrator")
    with served.station.store.read() as connection:
        query = select(users.c.id).where(users.c.name == "operator")
        user_id = connection.execute(query).scalar_one()
    form = {"role": "operator", "disabled": "true"}
    assert boss.post(f"/users/{user_id}", data=form).status_code == 303
    assert person.get("/").status_code == 303
    form = {"name": "operator", "password": PASSWORD}
    assert served.client().post("/login", data=form).status_code == 401


def test_the_last_administrator_stays(served: Served) -> None:
    boss = served.person("administrator")
    with served.station.store.read() as connection:
        ids = connection.execute(select(users.c.id, users.c.name)).fetchall()
    for row in sorted(ids, key=lambda row: row.name == "administrator"):
        answer = boss.post(f"/users/{row.id}", data={"role": "viewer"})
        last = row.name == "administrator"
        assert answer.status_code == (400 if last else 303)
    assert boss.get("/settings").status_code == 200


def test_wrong_passwords_lock_the_name_for_a_while(served: Served) -> None:
    served.person("viewer")
    client = served.client()
    for _ in range(accounts.FAILURES_A_NAME):
        wrong = client.post("/login", data={"name": "viewer", "password": "guess"})
        assert wrong.status_code == 401
    form = {"name": "viewer", "password": PASSWORD}
    locked = client.post("/login", data=form)
    assert (locked.status_code, locked.headers["retry-after"]) == (429, "300")
    assert "set-cookie" not in locked.headers
    served.person("operator")  # others are not locked
    with served.station.store.write() as connection:
        connection.execute(update(login_failures).values(at=1.0))
    assert client.post("/login", data=form).status_code == 303


def test_many_names_from_one_address_lock_the_address(served: Served) -> None:
    served.person("viewer")
    client = served.client()
    for number in range(accounts.FAILURES_AN_ADDRESS):
        client.post("/login", data={"name": f"guess {number}", "password": "guess"})
    answer = client.post("/login", data={"name": "viewer", "password": PASSWORD})
    assert answer.status_code == 429


def test_a_given_password_has_to_be_changed_first(served: Served) -> None:
    boss = served.person("administrator")
    answer = boss.post("/users", data={"name": "new", "role": "engineer"})
    found = re.search(
        r"one-time password of new, shown this once: <code>([^<]+)</code>", answer.text
    )
    assert found
    new = served.sign_in("new", found[1])
    assert new.get("/").headers["location"] == "/password"
    assert new.post("/lines", data={"name": "b"}).status_code == 403
    form = {"old": found[1], "new": "short"}
    assert new.post("/password", data=form).status_code == 400
    form["new"] = "long enough for all"
    assert new.post("/password", data=form).status_code == 303
    assert new.get("/settings").status_code == 200


def test_the_first_password_is_told_until_it_is_changed(tmp_path: Path) -> None:
    from cdgp.station.store import Store

    store = Store(tmp_path)
    with store.write() as connection:
        first = accounts.first_password(connection)
    with store.write() as connection:  # a second start, before anybody signed in
        second = accounts.first_password(connection)
    assert first and second and first != second
    assert accounts.sign_in(store, "admin", first, "x") is None
    secret = accounts.sign_in(store, "admin", second, "x")
    assert secret
    with store.write() as connection:
        found = accounts.session_user(connection, secret)
        assert found
        accounts.set_password(connection, found[0], second, "a password of my own")
        accounts.add_user(connection, "admin", "new", "administrator")
        assert accounts.first_password(connection) is None
    store.close()


def test_a_token_uploads_to_its_line_and_does_nothing_else(served: Served, tmp_path: Path) -> None:
    boss = served.person("administrator")
    boss.post("/lines", data={"name": "b"})
    answer = boss.post("/tokens", data={"line": served.line, "label": "camera 1"})
    found = re.search(r"<code>(cdgp_[^<]+)</code>", answer.text)
    assert found
    headers = {"Authorization": f"Bearer {found[1]}"}
    client, content = served.client(), grey(tmp_path, 10).read_bytes()
    sent = client.post("/api/v1/images?part=1", content=content, headers=headers)
    assert sent.status_code == 202
    assert served.row(sent.json()["id"]).line_id == served.line
    other = client.post("/api/v1/images?line=b", content=content, headers=headers)
    assert other.status_code == 403
    for (method, path), least in LEAST.items():
        if least and path != "/api/v1/images":
            place = re.sub(r"{\w+}", "1", path)
            refused = client.request(method, place, headers=headers)
            assert refused.status_code in (*REFUSED, 422), path
    wrong = {"Authorization": f"Bearer {found[1]}x"}
    assert client.post("/api/v1/images", content=content, headers=wrong).status_code == 401
    with served.station.store.read() as connection:
        row = connection.execute(select(tokens)).one()
    assert found[1] not in str(row)
    boss.post(f"/tokens/{row.id}/revoke")
    assert client.post("/api/v1/images", content=content, headers=headers).status_code == 401


EVIL = "<img src=x onerror=alert(1)>'\";DROP TABLE images;--"


def test_names_lots_and_reasons_are_shown_as_text(served: Served, tmp_path: Path) -> None:
    served.model(0.0)
    operator, engineer = served.person("operator"), served.person("engineer")
    engineer.post("/lines", data={"name": EVIL})
    facts = {"part": EVIL, "lot": EVIL, "group": EVIL, "camera": EVIL, "name": EVIL}
    told = operator.upload(grey(tmp_path, 10), wait=20, **facts)
    model = {"model": 1, "accept_below": 0.2, "reject_above": 0.9, "reason": EVIL}
    assert engineer.post(f"/lines/{served.line}/policy", data=model).status_code == 303
    image = f"/images/{told['id']}"
    for path in ("/", image, "/bins?bin=accepted", "/audit", "/settings", "/models"):
        text = engineer.get(path).text
        assert "<img src=x" not in text, path
    assert "&lt;img src=x" in engineer.get("/audit").text
    assert "&lt;img src=x" in engineer.get(image).text


def test_filters_take_no_sql(served: Served, tmp_path: Path) -> None:
    served.model(0.0)
    served.person("operator").upload(grey(tmp_path, 10), wait=20, lot="l")
    viewer = served.person("viewer")
    injected = "' OR 1=1 --"
    assert "/thumbnail.jpg" in viewer.get("/bins", params={"bin": "accepted", "lot": "l"}).text
    nothing = viewer.get("/bins", params={"bin": "accepted", "lot": injected})
    assert (nothing.status_code, "/thumbnail.jpg" in nothing.text) == (200, False)
    assert viewer.get("/bins", params={"bin": injected}).status_code == 404
    assert viewer.get("/bins", params={"line": injected}).status_code == 422


@pytest.mark.parametrize(
    "name", ["..%2f..%2fstation.db", "heat-..png", "%2e%2e", "view.jpg%00", "station.db"]
)
def test_image_files_are_those_of_the_image(served: Served, tmp_path: Path, name: str) -> None:
    told = served.person("operator").upload(grey(tmp_path, 10), wait=20)
    viewer = served.person("viewer")
    assert viewer.get(f"/images/{told['id']}/view.jpg").headers["content-type"] == "image/jpeg"
    assert viewer.get(f"/images/{told['id']}/{name}").status_code == 404
    assert served.client().get(f"/images/{told['id']}/view.jpg").status_code == 303


def test_the_trail_exports_as_csv_without_formulas(served: Served) -> None:
    import csv
    import io

    engineer = served.person("engineer")
    engineer.post("/lines", data={"name": "=1+1"})
    for number in range(3):
        engineer.post("/lines", data={"name": f"line {number}"})
    answer = engineer.get("/audit.csv")
    rows = list(csv.reader(io.StringIO(answer.text)))
    assert rows[0] == list(trail.COLUMNS)
    with served.station.store.read() as connection:
        count, last = trail.verify(connection)
    assert len(rows) == count + 1
    assert rows[-1][-1] == last
    assert not any(cell.startswith("=") for row in rows for cell in row)


def test_metrics_count_what_there_is(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as served:
        served.model(0.0, 0.3, 0.7)
        operator = served.person("operator")
        for level in (10, 20, 128, 250):
            operator.upload(grey(tmp_path, level), wait=20)
        (image,) = operator.claim(served.line)
        text = operator.get("/metrics").text
        assert 'cdgp_station_images_total{decision="accept",line="a"} 2.0' in text
        assert 'cdgp_station_queue_depth{line="a"} 1.0' in text
        operator.review("good", image)
        text = operator.get("/metrics").text
        assert 'cdgp_station_queue_depth{line="a"} 0.0' in text
        assert "cdgp_station_reviews_total 1.0" in text
        assert "cdgp_station_backlog 0.0" in text
