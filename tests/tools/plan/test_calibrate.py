"""Calibrated plans: a run that was slower than planned makes the device slower by the same factor."""

from __future__ import annotations

import json
import shutil

import patients
import pytest

from shardtrain import config, presets
from shardtrain.tools.doctor import doctor_report
from shardtrain.tools.plan import calibrate, hardware, planning
from shardtrain.utils.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    """A run of the debug preset on two CPU ranks, with steps of three seconds."""

    def write(seconds=3.0, count=10):
        shutil.copy(next(iter(presets.__path__)) + "/debug.toml", tmp_path / "config.resolved.toml")
        lines = [
            {
                "step": step,
                "step_seconds": seconds * (5 if step == 1 else 1),
                "tokens_per_second": 20.0,
                "tps": 10.0,
            }
            for step in range(1, count + 1)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return write


def test_a_calibrated_plan_of_the_run_takes_as_long_as_the_run_did(folder):
    cpu = hardware.find("cpu")
    learned = calibrate.learn(folder(), cpu)
    assert (learned.world_size, learned.steps) == (2, 10)

    run_config = config.load("debug", []).config
    plan = planning.make(run_config, 2, learned.device)
    assert plan.time.seconds == pytest.approx(3.0, rel=0.01)
    # Only the time is calibrated.
    assert plan.peak_bytes == planning.make(run_config, 2, cpu).peak_bytes


def test_too_few_steps_another_device_and_missing_runs_are_rejected(folder, tmp_path):
    device = hardware.find("cpu")
    with pytest.raises(ConfigError, match="3 logged steps"):
        calibrate.learn(folder(count=3), device)
    with pytest.raises(ConfigError, match="times as long as planned on cpu"):
        calibrate.learn(folder(seconds=10_000), device)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        calibrate.learn(tmp_path / "none", device)


@pytest.fixture
def report(tmp_path):
    """Function that writes the report of ``doctor --json`` for two hosts with two devices each."""

    def write(name="NVIDIA H100 80GB HBM3", rate=400e12, links=200e9, network=40e9):
        reports = patients.healthy()
        for number, facts in reports.facts.items():
            facts["devices"] = {
                **facts["devices"],
                "name": name,
                "dtype": "bfloat16",
                "rate": rate * (1 + number),
            }
            near = {
                "axis": "tp",
                "name": "all_gather",
                "group": number // 2,
                "size": 2,
            }
            across_hosts = {"axis": "dp_shard", "name": "all_gather", "group": 0, "size": 4}
            facts["network"]["collectives"] = [
                {**near, "right": True, "rate": links},
                {**across_hosts, "right": True, "rate": network},
            ]
        path = tmp_path / "report.json"
        path.write_text(doctor_report.to_json(doctor_report.document(reports, [], 1.0)))
        return path

    return write


def test_rates_come_from_the_doctor_s_report(report):
    row = hardware.find("h100")
    learned = calibrate.learn_report(report(), row)
    device = learned.device

    # The rate of the slowest device, scaled by the fraction of the peak that large products reach.
    assert device.flops["bfloat16"] * device.matmul_efficiency == pytest.approx(400e12)
    assert device.flops["float8"] / row.flops["float8"] == pytest.approx(
        device.flops["bfloat16"] / row.flops["bfloat16"]
    )
    assert device.link.bytes_per_second * device.link.efficiency == pytest.approx(200e9)
    # Two devices of a host shared its network.
    assert device.network.bytes_per_second * device.network.efficiency == pytest.approx(20e9)
    assert device.memory_bytes_per_second == row.memory_bytes_per_second
    assert "65% (bfloat16 products)" in learned.line("report.json")


def test_a_slower_device_of_the_report_makes_a_slower_plan(report):
    loaded = config.load("llama3_8b", [])
    step_seconds = []
    for flops_per_second in (400e12, 300e12, 200e12):
        learned = calibrate.learn_report(report(rate=flops_per_second), hardware.find("h100"))
        plan = planning.make(loaded.config, 8, learned.device)
        step_seconds.append(plan.time.seconds)

    assert step_seconds == sorted(step_seconds)
    # A device of half the speed does not double the step time, because communication is as fast as before.
    assert step_seconds[2] > 1.5 * step_seconds[0]


def test_a_report_of_another_device_or_no_report_is_refused(report, tmp_path):
    with pytest.raises(ConfigError, match="--device h100"):
        calibrate.learn_report(report(), hardware.find("a100"))
    for text in (
        "",
        "[]",
        "{}",
        '{"rates": 3}',
        '{"rates": {"flops": {}}, "device": "x"}',
        "[" * 100_000,
    ):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ConfigError, match=r"is not a report|impossible rates"):
            calibrate.learn_report(tmp_path / "wrong.json", hardware.find("h100"))

    for wrong in ({"rate": 1.0}, {"rate": float("nan")}, {"links": -1.0}, {"links": 1.0}):
        with pytest.raises(ConfigError, match="of h100|impossible rates|is not a report"):
            calibrate.learn_report(report(**wrong), hardware.find("h100"))


def test_the_doctor_of_this_machine_calibrates_a_plan_of_it(tmp_path):
    path = tmp_path / "report.json"
    reports = patients.examined(2, tmp_path, ("devices", "network"))
    path.write_text(doctor_report.to_json(doctor_report.document(reports, [], 1.0)))
    device = calibrate.learn_report(path, hardware.find("cpu")).device
    # doctor measures with one thread here, because all tests do
    measured = min(facts["rate"] for facts in reports.of("devices").values())

    assert device.flops["float32"] * device.matmul_efficiency == pytest.approx(measured)
    assert device.link == hardware.find("cpu").link
