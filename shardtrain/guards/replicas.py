"""Ranks that hold the same numbers compare them: hardware that computes wrongly in silence is found and named."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import resume
from shardtrain.checkpoint.agree import exchange
from shardtrain.errors import NumericalError
from shardtrain.log import logger
from shardtrain.parallel.clip import NORMS_AGREE
from shardtrain.shards import local_slices, local_tensor

if TYPE_CHECKING:
    from shardtrain.run import Run

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COUNTS = ("step", "samples_consumed", "order_hash")
"""Counters that all ranks must share, whatever they hold."""


class Replicas:
    """Parameters and buffers of which several ranks hold the same part: replicas, norms under tensor parallelism.

    Made and asked by all ranks together; idle with ``training.replica_check_interval = 0``.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._interval = run, run.config.training.replica_check_interval
        self._names: list[list[str]] = []
        self._holders: dict[tuple[str, str], list[int]] = {}
        if not self._interval or run.mesh.device_mesh.size() == 1:
            return
        # once: who holds which part of what; ranks of a pipeline hold different names
        for rank, boxes in enumerate(exchange({name: _box(tensor) for name, tensor in resume.everything(run).items()})):
            self._names.append(list(boxes))
            for name, box in boxes.items():
                self._holders.setdefault((name, box), []).append(rank)
        self._holders = {part: ranks for part, ranks in self._holders.items() if len(ranks) > 1}
        if not self._holders:
            logger.warning("training.replica_check_interval: no two ranks hold the same weights; counters are compared")

    def check(self, step: int, saves: bool) -> None:
        """Compare after every interval, and before a save, so that no checkpoint is written of what differs.

        Raises:
            NumericalError: on all ranks, when two differ; names the first tensor and the odd ranks.
        """
        if not self._names or not (saves or step % self._interval == 0):
            return
        mesh, state = self._run.mesh, self._run.state
        counts = [value - 2**64 if value >= 2**63 else value for value in (getattr(state, name) for name in COUNTS)]
        sums = [_checksum(tensor).to(mesh.device) for tensor in resume.everything(self._run).values()]
        own = torch.zeros(len(COUNTS) + max(map(len, self._names)), dtype=torch.int64, device=mesh.device)
        own[: len(COUNTS)] = torch.tensor(counts)
        own[len(COUNTS) : len(COUNTS) + len(sums)] = torch.stack(sums)
        everyone = [torch.empty_like(own) for _ in self._names]
        dist.all_gather(everyone, own)
        self._compare(step, torch.stack(everyone).cpu())

    def _compare(self, step: int, sums_RN: Tensor) -> None:
        """Rows are ranks, columns the counters and then each rank's own tensors."""
        rows = sums_RN.tolist()
        for column, name in enumerate(COUNTS):
            _refuse_odd(step, f"counter {name}", {rank: row[column] for rank, row in enumerate(rows)})
        places = [{name: place for place, name in enumerate(names, len(COUNTS))} for names in self._names]
        for (name, _), ranks in self._holders.items():
            _refuse_odd(step, name, {rank: rows[rank][places[rank][name]] for rank in ranks})


def refuse_norms(run: Run, norm: Tensor) -> None:
    """Stop before an update whose global gradient norm is not the same on all ranks, as ``clip.agree`` suspects.

    Raises:
        NumericalError: on all ranks the same; names the odd ranks. Not where ``run.compares_norms`` is off.
    """
    if not run.compares_norms:
        return
    step, norms = run.state.step + 1, exchange(float(norm))
    middle = sorted(norms)[len(norms) // 2]
    odd = [rank for rank, value in enumerate(norms) if abs(value - middle) > NORMS_AGREE * middle]
    if not odd:  # of many ranks, rounding in the sums that agree found
        return
    if 2 * len(odd) < len(norms):
        others = f"{middle:.6g} on the other {len(norms) - len(odd)}"
        who = f"{', '.join(f'{norms[rank]:.6g} on rank {rank}' for rank in odd[:8])} and {others}"
    else:
        who = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(norms[:8]))
    raise NumericalError(
        f"step {step}: the gradient norm is {who}, where all ranks must have the same; the weights are still those of "
        f"step {step - 1}. At the first step the model's LAYOUT is to be suspected (shardtrain verify names what "
        "differs), later a device that computes wrongly: go on from the last checkpoint without it"
    )


def _refuse_odd(step: int, name: str, sums: dict[int, int]) -> None:
    if len(set(sums.values())) == 1:
        return
    most, count = Counter(sums.values()).most_common(1)[0]
    if 2 * count > len(sums):
        odd = [rank for rank, value in sums.items() if value != most]
        who = f"rank {', '.join(map(str, odd))} differs from the other {count} that hold it"
    else:
        who = f"ranks {', '.join(map(str, sums))} differ, and no majority says which is right"
    raise NumericalError(
        f"step {step}: {name.removeprefix('model.')}: {who}, where equal bits were due: a device computes wrongly, or "
        "ranks ran other programs; nothing was saved since; go on from the last checkpoint without that device"
    )


def _box(tensor: Tensor) -> str:
    """Where this rank's part lies in the whole tensor; two ranks with the same box hold the same numbers."""
    return ",".join(f"{part.start or 0}:{part.stop}" for part in local_slices(tensor))


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of a local tensor's bits as integers, modulo 2^64: exact, and changed by every flip of a single bit."""
    local = local_tensor(tensor).detach().contiguous().reshape(-1)
    return local.view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)
