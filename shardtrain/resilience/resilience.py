"""The trainer's interface to watchdog, signals, guards and goodput.

A step uses it in four ways. It reads batches through it, so a stop request can end the wait. It includes its
flags in the step's first all-reduce. It lets it judge loss and norm before the update. It lets it measure its
duration. All ranks make the same decisions, because these depend only on numbers that are equal on all ranks
or were part of that all-reduce.
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
    """Decision about a step's gradients, the same on all ranks."""

    apply: bool
    """True to apply the update."""
    finite: bool
    """True if loss and gradient norm are finite."""


@dataclass
class Resilience:
    """State of watchdog, guards and goodput. Created before the process group, and used until the process ends."""

    stop: signals.StopRequest = field(default_factory=signals.current)
    """Request to stop. Set by a signal, or by the end of the Slurm job."""
    saving: Saving = field(default_factory=Saving)
    """State of a background save, which ranks exchange in ``pack_flags``."""
    phases: Phases = field(default_factory=Phases)
    """Current activity of this process, for the watchdog and the goodput account."""
    guard: Guard = field(default_factory=Guard)
    """Recent losses and norms, skipped steps and rollbacks. Saved with the run."""
    ledger: Ledger = field(default_factory=Ledger)
    """Goodput ledger. Opened when the first step of the run is known."""
    compares_norms: bool = True
    """True if a step must stop when ranks have different gradient norms.

    ``verify`` disables this to find the cause.
    """
    stop_flag: float = 0.0
    """Nonzero, on all ranks, if any rank received a stop request before this step."""
    _replicas: replica_check.Replicas | None = None
    _step_seconds: float = 0.0
    _is_warm: bool = False

    def watchdog(self, config: Config, world: World) -> AbstractContextManager[None]:
        """Return a context manager that ends this process and the run if it hangs inside the block.

        See ``watchdog/``.
        """
        return beating(config, world, self.phases)

    def open_ledger(self, folder: Path, step: int, world: World) -> None:
        """Start to account for the time of this attempt, which continues after ``step``.

        Rank 0 writes the ledger.
        """
        self.ledger = Ledger(folder if world.rank == 0 else None, self.phases, step, world.size)

    # --- around a step

    def warm_up(self) -> None:
        """Declare that the next step compiles and warms up.

        It then has the time limits of the start phase, and its duration is not recorded.
        """
        self.phases.begin("compile")
        self._is_warm = False

    @contextmanager
    def watch_step(self, state: TrainState) -> Iterator[None]:
        """Announce the start of a step to the watchdog, and measure the duration of the block."""
        started = time.perf_counter()
        self.stop.is_starting = False
        activity.begin_step(state.step + 1, state.to_dict())
        yield
        self._step_seconds = time.perf_counter() - started
        self.ledger.step = activity.now().done = state.step

    def end_step(self, config: Config) -> None:
        """Record a step's duration after logging and saving. The first step ends the warm-up. All ranks call it."""
        if self._is_warm:
            self.stop.steps.add(self._step_seconds)
            return
        self.stop.first_step_seconds = self._step_seconds
        # The first step, validation and save are done. All of these may be slow.
        process_group.set_timeout(config.comm.train_timeout_seconds)
        self.phases.begin("step")
        self._is_warm = True

    # --- within a step

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Return a context manager that assigns the time of the block to this phase."""
        return self.phases.within(name)

    def pack_flags(self) -> list[float]:
        """Return this rank's summands for the all-reduce at the start of a step: stop request and state of a save."""
        save_flags = self.saving.pack_flags() if self._save_has_flags else NOTHING
        return [self.stop.flag(), *save_flags]

    def unpack_flags(self, sums: list[float]) -> bool:
        """Unpack the sums over all ranks. Return True if the run must stop before this step."""
        self.stop_flag, *saving = sums
        if self._save_has_flags:
            self.saving.unpack_flags(saving)
        return self.stop_flag != 0

    @property
    def _save_has_flags(self) -> bool:
        """True if ranks exchange flags about a save in this step. Equal on all ranks."""
        return self.saving.by_clock or self.saving.writing is not None

    def excludes(self, first_row: int, end_row: int) -> bool:
        """True if a step must be skipped, because a rollback after a loss spike excluded one of its rows."""
        return bool(self.guard.rewinds) and self.guard.excludes(first_row, end_row)

    def judge(
        self, run: WatchedRun, loss: Tensor, norm: Tensor, agreed: Agreed, batches: list[data.Batch]
    ) -> StepVerdict:
        """Decide on a step's update: its numbers must be finite, equal on all ranks, and not a spike.

        Args:
            run: the run.
            loss: the loss that this rank computed.
            norm: the gradient norm that this rank computed.
            agreed: the loss and norm of all ranks.
            batches: this rank's batches.

        Raises:
            NumericalError: the run must stop. The weights are still those before the step.
            RollbackRequested: the run must continue from an older checkpoint.
        """
        # The agreed numbers are equal on all ranks, so all ranks take the same branch and enter the same collectives.
        finite = math.isfinite(agreed.norm) and math.isfinite(agreed.loss)
        if not finite:
            nan_guard.stop_or_skip(run, self.guard, loss, batches)
        elif not agreed.same_norm and self.compares_norms:
            replica_check.refuse_norms(run, norm)
        # An overflow in float16 is normal. It skips the update and reduces the loss scale.
        applies = run.scaler.update(finite) if run.scaler else finite
        if applies:
            applies = loss_spikes.may_apply(run, self.guard, agreed.loss, agreed.norm)
        return StepVerdict(applies, finite)

    def compare_replicas(self, run: WatchedRun, checkpoints: Checkpoints) -> None:
        """Check every ``training.replica_check_interval`` steps that replicas of weights are
        bitwise equal. Collective.

        Raises:
            NumericalError: replicas differ. All ranks raise it, with the name of the tensor and the
                ranks that differ.
        """
        if not run.config.training.replica_check_interval:
            return
        if self._replicas is None:
            self._replicas = replica_check.Replicas(run, checkpoints)
        self._replicas.check(run.state.step)

    # --- results

    def measures(self) -> dict[str, float]:
        """Return metrics for a logged step: spikes, slow ranks and, on rank 0, the goodput."""
        counts = {"spikes": self.guard.spikes, "rewinds": len(self.guard.rewinds)}
        return {**counts, **activity.now().measures, **self.ledger.measures()}
