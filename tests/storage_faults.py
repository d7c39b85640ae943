"""Inject faults between a run and its folder: a storage call fails or stalls, once or for a while.

A child of this process is the launcher of the run and forks its ranks. A fault is identified by its process ("launcher"
or a rank) and the number of the call in that process, so it is reproducible.
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

BY_PATH = (
    "open",
    "rename",
    "replace",
    "link",
    "mkdir",
    "stat",
    "unlink",
    "scandir",
    "listdir",
    "statvfs",
    "utime",
)
BY_DESCRIPTOR = ("write", "fsync", "preadv", "fstat")
KINDS = {
    **{name: getattr(errno, name) for name in ("ENOENT", "ESTALE", "EIO", "EMFILE", "ENOSPC")},
    "stall": 0,
}
STORE_KINDS: dict[str, Callable[[], Exception] | None] = {
    "ENOENT": lambda: FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "503": lambda: RuntimeError("HttpError 503: backend error"),  # like gcsfs: not an OSError
    "500": lambda: OSError(
        "We encountered an internal error. Please try again."
    ),  # like s3fs: no errno
    "timeout": lambda: TimeoutError("the store did not answer in time"),
    "stall": None,
}
"""Errors that the libraries of object stores raise."""
STALL_SECONDS = float(os.environ.get("SHARDTRAIN_TEST_STALL_SECONDS", "0.5"))
"""Duration of a stall. Below one second, ``lease.PATIENCE_SECONDS`` is also reduced by a factor of 20."""
PATIENCE_SECONDS = 1.0 if STALL_SECONDS < 1 else 20.0


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        process: "launcher" or a rank.
        number: Number of the first call of the process that fails.
        kind: Name of an error, "stall" or "kill".
        lasts: Number of consecutive calls that fail.
        seconds: If not 0, all calls of all processes fail for this long after the first failure.
        late: True if the store executes the request before it fails, as if only the response was lost.
        file: Regular expression. If not empty, calls on matching files below the run's folder fail instead.
        calls: Names of the calls that fail on files matching ``file``.
    """

    process: str
    number: int
    kind: str
    lasts: int = 1
    seconds: float = 0.0
    late: bool = False
    file: str = ""
    calls: tuple[str, ...] = ("write", "fsync")


class Shim:
    """Intercept calls on files below a folder: count them, and inject the fault."""

    def __init__(self, folder: Path, fault: Fault | None, data: str | None = None) -> None:
        """Watch the run's folder, or ``data`` if given. Counts are stored next to the run's folder."""
        self._folder = str(folder)
        self._fault = fault
        self._paths: dict[int, str] = {}
        self._watches = f"{data or folder}/"
        self._count = 0
        self._pid = 0
        self._until = multiprocessing.get_context("fork").Value("d", 0.0)
        for name in BY_PATH + BY_DESCRIPTOR:
            setattr(os, name, self._watched(name, getattr(os, name)))
        opened = io.open
        builtins.open = io.open = self._watched("io.open", opened)  # type: ignore[assignment]

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[0] if arguments else None
            folder = options.get("dir_fd", options.get("src_dir_fd"))
            if folder is not None and not isinstance(path, int):
                # the path is relative to an open folder
                path = os.path.join(self._paths.get(folder, ""), path)
            if name in BY_DESCRIPTOR:
                path = self._paths.get(path)
            if self._is_watched(path):
                self._inject(name, path)
            result = original(*arguments, **options)
            if name == "open":
                self._paths[result] = os.fspath(path)
            return result

        return call

    def _is_watched(self, path: Any) -> bool:
        if not isinstance(path, str | os.PathLike) or not f"{path}/".startswith(self._watches):
            return False
        if self._fault is None or not self._fault.file:
            return True
        return re.search(self._fault.file, str(path)[len(self._watches) :]) is not None

    def _inject(self, name: str, path: Any) -> None:
        """If this call must fail, raise the error of the fault, or stall or kill this process."""
        if self._fault is not None and self._fault.file:
            if name in self._fault.calls:
                code = getattr(errno, self._fault.kind)
                # errors of calls on descriptors have no file name
                names = [] if name in BY_DESCRIPTOR else [str(path)]
                raise OSError(code, os.strerror(code), *names)
        elif self._is_due() and self._fault is not None and not self._kill_or_stall(self._fault):
            code = KINDS[self._fault.kind]
            raise OSError(code, os.strerror(code), str(path))

    def _is_due(self) -> bool:
        """Count a call of this process. Return True if it must fail."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._count = 0
        self._count += 1
        process = os.environ.get("RANK", "launcher")
        if self._fault is None:
            counts = Path(f"{self._folder}.calls-{process}")
            descriptor = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, b".")
            os.close(descriptor)
            return False
        if self._fault.seconds:
            if process == self._fault.process and self._count == self._fault.number:
                self._until.value = time.monotonic() + self._fault.seconds
            return time.monotonic() < self._until.value
        is_in_range = self._fault.number <= self._count < self._fault.number + self._fault.lasts
        return process == self._fault.process and is_in_range

    def _kill_or_stall(self, fault: Fault) -> bool:
        """Kill this process or sleep, if the fault is one of these. Return False if it is an error."""
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stall":
            time.sleep(STALL_SECONDS)
        return fault.kind == "stall"


class Bucket(LocalFileSystem):
    """An object store in a folder, ``bucket:///folder``, with atomic writes of objects."""

    protocol = "bucket"
    parts = ""
    """Folder for incomplete objects."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("bucket://")

    def put_atomically(self, path: str, value: bytes, new: bool) -> None:
        descriptor, part = tempfile.mkstemp(dir=self.parts)
        os.write(descriptor, value)
        os.close(descriptor)
        while True:  # another process may remove an empty folder at any moment
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
        self.put_atomically(path, value, mode == "create")

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return Path(path).read_bytes()[start:end]

    def rm_file(self, path: str) -> None:
        os.remove(path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))  # object stores have no empty folders


fsspec.register_implementation("bucket", Bucket, clobber=True)


class StoreShim(Shim):
    """Intercept the calls of ``Bucket``. A fault strikes before the request is executed, or after it if it is late."""

    def __init__(self, folder: Path, fault: Fault | None, counts: bool) -> None:
        self._folder = str(folder)
        self._fault = fault
        self._count = 0
        self._pid = 0
        self._until = multiprocessing.get_context("fork").Value("d", 0.0)
        Bucket.parts = f"{folder}.parts"
        os.makedirs(Bucket.parts, exist_ok=True)
        watched = _unwatched
        if fault or counts:
            watched = self._watched
            for name in ("ls", "info", "cat_file", "pipe_file", "rm_file"):
                setattr(Bucket, name, watched(name, getattr(Bucket, name)))
        Bucket.open = lambda store, path, mode: _Upload(store, path, watched)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            fault = self._fault if self._is_due() else None
            if fault is None:
                return original(*arguments, **options)
            if fault.late:
                answer = original(*arguments, **options)
            if not self._kill_or_stall(fault):
                failure = STORE_KINDS[fault.kind]
                assert failure is not None
                raise failure()
            return answer if fault.late else original(*arguments, **options)

        return watch


def _unwatched(_: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return original


class _Upload:
    """An object that is written in parts, and appears when it is closed."""

    def __init__(
        self, store: Bucket, path: str, watched: Callable[..., Callable[..., Any]]
    ) -> None:
        data = bytearray()
        self.write = watched("write", data.extend)
        self.close = watched("close", lambda: store.put_atomically(path, bytes(data), new=False))


def run(
    config: Config,
    ranks: int,
    fault: Fault | None,
    counts: bool = False,
    main: Callable[[Loaded], object] = trainer.main,
    of_data: bool = False,
) -> tuple[int, str]:
    """Train in forked ranks, with or without a fault.

    Args:
        config: Configuration of the run.
        ranks: Number of ranks.
        fault: The fault to inject, or None.
        counts: Count the calls of each process in files next to the run's folder, for ``calls``.
        main: Main function of the ranks.
        of_data: Inject the fault into calls on training.dataset_path instead of the run's folder.

    Returns:
        The exit status and the terminal output.
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
    except ShardtrainError as error:  # like the command line
        print(f"error[{error.exit_code}]: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def calls(config: Config) -> dict[str, int]:
    """Return the number of calls of each process in a run with ``counts``."""
    folder = Path(config.job.dump_folder)
    paths = folder.parent.glob(f"{folder.name}.calls-*")
    return {path.name.rpartition("-")[2]: path.stat().st_size for path in paths}


def losses(config: Config) -> dict[int, float]:
    """Return the loss of each step in metrics.jsonl, and check that no step is recorded twice."""
    path = Path(config.job.dump_folder) / "metrics.jsonl"
    if not path.exists():
        return {}
    losses_by_step: dict[int, float] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            assert record["step"] not in losses_by_step, f"step {record['step']} twice"
            losses_by_step[record["step"]] = record["loss"]
    return losses_by_step
