"""Parameters that two pipeline stages share: an embedding in the first and the head that is tied to it in the last.

Each stage has a copy. Copies start equal, their gradients are added after the backward pass of each step, and equal
gradients make equal updates (Shoeybi et al. 2019, Narayanan et al. 2021 train tied embeddings so). The parameter goes
by one name, the first of the whole model's, so that a checkpoint is that of any other mesh; where two ranks hold it,
both hold the same numbers, as replicas do. Stages of one rank, of V-shaped schedules, have two copies there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.distributed.mesh import Mesh
from shardtrain.ops.dtensor import local_tensor

AXIS = "pp"


class TiedStages:
    """The shared parameters of this rank's stages."""

    def __init__(
        self, ties: Sequence[Sequence[str]], stage_names: Sequence[Sequence[str]], ranks: Sequence[int], mesh: Mesh
    ) -> None:
        """``stage_names`` are the modules of each stage, ``ranks`` the place of each stage on the axis pp."""
        self._mesh = mesh
        self._first_name = {name: names[0] for names in ties for name in names}
        self._holders: dict[str, list[int]] = {}
        """For each parameter that stages share, the places on the axis pp that have it, in order."""
        for names in ties:
            holding = {
                index
                for index, modules in enumerate(stage_names)
                if any(name.startswith(f"{module}.") for name in names for module in modules)
            }
            if len(holding) > 1:
                self._holders[names[0]] = sorted({ranks[index] for index in holding})

    def parameters(self, parts: Sequence[nn.Module]) -> dict[str, list[nn.Parameter]]:
        """This rank's parameters by the names that the whole model has, each with its copies."""
        found: dict[str, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                found.setdefault(self._first_name.get(name, name), []).append(parameter)
        return found

    def is_counted_here(self, name: str) -> bool:
        """Whether sums over stages, such as that of the gradient norm, take the parameter from this rank."""
        holders = self._holders.get(name)
        return holders is None or holders[0] == self._mesh.rank(AXIS)

    def copy_weights(self, parts: Sequence[nn.Module]) -> None:
        """Give second copies on this rank the numbers of the first, which alone is initialised, loaded and updated."""
        if not self._holders:
            return
        with torch.no_grad():
            for first, *others in self.parameters(parts).values():
                for other in others:
                    local_tensor(other).copy_(local_tensor(first))

    def sum_gradients(self, parts: Sequence[nn.Module]) -> None:
        """Make the gradient of each shared parameter the sum of those of its copies, the same bits on each rank.

        Ranks that share one exchange it among themselves; to the others it costs nothing.
        """
        parameters = self.parameters(parts)
        for name in sorted(self._holders.keys() & parameters.keys()):
            first, *others = parameters[name]
            if not first.requires_grad:
                continue
            if first.grad is None:
                first.grad = torch.zeros_like(first)
            own = local_tensor(first.grad)
            for other in others:
                if other.grad is not None:
                    own += local_tensor(other.grad)
                    other.grad = None
            self._exchange(own, self._holders[name])

    def _exchange(self, own: Tensor, holders: Sequence[int]) -> None:
        """Add what the other holders have, in the order of their ranks."""
        if len(holders) == 1:
            return
        group = self._mesh.group(AXIS)
        place = self._mesh.rank(AXIS)
        sent = own.to(self._mesh.device).contiguous()
        values = {holder: sent if holder == place else torch.empty_like(sent) for holder in holders}
        messages = []
        for holder in holders:
            if holder != place:
                peer = dist.get_global_rank(group, holder)
                messages.append(dist.P2POp(dist.isend, sent, peer, group))
                messages.append(dist.P2POp(dist.irecv, values[holder], peer, group))
        # all messages are on their way before any is waited for, so that no order of ranks can block
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        # in the order of ranks, so that all copies get the same bits
        total = values[holders[0]].clone()
        for holder in holders[1:]:
            total += values[holder]
        own.copy_(total)
