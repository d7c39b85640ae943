"""What keeps a run alive and its numbers honest: the one object through which the trainer sees this package.

A step meets it four times: it reads its batches through it (a request to stop may end the wait), its first all-reduce
carries this object's flags, its numbers are judged before the update, and afterwards its time is noted. What ranks
decide by it is equal on all of them: it follows from numbers that all know, or went through that all-reduce.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch import Tensor

from shardtrain import data
from shardtrain.checkpoint.async_save import NOTHING, Saving
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.distributed import process_group
from shardtrain.distributed.grad_clip import Agreed
from shardtrain.distributed.process_group import World
from shardtrain.resilience import progress, signals
from shardtrain.resilience.goodput.ledger import Ledger
from shardtrain.resilience.guards import loss_spikes, nan_guard, replica_check
from shardtrain.resilience.guards.loss_spikes import Guard
from shardtrain.resilience.progress import Phase, Phases
from shardtrain.resilience.watchdog.watchdog import beating

if TYPE_CHECKING:
    from shardtrain.train.run import Run
    from shardtrain.train.state import TrainState

T = TypeVar("T")


class Verdict(NamedTuple):
    """What is to be done with a step's gradients, the same on all ranks."""

    apply: bool
    """Whether the update is made."""
    finite: bool
    """Whether loss and gradient norm are numbers."""


@dataclass
class Resilience:
    """Made before the process group is joined, and part of the run until the process ends."""

    stop: signals.StopRequest = field(default_factory=signals.current)
    """A signal, or the end of the Slurm job."""
    saving: Saving = field(default_factory=Saving)
    """The save that is written beside training, as ranks tell each other of it."""
    phases: Phases = field(default_factory=Phases)
    """What this process is doing: read by the watchdog and for the goodput."""
    guard: Guard = field(default_factory=Guard)
    """Losses and norms so far, skipped and rewound steps; saved with the run."""
    ledger: Ledger = field(default_factory=Ledger)
    """Where the time went; opened when the run has its first step."""
    compares_norms: bool = True
    """Whether a step stops where ranks found different gradient norms; verify lets it continue, and finds the cause."""
    stop_flag: float = 0.0
    """Not 0, on all ranks, when one of them was asked to stop before the step that was to come."""
    _replicas: replica_check.Replicas | None = None
    _step_seconds: float = 0.0
    _is_warm: bool = False

    def watchdog(self, config: Config, world: World) -> AbstractContextManager[None]:
        """End this process, and the run, where it hangs inside the block; see ``watchdog/``."""
        return beating(config, world, self.phases)

    def open_ledger(self, folder: Path, step: int, world: World) -> None:
        """Account for the time of this attempt, which continues after ``step``; the first rank writes it."""
        self.ledger = Ledger(folder if world.rank == 0 else None, self.phases, step, world.size)

    # --- around a step

    def warm_up(self) -> None:
        """The step to come compiles and warms up: it has the limits of starting, and its time says nothing."""
        self.phases.begin("compile")
        self._is_warm = False

    @contextmanager
    def watch_step(self, state: TrainState) -> Iterator[None]:
        """Tell the watchdog that a step begins, and note how long it took."""
        started = time.perf_counter()
        progress.begin_step(state.step + 1, state.to_dict())
        yield
        self._step_seconds = time.perf_counter() - started
        self.ledger.step = state.step

    def end_step(self, config: Config) -> None:
        """The step is logged, and saved where that was due; called by all ranks alike."""
        if self._is_warm:
            self.stop.steps.add(self._step_seconds)
            return
        # only now: the first validation and the first save may be as slow as the first step
        process_group.set_timeout(config.comm.train_timeout_seconds)
        self.phases.begin("step")
        self._is_warm = True

    # --- within a step

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count the time of the block for this phase."""
        return self.phases.within(name)

    def read(self, action: Callable[[], T]) -> T | None:
        """The result of a wait for data, or None where a request to stop ends it."""
        return self.stop.read(action)

    def pack_flags(self) -> list[float]:
        """This rank's part of the all-reduce that begins a step: requests to stop, and the state of a save."""
        return [self.stop.flag(), *(self.saving.pack_flags() if self._save_has_flags else NOTHING)]

    def unpack_flags(self, sums: list[float]) -> bool:
        """Take the sums over all ranks; gives whether the run is to stop before this step."""
        self.stop_flag, *saving = sums
        if self._save_has_flags:
            self.saving.unpack_flags(saving)
        return self.stop_flag != 0

    @property
    def _save_has_flags(self) -> bool:
        """Whether ranks have something to tell each other of a save; the same on all of them."""
        return self.saving.by_clock or self.saving.writing is not None

    def leaves_out(self, first_row: int, end_row: int) -> bool:
        """Whether these rows, a whole step's, were there when the loss spiked, and the run has gone back since."""
        return bool(self.guard.rewinds) and self.guard.leaves_out(first_row, end_row)

    def judge(self, run: Run, loss: Tensor, norm: Tensor, agreed: Agreed, batches: list[data.Batch]) -> Verdict:
        """Whether a step's update may be made: its numbers are finite, the same on all ranks, and no spike.

        ``loss`` and ``norm`` are those that this rank computed, ``agreed`` those of all.

        Raises:
            NumericalError: when the run must stop; the weights are still those before the step.
            RollbackRequested: when it continues from an older checkpoint.
        """
        # the numbers are those of all ranks, so that each rank takes the same branch, with the collectives within it
        finite = math.isfinite(agreed.norm) and math.isfinite(agreed.loss)
        if not finite:
            nan_guard.stop_or_skip(run, loss, batches)
        elif not agreed.same_norm:
            replica_check.refuse_norms(run, norm)
        # an overflow of float16 shrinks the scale and skips the update: it is not a fault of the run
        apply = run.scaler.update(finite) if run.scaler else finite
        return Verdict(apply and loss_spikes.may_apply(run, agreed.loss, agreed.norm), finite)

    def compare_replicas(self, run: Run, checkpoints: Checkpoints) -> None:
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
        return {**counts, **progress.now().measures, **self.ledger.measures()}

    def finish(self) -> None:
        """The last step is made and saved: a request to stop changes nothing any more."""
        self.stop.close()
