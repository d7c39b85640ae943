"""Parameters that pipeline stages share, such as an embedding in the first stage and a tied head in the last.

Each of these stages has a copy, and all copies start equal. After the backward pass of a step, their
gradients are added up. All copies then get the same update (Shoeybi et al. 2019, Narayanan et al. 2021).
Checkpoints store only the first of the parameter's names in the full model, so they do not depend on the
mesh. With a V-shaped schedule, one rank can hold two copies. Copies on different ranks are replicas.
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
        self,
        ties: Sequence[Sequence[str]],
        stage_names: Sequence[Sequence[str]],
        ranks: Sequence[int],
        mesh: Mesh,
    ) -> None:
        """Find the parameters that several stages hold.

        Args:
            ties: for each tied parameter, its names in the full model.
            stage_names: the module names of each stage.
            ranks: for each stage, its rank on the axis pp.
            mesh: the mesh.
        """
        self._mesh = mesh
        self._first_name: dict[str, str] = {}
        self._holders: dict[str, list[int]] = {}
        """Maps the first name of each shared parameter to the pipeline ranks that hold it, in order."""
        prefixes_by_stage = []
        for modules in stage_names:
            prefixes_by_stage.append(tuple(f"{module}." for module in modules))
        for names in ties:
            self._first_name |= dict.fromkeys(names, names[0])
            holding_ranks = []
            for prefixes, rank in zip(prefixes_by_stage, ranks, strict=True):
                if any(name.startswith(prefixes) for name in names):
                    holding_ranks.append(rank)
            # Two stages of one rank share the parameter too, so they count as holders here.
            if len(holding_ranks) > 1:
                self._holders[names[0]] = sorted(set(holding_ranks))

    def parameters(self, parts: Sequence[nn.Module]) -> dict[str, list[nn.Parameter]]:
        """Map each parameter of this rank to all its copies on this rank.

        If a parameter has several names in the full model, the key is the first one.
        """
        copies: dict[str, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                first_name = self._first_name.get(name, name)
                copies.setdefault(first_name, []).append(parameter)
        return copies

    def is_counted_here(self, name: str) -> bool:
        """True if this rank counts the parameter in sums over stages, such as the gradient norm.

        For a shared parameter, this is only the first rank that holds it.
        """
        holders = self._holders.get(name)
        if holders is None:
            return True
        return holders[0] == self._mesh.rank(AXIS)

    def copy_weights(self, parts: Sequence[nn.Module]) -> None:
        """Overwrite all other copies on this rank with the first copy.

        This is needed because only the first copy is initialized, loaded and updated.
        """
        if not self._holders:
            return
        with torch.no_grad():
            for first, *others in self.parameters(parts).values():
                for other in others:
                    local_tensor(other).copy_(local_tensor(first))

    def sum_gradients(self, parts: Sequence[nn.Module]) -> None:
        """For each shared parameter, sum the gradients of all copies into the first copy on each rank.

        Only the ranks that hold a copy communicate. They get bitwise equal sums.
        """
        parameters = self.parameters(parts)
        for name in sorted(self._holders.keys() & parameters.keys()):
            # First add up the gradients of this rank's copies, then those of other ranks.
            first, *others = parameters[name]
            if not first.requires_grad:
                continue
            if first.grad is None:
                first.grad = torch.zeros_like(first)
            gradient = local_tensor(first.grad)
            for other in others:
                if other.grad is not None:
                    gradient += local_tensor(other.grad)
                    other.grad = None
            self._sum_over_holders(gradient, self._holders[name])

    def _sum_over_holders(self, gradient: Tensor, holders: Sequence[int]) -> None:
        """Replace a gradient with its sum over the pipeline ranks ``holders``."""
        if len(holders) == 1:
            return
        group = self._mesh.group(AXIS)
        own_rank = self._mesh.rank(AXIS)
        sent = gradient.to(self._mesh.device).contiguous()
        values = {own_rank: sent}
        messages = []
        for holder in holders:
            if holder != own_rank:
                values[holder] = torch.empty_like(sent)
                peer = dist.get_global_rank(group, holder)
                messages.append(dist.P2POp(dist.isend, sent, peer, group))
                messages.append(dist.P2POp(dist.irecv, values[holder], peer, group))
        # Start all messages before waiting for the first one. Otherwise ranks could block each other.
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        # All copies must get the same bits, so sum in the order of ranks.
        total = values[holders[0]].clone()
        for holder in holders[1:]:
            total += values[holder]
        gradient.copy_(total)
