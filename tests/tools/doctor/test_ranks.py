"""On real ranks, a problem of one rank is detected, named, and reported within the time limit."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from pathlib import Path

import patience
import patients
import pytest
import torch
from patients import examined, rows

from shardtrain.ops import dtensor
from shardtrain.tools.doctor import (
    clock,
    device_checks,
    hosts,
    limit_checks,
    memory_checks,
    network,
    numbers,
    storage_checks,
    store_channel,
    versions,
)
from shardtrain.utils import limits


def test_healthy_ranks_pass(tmp_path):
    reports = examined(2, tmp_path, ["versions", "hosts", "clock", "storage", "network"], _loopback)
    findings = rows(reports, "versions", "clock", "storage", "network")
    failed = [row for row in findings.values() if row.verdict == "fail"]

    assert failed == []
    assert findings["job.dump_folder shared"].verdict == "pass"
    assert (
        findings["all_reduce dp_shard (all ranks)"].verdict
        == findings["all_gather dp_shard (all ranks)"].verdict
        == "pass"
    )
    assert not list(tmp_path.glob(f"{storage_checks.PREFIX}*"))


def _loopback(rank):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def test_ranks_of_several_hosts_are_measured_within_and_across_them(tmp_path):
    reports = examined(6, tmp_path, ["hosts", "network"], _three_hosts)
    findings = rows(reports, "hosts", "network")
    assert set(reports.hosts()) == {"host-0", "host-1", "host-2"}
    for axis in ("dp_shard (all ranks)", "one host", "across hosts"):
        assert "GB/s" in findings[f"all_reduce {axis}"].measured
        assert "GB/s" in findings[f"all_gather {axis}"].measured
    assert "slowest group host-" in findings["all_reduce one host"].measured
    assert {rank for rank, facts in reports.of("network").items() if facts["pairs"]} == {0, 2, 4}, (
        "the first of each host"
    )
    assert "neighbouring hosts" in findings
    assert "neighbours" not in findings


def _three_hosts(rank):
    _loopback(rank)
    socket.gethostname = lambda: f"host-{rank // 2}"


def test_a_rank_with_another_torch_is_named(tmp_path):
    row = rows(examined(3, tmp_path, ["versions"], _older), "versions")["torch"]
    assert row.verdict == "fail"
    assert row.ranks == (1,)
    assert "2.11.0 on rank 1" in row.measured


def _older(rank):
    if rank == 1:
        torch.__version__ = "2.11.0"


def test_a_rank_that_multiplies_slowly_is_named(tmp_path):
    row = rows(examined(3, tmp_path, ["devices"], _lame), "devices")["matmul float32"]
    assert row.verdict == "warn"
    assert row.ranks == (2,)


def _lame(rank):
    # Compute 20 products instead of one, to make rank 2 the slowest even on a busy machine.
    device_checks.CPU_SIZE = 256
    device_checks.REPEATS = 3
    if rank == 2:
        product = device_checks.multiply
        device_checks.multiply = lambda a, b: [product(a, b) for _ in range(20)][-1]


def test_a_product_with_one_wrong_element_is_detected(tmp_path):
    row = rows(examined(2, tmp_path, ["devices"], _damaged), "devices")["matrix product"]
    assert row.verdict == "fail"
    assert row.ranks == (1,)


def _damaged(rank):
    device_checks.CPU_SIZE = 256
    device_checks.REPEATS = 1
    if rank == 1:
        product = device_checks.multiply

        def flawed(a, b):
            result = product(a, b)
            result[17, 3] += 1
            return result

        device_checks.multiply = flawed


def test_a_fast_clock_is_named(tmp_path):
    row = rows(examined(3, tmp_path, ["clock"], _ahead), "clock")["skew"]
    assert row.verdict == "fail"
    assert row.ranks == (1,)

    measured = re.match(r"\+(\d+\.\d) s on rank 1", row.measured)
    assert measured
    # Allow an error of two seconds, because a busy machine replies late.
    assert abs(float(measured[1]) - 90) < 2


def _ahead(rank):
    if rank == 1:
        now = time.time
        clock.time = type("Clock", (), {"time": staticmethod(lambda: now() + 90.0)})


def test_ranks_that_do_not_share_the_folder_of_checkpoints_are_reported(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def separate_folders(rank):
        return patients.loaded(tmp_path / "ab"[rank], checkpoint={"enable": True})

    findings = rows(examined(2, tmp_path, ["storage"], _impatient, separate_folders), "storage")

    assert findings["checkpoint.folder shared"].verdict == "fail"
    assert "first_node" in findings["checkpoint.folder shared"].fix
    assert findings["job.dump_folder shared"].verdict == "pass", (
        "hosts may have separate log folders"
    )
    assert not list(tmp_path.rglob(f"{storage_checks.PREFIX}*"))


def _impatient(rank):
    storage_checks.SEEN_SECONDS = 0.3


def test_a_folder_that_one_rank_cannot_write_is_reported(tmp_path):
    row = rows(examined(2, tmp_path, ["storage"], _read_only), "storage")["job.dump_folder"]
    assert row.verdict == "fail"
    assert row.ranks == (1,)
    assert "Permission denied" in row.measured


def _read_only(rank):
    # Raise the error directly, because root can write to read-only folders.
    if rank == 1:

        def refuse(folder):
            raise PermissionError(13, "Permission denied")

        storage_checks.write_rate = refuse


def test_a_collective_that_hangs_names_the_rank_that_did_not_arrive(tmp_path):
    started = time.monotonic()
    reports = examined(3, tmp_path, ["hosts", "network"], _hangs, limit_seconds=4.0)
    assert time.monotonic() - started < patience.seconds(60), (
        "must not wait for the end of the hang"
    )

    findings = [
        row for row in patients.judged(reports, "hosts", "network") if row.area == "network"
    ]
    assert [row.ranks for row in findings] == [(2,), ()]
    assert "all_reduce on dp_shard (all ranks) did not finish on rank 2" in findings[0].measured
    assert "rank 2 did not get past all_reduce" in findings[1].measured
    assert "ranks 0-1 waited" in findings[1].measured


def _hangs(rank):
    _loopback(rank)
    if rank == 2:
        measure = network.COLLECTIVES["all_reduce"]
        network.COLLECTIVES["all_reduce"] = lambda here, group: (
            measure(here, group),
            time.sleep(60),
        )[0]


def test_a_missing_rank_is_waited_for_once_and_named(tmp_path):
    started = time.monotonic()
    reports = examined(
        3,
        tmp_path,
        ["hosts", "clock", "storage", "network"],
        _absent,
        limit_seconds=patience.seconds(1.5),
    )

    assert time.monotonic() - started < patience.seconds(60)

    rows = patients.judged(reports, "hosts", "clock", "storage", "network")
    findings = [row for row in rows if row.verdict == "fail"]

    assert findings[0].area == "ranks"
    assert findings[0].ranks == (1,)
    assert [row.measured for row in findings[1:]] == ["rank 1 has not arrived; ranks 0, 2 waited"]
    assert not list(tmp_path.glob(f"{storage_checks.PREFIX}*"))


def _absent(rank):
    store_channel.EXTRA_SECONDS = 0.5
    store_channel.AGAIN_SECONDS = 0.3
    return patients.ABSENT if rank == 1 else None


def test_a_hanging_check_is_a_finding_and_others_continue(tmp_path):
    reports = examined(
        1, tmp_path, ["versions", "storage", "limits"], _dead_server, limit_seconds=3.0
    )
    findings = rows(reports, "versions", "storage", "limits")
    assert findings["check"].area == "storage"
    assert "did not finish" in findings["check"].measured
    assert findings["open files"].area == "limits"
    assert findings["torch"].verdict == "pass"


def _dead_server(rank):
    storage_checks.write_rate = lambda folder: time.sleep(60)


def test_a_check_that_raises_is_a_finding(tmp_path):
    findings = rows(examined(1, tmp_path, ["memory"], _raises), "memory")
    assert findings["check"].verdict == "fail"
    assert "RuntimeError: no such device" in findings["check"].measured


def _raises(rank):
    def refuse(*_):
        raise RuntimeError("no such device\nwith a trace")

    memory_checks.host_memory = refuse


def test_a_low_limit_of_open_files_is_reported(tmp_path):
    findings = rows(examined(1, tmp_path, ["limits"], _few_files), "limits")
    assert findings["open files"].verdict == "fail"
    assert findings["open files"].measured == "128"


def _few_files(rank):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_port_in_use_is_busy():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not hosts.is_free(port)
    assert hosts.is_free(port)


def test_a_problem_of_the_configuration_on_this_machine_is_reported(tmp_path):
    def with_missing_data(rank):
        return patients.loaded(
            tmp_path, training={"dataset": "text", "dataset_path": str(tmp_path / "nothing.txt")}
        )

    findings = rows(examined(1, tmp_path, ["config"], loaded_of=with_missing_data), "config")

    assert findings["problem"].verdict == "fail"
    assert "nothing.txt" in findings["problem"].measured


def test_a_model_needs_its_weights_gradients_and_two_moments(tmp_path):
    facts = examined(2, tmp_path, ["config"]).facts[0]["config"]
    parameters = facts["parameters"]
    assert facts["state_bytes_per_rank"] == parameters * 4 * 4 // 2
    assert facts["checkpoint_bytes"] == parameters * 4 * 3


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, 0.0),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_container_s_cpu_quota_is_read_in_both_versions(tmp_path, files, limit):
    _write(tmp_path, files)
    assert limit_checks.cpu_quota(tmp_path) == limit


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "10"}, (1000, 10)),
        ({"memory.max": "max", "memory.current": "10"}, (0, 0)),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, (0, 0)),
        ({"memory/memory.limit_in_bytes": "500", "memory/memory.usage_in_bytes": "5"}, (500, 5)),
    ],
)
def test_a_container_s_memory_is_read_in_both_versions(tmp_path, files, expected):
    _write(tmp_path, files)
    assert memory_checks.cgroup_memory(tmp_path) == expected


def _write(folder: Path, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


def test_the_filesystem_of_a_path_is_that_of_the_nearest_mount(tmp_path):
    (tmp_path / "mounts").write_text("a / ext4 rw\nb /scratch lustre rw\nc /scratch2 nfs4 rw\n")
    assert storage_checks.filesystem_of(Path("/scratch/run"), tmp_path / "mounts") == "lustre"
    assert storage_checks.filesystem_of(Path("/scratch2"), tmp_path / "mounts") == "nfs4"
    assert storage_checks.filesystem_of(Path("/scratching"), tmp_path / "mounts") == "ext4"


def test_old_files_of_a_killed_doctor_are_removed(tmp_path):
    old = tmp_path / f"{storage_checks.PREFIX}0-0"
    new = tmp_path / f"{storage_checks.PREFIX}1-0"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    storage_checks._sweep(tmp_path)

    assert not old.exists()
    assert new.exists()


def test_versions_of_libraries_are_noted_without_importing_them(tmp_path):
    facts = examined(1, tmp_path, ["versions"]).facts[0]["versions"]
    assert facts["torch"] == torch.__version__
    assert facts["numpy"]
    assert set(versions._LIBRARIES) <= set(facts)


def test_inaccurate_sums_of_a_rank_are_detected_and_the_rank_is_named(tmp_path):
    reports = examined(3, tmp_path, ["numbers"], _adds_in_float32)
    findings = rows(reports, "numbers")
    assert findings["gradient norm"].verdict == "fail"
    assert findings["gradient norm"].ranks == (2,)
    assert findings["loss sum"].verdict == "pass"
    assert "128,256" in findings["loss sum"].measured


def _adds_in_float32(rank):
    numbers.NUMBERS = {"cpu": 2**21}
    numbers.TOKENS = {"cpu": 4}
    if rank == 2:
        # An inaccurate norm: PyTorch on a CPU sums float32 squares sequentially in each vector lane.
        dtensor.squared_norm = lambda tensors: torch.linalg.vector_norm(
            tensors[0], dtype=torch.float32
        ).square()


def test_kills_in_cgroups_of_other_jobs_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a cgroup counts the kills of all cgroups below it."""
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    for folder, kills in ((job, 1), (job.parent, 20), (tmp_path, 300)):
        (folder / "memory.events").write_text(f"low 0\noom 5\noom_kill {kills}\n")
    for place, expected in (("/slurm/job_7", 1), ("/", 300), ("/a/path/of/the/host", 300)):
        monkeypatch.setattr(limits, "_lines", lambda _, place=place: [f"0::{place}"])
        assert memory_checks._oom_kills(tmp_path) == expected, place
