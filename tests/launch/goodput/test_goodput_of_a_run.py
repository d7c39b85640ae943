"""A real run with slow data, saves and validation, and a killed rank: each delay is in its bin."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
from launched import STEPS, config, end, fork

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.data import DataLoader
from shardtrain.launch import environment, local
from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import BINS, account, attempts_of
from shardtrain.train import trainer, validation

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks of a process that has imported torch"
)

DATA = 0.1
SAVE = 0.3
VALIDATION = 0.2
STEP = 0.15
KILLED = 6
"""The step in which rank 0 is killed, once. Step 5, complete but not saved, is lost."""


def slower(owner, name, seconds, then=lambda: None):
    original = getattr(owner, name)

    def patched(*arguments, **names):
        time.sleep(seconds)
        then()
        return original(*arguments, **names)

    setattr(owner, name, patched)


def _launch(run_config, folder):
    environment.set_process_defaults(os.environ, 2, 2, alone=True)

    def main(loaded):
        updates = []

        def kill():
            updates.append(1)
            if (
                os.environ["RANK"] == "0"
                and len(updates) == KILLED
                and not (folder / "killed").exists()
            ):
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        slower(DataLoader, "__next__", DATA)
        slower(Checkpoints, "save", SAVE)
        slower(validation.Validator, "run", VALIDATION)
        slower(trainer.optim, "set_learning_rate", STEP, kill)
        return trainer.main(loaded)

    os._exit(local.launch(Loaded(run_config), 2, main=main, max_restarts=1))


def test_every_delay_of_a_run_with_a_restart_is_in_its_bin(tmp_path):
    # saves after 2, 4 and 6; validates after 3 and 6; one micro-batch per step
    run_config = config(tmp_path)
    assert end(fork(_launch, run_config, tmp_path)) == 0

    lines, bad = events.read(tmp_path)
    assert not bad

    attempts = attempts_of(lines)
    assert [attempt.start.step for attempt in attempts] == [0, 4]

    accounted = account(attempts)
    assert (accounted.attempts, accounted.failures, accounted.saves) == (2, 1, 3)

    wall = attempts[-1].points[-1].time - attempts[0].start.job_started
    assert accounted.running_seconds == pytest.approx(wall, rel=0.01)
    assert accounted.idle_seconds == 0

    seconds = accounted.seconds
    assert seconds["checkpoint"] >= 3 * SAVE
    assert seconds["data"] >= STEPS * DATA
    assert seconds["validation"] >= 2 * VALIDATION
    assert seconds["lost"] >= 2 * (DATA + STEP)  # steps 5 and, until the kill, 6
    assert seconds["productive"] >= (STEPS - 1) * STEP
    assert seconds["restart"] > 0
    assert seconds["start"] > 0

    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["goodput"] < 1
    assert last["goodput_lost_seconds"] == pytest.approx(seconds["lost"])
    assert {f"goodput_{name}_seconds" for name in BINS} <= last.keys()
    assert "goodput " in (tmp_path / "logs/rank-0.log").read_text()
