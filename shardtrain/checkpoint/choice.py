"""Choose one checkpoint of a run: ``--step latest|best|N``, with the same meaning in every command.

Imports torch only when a folder is read, so an invalid argument is rejected without delay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardtrain.checkpoint import best, retention
from shardtrain.checkpoint.manifest import Manifest
from shardtrain.checkpoint.storage import Place
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import logger
from shardtrain.utils.variables import is_whole_number

LATEST = "latest"
BEST = "best"
HELP = (
    "checkpoint of a run: latest, best or a number (default: best if the run keeps it, else latest)"
)
EMA_HELP = "use the averaged weights of training.ema_decay"
COMMANDS = (
    "generate, export, merge, test, evaluate and checkpoint (diff, weights, to-dcp, to-fmengine)"
)
"""Commands that take ``--step``."""


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A verified checkpoint of a run, and the reason for choosing it (empty if the user gave its step)."""

    path: Place
    stored: Manifest
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.path} ({self.reason})"
        return str(self.path)


def is_step_name(text: str) -> bool:
    """True for "latest", "best" and a number."""
    return text in (LATEST, BEST) or is_whole_number(text)


def step_name(step: str | int) -> str:
    """Return ``step`` as a str. Raises ConfigError if it is not a step name."""
    if is_step_name(str(step)):
        return str(step)
    raise ConfigError(
        Problem(
            "--step",
            step,
            rule="must be latest, best or a number",
            fix="write it like --step=best",
        )
    )


def reject_use_ema(use_ema: bool, path: Place) -> None:
    """Raise ConfigError if averages were requested of a ``path`` that is not a checkpoint."""
    if use_ema:
        raise ConfigError(
            Problem(
                "--use_ema",
                True,
                rule=f"requires a checkpoint, but {path} is not a checkpoint",
                fix="remove it, or pass a run that was trained with training.ema_decay",
            )
        )


def reject_step(step: str | None, path: Place) -> None:
    """Raise ConfigError if a step was requested but ``path`` is not the folder of a run."""
    if step is not None:
        raise ConfigError(
            Problem(
                "--step",
                step,
                rule=f"requires the folder of a run, but {path} is not such a folder",
                fix="remove it, or pass the run's folder",
            )
        )


def choose(
    folder: Place,
    step: str | None,
    verify: Callable[[Place], tuple[Manifest | None, str]],
) -> ChosenCheckpoint:
    """Return the checkpoint of ``folder`` that ``step`` names (a collective).

    Args:
        folder: holds ``step-N`` folders.
        step: "latest", "best" or a number. None is the best, or the latest if the run keeps no best
            checkpoint.
        verify: ``verification.verify``. Damaged checkpoints are skipped with a warning, unless
            ``step`` is "best" or a number.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    from shardtrain.checkpoint.collectives import broadcast_json

    # Rank 0 reads the folder for all: on a shared folder that lags, ranks would open different steps.
    steps, (pointer, best_damage) = broadcast_json(
        [retention.step_folders(folder), best.pointer_and_damage(folder)]
    )
    # The best checkpoint may have been deleted.
    best_step = pointer.get("step")
    if pointer and best_step not in steps:
        best_damage = f"{folder / best.POINTER} names step {best_step}, which does not exist"
        best_step = None
    if best_damage and step == BEST:
        raise CheckpointError(f"--step={step}: {best_damage}; name a step, or use --step={LATEST}")
    # The latest step instead of the best is another model, so it must not be opened silently.
    if best_damage and step is None:
        logger.warning(f"{best_damage}: using the latest step")

    # Use the first candidate that is not damaged.
    damages: list[str] = []
    for candidate in _candidates(folder, step, steps, best_step):
        path = folder / f"step-{candidate}"
        stored, damage = verify(path)
        if stored is not None:
            for skipped in damages:
                logger.warning(f"{skipped}: skipped, using step-{candidate}")
            return ChosenCheckpoint(path, stored, _reason(candidate, steps[-1], best_step, pointer))
        damages.append(damage)
    reasons = "; ".join(damages[:3]) or "it has none"
    raise CheckpointError(
        f"no checkpoint in {folder} can be used for --step={step or LATEST}: {reasons}"
    )


def _candidates(
    folder: Place, step: str | None, steps: list[int], best_step: int | None
) -> list[int]:
    """Return the steps to try, in the order of preference. Raises CheckpointError if ``step`` does not exist."""
    if step == LATEST:
        return steps[::-1]
    if step is None:
        return sorted(steps, key=lambda number: (number == best_step, number), reverse=True)
    wanted = best_step if step == BEST else int(step)
    if wanted is not None and wanted in steps:
        return [wanted]
    fix = "it has no checkpoint"
    if step == BEST:
        fix = "use --step=latest, or train with checkpoint.keep_best"
    elif steps:
        fix = f"it has the steps {', '.join(map(str, steps))}"
    raise CheckpointError(f"--step={step} does not exist in {folder}; {fix}")


def _reason(chosen: int, latest: int, best_step: int | None, pointer: dict[str, object]) -> str:
    if best_step is None:
        return ""
    if chosen != best_step:
        return f"the best is step {best_step}: --step=best"
    reason = f"best {best.describe(pointer)}"
    if latest != chosen:
        reason += f"; the latest is step {latest}: --step=latest"
    return reason
