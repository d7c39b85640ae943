"""TensorBoard event files, with the tags of torchtitan."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtrain.metrics.sinks import SinkContext, validation_tags
from shardtrain.metrics.step_record import Record, tags_of
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

REPLAYED = 5000
"""Maximum number of earlier records in the event file of a resumed run: five times the points of a curve."""
FLUSH_SECONDS = 10.0


def open_sink(request: SinkContext) -> TensorBoardSink | None:
    """Return the sink of this rank with the history of a resumed run, or None if it is disabled."""
    options = request.config.metrics
    device_type = request.facts.device_type
    if not options.enable_tensorboard or not request.is_wanted:
        return None
    folder = request.folder / options.save_tb_folder
    sink = TensorBoardSink(folder, request.rank, request.tags)
    sink.summary = f"curves: tensorboard --logdir {folder}"
    # A resumed run writes a new event file, so repeat the earlier part of its curves.
    for fields in thinned(request.records):
        sink.scalars(fields["step"], tags_of(fields, device_type, options.legacy_tags))
    for fields in thinned(request.validations):
        known = {}
        for key, value in fields.items():
            if key != "step" and value is not None:
                known[key] = value
        sink.validation(fields["step"], known)
    return sink


def thinned(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return at most REPLAYED records at even distances, including the first and the last."""
    if len(records) <= REPLAYED:
        return records
    last = len(records) - 1
    kept = [number * last // (REPLAYED - 1) for number in range(REPLAYED)]
    return [records[index] for index in kept]


class TensorBoardSink:
    """Write scalars by tag into ``folder/YYYYmmdd-HHMM``, or its subfolder ``rank_N`` if every rank writes.

    If the folder exists because of a restart within the same minute, the new folder gets the suffix ``-2``.
    The file is opened again for each write, every ``FLUSH_SECONDS``, to detect a deleted folder. A failed
    write logs a warning and closes the sink, because metrics must not stop training.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(
        self,
        folder: Path,
        rank: int | None = None,
        tags: Callable[[Record], Mapping[str, float]] | None = None,
    ) -> None:
        self._tags = tags or (lambda record: record.tags("cpu"))
        self.summary = ""
        require_package("tensorboard", "metrics.enable_tensorboard")
        # Do not use PyTorch's SummaryWriter: it follows symlinks, and its thread prints a traceback
        # for each failed write.
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        self._is_open = True
        self._written = -math.inf
        self.folder = folder
        try:
            self.folder = _fresh_folder(folder, "" if rank is None else f"rank_{rank}")
        except OSError as error:
            self._fail(error)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = self.folder / name
        self._add(file_version="brain.Event:2")

    def write(self, record: Record) -> None:
        """Add a logged step."""
        self.scalars(record.step, self._tags(record))

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Add results on held-out data."""
        self.scalars(step, validation_tags(values))

    def scalars(self, step: int, tags: Mapping[str, float]) -> None:
        """Add one point per tag."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event with all values of a step takes a tenth of the time of one event per value.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        """Write pending events and close the sink."""
        self._write()
        self._is_open = False

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._is_open:
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
            # Opening the file at every step would be slow on a network filesystem.
            if time.monotonic() - self._written >= FLUSH_SECONDS:
                self._write()

    def _write(self) -> None:
        """Append pending events to the file. Only the first write creates the file."""
        if not self._is_open or not self._waiting.tell():
            return
        # Later writes must fail if the folder was removed, so they do not create the file.
        is_first = self._written < 0
        flags = os.O_WRONLY | os.O_APPEND
        if is_first:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            with open(atomic_io.open_file(self._file, flags, create_folder=is_first), "ab") as file:
                file.write(self._waiting.getvalue())
        except OSError as error:
            self._fail(error)
        self._waiting.seek(0)
        self._waiting.truncate()
        self._written = time.monotonic()

    def _fail(self, error: OSError) -> None:
        self._is_open = False
        problem = storage_errors.explain(error, self.folder)
        logger.warning(
            f"cannot write TensorBoard files in {self.folder}: {problem}; training continues without them"
        )


def require_package(name: str, option: str, pip: str = "", value: object = True) -> None:
    """Raise ConfigError if the package of an option is not installed.

    ``pip`` is its name on PyPI if it differs.
    """
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ConfigError(
            Problem(
                option,
                value,
                rule=f"requires the package {name}",
                fix=f"pip install {pip or name}, or turn the option off",
            )
        )


def _fresh_folder(folder: Path, below: str) -> Path:
    """Return a folder named after the current minute, with a number if a folder of that name contains files."""
    stamp = time.strftime("%Y%m%d-%H%M")
    candidate = folder / stamp / below
    number = 1
    while candidate.exists() and any(child.is_file() for child in candidate.iterdir()):
        number += 1
        candidate = folder / f"{stamp}-{number}" / below
    return candidate
