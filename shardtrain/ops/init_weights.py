"""Initial weights that do not depend on the mesh.

The rows of a parameter fall into fixed blocks; block i of parameter ``name`` is drawn by a generator seeded from
(seed, name, i). A rank draws the blocks that its shard touches and keeps its part, so that every mesh of one device
type starts from bitwise equal weights, with no broadcast and no seed checkpoint.
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
"""Numbers per block: few, so that a shard draws little that it throws away; fixed for ever: it defines weights."""
TOGETHER_NUMEL = 1 << 22
"""Numbers of neighbouring blocks that an accelerator transforms together, so that it starts one kernel for a block. A
CPU takes them one by one, as long as they are in its cache."""


def plan(names: Iterable[str], rules: Mapping[str, Draw], layout: Layout, num_layers: int) -> dict[str, Draw]:
    """The draw of each parameter of the whole model, first matching rule wins, with the depth already in ``std``.

    Raises KeyError for a parameter without a rule (``models.build`` has checked that there is none).
    """
    draws = {}
    for name in names:
        rule = next((draw for pattern, draw in rules.items() if layouts.matches(name, pattern)), None)
        if rule is None:
            raise KeyError(name)
        # Each layer adds two branches to the residual stream, hence the 2: scaled so, the sum grows little with depth
        layer = re.match(rf"{re.escape(layout.layers)}\.(\d+)\.", name)
        if rule.depth == "layer" and layer:
            rule = replace(rule, std=rule.std / math.sqrt(2 * (int(layer[1]) + 1)), depth="none")
        elif rule.depth == "total":
            rule = replace(rule, std=rule.std / math.sqrt(2 * num_layers), depth="none")
        draws[name] = rule
    return draws


@torch.no_grad()
def draw_(parameter: Tensor, name: str, draw: Draw, seed: int) -> None:
    """Fill this rank's part of a parameter in place; equal on every mesh of one device type."""
    local = local_tensor(parameter)
    slices = local_slices(parameter)
    if draw.distribution in ("ones", "zeros"):
        local.fill_(1.0 if draw.distribution == "ones" else 0.0)
        return
    if parameter.ndim == 0:
        value = torch.empty(1, dtype=torch.float32, device=local.device)
        _fill_block(value, draw, _generator(seed, name, 0, local.device))
        _shape_(value, draw)
        local.copy_(value[0])
        return

    # Which blocks of rows this rank's part touches. A block is a fixed number of rows, whatever the mesh is
    rows, *rest = parameter.shape
    rows_per_block = max(1, BLOCK_NUMEL // max(1, math.prod(rest)))
    first = slices[0].start
    stop = slices[0].stop
    blocks = range(first // rows_per_block, -(-stop // rows_per_block))
    at_once_numel = TOGETHER_NUMEL if is_accelerator(local.device) else BLOCK_NUMEL
    at_once = max(1, at_once_numel // max(1, rows_per_block * math.prod(rest)))

    for index in range(0, len(blocks), at_once):
        # Draw whole blocks, each by a generator of its own, though a rank may need a part of the first and last alone:
        # a generator cannot skip to the middle of a block
        group = blocks[index : index + at_once]
        start = group.start * rows_per_block
        size = min(len(group) * rows_per_block, rows - start)
        values = torch.empty((size, *rest), dtype=torch.float32, device=local.device)
        for block, part in zip(group, values.split(rows_per_block), strict=True):
            _fill_block(part, draw, _generator(seed, name, block, local.device))
        _shape_(values, draw)

        # Keep this rank's rows, and its part of the other dimensions
        low = max(first, start)
        high = min(stop, start + size)
        local[low - first : high - first].copy_(values[(slice(low - start, high - start), *slices[1:])])


def _fill_block(block: Tensor, draw: Draw, generator: torch.Generator) -> None:
    # Drawn in float32 whatever the parameter's type, so that a bfloat16 run starts from the same weights, rounded.
    if math.isnan(draw.std):
        # Nobody knows how this parameter starts. If nothing is loaded into it either, the loss becomes NaN at once
        block.fill_(math.nan)
    elif draw.distribution == "normal":
        block.normal_(0.0, draw.std, generator=generator)
    elif draw.distribution == "uniform":
        block.uniform_(-draw.std * math.sqrt(3), draw.std * math.sqrt(3), generator=generator)
    else:
        # A truncated normal begins as uniform numbers, of which _shape_ makes one for many blocks together
        edge = math.erf(draw.cutoff / math.sqrt(2))
        block.uniform_(-edge, edge, generator=generator)


def _shape_(values: Tensor, draw: Draw) -> None:
    """Inverse transform sampling of a normal between -cutoff and cutoff standard deviations, where that is wanted."""
    if draw.distribution in ("normal", "uniform") or math.isnan(draw.std):
        return
    values.erfinv_().mul_(draw.std * math.sqrt(2))
    # erfinv may round a number at the edge to beyond it, or to infinity
    values.clamp_(-draw.cutoff * draw.std, draw.cutoff * draw.std)


def _generator(seed: int, name: str, block: int, device: torch.device) -> torch.Generator:
    # 56 bits, which every generator takes. A hash of all three, so that no two blocks share a stream
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=7).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big"))
