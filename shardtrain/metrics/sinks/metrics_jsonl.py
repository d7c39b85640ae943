"""One JSON object per line, appended as it happens: the record of a run that every report reads.

After a resume the file continues as one straight history: what was written after the checkpoint is removed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardtrain.metrics.record import Record, finite_or_none
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.checked_json import line_of, record_of
from shardtrain.utils.log import logger


class JsonlFile:
    """A history with strictly rising ``step``; each record is one write of one whole line.

    Opening the file drops records after ``start_step``, and lines that a crash has torn or a disk has changed. A run
    that starts at step 0 keeps an earlier history aside under a name with the time. Neither a full disk nor a lost
    mount stops training: the first failure is a warning, ``num_lost`` counts the records.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.num_lost = 0
        self.history: list[dict[str, Any]] = []
        self._warned = False
        try:
            self.history = _straighten(path, start_step)
        except OSError as error:
            self._warn(error)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; a number that is not finite is written as null, since JSON has no word for it."""
        fields = {key: finite_or_none(v) if isinstance(v, float) else v for key, v in record.items()}
        line = line_of(fields)
        try:
            self._append(line)
        except OSError as error:
            self.num_lost += 1
            self._warn(error)

    def close(self) -> None:
        """Say how many records were lost, if any. The file is not held open between records."""
        if self.num_lost:
            logger.warning(f"{self.num_lost} records of {self.path} could not be written")

    def _append(self, line: bytes) -> None:
        # Opened per record: at most once per log_freq steps, and a mount that comes back is written to again.
        # The folder may have been deleted during the run.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = atomic_io.open_file(self.path, flags, 0o644, create_folder=True)
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written != len(line):
                raise OSError(f"wrote {written} of {len(line)} bytes")
        except OSError:
            # A full disk may take a part of a line; without it the next record is on a line of its own.
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            problem = storage_errors.explain(error, self.path)
            logger.warning(
                f"cannot write {self.path}: {problem}; training continues, but records are lost until this is fixed"
            )


class JsonlFiles:
    """``metrics.jsonl`` and ``validation.jsonl`` of a run."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self.records = JsonlFile(folder / "metrics.jsonl", start_step)
        self.validations = JsonlFile(folder / "validation.jsonl", start_step)
        self._last_validation = self.validations.history[-1]["step"] if self.validations.history else -1
        self.summary = f"metrics in {self.records.path}"

    def forget(self) -> None:
        """Let go of the history, which a long run would keep in memory."""
        self.records.history.clear()
        self.validations.history.clear()

    def write(self, record: Record) -> None:
        """Append a logged step."""
        self.records.write(record.json_fields())

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Append results on held-out data, unless the file has them: a run may be resumed twice from a checkpoint."""
        if step > self._last_validation:
            self.validations.write({"step": step, **values})

    def close(self) -> None:
        """Say how many records were lost, if any."""
        self.records.close()
        self.validations.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a file in order; lines that are not records, or have changed since, are left out."""
    return _parse(path.read_bytes())[0]


def _parse(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Records of a file's content, and how many lines were not a record."""
    records: list[dict[str, Any]] = []
    bad = 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        record = record_of(line)
        if record is not None and _is_record(record):
            records.append(record)
        else:
            bad += 1
    return records, bad


def _is_record(record: dict[str, Any]) -> bool:
    """Whether a line is one that this class writes: a step, and numbers, null or short texts beside it."""
    if type(record.get("step")) is not int or not 0 <= record["step"] < 2**63:
        return False
    return all(_is_value(value) for value in record.values())


def _is_value(value: Any) -> bool:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return False
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 1000)


def _straighten(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Make the file on disk a rising history up to ``start_step``; returns it, thinned where the file is large."""
    if not path.exists():
        return []

    # A large file that a start of this version left in order is cut where its history ends, and not read whole.
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        size = os.fstat(file.fileno()).st_size
        end = _end_of_history(file, size, start_step) if start_step and size > _LARGE_BYTES else None
        if end is not None:
            history = _thinned(file, end)
            if all(one["step"] < other["step"] for one, other in itertools.pairwise(history)):
                if end < size:
                    descriptor = atomic_io.open_file(path, os.O_WRONLY)
                    try:
                        os.ftruncate(descriptor, end)
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
                    logger.info(f"{path}: continuing after step {start_step}; {size - end} bytes after it removed")
                return history
        file.seek(0)
        content = b"" if not start_step and size > _LARGE_BYTES else file.read()
    records, bad = _parse(content)

    # A run that begins: what another run has left there is put aside.
    if start_step == 0:
        if records or size > _LARGE_BYTES:
            aside = path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{path.suffix}")
            os.replace(path, aside)
            logger.info(f"{path} holds an earlier run, and this one starts at step 0; the earlier one is now {aside}")
        else:
            path.unlink()
        return []

    # A run that continues: records after its step are of what it has not seen. Of a step that was written twice the
    # later record belongs to the run that continued.
    kept: list[dict[str, Any]] = []
    for record in records:
        if record["step"] > start_step:
            continue
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    removed = len(records) - len(kept)
    if removed or bad or not content.endswith(b"\n"):
        content = b"".join(map(line_of, kept))
        atomic_io.write(path, content, durable=True)
        damaged = f"{bad} torn or damaged lines"
        logger.info(f"{path}: continuing after step {start_step}; {removed} later records and {damaged} removed")
    return kept


# Each start of a run leaves a file that is straight, and a run appends in order: so all that a start has to look at of
# a large file is its end. Reading 10^7 records would take minutes.
_LARGE_BYTES = 16 * 2**20
_TAIL_BYTES = 2**20
_THINNED = 2500


def _end_of_history(file: BinaryIO, size: int, start_step: int) -> int | None:
    """Where the last record up to ``start_step`` ends; None where what is before it has to be put in order first."""
    window = min(_TAIL_BYTES, size)
    # From the end backwards, in windows that double until one has enough records up to the step.
    while True:
        file.seek(size - window)
        content = file.read(window)
        # The first line of a window begins before it, and what follows the last line feed is torn.
        if window < size:
            content = content.partition(b"\n")[2]
        at = size - len(content)
        end = 0
        last = -1
        num_kept = 0
        is_past = False
        for line in content.split(b"\n")[:-1]:
            records, _ = _parse(line)
            at += len(line) + 1
            step = records[0]["step"] if records else None
            if step is None or step > start_step:
                is_past = True
            elif is_past or step <= last:
                return None
            else:
                end = at
                last = step
                num_kept += 1
        # Two at least: one alone may be a step written twice.
        if num_kept > 1 or window == size:
            return end
        # A run that went far back: samples of the whole file tell about where to look.
        if window == _TAIL_BYTES:
            before = _place_before(file, size, start_step)
            if before < size:
                return _end_of_history(file, before, start_step)
        window = min(2 * window, size)


def _place_before(file: BinaryIO, size: int, start_step: int) -> int:
    """A place that all records up to ``start_step`` are before, found by looking at few; ``size`` where none is."""
    samples = _samples(file, size)
    if any(one["step"] >= other["step"] for (_, one), (_, other) in itertools.pairwise(samples)):
        return size
    return next((place for place, record in samples if record["step"] > start_step), size)


def _thinned(file: BinaryIO, end: int) -> list[dict[str, Any]]:
    """Records before ``end`` at even distances, the first and the last among them."""
    records = [record for _, record in _samples(file, end)]
    file.seek(max(0, end - _TAIL_BYTES))
    records += _parse(file.read(end - file.tell()).rpartition(b"\n")[0].rpartition(b"\n")[2])[0]
    return [record for number, record in enumerate(records) if not number or record != records[number - 1]]


def _samples(file: BinaryIO, end: int) -> list[tuple[int, dict[str, Any]]]:
    """Records before ``end`` at even distances, the first among them, and where their lines begin."""
    samples: list[tuple[int, dict[str, Any]]] = []
    for place in range(0, end, max(1, -(-end // _THINNED))):
        file.seek(place)
        if place:
            file.readline()
        begin = file.tell()
        if begin < end and not (samples and samples[-1][0] == begin):
            samples += [(begin, record) for record in _parse(file.readline())[0]]
    return samples
