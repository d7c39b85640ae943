"""The lease of a folder allows one writer: who holds it, who may take it over, and who must stop."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import logging
import multiprocessing
import os
import signal
import socket
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
from small_checkpoint import checkpoints, save, world_of_one

from shardtrain.checkpoint import lease, retention
from shardtrain.checkpoint.lease import Lease
from shardtrain.utils.errors import ConfigError


@pytest.fixture
def group() -> Iterator[None]:
    with world_of_one():
        yield


def write(folder: Path, **fields: Any) -> None:
    """Write a lease that belongs to another process."""
    lease_fields = {
        "host": "another.host",
        "pid": 1,
        "process_start": 5,
        "nonce": "aa",
        "started": "2026-01-01T00:00:00Z",
    }
    (folder / "lease.json").write_text(json.dumps({**lease_fields, **fields}))


def hold(folder: Path, ready: Any) -> None:
    Lease(folder).acquire()
    ready.send_bytes(b"held")
    signal.pause()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """A separate process that holds the lease of ``tmp_path``."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(tmp_path, sender), daemon=True)
    process.start()
    assert receiver.recv_bytes() == b"held"
    yield process
    process.kill()
    process.join(patience.seconds(10))


def test_second_run_is_rejected_with_the_holder_of_the_lease(tmp_path: Path, holder: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"being written by process {holder.pid} on .* since 20"
    ) as caught:
        Lease(tmp_path).acquire()
    assert caught.value.exit_code == 2
    assert "job.dump_folder" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lease.json"], "no temporary files remain"


def test_lease_of_a_killed_process_is_taken_over_and_logged(
    tmp_path: Path, holder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(patience.seconds(10))
    new_lease = Lease(tmp_path)
    new_lease.acquire()

    assert "took over" in caplog.text
    assert f"process {holder.pid}" in caplog.text
    assert "no longer exists" in caplog.text

    new_lease.check()
    new_lease.release()
    assert list(tmp_path.iterdir()) == []


def test_reused_process_id_does_not_count_as_the_holder(tmp_path: Path) -> None:
    write(tmp_path, host=socket.gethostname(), pid=os.getppid(), process_start=1)
    new_lease = Lease(tmp_path)
    new_lease.acquire()
    new_lease.check()  # raises if the lease belongs to another holder


def test_lease_of_another_host_is_respected_while_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    beats = iter(range(100, 200))
    monkeypatch.setattr(lease, "_modified", lambda path: next(beats))

    with pytest.raises(ConfigError, match="process 1 on another.host"):
        Lease(tmp_path).acquire()


class Watch:
    """Fake monotonic clock that ``sleep`` advances. ``at`` is called with the seconds since the start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: Any = lambda now: None) -> None:
        self.now, self._at = 1000.0, at
        clock = {"monotonic": lambda: self.now, "sleep": self._sleep}
        formatting = {name: getattr(time, name) for name in ("strftime", "gmtime")}
        monkeypatch.setattr(lease, "time", types.SimpleNamespace(**clock, **formatting))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self._at(self.now - 1000)


@pytest.mark.parametrize(
    ("seconds_old", "watched"),
    [(3600, 30), (45, 30), (20, 40), (0, 60), (-86400, 60)],
    ids=["long silent", "silent", "beaten", "new", "in the future"],
)
def test_lease_of_another_host_is_taken_over_after_observed_silence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds_old: int,
    watched: int,
) -> None:
    write(tmp_path)
    path = tmp_path / "lease.json"

    # The clock of the filesystem agrees with the clock of this host.
    def age_seconds(path: Path, own_path: Path) -> float:
        return seconds_old + watch.now - 1000

    watch = Watch(monkeypatch)
    monkeypatch.setattr(lease, "_age_seconds", age_seconds)
    Lease(tmp_path).acquire()

    assert watch.now - 1000 == watched
    assert f"(watched for {watched} s)" in caplog.text
    assert lease.read(path)["pid"] == os.getpid()


@pytest.mark.parametrize("jump", [86400.0, 61.0, -86400.0])
def test_clock_jump_does_not_expire_a_lease_that_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    write(tmp_path)
    path = tmp_path / "lease.json"
    # time of the last beat, before the filesystem's clock jumped
    last_beat = path.stat().st_mtime - jump
    os.utime(path, (last_beat, last_beat))
    Watch(monkeypatch, lambda now: os.utime(path) if now == 9.0 else None)  # the next beat

    with pytest.raises(ConfigError, match="process 1 on another.host"):
        Lease(tmp_path).acquire()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"pid": "x", "host": []}', "[" * 10_000, "\xff\xfe"]
)
def test_invalid_lease_is_respected_until_it_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    Watch(monkeypatch)
    path = tmp_path / "lease.json"
    path.write_bytes(text.encode("latin-1"))
    os.utime(path, (path.stat().st_mtime - 61,) * 2)
    new_lease = Lease(tmp_path)
    new_lease.acquire()
    new_lease.check()  # raises if the lease belongs to another holder


def test_holder_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    own_lease = Lease(tmp_path)
    own_lease.acquire()
    path = tmp_path / "lease.json"
    os.utime(path, (0, 0))
    for _ in range(1000):
        if path.stat().st_mtime > 0:
            break
        own_lease._ended.wait(0.01)

    assert path.stat().st_mtime > 0

    own_lease.release()


def test_silent_process_that_is_alive_on_this_host_keeps_its_lease(tmp_path: Path) -> None:
    parent = os.getppid()
    write(
        tmp_path, host=socket.gethostname(), pid=parent, process_start=lease._process_start(parent)
    )
    os.utime(tmp_path / "lease.json", (0, 0))

    with pytest.raises(ConfigError, match=f"being written by process {parent}"):
        Lease(tmp_path).acquire()


@pytest.mark.parametrize(
    "elsewhere", [{"pid_namespace": "pid:[1]"}, {"boot": "of another machine"}]
)
def test_process_in_another_container_or_machine_with_this_host_name_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: dict[str, str]
) -> None:
    write(tmp_path, **{**lease.own_fields("aa"), "pid": 2**22 - 1, **elsewhere})
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    beats = iter(range(100, 200))
    monkeypatch.setattr(lease, "_modified", lambda path: next(beats))

    with pytest.raises(ConfigError, match="being written by process"):
        Lease(tmp_path).acquire()


@pytest.mark.parametrize("removed", ["lease", "folder"])
def test_deleted_lease_is_written_again_by_its_holder(
    tmp_path: Path, removed: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoint"
    own_lease = Lease(folder)
    own_lease.acquire()
    (folder / "lease.json").unlink()
    if removed == "folder":
        folder.rmdir()
    # At its next heartbeat, the holder finds its lease missing and writes it again.
    own_lease.check()

    assert lease.read(folder / "lease.json")["nonce"] == own_lease.nonce
    assert "written again" in caplog.text
    with pytest.raises(ConfigError, match="another job.dump_folder"):
        acquire_in_another_process(folder)

    own_lease.release()
    assert list(folder.iterdir()) == []


def acquire_in_another_process(folder: Path) -> None:
    """Try to acquire the lease in a concurrent process, and reraise its error."""
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("fork")
    ) as pool:
        pool.submit(acquire, folder).result(timeout=patience.seconds(30))


def acquire(folder: Path) -> None:
    Lease(folder).acquire()


def test_unreadable_lease_is_retried_and_renewal_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lease, "PATIENCE_SECONDS", 0.5)
    own_lease = Lease(tmp_path)
    path = tmp_path / "lease.json"
    own_lease.acquire()
    read = lease._read
    failures_left = 0

    def fail_to_read(path: Path) -> dict[str, Any]:
        nonlocal failures_left
        if failures_left:
            failures_left -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    monkeypatch.setattr(lease, "_read", fail_to_read)

    # A few failures are retried.
    failures_left = 5
    own_lease.check()

    # Failures that last longer than the patience are raised.
    failures_left = 10**9
    with pytest.raises(OSError, match="Stale file handle"):
        own_lease.check()

    # The thread that renews the lease is still alive after the failures.
    failures_left = 0
    os.utime(path, (0, 0))
    patience.wait_for(lambda: path.stat().st_mtime > 0, 10, "the next beat")
    own_lease.check()
    own_lease.release()


@pytest.mark.usefixtures("group")
def test_writer_that_lost_its_lease_stops_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoints(tmp_path)
    save(manager, 2)
    rename = os.rename
    prepare = manager._prepare

    def prepare_and_lose_the_lease(*arguments: Any) -> Any:
        draft = prepare(*arguments)
        write(tmp_path / "checkpoint", nonce="bb")
        return draft

    monkeypatch.setattr(manager, "_prepare", prepare_and_lose_the_lease)
    with pytest.raises(ConfigError, match="was taken over by process 1 on another.host"):
        save(manager, 4)
    assert os.rename is rename
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["lease.json", "step-2"]

    # The lease of the other process is not deleted.
    manager.close()
    assert (tmp_path / "checkpoint/lease.json").exists()


@pytest.mark.usefixtures("group")
def test_load_only_run_needs_no_lease(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = checkpoints(tmp_path)
    save(manager, 2)
    write(tmp_path / "checkpoint")
    with caplog.at_level(logging.WARNING):
        assert checkpoints(tmp_path, load_only=True).to_continue() is not None

    assert not caplog.text


def test_sweep_keeps_recent_entries_and_those_of_the_holder(tmp_path: Path) -> None:
    names = [
        "step-1.tmp-aa",
        "step-2.tmp-bb",
        "step-3.trash-cc",
        "step-4",
        "step-5.tmp-dd",
        "other",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    now = (tmp_path / "step-1.tmp-aa").stat().st_mtime
    young = tmp_path / "step-5.tmp-dd/rank-00000.bin"
    young.touch()
    os.utime(young, (now + 3000, now + 3000))
    deleted = retention.sweep(tmp_path, "aa", now + 3700)

    deleted_names = sorted(path.name for path in deleted)
    remaining_names = sorted(path.name for path in tmp_path.iterdir())
    assert deleted_names == ["step-2.tmp-bb", "step-3.trash-cc"]
    assert remaining_names == ["other", "step-1.tmp-aa", "step-4", "step-5.tmp-dd"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    # The path of a socket has at most 107 bytes, so bind a short relative one.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("create", "kind"),
    [
        (pipe, "is a pipe"),
        (bound_socket, "is a socket"),
        (device, "is a link"),
        (lambda path: path.symlink_to("gone"), "is a link"),
        (lambda path: path.symlink_to(path.name), "is a link"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
    ids=["pipe", "socket", "device", "dangling link", "link to itself", "folder"],
)
def test_special_file_in_place_of_a_lease_is_refused_without_watching_it(
    create: Callable[[Path], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Lease, draft: Path) -> None:
        raise AssertionError("the lease was watched")

    monkeypatch.setattr(Lease, "_wait_for_a_beat", fail)
    create(tmp_path / "lease.json")
    lease = Lease(tmp_path)
    for refuse in (lease.acquire, lease.refuse_if_held_here):
        with pytest.raises(ConfigError) as refused:
            refuse()
        message = str(refused.value)
        assert "lease.json" in message
        assert f"{kind}, not the lease of a run" in message
        assert message.endswith("remove it, or use another job.dump_folder")

    assert [path.name for path in tmp_path.iterdir()] == ["lease.json"]
