"""A healthy cluster passes all checks of the doctor. Each problem yields one row that names its ranks."""

from __future__ import annotations

import dataclasses
import json

import patients
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.tools.doctor import doctor_report, health, links, network, rank
from shardtrain.tools.doctor.result import Reports


def judged(reports):
    return rank.judge(reports)


def troubles(reports):
    return {(row.area, row.subject): row for row in judged(reports) if row.verdict != "pass"}


def spoiled(spoil, ranks, **world):
    reports = patients.healthy(**world)
    for number in ranks:
        spoil(reports.facts[number])
    return reports


def test_a_healthy_cluster_passes():
    rows = judged(patients.healthy())
    assert troubles(patients.healthy()) == {}
    assert {row.area for row in rows} == {area.name for area in rank.AREAS}
    assert doctor_report.exit_code(rows) == 0


def change(area, **values):
    return lambda facts: facts[area].update(values)


def sick(**values):
    return lambda facts: facts["devices"]["health"].update(values)


def wrong_sum(facts):
    facts["network"]["collectives"][0]["right"] = False


def slow_collective(facts):
    facts["network"]["collectives"][0]["rate"] = 5e9


def unwritable(facts):
    facts["storage"]["folders"]["checkpoint.folder"].update(error="Permission denied", rate=0.0)


def nearly_full(facts):
    facts["storage"]["folders"]["checkpoint.folder"]["free"] = 2**20


def shorter_data(facts):
    facts["storage"]["data"]["training.dataset_path"] = "1 file, 16 bytes"


def variable(**values):
    return lambda facts: facts["environment"]["variables"].update(values)


TROUBLES = [
    # Change of rank 2 (the first of host-1); area, subject and verdict of the row; part of its text.
    (change("versions", torch="2.12.0"), "versions", "torch", "fail", "2.12.0 on rank 2 (host-1)"),
    (change("versions", options="def"), "versions", "options", "fail", "def on"),
    (
        change("hosts", addresses=["127.0.1.1"]),
        "hosts",
        "name resolves",
        "fail",
        "which other hosts cannot reach",
    ),
    (change("hosts", addresses=[]), "hosts", "name resolves", "fail", "no address"),
    (change("hosts", port_range=[32768, 32868]), "hosts", "ephemeral ports", "warn", "32868"),
    (variable(NCCL_P2P_DISABLE="1"), "environment", "NCCL_P2P_DISABLE", "warn", "NVLink"),
    (variable(NCCL_IB_DISABLE="1"), "environment", "NCCL_IB_DISABLE", "fail", "unused"),
    (
        variable(NCCL_SOCKET_IFNAME="ib0"),
        "environment",
        "NCCL_SOCKET_IFNAME",
        "fail",
        "none of lo, eth0",
    ),
    (
        change("environment", unseen="SLURM_GPUS_ON_NODE=8, but no device is visible"),
        "environment",
        "devices of the job",
        "fail",
        "no device is visible",
    ),
    (variable(OMP_NUM_THREADS="64"), "environment", "threads", "warn", "OMP_NUM_THREADS=64"),
    (
        change("config", problems=["a=1 is wrong; use 2"]),
        "config",
        "problem",
        "fail",
        "rank 2 (host-1)",
    ),
    (change("limits", open_files=256), "limits", "open files", "fail", "256"),
    (change("limits", open_files=1024), "limits", "open files", "warn", "1024"),
    (change("limits", locked_bytes=65536), "limits", "locked memory", "fail", "64.00 KiB"),
    (change("limits", core_bytes=-1), "limits", "core dumps", "warn", "unlimited"),
    (change("limits", quota=1.0), "limits", "CPU quota", "warn", "1 of 64"),
    (change("limits", load=200.0), "limits", "CPU load", "warn", "200.0"),
    (change("size", open_files=1000), "size", "store connections", "warn", "1,000"),
    (change("size", ports=10), "size", "connections of a host", "warn", "10"),
    (change("size", backlog=2), "size", "listen backlog", "warn", "2"),
    (change("size", tracked=80), "size", "connection tracking", "warn", "80"),
    (change("size", neighbours=2), "size", "neighbour table", "warn", "2"),
    (change("limits", governor="powersave"), "limits", "CPU governor", "warn", "powersave"),
    (change("limits", steal=0.2), "limits", "CPU steal", "warn", "20.0 %"),
    (change("memory", shared=64 * 2**20), "memory", "/dev/shm", "fail", "64.00 MiB"),
    (change("memory", kills=3), "memory", "kills for memory", "warn", "3 in this container"),
    (change("memory", limit=2**30, used=2**30), "memory", "host memory", "warn", "container"),
    (change("memory", device_free=20 * 2**30), "memory", "device memory", "fail", "20.00 GiB free"),
    (
        change("clock", moments=[1100.0 + n for n in range(4)]),
        "clock",
        "skew",
        "fail",
        "+100.0 s on rank 2",
    ),
    (change("clock", moments=[1002.0 + n for n in range(4)]), "clock", "skew", "warn", "+2.0 s"),
    (change("clock", synchronized=False), "clock", "synchronized", "warn", "no"),
    (change("clock", source="hpet"), "clock", "source", "warn", "hpet"),
    (unwritable, "storage", "checkpoint.folder", "fail", "Permission denied"),
    (nearly_full, "storage", "checkpoint.folder", "warn", "1.00 MiB free"),
    (
        change("storage", data={"training.dataset_path": "1 file, 16 bytes"}),
        "storage",
        "training.dataset_path",
        "fail",
        "16",
    ),
    (change("devices", name="NVIDIA A100-SXM4-80GB"), "devices", "kind", "warn", "A100"),
    (change("devices", exact=False), "devices", "matrix product", "fail", "wrong on rank 2"),
    (change("devices", rate=400e12), "devices", "matmul bfloat16", "warn", "slowest rank 2"),
    (change("devices", rate=100e12), "devices", "matmul bfloat16", "fail", "slowest rank 2"),
    (
        change("devices", uuid="GPU-3"),
        "devices",
        "one rank per device",
        "fail",
        "host-1 (ranks 2-3)",
    ),
    (
        sick(**{"ecc.errors.uncorrected.volatile.total": "4"}),
        "devices",
        "memory errors",
        "fail",
        "4 uncorrected",
    ),
    (sick(**{"remapped_rows.pending": "1"}), "devices", "memory errors", "fail", "remapping"),
    (
        sick(**{"clocks_event_reasons.active": "0x48"}),
        "devices",
        "throttled",
        "fail",
        "heat (hardware)",
    ),
    (sick(**{"pcie.link.width.current": "8"}), "devices", "PCIe link", "warn", "x8 of x16"),
    (sick(nvlink=[26.562] * 17 + [0.0]), "devices", "NVLink", "fail", "1 of 18 links down"),
    (wrong_sum, "network", "all_reduce all ranks", "fail", "wrong numbers on rank 2"),
]


@pytest.mark.parametrize(("spoil", "area", "subject", "verdict", "text"), TROUBLES)
def test_each_problem_of_one_rank_is_named_with_the_rank_and_a_fix(
    spoil, area, subject, verdict, text
):
    rows = troubles(spoiled(spoil, [2]))
    row = rows[area, subject]
    assert row.verdict == verdict
    assert text in row.measured
    assert row.fix
    assert 2 in row.ranks

    others = set(rows) - {(area, subject)}
    # Only an environment variable may yield a second row: if only one rank has it, ranks also differ.
    for other in others:
        assert other[0] == area == "environment", others


@settings(max_examples=20)
@given(st.sampled_from(TROUBLES), st.permutations(range(4)))
def test_the_order_of_reports_changes_no_row(trouble, order):
    reports = spoiled(trouble[0], [2])
    shuffled = Reports(reports.size, {number: reports.facts[number] for number in order})
    assert judged(shuffled) == judged(reports)


def test_a_slow_network_is_reported_against_its_cards():
    reports = spoiled(slow_collective, range(4))
    row = troubles(reports)["network", "all_reduce all ranks"]
    # Two cards of 400 Gb/s have 100 GB/s together. One group communicates through both.
    assert row.verdict == "fail"
    assert "100 GB/s of the network cards" in row.expected
    assert "5 GB/s" in row.measured


def test_devices_of_one_host_are_expected_to_use_nvlink():
    reports = patients.healthy()
    rate, why = links.expected(reports, [0, 1], 2)
    assert rate == pytest.approx(18 * 26.562e9)
    assert "NVLink" in why

    for facts in reports.facts.values():
        facts["devices"]["health"]["nvlink"] = []
    assert links.expected(reports, [0, 1], 2) == (pytest.approx(63.008e9), "63 GB/s of PCIe 5 x16")


def test_groups_that_cross_the_same_cards_share_them():
    reports = patients.healthy()
    assert (
        links.expected(reports, [0, 2], 1)[0] == 2 * links.expected(reports, [0, 2], 2)[0] == 100e9
    )


def test_groups_are_counted_at_the_hosts_that_they_cross():
    reports = patients.healthy(4, 2)
    # Two pipelines of two hosts each. Each host is a member of two of the four groups.
    divided = [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert network._crossing(reports, divided) == {f"host-{number}": 2 for number in range(4)}
    assert network._crossing(reports, [[0, 1], [2, 3]]) == {}


def test_a_slow_rank_is_distinguished_from_its_neighbours():
    reports = patients.healthy(4, 2)
    hosts = [0, 2, 4, 6]
    for number, first in enumerate(hosts):
        for peer in (hosts[number - 1], hosts[(number + 1) % 4]):
            rate = 3e9 if 4 in (first, peer) else 40e9
            reports.facts[first]["network"]["pairs"] = [
                *reports.facts[first]["network"]["pairs"],
                {"kind": "neighbouring hosts", "peer": peer, "rate": rate},
            ]
    row = troubles(reports)["network", "neighbouring hosts"]

    assert row.ranks == (4,)
    assert "slowest rank 4 (host-2)" in row.measured


def test_a_port_of_the_fabric_that_is_down_is_reported_by_host():
    down = [{"name": "mlx5_0:1", "kind": "infiniband", "up": True, "rate": 50e9}]
    rows = troubles(spoiled(change("network", cards=down), [2, 3]))
    assert rows["network", "fabric"].ranks == (2, 3)
    assert "1 on host-1" in rows["network", "fabric"].measured


@pytest.mark.parametrize("must_share", [True, False])
def test_a_folder_that_hosts_do_not_share_fails_where_it_must_be_shared(must_share):
    reports = patients.healthy()
    for number in range(4):
        unseen = [2, 3] if number < 2 else [0, 1]
        folder = patients.folder(unseen=unseen, must_share=must_share)
        reports.facts[number]["storage"]["folders"]["checkpoint.folder"] = folder
    rows = troubles(reports)

    assert (("storage", "checkpoint.folder shared") in rows) == must_share


def test_a_slow_host_is_named_by_its_disk():
    def lame(facts):
        facts["storage"]["folders"]["checkpoint.folder"]["rate"] = 50e6

    reports = spoiled(lame, [4, 5], num_hosts=3)
    row = troubles(reports)["storage", "checkpoint.folder rate"]

    assert row.ranks == (4, 5)
    assert "host-2, the slowest host" in row.measured


def test_a_model_too_large_for_devices_and_disk_is_reported():
    reports = patients.healthy()
    reports.facts[0]["config"] |= {"state_bytes_per_rank": 2**37, "checkpoint_bytes": 2**43}
    rows = troubles(reports)

    assert rows["memory", "device memory"].verdict == "fail"
    assert "128.00 GiB or more" in rows["memory", "device memory"].expected
    assert rows["storage", "room for a checkpoint"].verdict == "fail"


def test_hosts_with_unequal_numbers_of_ranks_are_reported():
    reports = patients.healthy(3)
    fewer = {number: facts for number, facts in reports.facts.items() if number != 5}
    fewer[4]["hosts"]["local_size"] = 1
    assert troubles(Reports(5, fewer))["hosts", "ranks per host"].ranks == (4,)


def test_a_busy_port_is_reported_where_no_job_runs():
    reports = spoiled(change("hosts", in_job=False, port_busy=True), range(4))
    assert "29500 is busy" in troubles(reports)["hosts", "meeting port"].measured


def test_a_silent_rank_is_missing_and_the_status_is_that_of_a_lost_peer():
    reports = patients.healthy()
    facts = {number: facts for number, facts in reports.facts.items() if number != 3}
    rows = judged(Reports(4, facts, {3: "devices"}))

    assert rows[0].verdict == "fail"
    assert rows[0].ranks == (3,)
    assert "last seen at devices" in rows[0].measured
    assert doctor_report.exit_code(rows) == 6


def test_the_status_is_that_of_the_first_failure_and_warnings_count_when_strict():
    rows = judged(spoiled(unwritable, [1]))
    assert doctor_report.exit_code(rows) == 8
    warned = judged(spoiled(change("limits", load=200.0), [1]))
    assert (doctor_report.exit_code(warned), doctor_report.exit_code(warned, strict=True)) == (0, 1)


def test_the_table_names_hosts_and_fixes_and_fits_a_terminal():
    reports = spoiled(change("versions", torch="2.12.0"), [2, 3], num_hosts=3)
    document = doctor_report.document(reports, judged(reports), 3.0)
    assert json.loads(doctor_report.to_json(document)) == json.loads(json.dumps(document))

    text = doctor_report.text_of(document)
    assert "inspect host-1 (ranks 2-3): versions: torch" in text
    assert "fix: start all ranks from one environment" in text
    assert max(map(len, text.splitlines())) <= doctor_report.WIDTH
    assert text.splitlines()[-1].startswith("fail: ")


def test_all_fields_of_a_finding_are_in_the_document():
    reports = patients.healthy()
    document = doctor_report.document(reports, judged(reports), 1.0)
    names = {field.name for field in dataclasses.fields(judged(reports)[0])}

    assert all(set(row) == names for row in document["findings"])
    assert document["hosts"] == {"host-0": 2, "host-1": 2}
    assert document["verdict"] == "pass"
    assert document["named"] == {}


def test_driver_values_are_parsed_and_unsupported_fields_omitted():
    fields = ["driver_version", "clocks_throttle_reasons.active", "ecc.mode.current", "power.draw"]
    values = health.parse(fields, "580.95, 0x0000000000000001, [N/A], 71.3\n")
    assert values == {
        "driver_version": "580.95",
        "clocks_event_reasons.active": "0x0000000000000001",
        "power.draw": "71.3",
    }
    assert "No devices" in health.parse(fields, "No devices were found\n")["error"]


def test_fields_unknown_to_an_old_driver_are_queried_by_older_names_or_omitted(
    tmp_path, monkeypatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*nvlink*) echo "  Link 0: 25 GB/s";;\n'
        "*clocks_event*) echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2;;\n"
        "*remapped_rows.failure*) echo 'Field \"remapped_rows.failure\" is not a valid field to query.'; exit 2;;\n"
        f"*) echo '{', '.join(['1'] * (len(health.FIELDS) - 1))}';;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with health.query("GPU-1") as query:
        values = health.answer(query, "GPU-1")

    assert values["nvlink"] == [25.0]
    assert values["clocks_event_reasons.active"] == "1"
    assert "remapped_rows.failure" not in values
    assert "error" not in values


def test_speeds_of_cards_are_read_from_the_kernel(tmp_path):
    files = {
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)",
        "net/eth0/speed": "25000",
        "net/eth0/operstate": "up",
        "net/eth0/device/vendor": "0x8086",
        "net/lo/operstate": "unknown",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    rates = {card["name"]: card["rate"] for card in links.network_cards(tmp_path)}

    assert rates == {"mlx5_0:1": 50e9, "mlx5_1:1": 0.0, "eth0": 3.125e9}


def test_each_area_is_judged_independently_of_missing_ones():
    healthy = patients.healthy()
    for area in rank.AREAS:
        reports = Reports(
            4, {number: _without(facts, area.name) for number, facts in healthy.facts.items()}
        )
        assert not [row for row in judged(reports) if row.area == area.name]


def _without(facts, name):
    return {area: values for area, values in facts.items() if area != name}


@pytest.mark.parametrize("behind", [[0], [3], [1, 2]])
def test_the_hanging_ranks_furthest_behind_are_named(behind):
    reports = patients.healthy()
    for number, facts in reports.facts.items():
        facts["network"] = {"stopped": "all_reduce on tp", "place": 7 if number in behind else 8}
    (row,) = [row for row in judged(reports) if row.area == "network"]

    assert row.ranks == tuple(behind)
    assert "all_reduce on tp did not finish" in row.measured


def test_a_collective_that_hangs_on_all_ranks_is_reported_unless_a_rank_is_missing():
    reports = patients.healthy()
    for facts in reports.facts.values():
        facts["network"] = {"stopped": "all_reduce on tp", "place": 7}
    (row,) = [row for row in judged(reports) if row.area == "network"]

    assert "hangs on all ranks" in row.measured
    assert row.ranks == ()

    facts = {number: facts for number, facts in reports.facts.items() if number != 3}
    rows = [
        row for row in judged(Reports(4, facts, {3: "all_reduce on tp"})) if row.verdict == "fail"
    ]
    assert [row.ranks for row in rows] == [(3,), (3,)]
    assert "did not arrive" in rows[1].measured
