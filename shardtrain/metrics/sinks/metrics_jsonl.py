"""The metrics history of a run as JSON lines, from which all reports read.

A resume removes the records after its checkpoint, so steps always increase.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shardtrain.metrics.step_record import Record, finite_or_none
from shardtrain.utils import atomic_io, bounded_reads, storage_errors
from shardtrain.utils.checked_json import FIELD, MAX_LINE_BYTES, line_of, record_of
from shardtrain.utils.log import logger


class JsonlFile:
    """History with strictly increasing ``step``. Each record is one line, written with one system call.

    Opening the file removes records after ``start_step``, and torn or corrupted lines. A run that starts at
    step 0 renames an earlier history, with the time in the new name. A pipe or a file that is not a file of
    lines is renamed too. A full disk or a lost mount does not stop training: the first failure logs a
    warning, and ``num_lost`` counts the lost records.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.num_lost = 0
        self.history: list[dict[str, Any]] = []
        self._warned = False
        try:
            for record in _continue_history(path, start_step):
                # Sinks draw the values, and another program may have written text.
                self.history.append(
                    {key: value for key, value in record.items() if not isinstance(value, str)}
                )
        except OSError as error:
            self._warn(error)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Non-finite numbers are written as null, because JSON does not support them."""
        fields = {}
        for key, value in record.items():
            fields[key] = finite_or_none(value) if isinstance(value, float) else value
        line = line_of(fields)
        try:
            self._append(line)
        except OSError as error:
            self.num_lost += 1
            self._warn(error)

    def close(self) -> None:
        """Log the number of lost records, if any. The file is not open between records."""
        if self.num_lost:
            logger.warning(f"{self.num_lost} records of {self.path} could not be written")

    def _append(self, line: bytes) -> None:
        # Open the file for each record, at most once per log_freq steps, so writing works again when a lost
        # mount returns. The folder may have been deleted during the run.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = atomic_io.open_file(self.path, flags, 0o644, create_folder=True)
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written != len(line):
                raise OSError(f"wrote {written} of {len(line)} bytes")
        except OSError:
            # A full disk may have stored a part of the line. Remove it, so the next record starts a new line.
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
        self._last_validation = (
            self.validations.history[-1]["step"] if self.validations.history else -1
        )
        self.summary = f"metrics in {self.records.path}"

    def forget(self) -> None:
        """Free the history, which can be large."""
        self.records.history.clear()
        self.validations.history.clear()

    def write(self, record: Record) -> None:
        """Append a logged step."""
        self.records.write(record.json_fields())

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Append results on held-out data, unless an earlier attempt has already written this step."""
        if step > self._last_validation:
            self.validations.write({"step": step, **values})

    def close(self) -> None:
        """Log the number of lost records, if any."""
        self.records.close()
        self.validations.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file in order. Skip invalid and corrupted lines."""
    return [record for record in _records(path) if record is not None]


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line of a file, or None for an invalid line. Skip empty lines."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        while line := bounded_reads.line(file, MAX_LINE_BYTES):
            if line.strip():
                yield _record(line)


def _lines(path: Path) -> Iterator[tuple[int | None, bytes]]:
    """Yield the step of each line of a file, or None for an invalid line, and the line. Skip empty lines."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        while line := bounded_reads.line(file, MAX_LINE_BYTES):
            # A line with a correct checksum is as it was written. Parsing it would take ten times as long.
            own = _OWN_LINE.fullmatch(line)
            if own and int(own[3], 16) == zlib.crc32(own[1] + b"}"):
                yield int(own[2]), line
                continue
            if not line.strip():
                continue
            record = _record(line)
            step = None if record is None else record["step"]
            # Keep the line of another program as it is. It may have NaN, which cannot be encoded again.
            yield step, line.rstrip(b"\n") + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is not a record."""
    record = record_of(line.rstrip(b"\n"))
    return record if record is not None and _is_record(record) else None


def _is_record(record: dict[str, Any]) -> bool:
    """True for objects that this module writes: a step, and numbers, nulls or short texts."""
    if type(record.get("step")) is not int or not 0 <= record["step"] < 2**63:
        return False
    return all(_is_value(value) for value in record.values())


def _is_value(value: Any) -> bool:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return False
    if isinstance(value, str):
        return len(value) <= 1000
    return value is None or isinstance(value, int | float)


_OWN_LINE = re.compile(
    rb'(\{"step": (\d{1,18}), "[^{}\[\]]*), "%s": "([0-9a-f]{8})"\}\n' % FIELD.encode()
)
"""A line that ``line_of`` wrote, without nested values. Groups: the text before the checksum, step and checksum."""
_NOT_A_HISTORY = {errno.EFBIG, errno.EINVAL}
"""Errors of a file with an endless line, and of a pipe, a device or a socket."""


def _continue_history(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Return the records of ``_straighten``. Rename a pipe, a device, or a file that is not a file of lines."""
    try:
        return _straighten(path, start_step)
    except OSError as error:
        if error.errno not in _NOT_A_HISTORY:
            raise
        aside = _aside(path)
        os.replace(path, aside)
        logger.warning(
            f"{path} is not the history of a run ({error.strerror}); renamed it to {aside} and started a new file"
        )
        return []


def _aside(path: Path) -> Path:
    """Return a new name for an earlier file, with the time."""
    return path.with_name(
        f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{path.suffix}"
    )


def _straighten(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Remove invalid lines and all records after ``start_step`` from the file.

    Return the remaining records, or a sample of them if the file is large.
    """
    if not path.exists():
        return []

    # Truncate a large file whose records are in order, without reading all of it.
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        size = os.fstat(file.fileno()).st_size
        end = None
        if start_step and size > _LARGE_BYTES:
            end = _end_of_history(file, size, start_step)
        if end is not None:
            history = _thinned(file, end)
            is_ascending = all(
                one["step"] < other["step"] for one, other in itertools.pairwise(history)
            )
            if is_ascending:
                if end < size:
                    _truncate(path, end)
                    logger.info(
                        f"{path}: continuing after step {start_step}; removed {size - end} bytes after it"
                    )
                return history

    # A new run renames the history of an earlier run in the same folder. The content of a large file does not matter.
    if start_step == 0:
        if size > _LARGE_BYTES or any(record is not None for record in _records(path)):
            aside = _aside(path)
            os.replace(path, aside)
            logger.info(
                f"{path} contains an earlier run, but this run starts at step 0; renamed the earlier file to {aside}"
            )
        else:
            path.unlink()
        return []

    # Read the file twice, because the lines of a large file do not fit into memory. The steps do.
    steps = array("q")
    bad = 0
    for step, _ in _lines(path):
        if step is None:
            bad += 1
        else:
            steps.append(step)
    is_kept = _kept(steps, start_step)
    removed = is_kept.count(0)
    if removed or bad or bounded_reads.end(path, 1) != b"\n":
        valid_lines = (line for step, line in _lines(path) if step is not None)
        atomic_io.write(path, itertools.compress(valid_lines, is_kept), durable=True)
        damaged = f"{bad} torn or damaged lines"
        logger.info(
            f"{path}: continuing after step {start_step}; removed {removed} later records and {damaged}"
        )
    size = path.stat().st_size
    if size > _LARGE_BYTES:
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            return _thinned(file, size)
    return read_records(path)


def _kept(steps: Sequence[int], start_step: int) -> bytearray:
    """Return 1 for each record to keep, and 0 for the others.

    The resumed run repeats steps after the checkpoint. If a step was written twice, the later record
    belongs to the run that continued.
    """
    is_kept = bytearray(len(steps))
    lowest = start_step + 1
    for number in reversed(range(len(steps))):
        if steps[number] < lowest:
            is_kept[number] = 1
            lowest = steps[number]
    return is_kept


def _truncate(path: Path, size: int) -> None:
    descriptor = atomic_io.open_file(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Each start sorts the records, and a run appends in order. So a start needs to read only the end of a large
# file. Reading 10^7 records would take minutes.
_LARGE_BYTES = 16 * 2**20
_TAIL_BYTES = 2**20
_MAX_WINDOW_BYTES = 16 * 2**20
_THINNED = 2500


def _end_of_history(file: BinaryIO, size: int, start_step: int) -> int | None:
    """Return the offset after the last record up to ``start_step``, or None if the records are not in order.

    None also if the last ``_MAX_WINDOW_BYTES`` contain no such record.
    """
    window = min(_TAIL_BYTES, size)
    # Read backwards in windows from the end. Double the window until it contains enough records up to the
    # step.
    while window <= _MAX_WINDOW_BYTES:
        file.seek(size - window)
        content = file.read(window)
        # The first line of a window may start before it. Text after the last line feed is an incomplete line.
        if window < size:
            content = content.partition(b"\n")[2]
        at = size - len(content)
        end = 0
        last = -1
        num_kept = 0
        is_past = False
        for line in content.split(b"\n")[:-1]:
            record = _record(line)
            at += len(line) + 1
            step = None if record is None else record["step"]
            if step is None or step > start_step:
                is_past = True
            elif is_past or step <= last:
                return None
            else:
                end = at
                last = step
                num_kept += 1
        # Require two records, because a single one may belong to a step that was written twice.
        if num_kept > 1 or window == size:
            return end
        # The checkpoint may be far back. Samples of the entire file show the approximate position.
        if window == _TAIL_BYTES:
            before = _place_before(file, size, start_step)
            if before < size:
                return _end_of_history(file, before, start_step)
        window = min(2 * window, size)
    return None


def _place_before(file: BinaryIO, size: int, start_step: int) -> int:
    """Return an offset behind all records up to ``start_step``, found in samples of the file.

    Without one, ``size``.
    """
    samples = _samples(file, size)
    if any(one["step"] >= other["step"] for (_, one), (_, other) in itertools.pairwise(samples)):
        return size
    for offset, record in samples:
        if record["step"] > start_step:
            return offset
    return size


def _thinned(file: BinaryIO, end: int) -> list[dict[str, Any]]:
    """Return records before ``end`` at even distances, including the first and the last record."""
    records = [record for _, record in _samples(file, end)]
    # Add the last record, unless it is the last sample.
    file.seek(max(0, end - _TAIL_BYTES))
    complete_lines = file.read(end - file.tell()).rpartition(b"\n")[0]
    last_record = _record(complete_lines.rpartition(b"\n")[2])
    if last_record is not None:
        records.append(last_record)
    return [
        record
        for number, record in enumerate(records)
        if not number or record != records[number - 1]
    ]


def _samples(file: BinaryIO, end: int) -> list[tuple[int, dict[str, Any]]]:
    """Return records before ``end`` at even distances, including the first, with the offsets of their lines."""
    samples: list[tuple[int, dict[str, Any]]] = []
    begin = 0
    for place in range(0, end, max(1, -(-end // _THINNED))):
        # A long line may contain several places. Find its end only once.
        if place < begin:
            continue
        file.seek(place)
        if place:
            bounded_reads.line(file, MAX_LINE_BYTES)
        begin = file.tell()
        if begin < end:
            record = _record(bounded_reads.line(file, MAX_LINE_BYTES))
            if record is not None:
                samples.append((begin, record))
    return samples
