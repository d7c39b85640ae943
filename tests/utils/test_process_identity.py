"""The identity of a process, by which a lease, a launcher and a barrier tell reused process IDs apart."""

from __future__ import annotations

import os
import subprocess
import sys

import patience

from shardtrain.utils import process_identity


def test_a_process_is_identified_until_it_has_ended() -> None:
    this_process = process_identity.read_stat()
    assert this_process == process_identity.read_stat(os.getpid())
    assert this_process is not None
    assert not this_process.has_ended

    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as child:
        # WNOWAIT keeps the child a zombie
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        zombie = process_identity.read_stat(child.pid)
        assert zombie is not None
        assert zombie.has_ended
        assert zombie.start_ticks >= this_process.start_ticks
        child.wait(timeout=patience.seconds(20))
        assert process_identity.read_stat(child.pid) is None


def test_a_machine_without_proc_has_no_identity(monkeypatch) -> None:
    def fail(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", fail)
    monkeypatch.setattr("os.readlink", fail)

    assert process_identity.read_stat() is None
    assert process_identity.boot_id() == os.uname().nodename
    assert process_identity.pid_namespace() == ""
