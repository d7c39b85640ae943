"""Reports of failures: the line on the terminal, the trace in the log, and ``exit.json``."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_config

from shardtrain.checkpoint import lease
from shardtrain.launch import failure, local
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericalError,
    PeerError,
    Preempted,
    Problem,
    StorageError,
)

GLOO = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"


class OutOfMemoryError(RuntimeError):
    """Same class name as torch.OutOfMemoryError, by which the failure is classified."""


def caught(error, rank=1):
    try:
        raise error
    except BaseException as raised:
        return failure.describe(raised, rank)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGXCPU, "signal 24 (the CPU time of `ulimit -t` is used up); raise the limit"),
        (signal.SIGXFSZ, "signal 25 (a file exceeded the size of `ulimit -f`); raise the limit"),
        (signal.SIGSEGV, "signal 11 (SIGSEGV)"),
        (40, "signal 40"),
    ],
)
def test_a_signal_is_reported_with_its_name_or_cause(number, message):
    assert failure.killed(0, number, 0.0).message == f"was killed by {message}"


@pytest.mark.parametrize(
    ("error", "code", "is_peer"),
    [
        (RuntimeError("boom"), 1, False),
        (ConfigError("x"), 2, False),
        (DataError("x"), 3, False),
        (NumericalError("x"), 4, False),
        (CheckpointError("x"), 5, False),
        (PeerError("x"), 6, True),
        (RuntimeError(GLOO), 6, True),
        (ValueError("a file name with gloo/transport in it"), 1, False),
        (MemoryError(), 7, False),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 7, False),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            7,
            False,
        ),
        (StorageError("x"), 8, False),
        (Preempted("saved at step 3"), 75, False),
        (KeyboardInterrupt(), 76, False),
        (SystemExit(0), 1, False),  # called by user code: the run is incomplete
        (SystemExit(4), 1, False),  # the user's own 4 does not mean a non-finite number
        (SystemExit(9), 9, False),
        (SystemExit("text"), 1, False),
    ],
)
def test_each_kind_of_error_has_its_status(error, code, is_peer):
    report = caught(error)
    assert (report.exit_code, report.is_peer) == (code, is_peer)


def test_the_line_names_status_rank_host_cause_place_and_log():
    report = caught(RuntimeError("the data\nends"), rank=3)
    (line,) = failure.lines(report, "out/logs/rank-3.log", world_size=4)
    assert line == (
        f"error[1]: rank 3 (host {report.host}) failed: RuntimeError: the data ends ({report.where}); "
        "full trace: out/logs/rank-3.log"
    )
    assert report.where.startswith("test_failure.py:")


@pytest.mark.parametrize("kind", [DataError, CheckpointError, StorageError, NumericalError])
def test_errors_that_a_user_can_fix_show_no_class_and_no_source_line(kind):
    report = caught(kind("the data end; use more"), rank=3)
    status = kind.exit_code
    assert failure.lines(report, "out/rank-3.log", 1) == [
        f"error[{status}]: the data end; use more; see out/rank-3.log"
    ]

    (line,) = failure.lines(report, "out/rank-3.log", world_size=4)
    assert (
        line
        == f"error[{status}]: rank 3 (host {report.host}): the data end; use more; see out/rank-3.log"
    )
    # exit.json gets the kind, and the log gets the trace.
    assert report.kind == kind.__name__
    assert "Traceback" in report.trace


def test_a_run_of_one_process_names_no_rank():
    (line,) = failure.lines(caught(RuntimeError("boom"), rank=0), "log", world_size=1)
    assert line.startswith("error[1]: RuntimeError: boom (test_failure.py:")


def test_a_configuration_has_a_line_per_problem():
    report = caught(ConfigError([Problem("a.b", 1, "is wrong", "use 2"), "another"]))
    assert failure.lines(report, "log", 2) == [
        "error[2]: a.b=1 is wrong; use 2",
        "error[2]: another",
    ]


def test_a_long_message_is_cut_on_the_terminal_and_complete_in_the_trace():
    report = caught(RuntimeError("x" * 5000))
    assert len(report.message) == failure.MESSAGE_LENGTH
    assert "x" * 5000 in report.trace


def test_secrets_are_masked_in_line_and_trace(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary_0123456789")
    report = caught(RuntimeError("401 for hf_canary_0123456789"))
    assert "canary" not in report.message
    assert "hf_canary_0123456789" not in report.trace


def test_the_culprit_is_the_first_rank_that_is_not_a_peer(tmp_path):
    peer = caught(RuntimeError(GLOO), 0)
    first = caught(RuntimeError("a"), 1)
    second = caught(RuntimeError("b"), 2)

    assert failure.culprit([second, peer, first]).rank == 1
    assert failure.culprit([peer]).rank == 0

    died = failure.killed(3, 9, time_seconds=first.time_seconds - 1)
    assert failure.culprit([peer, first, died]).rank == 3


def test_a_record_survives_a_round_trip_and_has_torchelastic_s_format(tmp_path):
    report = caught(ConfigError(["one", "two"]))
    failure.write_record(report, tmp_path / "error.json")
    assert failure.read_record(tmp_path / "error.json") == report

    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"].startswith("ConfigError: one two")
    assert set(message["extraInfo"]) == {"py_callstack", "timestamp"}


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"shardtrain": {"rank": 1}}', '{"shardtrain": 3}']
)
def test_a_malformed_record_is_ignored(tmp_path, text):
    (tmp_path / "error.json").write_text(text)
    assert failure.read_record(tmp_path / "error.json") is None
    assert failure.read_record(tmp_path / "missing.json") is None


def test_the_exit_file_has_every_documented_field(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 20, "loss": null}\n{"ste')
    report = caught(PeerError("gone"), rank=2)
    failure.write_exit(tmp_path, report, report.exit_code)

    assert json.loads((tmp_path / "exit.json").read_text()) == {
        "code": 6,
        "class": "PeerError",
        "message": "gone",
        "rank": 2,
        "host": report.host,
        "retryable": True,
        "last_step": 20,
    }


def test_the_exit_file_of_a_run_without_a_step_has_the_same_fields(tmp_path):
    failure.write_exit(tmp_path, None, 6)
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["last_step"] is None

    failure.write_exit(tmp_path, None, 0, step=3)
    assert record.keys() == json.loads((tmp_path / "exit.json").read_text()).keys()


@pytest.mark.parametrize(
    ("code", "retryable"), [(code, code in (6, 8, 75, 76)) for code in (*range(9), 75, 76, 93)]
)
def test_only_codes_that_a_retry_can_fix_are_retryable(tmp_path, code, retryable):
    failure.write_exit(tmp_path, None, code)
    assert json.loads((tmp_path / "exit.json").read_text())["retryable"] is retryable


def test_without_metrics_there_is_no_last_step(tmp_path):
    assert failure.last_step(tmp_path / "metrics.jsonl") is None
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    assert failure.last_step(tmp_path / "metrics.jsonl") is None


def test_a_full_disk_leaves_the_exit_file_in_reserved_space_or_the_named_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failure.reserve_exit(tmp_path)
    monkeypatch.setattr(atomic_io, "write", full)
    failure.write_exit(tmp_path, None, 8)

    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 8
    assert os.listdir(tmp_path) == ["exit.json"]
    assert capsys.readouterr().err == ""

    # Without a folder for it, exit.json is written to the folder for temporary files.
    (tmp_path / "exit.json").unlink()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    failure.write_exit(tmp_path / "gone", None, 8)
    report = capsys.readouterr().err
    assert "cannot write" in report

    substitute = Path(report.rpartition(" it was written to ")[2].strip())
    assert json.loads(substitute.read_text())["code"] == 8


def test_a_storage_error_at_the_start_leaves_an_exit_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def start(folder: Path) -> None:
        loaded: Any = SimpleNamespace(config=tiny_config(job={"dump_folder": str(folder)}))
        with pytest.raises(StorageError, match="no room"), local.refusals_in_exit_json(loaded):
            raise StorageError("no room for a checkpoint; free space")

    start(tmp_path / "new")
    record = json.loads((tmp_path / "new/exit.json").read_text())
    assert (record["code"], record["class"], record["retryable"]) == (8, "StorageError", True)

    # A refused run does not write to the folder of a run that may be alive.
    used = tmp_path / "held/checkpoint"
    used.mkdir(parents=True)
    (used / "lease.json").write_text(json.dumps({**lease.own_fields("aa"), "host": "another.host"}))
    start(tmp_path / "held")
    assert os.listdir(tmp_path / "held") == ["checkpoint"]

    # If the run folder is full too, exit.json goes to a temporary file, which the message names.
    monkeypatch.setattr(atomic_io, "write", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start(tmp_path / "full")
    report = capsys.readouterr().err
    temporary_file = Path(report.rpartition(" it was written to ")[2].strip())
    assert json.loads(temporary_file.read_text())["code"] == 8


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_the_log_of_a_user_error_has_the_full_message_and_no_traceback(
    tmp_path: Path, kind: type
) -> None:
    message = f"a.jsonl:3: {'long ' * 200}is wrong; correct it"
    failure.append_trace(caught(kind(message), rank=1), tmp_path / "rank-1.log")
    assert (tmp_path / "rank-1.log").read_text() == f"error[{kind.exit_code}]: {message}\n"

    failure.append_trace(caught(StorageError("no answer"), rank=1), tmp_path / "rank-2.log")
    assert "Traceback" in (tmp_path / "rank-2.log").read_text()
