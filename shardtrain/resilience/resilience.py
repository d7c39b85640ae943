"""The trainer's interface to watchdog, signals, guards and goodput.

A step uses it four times: batches are read through it, so that a request to stop can end the wait; its flags are part
of the step's first all-reduce; loss and norm are judged before the update; and the step is timed. Its decisions are
equal on all ranks, since they follow from numbers that all ranks have, or that went through that all-reduce.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor

from shardtrain import data
from shardtrain.checkpoint.async_save import NOTHING, Saving
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config.schema import Config
from shardtrain.distributed import process_group
from shardtrain.distributed.grad_clip import Agreed
from shardtrain.distributed.process_group import World
from shardtrain.launch import signals
from shardtrain.launch.goodput.ledger import Ledger
from shardtrain.resilience.guards import loss_spikes, nan_guard, replica_check
from shardtrain.resilience.guards.loss_spikes import Guard
from shardtrain.resilience.watchdog.watchdog import beating
from shardtrain.resilience.watched_run import WatchedRun
from shardtrain.utils import activity
from shardtrain.utils.activity import Phase, Phases

T = TypeVar("T")


class StepVerdict(NamedTuple):
    """What is to be done with a step's gradients, the same on all ranks."""

    apply: bool
    """Whether the update is applied."""
    finite: bool
    """Whether loss and gradient norm are finite."""


@dataclass
class Resilience:
    """Created before the process group is joined; lives until the process ends."""

    stop: signals.StopRequest = field(default_factory=signals.current)
    """Set by a signal, or by the end of the Slurm job."""
    saving: Saving = field(default_factory=Saving)
    """The state of a background save, which ranks exchange in ``pack_flags``."""
    phases: Phases = field(default_factory=Phases)
    """What this process is doing, for the watchdog and the goodput."""
    guard: Guard = field(default_factory=Guard)
    """Losses and norms so far, skipped and rewound steps; saved with the run."""
    ledger: Ledger = field(default_factory=Ledger)
    """The goodput ledger; opened when it is known at which step the run starts."""
    compares_norms: bool = True
    """Whether a step stops if ranks have different gradient norms; ``verify`` turns it off to find the cause."""
    stop_flag: float = 0.0
    """Not 0, on all ranks, if one of them was asked to stop before this step."""
    _replicas: replica_check.Replicas | None = None
    _step_seconds: float = 0.0
    _is_warm: bool = False

    def watchdog(self, config: Config, world: World) -> AbstractContextManager[None]:
        """End this process, and the run, if it hangs inside the block; see ``watchdog/``."""
        return beating(config, world, self.phases)

    def open_ledger(self, folder: Path, step: int, world: World) -> None:
        """Account for the time of this attempt, which continues after ``step``; the first rank writes it."""
        self.ledger = Ledger(folder if world.rank == 0 else None, self.phases, step, world.size)

    # --- around a step

    def warm_up(self) -> None:
        """The next step compiles and warms up: it has the time limits of a start, and its time is not counted."""
        self.phases.begin("compile")
        self._is_warm = False

    @contextmanager
    def watch_step(self, state: TrainState) -> Iterator[None]:
        """Tell the watchdog that a step begins, and note how long it took."""
        started = time.perf_counter()
        self.stop.is_starting = False
        activity.begin_step(state.step + 1, state.to_dict())
        yield
        self._step_seconds = time.perf_counter() - started
        self.ledger.step = activity.now().done = state.step

    def end_step(self, config: Config) -> None:
        """Note a step's time, after logging and saving; the first one ends the warm-up. Called by all ranks."""
        if self._is_warm:
            self.stop.steps.add(self._step_seconds)
            return
        self.stop.first_step_seconds = self._step_seconds
        # after the first step, validation and save, which may all be slow
        process_group.set_timeout(config.comm.train_timeout_seconds)
        self.phases.begin("step")
        self._is_warm = True

    # --- within a step

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count the time of the block for this phase."""
        return self.phases.within(name)

    def pack_flags(self) -> list[float]:
        """This rank's part of the all-reduce that begins a step: requests to stop, and the state of a save."""
        return [self.stop.flag(), *(self.saving.pack_flags() if self._save_has_flags else NOTHING)]

    def unpack_flags(self, sums: list[float]) -> bool:
        """Unpack the sums over all ranks; returns whether the run is to stop before this step."""
        self.stop_flag, *saving = sums
        if self._save_has_flags:
            self.saving.unpack_flags(saving)
        return self.stop_flag != 0

    @property
    def _save_has_flags(self) -> bool:
        """Whether the flags of a save are exchanged; the same on all ranks."""
        return self.saving.by_clock or self.saving.writing is not None

    def leaves_out(self, first_row: int, end_row: int) -> bool:
        """Whether a step's rows are left out, because a rollback after a loss spike skips them."""
        return bool(self.guard.rewinds) and self.guard.leaves_out(first_row, end_row)

    def judge(
        self, run: WatchedRun, loss: Tensor, norm: Tensor, agreed: Agreed, batches: list[data.Batch]
    ) -> StepVerdict:
        """Whether a step's update may be made: its numbers are finite, the same on all ranks, and no spike.

        ``loss`` and ``norm`` are those that this rank computed, ``agreed`` those of all.

        Raises:
            NumericalError: when the run must stop; the weights are still those before the step.
            RollbackRequested: when it continues from an older checkpoint.
        """
        # the agreed numbers are equal on all ranks, so all take the same branch and enter the same collectives
        finite = math.isfinite(agreed.norm) and math.isfinite(agreed.loss)
        if not finite:
            nan_guard.stop_or_skip(run, self.guard, loss, batches)
        elif not agreed.same_norm and self.compares_norms:
            replica_check.refuse_norms(run, norm)
        # a float16 overflow is normal: it skips the update and shrinks the loss scale
        apply = run.scaler.update(finite) if run.scaler else finite
        return StepVerdict(apply and loss_spikes.may_apply(run, self.guard, agreed.loss, agreed.norm), finite)

    def compare_replicas(self, run: WatchedRun, checkpoints: Checkpoints) -> None:
        """Every ``training.replica_check_interval`` steps: ranks that hold the same weights have the same bits.

        Raises:
            NumericalError: on all ranks; names the tensor and the odd ranks.
        """
        if not run.config.training.replica_check_interval:
            return
        if self._replicas is None:
            self._replicas = replica_check.Replicas(run, checkpoints)
        self._replicas.check(run.state.step)

    # --- what came of it

    def measures(self) -> dict[str, float]:
        """For the record of a logged step: spikes, slow ranks and, on the first rank, the goodput."""
        counts = {"spikes": self.guard.spikes, "rewinds": len(self.guard.rewinds)}
        return {**counts, **activity.now().measures, **self.ledger.measures()}
