"""Verb ``doctor``: start ranks like ``train``, or join the ranks of a launcher, and print the report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardtrain import __version__, config
from shardtrain.config import Loaded
from shardtrain.config.command_line import VerbOption, split, take
from shardtrain.tools.doctor.doctor_report import document, exit_code, text_of, to_json
from shardtrain.utils import stop_signals, temporary, variables
from shardtrain.utils.arguments import print_requested_help
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.variables import is_whole_number

USAGE = """\
usage: shardtrain doctor [CONFIG.toml] [--nproc N] [--for_ranks N] [--json] [--strict] [--limit_seconds S]
                         [--section.key VALUE ...]

Find problems that would end or slow down a run: versions, hosts, environment, configuration, limits, memory, clocks,
storage, devices, accuracy of long sums, and the bandwidth of each mesh axis. Start ranks like shardtrain train, or run
as one rank of a job:

  torchrun --nproc-per-node 8 -m shardtrain doctor CONFIG.toml        srun shardtrain doctor CONFIG.toml

With CONFIG.toml or overrides, also check its mesh, folders, data and model. Print one row per check: pass, warn or
fail, the measured value, the expected value, and the fix. The doctor does not train, and removes all its files.

  --for_ranks N      judge the limits of these hosts (open files, ports, tracked connections) for a run of N ranks
  --json             print one JSON document instead of the table
  --strict           treat warnings as failures
  --limit_seconds S  time limit of one check (default: 30); exceeding it is reported

Exit status: 0 without failures, else by the area of the first failure: 2 configuration, versions or environment,
6 ranks or network, 7 memory, 8 storage, 1 any other area.

  shardtrain doctor my_run.toml --nproc 8
"""

FOLDER = "SHARDTRAIN_DOCTOR"
"""Environment variable with the folder to which a started rank writes the report."""
REPORT = "report.json"
LIMIT_SECONDS = 30.0
MOST_RANKS = 1_000_000
_OWN_WORDS = ("TORCH_CPP_LOG_LEVEL", "FATAL")
"""Suppresses PyTorch's C++ stack traces, because the report contains the failures."""
LEAVE_SECONDS = 5.0
"""Maximum time for which rank 0 keeps serving the exit status to the other ranks."""


@dataclass(frozen=True)
class DoctorOptions:
    """Parsed options.

    Attributes:
        num_ranks: Number of ranks of the planned run, for which limits are judged. 0 for the number of the
            doctor's ranks.
    """

    loaded: Loaded
    nproc: int | None
    json: bool
    strict: bool
    limit_seconds: float
    has_config: bool
    num_ranks: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run the verb and return its exit status, see USAGE. Raise ConfigError for invalid options."""
    from shardtrain.launch import agent, environment

    print_requested_help(arguments, USAGE)
    request = read(arguments)
    if environment.is_rank(os.environ):
        _as_rank(request)
    # The configured launcher may start the doctor on other hosts. It then returns their exit status.
    code = agent.run_verb("doctor", arguments, request.loaded.config, request.nproc)
    if code is None:
        return _here(request, list(arguments))
    return code


def read(argv: Sequence[str]) -> DoctorOptions:
    """Parse the doctor's own options and those of ``train``. Raise ConfigError for invalid options."""
    options = {
        "--limit_seconds": VerbOption(_seconds, "30"),
        "--for_ranks": VerbOption(_num_ranks, "4096"),
    }
    taken = take(argv, options, ("--json", "--strict"))
    # The other words are those of train. Options of train that the doctor cannot honor are errors.
    arguments = split(taken.rest)
    if arguments.max_restarts:
        raise ConfigError(
            Problem(
                "--max_restarts",
                arguments.max_restarts,
                rule="has no effect, because the doctor runs once",
                fix="remove it",
                where="command line",
            )
        )
    loaded = config.load(arguments.path, arguments.overrides)
    if loaded.config.comm.mode == "fake_backend":
        raise ConfigError(
            Problem(
                "comm.mode",
                "fake_backend",
                rule="has no communication to measure",
                fix="remove it, or use it with shardtrain train to check a mesh without machines",
            )
        )
    return DoctorOptions(
        loaded,
        arguments.nproc,
        json="--json" in taken.verb_options,
        strict="--strict" in taken.verb_options,
        limit_seconds=taken.verb_options.get("--limit_seconds", LIMIT_SECONDS),
        has_config=arguments.path is not None or bool(arguments.overrides),
        num_ranks=taken.verb_options.get("--for_ranks", 0),
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 3600:
        raise ValueError("must be 1 to 3600 seconds")
    return value


def _num_ranks(text: str) -> int:
    value = int(text) if is_whole_number(text) else 0
    if not 1 <= value <= MOST_RANKS:
        raise ValueError(f"must be 1 to {MOST_RANKS} ranks")
    return value


def _here(request: DoctorOptions, arguments: list[str]) -> int:
    """Start the ranks of this machine with the launcher of ``train``, and print rank 0's report."""
    from shardtrain.launch import environment, local

    environment.set_allocator_default(os.environ)
    # Choose the device type and the number of ranks as train does, because the doctor tests that run.
    loaded = request.loaded
    accelerators = environment.count_accelerators(loaded.config.training.device)
    choice = environment.choose_processes_here(loaded.config, request.nproc)
    os.environ.setdefault(*_OWN_WORDS)
    environment.set_process_defaults(
        os.environ, choice.count, environment.usable_cores(), alone=True
    )
    ranks = "1 process" if choice.count == 1 else f"{choice.count} processes"
    print(
        f"shardtrain {__version__}: doctor with {ranks} ({choice.reason})",
        file=sys.stderr,
        flush=True,
    )

    # The launcher writes logs and exit.json to the run's folder. Use a temporary folder instead.
    with temporary.temporary_folder("doctor") as folder:
        launched = _with_folder(loaded, folder)
        os.environ[FOLDER] = str(folder)
        try:
            if accelerators == 0:  # forked ranks share imported modules
                with heartbeat("importing PyTorch"):
                    from shardtrain.tools.doctor import rank  # noqa: F401

            arguments = ["doctor", *arguments]
            status = local.launch_verb(
                launched, choice.count, lambda _: _run(request), arguments, accelerators
            )
            # Ranks that end without an error always write a report, unless something killed them.
            report = folder / REPORT
            if status or not report.is_file():
                return status or 1
            result = json.loads(report.read_text(encoding="utf-8"))
        finally:
            del os.environ[FOLDER]
    return _print(request, result)


def _with_folder(loaded: Loaded, folder: Path) -> Loaded:
    run = loaded.config
    job = dataclasses.replace(run.job, dump_folder=str(folder))
    checkpoint = dataclasses.replace(run.checkpoint, enable=False)
    changed = dataclasses.replace(run, job=job, checkpoint=checkpoint)
    return dataclasses.replace(loaded, config=changed)


def _as_rank(request: DoctorOptions) -> NoReturn:
    """Run as one of several ranks, started by torchrun, by srun, or by ``_here`` as a new process."""
    import signal

    from shardtrain.launch import environment, local

    # shardtrain's own launcher sets this variable. A rank then ends with its parent process.
    parent = os.environ.get("SHARDTRAIN_PARENT")
    if parent:
        local.detach(variables.number(os.environ, "SHARDTRAIN_PARENT", ""))
    environment.adopt_slurm(os.environ)
    environment.set_allocator_default(os.environ)
    os.environ.setdefault(*_OWN_WORDS)
    environment.set_process_defaults(
        os.environ, _local_size(), environment.usable_cores(), alone=False
    )

    # Below shardtrain's own launcher, rank 0 writes the report to a file, which the launcher prints.
    if parent:
        launched = _with_folder(request.loaded, Path(os.environ[FOLDER]))
        local.leave(local.run_rank(launched, lambda _: _run(request)))

    # Below torchrun or srun, rank 0 prints the report.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_signals.die_with_parent(signal.SIGTERM)
    result = _run(request)
    if result["findings"] and os.environ["RANK"] == "0":
        _print(request, result)
    local.leave(result["exit_code"])


def _print(request: DoctorOptions, result: dict[str, Any]) -> int:
    text = to_json(result) if request.json else text_of(result)
    print(text, flush=True)
    return int(result["exit_code"])


def _run(request: DoctorOptions) -> dict[str, Any]:
    """Examine this rank. Return the report on rank 0, and only the exit status on other ranks."""
    from shardtrain.distributed.process_group import pick_device_type
    from shardtrain.tools.doctor import rank, store_channel
    from shardtrain.tools.doctor.context import RankContext

    started = time.monotonic()
    place = variables.number(os.environ, "RANK", "0")
    size = variables.number(os.environ, "WORLD_SIZE", "1")
    device = pick_device_type(request.loaded.config.training.device)
    with store_channel.open_store(place, size, request.limit_seconds) as store:
        line = store_channel.StoreChannel(store, place, size, request.limit_seconds)
        context = RankContext(
            loaded=request.loaded,
            rank=place,
            size=size,
            local_rank=variables.number(os.environ, "LOCAL_RANK", "0"),
            local_size=_local_size(),
            device=device,
            limit_seconds=request.limit_seconds,
            store=store,
            line=line,
            num_ranks=request.num_ranks,
            has_config=request.has_config,
        )
        with heartbeat("shardtrain doctor", 0 if place else None):
            facts = rank.examine(context)

        # Other ranks exit with the status that rank 0 determines.
        if place:
            code = line.receive("exit_code", 2 * line.patience_seconds)
            line.send(f"left-{place}", True)
            if code is None:
                code = 1
            return {"findings": [], "exit_code": code}

        with heartbeat("shardtrain doctor, waiting for other ranks"):
            reports = rank.gather(context, facts)
        findings = rank.judge(reports)
        result = document(reports, findings, time.monotonic() - started)
        result["exit_code"] = exit_code(findings, request.strict)
        line.send("exit_code", result["exit_code"])

        # With srun, this process serves the store. Keep it alive until the other ranks have left.
        end = time.monotonic() + LEAVE_SECONDS
        for other in set(range(1, size)) - set(reports.missing):
            line.receive(f"left-{other}", max(0.0, end - time.monotonic()))

    # The launcher process prints the report of ranks that it started.
    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / REPORT).write_text(json.dumps(result), encoding="utf-8")
    return result


def _local_size() -> int:
    """Return the number of ranks on this host.

    Slurm's "8(x2),4" means two hosts with eight ranks and one host with four.
    """
    if os.environ.get("LOCAL_WORLD_SIZE"):
        return variables.number(os.environ, "LOCAL_WORLD_SIZE", "")
    if "SLURM_PROCID" not in os.environ:
        return 1
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(tasks[0]) if tasks else 1
