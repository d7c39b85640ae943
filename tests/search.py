"""Search random configurations for one that is neither refused before ranks start nor equal to one process.

    python tests/search.py --seed 1 --count 500          search; exit status 1 if a fault was found
    python tests/search.py --families llama4,gpt_oss     search only these families
    python tests/search.py --features all                also draw the features of search_more.py
    python tests/search.py --features architectures      draw architectures of ``transformers``
    python tests/search.py --try --parallelism...        judge one configuration, given by its options

Every other verdict is a fault: ``differs`` (silently), ``crashes``, ``hangs``, ``refused late`` (after ranks have
started) or ``refused without need`` (the case breaks no rule of ``search_space.broken``, or the refusal names an option
that breaks none). The search shrinks a fault: it drops options and reduces degrees and sizes while the fault persists.
Case number N of a seed (``search_space.draw``) is the same in every run.

The comparison covers two steps of the trainer: losses to 1e-5, the gradient norm to a relative 1e-6, and weights after
the steps to 1e-6. Each gradient must agree to 1e-5 of its own norm or of a twentieth of the global norm, whichever is
larger. Reduced precision has wider tolerances, see ``TOLERANCES``. A case with a second mesh is saved after one step,
resumed on that mesh, and compared with an uninterrupted run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import multiprocessing
import os
import pickle
import resource
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

# as a script, Python puts tests/ on the path but not the repository root
if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import search_architectures
import torch
import torch.distributed as dist
from search_case import (
    CP,
    DDP,
    FAMILIES,
    FSDP,
    LOCAL,
    NEWER,
    PP,
    SEQ,
    SHAPES,
    STEPS,
    TP,
    UNSET,
    A,
    Case,
    M,
    P,
)
from search_more import ARCHITECTURES, CSV, FEATURES, tolerance, write_schedule
from search_space import broken, draw
from torch import Tensor

from shardtrain import config, models
from shardtrain.config import Loaded
from shardtrain.distributed import LOSS_AXES
from shardtrain.distributed.process_group import World
from shardtrain.ops.dtensor import local_tensor, to_full
from shardtrain.train import trainer
from shardtrain.train.preflight import data_opening, meta_model
from shardtrain.train.validation import Evaluation, Validator
from shardtrain.utils import log
from shardtrain.utils.errors import ConfigError, DataError, PeerError, ShardtrainError

ROOT = Path(__file__).parents[1]
IDLE_SECONDS = 60
"""Ranks hang if none of them used the processor for this long. Ranks on a busy machine are slow but do use it."""
JOBS_PER_START = 8
"""Number of jobs that one set of rank processes runs in sequence, to pay for PyTorch's warm-up on a mesh once."""


@dataclass(frozen=True)
class Tolerance:
    """Allowed distance from the results of one process."""

    loss: float
    norm: float
    gradient: float
    weight: float


TOLERANCES = {
    # float32 sums in another order: 1e-7 of their size
    "float32": Tolerance(loss=1e-5, norm=1e-6, gradient=1e-5, weight=1e-6),
    # Newton-Schulz steps raise the noise of small singular values a hundredfold
    "Muon": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    # A new head on a tiny model has gradients of norm 20 to 60. Float32 rounding in the first step then changes the
    # norm of the second step by 3e-6. In float64 the same cases agree to 1e-15.
    "steep": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    # The derivative of a clamp jumps at its limit. With a limit as low as 0.02 about 200,000 values of these models are
    # near it. A value that rounds to the other side of the limit changes a gradient by 3e-5 of its norm. Updates change
    # much more where gradients are smaller than the optimizer's eps.
    "clamped": Tolerance(loss=1e-5, norm=1e-5, gradient=2e-4, weight=1e-3),
    # 8-bit mantissas: precise enough to detect a missing term, a wrong scale or a skipped batch
    "reduced": Tolerance(loss=2e-2, norm=5e-2, gradient=0.15, weight=3e-2),
    # A value halfway between two float8 values can round to the other one, an eighth away. One such value among the
    # 1,000 of these weights changes a gradient by 4e-3 of its norm. An update is a gradient divided by its own size,
    # so an update near zero can change its sign, which is twice the learning rate of 1e-2.
    "float8": Tolerance(loss=1e-3, norm=1e-2, gradient=3e-2, weight=2e-2),
    # The second update depends on rounded optimizer state: a relative 1/256 of an update at a learning rate of 1e-2.
    "16 bits": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-4),
    # 1/64 of the largest value of a block, in both moments
    "8 bits": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=5e-4),
}

MOST = Tolerance(loss=1e-3, norm=1e-3, gradient=1e-3, weight=1e-3)
"""Widest tolerance for a float32 model that amplifies rounding errors: see ``widened``."""


@dataclass
class Numbers:
    """Losses, norms and unsharded tensors of a run, as one rank saw them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A run of one configuration.

    Attributes:
        loaded: The configuration.
        stop_after: Stop after this many steps, as if killed, so a later job can resume. None to run to the end.
        constants: Module constants to override, by dotted name.
        shaken: True to move each initial weight to the next larger or smaller float.
    """

    loaded: Loaded
    stop_after: int | None = None
    constants: Mapping[str, int] = field(default_factory=dict)
    shaken: bool = False

    @property
    def has_folder(self) -> bool:
        """True if the job needs a complete run with its own dump folder, because it does more than training steps."""
        c = self.loaded.config
        between = c.validation.enable or c.metrics.sample_freq or c.training.replica_check_interval
        # loading weights packs the frozen ones and computes DoRA's row norms
        packed = c.lora.base_dtype != "training" or c.lora.use_dora
        return bool(
            c.checkpoint.enable
            or packed
            or c.training.epochs
            or c.training.on_data_end == "stop"
            or between
        )


@dataclass(frozen=True)
class Failure:
    """A run that failed. ``kind`` is "crashes", "hangs" or "refused late" (only after ranks started)."""

    kind: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The judgement of a case. ``kind`` is "refused", "equal", or the kind of a fault."""

    kind: str
    text: str = ""

    @property
    def is_fault(self) -> bool:
        """True unless the case was refused or equal."""
        return self.kind not in ("refused", "equal")


class _Stopped(Exception):
    """Raised between two steps to end a run, as a kill would."""


def steps_of(rank: int, job: Job) -> Numbers:
    """Run a job as one rank, in an existing process group."""
    numbers = Numbers()
    torch.compiler.reset()  # drop compiled graphs of an earlier job
    world = World(rank, dist.get_world_size(), rank, torch.device("cpu"))
    original_step = trainer.step
    original_run = Validator.run

    def step(run: trainer.Run) -> trainer.Outcome | None:
        if run.state.step == job.stop_after:
            raise _Stopped
        if not numbers.initial:
            if job.shaken:
                _shake(run)
            numbers.initial = _full_weights(run)
            _keep_gradients(run, numbers.gradients)
        outcome = original_step(run)
        if outcome is not None:
            total = run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item()
            numbers.losses.append(total / max(1, outcome.global_tokens))
            numbers.norms.append(outcome.grad_norm)
            numbers.final = _full_weights(run)
        return outcome

    def validate(validator: Validator, at: int) -> Evaluation | None:
        evaluation = original_run(validator, at)
        if evaluation is not None:
            numbers.validations.append(evaluation.loss)
        return evaluation

    with _constants(job.constants):
        if not job.has_folder:
            run = trainer.build(job.loaded.config, world)
            for _ in range(job.loaded.config.training.steps):
                step(run)
            return numbers
        folder = Path(job.loaded.config.job.dump_folder)
        log.setup(rank, world.size, folder, job.loaded.config.metrics.save_log_file, console=False)
        trainer.step, Validator.run = step, validate  # type: ignore[method-assign]
        try:
            trainer.train(job.loaded, world)
        except _Stopped:
            pass
        finally:
            trainer.step, Validator.run = original_step, original_run  # type: ignore[method-assign]
            log.reset()
    return numbers


@contextmanager
def _constants(values: Mapping[str, int]) -> Iterator[None]:
    """Override module constants, given by their dotted names, for the duration of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            module, _, constant = name.rpartition(".")
            patch.setattr(importlib.import_module(module), constant, value)
        yield


def _full_weights(run: trainer.Run) -> dict[str, Tensor]:
    return {
        name: to_full(p.detach()).float().clone() for name, p in run.runner.parameters().items()
    }


@torch.no_grad()
def _shake(run: trainer.Run) -> None:
    """Move each weight to the next larger or smaller float, at random: the smallest possible rounding error."""
    generator = torch.Generator().manual_seed(0)
    for parameter in run.runner.parameters().values():
        local = local_tensor(parameter)
        if local.dtype == torch.float32:
            up = torch.rand(local.shape, generator=generator) < 0.5
            local.copy_(torch.nextafter(local, torch.where(up, math.inf, -math.inf)))


def _keep_gradients(run: trainer.Run, kept: dict[str, Tensor]) -> None:
    """Copy the gradients of the first optimizer step into ``kept``."""
    update = run.runner.update

    def first(optimizer: torch.optim.Optimizer) -> None:
        if not kept:
            gradients = {
                name: p.grad for name, p in run.runner.parameters().items() if p.grad is not None
            }
            kept.update(
                {name: to_full(gradient).float().clone() for name, gradient in gradients.items()}
            )
        update(optimizer)

    run.runner.update = first  # type: ignore[method-assign]


def run_jobs(num_ranks: int, jobs: Sequence[Job]) -> Iterator[list[Numbers] | Failure]:
    """Yield the results of each job, one entry per rank. After a failure, new rank processes run the remaining jobs."""
    done = 0
    while done < len(jobs):
        for answer in _run_until_failure(num_ranks, jobs[done : done + JOBS_PER_START]):
            yield answer
            done += 1


def _run_until_failure(num_ranks: int, jobs: Sequence[Job]) -> Iterator[list[Numbers] | Failure]:
    """Fork ranks for all jobs, and yield one answer per job. A failure is the last answer."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, folder, pipes[rank][1], jobs))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        receivers = [receiver for receiver, _ in pipes]
        try:
            for _ in jobs:
                answer = _answer_of_all(receivers, [process.pid or 0 for process in ranks])
                yield answer
                if isinstance(answer, Failure):
                    return
        finally:
            for process in ranks:
                process.join(timeout=0 if process.is_alive() else None)
                if process.is_alive():
                    process.kill()
                process.join()
            for receiver in receivers:
                receiver.close()


def _answer_of_all(receivers: list[Any], pids: list[int]) -> list[Numbers] | Failure:
    """Return one answer per rank, or a failure. Among several errors, one that is not about a lost peer comes first."""
    answers: dict[int, tuple[str, Any]] = {}
    used_seconds = 0.0
    last_use = time.monotonic()
    grace = 0.0
    while len(answers) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in answers]
        for receiver in multiprocessing.connection.wait(waiting, timeout=0.5):
            rank = receivers.index(receiver)
            try:
                answers[rank] = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                answers[rank] = ("crashes", "a rank died")
        now = time.monotonic()
        has_failed = any(kind != "numbers" for kind, _ in answers.values())
        if has_failed:
            # other ranks may be about to report the cause; some wait for a peer that has exited and never answer
            grace = grace or now + 3.0
            if now > grace:
                break
        seconds = sum(_cpu_seconds(pid) for pid in pids)
        if seconds > used_seconds + 0.05:
            used_seconds = seconds
            last_use = now
        if now - last_use > IDLE_SECONDS:
            waiting_ranks = len(receivers) - len(answers)
            return Failure("hangs", f"{waiting_ranks} of {len(receivers)} ranks hang")
    errors = [answer for answer in answers.values() if answer[0] != "numbers"]
    if not errors:
        return [answers[rank][1] for rank in range(len(receivers))]
    kind, text = min(errors, key=lambda error: ("gloo" in error[1], "a rank died" in error[1]))
    return Failure(kind, text)


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rank(rank: int, num_ranks: int, folder: str, sender: Any, jobs: Sequence[Job]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    # Errors are sent through the pipe. Hide PyTorch's warnings.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        limit = timedelta(seconds=600)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        for job in jobs:
            sender.send_bytes(pickle.dumps(("numbers", steps_of(rank, job))))
        dist.destroy_process_group()
    except PeerError as error:
        sender.send_bytes(pickle.dumps(("crashes", f"gloo: {error}")))
    except ConfigError as error:
        sender.send_bytes(pickle.dumps(("refused late", str(error))))
    except BaseException as error:
        kind = "refused late" if isinstance(error, ShardtrainError) else "crashes"
        sender.send_bytes(pickle.dumps((kind, traceback.format_exc())))
    finally:
        sender.close()
        os._exit(0)


def differences(numbers: Numbers, expected: Numbers, tolerance: Tolerance) -> list[str]:
    """Describe every difference between the results of a rank and those of one process. NaN always differs."""
    lines = [
        f"initial {name}"
        for name, weight in numbers.initial.items()
        if not torch.equal(weight, expected.initial[name])
    ]
    scalars = (
        ("loss", numbers.losses, expected.losses, [tolerance.loss] * len(expected.losses)),
        ("norm", numbers.norms, expected.norms, [tolerance.norm * norm for norm in expected.norms]),
        (
            "validation",
            numbers.validations,
            expected.validations,
            [tolerance.loss] * len(expected.validations),
        ),
    )
    for name, values, expected_values, limits in scalars:
        if len(values) != len(expected_values):
            lines.append(f"{len(values)} {name}s instead of {len(expected_values)}")
        for step, (value, expected_value, limit) in enumerate(
            zip(values, expected_values, limits, strict=False), 1
        ):
            if not abs(value - expected_value) <= limit:
                lines.append(f"{name} {step}: {value!r} instead of {expected_value!r}")
    floor = _global_norm(expected) / 20
    for name, gradient in numbers.gradients.items():
        norm = float(expected.gradients[name].norm())
        error = float((gradient - expected.gradients[name]).norm())
        if not error <= tolerance.gradient * max(norm, floor):
            lines.append(f"gradient of {name}: off by {error / max(norm, 1e-30):.1e} of its norm")
    for name, weight in numbers.final.items():
        error = float((weight - expected.final[name]).abs().max())
        if not error <= tolerance.weight:
            lines.append(f"final {name}: off by {error:.1e}")
    return lines


def _global_norm(numbers: Numbers) -> float:
    return sum(float(gradient.square().sum()) for gradient in numbers.gradients.values()) ** 0.5


def widened(usual: Tolerance, moved: Numbers, expected: Numbers, most: Tolerance) -> Tolerance:
    """Return the tolerance for a model that amplifies rounding errors, between ``usual`` and ``most``.

    It is 8 times the effect of one unit in the last place of the initial weights, which ``moved`` measures.
    """

    def clamped(kind: str, errors: Iterable[float]) -> float:
        eight_times = 8 * max(errors, default=0.0)
        return max(getattr(usual, kind), min(eight_times, getattr(most, kind)))

    moved_losses = [*moved.losses, *moved.validations]
    expected_losses = [*expected.losses, *expected.validations]
    loss_errors = [abs(a - b) for a, b in zip(moved_losses, expected_losses, strict=True)]

    norm_errors = []
    for norm, expected_norm in zip(moved.norms, expected.norms, strict=True):
        norm_errors.append(abs(norm - expected_norm) / max(expected_norm, 1e-30))

    # The error of a small gradient is relative to a part of the global norm.
    floor = _global_norm(expected) / 20
    gradient_errors = []
    for name, gradient in expected.gradients.items():
        error = float((moved.gradients[name] - gradient).norm())
        gradient_errors.append(error / max(float(gradient.norm()), floor, 1e-30))

    weight_errors = []
    for name, weight in expected.final.items():
        weight_errors.append(float((moved.final[name] - weight).abs().max()))

    return Tolerance(
        loss=clamped("loss", loss_errors),
        norm=clamped("norm", norm_errors),
        gradient=clamped("gradient", gradient_errors),
        weight=clamped("weight", weight_errors),
    )


def refusal(case: Case) -> Verdict:
    """Return the verdict of the configuration check, without running the case.

    Its kind is ``refused``, ``refused without need``, ``accepted``, or ``accepted though`` with the broken rule.
    """
    try:
        load(case)
    except (ConfigError, DataError) as error:
        return judge_refusal(case, error)
    rules = "; ".join(rule.rule for rule in broken(case))
    return Verdict("accepted though", rules) if rules else Verdict("accepted")


def judge_refusal(case: Case, error: ConfigError | DataError) -> Verdict:
    """Return ``refused`` if the documented rules justify the refusal, else ``refused without need``."""
    if isinstance(error, DataError):
        # the lengths of documents are not known here
        has_no_rows = "has no row with a target" in str(error)
        is_justified = has_no_rows and case.value("data.long_documents") == "drop"
        return Verdict("refused" if is_justified else "refused without need", str(error))

    rules = list(broken(case))
    if case.then is not None:
        rules += broken(case.moved())
    if not rules:
        return Verdict("refused without need", str(error))

    # The error must name an option of a rule that the case breaks.
    named_options = {problem.option for problem in error.problems if hasattr(problem, "option")}
    expected_options = set()
    for rule in rules:
        expected_options |= set(rule.options)
    if not named_options & expected_options:
        broken_rules = "; ".join(rule.rule for rule in rules)
        names = ", ".join(sorted(named_options))
        text = f"names {names}, but the case breaks: {broken_rules}\n{error}"
        return Verdict("refused without need", text)
    return Verdict("refused", str(error))


class Searcher:
    """Judge many cases at a time. Reference runs are cached, because many cases share one."""

    def __init__(self, folder: Path) -> None:
        for family in SHAPES:
            models.find(family)  # import once, in the process from which ranks are forked
        self._folder = folder
        self._expected: dict[tuple[str, ...], Numbers | Failure] = {}
        self._runs = 0

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """Return the verdict of each case."""
        verdicts: dict[int, Verdict] = {}
        plans: dict[int, list[tuple[int, Job]]] = {}
        for index, case in enumerate(cases):
            try:
                plans[index] = self._plan(case)
            except (ConfigError, DataError) as error:
                verdicts[index] = judge_refusal(case, error)
        self._run_references([cases[index] for index in plans])
        results: dict[int, list[Numbers] | Failure] = {}
        # A run that changes its mesh has two parts. Second parts run after all first parts.
        for part in range(2):
            jobs = {index: plan[part] for index, plan in plans.items() if part < len(plan)}
            for num_ranks in sorted({ranks for ranks, _ in jobs.values()}):
                members = [
                    index
                    for index, (ranks, _) in jobs.items()
                    if ranks == num_ranks and not isinstance(results.get(index), Failure)
                ]
                answers = run_jobs(num_ranks, [jobs[index][1] for index in members])
                for index, answer in zip(members, answers, strict=True):
                    if part == 0 or isinstance(answer, Failure):
                        results[index] = answer
                    else:
                        results[index] = _joined(results[index], answer)
        for index in plans:
            verdicts[index] = self._compare(cases[index], results[index])
        return [verdicts[index] for index in range(len(cases))]

    def _plan(self, case: Case) -> list[tuple[int, Job]]:
        """Return the parts of a run, each with its number of ranks.

        Raises:
            ConfigError: The command would refuse the case before ranks start.
        """
        folder = self._folder_of_run()
        if case.then is None:
            return [(case.num_ranks, Job(load(case, folder), constants=case.constants))]
        saved = {**folder, "checkpoint.enable": "true", "checkpoint.interval": "1"}
        # the second part resumes the first one, and only its mesh options differ
        first = Job(load(case, saved), stop_after=STEPS // 2, constants=case.constants)
        second = Job(load(case.moved(), saved))
        return [(case.num_ranks, first), (case.moved().num_ranks, second)]

    def _folder_of_run(self) -> dict[str, str]:
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        shutil.rmtree(folder, ignore_errors=True)
        return {"job.dump_folder": str(folder)}

    def _run_references(self, cases: Sequence[Case]) -> None:
        missing = {
            _key(case): case.one_process() for case in cases if _key(case) not in self._expected
        }
        jobs = [Job(load(case, self._folder_of_run())) for case in missing.values()]
        for key, answer in zip(missing, run_jobs(1, jobs), strict=True):
            self._expected[key] = answer if isinstance(answer, Failure) else answer[0]

    def _compare(self, case: Case, numbers_of_ranks: list[Numbers] | Failure) -> Verdict:
        expected = self._expected[_key(case)]
        if isinstance(expected, Failure):
            return Verdict(expected.kind, f"on one process: {expected.text}")
        if isinstance(numbers_of_ranks, Failure):
            return Verdict(numbers_of_ranks.kind, numbers_of_ranks.text)

        # Measure the rounding errors of the model only if the usual tolerance is too small.
        allowed = TOLERANCES[tolerance(case)]
        note = ""
        differs = any(differences(numbers, expected, allowed) for numbers in numbers_of_ranks)
        if case.is_exact and differs:
            wider = self._widened(case, expected, allowed)
            if wider != allowed:
                note = f" within the model's own rounding errors: {wider}"
            allowed = wider

        names = set()
        for rank, numbers in enumerate(numbers_of_ranks):
            names |= numbers.final.keys()
            lines = differences(numbers, expected, allowed)
            if lines:
                return Verdict("differs", f"rank {rank}: {'; '.join(lines[:6])}{note}")
        if names != set(expected.final):
            missing = sorted(set(expected.final) - names)
            return Verdict("differs", f"no rank holds {', '.join(missing[:6])}")
        return Verdict("equal", note)

    def _widened(self, case: Case, expected: Numbers, usual: Tolerance) -> Tolerance:
        """Widen ``usual`` by the effect of rounding the initial weights differently in one process."""
        (answer,) = run_jobs(1, [Job(load(case.one_process(), self._folder_of_run()), shaken=True)])
        if isinstance(answer, Failure):
            return usual
        most = TOLERANCES["reduced"] if usual == TOLERANCES["float8"] else MOST
        return widened(usual, answer[0], expected, most)


def _key(case: Case) -> tuple[str, ...]:
    return tuple(case.one_process().arguments())


def load(case: Case, more: Mapping[str, str] | None = None) -> Loaded:
    """Load the configuration from its command line, with the checks of ``shardtrain train``.

    ``more`` are options that the case does not override.
    """
    if case.value(CSV):
        write_schedule(Path(case.value(CSV)))
    if search_architectures.name_of(case):
        search_architectures.write_folder(Path(case.value(f"{M}path")))
    options = case.resolved()
    missing = {name: value for name, value in (more or {}).items() if name not in options}
    loaded = config.load(None, [*case.arguments(), *_flags(missing)])
    config.require(loaded, case.num_ranks, "cpu", 0)
    errors, _ = meta_model.build(loaded.config, case.num_ranks)
    data_errors, _ = data_opening.find_errors(loaded.config, "training", None)
    for error in [*errors, *data_errors]:
        raise error
    return loaded


def _joined(first: list[Numbers] | Failure, second: list[Numbers]) -> list[Numbers] | Failure:
    """Join the results of two halves of a run: initial weights of the first half, final weights of the second.

    Returns one entry for each rank of either half, with the steps of both halves.
    """
    if isinstance(first, Failure):
        return first

    def joined_steps(numbers: Numbers) -> list[list[float]]:
        """Return losses, norms and validations of both halves, with those that a rank of the second half has."""
        return [
            getattr(first[0], name) + getattr(numbers, name)
            for name in ("losses", "norms", "validations")
        ]

    # a run of one step ends in its first half
    ended_in_first = not any(numbers.final for numbers in second)
    joined = [Numbers(*joined_steps(numbers), {}, {}, numbers.final) for numbers in second]
    for numbers in first:
        final = numbers.final if ended_in_first else {}
        joined.append(Numbers(*joined_steps(second[-1]), numbers.initial, numbers.gradients, final))
    return joined


def shrink(case: Case, is_fault: Callable[[Case], bool], seconds: float = 300.0) -> Case:
    """Reduce a case while the fault persists, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(case):
            if time.monotonic() > deadline:
                return case
            if is_fault(candidate):
                case = candidate
                is_smaller = True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield reductions of a case, the largest ones first."""
    if case.then is not None:
        yield dataclasses.replace(case, then=None)
    options = dict(case.options)
    for start in (
        "optimizer.",
        "data.",
        A,
        "compile.",
        "lora.",
        "training.",
        "lr_scheduler.",
        "debug.",
        "model.",
    ):
        group = [name for name in options if name.startswith(start) and name != LOCAL]
        if len(group) > 1:
            yield _without(case, group)
    for axis in (DDP, FSDP, CP, TP, PP):
        degree = case.number(axis)
        if degree > 1:
            of_axis = {
                CP: "context_",
                PP: "pipeline_",
                DDP: "shard_optimizer",
                TP: "disable_loss",
            }.get(axis)
            yield _without(
                case, [n for n in options if n == axis or (of_axis and n.startswith(P + of_axis))]
            )
            for smaller in sorted({n for n in range(2, degree) if degree % n == 0}):
                yield _with(case, {axis: str(smaller)})
    for name in options:
        if name not in (PP, DDP, FSDP, CP, TP):
            yield _without(case, [name])
    if case.accumulation > 1:
        yield dataclasses.replace(case, accumulation=1)
        yield dataclasses.replace(case, accumulation=case.accumulation - 1)
    for name, least in ((f"{M}num_layers", 1), (LOCAL, 1), (SEQ, 2)):
        number = case.number(name)
        for less in sorted({number // 2, number - 1}):
            if name in options and least <= less < number:
                yield _with(case, {name: str(less)})


def _without(case: Case, names: Sequence[str]) -> Case:
    return dataclasses.replace(
        case, options={n: v for n, v in case.options.items() if n not in names}
    )


def _with(case: Case, changes: dict[str, str]) -> Case:
    return dataclasses.replace(case, options={**case.options, **changes})


def command(case: Case) -> str:
    """Return the command that judges a case again, to run from the root of the repository."""
    arguments = _flags({name: value for name, value in case.options.items() if value != UNSET})
    if case.accumulation > 1:
        arguments += ["--accumulation", str(case.accumulation)]
    unset = [f"--{name}" for name, value in case.options.items() if value == UNSET]
    if unset:
        arguments += ["--unset", *unset]
    if case.then is not None:
        arguments += ["--then", *_flags(case.then)]
    return f"python tests/search.py --try {shlex.join(arguments)}"


def _flags(options: Mapping[str, str]) -> list[str]:
    flags = []
    for name, value in options.items():
        flags += [f"--{name}", value]
    return flags


def train_command(case: Case) -> str:
    """Return the command that trains the configuration of a case."""
    return f"shardtrain train defaults --nproc {case.num_ranks} {shlex.join(case.arguments())}"


def parse(arguments: Sequence[str]) -> Case:
    """Return the case for the arguments after ``--try``, as ``command`` writes them."""
    parts: dict[str, list[str]] = {"options": [], "unset": [], "then": []}
    part = "options"
    for argument in arguments:
        if argument in ("--then", "--unset"):
            part = argument.removeprefix("--")
        else:
            parts[part].append(argument)
    accumulation = 1
    if "--accumulation" in parts["options"]:
        place = parts["options"].index("--accumulation")
        accumulation = int(parts["options"].pop(place + 1))
        parts["options"].pop(place)
    options = _pairs(parts["options"]) | {flag.removeprefix("--"): UNSET for flag in parts["unset"]}
    return Case(options, accumulation, _pairs(parts["then"]) if "--then" in arguments else None)


def _pairs(arguments: list[str]) -> dict[str, str]:
    return {
        name.removeprefix("--"): value
        for name, value in zip(arguments[::2], arguments[1::2], strict=True)
    }


@dataclass(frozen=True)
class SearchFault:
    """A fault that the search found.

    Attributes:
        number: Number of the drawn case.
        case: The case after shrinking.
        verdict: Verdict on the shrunk case.
    """

    number: int
    case: Case
    verdict: Verdict


def search(
    seed: int,
    numbers: Sequence[int],
    report: Callable[[str], None],
    shrinking: bool = True,
    families: Sequence[str] = FAMILIES,
    features: Sequence[str] = (),
) -> tuple[Counter[str], list[SearchFault]]:
    """Judge cases of a seed. Return the number of cases per verdict, and the faults.

    Args:
        seed: Seed of the cases.
        numbers: Numbers of the cases within the seed.
        report: Receives each line of the report.
        shrinking: Shrink each case with a fault.
        families: Model families to draw from.
        features: Names of the features to draw from.
    """
    counts: Counter[str] = Counter()
    faults: list[SearchFault] = []
    chunk_size = 3 * JOBS_PER_START
    with tempfile.TemporaryDirectory(prefix="shardtrain-search-") as folder:
        searcher = Searcher(Path(folder))
        for start in range(0, len(numbers), chunk_size):
            chunk = numbers[start : start + chunk_size]
            cases = [draw(seed, number, families, features) for number in chunk]
            for number, case, verdict in zip(chunk, cases, searcher.judge(cases), strict=True):
                is_reproducible = True
                if verdict.is_fault:
                    again = searcher.judge([case])[0]  # new rank processes must reproduce it
                    if again.kind != verdict.kind:
                        is_reproducible = False
                        kind = f"{verdict.kind}, but {again.kind} in new processes"
                        verdict = Verdict(kind, f"{verdict.text}\n{again.text}")
                counts[verdict.kind] += 1
                if not verdict.is_fault:
                    report(
                        f"{seed}/{number}: {verdict.kind}{verdict.text if verdict.kind == 'equal' else ''}"
                    )
                    continue
                report(
                    f"{seed}/{number}: {verdict.kind}\n{verdict.text[-3000:]}\n  {command(case)}"
                )
                if shrinking and is_reproducible:
                    has_same_fault = functools.partial(_is_same_fault, searcher, verdict)
                    case = shrink(case, has_same_fault)
                    verdict = searcher.judge([case])[0]
                    report(
                        f"  shrunk: {verdict.text[-1500:]}\n  {command(case)}\n  {train_command(case)}"
                    )
                faults.append(SearchFault(number, case, verdict))
    return counts, faults


def _is_same_fault(searcher: Searcher, verdict: Verdict, case: Case) -> bool:
    """True if this case fails in the same way as the case of the verdict."""
    return _same_fault(verdict, searcher.judge([case])[0])


def _same_fault(first: Verdict, other: Verdict) -> bool:
    """True if both verdicts have the same kind and, for crashes, the same last line apart from digits."""
    if first.kind != other.kind:
        return False
    return first.kind in ("differs", "hangs") or _last_line(first) == _last_line(other)


def _last_line(verdict: Verdict) -> str:
    """Return the start of the last line of the text, without digits."""
    if not verdict.text:
        return ""
    line = verdict.text.strip().splitlines()[-1]
    return "".join(character for character in line[:60] if not character.isdigit())


def main(arguments: list[str]) -> int:
    """Run the command line that the module docstring describes. Return the exit status."""
    parser = argparse.ArgumentParser(
        description="Random configurations, each refused or equal to one process."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--families", help="comma-separated families to draw from, or all")
    parser.add_argument(
        "--features", help=f"all, or a comma-separated list of: {', '.join(FEATURES)}"
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not shrink faults, for a long search"
    )
    parser.add_argument(
        "--try", dest="options", nargs=argparse.REMAINDER, help="options of one configuration"
    )
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    if options.options is not None:
        with tempfile.TemporaryDirectory(prefix="shardtrain-search-") as folder:
            verdict = Searcher(Path(folder)).judge([parse(options.options)])[0]
        print(f"{verdict.kind}\n{verdict.text}".strip())
        return int(verdict.is_fault)
    started = time.monotonic()
    numbers = range(options.first, options.first + options.count)
    families = _listed(options.families, every=(*FAMILIES, *NEWER), default=FAMILIES)
    if unknown := set(families) - SHAPES.keys():
        parser.error(f"--families: {', '.join(sorted(unknown))} is not one of {', '.join(SHAPES)}")
    features = _listed(options.features, every=FEATURES, default=())
    if unknown := set(features) - {*FEATURES, ARCHITECTURES}:
        known = ", ".join((*FEATURES, ARCHITECTURES))
        parser.error(f"--features: {', '.join(sorted(unknown))} is not one of {known}")
    if ARCHITECTURES in features:
        # Draw the other options as for llama3. The architecture then replaces the model.
        families = ("llama3",)
    report = functools.partial(print, flush=True)
    counts, faults = search(
        options.seed, numbers, report, not options.no_shrink, families, features
    )
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(
        f"seed {options.seed}, cases {options.first} to {options.first + options.count - 1}: {dict(counts)}"
    )
    print(
        f"{seconds:.0f} CPU seconds, {seconds / options.count:.1f} a case; {time.monotonic() - started:.0f} s"
    )
    return int(bool(faults))


def _listed(text: str | None, every: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    """Return the names in a comma-separated argument, all of them for "all", or the default."""
    if text == "all":
        return every
    return text.split(",") if text else default


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
