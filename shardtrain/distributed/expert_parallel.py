"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to them (Lepikhin et al. 2021).

The expert axis takes its ranks from dp_shard, cp and tp together, tp first; ``efsdp`` is what remains of them. Experts
are split over ep on dim 0 and by FSDP over efsdp, so that each lies once on all ranks that hold different tokens.
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
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.local_weights import use_local_weights
from shardtrain.distributed.mesh import LOSS_AXES, Mesh
from shardtrain.distributed.rendezvous import gloo_sockets
from shardtrain.layout import Layout, matches
from shardtrain.lora.linear import is_adapter
from shardtrain.ops.accelerator import read
from shardtrain.ops.row_order import inverse_of, permute
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "ep"
_RECOMPUTING = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
TOKEN_AXES = (*LOSS_AXES, "tp")
"""Ranks along these hold different tokens of a layer's experts: under tp, the sequence is split there."""


def mesh_of_experts(mesh: Mesh, config: Config) -> DeviceMesh:
    """The same ranks with the axes pp, dp_replicate, efsdp, ep (those of one rank left out, but efsdp).

    A collective when called first; the same object afterwards.
    """
    degree = config.parallelism.expert_parallel_degree
    if degree not in mesh.expert_meshes:
        sizes = {
            "pp": mesh.size("pp"),
            "dp_replicate": mesh.size("dp_replicate"),
            "efsdp": mesh.size("dp_shard", "cp", "tp") // degree,
            AXIS: degree,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "efsdp"}
        ranks = torch.arange(mesh.device_mesh.size()).view(*kept.values())
        kind = mesh.device.type
        names = tuple(kept)
        mesh.expert_meshes[degree] = gloo_sockets.private(lambda: DeviceMesh(kind, ranks, mesh_dim_names=names))
    return mesh.expert_meshes[degree]


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Split the experts over ep and replace each dispatch by one that exchanges tokens, in place."""
    split_sequence = mesh.size("cp", "tp") > 1
    balanced = context_parallel.is_balanced(config)
    for moe in _blocks(model, layout):
        moe.router.force_balance = config.debug.moe_force_load_balance
        if moe.router.expert_bias is not None:  # steps of 1e-3 would be lost in a bfloat16 model
            moe.router.expert_bias = moe.router.expert_bias.float()
        if split_sequence:
            moe.router.places = partial(_places, mesh, config)
            moe.balance.sum_over_sequence = partial(_sum_over_sequence, mesh)
            moe.balance.own_part = partial(_own_part, mesh, balanced)
        if config.parallelism.expert_parallel_degree > 1:
            _split_experts(moe.experts, mesh_of_experts(mesh, config)[AXIS])
            moe.dispatch = AllToAllDispatch(mesh_of_experts(mesh, config).get_group(AXIS))


def shard(layer: nn.Module, mesh: Mesh, config: Config, options: Mapping[str, Any]) -> None:
    """Give the experts of a layer to FSDP as a unit of their own, over all ranks that hold other tokens.

    Must come before the layer's own unit. ``options`` are the layer's. Where experts would be sharded as all else is,
    that is left to the layer's unit, unless there are more ranks than experts: some would then hold none, others one.
    """
    like_the_rest = config.parallelism.expert_parallel_degree * mesh.size("cp", "tp") == 1
    axes = ("dp_replicate", "efsdp") if mesh.size("dp_replicate") > 1 else ("efsdp",)
    for _, moe in _named_blocks([layer]):
        num_experts = moe.experts.w1.shape[0]
        if like_the_rest and mesh.size("dp_shard") <= num_experts:
            continue
        experts = mesh_of_experts(mesh, config)
        # more ranks than experts: then each expert is split, along another dimension
        dim = 0 if experts["efsdp"].size() * config.parallelism.expert_parallel_degree <= num_experts else 1
        _check_even(moe.experts, dim, experts["efsdp"].size(), config)
        unit = {**options, "mesh": experts[axes if len(axes) > 1 else axes[0]]}
        fully_shard(moe.experts, **unit, shard_placement_fn=partial(_place, dim))
        if config.activation_checkpoint.mode == "selective":
            _hide_from_modes(moe.experts)


def has_experts(parts: Sequence[nn.Module]) -> bool:
    """Whether this rank's parts of a model hold experts."""
    return any(True for _ in _named_blocks(parts))


def before_step(parts: Sequence[nn.Module], weight: Tensor) -> None:
    """Give balance losses the weight of the step's loss, and forget what earlier steps counted."""
    for moe in _all_blocks(parts):
        moe.balance.reset()
        moe.balance.loss_weight = weight


def count(parts: Sequence[nn.Module], whether: bool) -> None:
    """Say whether the batch that comes next counts: one that is there for the collectives alone has no loss, no load.

    It holds until its backward is over, since recomputation runs the same forward again.
    """
    for moe in _all_blocks(parts):
        moe.balance.counts = whether


def load(parts: Sequence[nn.Module], mesh: Mesh) -> dict[str, Tensor]:
    """Tokens of each expert over all ranks since ``before_step``, int64 (E,), by block name (a collective).

    Blocks of other pipeline stages are not among them.
    """
    return {name: mesh.sum(_counts(moe), over=TOKEN_AXES) for name, moe in _named_blocks(parts)}


@torch.no_grad()
def update_biases(parts: Sequence[nn.Module], mesh: Mesh, applies: Tensor | None = None) -> None:
    """Raise the bias of experts that got fewer tokens than the mean, lower that of others (Wang et al. 2024).

    bias += load_balance_coeff * sign(mean - count), once per optimizer step, with the tokens of all ranks and batches;
    the comparison is exact, so no mesh changes it. A collective: one small sum per token axis. Where ``applies`` is
    false nothing changes.
    """
    routers_learn = (moe for moe in _all_blocks(parts) if moe.router.gate.weight.requires_grad)
    blocks = [moe for moe in routers_learn if moe.router.expert_bias is not None]
    if not blocks:
        return
    counts = [_counts(moe) for moe in blocks]
    summed = mesh.sum(torch.cat(counts), over=TOKEN_AXES).split([count.numel() for count in counts])
    for moe, count_E in zip(blocks, summed, strict=True):
        # sign(mean - count) in whole numbers: both sides times the number of experts
        direction_E = (count_E.sum() - count_E * count_E.numel()).sign()
        if applies is not None:
            direction_E = direction_E * applies
        moe.router.expert_bias.add_(direction_E, alpha=moe.routing.load_balance_coeff)


def measure(parts: Sequence[nn.Module], mesh: Mesh) -> dict[str, float]:
    """How even the step's load was, equal on all ranks; empty for a model without experts (a collective).

    ``moe_max_load``: tokens of the busiest expert over the mean, of the worst layer. ``moe_aux_loss``: mean over tokens
    and layers of the balance losses, with their coefficients. No token is ever dropped.
    """
    blocks = list(_all_blocks(parts))
    blocks_and_losses = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # blocks, and the sum of their losses
    worst = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if blocks:
        counts = [_counts(moe) for moe in blocks]
        nothing = torch.zeros((), dtype=torch.float64, device=mesh.device)
        losses = [nothing if (s := moe.balance.loss_sum) is None else s for moe in blocks]
        rows = torch.cat([torch.cat(counts).double(), torch.stack(losses)])
        *summed, losses_L = mesh.sum(rows, over=TOKEN_AXES).split([*(c.numel() for c in counts), len(blocks)])
        totals_L = torch.stack([count_E.sum() for count_E in summed]).clamp_min(1.0)
        busiest_L = torch.stack([count_E.max() * count_E.numel() for count_E in summed]) / totals_L
        top_k_L = torch.tensor([float(moe.routing.top_k) for moe in blocks], device=mesh.device)
        blocks_and_losses = torch.stack([losses_L.new_tensor(len(blocks)), (losses_L * top_k_L / totals_L).sum()])
        worst = busiest_L.max()
    # stages without experts take part too: the sums over stages are collectives
    num_blocks, loss = mesh.sum(blocks_and_losses, over=("pp",)).tolist()
    if num_blocks == 0:
        return {}
    return {"moe_max_load": mesh.max(worst, over=("pp",)).item(), "moe_aux_loss": loss / num_blocks}


class AllToAllDispatch(nn.Module):
    """Send rows to the ranks that hold their experts, and bring the outputs back; splits are as uneven as the load."""

    is_local = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, experts: nn.Module, x_RD: Tensor, count_E: Tensor) -> Tensor:
        """Outputs (R, D) of rows (R, D) that are sorted by expert, ``count_E`` of each of all ranks' experts."""
        ranks = self._group.size()
        # first how many rows will come, then the rows themselves
        received_E = torch.empty_like(count_E)  # (rank, expert here): what each rank sends to each expert of this one
        dist.all_to_all_single(received_E, count_E.contiguous(), group=self._group)
        count_re = count_E.view(ranks, -1)
        received_re = received_E.view(ranks, -1)
        # sizes of messages are numbers of the host, which waits for them: once for each layer and micro-batch
        sent, received = read(torch.stack((count_re.sum(1), received_re.sum(1))), "rows of experts to exchange")
        rows_PD = _Exchange.apply(x_RD, received, sent, self._group)
        # rows arrive by rank and within it by expert; the product of experts needs them by expert alone
        local_E = torch.arange(received_re.size(1), device=x_RD.device).repeat(ranks)
        expert_P = local_E.repeat_interleave(received_E, output_size=sum(received))
        order_P = expert_P.argsort(stable=True)
        inverse_P = inverse_of(order_P)
        out_PD = experts(permute(rows_PD, order_P, inverse_P), received_re.sum(0))
        return _Exchange.apply(permute(out_PD, inverse_P, order_P), sent, received, self._group)


class _Exchange(torch.autograd.Function):
    """Uneven all-to-all of rows; the backward pass sends gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received = received
        ctx.sent = sent
        ctx.group = group
        return _exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None


def _places(mesh: Mesh, config: Config, length: int) -> Tensor:
    """Places in the whole sequence of the ``length`` tokens of it that this rank holds: cut over cp, then over tp."""
    cp = mesh.size("cp")
    tp = mesh.size("tp")
    whole_1T = torch.arange(length * cp * tp).unsqueeze(0)
    if cp > 1:
        whole_1T = sequence_part(whole_1T, mesh.rank("cp"), cp, context_parallel.is_balanced(config))
    return whole_1T[0].chunk(tp)[mesh.rank("tp")]


def _sum_over_sequence(mesh: Mesh, count_BE: Tensor) -> Tensor:
    return mesh.sum(count_BE.clone(), over=("cp", "tp"))  # sums are taken in place


def _own_part(mesh: Mesh, balanced: bool, column_BT: Tensor) -> Tensor:
    part_BT = column_BT
    if mesh.size("cp") > 1:
        part_BT = sequence_part(part_BT, mesh.rank("cp"), mesh.size("cp"), balanced)
    return part_BT.chunk(mesh.size("tp"), dim=1)[mesh.rank("tp")]


def _exchange(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    # contiguous: a tensor with gaps is sent as if it had none, without an error (torch 2.13)
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts: parameters become DTensors split on dim 0, and ``forward`` sees the local ones."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = parameter.new_empty(parameter.shape[0] // mesh.size(), *parameter.shape[1:])
        split = DTensor.from_local(local, mesh, (Shard(0),), run_check=False)
        experts.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    use_local_weights(experts)


def _place(dim: int, _: nn.Parameter) -> Shard:
    return Shard(dim)


def _hide_from_modes(module: nn.Module) -> None:
    """Run the hooks of FSDP on a module outside of the dispatch modes of selective recomputation.

    It counts operations and stops where a second forward has more than the first. Those of FSDP are not part of what is
    recomputed, and differ: what was gathered ahead at first is gathered again later. Other modes stay: without that of
    fake tensors, FSDP would allocate its buffers in earnest.
    """

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            modes = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, _RECOMPUTING)]
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
    sizes = sorted({parameter.shape[dim] for parameter in experts.parameters()})
    if dim and any(size % ranks for size in sizes):
        degree = config.parallelism.expert_parallel_degree
        rule = f"leaves more ranks ({ranks}) than experts of a rank, and they do not divide the experts' sizes {sizes}"
        fix = "use a larger degree"
        if any(is_adapter(name) and p.shape[dim] % ranks for name, p in experts.named_parameters()):
            fix = f"use a larger degree, and a lora.rank that {ranks} divides"
        raise ConfigError(Problem("parallelism.expert_parallel_degree", degree, rule, fix))


def _counts(moe: Any) -> Tensor:
    count_E = moe.balance.count_E
    if count_E is None:
        return torch.zeros(moe.routing.num_experts, dtype=torch.int64, device=moe.router.gate.weight.device)
    return count_E.clone()  # sums are taken in place


def _is_moe(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("router", "balance", "dispatch", "experts"))


def _blocks(model: nn.Module, layout: Layout) -> Iterator[Any]:
    for path, module in list(model.named_modules()):
        if layout.expert and matches(path, layout.expert) and _is_moe(module):
            yield module


def _named_blocks(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    return ((name, module) for part in parts for name, module in part.named_modules() if _is_moe(module))


def _all_blocks(parts: Sequence[nn.Module]) -> Iterator[Any]:
    return (module for _, module in _named_blocks(parts))
