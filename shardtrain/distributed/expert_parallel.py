"""Expert parallelism: each rank holds some experts of every layer (Lepikhin et al. 2021).

An all-to-all sends tokens to the ranks of their experts.

The expert axis ``ep`` groups neighbouring ranks of the axes tp, cp and dp_shard: first those of tp, then cp,
then dp_shard. The number of these groups is the size of the axis ``efsdp``. Experts are split over ep on dim
0, and over efsdp by FSDP. So each expert weight is stored once among all ranks that hold different tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shardtrain.config.schema import Config
from shardtrain.distributed import hf_experts
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.local_weights import use_local_weights
from shardtrain.distributed.mesh import LOSS_AXES, Mesh
from shardtrain.distributed.rendezvous import gloo_sockets
from shardtrain.layout import Layout, matches
from shardtrain.lora.linear import is_adapter
from shardtrain.ops.accelerator import read, sum_dtype
from shardtrain.ops.row_order import inverse_of, permute
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "ep"
_RECOMPUTING = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
_IS_SPLIT = "is_split_over_ep"
"""Attribute of experts that are split over ep."""
TOKEN_AXES = (*LOSS_AXES, "tp")
"""Axes along which ranks send different tokens to a layer's experts.

This includes tp, because tensor parallelism splits sequences between layers.
"""


def mesh_of_experts(mesh: Mesh, config: Config) -> DeviceMesh:
    """Return all ranks as a mesh with the axes pp, dp_replicate, efsdp and ep.

    Axes of size 1 are omitted, except efsdp. The first call is a collective, and later calls return the
    same object.
    """
    degree = config.parallelism.expert_parallel_degree
    if degree in mesh.expert_meshes:
        return mesh.expert_meshes[degree]
    sizes = {
        "pp": mesh.size("pp"),
        "dp_replicate": mesh.size("dp_replicate"),
        "efsdp": mesh.size("dp_shard", "cp", "tp") // degree,
        AXIS: degree,
    }
    kept_sizes = {name: size for name, size in sizes.items() if size > 1 or name == "efsdp"}
    names = tuple(kept_sizes)
    # The ranks are numbered as in the main mesh, so a group of ep contains neighbouring ranks.
    ranks = torch.arange(mesh.device_mesh.size()).view(*kept_sizes.values())
    device_type = mesh.device.type
    expert_mesh = gloo_sockets.private(lambda: DeviceMesh(device_type, ranks, mesh_dim_names=names))
    mesh.expert_meshes[degree] = expert_mesh
    return expert_mesh


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Split the experts over ep and replace each dispatch with one that exchanges tokens, in place."""
    splits_sequence = mesh.size("cp", "tp") > 1
    is_balanced = context_parallel.is_balanced(config)
    for moe in _layout_blocks(model, layout):
        moe.router.force_balance = config.debug.moe_force_load_balance
        if moe.router.expert_bias is not None:
            # bfloat16 would lose updates of 1e-3
            moe.router.expert_bias = moe.router.expert_bias.float()
        if splits_sequence:
            moe.router.places = partial(_token_positions, mesh, config)
            moe.balance.sum_over_sequence = partial(_sum_over_sequence, mesh)
            moe.balance.own_part = partial(_own_part, mesh, is_balanced)
        if config.parallelism.expert_parallel_degree > 1:
            expert_mesh = mesh_of_experts(mesh, config)
            _split_experts(moe.experts, expert_mesh[AXIS])
            moe.dispatch = AllToAllDispatch(expert_mesh.get_group(AXIS))


def apply_to_hf(model: Any, mesh: Mesh, config: Config) -> None:
    """Split the stacked experts of a ``transformers`` network over ep, in place.

    Raises:
        ConfigError: the experts cannot be split.
    """
    expert_mesh = mesh_of_experts(mesh, config)
    tensor_group = mesh.group("tp") if mesh.size("tp") > 1 else None
    for experts in model.experts.values():
        dispatch = AllToAllDispatch(expert_mesh.get_group(AXIS))
        hf_experts.use_dispatch(experts, model.compute_experts, dispatch, tensor_group)
        _split_experts(experts, expert_mesh[AXIS])


def splits_hf_experts(model: nn.Module, config: Config) -> bool:
    """True if the model is a ``transformers`` network whose experts are split over ep."""
    return config.parallelism.expert_parallel_degree > 1 and hasattr(model, "hf")


def are_sharded_separately(parts: Sequence[nn.Module], config: Config) -> bool:
    """True if this rank's modules contain experts that are not sharded like other weights."""
    if has_experts(parts):
        return True
    return any(splits_hf_experts(part, config) and part.experts for part in parts)


def shard(layer: nn.Module, mesh: Mesh, config: Config, options: Mapping[str, Any]) -> None:
    """Make the experts of a layer a separate FSDP unit in two cases.

    - The experts are sharded over other ranks than the layer's other weights.
    - There are more ranks than experts. In the layer's unit, FSDP would split the experts along the first
      dimension, and leave some ranks without an expert.

    Must run before the layer itself becomes a unit.

    Args:
        options: the arguments of ``fully_shard`` for the layer.
    """
    has_same_mesh = config.parallelism.expert_parallel_degree * mesh.size("cp", "tp") == 1
    stacks = [moe.experts for _, moe in _named_blocks([layer])]
    if config.parallelism.expert_parallel_degree > 1:
        stacks = [module for module in layer.modules() if hasattr(module, _IS_SPLIT)]
    for experts in stacks:
        num_experts = next(experts.parameters()).shape[0]
        if has_same_mesh and mesh.size("dp_shard") <= num_experts:
            continue
        expert_mesh = mesh_of_experts(mesh, config)
        num_shards = expert_mesh["efsdp"].size()
        # With more ranks than experts, split each expert along another dimension.
        dim = 0 if num_shards * config.parallelism.expert_parallel_degree <= num_experts else 1
        _check_even(experts, dim, num_shards, config)
        unit_mesh = expert_mesh["efsdp"]
        if mesh.size("dp_replicate") > 1:
            unit_mesh = expert_mesh["dp_replicate", "efsdp"]
        unit_options = {**options, "mesh": unit_mesh}
        fully_shard(experts, **unit_options, shard_placement_fn=partial(_placement, dim))
        if config.activation_checkpoint.mode == "selective":
            _hide_from_modes(experts)


def has_experts(parts: Sequence[nn.Module]) -> bool:
    """True if this rank's modules contain experts."""
    return any(True for _ in _named_blocks(parts))


def before_step(parts: Sequence[nn.Module], weight: Tensor) -> None:
    """Reset the load counts, and scale balance losses with ``weight``, as the step's loss."""
    for moe in _all_blocks(parts):
        moe.balance.reset()
        moe.balance.loss_weight = weight


def count(parts: Sequence[nn.Module], is_counted: bool) -> None:
    """Include the next batch in balance losses and load counts, or exclude it.

    A rank without data runs an empty batch to take part in collectives. This batch must not count. Do not
    change the setting before the backward pass has ended, because recomputation runs the same forward again.
    """
    for moe in _all_blocks(parts):
        moe.balance.counts = is_counted


def load(parts: Sequence[nn.Module], mesh: Mesh) -> dict[str, Tensor]:
    """Return the tokens per expert since ``before_step``, summed over ranks (a collective).

    Maps the name of each block in this rank's pipeline stages to an int64 tensor (E,).
    """
    loads = {}
    for name, moe in _named_blocks(parts):
        loads[name] = mesh.sum(_counts(moe), over=TOKEN_AXES)
    return loads


@torch.no_grad()
def update_biases(parts: Sequence[nn.Module], mesh: Mesh, applies: Tensor | None = None) -> None:
    """Raise the router bias of experts with few tokens, and lower it for experts with many tokens.

    After each optimizer step: bias += load_balance_coeff * sign(mean - count) (Wang et al. 2024). The count
    includes the tokens of all ranks and micro-batches. It is compared with the mean in integers, so the
    result does not depend on the mesh. This is a collective: one small sum per token axis.

    Args:
        applies: a boolean scalar on the device. If it is False, biases do not change. (A tensor avoids
            waiting for the device.)
    """
    blocks = []
    for moe in _all_blocks(parts):
        is_trained = moe.router.gate.weight.requires_grad
        if is_trained and moe.router.expert_bias is not None:
            blocks.append(moe)
    if not blocks:
        return
    # sum the counts of all layers in one reduction
    counts = [_counts(moe) for moe in blocks]
    sums = mesh.sum(torch.cat(counts), over=TOKEN_AXES).split([count.numel() for count in counts])
    for moe, count_E in zip(blocks, sums, strict=True):
        # sign(mean - count), computed exactly in integers: both are multiplied by the number of experts
        direction_E = (count_E.sum() - count_E * count_E.numel()).sign()
        if applies is not None:
            direction_E = direction_E * applies
        moe.router.expert_bias.add_(direction_E, alpha=moe.routing.load_balance_coeff)


def measure(parts: Sequence[nn.Module], mesh: Mesh) -> dict[str, float]:
    """Return how unbalanced the experts were in this step (a collective). Empty without experts.

    All ranks return the same values. ``moe_max_load`` is the load of the busiest expert divided by the mean
    load, in the least balanced layer. ``moe_aux_loss`` is the mean of the balance losses, multiplied by their
    coefficients, over tokens and layers. Dropped tokens are not reported, because no token is ever dropped.
    """
    blocks = list(_all_blocks(parts))
    wide = sum_dtype(mesh.device)
    num_blocks_and_losses = torch.zeros(2, dtype=wide, device=mesh.device)
    worst = torch.zeros((), dtype=wide, device=mesh.device)
    if blocks:
        counts = [_counts(moe) for moe in blocks]
        losses = []
        for moe in blocks:
            loss = moe.balance.loss_sum
            losses.append(torch.zeros_like(worst) if loss is None else loss)
        # Sum counts and losses in one reduction.
        summands = torch.cat([torch.cat(counts).to(wide), torch.stack(losses)])
        lengths = [count.numel() for count in counts]
        *summed_counts, losses_L = mesh.sum(summands, over=TOKEN_AXES).split(
            [*lengths, len(blocks)]
        )
        totals_L = torch.stack([count_E.sum() for count_E in summed_counts]).clamp_min(1.0)
        # The load of the busiest expert relative to the mean load: max / (total / experts).
        most_L = torch.stack([count_E.max() * count_E.numel() for count_E in summed_counts])
        worst = (most_L / totals_L).max()
        # Each token is counted by top_k experts, so the number of tokens is total / top_k.
        top_ks = [float(moe.routing.top_k) for moe in blocks]
        top_k_L = torch.tensor(top_ks, device=mesh.device)
        mean_losses = (losses_L * top_k_L / totals_L).sum()
        num_blocks_and_losses = torch.stack([losses_L.new_tensor(len(blocks)), mean_losses])
    # Stages without experts take part too, because reductions over stages are collectives.
    num_blocks, loss = mesh.sum(num_blocks_and_losses, over=("pp",)).tolist()
    if num_blocks == 0:
        return {}
    return {"moe_max_load": mesh.max(worst, over=("pp",)).item(), "moe_aux_loss": loss / num_blocks}


class AllToAllDispatch(nn.Module):
    """Send rows to the ranks that hold their experts, and return the experts' outputs.

    Each rank may send a different number of rows to each other rank.

    Shape suffixes: R rows of this rank, P rows received, D features, E experts of all ranks, r ranks, e
    experts of a rank.
    """

    is_local = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, experts: Callable[..., Tensor], x_RD: Tensor, count_E: Tensor) -> Tensor:
        """Return the experts' outputs (R, D) for rows (R, D) that are sorted by expert (a collective).

        ``count_E`` is the number of rows for each expert.
        """
        ranks = self._group.size()
        # Before the rows, exchange how many rows each rank sends to each expert. received_re is then the
        # number of rows that this rank receives from rank r for its local expert e.
        received_E = torch.empty_like(count_E)
        dist.all_to_all_single(received_E, count_E.contiguous(), group=self._group)
        count_re = count_E.view(ranks, -1)
        received_re = received_E.view(ranks, -1)
        # The collective needs message sizes on the host. So the host waits for the device here, in every
        # layer and micro-batch.
        sent, received = read(
            torch.stack((count_re.sum(1), received_re.sum(1))), "rows of experts to exchange"
        )
        rows_PD = _Exchange.apply(x_RD, received, sent, self._group)
        # Received rows are sorted by sender, then by expert. The grouped matmul needs them sorted by expert.
        local_E = torch.arange(received_re.size(1), device=x_RD.device).repeat(ranks)
        expert_P = local_E.repeat_interleave(received_E, output_size=sum(received))
        order_P = expert_P.argsort(stable=True)
        inverse_P = inverse_of(order_P)
        out_PD = experts(permute(rows_PD, order_P, inverse_P), received_re.sum(0))
        return _Exchange.apply(permute(out_PD, inverse_P, order_P), sent, received, self._group)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with uneven splits.

    The backward pass sends the gradients in the opposite direction.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.received = received
        ctx.sent = sent
        ctx.group = group
        return _exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None


def _exchange(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    # contiguous() is needed: all_to_all_single treats the memory of every tensor as contiguous. Otherwise it
    # silently sends wrong numbers (torch 2.13).
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _token_positions(mesh: Mesh, config: Config, length: int) -> Tensor:
    """Return the positions in the full sequence of this rank's ``length`` tokens.

    Sequences are split over cp first, and each part is then split over tp.
    """
    cp = mesh.size("cp")
    tp = mesh.size("tp")
    positions_1T = torch.arange(length * cp * tp).unsqueeze(0)
    if cp > 1:
        is_balanced = context_parallel.is_balanced(config)
        positions_1T = sequence_part(positions_1T, mesh.rank("cp"), cp, is_balanced)
    tensor_parts = positions_1T[0].chunk(tp)
    return tensor_parts[mesh.rank("tp")]


def _sum_over_sequence(mesh: Mesh, count_BE: Tensor) -> Tensor:
    # mesh.sum may return its argument, hence the copy
    return mesh.sum(count_BE.clone(), over=("cp", "tp"))


def _own_part(mesh: Mesh, is_balanced: bool, column_BT: Tensor) -> Tensor:
    """Return this rank's part of a tensor that covers full sequences, (B, T)."""
    part_BT = column_BT
    if mesh.size("cp") > 1:
        part_BT = sequence_part(part_BT, mesh.rank("cp"), mesh.size("cp"), is_balanced)
    return part_BT.chunk(mesh.size("tp"), dim=1)[mesh.rank("tp")]


def _split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts. The parameters become DTensors that are split on dim 0.

    ``forward`` still works with plain tensors: this rank's experts.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        num_experts, *other_sizes = parameter.shape
        local = parameter.new_empty(num_experts // mesh.size(), *other_sizes)
        split = DTensor.from_local(local, mesh, (Shard(0),), run_check=False)
        experts.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    use_local_weights(experts)
    setattr(experts, _IS_SPLIT, True)


def _placement(dim: int, _: nn.Parameter) -> Shard:
    return Shard(dim)


def _hide_from_modes(module: nn.Module) -> None:
    """Run the FSDP hooks of a module outside the dispatch modes of selective recomputation.

    Such a mode records the operations of the first forward, and fails if the recomputed forward has more.
    FSDP's operations may differ: weights that were prefetched in the first forward are gathered inside the
    second one. Other dispatch modes stay active. For example, without the fake tensor mode FSDP would
    allocate real memory.
    """

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            modes = [
                mode
                for mode in _get_current_dispatch_mode_stack()
                if not isinstance(mode, _RECOMPUTING)
            ]
            # leave all modes, then enter those again that do not belong to recomputation
            with contextlib.ExitStack() as stack:
                stack.enter_context(_disable_current_modes())
                for mode in modes:
                    stack.enter_context(mode)
                return hook(*arguments, **keywords)

        return run

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            hooks[key] = hidden(hook)


def _check_even(experts: nn.Module, dim: int, ranks: int, config: Config) -> None:
    """Raise ConfigError if experts are split along ``dim`` > 0, whose size is no multiple of ``ranks``."""
    sizes = sorted({parameter.shape[dim] for parameter in experts.parameters()})
    if dim == 0 or all(size % ranks == 0 for size in sizes):
        return
    degree = config.parallelism.expert_parallel_degree
    rule = (
        f"leaves {ranks} ranks to shard the experts of each expert-parallel rank. There are fewer "
        f"experts than that, and their sizes {sizes} are not all multiples of {ranks}"
    )
    fix = "use a larger degree"
    for name, parameter in experts.named_parameters():
        if is_adapter(name) and parameter.shape[dim] % ranks:
            fix = f"use a larger degree, and a lora.rank that is a multiple of {ranks}"
    raise ConfigError(Problem("parallelism.expert_parallel_degree", degree, rule, fix))


def _counts(moe: Any) -> Tensor:
    """Return this rank's number of tokens for each expert of a block, int64 (E,)."""
    count_E = moe.balance.count_E
    if count_E is None:
        return torch.zeros(
            moe.routing.num_experts, dtype=torch.int64, device=moe.router.gate.weight.device
        )
    return count_E.clone()  # mesh.sum may return its argument, hence the copy


def _is_moe(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("router", "balance", "dispatch", "experts"))


def _layout_blocks(model: nn.Module, layout: Layout) -> Iterator[Any]:
    for path, module in list(model.named_modules()):
        if layout.expert and matches(path, layout.expert) and _is_moe(module):
            yield module


def _named_blocks(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for part in parts:
        for name, module in part.named_modules():
            if _is_moe(module):
                yield name, module


def _all_blocks(parts: Sequence[nn.Module]) -> Iterator[Any]:
    return (module for _, module in _named_blocks(parts))
