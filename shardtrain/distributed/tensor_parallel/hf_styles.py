"""Parallel styles for modules of ``transformers`` that PyTorch's own styles do not split.

Inputs and outputs of the modules are plain tensors. They are equal on all ranks unless a style states
otherwise.
Shape suffixes: N tokens, K experts of a token, P pairs of a token and an expert, D features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from shardtrain.distributed.local_weights import read_local, use_plain_weights

EXPERT_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")
"""``SplitExperts`` supports only experts modules whose forward has these arguments."""


class PlannedReplicatedWeights(ParallelStyle):
    """Replicate the direct parameters of a module. Its forward may have any arguments.

    Args:
        partial: names of the parameters that each rank applies only to its own heads. Their gradients are
            summed over ranks. The gradients of the other parameters are equal on all ranks.
        readers: modules that contain this one and use its parameters without calling it.
    """

    def __init__(self, partial: Collection[str] = (), readers: Collection[nn.Module] = ()) -> None:
        self._partial = partial
        self._readers = readers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        reads = {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = parameter.detach()
            replicated = DTensor.from_local(local, device_mesh, (Replicate(),), run_check=False)
            new_parameter = nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            module.register_parameter(name, new_parameter)
            # the placement of the gradient
            placement = Partial() if name in self._partial else Replicate()
            reads[name] = read_local((placement,))
        for reader in (module, *self._readers):
            use_plain_weights(reader, module, reads)
        return module


class SplitHeadParameters(ParallelStyle):
    """Split parameters that have one number per head, such as attention sinks.

    Args:
        split: names of these direct parameters of the module. Its other direct parameters are replicated.
    """

    def __init__(self, split: Collection[str]) -> None:
        self._split = split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        reads = {}
        for name in dict(module.named_parameters(recurse=False)):
            placement: Placement = Shard(0) if name in self._split else Replicate()
            _distribute(module, name, placement, device_mesh)
            reads[name] = read_local((placement,))
        use_plain_weights(module, module, reads)
        return module


class GatheredWeights(ParallelStyle):
    """Store parameters in parts and gather them in forward. All ranks then compute the same outputs.

    This saves memory but no time. It is for fused weights and for modules with an unknown forward.

    Args:
        dims: the split dimension of each parameter, by name. The module's other direct parameters are
            replicated.
    """

    def __init__(self, dims: Mapping[str, int]) -> None:
        self._dims = dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(weight: DTensor) -> Tensor:
            return weight.redistribute(placements=(Replicate(),)).to_local(
                grad_placements=(Replicate(),)
            )

        names = list(dict(module.named_parameters(recurse=False)))
        for name in names:
            placement = Shard(self._dims[name]) if name in self._dims else Replicate()
            _distribute(module, name, placement, device_mesh)
        use_plain_weights(module, module, dict.fromkeys(names, gather))
        return module


class SplitExperts(ParallelStyle):
    """Split stacked experts so that each rank holds some of them.

    Each rank computes its experts for all tokens, and the outputs are summed over ranks. The plans of
    ``transformers`` split the features of each expert instead. The result is the same. But a rank's part of
    a fused weight would then consist of two separate ranges, and checkpoints and initialization support only
    one.

    The original forward receives one row for each pair of a token and one of this rank's experts, as if each
    token had a single expert. So it needs no support for experts on other ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        reads = {}
        num_experts = 0
        for name, parameter in list(module.named_parameters(recurse=False)):
            num_experts = parameter.size(0)
            _distribute(module, name, Shard(0), device_mesh)
            reads[name] = read_local((Shard(0),))
        use_plain_weights(module, module, reads)

        num_own = num_experts // device_mesh.size()
        first = num_own * device_mesh.get_local_rank()
        if hasattr(module, "num_experts"):
            module.num_experts = num_own  # type: ignore[assignment]
        compute_pairs = module.forward
        pairs = OwnPairs(device_mesh.size())
        # Register it as a submodule, because a dry run searches the modules for it.
        module.add_module("shardtrain_pairs", pairs)

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            # Each rank computes only its experts' part of the gradients of tokens and router weights.
            tokens_ND = sum_gradients(hidden_states.flatten(0, -2), device_mesh)
            weights_NK = sum_gradients(top_k_weights, device_mesh)
            own_index_NK = top_k_index - first
            is_own_NK = (own_index_NK >= 0) & (own_index_NK < num_own)
            token_P, choice_P = pairs(is_own_NK)
            index_P = own_index_NK[token_P, choice_P]
            weight_P = weights_NK[token_P, choice_P]
            if not len(token_P):
                # If no token chose this rank's experts, compute one token with weight 0. The experts need a
                # gradient on every rank, because FSDP reduces it in a collective.
                token_P = index_P = torch.zeros(1, dtype=torch.int64, device=top_k_index.device)
                weight_P = weights_NK[0, :1] * 0
            out_PD = compute_pairs(tokens_ND[token_P], index_P[:, None], weight_P[:, None])
            sum_ND = torch.zeros_like(tokens_ND, dtype=out_PD.dtype).index_add(0, token_P, out_PD)
            return sum_over_ranks(sum_ND, device_mesh).view(hidden_states.shape)

        module.forward = forward  # type: ignore[method-assign]
        return module


class OwnPairs(nn.Module):
    """Find the pairs of tokens and experts whose expert is on this rank.

    Args:
        ranks: number of ranks that the experts are split over.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self.assumes_even_load = False
        """True in a dry run, whose tensors have no values: each rank then has the same number of pairs."""

    def forward(self, is_own_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token and the place among the experts of the token, (P,) each."""
        if self.assumes_even_load:
            first_pairs = torch.arange(is_own_NK.numel() // self._ranks, device=is_own_NK.device)
            top_k = is_own_NK.size(1)
            return first_pairs // top_k, first_pairs % top_k
        token_P, choice_P = is_own_NK.nonzero(as_tuple=True)
        return token_P, choice_P


class SharedRotaryKey(PlannedReplicatedWeights):
    """Replicate the down-projection of latent attention, whose last outputs are the rotary key.

    A split projection reads the other outputs, and sums their gradient over ranks. No such projection reads
    the rotary key: each rank uses it directly, with its own heads. So this style sums its gradient.

    Args:
        rotary_dim: number of features of the rotary key.
    """

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        self._rotary_dim = rotary_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sum_rotary_gradient(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            latent_dim = output.size(-1) - self._rotary_dim
            latent, rotary = output.split([latent_dim, self._rotary_dim], dim=-1)
            rotary = sum_gradients(rotary, device_mesh)
            return torch.cat([latent, rotary], dim=-1)

        super()._apply(module, device_mesh)
        module.register_forward_hook(sum_rotary_gradient)
        return module


class SummedOutput(ParallelStyle):
    """Sum the output of a module over ranks. The module has no direct parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def add(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return sum_over_ranks(output, device_mesh)

        module.register_forward_hook(add)
        return module


class UnreducedRowwise(RowwiseParallel):
    """Split input features, and return each rank's partial sums as a DTensor, without reducing them."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Tensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        return outputs


def sum_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated tensor whose gradient is summed over ranks in backward (a collective)."""
    replicated = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
    return replicated.to_local(grad_placements=(Partial(),))


def sum_over_ranks(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of a tensor over ranks (a collective)."""
    addend = DTensor.from_local(tensor, mesh, (Partial(),), run_check=False)
    return addend.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Replicate(),))


def _distribute(module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
    parameter = module._parameters[name]
    assert parameter is not None
    split = distribute_tensor(parameter.detach(), mesh, (placement,))
    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
