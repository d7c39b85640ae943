"""The command of a rendered manifest, run as its pods would be: with what the operator sets, and nothing else."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pods
import pytest
import yaml
from launched import losses, newest, wait_for
from tiers import cases
from tiny import text_file

TIMEOUT = 240
KINDS = ["pytorchjob", "trainjob", "jobset"]
CONFIG = """\
[job]
dump_folder = "{folder}"
[model.overrides]
num_layers = 1
[training]
dataset = "text"
dataset_path = "{text}"
seq_len = 32
local_batch_size = 1
global_batch_size = 4
device = "cpu"
on_data_end = "repeat"
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 1
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = {interval}
keep_latest_k = 3
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is called lo")


def rendered(kind: str, folder: Path, steps: int, *more: str, interval: int = 1000) -> tuple[list[dict], Path]:
    """The manifests of a job, and the file that its ConfigMap holds."""
    folder.mkdir()
    written, mounted = folder / "run.toml", folder / "mounted.toml"
    written.write_text(CONFIG.format(folder=folder / "out", text=text_file(), interval=interval))
    words = [f"--training.steps={steps}", f"--launch.python={sys.executable}", "--launch.name=run", *more]
    found = list(yaml.safe_load_all(pods.manifests(kind, words, written)))
    mounted.write_text(found[0]["data"]["config.toml"])
    return found, mounted


def started(folder: Path) -> list[int]:
    """The number of ranks of each attempt."""
    path = folder / "out" / "goodput.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    lines = map(json.loads, whole.splitlines())
    return [one["world_size"] for one in lines if one["kind"] == "start"]


def num_steps(folder: Path) -> int:
    """The last step that has been told."""
    return max(losses(folder / "out"), default=0) if (folder / "out" / "metrics.jsonl").exists() else 0


def reach(folder: Path, step: int, *running: pods.Pod) -> None:
    """Wait until the run has made a step, while these pods run."""

    def is_there() -> bool:
        codes = [one.process.poll() for one in running]
        # one text: pytest cuts the middle out of any other object
        assert codes == [None] * len(running), f"ended with {codes}:\n" + "\n".join(one.told() for one in running)
        return num_steps(folder) >= step

    wait_for(is_there, TIMEOUT)


@pytest.mark.nightly(
    "two hosts stop and continue",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue",
)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), cases([("pytorchjob", 1)], nightly=[(kind, 2) for kind in KINDS]))
def test_two_pods_train_and_after_a_request_to_stop_the_same_command_continues(tmp_path, kind, ranks):
    folder, steps = tmp_path / "run", 60
    found, mounted = rendered(kind, folder, steps, "--launch.nodes=2", f"--launch.nproc_per_node={ranks}")
    for attempt in (1, 2):
        endpoint = pods.free_endpoint()
        # the one that waits comes first
        running = [pods.start(found, n, endpoint, folder / f"{attempt}-{n}.log", mounted) for n in (1, 0)]
        try:
            if attempt == 1:
                reach(folder, 5, *running)
                running[0].process.send_signal(signal.SIGTERM)
            codes = [one.ended(TIMEOUT) for one in running]
        finally:
            for one in running:
                one.kill()
        assert codes == ([75, 75] if attempt == 1 else [0, 0]), [one.told() for one in running]
        assert attempt == 2 or 5 <= newest(folder / "out") < steps
    assert started(folder) == [2 * ranks] * 2, "two pods of so many ranks"
    assert list(losses(folder / "out")) == list(range(1, steps + 1)), "no step is lost or made twice"


@pytest.mark.slow
@pytest.mark.timeout(5 * TIMEOUT)
@pytest.mark.nightly("it takes minutes")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["evicted", "lost"])
def test_an_elastic_job_continues_without_a_pod_and_with_it_when_it_is_back(tmp_path, how):
    folder = tmp_path / "run"
    more = ("--launch.min_nodes=1", "--launch.nodes=2", "--launch.nproc_per_node=1")
    found, mounted = rendered("pytorchjob", folder, 10**6, *more, interval=5)
    endpoint = pods.free_endpoint()
    # of elasticPolicy.rdzvConf: a round waits for more pods for 3 s, not 30. A lost one is missed after 15 s, as ever:
    # on a busy machine the thread that says "I am here" may be late, and the others would meet without its pod
    patience = {"PET_RDZV_CONF": "last_call_timeout=3"}

    def start(number: int) -> pods.Pod:
        return pods.start(found, number, endpoint, folder / f"{number}.log", mounted, **patience)

    running = [start(0)]

    def has_joined() -> bool:
        """A pod that comes when the first one's heartbeat is late meets alone, and is refused the other's folder: 2."""
        if running[1].process.poll() == 2:
            running[1] = start(1)  # as its restartPolicy says
        return started(folder)[-1:] == [2]

    try:
        # the pod that hosts the meeting must be the first here: both have the same address
        wait_for(lambda: pods.listens(endpoint), TIMEOUT)
        running.append(start(1))
        wait_for(has_joined, TIMEOUT)  # the first may have begun alone
        num_attempts = len(started(folder))
        reach(folder, num_steps(folder) + 8, *running)
        saved = newest(folder / "out")
        if how == signal.SIGTERM:
            running[1].process.send_signal(how)
            assert running[1].ended(TIMEOUT) == 75, running[1].told()
            saved = newest(folder / "out")
        running[1].kill()
        wait_for(lambda: len(started(folder)) > num_attempts, TIMEOUT)
        reach(folder, saved + 20, running[0])
        running[1] = start(1)
        wait_for(has_joined, TIMEOUT)
        reach(folder, num_steps(folder) + 8, *running)
        for one in running:  # the job is deleted
            one.process.send_signal(signal.SIGTERM)
        assert [one.ended(TIMEOUT) for one in running] == [75, 75], [one.told() for one in running]
    finally:
        for one in running:
            one.kill()
    assert started(folder)[num_attempts - 1 :] == [2, 1, 2]
    check(folder, tmp_path / "whole")


def check(folder: Path, whole: Path) -> None:
    """The run of several attempts saw what an undisturbed one of one rank sees, and learned the same."""
    last = num_steps(folder)
    # the same number of steps is asked for, because the learning rate follows it
    found, mounted = rendered("pytorchjob", whole, 10**6, "--launch.nproc_per_node=1")
    alone = pods.start(found, 0, "", whole / "log", mounted)
    try:
        reach(whole, last, alone)
        alone.process.send_signal(signal.SIGTERM)
        assert alone.ended(TIMEOUT) == 75, alone.told()
    finally:
        alone.kill()
    mine, theirs = losses(folder / "out"), losses(whole / "out")
    assert sorted(mine) == list(range(1, last + 1))
    assert [mine[step][1] for step in sorted(mine)] == [theirs[step][1] for step in sorted(mine)]
    for step in range(1, min(last, 60) + 1):  # later, sums of float32 in another order have grown
        assert mine[step][0] == pytest.approx(theirs[step][0], rel=1e-3), step
