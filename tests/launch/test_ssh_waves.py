"""Many hosts by ssh: connections are made a wave at a time, and the command comes when all hosts have answered."""

from __future__ import annotations

import dataclasses

import pytest

from shardtrain import __version__
from shardtrain.config.schema.launch_options import LaunchSSH
from shardtrain.launch import remote_agent
from shardtrain.launch.hostfile import Host
from shardtrain.launch.platforms import ssh, ssh_connections
from shardtrain.launch.platforms.ssh import HostCommand
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.process import SECRET

HOSTS, AT_ONCE = 30, 4


def plans(folder, answer):
    """Hosts that are shells of this machine: each notes how many are being connected when it is."""
    (folder / "pending").mkdir()
    script = (
        f"cd {folder}; touch pending/$$; ls pending | wc -l >> seen; sleep 0.05; rm pending/$$; {answer}; "
        'read job; case "$job" in "{"*) ls answered | wc -l >> told;; esac; exit 0'
    )
    (folder / "answered").mkdir()
    return [
        HostCommand(Host(f"host-{number}"), ("sh", "-c", script), ("true",), {}, {}, (), 5) for number in range(HOSTS)
    ]


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setattr(ssh_connections, "HOSTS_AT_ONCE", AT_ONCE)
    return LaunchSSH()


def test_hosts_are_reached_a_wave_at_a_time_and_told_when_all_have_answered(tmp_path, options):
    ready = f"touch answered/$$; echo {remote_agent.READY} {__version__} -"
    assert ssh_connections.SshConnections(plans(tmp_path, ready), options, tmp_path)() == 0
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(seen) == HOSTS and 1 < max(seen) <= AT_ONCE
    assert (tmp_path / "told").read_text().split() == [str(HOSTS)] * HOSTS


def test_no_host_receives_anything_where_one_of_a_later_wave_does_not_answer(tmp_path, options):
    last = "[ $(ls answered | wc -l) -lt 20 ] || { echo no python here; exit 3; }; touch answered/$$; "
    ready = f"{last} echo {remote_agent.READY} {__version__} -"
    with pytest.raises(ConfigError, match="cannot start shardtrain: no python here"):
        ssh_connections.SshConnections(plans(tmp_path, ready), options, tmp_path)()
    assert not (tmp_path / "told").exists()


def host(name: str, *script: str) -> HostCommand:
    return HostCommand(Host(name), ("sh", "-c", "; ".join(script)), ("true",), {}, {}, (), 5)


def test_all_hosts_that_cannot_take_part_are_named_with_their_reasons(tmp_path, monkeypatch, options):
    monkeypatch.setattr(ssh_connections, "START_SECONDS", 3.0)
    options = dataclasses.replace(options, connect_timeout_seconds=1)
    told = tmp_path / "told"
    plans = [
        host("good", f"echo {remote_agent.READY} {__version__} -", f"read job && echo $job >> {told}"),
        host("closed", "echo connect: Connection refused", "exit 255"),
        host("bare-1", "echo no python here", "exit 3"),
        host("old", f"echo {remote_agent.READY} 9.8.7 -", "read job"),
        host("bare-2", "sleep 0.5", "echo no python here", "exit 3"),
        host("silent", "exec sleep 100"),
    ]
    with pytest.raises(ConfigError) as raised:
        ssh_connections.SshConnections(plans, options, tmp_path)()
    lines = str(raised.value).splitlines()
    reasons = {
        'host="closed"': "cannot be reached by ssh: connect: Connection refused",
        'host="bare-1, bare-2"': "cannot start shardtrain: no python here",
        'host="old"': "has shardtrain 9.8.7",
        'host="silent"': "did not start shardtrain within 4 s",
    }
    assert len(lines) == len(reasons)
    for line, (name, reason) in zip(lines, reasons.items(), strict=True):
        assert line.startswith(f"{name} {reason}")
    assert not told.exists() or "command" not in told.read_text(), "no host has begun"


def test_the_plan_shows_where_the_secret_travels_and_not_its_value(monkeypatch):
    monkeypatch.setenv(SECRET, "of-the-user")
    shown = ssh.text([host("node1", "true")])
    assert f'"{SECRET}": "***"' in shown and "standard input" in shown.splitlines()[0]
    assert "of-the-user" not in shown
