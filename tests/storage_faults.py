"""One shim between a run and its folder: a call of the storage fails, or stalls, for once or for a while.

Runs are forked: the launcher in a child of this process, its ranks from there. A fault is told by the process that
meets it ("launcher", or a rank) and by the number of the call there, so the same seed meets the same call.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import patience
import torch
from fsspec.implementations.local import LocalFileSystem

from shardtrain.checkpoint import lease
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.launch import local
from shardtrain.train import trainer
from shardtrain.utils.errors import ShardtrainError

BY_PATH = ("open", "rename", "replace", "link", "mkdir", "stat", "unlink", "scandir", "listdir", "statvfs", "utime")
BY_DESCRIPTOR = ("write", "fsync", "preadv", "fstat")
KINDS = {
    **{name: getattr(errno, name) for name in ("ENOENT", "ESTALE", "EIO", "EMFILE", "ENOSPC")},
    "stall": 0,
}
STORE_KINDS: dict[str, Callable[[], Exception] | None] = {
    "ENOENT": lambda: FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "503": lambda: RuntimeError("HttpError 503: backend error"),  # as gcsfs: no OSError
    "500": lambda: OSError("We encountered an internal error. Please try again."),  # as s3fs: no number
    "timeout": lambda: TimeoutError("the store did not answer in time"),
    "stall": None,
}
"""What an object store's library raises of its own."""
STALL_SECONDS = float(os.environ.get("SHARDTRAIN_TEST_STALL_SECONDS", "0.5"))
"""Of a stall. Below a second ``lease.PATIENCE_SECONDS`` is 1 and not 20, so that half a second is as 10 s there."""
PATIENCE_SECONDS = 1.0 if STALL_SECONDS < 1 else 20.0


@dataclass(frozen=True)
class Fault:
    """The ``number``-th call of a process, and ``lasts`` calls in all, meet it: an error, a stall, or a kill."""

    process: str
    number: int
    kind: str
    lasts: int = 1
    seconds: float = 0.0
    """And all calls of all processes for so long after it, where this is not 0."""
    late: bool = False
    """Whether a store has done what was asked, and the answer was lost on the way."""
    file: str = ""
    """A regular expression: each call of ``calls`` on a file below the run's folder that it finds meets the error."""
    calls: tuple[str, ...] = ("write", "fsync")


class Shim:
    """Stands before the calls that touch what lies below a folder; counts them, and lets the one that is due fail."""

    def __init__(self, folder: Path, fault: Fault | None, data: str | None = None) -> None:
        """``data`` is watched in place of the run's folder, where the calls are noted all the same."""
        self._folder, self._fault, self._paths = str(folder), fault, dict[int, str]()
        self._watches = f"{data or folder}/"
        self._count, self._pid = 0, 0
        self._until = multiprocessing.get_context("fork").Value("d", 0.0)
        for name in BY_PATH + BY_DESCRIPTOR:
            setattr(os, name, self._watched(name, getattr(os, name)))
        opened = io.open
        builtins.open = io.open = self._watched("io.open", opened)  # type: ignore[assignment]

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            what = arguments[0] if arguments else None
            folder = options.get("dir_fd", options.get("src_dir_fd"))
            if folder is not None and not isinstance(what, int):
                what = os.path.join(self._paths.get(folder, ""), what)  # a name in a folder that was opened before
            if name in BY_DESCRIPTOR:
                what = self._paths.get(what)
            if self._is_ours(what):
                self._meet(name, what)
            found = original(*arguments, **options)
            if name == "open":
                self._paths[found] = os.fspath(what)
            return found

        return call

    def _is_ours(self, what: Any) -> bool:
        if not isinstance(what, str | os.PathLike):
            return False
        below = f"{what}/".startswith(self._watches)
        if self._fault is not None and self._fault.file:
            return below and re.search(self._fault.file, str(what)[len(self._watches) :]) is not None
        return below

    def _meet(self, name: str, what: Any) -> None:
        if self._fault is not None and self._fault.file:
            if name in self._fault.calls:
                code = getattr(errno, self._fault.kind)
                # the system names no file where a descriptor is used
                raise OSError(code, os.strerror(code), *([] if name in BY_DESCRIPTOR else [str(what)]))
        elif self._is_due() and self._fault is not None and not self._kill_or_stall(self._fault):
            code = KINDS[self._fault.kind]
            raise OSError(code, os.strerror(code), what if isinstance(what, str) else str(what))

    def _is_due(self) -> bool:
        """Count a call of this process; gives whether it is to meet the fault."""
        if self._pid != os.getpid():
            self._pid, self._count = os.getpid(), 0
        self._count += 1
        process = os.environ.get("RANK", "launcher")
        if self._fault is None:
            counts = Path(f"{self._folder}.calls-{process}")
            descriptor = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, b".")
            os.close(descriptor)
            return False
        due = self._fault.number <= self._count < self._fault.number + self._fault.lasts
        if self._fault.seconds:
            if process == self._fault.process and self._count == self._fault.number:
                self._until.value = time.monotonic() + self._fault.seconds
            return time.monotonic() < self._until.value
        return process == self._fault.process and due

    def _kill_or_stall(self, fault: Fault) -> bool:
        """Whether the fault is no error, but one of these, and met."""
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stall":
            time.sleep(STALL_SECONDS)
        return fault.kind == "stall"


class Bucket(LocalFileSystem):
    """An object store in a folder, ``bucket:///folder``: each object appears whole or not at all."""

    protocol = "bucket"
    parts = ""
    """A folder for objects that are not whole yet."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("bucket://")

    def put_whole(self, path: str, value: bytes, new: bool) -> None:
        descriptor, part = tempfile.mkstemp(dir=self.parts)
        os.write(descriptor, value)
        os.close(descriptor)
        while True:  # another process may remove a folder that has become empty, at any moment
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            except (FileNotFoundError, FileExistsError):
                continue
            with contextlib.suppress(FileNotFoundError):
                os.link(part, path) if new else os.replace(part, path)
                break
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.put_whole(path, value, mode == "create")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return Path(path).read_bytes()[start:end]

    def rm_file(self, path: str) -> None:
        os.remove(path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))  # a store has no empty folders


fsspec.register_implementation("bucket", Bucket, clobber=True)


class StoreShim(Shim):
    """Stands before the calls of ``Bucket``; each meets the fault before it is made, or after."""

    def __init__(self, folder: Path, fault: Fault | None, counts: bool) -> None:
        self._folder, self._fault = str(folder), fault
        self._count, self._pid = 0, 0
        self._until = multiprocessing.get_context("fork").Value("d", 0.0)
        Bucket.parts = f"{folder}.parts"
        os.makedirs(Bucket.parts, exist_ok=True)
        for name in ("ls", "info", "cat_file", "pipe_file", "rm_file") if fault or counts else ():
            setattr(Bucket, name, self._watched(name, getattr(Bucket, name)))
        Bucket.open = lambda store, path, mode: _Upload(store, path, self._watched if fault or counts else _plainly)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            fault = self._fault if self._is_due() else None
            answer = original(*arguments, **options) if not fault or fault.late else None
            if fault and not self._kill_or_stall(fault):
                failure = STORE_KINDS[fault.kind]
                assert failure is not None
                raise failure()
            return original(*arguments, **options) if fault and not fault.late else answer

        return watch


def _plainly(_: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return original


class _Upload:
    """An object that is written in parts, and is there when it is closed."""

    def __init__(self, store: Bucket, path: str, watched: Callable[..., Callable[..., Any]]) -> None:
        data = bytearray()
        self.write = watched("write", data.extend)
        self.close = watched("close", lambda: store.put_whole(path, bytes(data), new=False))


def run(
    config: Config,
    ranks: int,
    fault: Fault | None,
    counts: bool = False,
    main: Callable[[Loaded], object] = trainer.main,
    of_data: bool = False,
) -> tuple[int, str]:
    """Train in forked ranks with a fault, or with none; gives the exit status and what stood on the terminal.

    ``counts`` notes the calls of each process in files beside the folder, for ``calls``. ``of_data`` lets calls on
    training.dataset_path meet the fault, and none on the run's folder.
    """
    folder = Path(config.job.dump_folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    terminal = folder.with_name(f"{folder.name}.terminal")
    process = multiprocessing.get_context("fork").Process(
        target=_launch, args=(config, ranks, fault, counts, terminal, main, of_data)
    )
    process.start()
    process.join(patience.seconds(120 + 10 * STALL_SECONDS))
    if process.is_alive():
        process.terminate()
        process.join(patience.seconds(10))
        process.kill()
        raise AssertionError(f"{fault}: the run did not end; {terminal.read_text()}")
    assert process.exitcode is not None
    return process.exitcode, terminal.read_text()


def _launch(
    config: Config,
    ranks: int,
    fault: Fault | None,
    counts: bool,
    terminal: Path,
    main: Callable[[Loaded], object],
    of_data: bool,
) -> None:
    descriptor = os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    lease.PATIENCE_SECONDS = PATIENCE_SECONDS  # this process is the launcher of one run
    if "://" in config.checkpoint.folder:
        StoreShim(Path(config.job.dump_folder), fault, counts)
    elif fault or counts:
        Shim(Path(config.job.dump_folder), fault, config.training.dataset_path if of_data else None)
    try:
        code = local.launch(Loaded(config), ranks, main=main)
    except ShardtrainError as error:  # as the command line does
        print(f"error[{error.exit_code}]: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def calls(config: Config) -> dict[str, int]:
    """Calls of each process in the run that was counted."""
    folder = Path(config.job.dump_folder)
    found = folder.parent.glob(f"{folder.name}.calls-*")
    return {path.name.rpartition("-")[2]: path.stat().st_size for path in found}


def losses(config: Config) -> dict[int, float]:
    """Loss of each step by metrics.jsonl; a step that stands there twice is an error."""
    found: dict[int, float] = {}
    path = Path(config.job.dump_folder) / "metrics.jsonl"
    for text in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(text)
        if "loss" in record:
            assert record["step"] not in found, f"step {record['step']} twice"
            found[record["step"]] = record["loss"]
    return found
