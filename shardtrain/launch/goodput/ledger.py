"""Record the time account during training: one line per save and, at most once a second, one per logged step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import Account, Attempt, account, attempts_of, bins
from shardtrain.utils import process_identity, storage_errors
from shardtrain.utils.activity import Phase, Phases
from shardtrain.utils.errors import DataError
from shardtrain.utils.log import logger
from shardtrain.utils.variables import is_whole_number

JOB = "SHARDTRAIN_JOB"
"""Environment variable set by the launcher: ID and start time of the job."""
STARTED = "SHARDTRAIN_STARTED"
"""Environment variable set by the launcher: start time of this attempt, in seconds since the epoch."""
HANDED_OVER = "SHARDTRAIN_HANDED_OVER"
"""Environment variable set by run_train.sh, which may first install packages:
time at which it started shardtrain.
"""
MOST_SECONDS_BETWEEN_LINES = 60.0

T = TypeVar("T")


class Ledger:
    """Time account of this attempt, in a file of the run. Only the ledger of rank 0 has an effect.

    Use it as a context manager, which records the end of the attempt. An error in the accounting causes one
    warning and never ends the run. ``step`` is the last completed step.
    """

    def __init__(
        self,
        folder: Path | None = None,
        phases: Phases | None = None,
        step: int = 0,
        world_size: int = 1,
        environment: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``folder`` is the run's folder, or None on ranks other than 0. The run
        continues after step ``step``.
        """
        self._path = folder / events.FILE if folder else None
        self._phases = phases or Phases()
        self._now = now
        self._offset: dict[Phase, float] = {}
        self.step = step
        self._saved_step = step
        self._saves = 0
        self._written = -float("inf")
        if folder is not None:
            self._try(lambda: self._open(folder, step, world_size, environment), None)

    def _open(
        self, folder: Path, step: int, world_size: int, environment: Mapping[str, str]
    ) -> None:
        now = self._now
        age = sum(self._phases.seconds().values())
        # Include the time before this object existed: the launcher and imports.
        job, job_started, started = _origin(environment, now(), now() - age)
        self._before = max(0.0, now() - started - age)
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._start = events.Start(
            secrets.token_hex(8),
            job,
            job_started,
            started,
            step,
            world_size,
            int(restarts) if is_whole_number(restarts) else 0,
        )
        earlier = self._earlier(folder)
        # A new run in the same folder starts a new account.
        if earlier and step == 0 and earlier[-1].start.job != job:
            path = folder / events.FILE
            aside = path.with_name(
                f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{path.suffix}"
            )
            try:
                path.rename(aside)
            except OSError as error:
                logger.warning(
                    f"cannot rename {path}: {storage_errors.explain(error, path)}; it now contains two runs",
                )
            earlier = []
        self._past = account([*earlier, Attempt(self._start)])
        self._write(self._start)

    def measures(self) -> dict[str, float]:
        """Return the current account for the record of a logged step, or {} on ranks other than 0."""
        return self._try(self._measure, {})

    def _measure(self) -> dict[str, float]:
        if self._path is None:
            return {}
        age = sum(self._phases.seconds().values())
        # Write at most one line per second. In a long run, write one per thousandth of its age, and at least
        # one per minute.
        if age - self._written >= min(MOST_SECONDS_BETWEEN_LINES, max(1.0, age / 1000)):
            self._progress()
        return self.account().as_record()

    def saved(self, step: int) -> None:
        """Record that the checkpoint of ``step`` is complete.

        A background save completes some steps after ``step``.
        """
        self.step = max(self.step, step)
        self._saved_step = step
        self._saves += 1
        if self._path is not None:
            self._try(self._progress, None)

    def rollback(self, step: int) -> None:
        """Record that the run has rolled back to ``step``. The steps after it are lost."""
        if (path := self._path) is not None:
            self._try(lambda: self._roll_back(path.parent, step), None)

    def _roll_back(self, folder: Path, step: int) -> None:
        """End this attempt, and begin a new one in the same process after ``step``."""
        self._write(self._point(ended=True))
        self.step = self._saved_step = step
        # The following steps are a new attempt in the same process, so restart its clocks at zero.
        self._offset = self._phases.seconds()
        self._before = 0.0
        self._saves = 0
        earlier = self._earlier(folder)
        attempt = secrets.token_hex(8)
        now = self._now()
        self._start = dataclasses.replace(self._start, attempt=attempt, started=now, step=step)
        self._past = account([*earlier, Attempt(self._start)])
        self._write(self._start)

    def account(self) -> Account:
        """Return the current account over all attempts. Only valid on rank 0."""
        current = Attempt(self._start, [self._point()])
        seconds = {
            name: self._past.seconds[name] + value
            for name, value in bins(current, float("inf")).items()
        }
        saves = self._past.saves + self._saves
        return Account(
            seconds, self._past.idle_seconds, self._past.attempts, self._past.failures, saves
        )

    def __enter__(self) -> Ledger:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the last record and log the account."""
        if self._path is not None:
            self._try(self._end, None)

    def _end(self) -> None:
        self._write(self._point(ended=True))
        account = self.account()
        attempts = f"{account.attempts} attempt{'s' if account.attempts > 1 else ''}"
        logger.info(f"{account} (in {attempts})")

    def _point(self, ended: bool = False) -> events.AttemptProgress:
        rounded = {
            str(name): round(
                value - self._offset.get(name, 0.0) + self._before * (name == "start"), 4
            )
            for name, value in self._phases.seconds().items()
        }
        now = round(self._now(), 3)
        return events.AttemptProgress(
            self._start.attempt, now, self.step, self._saves, rounded, ended, self._saved_step
        )

    def _progress(self) -> None:
        self._written = sum(self._phases.seconds().values())
        self._write(self._point())

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        """Return the result of ``action``.

        If it fails, log a warning, stop the accounting and return ``otherwise``.
        """
        try:
            return action()
        except Exception as error:
            if self._path is not None:
                problem = f"{type(error).__name__}: {error}"
                logger.warning(
                    f"cannot account for the time: {problem}; goodput is no longer recorded"
                )
                self._path = None
            return otherwise

    def _write(self, event: events.Event) -> None:
        if self._path is None:
            return
        try:
            events.append(self._path, event)
        except OSError as error:
            problem = storage_errors.explain(error, self._path)
            logger.warning(f"cannot write {self._path}: {problem}; goodput is no longer recorded")
            self._path = None

    def _earlier(self, folder: Path) -> list[Attempt]:
        if not (folder / events.FILE).exists():
            return []
        try:
            recorded_events, num_damaged = events.read(folder)
        except DataError as error:
            logger.warning(f"{error}; the goodput excludes earlier attempts")
            return []
        if num_damaged > 1:
            logger.warning(f"{folder / events.FILE}: {num_damaged} damaged lines are ignored")
        return attempts_of(recorded_events)


def note_death(folder: Path, job: str, time_seconds: float) -> None:
    """Record that a rank of the launcher's job (see ``new_job``) has failed.

    No-op if the run has no account. Never raises.
    """
    path = folder / events.FILE
    # Suppress all errors: the caller is about to report the failure of the rank, and a missing line only makes
    # the account less exact.
    with contextlib.suppress(Exception):
        if path.exists():
            events.append(path, events.Death(job.partition(":")[0], time_seconds))


def new_job() -> str:
    """Return a unique ID of this command, followed by the start time of its process."""
    return f"{secrets.token_hex(8)}:{process_started(time.time(), time.time()):.3f}"


def process_started(now: float, otherwise: float, pid: int | str = "self") -> float:
    """Return the start time of a process in seconds since the epoch, or ``otherwise`` if it is unknown.

    If run_train.sh started the process, return at least the time of that start.
    """
    began = otherwise
    stat = process_identity.read_stat(pid)
    if stat is not None:
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/uptime") as uptime:
            age = float(uptime.read().split()[0]) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
            if 0 <= age < 1e9:
                began = now - age
    handed_over = os.environ.get(HANDED_OVER, "")
    if is_whole_number(handed_over):
        return max(began, min(float(handed_over), now))
    return began


def _origin(
    environment: Mapping[str, str], now: float, at_least: float
) -> tuple[str, float, float]:
    """Return the job of this attempt, the start time of its command, and the start time of this attempt.

    shardtrain's launcher passes all three on. Without it, the job is identified by torchrun's agent, which is
    the parent process. Under Slurm, a requeue starts a new job. Without torchrun, this process is the job. If
    the system does not report when it started, ``at_least`` is used.
    """
    if JOB in environment:
        job, _, begun = environment[JOB].partition(":")
        return job, float(begun), float(environment[STARTED])
    started = process_started(now, at_least)
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return secrets.token_hex(8), started, started
    # torchrun sets "none" if it was started without an ID. In that case identify
    # the command by the parent process.
    command_id = f"{socket.gethostname()}:{os.getppid()}" if run == "none" else run
    parts = [
        "torchrun",
        command_id,
        *(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")),
    ]
    agent_started = process_started(now, started, os.getppid())
    return " ".join(part for part in parts if part), min(agent_started, started), started
