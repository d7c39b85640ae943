"""Laws of what a real Slurm refuses, or accepts and could never start: one line with the fix, and nothing is queued."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import patience
import pytest
from slurm_cluster import PATH, launch, munged

from shardtrain.launch.platforms.slurm_queue import SlurmRecord, meaning

LIMIT_SECONDS = 10


def queued(names: dict[str, str]) -> set[str]:
    done = subprocess.run(
        ["squeue", "-h", "-o", "%j"], env=names, capture_output=True, text=True, timeout=patience.seconds(30)
    )
    assert done.returncode == 0
    return set(done.stdout.split())


REFUSED = {
    "a partition that is not there": (["--launch.slurm.partition=nowhere"], ["launch.slurm.partition", "sinfo"]),
    "a time above the partition's": (
        ["--launch.slurm.partition=small", "--launch.slurm.time_limit_minutes=5"],
        ["PartitionTimeLimit", "launch.slurm.time_limit_minutes"],
    ),
    "more nodes than the partition allows": (
        ["--launch.slurm.partition=small", "--launch.nodes=2"],
        ["PartitionNodeLimit", "launch.nodes"],
    ),
    "more nodes than there are": (["--launch.nodes=5"], ["PartitionConfig", "no such nodes"]),
    "GPUs that no node has": (["--launch.devices_per_node=8"], ["generic resource", "launch.devices_per_node"]),
    "more memory than a node has": (["--launch.memory_gib_per_node=64"], ["Memory", "launch.memory_gib_per_node"]),
    "more cores than a node has": (["--launch.cpus_per_node=96"], ["PartitionConfig", "no such nodes"]),
    "a partition of another account": (
        ["--launch.slurm.partition=theirs", "--launch.slurm.account=mine"],
        ["account", "launch.slurm.account"],
    ),
    "a feature that no node has": (
        ['--launch.slurm.directives=["--constraint=h100"]'],
        ["feature", "launch.slurm.directives"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_run_is_one_line_with_the_fix_and_is_not_queued(cluster, case):
    arguments, told = REFUSED[case]
    done = launch(cluster, "slurm", "debug", "--name=never", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and all(word in errors[0] for word in told), done.stderr
    assert "never" not in queued(cluster)


def test_what_cannot_run_now_is_queued_with_a_note_and_its_status_says_why(cluster):
    done = launch(cluster, "slurm", "debug", "--name=later", "--launch.slurm.partition=closed")
    assert done.returncode == 0 and "PartitionDown" in done.stderr and len(done.stderr.splitlines()) == 1
    name = done.stdout.strip()
    told = launch(cluster, "status", name).stdout
    assert told.startswith(
        f"{name}: PENDING, PartitionDown: the partition is closed; it starts when it is opened, log /"
    )
    early = launch(cluster, "logs", name)
    assert early.returncode == 2 and "has no log yet" in early.stderr
    assert launch(cluster, "stop", name).returncode == 0
    assert "later" not in queued(cluster)


def with_line(names: dict[str, str], folder: Path, changed: str) -> dict[str, str]:
    """Variables of a login node whose configuration differs in one line."""
    lines = Path(names["SLURM_CONF"]).read_text().splitlines()
    kept = [line for line in lines if not line.startswith(changed.partition("=")[0] + "=")]
    path = folder / "slurm.conf"
    path.write_text("\n".join([*kept, changed, ""]))
    return {**names, "SLURM_CONF": str(path)}


def assert_reported(names: dict[str, str], words: str) -> None:
    begun = time.monotonic()
    done = launch(names, "slurm", "debug", "--name=never")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
    # Slurm's own timeout for messages is 10 s; starting Python on a busy machine comes on top
    assert time.monotonic() - begun < LIMIT_SECONDS + patience.seconds(20)


def test_a_controller_that_is_down_is_reported(cluster, tmp_path):
    assert_reported(with_line(cluster, tmp_path, "SlurmctldPort=1"), "is the controller up")


def test_munge_that_is_down_is_reported(cluster, tmp_path):
    changed = f"AuthInfo=socket={tmp_path}/none,cred_expire=5"
    assert_reported(with_line(cluster, tmp_path, changed), "munge does not work on this machine")


def test_another_key_of_munge_is_reported(cluster, tmp_path_factory):
    """The controller says nothing at all to a stranger."""
    folder = Path(cluster["SLURM_CONF"]).parent / "stranger"
    folder.mkdir()
    folder.chmod(0o755)  # whatever the umask: munge's own user must reach what is in it
    with munged(folder / "munge") as socket:
        names = with_line(cluster, folder, f"AuthInfo=socket={socket},cred_expire=5")
        assert_reported(names, "is the controller up, and does munge have the cluster's key")


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_job_that_slurm_has_forgotten_is_reported_in_one_line(cluster, tmp_path, verb):
    done = launch(cluster, verb, "slurm/999999", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "slurm/999999" in done.stderr


def test_the_log_of_a_forgotten_job_is_found_in_the_folder_of_its_launch(cluster, tmp_path):
    (tmp_path / "run-999999.log").write_text("step: 1\n")
    done = launch(cluster, "logs", "slurm/999999", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "step: 1\n")


def test_a_job_that_slurm_has_forgotten_is_asked_of_the_accounting(cluster, tmp_path):
    """sacct stands for a cluster with a database, which this one has not."""
    (tmp_path / "sacct").write_text("#!/bin/sh\necho '999999|TIMEOUT|0:15|02:00:10|02:00:00|n[1-2]'\n")
    (tmp_path / "sacct").chmod(0o755)
    names = {**cluster, "PATH": f"{tmp_path}:{PATH}"}
    done = launch(names, "status", "slurm/999999")
    assert done.stdout == "slurm/999999: TIMEOUT on n[1-2] for 02:00:10, exit code 0, signal 15\n"


def test_the_image_and_the_folder_are_looked_for_before_the_job_is_queued(cluster):
    """They may be the nodes' own, so that is a note."""
    done = launch(
        cluster, "slurm", "--launch.slurm.partition=closed", "--launch.slurm.container=apptainer",
        "--launch.image=/nowhere/run.sif",
    )  # fmt: skip
    assert done.returncode == 0
    assert "note: launch.image=/nowhere/run.sif is not on this machine; all nodes must have it" in done.stderr
    assert launch(cluster, "stop", done.stdout.strip()).returncode == 0


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [
        ("PartitionTimeLimit", True), ("QOSMaxWallDurationPerJobLimit", True), ("AssocMaxNodePerJobLimit", True),
        ("InvalidAccount", True), ("DependencyNeverSatisfied", True),
        ("AssocMaxJobsLimit", False), ("QOSGrpNodeLimit", False), ("QOSMaxJobsPerUserLimit", False),
        ("ReqNodeNotAvail, UnavailableNodes:n1", False), ("Dependency", False), ("Priority", False),
    ],
)  # fmt: skip
def test_reasons_that_last_are_told_from_those_that_pass(reason, lasts):
    words, never = meaning(reason)
    assert words and never is lasts
    line = SlurmRecord("7", "PENDING", reason=reason, count="2").line()
    assert line.startswith(f"slurm/7: PENDING on 2 nodes, {reason}: ") and line.endswith("will not start") is lasts


def test_the_answers_name_options_that_there_are():
    from shardtrain.config.options import options
    from shardtrain.launch.platforms.slurm_queue import REASONS, REFUSALS

    named = re.findall(r"launch\.[a-z_.]+", " ".join([*REFUSALS.values(), *(words for words, _ in REASONS.values())]))
    assert named and set(named) <= set(options())
