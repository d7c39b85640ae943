"""Connections to many ssh hosts are opened in waves. The command is sent when all hosts have answered."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import patience
import pytest

from shardtrain import __version__
from shardtrain.config.schema.launch_options import LaunchSSH
from shardtrain.launch import remote_agent
from shardtrain.launch.hostfile import Host
from shardtrain.launch.platforms import ssh, ssh_connections
from shardtrain.launch.platforms.ssh import HostCommand
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.process import SECRET

HOSTS = 30
AT_ONCE = 4


def plans(folder, answer):
    """Return hosts simulated by local shells. Each records the number of connections in progress."""
    (folder / "pending").mkdir()
    script = (
        f"cd {folder}; touch pending/$$; ls pending | wc -l >> seen; sleep 0.05; rm pending/$$; {answer}; "
        'read job; case "$job" in "{"*) ls answered | wc -l >> received;; esac; exit 0'
    )
    (folder / "answered").mkdir()
    return [
        HostCommand(Host(f"host-{number}"), ("sh", "-c", script), ("true",), {}, {}, (), 5)
        for number in range(HOSTS)
    ]


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setattr(ssh_connections, "HOSTS_AT_ONCE", AT_ONCE)
    return LaunchSSH()


def test_hosts_are_contacted_in_waves_and_started_when_all_have_answered(tmp_path, options):
    ready = f"touch answered/$$; echo {remote_agent.READY} {__version__} -"
    assert ssh_connections.SshConnections(plans(tmp_path, ready), options, tmp_path)() == 0

    hosts_at_once = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(hosts_at_once) == HOSTS
    assert 1 < max(hosts_at_once) <= AT_ONCE
    assert (tmp_path / "received").read_text().split() == [str(HOSTS)] * HOSTS


def test_no_host_receives_the_command_if_one_in_a_later_wave_fails(tmp_path, options):
    last = (
        "[ $(ls answered | wc -l) -lt 20 ] || { echo no python here; exit 3; }; touch answered/$$; "
    )
    ready = f"{last} echo {remote_agent.READY} {__version__} -"

    with pytest.raises(ConfigError, match="cannot start shardtrain: no python here"):
        ssh_connections.SshConnections(plans(tmp_path, ready), options, tmp_path)()
    assert not (tmp_path / "received").exists()


def host(name: str, *script: str) -> HostCommand:
    return HostCommand(Host(name), ("sh", "-c", "; ".join(script)), ("true",), {}, {}, (), 5)


def test_all_hosts_that_cannot_start_are_named_with_their_reasons(tmp_path, monkeypatch, options):
    monkeypatch.setattr(ssh_connections, "START_SECONDS", 3.0)
    options = dataclasses.replace(options, connect_timeout_seconds=1)
    received = tmp_path / "received"
    plans = [
        host(
            "good",
            f"echo {remote_agent.READY} {__version__} -",
            f"read job && echo $job >> {received}",
        ),
        host("closed", "echo connect: Connection refused", "exit 255"),
        host("bare-1", "echo no python here", "exit 3"),
        host("old", f"echo {remote_agent.READY} 9.8.7 -", "read job"),
        host("bare-2", "sleep 0.5", "echo no python here", "exit 3"),
        host("silent", "exec sleep 100"),
        host("key-1", "echo 'me@key-1: Permission denied (publickey).'", "exit 255"),
        host("key-2", "echo 'me@key-2: Permission denied (publickey).'", "exit 255"),
    ]

    with pytest.raises(ConfigError) as raised:
        ssh_connections.SshConnections(plans, options, tmp_path)()

    lines = str(raised.value).splitlines()
    reasons = {
        'host="closed"': "cannot be reached by ssh: connect: Connection refused",
        'host="bare-1, bare-2"': "cannot start shardtrain: no python here",
        'host="old"': "has shardtrain 9.8.7",
        'host="silent"': "did not start shardtrain within 4 s",
        'host="key-1, key-2"': "cannot be reached by ssh: me@key-1: Permission denied (publickey).",
    }

    assert len(lines) == len(reasons)
    for line, (name, reason) in zip(lines, reasons.items(), strict=True):
        assert line.startswith(f"{name} {reason}")
    assert not received.exists() or "command" not in received.read_text(), (
        "a host received the command"
    )


SAVED = "stopped[75]: saved"
NOT_SAVED = "stopped[76]: not saved"
FAILED = "error[6]: rank 1 failed"
# name: (last line and exit status of each of two hosts after a request to stop, exit status of the
# launcher)
STOPS = {
    "all ranks have saved": ((SAVED, 75), (SAVED, 75), 75),
    "a host is killed once it has reported": ((SAVED, 137), (SAVED, 75), 75),
    "both are": ((SAVED, 137), (SAVED, 137), 75),
    "a host is killed before": (("", 137), ("", 137), 76),
    "the request comes while Python starts": (("", 143), ("", 143), 75),
    "the same on one host": (("", 143), (SAVED, 75), 75),
    "the time was over": ((NOT_SAVED, 76), (NOT_SAVED, 137), 76),
    "the connections are lost after the report": ((SAVED, 255), (SAVED, 255), 75),
    "and before it": (("", 255), ("", 255), 76),
    "a rank fails meanwhile": ((FAILED, 6), (FAILED, 137), 6),
}


@pytest.mark.parametrize("name", STOPS)
def test_the_launcher_ends_with_the_code_that_hosts_wrote_to_exit_json(name, tmp_path, options):
    *hosts, expected = STOPS[name]
    begun = [tmp_path / f"begun-{number}" for number in range(2)]
    plans = []
    for number, (line, status) in enumerate(hosts):
        plan = host(
            f"host-{number}",
            f"echo {remote_agent.READY} {__version__} -",
            f"read job; touch {begun[number]}",
            'while read line; test "$line" != stop; do :; done',
            f"echo '{line}'; exit {status}",
        )
        plans.append(plan)

    def interrupt() -> None:
        patience.wait_for(lambda: all(path.exists() for path in begun), 30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert ssh_connections.SshConnections(plans, options, tmp_path)() == expected

    thread.join()


def test_the_plan_shows_how_the_secret_is_sent_without_its_value(monkeypatch):
    monkeypatch.setenv(SECRET, "of-the-user")
    plan = ssh.text([host("node1", "true")])
    assert f'"{SECRET}": "***"' in plan
    assert "standard input" in plan.splitlines()[0]
    assert "of-the-user" not in plan
