"""Laws of a calibrated plan: a run that took longer than planned makes the device slower by as much."""

from __future__ import annotations

import json
import shutil

import pytest

from shardtrain import config, presets
from shardtrain.tools.plan import calibrate, hardware, planning
from shardtrain.utils.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    """A run of the debug preset on two ranks of a CPU, whose steps took three seconds."""

    def write(seconds=3.0, count=10):
        shutil.copy(next(iter(presets.__path__)) + "/debug.toml", tmp_path / "config.resolved.toml")
        lines = [
            {"step": step, "step_seconds": seconds * (5 if step == 1 else 1), "tokens_per_second": 20.0, "tps": 10.0}
            for step in range(1, count + 1)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return write


def test_a_calibrated_plan_of_the_run_takes_as_long_as_the_run_did(folder):
    learned = calibrate.learn(folder(), hardware.find("cpu"))
    assert (learned.world_size, learned.steps) == (2, 10)
    plan = planning.make(config.load("debug", []).config, 2, learned.device)
    assert plan.time.seconds == pytest.approx(3.0, rel=0.01)
    assert plan.peak_bytes == planning.make(config.load("debug", []).config, 2, hardware.find("cpu")).peak_bytes


def test_too_few_steps_another_device_or_no_run_are_refused(folder, tmp_path):
    device = hardware.find("cpu")
    with pytest.raises(ConfigError, match="3 logged steps"):
        calibrate.learn(folder(count=3), device)
    with pytest.raises(ConfigError, match="times as long as planned on cpu"):
        calibrate.learn(folder(seconds=10_000), device)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        calibrate.learn(tmp_path / "none", device)
