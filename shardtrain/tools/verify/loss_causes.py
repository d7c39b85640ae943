"""Hypotheses about a wrong loss whose logits agree: its targets, its divisor, or its split vocabulary.

Each function computes the loss that the mesh would have with the fault, from the logits of one process. It
returns a message if the mesh has exactly that loss, up to rounding, or else None.
"""

from __future__ import annotations

import math

import torch

from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify.evidence import Evidence

CLOSE = 2e-6
"""Relative error of a loss that a hypothesis explains."""


def counted_columns(e: Evidence) -> str | None:
    """The exponentials of all logits are counted once per rank of tp."""
    # A sum of exponentials that is ``size`` times too large has a logarithm that is log(size) too large.
    size = e.size("tp")
    loss = e.expected.record.losses[e.first.step] + math.log(size)
    if size == 1 or not e.explains_loss(loss, CLOSE):
        return None
    return f"logits counted {size} times over tp: the loss is log({size}) too large"


def columns_from_zero(e: Evidence) -> str | None:
    """Each rank of tp looks for the target among its columns as if they began with token id 0."""
    size = e.size("tp")
    logits_BTV = e.shares.logits_BTV.detach().float()
    if size == 1 or logits_BTV.size(-1) % size:
        return None
    targets_BT = e.batch.targets_BT
    columns = logits_BTV.size(-1) // size
    # With the fault, every rank finds a target with a small id, and the ranks add what they find. No rank
    # finds a target with a larger id.
    index_BT1 = targets_BT.clamp(0, columns - 1).unsqueeze(-1)
    of_target_BT = torch.zeros(targets_BT.shape)
    for part_BTC in logits_BTV.split(columns, dim=-1):
        of_target_BT += part_BTC.gather(-1, index_BT1).squeeze(-1)
    of_target_BT *= targets_BT < columns
    losses_BT = logits_BTV.logsumexp(-1) - of_target_BT
    loss_sum = losses_BT[targets_BT != IGNORE].sum()
    loss = float(loss_sum) / e.batch.num_targets
    if not e.explains_loss(loss, CLOSE):
        return None
    return "split vocabulary: each rank of tp looks for targets as if its columns began with token id 0"


def counts_of_parts(e: Evidence) -> str | None:
    """Each part of the sequence is divided by its own number of targets instead of the global number."""
    size = e.size("cp")
    if size == 1:
        return None
    losses_BT = e.shares.losses_BT(e.shares.logits_BTV.detach())
    is_target_BT = e.batch.targets_BT != IGNORE
    # The fault may divide in each micro-batch, or once for the step.
    micro_batches = [e.micro_rows_of(index) for index in range(e.num_micro)]
    batches = {"of the step": [list(range(e.sequences))], "of each micro-batch": micro_batches}
    for unit, groups in batches.items():
        total = 0.0
        for rows in groups:
            losses_RT = losses_BT[rows]
            is_target_RT = is_target_BT[rows]
            num_targets = int(is_target_RT.sum())
            # Compute the loss of each part as the fault does, and the mean of these losses.
            mean = 0.0
            for part in range(size):
                positions = e.context_part(part)
                count = int(is_target_RT[:, positions].sum())
                loss_sum = float(losses_RT[:, positions].sum())
                mean += loss_sum / max(1, count) / size
            total += mean * num_targets / e.batch.num_targets
        if e.explains_loss(total, CLOSE):
            return f"each part of the sequence {unit} divided by its own count of target tokens, then averaged over cp"
    return None


def targets_of_other_parts(e: Evidence) -> str | None:
    """The logits of each part of the sequence meet the targets of another cp rank's part."""
    size = e.size("cp")
    for shift in range(1, size):
        targets_BT = e.batch.targets_BT.clone()
        for part in range(size):
            other = e.context_part((part + shift) % size)
            targets_BT[:, e.context_part(part)] = e.batch.targets_BT[:, other]
        logits_BTV = e.shares.logits_BTV.detach()
        loss_sum = e.shares.losses_BT(logits_BTV, targets_BT).sum()
        loss = float(loss_sum) / e.batch.num_targets
        if e.explains_loss(loss, CLOSE):
            return "targets of another part of the sequence: each rank of cp has the targets of another rank"
    return None
