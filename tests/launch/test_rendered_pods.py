"""The command of a rendered manifest, run locally with only the variables that the operator sets for its pods."""

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

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the loopback interface is called lo"
)


def rendered(
    kind: str, folder: Path, steps: int, *more: str, interval: int = 1000
) -> tuple[list[dict], Path]:
    """Return the manifests of a job and the path of the file from its ConfigMap."""
    folder.mkdir()
    written = folder / "run.toml"
    mounted = folder / "mounted.toml"
    written.write_text(CONFIG.format(folder=folder / "out", text=text_file(), interval=interval))
    arguments = [
        f"--training.steps={steps}",
        f"--launch.python={sys.executable}",
        "--launch.name=run",
        *more,
    ]
    documents = list(yaml.safe_load_all(pods.manifests(kind, arguments, written)))
    mounted.write_text(documents[0]["data"]["config.toml"])
    return documents, mounted


def started(folder: Path) -> list[int]:
    """Return the number of ranks of each attempt."""
    path = folder / "out" / "goodput.jsonl"
    complete_lines = path.read_text().rpartition("\n")[0] if path.exists() else ""
    events = map(json.loads, complete_lines.splitlines())
    return [event["world_size"] for event in events if event["kind"] == "start"]


def num_steps(folder: Path) -> int:
    """Return the last logged step."""
    return (
        max(losses(folder / "out"), default=0) if (folder / "out" / "metrics.jsonl").exists() else 0
    )


def reach(folder: Path, step: int, *running: pods.Pod) -> None:
    """Wait until the run has completed a step. These pods must still be running."""

    def is_reached() -> bool:
        codes = [pod.process.poll() for pod in running]
        # A string, because pytest truncates any other object.
        assert codes == [None] * len(running), f"ended with {codes}:\n" + "\n".join(
            pod.output() for pod in running
        )
        return num_steps(folder) >= step

    wait_for(is_reached, TIMEOUT)


@pytest.mark.nightly(
    "two hosts stop and continue",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), cases([("pytorchjob", 1)], nightly=[(kind, 2) for kind in KINDS])
)
def test_two_pods_train_and_after_a_request_to_stop_the_same_command_continues(
    tmp_path, kind, ranks
):
    folder = tmp_path / "run"
    steps = 60
    documents, mounted = rendered(
        kind, folder, steps, "--launch.nodes=2", f"--launch.nproc_per_node={ranks}"
    )
    for attempt in (1, 2):
        endpoint = pods.free_endpoint()
        # Start the node that has to wait first.
        running = []
        for node in (1, 0):
            log = folder / f"{attempt}-{node}.log"
            running.append(pods.start(documents, node, endpoint, log, mounted))
        try:
            if attempt == 1:
                reach(folder, 5, *running)
                running[0].process.send_signal(signal.SIGTERM)
            codes = [pod.ended(TIMEOUT) for pod in running]
        finally:
            for pod in running:
                pod.kill()

        assert codes == ([75, 75] if attempt == 1 else [0, 0]), [pod.output() for pod in running]
        assert attempt == 2 or 5 <= newest(folder / "out") < steps

    assert started(folder) == [2 * ranks] * 2, "each attempt has two pods with this many ranks"
    assert list(losses(folder / "out")) == list(range(1, steps + 1)), "a step was lost or repeated"


@pytest.mark.slow
@pytest.mark.timeout(5 * TIMEOUT)
@pytest.mark.nightly("it takes minutes")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["evicted", "lost"])
def test_an_elastic_job_continues_without_a_pod_and_after_its_return(tmp_path, how):
    folder = tmp_path / "run"
    more = ("--launch.min_nodes=1", "--launch.nodes=2", "--launch.nproc_per_node=1")
    documents, mounted = rendered("pytorchjob", folder, 10**6, *more, interval=5)
    endpoint = pods.free_endpoint()
    # From elasticPolicy.rdzvConf: a round waits 3 s for more pods instead of 30 s. A lost pod is still detected after
    # 15 s: on a busy machine the heartbeat thread may be late, and the others would meet without its pod.
    patience = {"PET_RDZV_CONF": "last_call_timeout=3"}

    def start(number: int) -> pods.Pod:
        return pods.start(
            documents, number, endpoint, folder / f"{number}.log", mounted, **patience
        )

    running = [start(0)]

    def has_joined() -> bool:
        """True if both pods train together.

        If the first pod's heartbeat is late, the second one meets alone and exits with 2, because the folder is in use.
        """
        if running[1].process.poll() == 2:
            running[1] = start(1)  # as its restartPolicy demands
        return started(folder)[-1:] == [2]

    try:
        # Both pods have the same address here, so the first that starts hosts the rendezvous.
        wait_for(lambda: pods.listens(endpoint), TIMEOUT)
        running.append(start(1))
        wait_for(has_joined, TIMEOUT)  # the first pod may have started to train alone
        num_attempts = len(started(folder))
        reach(folder, num_steps(folder) + 8, *running)

        # The first pod continues without the second one.
        saved = newest(folder / "out")
        if how == signal.SIGTERM:
            running[1].process.send_signal(how)
            assert running[1].ended(TIMEOUT) == 75, running[1].output()
            saved = newest(folder / "out")
        running[1].kill()
        wait_for(lambda: len(started(folder)) > num_attempts, TIMEOUT)
        reach(folder, saved + 20, running[0])

        # Both continue after its return.
        running[1] = start(1)
        wait_for(has_joined, TIMEOUT)
        reach(folder, num_steps(folder) + 8, *running)

        # The job is deleted.
        for pod in running:
            pod.process.send_signal(signal.SIGTERM)
        for pod in running:
            assert pod.ended(TIMEOUT) == 75, pod.output()
    finally:
        for pod in running:
            pod.kill()

    assert started(folder)[num_attempts - 1 :] == [2, 1, 2]

    check(folder, tmp_path / "undisturbed")


def check(folder: Path, reference: Path) -> None:
    """Compare the data and losses of the run in ``folder`` with those of an undisturbed run on one rank."""
    last = num_steps(folder)
    # The configured number of steps must be the same, because the learning rate depends on it.
    documents, mounted = rendered("pytorchjob", reference, 10**6, "--launch.nproc_per_node=1")
    pod = pods.start(documents, 0, "", reference / "log", mounted)
    try:
        reach(reference, last, pod)
        pod.process.send_signal(signal.SIGTERM)
        assert pod.ended(TIMEOUT) == 75, pod.output()
    finally:
        pod.kill()
    actual = losses(folder / "out")
    expected = losses(reference / "out")
    assert sorted(actual) == list(range(1, last + 1))
    for step, (_, data_hash) in actual.items():
        assert data_hash == expected[step][1], step
    # later, rounding differences between float32 sums have grown
    for step in range(1, min(last, 60) + 1):
        assert actual[step][0] == pytest.approx(expected[step][0], rel=1e-3), step
