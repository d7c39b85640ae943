"""Who may write a folder of checkpoints: one run at a time holds ``lease.json``, and keeps saying that it lives.

The holder touches the file every ten seconds. A lease is free when its process is dead (seen from the same host) or,
on another host, when nobody has touched it while it was watched. How long that is, is counted by the watcher's own
monotonic clock: a minute, or half of it where the filesystem's clock says too that the file was silent for a minute. No
clock that jumps, here or there, takes a lease from a run that lives. What cannot be read is not another's: the holder
keeps beating, looks again, and writes a lease that is gone again.
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
import threading
import time
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import files
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.utils import atomic_io, checked_json, process, reading
from shardtrain.utils.errors import ConfigError, FolderTaken, fix_first
from shardtrain.utils.log import logger

LEASE = "lease.json"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""Six missed beats."""
DEAD = "its process no longer exists"
PATIENCE_SECONDS = 20.0
"""How long a holder looks for its lease in storage that does not answer."""


class Lease:
    """The right to write below ``folder``; ``nonce`` names this holder and no other."""

    def __init__(self, folder: Path | ObjectPath) -> None:
        self.nonce = secrets.token_hex(6)
        self._path: Any = folder / LEASE
        self._held = False
        self._pid = 0
        self.dead: set[str] = set()
        """Holders before this one that were seen to be dead."""
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def acquire(self) -> None:
        """Take the lease, or do nothing when it is held already.

        Raises:
            FolderTaken: when another run holds it; names its host, process and start.
            OSError: when the folder cannot be written.
        """
        if self._held:
            return
        atomic_io.make_folder(self._path.parent)
        # Written beside it, then linked to its name: a lease is there whole, and of one of two that try at once.
        own = self._path.with_name(f"{LEASE}.{self.nonce}")
        files.write_whole(own, (json.dumps(own_fields(self.nonce)) + "\n").encode())
        try:
            while not self._take(own):
                self._free_or_refuse(own)
        finally:
            own.unlink(missing_ok=True)
        self._hold()

    def _hold(self) -> None:
        self._held = True
        self._pid = os.getpid()
        # Given back after an error too; a killed holder is found dead.
        atexit.register(self.release)
        threading.Thread(target=self._beat, name="checkpoint-lease", daemon=True).start()

    def check(self) -> None:
        """Stop a writer that lost the lease.

        Raises:
            ConfigError: another run holds it; names that run.
            OSError: for ``PATIENCE_SECONDS`` nobody could read it, or write it again.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                holder = self._find_own(with_folder=True)
                if holder.get("nonce") == self.nonce and self._held:
                    return
                if holder or not self._held:
                    raise ConfigError(
                        fix_first(
                            f"the lease {self._path} of this run was taken over by {describe(holder)}",
                            "give each run its own job.dump_folder",
                            "two runs must not write one folder, and this one writes nothing more",
                        )
                    )
                error = OSError(errno.EIO, "the file is not a lease", str(self._path))
            except OSError as found:
                error = found
            if time.monotonic() >= deadline:
                raise error
            time.sleep(PATIENCE_SECONDS / 100)

    def _find_own(self, with_folder: bool = False) -> dict[str, Any]:
        """What the lease says, which is written again where it is gone, or its folder too; raises OSError."""
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
        """Write the lease again, unless another run was faster; a folder that is gone is made by the next save."""
        own = self._path.with_name(f"{LEASE}.{self.nonce}")
        files.write_whole(own, (json.dumps(own_fields(self.nonce)) + "\n").encode())
        try:
            if self._take(own):
                logger.warning(f"the lease {self._path} was gone and is written again: what removes files there?")
        finally:
            own.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lease back, so that the next run need not wait."""
        atexit.unregister(self.release)
        self._ended.set()
        # A fork of the holder inherits ``atexit`` and this object, and must not give back what is not its own.
        if self._held and self._pid == os.getpid() and read(self._path).get("nonce") == self.nonce:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._held = False

    def _take(self, own: Path) -> bool:
        try:
            os.link(own, self._path)  # fails where the name exists, on network filesystems too
        except FileExistsError:
            return False
        return True

    def _free_or_refuse(self, own: Path) -> None:
        """Remove the lease of a holder that is dead, or raise FolderTaken."""
        holder = read(self._path)
        reason = why_free(holder)
        if not reason and must_be_watched(holder):
            silence = self._wait_for_a_beat(own)
            if silence is None:
                return  # it was given back
            reason = silence
        if not reason:
            raise self._taken_by(holder)
        if reason == DEAD:
            self.dead.add(str(holder.get("nonce")))
        level = logging.INFO if holder.get("pid") == os.getpid() else logging.WARNING
        logger.log(level, f"took over {self._path} of {describe(holder)}: {reason}")

        # Renamed and not removed: between the look and now a third run may have taken the lease over, and what was
        # moved away is then given back to it.
        away = own.with_name(f"{own.name}.old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, away)
            if read(away).get("nonce") != holder.get("nonce"):
                with contextlib.suppress(FileExistsError):
                    os.link(away, self._path)
        away.unlink(missing_ok=True)

    def refuse_if_held_here(self) -> None:
        """Refuse, before anything is written, a folder whose holder is a live process of this host.

        Raises:
            FolderTaken: names that run.
        """
        holder = read(self._path)
        if holder and is_seen_from_here(holder) and not why_free(holder):
            raise self._taken_by(holder)

    def _taken_by(self, holder: dict[str, Any]) -> FolderTaken:
        return FolderTaken(
            f"job.dump_folder: {self._path.parent} is being written by {describe(holder)}; stop that run, or give "
            "this one another job.dump_folder"
        )

    def _wait_for_a_beat(self, own: Path) -> str | None:
        """Watch a lease whose process nobody here can see: empty when its holder lives, None when it is given back."""
        logger.info(f"{self._path} belongs to another host: waiting up to {STALE_SECONDS:.0f} s for a sign of life")
        seen = _modified(self._path)
        start = time.monotonic()
        while seen is not None:
            # Half the time is enough where the filesystem's own clock says too that nobody has touched it for a minute.
            silent = time.monotonic() - start
            age = _age_seconds(self._path, own) or 0.0
            if silent >= STALE_SECONDS or (silent >= STALE_SECONDS / 2 and age >= STALE_SECONDS):
                return f"no sign of life for {max(age, silent):.0f} s, {silent:.0f} s of them watched"
            time.sleep(min(1.0, BEAT_SECONDS))
            now = _modified(self._path)
            if now != seen:
                return None if now is None else ""
        return None

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # which does not make it another's
                if self._find_own().get("nonce", self.nonce) != self.nonce:
                    return  # lost: the next save says so
                os.utime(self._path)


def own_fields(nonce: str) -> dict[str, Any]:
    """What a lease of this process says."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "pid_namespace": _pid_namespace(),
        "boot": process.boot_id(),
        "nonce": nonce,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def why_free(holder: dict[str, Any]) -> str:
    """Why a lease may be taken, as far as looking once can tell; empty where it may not, or must be watched."""
    if is_seen_from_here(holder):
        pid = holder.get("pid")
        if not isinstance(pid, int) or not _is_alive(pid) or _process_start(pid) != holder.get("process_start"):
            return DEAD
        if pid == os.getpid():
            return "an earlier run of this process did not give it back"
    return ""


def must_be_watched(holder: dict[str, Any]) -> bool:
    """Whether only silence tells that a holder is dead: its process cannot be seen, or its number may be another's."""
    return not is_seen_from_here(holder) or not holder.get("process_start")


def is_seen_from_here(holder: dict[str, Any]) -> bool:
    """Whether a holder's process can be seen: of this host, and not of a container with process numbers of its own.

    Machines made of one image may share their name, and the first namespace has the same number on each.
    """
    own = {"pid_namespace": _pid_namespace(), "boot": process.boot_id()}
    return holder.get("host") == socket.gethostname() and all(holder.get(key, own[key]) == own[key] for key in own)


def is_held(folder: Path) -> bool:
    """Whether a run writes a folder, or may: nobody is asked twice, so one of another host counts as alive."""
    holder = read(folder / LEASE)
    return bool(holder) and not why_free(holder)


def read(path: Path | ObjectPath) -> dict[str, Any]:
    """What a lease says; empty where there is none, or not one of shardtrain's, or it cannot be read."""
    try:
        return _read(path)
    except OSError:
        return {}


def _read(path: Path | ObjectPath) -> dict[str, Any]:
    if isinstance(path, ObjectPath):
        return parse(path.read_bytes()[:4096])
    return parse(reading.start(path, 4096))


def parse(data: bytes) -> dict[str, Any]:
    """The fields of a lease; none where it is not shardtrain's."""
    try:
        fields = checked_json.parse(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def describe(holder: dict[str, Any]) -> str:
    """The holder of a lease in a few words, whatever its file holds."""
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
    # A process that ended and whose parent has not waited for it yet (a zombie) is dead.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _process_start(pid: int) -> int:
    """When a process started, in ticks since boot; 0 where the system does not say. A number used again has another."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _pid_namespace() -> str:
    """What numbers processes here; empty where the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _modified(path: Path) -> int | None:
    """When a file was touched, by the clock of its filesystem; None when it is gone."""
    try:
        # Opened, since NFS asks its server then; stat alone may be answered from this client's cache.
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime_ns
        return None


def _age_seconds(path: Path, own: Path) -> float | None:
    """Seconds since a file was touched, by the clock of its filesystem; None when it is gone."""
    # What time it is by that clock, a file of this run's tells that is touched now.
    os.utime(own)
    now = _modified(own)
    then = _modified(path)
    return None if now is None or then is None else (now - then) / 1e9
