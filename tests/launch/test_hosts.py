"""Hostfiles in DeepSpeed's format, include and exclude filters, and errors that name the line."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace

import pytest

from shardtrain.config.schema.launch_options import Launch, LaunchSSH
from shardtrain.launch import addresses, job_status
from shardtrain.launch.hostfile import Host, chosen, read_hostfile, select
from shardtrain.launch.job import ClusterJob
from shardtrain.launch.platforms import pdsh, ssh
from shardtrain.utils.errors import ConfigError

FOUR = [Host("a", slots=4), Host("b", slots=4), Host("c", slots=4)]
JOB = ClusterJob("job", ("python3", "-P", "-m", "shardtrain", "train"))


def test_a_hostfile_has_hosts_slots_users_ports_and_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=8\n\nme@node2:2222 slots=8  # the new one\nnode3\n")
    assert read_hostfile(path) == [
        Host("node1", slots=8),
        Host("node2", "me", 2222, 8),
        Host("node3"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "node1 slots=0",
        "node1 slots=x",
        "node1 8",
        "node1 slots=8 max_slots=8",
        "-oProxyCommand=x",
        "a;b",
        "a\x1bb",
    ],
)
def test_a_wrong_line_is_reported_with_its_number(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_text(f"node0\n{line}\n")
    with pytest.raises(ConfigError, match="hosts:2: ") as error:
        read_hostfile(path)
    assert len(str(error.value).splitlines()) == 1


def test_a_hostfile_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfnode1 slots=8\r\nnode2 slots=8\r\n")
    assert [host.name for host in read_hostfile(path)] == ["node1", "node2"]


def test_hosts_of_which_some_have_no_slots_are_reported_by_name(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node1 slots=8\nnode2\n")
    with pytest.raises(ConfigError, match="node1 has 8, node2 has no slots=N"):
        chosen(Launch(ssh=LaunchSSH(hostfile=str(path))), None)


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_job_refused_by_runai_is_one_line_with_status_2(tmp_path, monkeypatch, verb):
    stub = tmp_path / "runai"
    stub.write_text("#!/bin/sh\necho 'Error: workload not found' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with pytest.raises(ConfigError, match="runai failed: Error: workload not found; ") as error:
        getattr(job_status, verb)("runai/v2/pytorch/-/run")
    assert error.value.exit_code == 2
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_hostfile_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"a": None, "b": None, "c": None}),
        ("a@c", "", {"a": None, "c": None}),
        ("a:0,2@b:1,3", "", {"a": (0, 2), "b": (1, 3)}),
        ("", "b", {"a": None, "c": None}),
        ("", "b:1", {"a": None, "b": (0, 2, 3), "c": None}),
        ("", "a:0,1,2,3@b", {"c": None}),
    ],
)
def test_filters_choose_hosts_and_devices(include, exclude, expected):
    selected = select(FOUR, include, exclude)
    assert {host.name: host.devices for host in selected} == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("d", "", "not a host"),
        ("a:4", "", "device 4"),
        ("a:", "", "no devices"),
        ("", "a:x", "no devices"),
        ("a", "b", "cannot be combined"),
    ],
)
def test_filters_that_match_nothing_are_rejected(include, exclude, message):
    with pytest.raises(ConfigError, match=message):
        select(FOUR, include, exclude)


def launch(hosts: list[str], **more) -> Launch:
    return replace(Launch(), ssh=LaunchSSH(hosts=hosts), **more)


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        ([], None, "names no host"),
        (["a", "a"], None, "twice"),
        (["a", "b"], 3, "exceeds the number of hosts, 2"),
    ],
)
def test_impossible_sets_of_hosts_are_rejected(hosts, nodes, message):
    with pytest.raises(ConfigError, match=message):
        chosen(launch(hosts), nodes)


def test_two_ports_of_one_machine_are_two_hosts_and_nodes_takes_the_first():
    assert [host.port for host in chosen(launch(["a:1", "a:2", "a:3"]), 2)] == [1, 2]


def test_unequal_slots_are_reported_with_each_host(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=8\n")
    with pytest.raises(ConfigError, match="a has 4, b has 8"):
        chosen(replace(Launch(), ssh=LaunchSSH(hostfile=str(path))), None)


def test_slots_are_the_ranks_and_chosen_devices_are_the_visible_ones():
    hosts = [Host("a", slots=2, devices=(1, 3)), Host("b", slots=2)]
    first, second = ssh.render(JOB, Launch(), hosts, "10.0.0.1", "id")

    assert first.command[-2:] == ("--nproc", "2")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in second.environment
    for rank, plan in enumerate((first, second)):
        assert plan.environment["SHARDTRAIN_NODE_RANK"] == str(rank)
        assert plan.environment["SHARDTRAIN_RDZV_ENDPOINT"] == "10.0.0.1:29500"

    with pytest.raises(ConfigError, match="2 slots"):
        ssh.render(JOB, replace(Launch(), nproc_per_node=4), [Host("a", slots=2)], "a", "id")


def test_a_single_host_gets_no_node_variables():
    (plan,) = ssh.render(JOB, Launch(), [Host("a", "me", 22)], "a", "id")

    # SHARDTRAIN_SUPERVISED: the launcher reports the status of the run, so the host does not.
    variables = [name for name in plan.environment if name.startswith("SHARDTRAIN_")]
    assert variables == ["SHARDTRAIN_SUPERVISED"]
    agent = "exec python3 -P -m shardtrain.launch.remote_agent"
    assert plan.ssh[-5:] == ("-p", "22", "--", "me@a", agent)


def test_an_elastic_run_is_refused():
    with pytest.raises(ConfigError, match=re.escape("launch.min_nodes")):
        ssh.render(replace(JOB, nodes=2, min_nodes=1), Launch(), [Host("a")], "a", "id")


def test_options_that_pdsh_does_not_support_are_rejected(monkeypatch):
    plans = ssh.render(JOB, Launch(), [Host("a", port=1), Host("a", port=2)], "a", "id")
    with pytest.raises(ConfigError, match="two hosts have the same"):
        pdsh.Fan(plans)

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="requires pdsh, which is not installed"):
        pdsh.Fan(plans[:1])


def test_the_user_s_endpoint_takes_precedence_over_the_detected_one():
    detected = {ssh.ENDPOINT: "10.0.0.1:29500"}
    with_endpoint = replace(JOB, environment={ssh.ENDPOINT: "fabric-1:1"})
    for job, expected in ((JOB, "10.0.0.1:29500"), (with_endpoint, "fabric-1:1")):
        plan = ssh.render(job, Launch(), [Host("a"), Host("b")], "a", "id")[0]
        message = json.loads(plan.message({}, detected))
        assert message["environment"][ssh.ENDPOINT] == expected


def test_a_local_first_host_uses_the_address_that_faces_the_other_hosts():
    # all addresses are this machine's
    assert addresses.meeting(["127.0.1.1", "127.0.0.2"]) == "127.0.1.1"
    assert addresses.meeting(["10.0.0.1", "127.0.0.1"]) == "10.0.0.1"
    assert addresses.meeting(["127.0.1.1", None]) is None
    assert addresses.toward("127.0.0.1") == "127.0.0.1"
    assert addresses.interface_of("127.0.0.9") == "lo"
    assert addresses.toward("nowhere.invalid") is None
    assert addresses.interface_of("192.0.2.1") is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems use ps")
def test_a_reused_process_id_is_not_a_launch(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own_process = f"ssh/{os.getpid()}"
    folder = job_status.open_folder(os.getpid())

    # The start time that identifies a process must not depend on the time zone.
    job_status.status(own_process)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    job_status.status(own_process)
    assert capsys.readouterr().out.splitlines() == ["running", "running"]

    # The process id was reused, after a reboot or by a later process. That process must not be
    # stopped.
    boot, ticks = (folder / "started").read_text().split()
    for started in (f"{boot[::-1]} {ticks}", f"{boot} {int(ticks) + 1}"):
        (folder / "started").write_text(started)
        job_status.stop(own_process)
        assert capsys.readouterr().out.splitlines() == ["has already ended"]

    with pytest.raises(ConfigError, match="not a launch of this user"):
        job_status.status("ssh/1")
