"""Jobs that a real Slurm refuses, or accepts and could never start: one line with the fix, and nothing is queued."""

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
    result = subprocess.run(
        ["squeue", "-h", "-o", "%j"],
        env=names,
        capture_output=True,
        text=True,
        timeout=patience.seconds(30),
    )
    assert result.returncode == 0
    return set(result.stdout.split())


REFUSED = {
    "a partition that is not there": (
        ["--launch.slurm.partition=nowhere"],
        ["launch.slurm.partition", "sinfo"],
    ),
    "a time above the partition's": (
        ["--launch.slurm.partition=small", "--launch.slurm.time_limit_minutes=5"],
        ["PartitionTimeLimit", "launch.slurm.time_limit_minutes"],
    ),
    "more nodes than the partition allows": (
        ["--launch.slurm.partition=small", "--launch.nodes=2"],
        ["PartitionNodeLimit", "launch.nodes"],
    ),
    "more nodes than there are": (
        ["--launch.nodes=5"],
        ["PartitionConfig", "does not have such nodes"],
    ),
    "GPUs that no node has": (
        ["--launch.devices_per_node=8"],
        ["generic resource", "launch.devices_per_node"],
    ),
    "more memory than a node has": (
        ["--launch.memory_gib_per_node=64"],
        ["Memory", "launch.memory_gib_per_node"],
    ),
    "more cores than a node has": (
        ["--launch.cpus_per_node=96"],
        ["PartitionConfig", "does not have such nodes"],
    ),
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
def test_an_impossible_job_is_one_line_with_a_fix_and_is_not_queued(cluster, case):
    arguments, texts = REFUSED[case]
    result = launch(cluster, "slurm", "debug", "--name=never", *arguments)
    assert (result.returncode, result.stdout) == (2, "")

    errors = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and all(text in errors[0] for text in texts), result.stderr
    assert "never" not in queued(cluster)


def test_a_job_that_must_wait_is_queued_with_a_note_and_its_status_explains_it(cluster):
    result = launch(cluster, "slurm", "debug", "--name=later", "--launch.slurm.partition=closed")
    assert result.returncode == 0
    assert "PartitionDown" in result.stderr
    assert len(result.stderr.splitlines()) == 1

    name = result.stdout.strip()
    status = launch(cluster, "status", name).stdout
    assert status.startswith(
        f"{name}: PENDING, PartitionDown: the partition is closed; the job starts when it opens, log /"
    )

    # A job that has not started has no log, but can be stopped.
    early = launch(cluster, "logs", name)
    assert early.returncode == 2
    assert "has no log yet" in early.stderr
    assert launch(cluster, "stop", name).returncode == 0
    assert "later" not in queued(cluster)


def with_line(names: dict[str, str], folder: Path, changed: str) -> dict[str, str]:
    """Return the variables of a login node whose configuration differs in one line."""
    lines = Path(names["SLURM_CONF"]).read_text().splitlines()
    lines_kept = [line for line in lines if not line.startswith(changed.partition("=")[0] + "=")]
    path = folder / "slurm.conf"
    path.write_text("\n".join([*lines_kept, changed, ""]))
    return {**names, "SLURM_CONF": str(path)}


def assert_reported(names: dict[str, str], message: str) -> None:
    begun = time.monotonic()
    result = launch(names, "slurm", "debug", "--name=never")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr, result.stderr
    # Slurm's message timeout of 10 s, plus the start of Python on a busy machine.
    assert time.monotonic() - begun < LIMIT_SECONDS + patience.seconds(20)


def test_a_controller_that_is_down_is_reported(cluster, tmp_path):
    assert_reported(
        with_line(cluster, tmp_path, "SlurmctldPort=1"), "check that the controller is up"
    )


def test_munge_that_is_down_is_reported(cluster, tmp_path):
    changed = f"AuthInfo=socket={tmp_path}/none,cred_expire=5"
    assert_reported(with_line(cluster, tmp_path, changed), "munge does not work on this machine")


def test_a_wrong_munge_key_is_reported(cluster, tmp_path_factory):
    """The controller does not reply to messages signed with another key."""
    folder = Path(cluster["SLURM_CONF"]).parent / "stranger"
    folder.mkdir()
    folder.chmod(0o755)  # regardless of the umask: munge's user must be able to read it
    with munged(folder / "munge") as socket:
        names = with_line(cluster, folder, f"AuthInfo=socket={socket},cred_expire=5")
        assert_reported(names, "that munge has the cluster's key")


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_job_that_slurm_has_forgotten_is_reported_in_one_line(cluster, tmp_path, verb):
    result = launch(cluster, verb, "slurm/999999", cwd=tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "slurm/999999" in result.stderr


def test_the_log_of_a_forgotten_job_is_found_in_the_folder_of_its_launch(cluster, tmp_path):
    (tmp_path / "run-999999.log").write_text("step: 1\n")
    result = launch(cluster, "logs", "slurm/999999", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "step: 1\n")


def test_a_forgotten_job_is_looked_up_in_the_accounting(cluster, tmp_path):
    """A stub of sacct replaces the accounting database, which this cluster does not have."""
    (tmp_path / "sacct").write_text(
        "#!/bin/sh\necho '999999|TIMEOUT|0:15|02:00:10|02:00:00|n[1-2]'\n"
    )
    (tmp_path / "sacct").chmod(0o755)
    names = {**cluster, "PATH": f"{tmp_path}:{PATH}"}
    result = launch(names, "status", "slurm/999999")

    assert result.stdout == "slurm/999999: TIMEOUT on n[1-2] for 02:00:10, exit code 0, signal 15\n"


def test_a_missing_image_or_folder_is_noted_before_submission(cluster):
    """The launcher only notes a missing path, because it may exist only on the nodes."""
    result = launch(
        cluster, "slurm", "--launch.slurm.partition=closed", "--launch.slurm.container=apptainer",
        "--launch.image=/nowhere/run.sif",
    )  # fmt: skip

    assert result.returncode == 0
    assert (
        "launch.image=/nowhere/run.sif does not exist on this machine; it must exist on all nodes"
        in result.stderr
    )
    assert launch(cluster, "stop", result.stdout.strip()).returncode == 0


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [
        ("PartitionTimeLimit", True), ("QOSMaxWallDurationPerJobLimit", True), ("AssocMaxNodePerJobLimit", True),
        ("InvalidAccount", True), ("DependencyNeverSatisfied", True),
        ("AssocMaxJobsLimit", False), ("QOSGrpNodeLimit", False), ("QOSMaxJobsPerUserLimit", False),
        ("ReqNodeNotAvail, UnavailableNodes:n1", False), ("Dependency", False), ("Priority", False),
    ],
)  # fmt: skip
def test_permanent_pending_reasons_are_recognized(reason, lasts):
    explanation, never_starts = meaning(reason)
    assert explanation
    assert never_starts is lasts

    line = SlurmRecord("7", "PENDING", reason=reason, count="2").line()
    assert line.startswith(f"slurm/7: PENDING on 2 nodes, {reason}: ")
    assert line.endswith("will not start") is lasts


def test_messages_name_existing_options():
    from shardtrain.config.options import options
    from shardtrain.launch.platforms.slurm_queue import REASONS, REFUSALS

    named = re.findall(
        r"launch\.[a-z_.]+",
        " ".join([*REFUSALS.values(), *(explanation for explanation, _ in REASONS.values())]),
    )

    assert named
    assert set(named) <= set(options())
