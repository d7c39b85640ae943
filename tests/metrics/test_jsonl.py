import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtrain.metrics.sinks import metrics_jsonl
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile, read_records
from shardtrain.utils.checked_json import line_of


def steps(path):
    return [record["step"] for record in read_records(path)]


def write(path, numbers, start_step=0):
    file = JsonlFile(path, start_step)
    for number in numbers:
        file.write({"step": number, "loss": 1.0 / number})
    file.close()
    return file


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path):
    file = JsonlFile(tmp_path / "metrics.jsonl", 0)
    file.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_bytes() == line_of({"step": 1})


def test_records_after_the_checkpoint_are_removed_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 10, 20, 30])
    file = write(path, [25, 30, 40], start_step=20)

    assert steps(path) == [1, 10, 20, 25, 30, 40]
    assert [record["step"] for record in file.history] == [1, 10, 20]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", ['{"step": 20, "lo', '{"step": 20}', "\x00\x00\x00", "[1]\n", '{"step": "x"}\n', "7\n"]
)
def test_torn_line_is_dropped_and_the_next_record_is_complete(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 10])
    with path.open("a") as file:
        file.write(torn)
    write(path, [30], start_step=20)
    complete = [20] if torn == '{"step": 20}' else []

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [
        1,
        10,
        *complete,
        30,
    ]


def test_steps_written_twice_keep_the_later_history(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {s}, "run": {r}}}\n' for s, r in [(1, 0), (10, 0), (20, 0), (10, 1)])
    )
    file = JsonlFile(path, 30)

    assert [(record["step"], record["run"]) for record in file.history] == [(1, 0), (10, 1)]
    assert steps(path) == [1, 10]


def test_valid_history_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 10])
    before = path.stat()
    JsonlFile(path, 10)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_new_run_renames_an_earlier_history(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 10])
    with caplog.at_level("INFO", logger="shardtrain"):
        write(path, [1])

    assert steps(path) == [1]

    (aside,) = [child for child in tmp_path.iterdir() if child != path]
    assert steps(aside) == [1, 10]
    assert aside.name in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_not_written(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    JsonlFile(path, 0).write({"step": 1, "loss": value})
    assert path.read_bytes() == line_of({"step": 1, "loss": None})


def test_failing_disk_costs_records_and_one_warning_but_does_not_stop_training(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "metrics.jsonl"
    file = JsonlFile(path, 0)
    file.write({"step": 1})
    real = os.write

    def full(descriptor, data):
        real(descriptor, data[:5])  # a partial write, then no space
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        file.write({"step": 2})
        file.write({"step": 3})
    file.write({"step": 4})
    file.close()

    assert steps(path) == [1, 4]
    assert caplog.text.count("No space left") == 1
    assert "2 records" in caplog.text


def test_folder_that_cannot_be_created_is_a_warning(tmp_path, caplog):
    (tmp_path / "run").write_text("a file where the folder should be")
    file = JsonlFile(tmp_path / "run" / "metrics.jsonl", 0)
    file.write({"step": 1})
    file.close()

    assert "training continues" in caplog.text
    assert file.num_lost == 1


TORN = ["", '{"step": 9', "[1]\n", "\x00\x00", '{"step": 3}\n', '{"step": 100000}\n', "\n"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    start=st.integers(1, 150),
    tail=st.lists(st.sampled_from(TORN), max_size=3),
    tail_bytes=st.sampled_from([8, 40, 200, 5000]),
)
def test_only_the_end_of_a_large_file_is_read_with_the_same_result(
    tmp_path, monkeypatch, gaps, start, tail, tail_bytes
):
    """The result must equal that of reading the entire file. Valid records precede torn lines of a crash."""
    steps_written = []
    step = 0
    for gap in gaps:
        step += gap
        steps_written.append(step)
    lines = [f'{{"step": {step}, "loss": {step / 7}}}\n' for step in steps_written]
    content = "".join([*lines, *tail])
    small = tmp_path / "small.jsonl"
    large = tmp_path / "large.jsonl"
    small.write_text(content)
    large.write_text(content)

    # One file is read entirely. Of the other, which has the same content, only the end is read.
    monkeypatch.setattr(metrics_jsonl, "_LARGE_BYTES", 2**40)
    JsonlFile(small, start)
    monkeypatch.setattr(metrics_jsonl, "_LARGE_BYTES", 0)
    monkeypatch.setattr(metrics_jsonl, "_TAIL_BYTES", tail_bytes)
    history = [record["step"] for record in JsonlFile(large, start).history]

    assert read_records(large) == read_records(small)
    for line in large.read_text().splitlines():
        if line:
            assert json.loads(line)

    # The history of a large file is a sample of the records, which includes the last one.
    expected = steps(small)
    assert history == sorted(set(history))
    assert set(history) <= set(expected)
    if expected:
        assert history[-1] == expected[-1]


def test_history_of_a_large_file_is_thinned_and_its_end_truncated_in_place(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 20_001)))
    monkeypatch.setattr(metrics_jsonl, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(metrics_jsonl, "_TAIL_BYTES", 1000)
    inode = path.stat().st_ino
    history = [record["step"] for record in JsonlFile(path, 15_000).history]

    assert path.stat().st_ino == inode
    assert steps(path) == list(range(1, 15_001))
    assert (history[0], history[-1]) == (1, 15_000)
    assert 2000 < len(history) <= 2502

    JsonlFile(path, 0)
    assert not path.exists(), "the history of the earlier run was not renamed"
    assert len(list(tmp_path.iterdir())) == 1, "the history of the earlier run was not renamed"


@pytest.mark.parametrize("start", [1, 10, 9_000, 19_990])
def test_resuming_far_back_in_a_large_file_reads_little_of_it(tmp_path, monkeypatch, start):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {step}, "loss": {step / 7}}}\n' for step in range(1, 20_001))
    )
    size = path.stat().st_size
    parsed_bytes = []
    parse = metrics_jsonl._record

    def counting_parse(line):
        parsed_bytes.append(len(line))
        return parse(line)

    monkeypatch.setattr(metrics_jsonl, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(metrics_jsonl, "_TAIL_BYTES", 2000)
    monkeypatch.setattr(metrics_jsonl, "_THINNED", 100)
    monkeypatch.setattr(metrics_jsonl, "_record", counting_parse)

    assert JsonlFile(path, start).history[-1]["step"] == start

    num_parsed_bytes = sum(parsed_bytes)
    assert steps(path) == list(range(1, start + 1))
    # The first tail has 2,000 bytes. The second is doubled until it covers the distance between two of the
    # 100 samples. Samples are read twice, and a line has at most 60 bytes.
    tails = 2000 + 4 * size / 100
    samples = 2 * 100 * 60
    assert tails + samples < size / 10
    assert num_parsed_bytes < tails + samples


def test_lines_with_a_correct_checksum_are_not_parsed(tmp_path, monkeypatch):
    """With steps out of order, the entire file is read. Parsing 10^6 lines would take a minute."""
    path = tmp_path / "metrics.jsonl"
    lines = [line_of({"step": step, "loss": 2.0}) for step in (1, 2, 3, 2, 3, 4)]
    torn = lines[3][:20] + b"\n"
    changed = lines[3].replace(b"2.0", b"7.0")
    foreign = b'{"loss": 1.0, "step": 4}\n'
    path.write_bytes(b"".join([*lines[:3], torn, *lines[3:5], changed, foreign, lines[5]]))

    parsed = []
    parse = metrics_jsonl._record
    monkeypatch.setattr(metrics_jsonl, "_record", lambda line: parsed.append(line) or parse(line))
    metrics_jsonl._straighten(path, start_step=4)
    # In both passes over the file, only lines without a correct checksum are parsed.
    assert parsed[:6] == [torn, changed, foreign] * 2
    monkeypatch.undo()
    steps = [record["step"] for record in metrics_jsonl.read_records(path)]
    assert steps == [1, 2, 3, 4]
    assert path.read_bytes() == b"".join([lines[0], *lines[3:6]])
