"""``profile`` summarizes traces with known sums, and a real trace."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from shardtrain import cli
from shardtrain.tools.runs.profile import trace
from shardtrain.tools.runs.profile.trace import read
from shardtrain.utils.errors import DataError


def event(
    name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **more: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, **more}


def memory(ts: float, total: int, device: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "name": "[memory]",
        "ts": ts,
        "args": {"Total Allocated": total, "Device Type": device},
    }


ON_CPU = [
    event("ProfilerStep#7", 0, 1000, "user_annotation"),
    event("aten::linear", 100, 300),
    event("aten::addmm", 150, 200),  # nested in the linear, which leaves it a self time of 100
    event("aten::linear", 500, 100, tid=2),
    # Overlaps with the operators from 300 to 400 and from 500 to 600.
    event("gloo:all_reduce", 300, 400, "user_annotation", tid=3),
    memory(10, 1000, 0),
    memory(20, 5000, 0),
    memory(30, 2000, 0),
    memory(25, 9999, 1),
]
ON_GPU = [
    event("ProfilerStep#7", 0, 1000, "user_annotation"),
    event("ProfilerStep#8", 1000, 3000, "user_annotation"),
    event("aten::linear", 0, 4000),
    event("gemm", 100, 500, "kernel", tid=7),
    event("gemm", 700, 500, "kernel", tid=7),
    event(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        400,
        600,
        "kernel",
        tid=8,
    ),
    event("Memcpy HtoD", 1500, 10, "gpu_memcpy", tid=7),
    memory(10, 1000, 0),
    memory(20, 7000, 1),
]


def write(path: Path, events: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_self_times_exclude_callees_and_overlapped_communication_is_not_exposed(
    tmp_path: Path,
) -> None:
    summary = read(write(tmp_path / "a.json", ON_CPU))
    assert [(op.name, op.calls, op.self_us, op.total_us) for op in summary.operations] == [
        ("aten::linear", 2, 200, 400), ("aten::addmm", 1, 200, 200),
    ] or [op.name for op in summary.operations] == ["aten::addmm", "aten::linear"]  # fmt: skip
    assert (summary.steps, summary.on_device) == ([1000], False)
    assert (summary.compute_us, summary.communication_us, summary.exposed_us) == (400, 400, 200)
    assert summary.memory == [(0, 1000), (10, 5000), (20, 2000)]


def test_device_traces_count_kernels_and_overlap_between_streams(tmp_path: Path) -> None:
    summary = read(write(tmp_path / "a.json.gz", ON_GPU))
    assert (summary.steps, summary.on_device) == ([1000, 3000], True)
    assert (
        summary.operations[0].name,
        summary.operations[0].calls,
        summary.operations[0].self_us,
    ) == ("gemm", 2, 1000)
    assert (summary.compute_us, summary.communication_us, summary.exposed_us) == (1010, 600, 100)
    assert summary.memory == [(0, 7000)]


def test_self_times_of_nested_operators_add_up_to_the_total(tmp_path: Path) -> None:
    # Random trees: the self times of all operators add up to the total time of the outermost ones.
    rng = random.Random(0)

    def grow(begin: int, end: int, depth: int) -> list[dict[str, Any]]:
        operators = [event(f"op{rng.randrange(5)}", begin, end - begin, tid=rng.choice([1]))]
        at = begin
        while depth and end - at > 4:
            first = rng.randrange(at, end - 2)
            last = rng.randrange(first + 1, end)
            operators += grow(first, last, depth - 1)
            at = last
        return operators

    for _ in range(20):
        events = []
        for begin, end in ((0, 300), (300, 500), (700, 900)):
            events += grow(begin, end, 4)
        rng.shuffle(events)
        summary = read(write(tmp_path / "a.json", events))
        assert sum(op.self_us for op in summary.operations) == 700
        assert summary.compute_us == 700


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"traceEvents": 3}', "[" * 10_000, '{"traceEvents": [1, {"ph": "X"}]}'],
)
def test_a_file_without_a_trace_is_one_line_or_an_empty_summary(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    try:
        assert read(tmp_path / "x.json").operations == []
    except DataError as error:
        assert len(str(error).splitlines()) == 1
        assert "x.json" in str(error)


@pytest.mark.parametrize("key", ["name", "cat", "ts", "dur", "pid", "tid", "args"])
@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "true", "null", '"a"', "[]", '{"a": []}'],
)
def test_events_with_any_value_are_summed_or_skipped(key: str, value: str, tmp_path: Path) -> None:
    """All numbers of the summary must be finite."""
    for valid in (event("aten::mm", 1, 5), memory(1, 5, 0)):
        # json.dumps cannot write values such as 1e999, so replace a marker in its output.
        events = [event("aten::add", 1, 5), {**valid, key: "@"}]
        text = json.dumps({"traceEvents": events}).replace('"@"', value)
        path = tmp_path / "trace.json"
        path.write_text(text)
        summary = read(path)
        self_times = [operator.self_us for operator in summary.operations]
        numbers = [summary.span_us, summary.compute_us, *self_times, *sum(summary.memory, ())]

        assert all(math.isfinite(number) for number in numbers)


def test_a_trace_that_is_too_large_names_another_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 100)
    with pytest.raises(DataError, match="perfetto"):
        read(write(tmp_path / "x.json.gz", ON_CPU))


def test_a_trace_of_too_many_events_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of two-byte events (``{}``) would need a hundred times its size in memory."""
    monkeypatch.setattr(trace, "MOST_EVENTS", 1000)
    (tmp_path / "x.json").write_text('{"traceEvents":[' + "{}," * 100_000)
    with pytest.raises(DataError, match="more than 1000 events"):
        read(tmp_path / "x.json")


def test_the_newest_step_of_a_run_is_reported_and_the_slowest_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [event("ProfilerStep#7", 0, 2000, "user_annotation"), *ON_CPU[1:]]
    write(tmp_path / "profile_traces/iteration_10/rank0_trace.json", ON_GPU)
    write(tmp_path / "profile_traces/iteration_20/rank0_trace.json", ON_CPU)
    write(tmp_path / "profile_traces/iteration_20/rank1_trace.json", slow)
    assert cli.main(["profile", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert "*    1" in out
    assert "aten::addmm" in out
    assert "gemm" not in out
    assert "memory" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert cli.main(["profile", str(tmp_path), "--step", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"]["0"]["operations"][0]["name"] == "gemm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "does not exist"),
        (["."], "--profiling.enable_profiling"),
        (["run", "--step", "3"], "use one of 10"),
        (["run", "--rank", "3"], "use one of 0"),
        (["run", "--top", "0"], "at least 1"),
    ],
)
def test_wrong_profile_arguments_are_one_line(
    arguments, message, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run/profile_traces/iteration_10/rank0_trace.json", ON_CPU)
    (tmp_path / "profile_traces").mkdir()
    assert cli.main(["profile", *arguments]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_real_trace_is_read(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(5):
            (x @ x).relu()
    recorded.export_chrome_trace(str(tmp_path / "real.json"))
    summary = read(tmp_path / "real.json")

    assert {op.name: op.calls for op in summary.operations}["aten::mm"] == 5
    assert summary.memory
    assert max(size for _, size in summary.memory) >= 64 * 64 * 4
    assert summary.compute_us <= summary.span_us
