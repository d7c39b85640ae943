"""Checks at the end of tensors with more than 2^31 elements, whose index does not fit into 32 bits.

Each check has a parameter ``rows`` (of ``COLUMNS`` elements each), so tests can run it on small tensors.
Checks that need only the end of a tensor do not touch other memory.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from shardtrain import optim
from shardtrain.checkpoint import tensors
from shardtrain.checkpoint.grids import Grid
from shardtrain.checkpoint.manifest import Manifest, StoredTensor, TensorFile
from shardtrain.config.schema import Optimizer
from shardtrain.data.order import sample_at
from shardtrain.distributed import fake_backend, grad_clip
from shardtrain.layout import Draw
from shardtrain.ops import init_weights
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify.real import tile

COLUMNS = 2048
ROWS = (1 << 20) + 3
"""2^31 + 6,144 elements, which are 4.3 GB in bfloat16. Indices in the last rows do not fit into 32 bits."""
TAIL = 8
"""Rows at the end that are checked individually."""


def _places(rows: int) -> list[int]:
    """Return rows at both ends, in the middle, and where a 31-bit index would overflow."""
    return sorted({0, 1, rows // 2, rows - 4, rows - 3, rows - 2, rows - 1})


def scaled(rank: int, num_ranks: int, rows: int) -> dict[str, Any]:
    """Check the scaling of gradients in place, as in clipping. The factor 0.5 is exact in every dtype."""
    parameter = nn.Parameter(torch.empty(rows, COLUMNS, dtype=torch.bfloat16))
    tile.fill_(parameter, "scaled")
    before = {row: parameter[row].detach().clone() for row in _places(rows)}
    # The parameter is its own gradient, because a second tensor of this size would double the memory.
    parameter.grad = parameter.detach()
    grad_clip.scale_gradients([parameter], 0.5)
    wrong = 0
    for row, original in before.items():
        scaled_row = parameter[row].detach()
        wrong += int((scaled_row != original * 0.5).sum())
    return {"wrong": wrong}


def updated(rank: int, num_ranks: int, rows: int) -> dict[str, Any]:
    """Check one AdamW update of the default implementation.

    From zero moments, each element moves by lr in its sign.
    """
    parameter = nn.Parameter(torch.zeros(rows, COLUMNS, dtype=torch.bfloat16))
    parameter.grad = torch.empty_like(parameter)
    tile.fill_(parameter.grad, "updated")
    options = Optimizer(lr=0.5, eps=1e-8, weight_decay=0.0)
    optim.build([("weight", parameter)], options, ["weight"]).step()
    wrong = 0
    for row in _places(rows):
        # bfloat16 rounds each step of the kernel, so only two digits are correct. A number that was not
        # updated has an error of 100 %.
        moved = parameter[row].detach().float()
        expected = -0.5 * parameter.grad[row].float().sign()
        is_wrong = (moved - expected).abs() > 0.05
        wrong += int(is_wrong.sum())
    return {"wrong": wrong}


def looked_up(rank: int, num_ranks: int, rows: int) -> dict[str, Any]:
    """Check embedding rows at the end and the gradient of their lookup. Only these rows of the table use memory."""
    table = torch.empty(rows, COLUMNS, dtype=torch.bfloat16)
    ids = torch.tensor(_places(rows))
    for row in ids.tolist():
        table[row] = (row % 251) + torch.arange(COLUMNS) % 4
    table.requires_grad_()
    looked_up_rows = F.embedding(ids, table)
    # Numbers up to 254 are exact in bfloat16.
    columns = torch.arange(COLUMNS)[None] % 4
    expected = ((ids % 251)[:, None] + columns).to(torch.bfloat16)
    wrong = int((looked_up_rows.detach() != expected).sum())

    # The gradient is 1, 2, 3 and so on in the rows that were looked up, and zero in all other rows.
    numbers = torch.arange(1, len(ids) + 1, dtype=torch.bfloat16)
    gradient_of_rows = torch.ones_like(looked_up_rows) * numbers[:, None]
    looked_up_rows.backward(gradient_of_rows)  # type: ignore[no-untyped-call]
    gradient = table.grad
    assert gradient is not None
    for place, row in enumerate(ids.tolist(), 1):
        wrong += int((gradient[row] != place).sum())
    # If the total is right, too, all other rows are zero.
    sums_of_parts = []
    for part in gradient.split(1 << 14):
        sums_of_parts.append(float(part.sum(dtype=torch.float64)))
    total = math.fsum(sums_of_parts)
    expected_total = COLUMNS * sum(range(1, len(ids) + 1))
    wrong += int(total != expected_total)
    return {"wrong": wrong}


def scored(rank: int, num_ranks: int, vocabulary: int, tokens: int) -> dict[str, Any]:
    """Check the loss of more than 2^31 logits.

    Only four tokens have targets: the first, the middle and the last two. Their targets are the last two
    tokens of the vocabulary.
    """
    logits = torch.empty(1, tokens, vocabulary, dtype=torch.bfloat16)
    targets = torch.full((1, tokens), IGNORE)
    for place in (0, tokens // 2, tokens - 2, tokens - 1):
        targets[0, place] = vocabulary - 1 - place % 2
    tile.fill_(logits[0], "scored")
    # The reference needs only the rows with targets, so float64 needs little memory.
    kept = (targets[0] != IGNORE).nonzero().flatten()
    rows = logits[0, kept].double()
    log_sums = rows.logsumexp(1)
    target_logits = rows.gather(1, targets[0, kept, None]).squeeze(1)
    losses = log_sums - target_logits
    expected = float(losses.sum())
    with torch.no_grad():
        computed = float(cross_entropy_sum(logits, targets))
    return {"error": abs(computed / expected - 1)}


def drawn(rank: int, num_ranks: int, rows: int) -> dict[str, Any]:
    """Check the initial weights on the last of 64 ranks against an independent draw of the same blocks."""
    draw = Draw("normal", std=0.02)
    ranks = 64
    rows_per_block = init_weights.BLOCK_NUMEL // COLUMNS
    # Create a fake process group of 64 ranks, in which this process is the last rank.
    with fake_backend.join(ranks - 1, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
        first = -(-rows // ranks) * (ranks - 1)
        local = torch.empty(rows - first, COLUMNS)
        shape = torch.Size((rows, COLUMNS))
        stride = (COLUMNS, 1)
        tensor = DTensor.from_local(
            local, mesh, (Shard(0),), run_check=False, shape=shape, stride=stride
        )
        init_weights.draw_(tensor, "far", draw, seed=5)
    wrong = 0
    # Draw the first and the last block of the shard again, and compare the rows that the shard has.
    for block in {first // rows_per_block, (rows - 1) // rows_per_block}:
        # The seed of a block is a hash of the seed, the name of the parameter and the number of the block.
        digest = hashlib.blake2b(f"5/far/{block}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        start = block * rows_per_block
        size = min(rows_per_block, rows - start)
        values = torch.empty(size, COLUMNS).normal_(0.0, 0.02, generator=generator)
        low = max(start, first)
        rows_of_shard = local[low - first : start + size - first]
        wrong += int((rows_of_shard != values[low - start :]).sum())
    return {"wrong": wrong}


def ordered(rank: int, num_ranks: int, samples: int) -> dict[str, Any]:
    """Check the order of more than 2^32 samples at large positions, against the same network in Python integers."""
    positions = [0, 1, 2**31 - 1, 2**31, 2**32 + 1, samples - 1, samples, 3 * samples + 2**31]
    computed = sample_at(positions, samples, seed=3).tolist()
    num_wrong = 0
    for position, sample in zip(positions, computed, strict=True):
        if sample != _sample(position, samples, 3):
            num_wrong += 1
    # A permutation has no duplicates and no values out of range.
    near = sample_at(range(samples - 4096, samples), samples, seed=3)
    num_duplicates = 4096 - len(set(near.tolist()))
    num_outside = int((near >= samples).sum())
    return {"wrong": num_wrong + num_duplicates + num_outside}


def _sample(position: int, samples: int, seed: int) -> int:
    """Return the sample at a position, computed by the Feistel network of ``data/order.py`` in Python integers."""
    epoch, value = divmod(position, samples)
    pool = b""
    for part in range(2):
        text = f"shardtrain order {seed} {epoch} {part}"
        pool += hashlib.sha256(text.encode()).digest()
    # Eight keys of 64 bits
    keys = []
    for start in range(0, 64, 8):
        keys.append(int.from_bytes(pool[start : start + 8], "little"))
    half = (max(6, (samples - 1).bit_length()) + 1) // 2
    mask = 2**half - 1
    while True:
        left = value >> half
        right = value & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        # The network permutes a power of two. A value beyond the samples goes through it again
        # (cycle walking).
        value = left << half | right
        if value < samples:
            return value


def _mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def stored_far(rank: int, num_ranks: int, rows: int, folder: str) -> dict[str, Any]:
    """Check the last rows of a checkpoint's tensor, which start after 2^32 bytes.

    The sparse file needs no disk space.
    """
    path = Path(folder) / "rank-00000.bin"
    row_bytes = COLUMNS * 2
    numbers = torch.arange(TAIL * COLUMNS).view(TAIL, COLUMNS)
    expected = numbers.remainder(251).to(torch.bfloat16)
    with open(path, "wb") as file:
        file.seek((rows - TAIL) * row_bytes)
        file.write(bytes(tensors.bytes_of(expected)))
    shape = (rows, COLUMNS)
    stored = StoredTensor("bfloat16", shape, (Grid((0, 0), shape, 0, 0),))
    stored_file = TensorFile(path.name, rows * row_bytes, "0" * 64)
    manifest = Manifest(0, 1, "", "", (stored_file,), {"weight": stored})
    wanted = (slice(rows - TAIL, rows), slice(0, COLUMNS))
    read_rows = tensors.read_part(manifest, path.parent, "weight", wanted)
    path.unlink()
    return {"wrong": int((read_rows != expected).sum())}


def written(rank: int, num_ranks: int, rows: int, folder: str) -> dict[str, Any]:
    """Write a full tensor, then check the size of its file and every element."""
    tensor = torch.empty(rows, COLUMNS, dtype=torch.bfloat16)
    tile.fill_(tensor, "written")
    path = Path(folder) / "written"
    path.mkdir()
    file = tensors.write_blocks([tensors.bytes_of(tensor)], 0, 1, path)
    wrong = int(file.bytes != rows * COLUMNS * 2)
    wrong += int(os.path.getsize(path / file.name) != file.bytes)
    shape = (rows, COLUMNS)
    stored = StoredTensor("bfloat16", shape, (Grid((0, 0), shape, 0, 0),))
    manifest = Manifest(0, 1, "", "", (file,), {"weight": stored})
    # Read the file in blocks: a second full tensor would double the memory.
    step = 1 << 15
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        block = (slice(start, stop), slice(0, COLUMNS))
        read_rows = tensors.read_part(manifest, path, "weight", block)
        wrong += int((read_rows != tensor[start:stop]).sum())
    (path / file.name).unlink()
    return {"wrong": wrong}
