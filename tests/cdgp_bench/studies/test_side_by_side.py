"""Which way represents a runtime, and which runtime a method."""

from cdgp_bench.studies.side_by_side import Facts, Way, row_of, summary, too_slow


def turn(ms: float, peak: float = 100.0) -> Facts:
    return {"ms": [ms] * 6, "peak_mib": peak, "foreign": 0.01, "again": 0, "parity": 1e-4}


def test_a_clearly_slower_way_of_one_runtime_is_dropped() -> None:
    turns: dict[Way, list[Facts]] = {
        ("padim", "dynamo.onnx"): [turn(10)], ("padim", "script.onnx"): [turn(11.5)],
        ("padim", "dynamo.xml"): [turn(20)], ("padim", "torch.xml"): [turn(21)],
    }  # fmt: skip
    assert too_slow(turns, list(turns)) == [("padim", "script.onnx")]


def test_the_fastest_file_and_runtime_count() -> None:
    speeds = {"dynamo.onnx": 10, "script.onnx": 9, "dynamo.xml": 8, "torch": 30}
    session: dict[Way, Facts] = {
        ("padim", file): summary([turn(ms), turn(ms)]) for file, ms in speeds.items()
    }
    about: Facts = {"exports": {file: {} for file in speeds if file != "torch"}}
    row = row_of("padim", about, [session], most=12)
    assert {r: found["file"] for r, found in row["runtimes"].items()} == {
        "onnxruntime": "script.onnx", "openvino": "dynamo.xml", "torch": "torch",
    }  # fmt: skip
    assert row["best"] == "openvino"
    assert row["exports"]["script.onnx"]["median_ms"] == [9.0]
    unfinished = row_of("padim", about, [session], most=13)
    assert unfinished["runtimes"] == {} and unfinished["best"] == "torch"
