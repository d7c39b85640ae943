"""A search that never ends: random configurations, each refused before a rank starts, or equal to one process.

    python tests/search.py --seed 1 --count 500          search; 0 where nothing was found, else 1
    python tests/search.py --families llama4,gpt_oss     search these families alone
    python tests/search.py --features all                with features that are drawn where asked for
    python tests/search.py --try --parallelism...        one configuration, given by its options

A third verdict is a fault, and is one of these: ``differs`` without a word, ``crashes``, ``hangs``, ``refused late``
(after ranks have started) or ``refused without need`` (no rule that ``search_space.broken`` knows is broken, or the
refusal names an option that breaks none). A fault is shrunk: options are dropped, degrees and sizes made smaller, for
as long as it stays. Cases are those of ``search_space.draw``: number N of a seed is the same in every run.

Compared are two steps of the trainer itself: losses to 1e-5, the gradient norm to 1e-6 of itself, each gradient to 1e-5
of its norm or of a twentieth of the norm of all, whichever is more, weights after the steps to 1e-6; reduced precision
as loosely as it rounds, see ``TOLERANCES``. Where a case has a second mesh, the run is saved after a step, ends, and
continues there, and is compared with one that went through.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program the tests are not on the path, and nor is the package of this tree
    sys.path[:0] = [str(Path(__file__).parents[1])]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from search_case import CP, DDP, FAMILIES, FSDP, LOCAL, NEWER, PP, SEQ, SHAPES, STEPS, TP, UNSET, A, Case, M, P
from search_more import CSV, FEATURES, tolerance, write_schedule
from search_space import broken, draw
from torch import Tensor

from shardtrain import config, models
from shardtrain.config import Loaded
from shardtrain.distributed import LOSS_AXES
from shardtrain.distributed.process_group import World
from shardtrain.ops.dtensor import local_tensor, to_full
from shardtrain.train import trainer
from shardtrain.train.preflight import meta_model
from shardtrain.train.validation import Evaluation, Validator
from shardtrain.utils import log
from shardtrain.utils.errors import ConfigError, PeerError, ShardtrainError

ROOT = Path(__file__).parents[1]
IDLE_SECONDS = 60
"""Ranks of which none used the processor for so long hang: on a busy machine they are slow, and use it."""
AT_ONCE = 8
"""Cases that one set of ranks runs, one after the other: what PyTorch learns of a mesh is then paid once."""


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be from those of one process."""

    loss: float
    norm: float
    gradient: float
    weight: float


TOLERANCES = {
    # float32 sums in another order: 1e-7 of their size
    "float32": Tolerance(loss=1e-5, norm=1e-6, gradient=1e-5, weight=1e-6),
    # Newton-Schulz steps raise the noise of small singular values a hundredfold
    "Muon": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    # a new head on a tiny model: gradients of norm 20 to 60, so that float32's rounding of the first step is 3e-6 of
    # the second one's norm; in float64 the same cases agree to 1e-15
    "steep": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-5),
    # eight bits of a number: enough to see a missing term, a wrong scale or a batch left out
    "reduced": Tolerance(loss=2e-2, norm=5e-2, gradient=0.15, weight=3e-2),
    # a number of float8 that lies at the middle of two becomes the other, an eighth away: of the 1,000 numbers of
    # these weights one such moves a gradient by 4e-3 of itself. An update is a gradient over its own size: where that
    # is all but zero the update may turn around, by twice the rate of 1e-2
    "float8": Tolerance(loss=1e-3, norm=1e-2, gradient=3e-2, weight=2e-2),
    # the same of numbers of the state, of which the second update is made: 1/256 of it, and its rate is 1e-2
    "16 bits": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-4),
    # and there 1/64 of the largest number of a block, in both means
    "8 bits": Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weight=5e-4),
}

MOST = Tolerance(loss=1e-3, norm=1e-3, gradient=1e-3, weight=1e-3)
"""Of a model in float32 that amplifies rounding: see ``widened``."""


@dataclass
class Numbers:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Steps of one configuration; a continued run has a folder, and ends itself after ``stop_after`` steps."""

    loaded: Loaded
    stop_after: int | None = None
    constants: Mapping[str, int] = field(default_factory=dict)
    shaken: bool = False
    """Whether each weight begins as the next number above or below its own."""

    @property
    def has_folder(self) -> bool:
        """Whether it does more than steps: what a whole run does between them, in a folder of its own."""
        c = self.loaded.config
        between = c.validation.enable or c.metrics.sample_freq or c.training.replica_check_interval
        # frozen weights are packed, and DoRA's lengths of their rows taken, when they are loaded
        packed = c.lora.base_dtype != "training" or c.lora.use_dora
        return bool(c.checkpoint.enable or packed or c.training.epochs or c.training.on_data_end == "stop" or between)


@dataclass(frozen=True)
class Failure:
    """Ranks that gave no numbers: ``kind`` is crashes, hangs or refused late."""

    kind: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """``refused``, ``equal``, or a fault."""

    kind: str
    text: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether it is neither of the two that may be."""
        return self.kind not in ("refused", "equal")


class _Stopped(Exception):
    """Ends a run between two steps, as a kill would."""


def steps_of(rank: int, job: Job) -> Numbers:
    """Run a job as one rank whose process group exists."""
    found = Numbers()
    torch.compiler.reset()  # what a job before compiled, and its lengths, are not what this one's graphs are made of
    world = World(rank, dist.get_world_size(), rank, torch.device("cpu"))
    original_step, original_run = trainer.step, Validator.run

    def step(run: trainer.Run) -> trainer.Outcome | None:
        if run.state.step == job.stop_after:
            raise _Stopped
        if not found.initial:
            if job.shaken:
                _shake(run)
            found.initial = _whole(run)
            _keep_gradients(run, found.gradients)
        outcome = original_step(run)
        if outcome is not None:
            total = run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item()
            found.losses.append(total / max(1, outcome.global_tokens))
            found.norms.append(outcome.grad_norm)
            found.final = _whole(run)
        return outcome

    def validate(validator: Validator, at: int) -> Evaluation | None:
        evaluation = original_run(validator, at)
        found.validations += [evaluation.loss] if evaluation is not None else []
        return evaluation

    with _constants(job.constants):
        if not job.has_folder:
            run = trainer.build(job.loaded.config, world)
            for _ in range(job.loaded.config.training.steps):
                step(run)
            return found
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
    return found


@contextmanager
def _constants(values: Mapping[str, int]) -> Iterator[None]:
    places = [(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in values]
    before = [getattr(module, name) for module, name in places]
    try:
        for (module, name), value in zip(places, values.values(), strict=True):
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


def _whole(run: trainer.Run) -> dict[str, Tensor]:
    return {name: to_full(p.detach()).float().clone() for name, p in run.runner.parameters().items()}


@torch.no_grad()
def _shake(run: trainer.Run) -> None:
    """Move each weight to the next number above or below, as chance has it: no step of rounding is smaller."""
    generator = torch.Generator().manual_seed(0)
    for parameter in run.runner.parameters().values():
        local = local_tensor(parameter)
        if local.dtype == torch.float32:
            up = torch.rand(local.shape, generator=generator) < 0.5
            local.copy_(torch.nextafter(local, torch.where(up, math.inf, -math.inf)))


def _keep_gradients(run: trainer.Run, kept: dict[str, Tensor]) -> None:
    update = run.runner.update

    def first(optimizer: torch.optim.Optimizer) -> None:
        if not kept:
            gradients = {name: p.grad for name, p in run.runner.parameters().items() if p.grad is not None}
            kept.update({name: to_full(gradient).float().clone() for name, gradient in gradients.items()})
        update(optimizer)

    run.runner.update = first  # type: ignore[method-assign]


def run_jobs(num_ranks: int, jobs: Sequence[Job]) -> Iterator[list[Numbers] | Failure]:
    """What the ranks saw of each job; a failure ends them, and others run the jobs that are left."""
    done = 0
    while done < len(jobs):
        for answer in _run_some(num_ranks, jobs[done : done + AT_ONCE]):
            yield answer
            done += 1


def _run_some(num_ranks: int, jobs: Sequence[Job]) -> Iterator[list[Numbers] | Failure]:
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
    """One answer of each rank, or why there is none: of several errors the one that is not about a lost peer."""
    answers: dict[int, tuple[str, Any]] = {}
    used, since, grace = 0.0, time.monotonic(), 0.0
    while len(answers) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in answers]
        for receiver in multiprocessing.connection.wait(waiting, timeout=0.5):
            rank = receivers.index(receiver)
            try:
                answers[rank] = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                answers[rank] = ("crashes", "a rank died")
        now, failed = time.monotonic(), any(kind != "numbers" for kind, _ in answers.values())
        if failed:
            grace = grace or now + 3.0  # the others may be about to say more; some wait for a peer that is gone
            if now > grace:
                break
        seconds = sum(_cpu_seconds(pid) for pid in pids)
        if seconds > used + 0.05:
            used, since = seconds, now
        if now - since > IDLE_SECONDS:
            return Failure("hangs", f"{len(receivers) - len(answers)} of {len(receivers)} ranks wait for ever")
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
    # what went wrong is sent; warnings of PyTorch are not what is searched for
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


def differences(found: Numbers, expected: Numbers, tolerance: Tolerance) -> list[str]:
    """Every way in which a rank's numbers are not those of one process."""
    wrong = [f"initial {name}" for name, w in found.initial.items() if not torch.equal(w, expected.initial[name])]
    for what, mine, theirs, limit in (
        ("loss", found.losses, expected.losses, [tolerance.loss] * len(expected.losses)),
        ("norm", found.norms, expected.norms, [tolerance.norm * norm for norm in expected.norms]),
        ("validation", found.validations, expected.validations, [tolerance.loss] * len(expected.validations)),
    ):
        if len(mine) != len(theirs):
            wrong.append(f"{len(mine)} {what}s for {len(theirs)}")
        wrong += [
            f"{what} {step}: {a!r} for {b!r}"
            for step, (a, b, allowed) in enumerate(zip(mine, theirs, limit, strict=False), 1)
            if not abs(a - b) <= allowed
        ]
    floor = sum(float(gradient.square().sum()) for gradient in expected.gradients.values()) ** 0.5 / 20
    for name, gradient in found.gradients.items():
        theirs_norm = float(expected.gradients[name].norm())
        error = float((gradient - expected.gradients[name]).norm())
        if not error <= tolerance.gradient * max(theirs_norm, floor):
            wrong.append(f"gradient of {name}: off by {error / max(theirs_norm, 1e-30):.1e} of its norm")
    for name, weight in found.final.items():
        off = float((weight - expected.final[name]).abs().max())
        if not off <= tolerance.weight:
            wrong.append(f"final {name}: off by {off:.1e}")
    return wrong


def widened(usual: Tolerance, moved: Numbers, expected: Numbers, most: Tolerance) -> Tolerance:
    """The tolerance for a model that amplifies rounding: what a unit in the last place of its weights does, times 8.

    At least ``usual``, and no more than ``most``.
    """
    pairs = [(moved.losses, expected.losses), (moved.validations, expected.validations)]
    loss = max((abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)), default=0.0)
    norm = max(abs(a - b) / max(b, 1e-30) for a, b in zip(moved.norms, expected.norms, strict=True))
    floor = sum(float(gradient.square().sum()) for gradient in expected.gradients.values()) ** 0.5 / 20
    gradient = max(
        float((moved.gradients[name] - theirs).norm()) / max(float(theirs.norm()), floor, 1e-30)
        for name, theirs in expected.gradients.items()
    )
    weight = max(float((moved.final[name] - theirs).abs().max()) for name, theirs in expected.final.items())
    found = {"loss": loss, "norm": norm, "gradient": gradient, "weight": weight}
    return Tolerance(
        **{kind: max(getattr(usual, kind), min(8 * off, getattr(most, kind))) for kind, off in found.items()}
    )


def refusal(case: Case) -> Verdict:
    """What the check alone says: ``refused``, a refusal without need, ``accepted``, or ``accepted though`` a rule is
    broken."""
    try:
        load(case)
    except ConfigError as error:
        return judge_refusal(case, error)
    rules = "; ".join(rule.rule for rule in broken(case))
    return Verdict("accepted though", rules) if rules else Verdict("accepted")


def judge_refusal(case: Case, error: ConfigError) -> Verdict:
    """Whether a refusal is one that the documented rules ask for."""
    rules = [*broken(case), *(broken(case.moved()) if case.then is not None else ())]
    if not rules:
        return Verdict("refused without need", str(error))
    named = {problem.option for problem in error.problems if hasattr(problem, "option")}
    expected = {option for rule in rules for option in rule.options}
    if not named & expected:
        wanted = "; ".join(rule.rule for rule in rules)
        return Verdict("refused without need", f"names {', '.join(sorted(named))}, and broken is: {wanted}\n{error}")
    return Verdict("refused", str(error))


class Searcher:
    """Judges cases many at a time; runs of one process are kept, because many cases share one."""

    def __init__(self, folder: Path) -> None:
        for family in SHAPES:
            models.find(family)  # imported once, by the process that ranks are forked from
        self._folder = folder
        self._expected: dict[tuple[str, ...], Numbers | Failure] = {}
        self._runs = 0

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """The verdict of each case."""
        verdicts: dict[int, Verdict] = {}
        plans: dict[int, list[tuple[int, Job]]] = {}
        for index, case in enumerate(cases):
            try:
                plans[index] = self._plan(case)
            except ConfigError as error:
                verdicts[index] = judge_refusal(case, error)
        self._run_references([cases[index] for index in plans])
        found: dict[int, list[Numbers] | Failure] = {}
        for part in range(2):  # a moved run's second half follows its first
            sizes = sorted({plan[part][0] for plan in plans.values() if part < len(plan)})
            for num_ranks in sizes:
                members = [i for i, plan in plans.items() if part < len(plan) and plan[part][0] == num_ranks]
                members = [i for i in members if not isinstance(found.get(i), Failure)]
                answers = run_jobs(num_ranks, [plans[i][part][1] for i in members])
                for i, answer in zip(members, answers, strict=True):
                    found[i] = answer if part == 0 or isinstance(answer, Failure) else _joined(found[i], answer)
        for index in plans:
            verdicts[index] = self._compare(cases[index], found[index])
        return [verdicts[index] for index in range(len(cases))]

    def _plan(self, case: Case) -> list[tuple[int, Job]]:
        """The parts of a run and their numbers of ranks; raises ConfigError as the command does before ranks start."""
        folder = self._folder_of_run()
        if case.then is None:
            return [(case.num_ranks, Job(load(case, folder), constants=case.constants))]
        saved = {**folder, "checkpoint.enable": "true", "checkpoint.interval": "1"}
        # the second run is the first, continued: what it says of its mesh alone is new
        first, second = load(case, saved), load(case.moved(), saved)
        one = Job(first, stop_after=STEPS // 2, constants=case.constants)
        return [(case.num_ranks, one), (case.moved().num_ranks, Job(second))]

    def _folder_of_run(self) -> dict[str, str]:
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        shutil.rmtree(folder, ignore_errors=True)
        return {"job.dump_folder": str(folder)}

    def _run_references(self, cases: Sequence[Case]) -> None:
        missing = {_key(case): case.one_process() for case in cases if _key(case) not in self._expected}
        jobs = [Job(load(case, self._folder_of_run())) for case in missing.values()]
        for key, answer in zip(missing, run_jobs(1, jobs), strict=True):
            self._expected[key] = answer if isinstance(answer, Failure) else answer[0]

    def _compare(self, case: Case, found: list[Numbers] | Failure) -> Verdict:
        expected = self._expected[_key(case)]
        if isinstance(expected, Failure):
            return Verdict(expected.kind, f"on one process: {expected.text}")
        if isinstance(found, Failure):
            return Verdict(found.kind, found.text)
        allowed, said = TOLERANCES[tolerance(case)], ""
        if case.is_exact and any(differences(numbers, expected, allowed) for numbers in found):
            wider = self._widened(case, expected, allowed)
            said = f" as far as rounding goes: {wider}" if wider != allowed else ""
            allowed = wider
        for rank, numbers in enumerate(found):
            wrong = differences(numbers, expected, allowed)
            if wrong:
                return Verdict("differs", f"rank {rank}: " + "; ".join(wrong[:6]) + said)
        held = {name for numbers in found for name in numbers.final}
        if held != set(expected.final):
            return Verdict("differs", f"no rank holds {', '.join(sorted(set(expected.final) - held)[:6])}")
        return Verdict("equal", said)

    def _widened(self, case: Case, expected: Numbers, usual: Tolerance) -> Tolerance:
        """``usual``, or what one process that begins a unit in the last place away says by itself."""
        (answer,) = run_jobs(1, [Job(load(case.one_process(), self._folder_of_run()), shaken=True)])
        most = TOLERANCES["reduced"] if usual == TOLERANCES["float8"] else MOST
        return usual if isinstance(answer, Failure) else widened(usual, answer[0], expected, most)


def _key(case: Case) -> tuple[str, ...]:
    return tuple(case.one_process().words())


def load(case: Case, more: Mapping[str, str] | None = None) -> Loaded:
    """The configuration as the command line gives it, refused as ``shardtrain train`` refuses it."""
    if case.value(CSV):
        write_schedule(Path(case.value(CSV)))
    more = {name: value for name, value in (more or {}).items() if name not in case.resolved()}
    loaded = config.load(
        None, [*case.words(), *(word for name, value in more.items() for word in (f"--{name}", value))]
    )
    config.require(loaded, case.num_ranks, "cpu", 0)
    for error in meta_model.build(loaded.config, case.num_ranks)[0]:
        raise error
    return loaded


def _joined(first: list[Numbers] | Failure, second: list[Numbers]) -> list[Numbers] | Failure:
    """The numbers of a run in two halves: what began is the first half's, what ended the second's."""
    if isinstance(first, Failure):
        return first
    whole = []
    for numbers in second:
        steps = [getattr(first[0], name) + getattr(numbers, name) for name in ("losses", "norms", "validations")]
        whole.append(Numbers(*steps, {}, {}, numbers.final))
    is_over = not any(numbers.final for numbers in second)  # of a run of one step nothing was left to continue
    return whole + [Numbers(*steps, one.initial, one.gradients, one.final if is_over else {}) for one in first]


def shrink(case: Case, is_fault: Callable[[Case], bool], seconds: float = 300.0) -> Case:
    """The shortest case that still has the fault and that dropping or halving one thing does not spare."""
    until, smaller = time.monotonic() + seconds, True
    while smaller:
        smaller = False
        for candidate in _smaller(case):
            if time.monotonic() > until:
                return case
            if is_fault(candidate):
                case, smaller = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less to say, those that leave out most first."""
    if case.then is not None:
        yield dataclasses.replace(case, then=None)
    options = dict(case.options)
    for start in ("optimizer.", "data.", A, "compile.", "lora.", "training.", "lr_scheduler.", "debug.", "model."):
        group = [name for name in options if name.startswith(start) and name != LOCAL]
        if len(group) > 1:
            yield _without(case, group)
    for axis in (DDP, FSDP, CP, TP, PP):
        degree = case.number(axis)
        if degree > 1:
            of_axis = {CP: "context_", PP: "pipeline_", DDP: "shard_optimizer", TP: "disable_loss"}.get(axis)
            yield _without(case, [n for n in options if n == axis or (of_axis and n.startswith(P + of_axis))])
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
    return dataclasses.replace(case, options={n: v for n, v in case.options.items() if n not in names})


def _with(case: Case, changes: dict[str, str]) -> Case:
    return dataclasses.replace(case, options={**case.options, **changes})


def command(case: Case) -> str:
    """What to type to see a case again, from the root of the repository."""
    options = {name: value for name, value in case.options.items() if value != UNSET}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    words += ["--accumulation", str(case.accumulation)] if case.accumulation > 1 else []
    unset = [f"--{name}" for name, value in case.options.items() if value == UNSET]
    words += ["--unset", *unset] if unset else []
    then = [word for name, value in (case.then or {}).items() for word in (f"--{name}", value)]
    words += ["--then", *then] if case.then is not None else []
    return f"python tests/search.py --try {shlex.join(words)}"


def trained(case: Case) -> str:
    """The same as a run of the trainer."""
    return f"shardtrain train defaults --nproc {case.num_ranks} {shlex.join(case.words())}"


def parse(words: Sequence[str]) -> Case:
    """The case of the words behind ``--try``, which ``command`` wrote."""
    parts: dict[str, list[str]] = {"options": [], "unset": [], "then": []}
    at = "options"
    for word in words:
        if word in ("--then", "--unset"):
            at = word[2:]
            continue
        parts[at].append(word)
    accumulation = 1
    if "--accumulation" in parts["options"]:
        place = parts["options"].index("--accumulation")
        accumulation = int(parts["options"].pop(place + 1))
        parts["options"].pop(place)
    options = _pairs(parts["options"]) | {word[2:]: UNSET for word in parts["unset"]}
    return Case(options, accumulation, _pairs(parts["then"]) if "--then" in words else None)


def _pairs(words: list[str]) -> dict[str, str]:
    return {name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)}


@dataclass(frozen=True)
class Found:
    """A fault: the number of its case, the case as small as it gets, and what is wrong with that."""

    number: int
    case: Case
    verdict: Verdict


def search(
    seed: int,
    numbers: Sequence[int],
    say: Callable[[str], None],
    shrinking: bool = True,
    families: Sequence[str] = FAMILIES,
    features: Sequence[str] = (),
) -> tuple[Counter[str], list[Found]]:
    """Judge cases of a seed; gives the count of each verdict, and the faults."""
    counts: Counter[str] = Counter()
    faults: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="shardtrain-search-") as folder:
        searcher = Searcher(Path(folder))
        for start in range(0, len(numbers), 3 * AT_ONCE):
            some = numbers[start : start + 3 * AT_ONCE]
            cases = [draw(seed, number, families, features) for number in some]
            for number, case, verdict in zip(some, cases, searcher.judge(cases), strict=True):
                if verdict.is_fault:
                    again = searcher.judge([case])[0]  # in ranks of its own
                    if again.kind != verdict.kind:
                        verdict = Verdict(f"{verdict.kind}, alone {again.kind}", f"{verdict.text}\n{again.text}")
                counts[verdict.kind] += 1
                if not verdict.is_fault:
                    say(f"{seed}/{number}: {verdict.kind}{verdict.text if verdict.kind == 'equal' else ''}")
                    continue
                say(f"{seed}/{number}: {verdict.kind}\n{verdict.text[-3000:]}\n  {command(case)}")
                if shrinking and "alone" not in verdict.kind:
                    case = shrink(case, lambda other: _same_fault(verdict, searcher.judge([other])[0]))  # noqa: B023
                    verdict = searcher.judge([case])[0]
                    say(f"  shrunk: {verdict.text[-1500:]}\n  {command(case)}\n  {trained(case)}")
                faults.append(Found(number, case, verdict))
    return counts, faults


def _same_fault(first: Verdict, other: Verdict) -> bool:
    """Of one kind; and a crash with the same words at its end, numbers aside."""
    last = [
        "".join(c for c in v.text.strip().splitlines()[-1][:60] if not c.isdigit()) if v.text else ""
        for v in (first, other)
    ]
    return first.kind == other.kind and (first.kind in ("differs", "hangs") or last[0] == last[1])


def main(words: list[str]) -> int:
    """Run the command line of this module's text."""
    parser = argparse.ArgumentParser(description="Random configurations, each refused or equal to one process.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--families", help="families to draw from, with commas between them, or all")
    parser.add_argument("--features", help=f"all, or some with commas between them: {', '.join(FEATURES)}")
    parser.add_argument("--no-shrink", action="store_true", help="leave faults as they are, in a long search")
    parser.add_argument("--try", dest="options", nargs=argparse.REMAINDER, help="one configuration: its options")
    given = parser.parse_args(words)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    if given.options is not None:
        with tempfile.TemporaryDirectory(prefix="shardtrain-search-") as folder:
            verdict = Searcher(Path(folder)).judge([parse(given.options)])[0]
        print(f"{verdict.kind}\n{verdict.text}".strip())
        return int(verdict.is_fault)
    started = time.monotonic()
    numbers = range(given.first, given.first + given.count)
    families = (*FAMILIES, *NEWER) if given.families == "all" else (given.families or ",".join(FAMILIES)).split(",")
    if unknown := set(families) - SHAPES.keys():
        parser.error(f"--families: {', '.join(sorted(unknown))} is not one of {', '.join(SHAPES)}")
    features = FEATURES if given.features == "all" else given.features.split(",") if given.features else ()
    if unknown := set(features) - set(FEATURES):
        parser.error(f"--features: {', '.join(sorted(unknown))} is not one of {', '.join(FEATURES)}")
    say = functools.partial(print, flush=True)
    counts, faults = search(given.seed, numbers, say, not given.no_shrink, families, features)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in usage)
    print(f"seed {given.seed}, cases {given.first} to {given.first + given.count - 1}: {dict(counts)}")
    print(f"{seconds:.0f} CPU seconds, {seconds / given.count:.1f} a case; {time.monotonic() - started:.0f} s")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
