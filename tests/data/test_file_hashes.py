"""Hashes of data files: files are hashed entirely, once, and large ones in the background of training."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import patience
import pytest
from ranks import run_ranks
from tiers import cases
from tiny import shallow_config, train_whole

from shardtrain.config.schema import Config
from shardtrain.data import file_hashes
from shardtrain.data.file_hashes import Contents, FileToHash
from shardtrain.tools.data import prepare
from shardtrain.train import trainer
from shardtrain.utils.errors import ConfigError

ROWS = 24_000
LENGTH = 100
"""2.6 MB, more than the sampled 1 MiB."""


def write_rows(path: Path, letter: str = "a", first: int = ROWS, last: int = ROWS) -> None:
    """Write rows of equal size. Rows ``first`` to ``last - 1`` have a different letter."""
    with path.open("w") as file:
        for row in range(ROWS):
            letter_of_row = "b" if first <= row < last else letter
            file.write(json.dumps({"text": letter_of_row * LENGTH}) + "\n")


def between_samples(path: Path) -> tuple[int, int]:
    """Return a range of rows between two sampled blocks."""
    size = path.stat().st_size
    gap = (size - 65536) // 15
    row = size // ROWS
    return (3 * gap + 65536) // row + 2, (4 * gap) // row - 2


def config_of(folder: Path, data: str, steps: int, **checkpoint: Any) -> Config:
    dataset = {"dataset": "jsonl", "dataset_path": str(folder / "rows.jsonl")}
    if data == "shards":
        dataset = {"dataset": "tokens", "dataset_path": str(folder / "shards")}
    return shallow_config(
        job={"dump_folder": str(folder / "run")},
        training={
            "seq_len": 16,
            "local_batch_size": 2,
            "global_batch_size": 4,
            "steps": steps,
            **dataset,
        },
        data={"mode": "stream", "readers": 4} if data == "rows" else {},
        checkpoint={"enable": True, "interval": 2, "accept_changes": ["all"], **checkpoint},
    )


def run(
    rank: int, config: Config, small_bytes: int = file_hashes.SMALL_BYTES, waits_after: int = 1
) -> tuple[str, int]:
    """Run training. Return its error and number of steps.

    After step ``waits_after``, wait until the background hashing has ended.
    """
    # global state of this rank's process
    file_hashes.SMALL_BYTES = small_bytes
    file_hashes.SETTLED_SECONDS = 0.0
    step = trainer.step
    threads = []
    may_hash = threading.Event()
    hash_all = Contents._hash_all

    def hash_when_allowed(contents: Contents, remaining: Any) -> None:
        may_hash.wait(patience.seconds(60))
        hash_all(contents, remaining)

    Contents._hash_all = hash_when_allowed  # type: ignore[method-assign]

    def step_and_wait(run_state: trainer.Run) -> Any:
        outcome = step(run_state)
        threads.append(run_state.contents._thread)
        if len(threads) == waits_after and threads[0] is not None:
            may_hash.set()
            threads[0].join()
        return outcome

    trainer.step = step_and_wait
    ended = train_whole(rank, config)
    return str(ended.error or ""), len(ended.losses)


@pytest.mark.parametrize("ranks", cases([1], nightly=[2]))
@pytest.mark.parametrize("small_bytes", [file_hashes.SMALL_BYTES, 0], ids=["small", "large"])
def test_changed_rows_of_equal_size_are_detected(
    ranks: int, small_bytes: int, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file)
    assert run_ranks(ranks, run, config_of(tmp_path, "rows", 4), small_bytes)[0] == ("", 4)

    size = file.stat().st_size
    write_rows(file, "a", *between_samples(file))
    assert file.stat().st_size == size

    # small files are hashed before the first step, large ones in a thread that reports after at most one step here
    [message, steps] = run_ranks(1, run, config_of(tmp_path, "rows", 8), small_bytes)[0]
    assert steps <= (0 if small_bytes else 1)
    assert "rows.jsonl" in message
    assert "at equal size" in message
    assert "exclude_from_loading" in message

    # The run folder records the change, so the next start stops before its first step.
    if not small_bytes:
        assert "this start trained on it after step 4" in message
        [message, steps] = run_ranks(1, run, config_of(tmp_path, "rows", 8), small_bytes)[0]
        assert steps == 0
        assert "rows.jsonl differ at equal size" in message

    # With the original rows, the run continues.
    write_rows(file)
    assert run_ranks(1, run, config_of(tmp_path, "rows", 8), small_bytes)[0] == ("", 4)


def test_checkpoint_trained_on_changed_content_is_rejected_after_the_file_is_restored(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file)
    assert run_ranks(1, run, config_of(tmp_path, "rows", 4), 0)[0] == ("", 4)

    # Step 6 is saved before the file is hashed.
    write_rows(file, "a", *between_samples(file))
    [message, steps] = run_ranks(1, run, config_of(tmp_path, "rows", 10), 0, 3)[0]
    assert steps == 3
    assert "continue with checkpoint.load_step=4" in message
    assert (tmp_path / "run/checkpoint/step-6").is_dir()

    write_rows(file)
    [message, steps] = run_ranks(1, run, config_of(tmp_path, "rows", 10), 0)[0]
    assert steps == 0
    assert "rows.jsonl" in message
    assert "checkpoint.load_step=4" in message
    assert "steps after 4 of this run were trained on other contents" in message

    # The suggested fix works.
    assert run_ranks(1, run, config_of(tmp_path, "rows", 10, load_step=4), 0)[0] == ("", 6)


def test_file_replaced_before_it_was_hashed_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file)
    file_entry = FileToHash("rows.jsonl", str(file), "training.dataset_path")
    recorded = {"rows.jsonl": "0" * 64}
    first = Contents([file_entry], tmp_path / "run")
    first._ended.set()  # this instance never hashes
    first.expect(recorded)
    first.start(4)
    unproven = first.unproven()

    assert first.record() == recorded
    assert unproven["rows.jsonl"].startswith("4 ")
    assert Contents([file_entry]).find_replaced_file(recorded, unproven) == []
    assert not caplog.text

    write_rows(file)
    os.utime(file, ns=(1, 1))
    assert Contents([file_entry]).find_replaced_file(recorded, unproven) == []
    assert "has been replaced, and its old contents were not hashed: steps after 4" in caplog.text


def test_prepared_shard_that_differs_from_its_index_stops_the_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file)
    shards = tmp_path / "shards"
    arguments = ["--training.dataset", "jsonl", "--training.dataset_path", str(file)]
    arguments += ["--output", str(shards), "--model.hf_assets_path", "bytes"]
    assert prepare.main(arguments) == 0

    # The size of the shard stays, so only its hash differs.
    tokens = shards / "tokens-00000.bin"
    with tokens.open("r+b") as opened:
        opened.seek(tokens.stat().st_size // 2)
        opened.write(b"\x07")
    [message, steps] = run_ranks(1, run, config_of(tmp_path, "shards", 4))[0]

    assert "tokens-00000.bin" in message
    assert "does not match its SHA-256 in index.json" in message
    assert steps == 0


def test_file_is_hashed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "SETTLED_SECONDS", -1e9)
    hashed: list[str] = []
    original = Contents._hash

    def recorded_hash(self: Contents, file: FileToHash, share: float) -> None:
        hashed.append(file.name)
        original(self, file, share)

    monkeypatch.setattr(Contents, "_hash", recorded_hash)
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(os.urandom(1000))
    files = [FileToHash(path.name, str(path), "training.dataset_path") for path in paths]

    def checked() -> Contents:
        contents = Contents(files, tmp_path)
        contents.check_now()
        return contents

    first = checked()
    assert hashed == ["one", "two"]
    assert checked().record() == first.record()
    assert hashed == ["one", "two"]

    # Change a byte of one file, and restore its modification time.
    before = paths[0].stat()
    data = bytearray(paths[0].read_bytes())
    data[500] ^= 1
    paths[0].write_bytes(data)
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checked().expect(first.record()) == ["one"]

    # If the notes file is damaged, the files are hashed again.
    (tmp_path / file_hashes.NOTES).write_text("[1, {")
    assert checked().expect(first.record()) == ["one"]


def test_hashing_ends_with_the_run_and_reports_unhashed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(file_hashes, "SMALL_BYTES", 0)
    # pause indefinitely after the first piece
    monkeypatch.setattr(file_hashes, "MAX_CORE_SHARE", 1e-9)
    path = tmp_path / "large"
    path.write_bytes(bytes(10_000_000))
    contents = Contents([FileToHash("large", str(path), "training.dataset_path")])
    contents.check_now()

    assert contents.record() == {}

    contents.start(0)
    thread = contents._thread
    assert thread is not None
    assert "are identified by size and samples until their hashes are computed" in caplog.text

    contents.close()
    patience.wait_for(lambda: not thread.is_alive(), 10)
    assert "1 of 1 data files were not hashed when the run ended" in caplog.text
    assert contents.record() == {}

    broken = Contents([FileToHash("large", str(path), "training.dataset_path", indexed="0" * 64)])
    broken._hash(broken._files["large"], 1.0)
    assert isinstance(broken.problem, ConfigError)
