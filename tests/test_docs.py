"""README and documentation: every example runs, every link leads somewhere."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
from tests.helpers import ROOT, WHITE, tiny_settings
from typer.testing import CliRunner

from cdgp import presets
from cdgp.cli import demo
from cdgp.cli.main import app
from cdgp.data.images import read_image
from cdgp_bench import plan
from cdgp_bench.synthetic import make_dataset

GENERATED = "in-house"
"""Folders under docs/results whose pages are rendered from rows."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if GENERATED not in path.as_posix()
)
NOT_RUN = {
    "cdgp benchmark paper-visa": "needs VisA, which is not part of the repository",
    "cdgp benchmark in-house-cv": "needs images that are not part of the repository",
    "cdgp benchmark in-house-budget": "needs images that are not part of the repository",
    "cdgp benchmark in-house-outside": "needs images that are not part of the repository",
    "cdgp train parts --out runs/paper": "needs the weights of WideResNet-50-2",
    "cdgp train parts --out runs/gpus --devices": "starts processes; test_devices.py does, too",
    "cdgp export runs/parts --to openvino --out for_anomalib.xml": "test_anomalib_flavour.py does",
    "python examples/camera_folder.py": "ends by a signal; test_camera_example.py runs it",
    "cdgp predict parts.onnx new_images --out scored --ray": "tests/cdgp/cluster starts Ray",
    "cdgp predict parts.onnx s3://line-4": "needs a cluster and a store",
    "cdgp station serve": "serves until it is stopped; tests/cdgp/station drives it",
    "cdgp bench-latency": "starts a process for each file; tests/cdgp_bench/measure runs it",
}
"""How the lines begin that cannot run here, each with the reason."""
SHELL_ONLY = ("python3 -m venv .venv", "source .venv/bin/activate")
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Example:
    """A console line, a block of Python, or a file that a page shows."""

    kind: str
    text: str
    line: int
    """Of the page."""
    title: str | None


def examples(page: str) -> list[Example]:
    """All console lines, Python blocks and titled files of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Example] = []
    for match in FENCE.finditer(text):
        kind, title, body = match.groups()
        first = text[: match.start()].count("\n") + 2
        if kind == "console":
            lines = enumerate(body.splitlines(), first)
            found += [Example(kind, line, number, None) for number, line in lines if line.strip()]
        elif kind == "python" or title:
            found.append(Example(kind, body, first, title))
    return found


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets, demo and plans of a few small steps, so that any command takes seconds."""
    make_tiny(monkeypatch)


def make_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny_settings(
        data={"test_fraction": 0.05, "calibration_fraction": 0.5},
        dual_gp={"steps": 2, "batch_size": 4, "no_separation": "flag"},
        student={"steps": 2, "batch_size": 2},
        inducing={"normal": 8, "anomaly": 4, "tokens_per_class": 1000},
    )
    monkeypatch.setitem(presets.PRESETS, "lite", small.model_dump())
    monkeypatch.setattr(demo, "PER_CLASS", 8)
    monkeypatch.setattr(demo, "INPUT_SIZE", (64, 64))
    monkeypatch.setattr(demo, "DUAL_GP_STEPS", 2)
    monkeypatch.setattr(demo, "STUDENT_STEPS", 2)
    monkeypatch.setattr("cdgp.station.demo.GOOD", 12)
    monkeypatch.setattr("cdgp.station.demo.DEFECTIVE", 4)
    read_plan = plan.read_plan

    def small_plan(name: str) -> plan.Plan:
        """One method without training, on the first set, once the whole plan has been read."""
        whole = read_plan(name)
        first = next(iter(whole.datasets))
        dataset = whole.datasets[first].model_copy(update={"input_size": (64, 64)})
        return whole.model_copy(
            update={
                "seeds": whole.seeds[:1],
                "methods": ("static_max",),
                "datasets": {first: dataset},
                "experiments": {"main": (first,)},
            }
        )

    monkeypatch.setattr(plan, "read_plan", small_plan)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the examples speak of: images, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("workshop")
    for name, good, defective, seed in (("parts", 44, 12, 0), ("labelled_images", 4, 3, 1)):
        make_dataset(folder / name, good, defective, (64, 64), seed)
        (folder / name / "manifest.csv").unlink()
    make_dataset(folder / "new", 4, 1, (64, 64), 2)
    (folder / "new" / "good").rename(folder / "new_images")
    shutil.rmtree(folder / "new")
    (folder / "new_images" / "000.png").rename(folder / "new_images" / "0001.png")
    shutil.copytree(folder / "parts", folder / "line4")
    pixels = read_image(folder / "new_images" / "0001.png", WHITE)
    np.save(folder / "image.npy", np.rint(255 * pixels).astype(np.uint8))
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_tiny(monkeypatch)
        monkeypatch.chdir(folder)
        run_cdgp(["train", "parts", "--out", "runs/parts", "--quiet"], {}, 0)
    yield folder


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)])
def test_examples_run(
    page: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = examples(page)
    folder = tmp_path / "workshop"
    shutil.copytree(workshop, folder)
    if any("--out runs/parts" in example.text for example in shown):
        shutil.rmtree(folder / "runs" / "parts")  # the page makes it itself
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CDGP_DATA", str(folder))
    namespace: dict[str, object] = {}
    for example in shown:
        if example.title:
            (folder / example.title).write_text(example.text, encoding="utf-8")
    for example in shown:
        where = f"{page}:{example.line}"
        if example.kind == "python":
            exec(compile(example.text, where, "exec"), namespace)
        elif example.kind == "console":
            run_line(example.text, where, monkeypatch)


def run_line(line: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run or check one console line; a line of an unknown kind fails."""
    expected = re.search(r"exit code (\d+)", line.partition("#")[2])
    words = shlex.split(line, comments=True)
    environment = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    command = " ".join(words)
    if not words or command in SHELL_ONLY or any(command.startswith(line) for line in NOT_RUN):
        return
    program = words[0].removeprefix(".venv/bin/")
    if program == "cdgp":
        run_cdgp(words[1:], environment, int(expected[1]) if expected else 0, where)
    elif program == "make":
        check_make(words[1:], where)
    elif "pip" in words and "install" in words:
        if "-r" in words:
            assert (ROOT / words[-1]).is_file(), where
        elif "--no-deps" not in words:
            check_extras(words[-1], where)
    elif words[:2] == ["python", "-m"]:
        check_study(words[2], words[3:], where)
    elif program == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    elif program == "pytest":
        assert any(d.startswith(program) for d in extras()["dev"]), where
    else:
        pytest.fail(f"{where}: do not know how to check {line!r}")


def run_cdgp(
    words: list[str], environment: dict[str, str], exit_code: int, where: str = ""
) -> None:
    result = CliRunner().invoke(app, words, env=environment)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, f"{where}: {result.output}"


def check_make(targets: list[str], where: str) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    done = subprocess.run([make, "-n", *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{where}: {done.stderr}"


def check_extras(requirement: str, where: str) -> None:
    named = re.fullmatch(r"\.\[(.+)\]", requirement)
    assert named, f"{where}: {requirement!r} names no extra"
    assert set(named[1].split(",")) <= extras().keys(), where


def check_study(module: str, options: list[str], where: str) -> None:
    """A study takes minutes: here it must exist, and have the options."""
    spec = find_spec(module)
    assert spec and spec.origin, f"{where}: there is no module {module}"
    source = Path(spec.origin).read_text(encoding="utf-8")
    for option in options:
        assert not option.startswith("--") or f'"{option}"' in source, f"{where}: {option}"


def extras() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return found


def test_lines_that_are_not_run_are_still_in_the_docs() -> None:
    lines = [e.text.strip() for page in PAGES for e in examples(page) if e.kind == "console"]
    for begin in NOT_RUN:
        assert any(begin in line for line in lines), begin


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """What GitHub, and the site, call the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_size_of_the_demo_is_the_same_everywhere() -> None:
    size = re.search(r"^DEMO_SIZE := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert size
    for page in ("README.md", "docs/quickstart.md"):
        assert size[1] in (ROOT / page).read_text(encoding="utf-8"), page


def test_names_of_the_api_page_exist() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)$", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL), re.M)
    assert names
    for name in names:
        resolve_name(name)
