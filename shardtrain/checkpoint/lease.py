"""A lease on a folder: one run at a time may write there, and holds ``lease.json``.

The holder touches the file every ten seconds. On the same host, a lease is free if its process is
dead. On another host, it is free if nobody touches it for a minute by the watcher's monotonic
clock. Half a minute of watching is enough if the file is also a minute old by the filesystem's
clock. A wall clock that jumps therefore never takes a lease from a live run. A lease that the
holder cannot read is not lost: the holder tries again, and writes the file again if it is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import files
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.utils import atomic_io, bounded_reads, checked_json, process_identity
from shardtrain.utils.errors import ConfigError, FolderTaken, Problem, fix_first
from shardtrain.utils.log import logger

LEASE = "lease.json"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""Time of six missed heartbeats, after which a lease is free."""
DEAD = "its process no longer exists"
PATIENCE_SECONDS = 20.0
"""Time for which a holder retries reading its lease from storage that does not answer."""


class Lease:
    """The right to write below ``folder``. ``nonce`` is random and identifies this holder."""

    def __init__(self, folder: Path | ObjectPath) -> None:
        self.nonce = secrets.token_hex(6)
        self._path: Any = folder / LEASE
        self._held = False
        self._pid = 0
        self.dead: set[str] = set()
        """Nonces of earlier holders whose process is dead."""
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def acquire(self) -> None:
        """Take the lease. Does nothing if this object holds it already.

        Raises:
            FolderTaken: another run holds it. The message names its host, process and start time.
            OSError: the folder cannot be written.
        """
        if self._held:
            return
        atomic_io.make_folder(self._path.parent)
        # Write a separate file, then link it to the lease's name. Readers never see a partial lease, and of
        # two concurrent runs only one can create the link.
        draft = self._path.with_name(f"{LEASE}.{self.nonce}")
        content = json.dumps(own_fields(self.nonce)) + "\n"
        files.write_durable(draft, content.encode())
        try:
            while not self._take(draft):
                self._free_or_refuse(draft)
        finally:
            draft.unlink(missing_ok=True)
        self._hold()

    def _hold(self) -> None:
        self._held = True
        self._pid = os.getpid()
        # atexit also runs after an error. A killed process does not release its lease, but others can see
        # that it is dead.
        atexit.register(self.release)
        threading.Thread(target=self._beat, name="checkpoint-lease", daemon=True).start()

    def check(self) -> None:
        """Check before a write that this run still holds the lease.

        Raises:
            ConfigError: another run holds it. The message names that run.
            OSError: the lease could be neither read nor written again for ``PATIENCE_SECONDS``.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                holder = self._find_own(with_folder=True)
                if holder.get("nonce") == self.nonce and self._held:
                    return
                if holder or not self._held:
                    text = fix_first(
                        f"the lease {self._path} of this run was taken over by {describe(holder)}",
                        "set a separate job.dump_folder for each run",
                        "two runs must not write one folder, and this one writes nothing more",
                    )
                    raise ConfigError(text)
                error = OSError(errno.EIO, "the file is not a lease", str(self._path))
            except OSError as found:
                error = found
            if time.monotonic() >= deadline:
                raise error
            time.sleep(PATIENCE_SECONDS / 100)

    def _find_own(self, with_folder: bool = False) -> dict[str, Any]:
        """Return the fields of the lease. If the file is gone, write it again, and with
        ``with_folder`` its folder too.

        Raises:
            OSError: it cannot be read or written.
        """
        try:
            return _read(self._path)
        except FileNotFoundError:
            with self._writing:
                if self._held and not self._ended.is_set():
                    if with_folder:
                        atomic_io.make_folder(self._path.parent)
                    self._put_back()
            return _read(self._path)

    def _put_back(self) -> None:
        """Write the lease again unless another run has taken it meanwhile. Does not create the folder."""
        draft = self._path.with_name(f"{LEASE}.{self.nonce}")
        content = json.dumps(own_fields(self.nonce)) + "\n"
        files.write_durable(draft, content.encode())
        try:
            if self._take(draft):
                logger.warning(
                    f"the lease {self._path} had disappeared and was written again; find out what deletes files there",
                )
        finally:
            draft.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the lease, so the next run can start immediately."""
        atexit.unregister(self.release)
        self._ended.set()
        # A forked child inherits the atexit handler and this object, but must not remove its parent's lease.
        is_own_process = self._pid == os.getpid()
        if self._held and is_own_process and read(self._path).get("nonce") == self.nonce:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._held = False

    def _take(self, draft: Path) -> bool:
        try:
            os.link(draft, self._path)  # fails if the name exists, also on network filesystems
        except FileExistsError:
            return False
        return True

    def _free_or_refuse(self, draft: Path) -> None:
        """Remove the lease of a dead holder.

        Raises:
            FolderTaken: the holder is alive.
        """
        self._refuse_special_file()
        holder = read(self._path)
        reason = why_free(holder)
        if not reason and must_be_watched(holder):
            silence = self._wait_for_a_beat(draft)
            if silence is None:
                # The holder released the lease.
                return
            reason = silence
        if not reason:
            raise self._taken_by(holder)
        if reason == DEAD:
            self.dead.add(str(holder.get("nonce")))
        level = logging.WARNING
        if holder.get("pid") == os.getpid():
            level = logging.INFO
        logger.log(level, f"took over {self._path} of {describe(holder)}: {reason}")

        # A third run may have taken the lease since it was read. Rename the file instead of
        # removing it, and put it back if it belongs to that run.
        away = draft.with_name(f"{draft.name}.old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, away)
            if read(away).get("nonce") != holder.get("nonce"):
                with contextlib.suppress(FileExistsError):
                    os.link(away, self._path)
        away.unlink(missing_ok=True)

    def refuse_if_held_here(self) -> None:
        """Reject a folder that a live process of this host holds. Writes nothing.

        Raises:
            FolderTaken: the message names the run that holds it.
        """
        self._refuse_special_file()
        holder = read(self._path)
        if holder and is_seen_from_here(holder) and not why_free(holder):
            raise self._taken_by(holder)

    def _refuse_special_file(self) -> None:
        """Reject a name that is taken by something else than a file, such as a pipe or a link.

        No run has written it, so watching it for a heartbeat would only delay the start.

        Raises:
            ConfigError: the message names the entry and its kind.
        """
        if isinstance(self._path, ObjectPath):
            return
        try:
            mode = os.lstat(self._path).st_mode
        except OSError:
            return
        if not stat.S_ISREG(mode):
            rule = f"is {bounded_reads.name_of_kind(mode)}, not the lease of a run"
            fix = "remove it, or use another job.dump_folder"
            raise ConfigError(Problem("job.dump_folder", str(self._path), rule, fix))

    def _taken_by(self, holder: dict[str, Any]) -> FolderTaken:
        return FolderTaken(
            f"job.dump_folder: {self._path.parent} is being written by {describe(holder)}; "
            "stop that run, or set another job.dump_folder for this one"
        )

    def _wait_for_a_beat(self, draft: Path) -> str | None:
        """Watch a lease whose process cannot be seen from here.

        Returns:
            The reason why the lease is free, "" if its holder is alive, or None if the holder released it.
        """
        logger.info(
            f"{self._path} belongs to another host: waiting up to {STALE_SECONDS:.0f} s for a sign of life",
        )
        seen = _modified(self._path)
        start = time.monotonic()
        while seen is not None:
            # Half the time is enough if the file is also a minute old by the filesystem's clock.
            silent = time.monotonic() - start
            age = _age_seconds(self._path, draft) or 0.0
            is_silent = silent >= STALE_SECONDS
            is_old_and_silent = silent >= STALE_SECONDS / 2 and age >= STALE_SECONDS
            if is_silent or is_old_and_silent:
                return f"no heartbeat for {max(age, silent):.0f} s (watched for {silent:.0f} s)"
            time.sleep(min(1.0, BEAT_SECONDS))
            now = _modified(self._path)
            if now is None:
                return None
            if now != seen:
                return ""
        return None

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # An unreadable lease may still belong to this run.
            with contextlib.suppress(OSError):
                nonce = self._find_own().get("nonce", self.nonce)
                if nonce != self.nonce:
                    # Another run has the lease. The next save reports it.
                    return
                os.utime(self._path)


def own_fields(nonce: str) -> dict[str, Any]:
    """Return the fields of a lease that this process writes."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "pid_namespace": process_identity.pid_namespace(),
        "boot": process_identity.boot_id(),
        "nonce": nonce,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def why_free(holder: dict[str, Any]) -> str:
    """Return the reason why a lease is free, or "" if it is held or must be watched."""
    if not is_seen_from_here(holder):
        return ""
    pid = holder.get("pid")
    if not isinstance(pid, int) or not _is_alive(pid):
        return DEAD
    if _process_start(pid) != holder.get("process_start"):
        # Another process has the PID now.
        return DEAD
    if pid == os.getpid():
        return "an earlier run of this process did not release it"
    return ""


def must_be_watched(holder: dict[str, Any]) -> bool:
    """True if a holder's death can only be detected by watching its heartbeats.

    This is the case if its process is not visible, or if its process ID may have been reused.
    """
    if not is_seen_from_here(holder):
        return True
    return not holder.get("process_start")


def is_seen_from_here(holder: dict[str, Any]) -> bool:
    """True if a holder's process is visible: same host, same boot and same PID namespace.

    The host name is not sufficient. Machines made from one image may share it, and their first PID namespaces
    have the same number.
    """
    local_identity = {
        "pid_namespace": process_identity.pid_namespace(),
        "boot": process_identity.boot_id(),
    }
    if holder.get("host") != socket.gethostname():
        return False
    # A field that is missing does not count as different.
    return all(holder.get(key, value) == value for key, value in local_identity.items())


def is_held(folder: Path) -> bool:
    """True if a run holds a folder. Does not watch the lease, so a holder on another host counts as alive."""
    holder = read(folder / LEASE)
    return bool(holder) and not why_free(holder)


def read(path: Path | ObjectPath) -> dict[str, Any]:
    """Return the fields of a lease, or {} if it is missing, unreadable, or not written by shardtrain."""
    try:
        return _read(path)
    except OSError:
        return {}


def _read(path: Path | ObjectPath) -> dict[str, Any]:
    if isinstance(path, ObjectPath):
        return parse(path.read_bytes()[:4096])
    return parse(bounded_reads.start(path, 4096))


def parse(data: bytes) -> dict[str, Any]:
    """Return the fields of a lease, or {} if shardtrain did not write it."""
    try:
        fields = checked_json.parse(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def describe(holder: dict[str, Any]) -> str:
    """Return a short description of a lease's holder. It is safe to print, even if the file was
    tampered with.
    """
    if not holder:
        return "an unknown run"
    text = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('started')}"
    return "".join(c for c in text[:200] if c.isprintable())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    stat = process_identity.read_stat(pid)
    return stat is None or not stat.has_ended


def _process_start(pid: int) -> int:
    """Return the start time of a process in ticks since boot, or 0 if unknown."""
    stat = process_identity.read_stat(pid)
    return stat.start_ticks if stat is not None else 0


def _modified(path: Path) -> int | None:
    """Return a file's modification time in ns by the filesystem's clock, or None if the file is gone."""
    try:
        # Open the file, because this makes an NFS client query its server. A plain stat may come from the
        # client's cache.
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime_ns
        return None


def _age_seconds(path: Path, draft: Path) -> float | None:
    """Return the seconds since a file was modified, by the filesystem's clock, or None if it is gone."""
    # Touch a file of this run to read the filesystem's clock.
    os.utime(draft)
    now = _modified(draft)
    then = _modified(path)
    if now is None or then is None:
        return None
    return (now - then) / 1e9
