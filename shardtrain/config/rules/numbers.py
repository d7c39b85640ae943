"""Rules about what happens when numbers go wrong."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

OF_REWINDS = ("training.spike_rewind_steps", "training.spike_skip_steps", "training.max_rewinds")


def check_numbers(loaded: Loaded) -> Iterator[Problem]:
    """A detector needs values to compare with, and going back needs checkpoints that are old enough."""
    training = loaded.config.training
    checkpoint = loaded.config.checkpoint
    if training.spike_window < 2:
        yield problem(loaded, "training.spike_window", "has no spread", "use 2 steps or more, such as 128")
    if training.spike_policy != "rewind":
        return
    policy = "training.spike_policy"
    if not checkpoint.enable or checkpoint.load_only:
        yield problem(loaded, policy, "goes back to checkpoints that this run saves", "set checkpoint.enable=true")
    kept = (checkpoint.keep_latest_k - 1) * checkpoint.interval
    if checkpoint.interval_type == "steps" and checkpoint.keep_latest_k and kept < training.spike_rewind_steps:
        rule = f"is more than the {kept} steps that checkpoint.keep_latest_k and checkpoint.interval keep"
        yield problem(loaded, "training.spike_rewind_steps", rule, "keep more checkpoints, or go back less")


def numbers_notes(loaded: Loaded) -> list[str]:
    """Options of spikes that another policy leaves without effect."""
    policy = loaded.config.training.spike_policy
    idle: tuple[str, ...] = () if policy == "rewind" else OF_REWINDS
    idle += ("training.spike_window", "training.spike_sigmas") if policy == "off" else ()
    waiting = [name for name in idle if loaded.is_set(name)]
    return [f"{', '.join(waiting)}: without effect with training.spike_policy={policy}"] if waiting else []
