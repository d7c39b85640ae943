"""Submit a Slurm job, print its state or its log, and stop it.

By default (``EnforcePartLimits=NO``), Slurm accepts jobs that can never start. Only their ``Reason`` shows
it. Reasons: https://slurm.schedmd.com/job_reason_codes.html, and src/common/slurm_protocol_defs.c of Slurm
22.05 to 25.05.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardtrain.launch.platforms.slurm import ask
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import ConfigError, Problem

SUBMIT = ("sbatch", "--parsable")
REASON_SECONDS = 3.0
"""Time to wait for the reason of a submitted job. The scheduler usually sets it immediately."""

REFUSALS = {
    r"[Ii]nvalid partition": "correct launch.slurm.partition; `sinfo` lists them",
    r"[Rr]equested time limit": "lower launch.slurm.time_limit_minutes; `sinfo -o '%P %l'` shows the limits",
    r"[Ii]nvalid account|[Ii]nvalid qos|account/partition combination": (
        "correct launch.slurm.account and launch.slurm.qos; list yours with `sacctmgr show associations user=$USER`"
    ),
    r"violates accounting/QOS policy|QOS[A-Z]\w*Limit|Assoc[A-Z]\w*Limit": (
        "request less, or wait until your other jobs have ended; `sacctmgr show qos` shows the limits"
    ),
    r"generic resource|gres": "correct launch.devices_per_node; `sinfo -o '%P %G'` shows the devices of the nodes",
    r"Memory specification": "lower launch.memory_gib_per_node; `sinfo -o '%P %m'` shows the nodes' memory in MiB",
    r"CPU count|More processors": "lower launch.cpus_per_node; `sinfo -o '%P %c'` shows the CPUs of the nodes",
    r"[Nn]ode count|node configuration is not available": (
        "lower launch.nodes or the request for each node; `sinfo -o '%P %D %c %m %G'` shows the nodes"
    ),
    r"[Ii]nvalid feature|[Ii]nvalid node name|reservation": "correct launch.slurm.directives",
    r"group not permitted|[Aa]ccess/permission|not permitted to use": (
        "ask the cluster's administrators for access, or use another partition"
    ),
    r"Zero Bytes": (
        "check that the controller is up (`scontrol ping`), and that munge has the cluster's key on this machine"
    ),
    r"contact slurm controller|timed out|configuration (source|file)": (
        "check that the controller is up (`scontrol ping`), and that this is a login node; try again later"
    ),
    r"[Mm]unge|authentication|credential": (
        "munge does not work on this machine; report it to the cluster's administrators"
    ),
}
"""Pattern of sbatch's error -> fix."""

_NO_TASK = "4294967294"
"""Task number in the log name of an array that has not started yet."""
_LIMIT = "a limit of your account or QOS; `sacctmgr show qos` shows them"
REASONS: dict[str, tuple[str, bool]] = {
    r"PartitionTimeLimit": (
        "launch.slurm.time_limit_minutes exceeds the limit of the partition",
        True,
    ),
    r"PartitionNodeLimit": ("launch.nodes is outside of the limits of the partition", True),
    r"PartitionConfig|BadConstraints": (
        "the partition does not have such nodes, enough nodes, or enough time",
        True,
    ),
    r"AccountNotAllowed|Job's account": ("the partition does not allow launch.slurm.account", True),
    r"QOSNotAllowed|Job's QOS": ("the partition does not allow launch.slurm.qos", True),
    r"InvalidAccount": ("launch.slurm.account is unknown", True),
    r"InvalidQOS": ("launch.slurm.qos is unknown", True),
    r"(Assoc|QOS)\w*(PerJob|PerNode)\w*": (_LIMIT, True),
    r"QOSMin\w*": ("the request is below the minimum of the QOS; see `sacctmgr show qos`", True),
    r"(Assoc|QOS|MaxCpu|MaxMem|MaxJobs)\w*": (
        _LIMIT + "; it starts when other jobs of yours have ended",
        False,
    ),
    r"PartitionDown|PartitionInactive": (
        "the partition is closed; the job starts when it opens",
        False,
    ),
    r"ReqNodeNotAvail.*|Nodes? ?Down.*|Nodes required for job are.*": (
        "nodes are down, drained or reserved",
        False,
    ),
    r"JobHeldUser|JobHeldAdmin|.*requeued held": (
        "it is held; `scontrol release` releases it",
        False,
    ),
    r"BeginTime": ("it was queued again or has a start time; Slurm waits up to two minutes", False),
    r"JobArrayTaskLimit": ("launch.slurm.sweep_at_once tasks are already running", False),
    r"Priority": ("other jobs have a higher priority", False),
    r"Resources": ("it waits for nodes to become free", False),
    r"Dependency": ("it waits for another job", False),
    r"DependencyNeverSatisfied": ("the job that it waits for has failed", True),
}
"""Pattern of a pending job's reason -> (explanation, True if the job can never start without a change)."""


@dataclass(frozen=True)
class SlurmRecord:
    """State of a job or of one task of an array, as text in Slurm's format. "" if unknown."""

    number: str
    state: str
    reason: str = ""
    nodes: str = ""
    count: str = ""
    run_time: str = ""
    time_limit: str = ""
    restarts: str = ""
    exit_code: str = ""
    log: str = ""

    def line(self) -> str:
        """Format the state as one line.

        >>> SlurmRecord("7", "RUNNING", nodes="n[1-2]", run_time="00:05:00", time_limit="02:00:00", restarts="1").line()
        'slurm/7: RUNNING on n[1-2] for 00:05:00, 1:55:00 left, queued again 1 time'
        """
        words = f"slurm/{self.number}: {self.state}"
        if self.state == "PENDING":
            if self.count not in ("", "1"):
                words += f" on {self.count} nodes"
            explanation, never_starts = meaning(self.reason)
            words += f", {self.reason or 'no reason yet'}"
            if explanation:
                words += f": {explanation}"
            if never_starts:
                words += "; it will not start"
        else:
            if self.nodes not in ("", "(null)", "None assigned"):
                words += f" on {self.nodes}"
            if self.run_time:
                words += f" for {self.run_time}"
        left = ""
        # The remaining time, if there is a limit.
        if self.state == "RUNNING":
            left = _left(self.run_time, self.time_limit)
        if left:
            words += f", {left} left"
        # A job that has ended: its exit code, and why.
        if self.exit_code and self.state not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETED"):
            code, _, number = self.exit_code.partition(":")
            words += f", exit code {code}"
            if number not in ("", "0"):
                words += f", signal {number}"
            if self.reason not in ("", "None", "NonZeroExitCode"):
                words += f", {self.reason}"
        if self.restarts not in ("", "0"):
            words += f", queued again {self.restarts} time{'s' * (self.restarts != '1')}"
        return words + (f", log {self.log}" if self.log else "")


def meaning(reason: str) -> tuple[str, bool]:
    """Return the explanation of a pending job's reason, and True if that reason
    means that the job can never start.

    >>> meaning("PartitionTimeLimit")[1], meaning("Resources")[1], meaning("(null)")
    (True, False, ('', False))
    """
    for pattern, answer in REASONS.items():
        if re.match(rf"(?:{pattern})(?:$|\W)", reason):
            return answer
    return "", False


def submit(text: str) -> str:
    """Submit a script with sbatch and return the job's number.

    A job that can never start is cancelled. For one that cannot start now, print a note.

    Raises:
        ConfigError: sbatch is missing or rejects the script, or the job can never start.
    """
    missing = "install Slurm's client, launch from a login node, or use --dry-run"
    number = ask([*SUBMIT], text, missing, REFUSALS).strip().partition(";")[0]
    # sbatch accepts jobs that can never start. Only the reason of the pending job shows this.
    record = _first_look(number)
    if record is None or record.state != "PENDING":
        return number
    explanation, never_starts = meaning(record.reason)
    if never_starts:
        # The job would block the queue, and the user would wait for it.
        ask(["scancel", number])
        rule = f"would never start ({record.reason}): {explanation}"
        raise ConfigError(
            Problem(
                "sbatch",
                None,
                rule=f"accepted a job that {rule}",
                fix="correct [launch], or submit the script of --dry-run yourself if the cluster is about to change",
            )
        )
    # Waiting for other jobs is normal and needs no note.
    if explanation and record.reason not in ("Priority", "Resources"):
        print(f"note: slurm/{number} waits, {record.reason}: {explanation}", file=sys.stderr)
    return number


def _first_look(number: str) -> SlurmRecord | None:
    """Return the state of a job once the scheduler has set its reason, or after ``REASON_SECONDS``."""
    end = time.monotonic() + REASON_SECONDS
    record = None
    while time.monotonic() < end:
        try:
            record = next(records(number), None)
        except ConfigError:
            return None
        if record is None or record.state != "PENDING":
            return record
        # Slurm first reports PartitionConfig, and later a more specific reason, such as PartitionTimeLimit.
        if record.reason not in ("None", "(null)", "PartitionConfig"):
            return record
        time.sleep(0.3)
    return record


def records(number: str) -> Iterator[SlurmRecord]:
    """Yield the state of a job, or of each task of an array.

    Raises:
        ConfigError: Slurm does not answer, or has forgotten the job.
    """
    answer = ask(["scontrol", "--oneliner", "show", "job", number], fixes=REFUSALS)
    for line in answer.splitlines():
        if "JobId=" in line:
            # Values may contain blanks, so a pair ends at the next NAME=.
            yield _record(dict(re.findall(r"(\S+?)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)", line)))


def _record(has: dict[str, str]) -> SlurmRecord:
    # A task of an array has two numbers: that of the array, and its own.
    task = has.get("JobId", "")
    if "ArrayJobId" in has:
        task = f"{has['ArrayJobId']}_{has.get('ArrayTaskId', '')}"
    # The log of an array that has not started contains a placeholder for the task.
    log = has.get("StdOut", "")
    if _NO_TASK in log:
        log = ""
    return SlurmRecord(
        number=task,
        state=has.get("JobState", "UNKNOWN"),
        reason=has.get("Reason", "").replace("_", " "),
        nodes=has.get("NodeList", ""),
        count=has.get("NumNodes", "").partition("-")[0],
        run_time=has.get("RunTime", ""),
        time_limit=has.get("TimeLimit", ""),
        restarts=has.get("Restarts", ""),
        exit_code=has.get("ExitCode", ""),
        log=log,
    )


def status(number: str) -> int:
    """Print one line for a job, or for each task of an array.

    Raises:
        ConfigError: Slurm does not answer, or no longer knows the job.
    """
    # The controller forgets a job some minutes after its end. Accounting may still know it.
    try:
        jobs = list(records(number))
    except ConfigError as error:
        jobs = _accounted(number, error)
    print("\n".join(record.line() for record in jobs))
    return 0


def logs(number: str) -> int:
    """Print the log of a job. For an array, print the logs of all tasks, each after its file name.

    Raises:
        ConfigError: Slurm does not answer, or there is no log on this machine.
    """
    try:
        named = [Path(record.log) for record in records(number) if record.log]
    except ConfigError as error:
        _raise_unless_forgotten(error)
        # Look in the current folder for the name that the script gives its log.
        folder = Path.cwd()
        named = sorted(folder.glob(f"*-{number}.log"))
        if not named:
            named = sorted(folder.glob(f"*-{number}_*.log"))
        if not named:
            raise ConfigError(
                Problem(
                    "id",
                    f"slurm/{number}",
                    rule="is no longer in Slurm's memory, and this folder has no log with its number",
                    fix=f"look for NAME-{number}.log in the folder from which it was launched",
                )
            ) from None
    # Tasks of an array may share a log.
    existing = [path for path in dict.fromkeys(named) if path.exists()]
    if not existing:
        raise ConfigError(Problem("id", f"slurm/{number}", "has no log yet", "check its status"))
    for path in existing:
        if len(named) > 1:
            print(f"==> {path} <==")
        with open(
            path, encoding="utf-8", errors="replace", opener=atomic_io.without_waiting
        ) as lines:
            sys.stdout.writelines(lines)
    return 0


def stop(number: str) -> int:
    """Cancel a job, an array, or a task of an array.

    Raises:
        ConfigError: Slurm does not answer, or does not know the job.
    """
    try:
        next(records(number), None)  # scancel does not fail for an unknown job
    except ConfigError as error:
        _raise_unless_forgotten(error)
        raise ConfigError(
            Problem(
                "id",
                f"slurm/{number}",
                rule="is unknown to Slurm: it has ended, or belongs to another cluster",
                fix="use the ID that launch printed",
            )
        ) from None
    ask(["scancel", number], fixes=REFUSALS)
    return 0


def _raise_unless_forgotten(error: ConfigError) -> None:
    """Raise the error again, unless it means that Slurm no longer knows the job."""
    if "Invalid job id" not in str(error):
        raise error


def _accounted(number: str, error: ConfigError) -> list[SlurmRecord]:
    """Return the accounting records of a job that the controller no longer knows."""
    _raise_unless_forgotten(error)
    fields = "JobID,State,ExitCode,Elapsed,Timelimit,NodeList"
    try:
        answer = ask(
            [
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                f"--jobs={number}",
                f"--format={fields}",
            ],
        )
    # Accounting is optional on a cluster.
    except ConfigError:
        answer = ""
    # A row with another number of fields is a message.
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == fields.count(",")]
    if not rows:
        raise ConfigError(
            Problem(
                "id",
                f"slurm/{number}",
                rule="is no longer in Slurm's memory (some minutes after its end), and has no accounting record",
                fix=f"its log is NAME-{number}.log in the folder from which it was launched",
            )
        )
    return [
        SlurmRecord(task, state, nodes=nodes, run_time=run, time_limit=limit, exit_code=code)
        for task, state, code, run, limit, nodes in rows
    ]


def _left(run_time: str, limit: str) -> str:
    """Return the remaining time of a job in Slurm's format, or "" without a limit.

    >>> _left("00:00:30", "1-00:00:00"), _left("00:00:30", "UNLIMITED")
    ('23:59:30', '')
    """
    spent = _seconds(run_time)
    most = _seconds(limit)
    if spent is None or most is None:
        return ""
    minutes, seconds = divmod(max(0, most - spent), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _seconds(text: str) -> int | None:
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
