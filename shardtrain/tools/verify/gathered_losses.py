"""Compare the loss of each micro-batch of a mesh with float64, for the logits of its ranks.

With ``tp``, each rank has some columns of the logits, and the ranks exchange parts of the log-sum-exp. A
rounded part changes the mean of hundreds of losses by far less than a forward pass rounds, so the tolerance
of the reported loss does not show it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardtrain.config import Config
from shardtrain.distributed.mesh import AXES
from shardtrain.ops.loss_terms import LossTerms
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify import module_rounding
from shardtrain.tools.verify.loss_watch import COLUMNS, PREFIX
from shardtrain.tools.verify.rounding_limits import Excess
from shardtrain.tools.verify.verify_rank import RankRecord

SPLIT_CAUSE = (
    "the largest logit, the sum of exponentials or the log-sum-exp over the ranks of tp is rounded to a "
    "shorter dtype than float32"
)


def excess(config: Config, records: Sequence[RankRecord]) -> Iterator[Excess]:
    """Yield the first loss, or gradient of logits, with more error than one rounding."""
    training = config.training
    terms = LossTerms(training.label_smoothing, training.z_loss_weight)
    groups: dict[tuple[int, ...], list[RankRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.place["tp"]):
        # Ranks of tp share the tokens of a micro-batch.
        group_key = tuple(record.place[axis] for axis in AXES if axis != "tp")
        groups[group_key].append(record)
    for group in groups.values():
        for number in itertools.count():
            key = f"{PREFIX}/{number}"
            if f"{key}/sum" not in group[0].parts:
                break
            # The first wrong micro-batch is enough to name the fault.
            excess_of_batch = list(_of_micro_batch(group, key, terms))
            if excess_of_batch:
                yield from excess_of_batch
                return


def _of_micro_batch(group: Sequence[RankRecord], key: str, terms: LossTerms) -> Iterator[Excess]:
    """Compare a micro-batch of ranks that share its tokens."""
    targets_BT = group[0].parts[f"{key}/targets"]
    if bool((targets_BT == IGNORE).all()):
        return
    is_split = f"{key}/{COLUMNS}" in group[0].parts
    # With a split vocabulary, each rank of tp has some columns. Otherwise each has all logits.
    kind = "logits"
    ranks = group[:1]
    if is_split:
        kind = COLUMNS
        ranks = group
    columns = [record.parts[f"{key}/{kind}"] for record in ranks]
    logits = torch.cat(columns, dim=-1)
    gradients: list[Tensor] = []
    if all(f"{key}/gradient" in record.parts for record in ranks):
        gradients_of_columns = [record.parts[f"{key}/gradient"] for record in ranks]
        gradients.append(torch.cat(gradients_of_columns, dim=-1))
    weight = float(group[0].parts[f"{key}/weight"])
    for record in group:
        loss = float(record.parts[f"{key}/sum"])
        wrong = list(module_rounding.check_loss(logits, gradients, targets_BT, weight, loss, terms))
        for result in wrong:
            cause = SPLIT_CAUSE if is_split else result.cause
            yield Excess(result.path, result.what, result.error, result.allowed, cause)
        if wrong:
            return
