"""Limits and output streams of a process of this package."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardtrain.config.schema.launch_options import LaunchSSH
from shardtrain.launch.platforms import ssh_connections
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.process import allow_open_files

resource = pytest.importorskip("resource", reason="limits are those of a Unix")


def raised_from_few(sender: Any) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    sender.send((most, allow_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)))


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_limit_of_open_files_is_raised_to_the_maximum() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=raised_from_few, args=(sender,))
    child.start()
    child.join()
    maximum, returned, limits = receiver.recv()

    assert returned == maximum
    assert limits == (maximum, maximum)


def test_too_many_hosts_for_the_limit_of_open_files_are_refused_before_connecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_connections, "allow_open_files", lambda: 1024.0)
    monkeypatch.setattr(
        ssh_connections.SshConnections, "_start", lambda self: pytest.fail("a host was reached")
    )
    plans: list[Any] = [None] * 1024

    with pytest.raises(
        ConfigError,
        match=r"launch ssh connects to 1024 hosts, which requires 5220 open files, but 1024 are",
    ):
        ssh_connections.SshConnections(plans, LaunchSSH(), tmp_path)()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "ascii:replace"])
def test_unsupported_characters_of_a_terminal_are_escaped(encoding: str) -> None:
    """An encoding error of terminal output must not end a run. An error handler set by the user stays in effect."""
    code = "from shardtrain.utils.process import keep_streams; keep_streams(); print('größer → 漢')"
    names = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=names, capture_output=True, check=True)
    expected = {
        "ascii": b"gr\\xf6\\xdfer \\u2192 \\u6f22",
        "latin-1": "größer ".encode("latin-1") + b"\\u2192 \\u6f22",
        "utf-8": "größer → 漢".encode(),
        "ascii:replace": b"gr??er ? ?",
    }

    assert done.stdout.strip() == expected[encoding]
    assert not done.stderr
