"""Storage that fails or stalls at any call ends a run well or with an exit that is worth a retry, and loses nothing."""

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
"""Kills of each case; 50 are 300 in all."""
FAULTS = int(os.environ.get("SHARDTRAIN_STORAGE_FAULTS", "2"))
"""Faults of each case; 50 are 200 in all."""
ONLY = os.environ.get("SHARDTRAIN_STORAGE_KINDS", "").split()
"""Kinds of faults to choose from, where not all of them."""
SEED = os.environ.get("SHARDTRAIN_CAMPAIGN_SEED", "")
"""Another one disturbs other calls."""
STEPS = 6


SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"overrides": {"num_layers": 1, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32}},
    "training": {"seq_len": 16, "local_batch_size": 1, "global_batch_size": 2, "steps": STEPS},
}


def config_of(folder: Path, mode: str, **sections: Any) -> Config:
    checkpoint = {"enable": True, "interval": 2, "async_mode": mode, "keep_latest_k": 2}
    return shallow_config(**{"job": {"dump_folder": str(folder)}, "checkpoint": checkpoint, **SECTIONS, **sections})


def undisturbed(
    places: pytest.TempPathFactory, ranks: int, mode: str, **sections: Any
) -> tuple[dict[int, float], dict[str, int]]:
    """The losses of a run without faults, and how many calls each of its processes made."""

    def make() -> tuple[dict[int, float], dict[str, int]]:
        config = config_of(places.mktemp("undisturbed") / "run", mode, **sections)
        code, told = storage_faults.run(config, ranks, None, counts=True)
        assert code == 0, told
        return storage_faults.losses(config), storage_faults.calls(config)

    return made_once(places, f"storage-{ranks}-{mode}", make)


def wrong(config: Config, ranks: int, fault: Fault, expected: dict[int, float]) -> str:
    """What is not as promised of a run with a fault and of the one that continues from it; empty when all is."""
    folder = Path(config.job.dump_folder)
    code, told = storage_faults.run(config, ranks, fault)
    if "Traceback" in told or "Logging error" in told:
        return f"a trace on the terminal: {told}"
    if fault.kind == "kill":
        return _after(config, ranks, expected)
    if code not in (0, 8):
        return f"exit {code}: {told}"
    record = folder / "exit.json"
    refused = told.splitlines()[-1:] and "job.dump_folder" in told.splitlines()[-1] and "cannot write" in told
    if not record.exists() and " it is in " not in told and not refused:
        return f"no verdict: {told}"
    if record.exists() and json.loads(record.read_text())["code"] != code:
        return f"exit.json says {record.read_text()}, and the status is {code}"
    return _after(config, ranks, expected)


def _after(config: Config, ranks: int, expected: dict[int, float]) -> str:
    """What is wrong with the rows that are there, and with the run that continues."""
    folder = Path(config.job.dump_folder)
    try:
        seen = storage_faults.losses(config)
    except AssertionError as error:
        return str(error)
    if any(expected[step] != loss for step, loss in seen.items()):
        return f"losses {seen}"
    again, told = storage_faults.run(config, ranks, None)
    for _ in range(20):  # ranks that lost their launcher may live for a moment, and hold the lease
        if again != 2 or "is being written by" not in told:
            break
        time.sleep(0.2)
        again, told = storage_faults.run(config, ranks, None)
    found = storage_faults.losses(config)
    kept = Path(config.checkpoint.folder.partition("://")[2] or folder / "checkpoint")
    if again != 0 or not (kept / f"step-{STEPS}" / "manifest.json").is_file():
        return f"continues with exit {again}: {told}"
    if any(expected[step] != loss for step, loss in found.items()):
        return f"losses {found} after continuing"
    left = [path.name for path in kept.iterdir() if ".tmp" in path.name or ".trash" in path.name]
    if kept != folder / "checkpoint":
        # an object store has no folders, so an empty one that the stand-in keeps is nothing left behind
        left = [path.name for path in kept.iterdir() if any(path.iterdir()) and not (path / "manifest.json").is_file()]
    return f"left behind: {left}" if left else ""


@pytest.mark.parametrize(
    ("ranks", "mode"), cases([(1, "async")], nightly=[(1, "disabled"), (2, "disabled"), (2, "async")])
)
def test_a_fault_of_the_storage_ends_in_the_right_losses_or_in_a_retry_that_loses_nothing(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, calls = undisturbed(tmp_path_factory, ranks, mode)
    assert sorted(expected) == list(range(1, STEPS + 1)) and {"launcher", "0"} <= calls.keys()
    chosen, failures = random.Random(f"{SEED}{ranks} {mode}"), []
    for number in range(FAULTS):
        process = chosen.choice(sorted(calls))
        place = chosen.randrange(1, calls[process] + 1)
        fault = Fault(process, place, chosen.choice(ONLY or list(KINDS)), chosen.choice([1, 1, 3]))
        if told := wrong(config_of(tmp_path / str(number), mode), ranks, fault, expected):
            failures.append(f"{fault}: {told}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    assert not failures, "\n".join(failures)


FILES = {
    # file: (regular expression, exit status if it cannot be written)
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
        [("metrics", "ESTALE"), ("log of a rank without a terminal", "ENOSPC"), ("manifest", "EDQUOT")],
        nightly=[(file, name) for file in FILES for name in NAMES],
    ),
)
def test_a_file_of_a_run_that_cannot_be_written_is_named_with_cause_and_fix(
    file: str, name: str, tmp_path: Path
) -> None:
    pattern, status = FILES[file]
    if status and name == "ENOMEM":
        status = 7
    validation = {"enable": True, "dataset": "text", "dataset_path": text_file(), "freq": 3, "steps": 1}
    metrics = {"log_freq": 1}
    config = config_of(tmp_path / "run", "disabled", metrics=metrics, validation=validation)
    ranks = 2 if "without" in file else 1
    code, told = storage_faults.run(config, ranks, Fault("", 0, name, file=pattern))
    assert code == status and "Traceback" not in told, told
    number = getattr(errno, name)
    (line,) = [
        line for line in told.splitlines() if f"{os.strerror(number)} (errno {number})" in line or "ran out" in line
    ]
    assert re.search(pattern.strip("^"), line) and os.strerror(number) in line, line
    assert ("memory ran out" if name == "ENOMEM" else storage_errors.CAUSES[number].fix) in line, line
    record = json.loads((tmp_path / "run/exit.json").read_text())
    expected_step = {"lease": None, "manifest": 2, "weights": 2}.get(file, STEPS)
    assert (record["code"], record.get("last_step")) == (status, expected_step)


def stored(folder: Path, mode: str) -> Config:
    """As ``config_of``, with checkpoints in an object store."""
    config = config_of(folder / "run", mode)
    return replace(config, checkpoint=replace(config.checkpoint, folder=f"bucket://{folder}/bucket"))


def wrong_of_store(config: Config, ranks: int, fault: Fault, expected: dict[int, float]) -> str:
    """What is not as promised of a run whose store meets a fault, and of the one that continues from it."""
    code, told = storage_faults.run(config, ranks, fault)
    if "Traceback" in told or "Logging error" in told or (fault.kind != "kill" and code not in (0, 8)):
        return f"exit {code}: {told}"
    if fault.kind != "kill" and code == 8:
        record = json.loads((Path(config.job.dump_folder) / "exit.json").read_text())
        failure = storage_faults.STORE_KINDS[fault.kind]
        reason = str(failure()).rpartition("] ")[2].partition(":")[0] if failure else ""
        (line,) = [line for line in told.splitlines() if line.startswith("error[8]: ")]
        if record["code"] != 8 or not record["retryable"] or config.checkpoint.folder not in line or reason not in line:
            return f"the cause was {reason!r} of {config.checkpoint.folder}: {line}"
    return _after(config, ranks, expected)


@pytest.mark.parametrize(
    ("ranks", "mode"), cases([(1, "disabled")], nightly=[(1, "async"), (2, "disabled"), (2, "async")])
)
@pytest.mark.parametrize("kills", [False, True], ids=["faults", "kills"])
@pytest.mark.nightly(
    "whole runs",
    by="tests/checkpoint/test_object_store.py::test_failed_call_is_never_a_success_and_keeps_earlier_checkpoints",
)
def test_a_fault_or_kill_at_any_call_of_an_object_store_loses_nothing(
    kills: bool, ranks: int, mode: str, tmp_path: Path
) -> None:
    counted = stored(tmp_path / "counted", mode)
    code, told = storage_faults.run(counted, ranks, None, counts=True)
    assert code == 0, told
    expected, calls = storage_faults.losses(counted), storage_faults.calls(counted)
    chosen, failures = random.Random(f"store {SEED}{kills} {ranks} {mode}"), []
    for number in range(KILLS if kills else FAULTS):
        process = chosen.choice(sorted(calls))
        place, kind = chosen.randrange(1, calls[process] + 1), chosen.choice(ONLY or list(STORE_KINDS))
        fault = Fault(process, place, kind, chosen.choice([1, 1, 3]), late=chosen.random() < 0.3)
        if kills:
            fault = Fault(process, place, "kill", late=fault.late)
        if told := wrong_of_store(stored(tmp_path / str(number), mode), ranks, fault, expected):
            failures.append(f"{fault}: {told}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("ranks", "mode"),
    cases([(2, "async")], nightly=[(1, "disabled"), (1, "async"), (2, "disabled"), (4, "disabled"), (4, "async")]),
)
@pytest.mark.nightly(
    "at any call",
    by="tests/checkpoint/test_save_kills.py::test_kill_before_each_change_of_the_disk_loses_nothing",
)
def test_a_kill_at_any_call_of_any_process_loses_nothing(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sections = {"training": {**SECTIONS["training"], "global_batch_size": 4}} if ranks == 4 else {}
    expected, calls = undisturbed(tmp_path_factory, ranks, mode, **sections)
    chosen, failures = random.Random(f"{SEED}kills {ranks} {mode}"), []
    for number in range(KILLS):
        process = chosen.choice(sorted(calls))
        fault = Fault(process, chosen.randrange(1, calls[process] + 1), "kill")
        if told := wrong(config_of(tmp_path / str(number), mode, **sections), ranks, fault, expected):
            failures.append(f"{fault}: {told}")
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
def test_storage_that_does_not_answer_for_a_while_costs_no_more_than_a_retry(
    ranks: int, mode: str, kind: str, seconds: float, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As 10 s and 40 s do where the lease is looked for during 20 s, and not for 1 s as here."""
    expected, calls = undisturbed(tmp_path_factory, ranks, mode)
    place = random.Random(f"{SEED}{ranks} {mode} {kind} {seconds}").randrange(calls["0"] // 4, calls["0"])
    fault = Fault("0", place, kind, seconds=seconds)
    assert not wrong(config_of(tmp_path / "run", mode), ranks, fault, expected)


def data_of(places: pytest.TempPathFactory, kind: str) -> dict[str, Any]:
    """The options of [training] for data on disk: prepared shards, or text that is read as it is needed."""

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
    return {"training": {**SECTIONS["training"], "dataset": dataset, "dataset_path": made_once(places, kind, make)}}


@pytest.mark.parametrize(("ranks", "kind"), cases([(1, "shards")], nightly=[(1, "text"), (2, "shards"), (2, "text")]))
@pytest.mark.nightly(
    "at any call",
    by="tests/data/prepared/test_shards_damage.py::test_storage_errors_are_not_reported_as_damage",
)
def test_a_fault_of_the_storage_of_the_data_is_worth_a_retry_or_told_as_a_file_that_is_gone(
    ranks: int, kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sections = data_of(tmp_path_factory, kind)
    counted = config_of(tmp_path / "counted", "async", **sections)
    code, told = storage_faults.run(counted, ranks, None, counts=True, of_data=True)
    assert code == 0, told
    expected, calls = storage_faults.losses(counted), storage_faults.calls(counted)
    chosen, failures = random.Random(f"{SEED}data {ranks} {kind}"), []
    for number in range(FAULTS):
        process = chosen.choice(sorted(calls))
        place = chosen.randrange(1, calls[process] + 1)
        fault = Fault(process, place, chosen.choice(ONLY or list(KINDS)), chosen.choice([1, 1, 3]))
        config = config_of(tmp_path / str(number), "async", **sections)
        code, told = storage_faults.run(config, ranks, fault, of_data=True)
        gone = fault.kind == "ENOENT" and code in (2, 3) and sections["training"]["dataset_path"] in told
        if (code not in (0, 8) and not gone) or "Traceback" in told:
            failures.append(f"{fault}: exit {code}: {told}")
        elif left := _after(config, ranks, expected):
            failures.append(f"{fault}: {left}")
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    assert not failures, "\n".join(failures)


def deletes_its_folder(loaded: Loaded) -> object:
    """Train, and lose all of the run's folder before the fourth step."""
    step = trainer.step

    def noted(run: trainer.Run) -> Any:
        if run.state.step == 3 and os.environ["RANK"] == "0":
            # moved away at once: a file that a thread writes meanwhile would let rmtree fail; and not while the last
            # checkpoint is written behind the steps, which is a save that fails
            folder = Path(loaded.config.job.dump_folder)
            limit = time.monotonic() + patience.seconds(60)
            while not (folder / "checkpoint/step-2").exists() and time.monotonic() < limit:
                time.sleep(0.01)
            shutil.rmtree(folder.rename(folder.with_name("lost")))
        return step(run)

    trainer.step = noted
    return trainer.main(loaded)


@pytest.mark.parametrize(
    ("ranks", "mode"), cases([(2, "disabled")], nightly=[(1, "disabled"), (1, "async"), (2, "async")])
)
def test_a_folder_that_is_deleted_under_a_run_is_made_again(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, _ = undisturbed(tmp_path_factory, ranks, mode)
    config = config_of(tmp_path / "run", mode)
    code, told = storage_faults.run(config, ranks, None, main=deletes_its_folder)
    assert code == 0, told
    folder = tmp_path / "run"
    assert json.loads((folder / "exit.json").read_text())["code"] == 0
    assert sorted(path.name for path in (folder / "checkpoint").glob("step-*")) == ["step-4", "step-6"]
    seen = storage_faults.losses(config)
    assert sorted(seen) == [4, 5, 6] and all(expected[step] == loss for step, loss in seen.items())
    assert "saved checkpoint" in (folder / "logs" / "rank-0.log").read_text()
    assert "was gone and is written again" in told


def becomes_read_only(loaded: Loaded) -> object:
    """Train, and let the folder of the checkpoints become read-only before the fourth step, for root too."""
    step, folder = trainer.step, Path(loaded.config.job.dump_folder, "checkpoint")
    assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0  # while there is one thread: others would keep the old mounts
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)

    def noted(run: trainer.Run) -> Any:
        if run.state.step == 3 and os.environ["RANK"] == "0":
            limit = time.monotonic() + patience.seconds(60)
            while not (folder / "step-2").exists() and time.monotonic() < limit:
                time.sleep(0.01)
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        return step(run)

    trainer.step = noted
    return trainer.main(loaded)


_NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS."""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mount"), reason="mounts folders: needs root"
)
@pytest.mark.parametrize(
    ("ranks", "mode"), cases([(1, "disabled")], nightly=[(1, "async"), (2, "disabled"), (2, "async")])
)
@pytest.mark.nightly(
    "mounts folders",
    by="tests/test_storage_faults.py::test_a_fault_of_the_storage_ends_in_the_right_losses_or_in_a_retry_that_loses_nothing",
)
def test_a_folder_that_becomes_read_only_is_named_and_its_last_checkpoint_continues(
    ranks: int, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, _ = undisturbed(tmp_path_factory, ranks, mode)
    config = config_of(tmp_path / "run", mode)
    code, told = storage_faults.run(config, ranks, None, main=becomes_read_only)
    record = json.loads((tmp_path / "run/exit.json").read_text())
    assert code == record["code"] == 8 and record["retryable"] and record["rank"] == 0, told
    (line,) = [line for line in told.splitlines() if line.startswith("error[8]")]
    assert "cannot write checkpoint" in line and "Read-only file system" in line
    assert not _after(config, ranks, expected)
