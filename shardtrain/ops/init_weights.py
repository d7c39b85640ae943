"""Initial weights that do not depend on the mesh.

The rows of a parameter are divided into fixed blocks. Block i of parameter ``name`` is drawn by a
generator seeded from (seed, name, i). A rank draws the blocks that overlap its shard, and keeps its
part. Every mesh of one device type therefore starts from bitwise equal weights, without a broadcast
or a seed checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shardtrain import layout as layouts
from shardtrain.layout import Draw, Layout
from shardtrain.ops.accelerator import is_accelerator
from shardtrain.ops.dtensor import local_slices, local_tensor

BLOCK_NUMEL = 1 << 16
"""Elements per block. It is small, so a rank discards few of its random numbers. It must never change,
because it determines the weights."""
GROUP_NUMEL = 1 << 22
"""Elements that an accelerator transforms with one kernel.

A CPU transforms each block while it is in the cache.
"""


def plan(
    names: Iterable[str], rules: Mapping[str, Draw], layout: Layout, num_layers: int
) -> dict[str, Draw]:
    """Return the initial distribution of each parameter of the unsharded model. The first matching rule wins.

    The factor of the depth is included in ``std``.

    Raises:
        KeyError: a parameter has no rule. ``models.build`` reports this earlier.
    """
    draws = {}
    for name in names:
        rule = next(
            (draw for pattern, draw in rules.items() if layouts.matches(name, pattern)), None
        )
        if rule is None:
            raise KeyError(name)
        # Each layer adds two branches to the residual stream, hence the factor 2. With this scale
        # the variance of the sum grows slowly with depth.
        layer = re.match(rf"{re.escape(layout.layers)}\.(\d+)\.", name)
        if rule.depth == "layer" and layer:
            rule = replace(rule, std=rule.std / math.sqrt(2 * (int(layer[1]) + 1)), depth="none")
        elif rule.depth == "total":
            rule = replace(rule, std=rule.std / math.sqrt(2 * num_layers), depth="none")
        draws[name] = rule
    return draws


@torch.no_grad()
def draw_(parameter: Tensor, name: str, draw: Draw, seed: int) -> None:
    """Initialize this rank's part of a parameter in place.

    The values are equal on every mesh of one device type.
    """
    local = local_tensor(parameter)
    slices = local_slices(parameter)
    if draw.distribution in ("ones", "zeros"):
        local.fill_(1.0 if draw.distribution == "ones" else 0.0)
        return
    if draw.distribution == "computed":
        assert draw.compute is not None
        local.copy_(draw.compute(_seed_of(seed, name, 0))[slices])
        return
    if parameter.ndim == 0:
        value = torch.empty(1, dtype=torch.float32, device=local.device)
        _fill_block(value, draw, _generator(seed, name, 0, local.device))
        _shape_(value, draw)
        local.copy_(value[0])
        return

    # Find the blocks that overlap this rank's part. The number of rows per block does not depend on
    # the mesh.
    rows, *rest = parameter.shape
    numel_per_row = max(1, math.prod(rest))
    rows_per_block = max(1, BLOCK_NUMEL // numel_per_row)
    first = slices[0].start
    stop = slices[0].stop
    blocks = range(first // rows_per_block, -(-stop // rows_per_block))
    group_numel = GROUP_NUMEL if is_accelerator(local.device) else BLOCK_NUMEL
    blocks_per_group = max(1, group_numel // (rows_per_block * numel_per_row))

    for index in range(0, len(blocks), blocks_per_group):
        # Draw complete blocks, each with its own generator, because a generator cannot skip to the
        # middle of a block.
        group = blocks[index : index + blocks_per_group]
        start = group.start * rows_per_block
        size = min(len(group) * rows_per_block, rows - start)
        values = torch.empty((size, *rest), dtype=torch.float32, device=local.device)
        for block, part in zip(group, values.split(rows_per_block), strict=True):
            _fill_block(part, draw, _generator(seed, name, block, local.device))
        _shape_(values, draw)

        # Copy this rank's rows, and its part of the other dimensions.
        low = max(first, start)
        high = min(stop, start + size)
        rank_slices = (slice(low - start, high - start), *slices[1:])
        local[low - first : high - first].copy_(values[rank_slices])


def _fill_block(block: Tensor, draw: Draw, generator: torch.Generator) -> None:
    # Blocks are float32 for every dtype of the parameter, so a bfloat16 run starts from the same
    # weights, rounded.
    if math.isnan(draw.std):
        # The initial distribution is unknown. If no weights are loaded either, the first loss is NaN.
        block.fill_(math.nan)
    elif draw.distribution == "normal":
        block.normal_(0.0, draw.std, generator=generator)
    elif draw.distribution == "uniform":
        block.uniform_(-draw.std * math.sqrt(3), draw.std * math.sqrt(3), generator=generator)
    elif draw.distribution == "log_uniform":
        block.uniform_(draw.low, draw.high, generator=generator).log_()
    else:
        # ``_shape_`` transforms the uniform values of many blocks into a truncated normal distribution.
        edge = math.erf(draw.cutoff / math.sqrt(2))
        block.uniform_(-edge, edge, generator=generator)


def _shape_(values: Tensor, draw: Draw) -> None:
    """Transform uniform values into a normal truncated at ``cutoff`` standard deviations, by
    inverse transform sampling.

    Values of other distributions are unchanged.
    """
    if draw.distribution in ("normal", "uniform", "log_uniform") or math.isnan(draw.std):
        return
    values.erfinv_().mul_(draw.std * math.sqrt(2))
    # erfinv may round values at the edge up, even to infinity
    values.clamp_(-draw.cutoff * draw.std, draw.cutoff * draw.std)


def _generator(seed: int, name: str, block: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(_seed_of(seed, name, block))


def _seed_of(seed: int, name: str, block: int) -> int:
    # Every generator accepts a seed of 56 bits. Each block has its own stream, because all three values are hashed.
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
