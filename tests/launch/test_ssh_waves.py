"""Many hosts by ssh: connections are made a wave at a time, and the command comes when all hosts have answered."""

from __future__ import annotations

import pytest

from shardtrain import __version__
from shardtrain.config.schema.launch import LaunchSSH
from shardtrain.launch import remote_agent
from shardtrain.launch.hostfile import Host
from shardtrain.launch.platforms import ssh_connections
from shardtrain.launch.platforms.ssh import Plan
from shardtrain.utils.errors import ConfigError

HOSTS, AT_ONCE = 30, 4


def plans(folder, answer):
    """Hosts that are shells of this machine: each notes how many are being connected when it is."""
    (folder / "pending").mkdir()
    script = (
        f"cd {folder}; touch pending/$$; ls pending | wc -l >> seen; sleep 0.05; rm pending/$$; {answer}; "
        'read job; case "$job" in "{"*) ls answered | wc -l >> told;; esac; exit 0'
    )
    (folder / "answered").mkdir()
    return [Plan(Host(f"host-{number}"), ("sh", "-c", script), ("true",), {}, {}, (), 5) for number in range(HOSTS)]


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setattr(ssh_connections, "HOSTS_AT_ONCE", AT_ONCE)
    return LaunchSSH()


def test_hosts_are_reached_a_wave_at_a_time_and_told_when_all_have_answered(tmp_path, options):
    ready = f"touch answered/$$; echo {remote_agent.READY} {__version__} -"
    assert ssh_connections.Run(plans(tmp_path, ready), options, tmp_path)() == 0
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(seen) == HOSTS and 1 < max(seen) <= AT_ONCE
    assert (tmp_path / "told").read_text().split() == [str(HOSTS)] * HOSTS


def test_no_host_receives_anything_where_one_of_a_later_wave_does_not_answer(tmp_path, options):
    last = "[ $(ls answered | wc -l) -lt 20 ] || { echo no python here; exit 3; }; touch answered/$$; "
    ready = f"{last} echo {remote_agent.READY} {__version__} -"
    with pytest.raises(ConfigError, match="cannot start shardtrain: no python here"):
        ssh_connections.Run(plans(tmp_path, ready), options, tmp_path)()
    assert not (tmp_path / "told").exists()
