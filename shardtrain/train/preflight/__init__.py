"""What ``train`` would refuse before its first step, found without starting it: ``config check`` and ``train`` ask.

``judge`` asks the rules of ``config``, then what these cannot know: the data, the tokenizer, the first weights, the
model built without memory, and whether its states fit the machine. Torch is imported only where one of these needs it.
"""

from __future__ import annotations

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
from shardtrain.launch.stop_request import GRACEFUL
from shardtrain.train.preflight.machine import Machine, named, this_machine
from shardtrain.utils import errors, limits
from shardtrain.utils.errors import ConfigError, FolderTaken, Problem, ShardtrainError
from shardtrain.utils.heartbeat import WaitingHeartbeat
from shardtrain.utils.log import kept_warnings
from shardtrain.utils.redact import redact, visible

__all__ = ["Machine", "PreflightResult", "judge", "named", "require", "require_in_child", "this_machine"]


@dataclass(frozen=True)
class PreflightResult:
    """``errors`` are what would end a run, each of one line or several; ``notes`` are worth a look and end none."""

    errors: tuple[ShardtrainError, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Those of the notes that a run tells before it starts its ranks, as no rank knows of them."""

    @property
    def lines(self) -> list[str]:
        """A line for each problem, in the order in which they were found; none twice."""
        lines = [str(line) for error in self.errors for line in getattr(error, "problems", [error])]
        return list(dict.fromkeys(lines))

    @property
    def exit_code(self) -> int:
        """That of a run: of a wrong configuration before that of data, checkpoints and storage."""
        return min((error.exit_code for error in self.errors), default=0)

    def raise_errors(self) -> None:
        """Raise what was found as one error with all lines; raises nothing where nothing was."""
        if not self.errors:
            return
        # one error for all: its type, and so the exit code, is that of the problem that goes first
        worst = min(self.errors, key=lambda error: error.exit_code)
        raise worst if len(self.errors) == 1 else _error_of_lines(type(worst), self.lines)


def _error_of_lines(kind: type[ShardtrainError], lines: list[str]) -> ShardtrainError:
    """Return an error whose lines are printed one by one."""
    if issubclass(kind, ConfigError):
        return kind(lines)
    error = kind("\n".join(lines))
    if len(lines) > 1:
        error.problems = tuple(lines)
    return error


@dataclass
class _Found:
    problems: list[Problem | str] = field(default_factory=list)
    errors: list[ShardtrainError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def is_clean(self, *starts: str) -> bool:
        """Whether no problem so far is about an option that begins so: what is wrong is not looked at further."""
        options = [secondary.meant(one) for one in self.problems if isinstance(one, Problem)]
        return not any(name.startswith(starts) for names in options for name in names)

    def take(self, errors: Sequence[ShardtrainError]) -> None:
        """Note errors of a later look; those of a configuration count with its problems."""
        for error in errors:
            if isinstance(error, ConfigError) and not isinstance(error, FolderTaken):
                self.problems += error.problems
            else:
                self.errors.append(error)


MANY_RANKS = 64
"""Above so many ranks that a launcher has started, the first one alone looks at files: storage is asked once."""


def require(loaded: Loaded, machine: Machine, looks_at_files: bool = True) -> None:
    """Raise what ``judge`` finds: before ranks are started, everything at once; print its warnings.

    Raises:
        ConfigError: where a problem of the configuration is among it, with the lines of all others.
        DataError, CheckpointError: where all is well but the data, or the first weights.
    """
    with limits.memory_errors():
        verdict = judge(loaded, machine, looks_at_files)
    verdict.raise_errors()
    if os.environ.get("RANK", "0") == "0":
        for line in verdict.warnings:
            print(f"warning: {redact(visible(line, lines=False))}", file=sys.stderr, flush=True)


def require_in_child(loaded: Loaded, machine: Machine, watch: ChildWatch) -> Failure | None:
    """Call ``require`` in a child process: it starts threads, and this process must still fork its ranks.

    Returns:
        None if all checks passed. A Failure if the child was killed, or ended by a request to stop.

    Raises:
        ShardtrainError: what ``require`` raises; or the child failed with an exception, which it has printed.
    """
    with tempfile.TemporaryFile("w+") as answer:
        # otherwise the child would also print what is buffered
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # block signals until the child has dropped the handlers of this process
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GRACEFUL)
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
                # skip the parent's atexit handlers: they would delete files that the parent still uses
                os._exit(code)
        watch.begin({0: pid})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with WaitingHeartbeat("checking configuration, data, tokenizer and model") as heartbeat:
            status = watch.wait(heartbeat.tell)[0]
        os.waitpid(pid, 0)
        answer.seek(0)
        text = answer.read()
    if status < 0 and watch.reason:
        return failure.stopped(None, watch.reason, run_end=run_ends.BEFORE_FIRST_STEP)
    if status < 0:
        return failure.killed(None, -status, watch.ended_at[0])
    if status:
        raise ShardtrainError("the process that checks data, tokenizer and model before ranks start failed")
    for kind, lines in json.loads(text):
        raise _error_of_lines(getattr(errors, kind), lines)
    return None


def _refusals(loaded: Loaded, machine: Machine) -> list[Any]:
    """Return the class and the lines of the error that ``require`` raises; an empty list if it raises none."""
    try:
        require(loaded, machine)
    except (ShardtrainError, OSError) as raised:
        error = local.of_storage(raised, Path(loaded.config.job.dump_folder))
        if not isinstance(error, ShardtrainError):
            raise
        return [(type(error).__name__, [str(line) for line in getattr(error, "problems", [error])])]
    return []


def judge(loaded: Loaded, machine: Machine | None, looks_at_files: bool = True) -> PreflightResult:
    """The verdict on a configuration and this or another machine; of the file alone where ``machine`` is None.

    What only this machine can answer (files, packages, devices) is asked where it is the one that is meant.
    """
    found = _Found()
    if machine is not None and machine.is_here:
        # the rules first: what they refuse is not looked at further
        found.problems += config.problems_of(loaded, machine.world_size, machine.device, machine.num_devices)
        if looks_at_files:
            _look_at_files(loaded, machine, found)
    else:
        others = [*config.check(loaded), *config.unavailable(loaded)]
        if machine is not None and machine.world_size:
            others += mesh_notes(loaded, machine.world_size)
        found.problems += secondary.distinct([*loaded.problems, *secondary.without(loaded.problems, others)])
    if machine is not None:
        if problem := _too_many_ranks(machine):
            found.problems.append(problem)
        if machine.world_size and (problem := watching_problem(loaded, machine.world_size, machine.local_ranks)):
            found.problems.append(problem)
        with kept_warnings() as said:  # a run says them again, in its log
            _look_at_model(loaded, machine, found)
        found.notes += said
        found.notes += machine.notes(loaded.config)
    # an option that is wrong may make others look wrong: the report has the first causes alone
    own = [one for one in found.problems if isinstance(one, Problem)]
    kept = {str(one) for one in [*loaded.problems, *secondary.without(loaded.problems, own)]}
    problems = [one for one in found.problems if isinstance(one, str) or str(one) in kept]
    errors: list[ShardtrainError] = [ConfigError(problems)] if problems else []
    notes = (*loaded.notices, *config.notes(loaded), *found.notes, *found.warnings)
    return PreflightResult((*errors, *found.errors), tuple(dict.fromkeys(notes)), tuple(found.warnings))


def _too_many_ranks(machine: Machine) -> Problem | None:
    """Each rank of a host has an accelerator of its own."""
    devices = machine.num_devices
    if machine.device in ("cpu", None) or not devices or machine.local_ranks <= devices:
        return None
    are = "the one accelerator" if devices == 1 else f"the {devices} accelerators"
    fix = f'start {devices} (--nproc {devices}), or use more nodes or training.device="cpu"'
    return Problem("ranks of this machine", machine.local_ranks, f"are more than {are} of it", fix)


def _look_at_files(loaded: Loaded, machine: Machine, found: _Found) -> None:
    """Files of the user's, the tokenizer, the first rows, how many there are, and the first weights."""
    from shardtrain.train.preflight import data_opening, own_files, starting_weights, storage_space

    if found.is_clean("metrics.sinks", "metrics.token_metrics", "lr_scheduler"):
        found.take(own_files.look(loaded.config))
    if found.is_clean("checkpoint.folder") and (error := storage_space.address_problem(loaded.config)):
        found.take([error])
    if found.is_clean("training.") and (problem := storage_space.shared_memory_problem(loaded, machine)):
        found.problems.append(problem)
    if found.is_clean("checkpoint", "lora", "model.hf_assets_path", "job"):
        found.take(starting_weights.look(loaded.config, is_alone=machine.world_size == machine.local_ranks))
    if found.is_clean("task", "data.", "model.tokenizer_path", "model.hf_assets_path", "training.seq_len"):
        sections = ["training", "validation"] if loaded.config.validation.enable else ["training"]
        for section in sections:
            if found.is_clean(f"{section}.", *(["data.sources"] if section == "training" else [])):
                # steps are counted against the data only where the options that make a batch are right
                counts = section == "training" and found.is_clean("parallelism.", "training.", "checkpoint.")
                errors, notes = data_opening.look(loaded.config, section, machine.world_size if counts else None)
                found.take(errors)
                found.notes += notes


def _look_at_model(loaded: Loaded, machine: Machine, found: _Found) -> None:
    """Batches, the model (without memory, and only where sizes do not say that it can be built and fits), the disk."""
    if not found.is_clean("model", "task", "lora", "optimizer", "parallelism", "training", "compile"):
        return
    from shardtrain.train.preflight import memory_fit, storage_space

    if problem := memory_fit.batch_problem(loaded, machine):
        found.problems.append(problem)
    # built once at most, and not at all where sizes alone tell that it fits: that spares importing PyTorch
    made: list[list[memory_fit.ParameterMemory] | None] = []

    def build() -> list[memory_fit.ParameterMemory] | None:
        if not made:
            from shardtrain.train.preflight import meta_model

            errors, parameters = meta_model.build(loaded.config, machine.world_size)
            found.take(errors)
            made.append(parameters)
        return made[0]

    if not memory_fit.surely_fits(loaded, machine) or (machine.is_here and memory_fit.only_building_tells(loaded)):
        built = build()
        if built is not None:
            found.problems += memory_fit.problems(loaded, machine, built)
    if machine.is_here and found.is_clean("checkpoint", "job"):
        errors, warnings = storage_space.look(loaded, machine, build)
        found.take(errors)
        found.warnings += warnings
