"""A stopped run loses no step, for every phase, rank and signal, with our launcher and with others.

Launchers and ranks are forks of this process, which avoids importing torch again. A hook holds a phase open: it touches
``ready`` and waits for ``go``, so the signal always arrives in that phase.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist
from launched import (
    HELD,
    STEPS,
    TIMEOUT,
    config,
    end,
    fork,
    losses,
    newest,
    no_orphans,
    patch,
    record,
    wait_for,
)
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain.config import Loaded
from shardtrain.config.schema import DataLoaderOptions
from shardtrain.launch import environment, local, signals
from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import account, attempts_of
from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS
from shardtrain.train import trainer as train
from shardtrain.train.preflight import judge, machine
from shardtrain.utils.errors import DataError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks of a process that has imported torch"
)


def trainer(folder: Path, phase: str, held_rank: int):
    def main(loaded):
        torch.set_num_threads(1)
        rank = int(os.environ["RANK"])
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == held_rank or phase.startswith("slow") or phase == "done":
            patch(folder, phase)
        return train.main(loaded)

    return main


def _launch(run_config, phase, held_rank):
    environment.set_process_defaults(os.environ, 2, 2, alone=True)
    folder = Path(run_config.job.dump_folder)
    os._exit(local.launch(Loaded(run_config), 2, main=trainer(folder, phase, held_rank)))


def _rank(run_config, phase, held_rank, rank, port):
    """One rank as torchrun or srun would start it."""
    environment.set_process_defaults(os.environ, 2, 2, alone=True)
    os.environ.update(
        environment.rank_environment(rank, 2, port, "foreign"), TORCHELASTIC_USE_AGENT_STORE="False"
    )
    del os.environ["TORCHELASTIC_RUN_ID"]
    folder = Path(run_config.job.dump_folder)
    local.leave(local.run_rank(Loaded(run_config), trainer(folder, phase, held_rank), 2))


def run(run_config, phase="none", held_rank=-1):
    Path(run_config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    return fork(_launch, run_config, phase, held_rank)


def run_foreign(run_config, phase="none", held_rank=-1):
    port = free_port()
    Path(run_config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    return [fork(_rank, run_config, phase, held_rank, rank, port) for rank in range(2)]


def resumed_losses(folder: Path, run_config) -> dict[int, tuple[float, str]]:
    """Resume without a hook, and return the losses of all steps."""
    assert end(run(run_config)) == 0
    return losses(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Losses of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    assert end(run(config(folder))) == 0
    assert record(folder)["code"] == 0
    assert len(losses(folder)) == STEPS
    return losses(folder)


PHASES = {"step": HELD, "warm-up": 1, "evaluation": HELD, "save": 2, "data": HELD - 1}
"""Phase -> the step after which the run ends: the step of the request, or the last complete one."""


FIRST = [("step", 1), ("save", 0), ("data", 0)]


def waits_for_lost_peers(loaded):
    """Wait in C++, where no Python signal handler runs, like a restarted rank whose peers are gone."""
    Path(loaded.config.job.dump_folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    dist.HashStore().wait(["never set"], timedelta(hours=1))


def _launch_waiting(run_config):
    environment.set_process_defaults(os.environ, 2, 2, alone=True)
    os._exit(local.launch(Loaded(run_config), 2, main=waits_for_lost_peers))


def test_starting_ranks_that_wait_for_lost_peers_end_before_the_grace_period(tmp_path):
    process = fork(_launch_waiting, config(tmp_path, grace=3600))
    wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
    os.kill(process.pid, signal.SIGTERM)

    assert end(process) == record(tmp_path)["code"] == 75
    assert "before the first step" in record(tmp_path)["message"]
    assert no_orphans(tmp_path)


@pytest.mark.parametrize(
    ("phase", "held_rank"),
    cases(
        FIRST,
        nightly=[
            (phase, rank) for phase in PHASES for rank in (0, 1) if (phase, rank) not in FIRST
        ],
    ),
)
def test_a_stop_request_in_any_phase_saves_and_loses_no_step(tmp_path, straight, phase, held_rank):
    run_config = config(tmp_path)
    process = run(run_config, phase, held_rank)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGTERM)
    # the request must arrive before the phase continues, or the run stops one step later
    time.sleep(0.1)
    (tmp_path / "go").touch()

    assert end(process) == 75
    end_record = record(tmp_path)
    assert end_record["code"] == 75
    assert end_record["class"] == "Preempted"
    assert end_record["retryable"]
    assert end_record["last_step"] == PHASES[phase]
    assert newest(tmp_path) == PHASES[phase]
    assert max(losses(tmp_path)) == PHASES[phase]
    assert end_record["rank"] is None, "no rank is to blame for a request"
    assert no_orphans(tmp_path)

    if held_rank == 1:
        assert resumed_losses(tmp_path, run_config) == straight


@pytest.mark.parametrize("whom", cases(["all"], nightly=["launcher"]))
def test_a_hanging_data_worker_does_not_block_its_rank(tmp_path, whom):
    """The signal may reach the hanging worker too, because Slurm can signal every process."""
    data_options = DataLoaderOptions(num_workers=1, prefetch_factor=1)
    process = run(config(tmp_path, dataloader=data_options), "worker", 0)
    wait_for((tmp_path / "pid-worker").exists)
    # The rank has trained all steps whose data the worker delivered before it hung.
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(losses(tmp_path)) == HELD - 1)
    if whom == "all":
        for path in tmp_path.glob("pid-*"):
            os.kill(int(path.read_text()), signal.SIGTERM)
    os.kill(process.pid, signal.SIGTERM)

    assert end(process) == 75
    assert newest(tmp_path) == HELD - 1

    wait_for(lambda: no_orphans(tmp_path))


@pytest.mark.parametrize(
    "number", cases([signal.SIGUSR1], nightly=[signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
)
def test_every_stop_signal_has_the_same_effect(tmp_path, number):
    previous = signal.signal(number, signal.SIG_DFL)  # nohup makes child processes ignore SIGHUP
    try:
        process = run(config(tmp_path), "data", 0)
    finally:
        signal.signal(number, previous)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, number)

    assert end(process) == 75
    assert (
        f"stopped by {number.name} after step {HELD - 1}; everything is saved"
        in record(tmp_path)["message"]
    )
    assert newest(tmp_path) == HELD - 1
    assert no_orphans(tmp_path)


@pytest.mark.parametrize("phase", cases(["data"], nightly=["step"]))
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, phase):
    """Only rank 0 receives the signal, while it waits in a collective for rank 1, which loads data or computes."""
    process = run(config(tmp_path), phase, 1)
    wait_for((tmp_path / "ready").exists)
    os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGUSR1)
    time.sleep(0.3)
    (tmp_path / "go").touch()

    assert end(process) == 75
    assert newest(tmp_path) == PHASES[phase] == max(losses(tmp_path))
    assert no_orphans(tmp_path)


@pytest.mark.parametrize(
    "mesh", cases([{"tensor_parallel_degree": 2}], nightly=[{}, {"pipeline_parallel_degree": 2}])
)
def test_ranks_of_another_launcher_agree_on_the_step_to_stop_at(tmp_path, mesh):
    ranks = run_foreign(
        config(tmp_path, parallelism=mesh, local_batch_size=8 if mesh else 4), "step", 0
    )
    wait_for((tmp_path / "ready").exists)
    os.kill(ranks[1].pid, signal.SIGTERM)
    time.sleep(0.3)
    (tmp_path / "go").touch()

    assert [end(rank) for rank in ranks] == [75, 75]
    assert record(tmp_path)["code"] == 75
    assert newest(tmp_path) == HELD


def test_a_save_that_exceeds_the_grace_period_keeps_the_previous_checkpoint(tmp_path):
    """The save of step 4 outlasts the grace period."""
    process = run(config(tmp_path, grace=3), "slow second save")
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGTERM)

    assert end(process) == record(tmp_path)["code"] == 76
    assert record(tmp_path)["message"].endswith(
        "the last checkpoint is " + str(tmp_path / "checkpoint/step-2")
    )
    assert newest(tmp_path) == 2
    assert no_orphans(tmp_path)


def test_a_save_expected_to_exceed_the_grace_period_is_not_started(tmp_path):
    process = run(config(tmp_path, grace=4), "slow save")
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.1)
    (tmp_path / "go").touch()

    assert end(process) == record(tmp_path)["code"] == 76
    assert "would have taken longer" in record(tmp_path)["message"]
    assert record(tmp_path)["message"].endswith(
        "the last checkpoint is " + str(tmp_path / "checkpoint/step-2")
    )
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == ["step-2"]


def test_two_interrupts_end_the_run_immediately(tmp_path):
    process = run(config(tmp_path, grace=round(patience.seconds(60))), "step", 0)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(3 * ONE_REQUEST_SECONDS)

    assert process.is_alive()

    os.kill(process.pid, signal.SIGINT)
    process.join(patience.seconds(20))  # shorter than the grace period
    assert end(process) == record(tmp_path)["code"] == 76
    assert newest(tmp_path) == 2
    assert no_orphans(tmp_path)


def test_an_interrupt_of_the_process_group_is_one_request(tmp_path):
    process = run(config(tmp_path, grace=round(patience.seconds(60))), "step", 0)
    wait_for((tmp_path / "ready").exists)
    pids = [process.pid, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2))]
    for pid in pids:  # as a terminal does; the launcher also forwards its signal
        os.kill(pid, signal.SIGINT)
    (tmp_path / "go").touch()

    assert end(process) == record(tmp_path)["code"] == 75
    assert newest(tmp_path) == HELD
    assert no_orphans(tmp_path)


@pytest.mark.parametrize("saves", cases([False], nightly=[True]))
def test_a_request_after_the_last_step_is_not_a_failure(tmp_path, saves):
    process = run(config(tmp_path, enable=saves), "done", 0)
    wait_for(lambda: len(list(tmp_path.glob("done-*"))) == 2)
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    (tmp_path / "go").touch()

    assert end(process) == record(tmp_path)["code"] == 0
    assert no_orphans(tmp_path)


@pytest.mark.parametrize(
    ("first_saves", "second_saves"),
    cases([(True, True), (False, False)], nightly=[(True, False), (False, True)]),
)
def test_a_second_run_does_not_change_the_folder_of_the_first(tmp_path, first_saves, second_saves):
    """The second run is refused even without checkpoints, because both would write to metrics.jsonl."""
    process = run(config(tmp_path, enable=first_saves), "step", 0)
    wait_for((tmp_path / "ready").exists)
    log_files = {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    holder = (tmp_path / "pid-0").read_text()
    second_config = config(tmp_path, enable=second_saves)
    second = run(second_config)

    # The second run neither writes exit.json to the folder nor errors to the logs of the first.
    assert end(second) == 2
    assert not (tmp_path / "exit.json").exists()
    for path, before in log_files.items():
        assert b"error" not in path.read_bytes()[len(before) :]

    # ``config check`` predicts the refusal.
    loaded = Loaded(second_config)
    lines = judge(loaded, machine.this_machine(loaded, 2)).lines
    assert any(f"is being written by process {holder} on" in line for line in lines), lines

    (tmp_path / "go").touch()
    assert end(process) == record(tmp_path)["code"] == 0


@pytest.mark.parametrize(
    "raised", [DataError("a row differs between ranks"), ValueError("a shape is wrong")]
)
def test_one_rank_of_another_launcher_reports_an_error_that_all_raise(
    tmp_path, monkeypatch, capfd, raised
):
    def fail(*_arguments):
        raise raised

    monkeypatch.setattr(train.optim, "set_learning_rate", fail)
    ranks = run_foreign(config(tmp_path))
    codes = [end(rank) for rank in ranks]

    assert codes == [getattr(raised, "exit_code", 1)] * 2

    lines = [line for line in capfd.readouterr().err.splitlines() if "error[" in line]
    assert len(lines) == 1 and str(raised) in lines[0], lines
    assert record(tmp_path)["code"] == codes[0]
    for rank in range(2):
        assert str(raised) in (tmp_path / f"logs/rank-{rank}.log").read_text()


def test_two_interrupts_immediately_end_ranks_of_another_launcher(tmp_path):
    ranks = run_foreign(config(tmp_path), "step", 0)
    wait_for((tmp_path / "ready").exists)
    for _ in range(2):
        for rank in ranks:
            os.kill(rank.pid, signal.SIGINT)
        time.sleep(3 * ONE_REQUEST_SECONDS)

    assert [end(rank) for rank in ranks] == [76, 76]
    assert newest(tmp_path) == 2
    assert record(tmp_path)["code"] == 76


@pytest.mark.parametrize("phase", cases(["data"], nightly=["slow steps"]))
def test_a_run_saves_itself_before_its_slurm_job_ends(tmp_path, monkeypatch, phase):
    # The job must last long enough to start, train and save on a busy machine. The test takes this
    # long.
    finish = time.time() + min(90.0, patience.seconds(6))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(finish)))
    run_config = config(tmp_path, steps=100_000, on_data_end="repeat")
    # The job may last longer than the hang timeout.
    run_config = dataclasses.replace(
        run_config, comm=dataclasses.replace(run_config.comm, hang_timeout_seconds=0)
    )

    assert end(run(run_config, phase, 0)) == 75

    saved = tmp_path / "checkpoint" / f"step-{newest(tmp_path)}"
    assert saved.stat().st_mtime < finish
    assert "the end of the Slurm job" in record(tmp_path)["message"]
    assert newest(tmp_path) == max(losses(tmp_path))


@pytest.mark.nightly(
    "one stop of a job that is queued again",
    by="tests/launch/test_slurm.py::test_a_real_slurm_runs_it_on_two_nodes_and_requeues_it_after_a_signal",
)
def test_a_job_that_is_requeued_after_each_step_has_one_loss_curve(tmp_path, straight, monkeypatch):
    """Like Slurm, repeat the same command with the same job id and an incremented restart count."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run_config = config(tmp_path)
    for requeued in range(STEPS - 1):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued))
        process = run(run_config, "signals itself", requeued % 2)
        assert end(process) == 75
        assert record(tmp_path)["code"] == 75
        assert newest(tmp_path) == requeued + 1
        assert max(losses(tmp_path)) == requeued + 1

    assert resumed_losses(tmp_path, run_config) == straight
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == STEPS, (
        "a step is missing or repeated"
    )

    accounted = account(attempts_of(events.read(tmp_path)[0]))
    assert (accounted.attempts, accounted.failures) == (STEPS, 0)
    assert accounted.seconds["lost"] == 0
    assert accounted.idle_seconds > 0


def test_without_checkpoints_a_run_stops_immediately(tmp_path):
    process = run(config(tmp_path, enable=False), "data", 0)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGTERM)

    assert end(process) == record(tmp_path)["code"] == 76
    assert record(tmp_path)["message"] == (
        "stopped by SIGTERM (no checkpoints in this run) without saving"
    )
    assert no_orphans(tmp_path)


def test_ranks_save_when_the_signal_kills_torchrun(tmp_path):
    """torchrun has no handler for SIGUSR1: the signal kills it and would leave its ranks behind."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    options = {
        "job.dump_folder": tmp_path, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.seq_len": 32, "training.local_batch_size": 1, "training.steps": 100_000, "training.device": "cpu",
        "training.on_data_end": "repeat",
        "checkpoint.enable": "true", "checkpoint.interval": 100_000, "metrics.log_freq": 1,
    }  # fmt: skip
    arguments = [
        argument for name, value in options.items() for argument in (f"--{name}", str(value))
    ]
    process = subprocess.Popen(
        [*command, "-m", "shardtrain", "train", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(local.__file__).parents[2]),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and losses(tmp_path))
        process.send_signal(signal.SIGUSR1)
        process.wait(patience.seconds(TIMEOUT))
        wait_for((tmp_path / "exit.json").exists)
    finally:
        process.kill()

    assert record(tmp_path)["code"] == 75
    assert newest(tmp_path) == max(losses(tmp_path))


def _signalled_after_its_end(stderr_file):
    """End a run, then receive SIGCHLD (as from data workers that exit), SIGTERM and SIGINT."""
    sys.stderr = stderr_file.open("w", buffering=1)
    stop = signals.listen(30, can_save=True, hurry=lambda _: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    stop.end()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        time.sleep(0.1)
    os._exit(0)


def test_a_signal_after_the_end_of_a_run_prints_no_traceback(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=_signalled_after_its_end, args=(tmp_path / "stderr",)
    )
    process.start()
    process.join(patience.seconds(30))

    assert process.exitcode == 0
    assert (tmp_path / "stderr").read_text() == ""
