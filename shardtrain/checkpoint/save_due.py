"""The decision after each step whether to save a checkpoint."""

from __future__ import annotations

from shardtrain.checkpoint.async_save import Saving
from shardtrain.checkpoint.best import Best
from shardtrain.config.schema import Checkpoint


class IsDue:
    """Decide if a save is due after a step: by its number, by rank 0's clock, or because it is the best step."""

    def __init__(self, options: Checkpoint, saving: Saving, best: Best) -> None:
        self._options = options
        self._saving = saving
        self._best = best

    def __call__(self, step: int, total_steps: int) -> bool:
        """True if a save is due. Equal on all ranks, because they exchange clock and best result in
        each step.
        """
        options = self._options
        if not options.enable or options.load_only:
            return False
        is_first = options.enable_first_step_checkpoint and step == 1
        is_last = step == total_steps
        by_number = options.interval_type == "steps" and step % options.interval == 0
        by_number |= options.hf_interval > 0 and step % options.hf_interval == 0
        by_clock = self._saving.by_clock and self._saving.due
        is_best = bool(options.keep_best) and self._best.is_new(step)
        return is_first or is_last or by_number or by_clock or is_best
