"""Preflight checks: find everything that would stop ``train`` before its first step.

``config check`` runs them too. ``judge`` applies the rules of ``config`` first. Then it runs the checks that
need files or the model: it opens data, tokenizer and initial weights, builds the model on the meta device,
and estimates the memory for weights, gradients and optimizer state. It imports torch only if a check needs
it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain import config
from shardtrain.config import Loaded, secondary
from shardtrain.config.machine_rules import mesh_notes, watching_problem
from shardtrain.launch import failure, local, run_ends
from shardtrain.launch.child_watch import ChildWatch
from shardtrain.launch.failure import Failure
from shardtrain.train.preflight.machine import Machine, named, this_machine
from shardtrain.utils import errors, limits, stop_signals
from shardtrain.utils.errors import ConfigError, FolderTaken, Problem, ShardtrainError
from shardtrain.utils.heartbeat import WaitingHeartbeat
from shardtrain.utils.log import kept_warnings
from shardtrain.utils.redact import redact, visible

__all__ = [
    "Machine",
    "PreflightResult",
    "judge",
    "named",
    "require",
    "require_in_child",
    "this_machine",
]


@dataclass(frozen=True)
class PreflightResult:
    """Errors and notes of the preflight checks."""

    errors: tuple[ShardtrainError, ...] = ()
    """Errors that would stop a run. Each may have several lines."""
    notes: tuple[str, ...] = ()
    """Notes on problems that would not stop a run."""
    warnings: tuple[str, ...] = ()
    """Notes that ``train`` prints before it starts its ranks. (The ranks print all other notes.)"""

    @property
    def lines(self) -> list[str]:
        """One line per problem, in the order of the checks, without duplicates."""
        lines: list[str] = []
        for error in self.errors:
            # A ConfigError has several problems. Other errors are one line.
            lines += map(str, getattr(error, "problems", [error]))
        return list(dict.fromkeys(lines))

    @property
    def exit_code(self) -> int:
        """Exit status of a run with these errors: the lowest of their exit codes.

        So errors of the configuration take precedence over errors of data and storage.
        """
        return min((error.exit_code for error in self.errors), default=0)

    def raise_errors(self) -> None:
        """Raise all errors as one error with all lines. No-op without errors."""
        if not self.errors:
            return
        # The class determines the exit code, so use the class of the error with the lowest exit code.
        first = min(self.errors, key=lambda error: error.exit_code)
        has_duplicates = len(self.lines) < len(getattr(first, "problems", [first]))
        if len(self.errors) == 1 and not has_duplicates:
            raise first
        raise _error_of_lines(type(first), self.lines)


def _error_of_lines(kind: type[ShardtrainError], lines: list[str]) -> ShardtrainError:
    """Return an error with one problem per line."""
    if issubclass(kind, ConfigError):
        return kind(lines)
    error = kind("\n".join(lines))
    if len(lines) > 1:
        error.problems = tuple(lines)
    return error


@dataclass
class _Findings:
    """Problems, errors and notes that the checks have found so far."""

    problems: list[Problem | str] = field(default_factory=list)
    errors: list[ShardtrainError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def is_clean(self, *starts: str) -> bool:
        """True if no problem so far is about an option with one of these prefixes.

        If the options of a check are wrong, the check is skipped,
        because it would only report follow-up errors.
        """
        for problem in self.problems:
            if isinstance(problem, Problem) and any(
                name.startswith(starts) for name in secondary.meant(problem)
            ):
                return False
        return True

    def add(self, errors: Sequence[ShardtrainError]) -> None:
        """Add the errors of a check. Errors of the configuration become problems."""
        for error in errors:
            if isinstance(error, ConfigError) and not isinstance(error, FolderTaken):
                self.problems += error.problems
            else:
                self.errors.append(error)


MANY_RANKS = 64
"""If a launcher has started more ranks than this, only rank 0 checks files, to limit the load on storage."""


def require(loaded: Loaded, machine: Machine, checks_files: bool = True) -> None:
    """Run all checks before ranks start. Raise all errors as one error, and print warnings on rank 0.

    Raises:
        ConfigError: the configuration has a problem. The message also contains the errors of data and
            weights, if there are any.
        DataError, CheckpointError: only the data or the initial weights have a problem.
    """
    with limits.memory_errors():
        result = judge(loaded, machine, checks_files)
    result.raise_errors()
    if os.environ.get("RANK", "0") == "0":
        for line in result.warnings:
            print(f"warning: {redact(visible(line, lines=False))}", file=sys.stderr, flush=True)


def require_in_child(loaded: Loaded, machine: Machine, watch: ChildWatch) -> Failure | None:
    """Call ``require`` in a child process.

    The checks start threads, and this process must not have any, because it will fork the ranks.

    Returns:
        None if all checks passed. A Failure if the child was killed, or stopped on request.

    Raises:
        ShardtrainError: ``require`` has raised it. Or the child failed with another exception, which the
            child has printed.
    """
    with tempfile.TemporaryFile("w+") as answer:
        # Flush, because otherwise the child would print the buffered output once more.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Block signals until the child has removed the handlers that it inherits from this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.GRACEFUL)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                local.detach(parent)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                json.dump(_refusals(loaded, machine), answer)
                answer.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                # os._exit skips the parent's atexit handlers, which would delete files that the parent still
                # uses.
                os._exit(code)
        watch.begin({0: pid})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with WaitingHeartbeat("checking configuration, data, tokenizer and model") as heartbeat:
            status = watch.wait(heartbeat.tell)[0]
        os.waitpid(pid, 0)
        answer.seek(0)
        text = answer.read()
    reason = watch.reason
    if -status in stop_signals.FROM_OUTSIDE:
        # The signal was a request to stop, which the parent may not have received.
        reason = reason or signal.Signals(-status).name
    if status < 0 and reason:
        return failure.stopped(None, reason, run_end=run_ends.BEFORE_FIRST_STEP)
    if status < 0:
        return failure.killed(None, -status, watch.ended_at[0])
    if status:
        raise ShardtrainError(
            "the process that checks data, tokenizer and model before ranks start failed"
        )
    for kind, lines in json.loads(text):
        raise _error_of_lines(getattr(errors, kind), lines)
    return None


def _refusals(loaded: Loaded, machine: Machine) -> list[Any]:
    """Call ``require``. Return [class name, lines of the message] of the error that it raises, in a list.

    The list is empty if it raises nothing.
    """
    try:
        require(loaded, machine)
    except (ShardtrainError, OSError) as raised:
        error = local.of_storage(raised, Path(loaded.config.job.dump_folder))
        if not isinstance(error, ShardtrainError):
            raise
        problems = getattr(error, "problems", [error])
        return [(type(error).__name__, [str(problem) for problem in problems])]
    return []


def judge(loaded: Loaded, machine: Machine | None, checks_files: bool = True) -> PreflightResult:
    """Check a configuration and that it fits a machine. If ``machine`` is None, check only the configuration.

    Files, packages and devices are checked only if the machine is the one that this process runs on.
    """
    findings = _Findings()
    if machine is not None and machine.is_here:
        # Apply the rules first, because options that they reject are not checked further.
        findings.problems += config.problems_of(
            loaded, machine.world_size, machine.device, machine.num_devices
        )
        if checks_files:
            _check_files(loaded, machine, findings)
    else:
        # The machine is not here, so apply only rules that need neither files nor devices.
        problems = [*config.check(loaded), *config.unavailable(loaded)]
        if machine is not None and machine.world_size:
            problems += mesh_notes(loaded, machine.world_size)
        findings.problems += secondary.distinct(
            [*loaded.problems, *secondary.without(loaded.problems, problems)]
        )
    if machine is not None:
        problem = _too_many_ranks(machine)
        if problem:
            findings.problems.append(problem)
        # Without a number of ranks, it is not known what the watchdog must handle.
        if machine.world_size:
            problem = watching_problem(loaded, machine.world_size, machine.local_ranks)
            if problem:
                findings.problems.append(problem)
        # Turn logged warnings into notes, because the run will log them itself.
        with kept_warnings() as warnings:
            _check_model(loaded, machine, findings)
        findings.notes += warnings
        findings.notes += machine.notes(loaded.config)

    errors: list[ShardtrainError] = []
    problems_to_report = _without_secondary(loaded, findings.problems)
    if problems_to_report:
        errors.append(ConfigError(problems_to_report))
    errors += findings.errors
    notes = (*loaded.notices, *config.notes(loaded), *findings.notes, *findings.warnings)
    return PreflightResult(tuple(errors), tuple(dict.fromkeys(notes)), tuple(findings.warnings))


def _without_secondary(loaded: Loaded, problems: Sequence[Problem | str]) -> list[Problem | str]:
    """Drop problems that only follow from other problems: one wrong option may make other options look wrong."""
    with_option = [problem for problem in problems if isinstance(problem, Problem)]
    primary = [*loaded.problems, *secondary.without(loaded.problems, with_option)]
    primary_texts = set(map(str, primary))
    kept = []
    for problem in problems:
        if isinstance(problem, str) or str(problem) in primary_texts:
            kept.append(problem)
    return kept


def _too_many_ranks(machine: Machine) -> Problem | None:
    """Return a problem if a host has more ranks than accelerators. Each rank needs its own accelerator."""
    num_devices = machine.num_devices
    if machine.device in ("cpu", None) or not num_devices or machine.local_ranks <= num_devices:
        return None
    unit = "accelerator" if num_devices == 1 else "accelerators"
    return Problem(
        "ranks of this machine",
        machine.local_ranks,
        rule=f"exceeds its {num_devices} {unit}",
        fix=f'start {num_devices} ranks (--nproc {num_devices}), use more nodes, or set training.device="cpu"',
    )


def _check_files(loaded: Loaded, machine: Machine, findings: _Findings) -> None:
    """Check the user's Python files, the object store address, /dev/shm, initial weights, tokenizer and
    data."""
    from shardtrain.train.preflight import own_files, starting_weights, storage_space

    if findings.is_clean("metrics.sinks", "metrics.token_metrics", "lr_scheduler"):
        findings.add(own_files.find_errors(loaded.config))
    if findings.is_clean("checkpoint.folder") and (
        error := storage_space.address_problem(loaded.config)
    ):
        findings.add([error])
    if findings.is_clean("training.") and (
        problem := storage_space.shared_memory_problem(loaded, machine)
    ):
        findings.problems.append(problem)
    if findings.is_clean("checkpoint", "lora", "model.hf_assets_path", "job"):
        findings.add(
            starting_weights.find_errors(
                loaded.config, is_alone=machine.world_size == machine.local_ranks
            )
        )
    if findings.is_clean(
        "task", "data.", "model.tokenizer_path", "model.hf_assets_path", "training.seq_len"
    ):
        _check_data(loaded, machine, findings)


def _check_data(loaded: Loaded, machine: Machine, findings: _Findings) -> None:
    """Open the training data, and the validation data if they are used."""
    from shardtrain.train.preflight import data_opening

    if findings.is_clean("training.", "data.sources"):
        # Count the steps of the data only if there is no problem with the options that determine the batch.
        can_count_steps = findings.is_clean("parallelism.", "training.", "checkpoint.")
        world_size = machine.world_size if can_count_steps else None
        errors, notes = data_opening.find_errors(loaded.config, "training", world_size)
        findings.add(errors)
        findings.notes += notes
    if loaded.config.validation.enable and findings.is_clean("validation."):
        errors, notes = data_opening.find_errors(loaded.config, "validation", None)
        findings.add(errors)
        findings.notes += notes


def _check_model(loaded: Loaded, machine: Machine, findings: _Findings) -> None:
    """Check that the model can be built, that it and its batches fit into memory, and that checkpoints fit on disk."""
    if not findings.is_clean(
        "model", "task", "lora", "optimizer", "parallelism", "training", "compile"
    ):
        return
    from shardtrain.train.preflight import memory_fit, storage_space

    if problem := memory_fit.batch_problem(loaded, machine):
        findings.problems.append(problem)

    # Building the model imports PyTorch, which takes seconds. So build it at most once, and only if an upper
    # bound of its size does not fit.
    @functools.cache
    def build() -> list[memory_fit.ParameterMemory] | None:
        from shardtrain.train.preflight import meta_model

        errors, parameters = meta_model.build(loaded.config, machine.world_size)
        findings.add(errors)
        return parameters

    needs_build = machine.is_here and memory_fit.needs_model_build(loaded)
    if needs_build or not memory_fit.certainly_fits(loaded, machine):
        parameters = build()
        if parameters is not None:
            findings.problems += memory_fit.problems(loaded, machine, parameters)
    if machine.is_here and findings.is_clean("checkpoint", "job"):
        errors, warnings = storage_space.find_errors(loaded, machine, build)
        findings.add(errors)
        findings.warnings += warnings
