"""If storage fails or stalls at any call, the run succeeds or ends with a retryable exit, and loses nothing."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import patience
import pytest
import storage_faults
from once import made_once
from storage_faults import KINDS, STORE_KINDS, Fault
from tiers import cases
from tiny import shallow_config, text_file

from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.data.prepared.shard_writer import ShardWriter
from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer
from shardtrain.train import trainer
from shardtrain.utils import storage_errors

KILLS = int(os.environ.get("SHARDTRAIN_RUN_KILLS", "2"))
"""Number of kills per case. 50 per case are 300 in total."""
FAULTS = int(os.environ.get("SHARDTRAIN_STORAGE_FAULTS", "2"))
"""Number of faults per case. 50 per case are 200 in total."""
ONLY = os.environ.get("SHARDTRAIN_STORAGE_KINDS", "").split()
"""Kinds of faults to draw from. Empty for all kinds."""
SEED = os.environ.get("SHARDTRAIN_CAMPAIGN_SEED", "")
"""Seed that selects the calls that fail."""
STEPS = 6


SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "overrides": {"num_layers": 1, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32}
    },
    "training": {"seq_len": 16, "local_batch_size": 1, "global_batch_size": 2, "steps": STEPS},
}


def config_of(folder: Path, mode: str, **sections: Any) -> Config:
    checkpoint = {"enable": True, "interval": 2, "async_mode": mode, "keep_latest_k": 2}
    return shallow_config(
        **{"job": {"dump_folder": str(folder)}, "checkpoint": checkpoint, **SECTIONS, **sections}
    )


def undisturbed(
    places: pytest.TempPathFactory, ranks: int, mode: str, **sections: Any
) -> tuple[dict[int, float], dict[str, int]]:
    """Return the losses of a run without faults, and the number of calls per process."""

    def make() -> tuple[dict[int, float], dict[str, int]]:
        config = config_of(places.mktemp("undisturbed") / "run", mode, **sections)
        code, output = storage_faults.run(config, ranks, None, counts=True)
        assert code == 0, output
        return storage_faults.losses(config), storage_faults.calls(config)

    return made_once(places, f"storage-{ranks}-{mode}", make)


def wrong(config: Config, ranks: int, fault: Fault, expected: dict[int, float]) -> str:
    """Run with a fault, then resume. Describe the first wrong result. Empty if there is none."""
    folder = Path(config.job.dump_folder)
    code, output = storage_faults.run(config, ranks, fault)
    if "Traceback" in output or "Logging error" in output:
        return f"a traceback on the terminal: {output}"
    if fault.kind == "kill":
        return _after(config, ranks, expected)
    if code not in (0, 8):
        return f"exit {code}: {output}"
    record = folder / "exit.json"
    last_line = output.splitlines()[-1] if output else ""
    is_refused = "job.dump_folder" in last_line and "cannot write" in output
    if not record.exists() and " it was written to " not in output and not is_refused:
        return f"no verdict: {output}"
    if record.exists() and json.loads(record.read_text())["code"] != code:
        return f"exit.json says {record.read_text()}, and the status is {code}"
    return _after(config, ranks, expected)


def _after(config: Config, ranks: int, expected: dict[int, float]) -> str:
    """Check the recorded losses, resume, and check again. Describe the first wrong result, or return ""."""
    folder = Path(config.job.dump_folder)
    try:
        recorded = storage_faults.losses(config)
    except AssertionError as error:
        return str(error)
    if any(expected[step] != loss for step, loss in recorded.items()):
        return f"losses {recorded}"
    again, output = storage_faults.run(config, ranks, None)
    for _ in range(20):  # ranks of a killed launcher may still hold the lease
        if again != 2 or "is being written by" not in output:
            break
        time.sleep(0.2)
        again, output = storage_faults.run(config, ranks, None)
    losses = storage_faults.losses(config)
    checkpoints = Path(config.checkpoint.folder.partition("://")[2] or folder / "checkpoint")
    if again != 0 or not (checkpoints / f"step-{STEPS}" / "manifest.json").is_file():
        return f"resumes with exit {again}: {output}"
    if any(expected[step] != loss for step, loss in losses.items()):
        return f"losses {losses} after resuming"
    leftovers = [
        path for path in checkpoints.iterdir() if ".tmp" in path.name or ".trash" in path.name
    ]
    if checkpoints != folder / "checkpoint":
        # an object store has no folders, so empty folders of the stand-in are not leftovers
        incomplete = [
            path for path in checkpoints.iterdir() if not (path / "manifest.json").is_file()
        ]
        leftovers = [path for path in incomplete if any(path.iterdir())]
    return f"leftovers: {[path.name for path in leftovers]}" if leftovers else ""


@pytest.mark.parametrize(
    ("ranks", "mode"),
    cases([(1, "async")], nightly=[(1, "disabled"), (2, "disabled"), (2, "async")]),
)
def test_storage_fault_ends_with_correct_losses_or_a_lossless_retry(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, calls = undisturbed(tmp_path_factory, ranks, mode)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert {"launcher", "0"} <= calls.keys()

    chosen = random.Random(f"{SEED}{ranks} {mode}")
    failures = []
    for number in range(FAULTS):
        process = chosen.choice(sorted(calls))
        place = chosen.randrange(1, calls[process] + 1)
        fault = Fault(process, place, chosen.choice(ONLY or list(KINDS)), chosen.choice([1, 1, 3]))
        config = config_of(tmp_path / str(number), mode)
        if problem := wrong(config, ranks, fault, expected):
            failures.append(f"{fault}: {problem}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)

    assert not failures, "\n".join(failures)


FILES = {
    # regular expression of the path, and exit status if the file cannot be written
    "log": (r"^logs/rank-0\.log", 0),
    "log of a rank without a terminal": (r"^logs/rank-1\.log", 0),
    "metrics": (r"^metrics\.jsonl", 0),
    "validation": (r"^validation\.jsonl", 0),
    "goodput": (r"^goodput\.jsonl", 0),
    "lease": (r"^checkpoint/lease", 8),
    "manifest": (r"manifest\.json", 8),
    "weights": (r"rank-00000\.bin", 8),
}
NAMES = ("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "EACCES", "ENOMEM", "EMFILE", "ENOTCONN")


@pytest.mark.parametrize(
    ("file", "name"),
    cases(
        [
            ("metrics", "ESTALE"),
            ("log of a rank without a terminal", "ENOSPC"),
            ("manifest", "EDQUOT"),
        ],
        nightly=[(file, name) for file in FILES for name in NAMES],
    ),
)
def test_unwritable_file_is_named_with_cause_and_fix(file: str, name: str, tmp_path: Path) -> None:
    pattern, status = FILES[file]
    if status and name == "ENOMEM":
        status = 7
    validation = {
        "enable": True,
        "dataset": "text",
        "dataset_path": text_file(),
        "freq": 3,
        "steps": 1,
    }
    metrics = {"log_freq": 1}
    config = config_of(tmp_path / "run", "disabled", metrics=metrics, validation=validation)
    ranks = 2 if "without" in file else 1
    code, output = storage_faults.run(config, ranks, Fault("", 0, name, file=pattern))

    assert code == status, output
    assert "Traceback" not in output

    # One line has the file, the cause and a fix.
    number = getattr(errno, name)
    cause = f"{os.strerror(number)} (errno {number})"
    (line,) = [line for line in output.splitlines() if cause in line or "ran out" in line]
    assert re.search(pattern.strip("^"), line), line
    assert os.strerror(number) in line
    fix = "memory ran out" if name == "ENOMEM" else storage_errors.CAUSES[number].fix
    assert fix in line

    record = json.loads((tmp_path / "run/exit.json").read_text())
    expected_step = {"lease": None, "manifest": 2, "weights": 2}.get(file, STEPS)
    assert (record["code"], record.get("last_step")) == (status, expected_step)


def stored(folder: Path, mode: str) -> Config:
    """Return ``config_of`` with checkpoints in an object store."""
    config = config_of(folder / "run", mode)
    return replace(
        config, checkpoint=replace(config.checkpoint, folder=f"bucket://{folder}/bucket")
    )


def wrong_of_store(config: Config, ranks: int, fault: Fault, expected: dict[int, float]) -> str:
    """Like ``wrong``, but with a fault of the object store."""
    code, output = storage_faults.run(config, ranks, fault)
    if (
        "Traceback" in output
        or "Logging error" in output
        or (fault.kind != "kill" and code not in (0, 8))
    ):
        return f"exit {code}: {output}"
    if fault.kind != "kill" and code == 8:
        record = json.loads((Path(config.job.dump_folder) / "exit.json").read_text())
        failure = storage_faults.STORE_KINDS[fault.kind]
        reason = str(failure()).rpartition("] ")[2].partition(":")[0] if failure else ""
        (line,) = [line for line in output.splitlines() if line.startswith("error[8]: ")]
        if (
            record["code"] != 8
            or not record["retryable"]
            or config.checkpoint.folder not in line
            or reason not in line
        ):
            return f"the cause was {reason!r} of {config.checkpoint.folder}: {line}"
    return _after(config, ranks, expected)


@pytest.mark.parametrize(
    ("ranks", "mode"),
    cases([(1, "disabled")], nightly=[(1, "async"), (2, "disabled"), (2, "async")]),
)
@pytest.mark.parametrize("kills", [False, True], ids=["faults", "kills"])
@pytest.mark.nightly(
    "complete runs",
    by="tests/checkpoint/test_object_store.py::test_failed_call_is_never_a_success_and_keeps_earlier_checkpoints",
)
def test_fault_or_kill_at_any_call_of_an_object_store_loses_nothing(
    kills: bool, ranks: int, mode: str, tmp_path: Path
) -> None:
    counted = stored(tmp_path / "counted", mode)
    code, output = storage_faults.run(counted, ranks, None, counts=True)
    assert code == 0, output

    expected = storage_faults.losses(counted)
    calls = storage_faults.calls(counted)
    chosen = random.Random(f"store {SEED}{kills} {ranks} {mode}")
    failures = []
    for number in range(KILLS if kills else FAULTS):
        process = chosen.choice(sorted(calls))
        place = chosen.randrange(1, calls[process] + 1)
        kind = chosen.choice(ONLY or list(STORE_KINDS))
        fault = Fault(process, place, kind, chosen.choice([1, 1, 3]), late=chosen.random() < 0.3)
        if kills:
            fault = Fault(process, place, "kill", late=fault.late)
        config = stored(tmp_path / str(number), mode)
        if problem := wrong_of_store(config, ranks, fault, expected):
            failures.append(f"{fault}: {problem}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)

    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("ranks", "mode"),
    cases(
        [(2, "async")],
        nightly=[(1, "disabled"), (1, "async"), (2, "disabled"), (4, "disabled"), (4, "async")],
    ),
)
@pytest.mark.nightly(
    "at any call",
    by="tests/checkpoint/test_save_kills.py::test_kill_before_each_change_of_the_disk_loses_nothing",
)
def test_kill_at_any_call_of_any_process_loses_nothing(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sections = {"training": {**SECTIONS["training"], "global_batch_size": 4}} if ranks == 4 else {}
    expected, calls = undisturbed(tmp_path_factory, ranks, mode, **sections)
    chosen = random.Random(f"{SEED}kills {ranks} {mode}")
    failures = []
    for number in range(KILLS):
        process = chosen.choice(sorted(calls))
        fault = Fault(process, chosen.randrange(1, calls[process] + 1), "kill")
        config = config_of(tmp_path / str(number), mode, **sections)
        if problem := wrong(config, ranks, fault, expected):
            failures.append(f"{fault}: {problem}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)

    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("ranks", "mode", "kind", "seconds"),
    cases(
        [(1, "async", "ENOENT", 0.5)],
        nightly=[
            (ranks, mode, kind, seconds)
            for ranks in (1, 2)
            for mode in ("disabled", "async")
            for kind in ("ENOENT", "EIO", "ESTALE")
            for seconds in (0.5, 2.0)
            if (ranks, mode, kind, seconds) != (1, "async", "ENOENT", 0.5)
        ],
    ),
)
def test_temporary_storage_outage_costs_at_most_a_retry(
    ranks: int,
    mode: str,
    kind: str,
    seconds: float,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Here the lease is retried for 1 s instead of 20 s, so these outages correspond to 10 s and 40 s."""
    expected, calls = undisturbed(tmp_path_factory, ranks, mode)
    chosen = random.Random(f"{SEED}{ranks} {mode} {kind} {seconds}")
    place = chosen.randrange(calls["0"] // 4, calls["0"])
    fault = Fault("0", place, kind, seconds=seconds)

    assert not wrong(config_of(tmp_path / "run", mode), ranks, fault, expected)


def data_of(places: pytest.TempPathFactory, kind: str) -> dict[str, Any]:
    """Return the options of [training] for data on disk: prepared shards, or text that is read on demand."""

    def make() -> str:
        folder = places.mktemp(kind)
        content = Path(text_file()).read_bytes()
        if kind == "text":
            (folder / "words.txt").write_bytes(content)
            return str(folder)
        writer = ShardWriter(folder / "shards", ByteTokenizer().vocab_size, 10_000)
        writer.add_documents(np.array([len(content)]))
        writer.add_tokens(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
        writer.finish(tokenizer=ByteTokenizer.fingerprint, tokenizer_name="bytes")
        return str(folder / "shards")

    dataset = "tokens" if kind == "shards" else "text"
    return {
        "training": {
            **SECTIONS["training"],
            "dataset": dataset,
            "dataset_path": made_once(places, kind, make),
        }
    }


@pytest.mark.parametrize(
    ("ranks", "kind"), cases([(1, "shards")], nightly=[(1, "text"), (2, "shards"), (2, "text")])
)
@pytest.mark.nightly(
    "at any call",
    by="tests/data/prepared/test_shards_damage.py::test_storage_errors_are_not_reported_as_damage",
)
def test_fault_of_data_storage_is_retryable_or_reported_as_a_missing_file(
    ranks: int, kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A run without faults counts the calls of each process.
    sections = data_of(tmp_path_factory, kind)
    counted = config_of(tmp_path / "counted", "async", **sections)
    code, output = storage_faults.run(counted, ranks, None, counts=True, of_data=True)
    assert code == 0, output
    expected = storage_faults.losses(counted)
    calls = storage_faults.calls(counted)

    # One of these calls fails in each further run.
    chosen = random.Random(f"{SEED}data {ranks} {kind}")
    failures = []
    for number in range(FAULTS):
        process = chosen.choice(sorted(calls))
        place = chosen.randrange(1, calls[process] + 1)
        fault = Fault(process, place, chosen.choice(ONLY or list(KINDS)), chosen.choice([1, 1, 3]))
        config = config_of(tmp_path / str(number), "async", **sections)
        code, output = storage_faults.run(config, ranks, fault, of_data=True)
        reports_missing_file = False
        if fault.kind == "ENOENT" and code in (2, 3):
            reports_missing_file = sections["training"]["dataset_path"] in output
        has_expected_end = code in (0, 8) or reports_missing_file
        if not has_expected_end or "Traceback" in output:
            failures.append(f"{fault}: exit {code}: {output}")
        elif problem := _after(config, ranks, expected):
            failures.append(f"{fault}: {problem}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)

    assert not failures, "\n".join(failures)


def deletes_its_folder(loaded: Loaded) -> object:
    """Train, and delete the run's folder before the fourth step."""
    step = trainer.step

    def delete_then_step(run: trainer.Run) -> Any:
        if run.state.step == 3 and os.environ["RANK"] == "0":
            # Rename first, because rmtree fails if a thread writes a file meanwhile. Wait for the last checkpoint,
            # because deleting the folder during an asynchronous save would fail the save.
            folder = Path(loaded.config.job.dump_folder)
            limit = time.monotonic() + patience.seconds(60)
            while not (folder / "checkpoint/step-2").exists() and time.monotonic() < limit:
                time.sleep(0.01)
            shutil.rmtree(folder.rename(folder.with_name("lost")))
        return step(run)

    trainer.step = delete_then_step
    return trainer.main(loaded)


@pytest.mark.parametrize(
    ("ranks", "mode"),
    cases([(2, "disabled")], nightly=[(1, "disabled"), (1, "async"), (2, "async")]),
)
def test_folder_deleted_during_a_run_is_created_again(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, _ = undisturbed(tmp_path_factory, ranks, mode)
    config = config_of(tmp_path / "run", mode)
    code, output = storage_faults.run(config, ranks, None, main=deletes_its_folder)

    assert code == 0, output

    folder = tmp_path / "run"
    assert json.loads((folder / "exit.json").read_text())["code"] == 0
    assert sorted(path.name for path in (folder / "checkpoint").glob("step-*")) == [
        "step-4",
        "step-6",
    ]

    recorded = storage_faults.losses(config)
    assert sorted(recorded) == [4, 5, 6]
    assert all(expected[step] == loss for step, loss in recorded.items())
    assert "saved checkpoint" in (folder / "logs" / "rank-0.log").read_text()
    assert "had disappeared and was written again" in output


def becomes_read_only(loaded: Loaded) -> object:
    """Train, and make the checkpoint folder read-only, even for root, before the fourth step."""
    step = trainer.step
    folder = Path(loaded.config.job.dump_folder, "checkpoint")
    # unshare before other threads start, because they would keep the old mounts
    assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)

    def remount_then_step(run: trainer.Run) -> Any:
        if run.state.step == 3 and os.environ["RANK"] == "0":
            limit = time.monotonic() + patience.seconds(60)
            while not (folder / "step-2").exists() and time.monotonic() < limit:
                time.sleep(0.01)
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        return step(run)

    trainer.step = remount_then_step
    return trainer.main(loaded)


_NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mount"),
    reason="mounts folders: needs root",
)
@pytest.mark.parametrize(
    ("ranks", "mode"),
    cases([(1, "disabled")], nightly=[(1, "async"), (2, "disabled"), (2, "async")]),
)
@pytest.mark.nightly(
    "mounts folders",
    by="tests/test_storage_faults.py::test_storage_fault_ends_with_correct_losses_or_a_lossless_retry",
)
def test_folder_that_becomes_read_only_is_named_and_its_last_checkpoint_resumes(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, _ = undisturbed(tmp_path_factory, ranks, mode)
    config = config_of(tmp_path / "run", mode)
    code, output = storage_faults.run(config, ranks, None, main=becomes_read_only)
    record = json.loads((tmp_path / "run/exit.json").read_text())

    assert code == record["code"] == 8, output
    assert record["retryable"]
    assert record["rank"] == 0

    (line,) = [line for line in output.splitlines() if line.startswith("error[8]")]
    assert "cannot write checkpoint" in line
    assert "Read-only file system" in line

    # After the folder is writable again, the run resumes.
    assert not _after(config, ranks, expected)
