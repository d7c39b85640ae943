"""Rules of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.rules.data_rules import is_changed
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

DEPTHS = "num_nextn_predict_layers"
OPTION = f"model.overrides.{DEPTHS}"
FACTOR = "training.mtp_loss_scaling_factor"


def check_multi_token(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of multi-token prediction: its task, its depth, and a factor without effect."""
    sizes = model_shape(loaded)
    if sizes is None:
        return
    depths = sizes.get(DEPTHS, 0)
    if not isinstance(depths, int) or depths < 0:
        # check_model reports it
        return
    if depths == 0:
        # The saved configuration of a run sets every option to its value.
        if is_changed(loaded, FACTOR):
            rule = f"has no effect on a model without multi-token prediction ({DEPTHS} 0)"
            yield problem(loaded, FACTOR, rule, f"set {OPTION}, or remove it")
        return
    task = loaded.config.task.name
    if task != "language_model":
        rule = f'requires the loss of the next token, and task.name = "{task}" has another loss'
        yield _depth_problem(loaded, depths, rule, "set it to 0")
    seq_len = loaded.config.training.seq_len
    if depths >= seq_len:
        rule = f"predicts {depths + 1} tokens ahead, and training.seq_len is {seq_len}"
        yield _depth_problem(loaded, depths, rule, "use a smaller number")


def _depth_problem(loaded: Loaded, depths: int, rule: str, fix: str) -> Problem:
    return Problem(OPTION, depths, rule, fix, loaded.origins.get(OPTION, ""))
