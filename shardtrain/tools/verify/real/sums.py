"""Compare sums of real size with float64: the gradient norm over millions of numbers, and the loss over a
vocabulary.

The functions run on the ranks of a mesh. The float64 reference is computed by separate code, so it does not
repeat a fault of the trainer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardtrain import distributed
from shardtrain.config import Config
from shardtrain.data.batch import Batch
from shardtrain.distributed import BATCH_AXES, Mesh, grad_clip
from shardtrain.distributed.process_group import World
from shardtrain.distributed.runner import ModelParts, PlainRunner
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.ops.dtensor import local_slices, local_tensor, split_axes
from shardtrain.tools.verify.real import tile

BLOCK_NUMEL = 1 << 22
"""Number of elements per block of the float64 reference."""

VALUES = {
    "normal": "normal numbers",
    "offset": "numbers near 1, all of one sign",
    "tiny": "numbers of 1e-25, whose squares float32 cannot hold",
    "one large": "normal numbers, and a last row of 100",
}
"""Distributions of gradients. Each one causes another kind of error in a float32 sum."""


def mesh_of(rank: int, num_ranks: int, degrees: dict[str, int]) -> tuple[Mesh, Config]:
    """Build a mesh of CPU ranks with the degrees of some axes. ``dp_shard`` takes the remaining ranks."""
    config = Config()
    options = replace(
        config.parallelism,
        data_parallel_replicate_degree=degrees.get("dp_replicate", 1),
        tensor_parallel_degree=degrees.get("tp", 1),
    )
    config = replace(config, parallelism=options)
    world = World(rank, num_ranks, rank, torch.device("cpu"))
    return distributed.build(config, world), config


def float64_squares(tensor: Tensor) -> float:
    """Return the sum of squares of a local tensor.

    Each block is summed in float64, and the blocks are added exactly.
    """
    squares = []
    # Blocks limit the memory: the tensor in float64 may not fit.
    for block in tensor.detach().reshape(-1).split(BLOCK_NUMEL):
        block_sum = block.double().square().sum()
        squares.append(float(block_sum))
    return math.fsum(squares)


def copies_of(tensor: Tensor, num_ranks: int) -> int:
    """Return the number of ranks with the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return num_ranks
    parts = math.prod(tensor.device_mesh.size(axis) for axis in split_axes(tensor))
    return num_ranks // parts


def gradient(
    shape: tuple[int, ...],
    placements: list[Placement],
    mesh: Mesh,
    dtype: torch.dtype,
) -> nn.Parameter:
    """Return a sharded parameter that is its own gradient, so only the gradient needs memory."""
    device_mesh = mesh.submesh(*(mesh.device_mesh.mesh_dim_names or ()))
    # Only the shape and stride of the full tensor are needed.
    with torch.device("meta"):
        full = torch.empty(shape, dtype=dtype)
    local_shape = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            # Shard like PyTorch: chunks have the same size, rounded up, and the last chunk may be
            # shorter or empty.
            size = device_mesh.size(axis)
            place = device_mesh.get_local_rank(axis)
            length = local_shape[placement.dim]
            chunk = -(-length // size)
            remaining = length - chunk * place
            local_shape[placement.dim] = max(0, min(chunk, remaining))
    local = torch.empty(local_shape, dtype=dtype)
    sharded = DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    parameter = nn.Parameter(sharded)
    parameter.grad = sharded
    return parameter


def gradient_norm(
    rank: int,
    num_ranks: int,
    degrees: dict[str, int],
    rows: int,
    columns: int,
    values: str,
    dtype: str,
) -> dict[str, Any]:
    """Compute the trainer's gradient norm of a sharded matrix (rows, columns) and a replicated vector.

    Return the norm, and this rank's part of the sum of squares in float64. The parts of all ranks
    add up to the sum.
    """
    mesh, _ = mesh_of(rank, num_ranks, degrees)
    names = mesh.device_mesh.mesh_dim_names or ()
    split: dict[str, Placement] = {"dp_shard": Shard(0), "tp": Shard(1)}
    placements = [split.get(name, Replicate()) for name in names]
    kind = getattr(torch, dtype)
    matrix = gradient((rows, columns), placements, mesh, kind)
    vector = gradient((4097, 1), [Replicate() for _ in names], mesh, kind)
    std = 1.0
    mean = 0.0
    if values == "offset":
        std = 1e-3
        mean = 1.0
    elif values == "tiny":
        std = 1e-25
    # Each rank fills its shard with its part of the same full tensor.
    for name, parameter in (("matrix", matrix), ("vector", vector)):
        tile.fill_(parameter.grad, name, std, mean)  # type: ignore[arg-type]
    if values == "one large":
        # Change the last row, on the ranks that hold a part of it. A sum that misses the row or counts it
        # twice is then clearly wrong.
        mine = local_slices(matrix.grad)[0]  # type: ignore[arg-type]
        if mine.stop == rows and mine.start < rows:
            local_tensor(matrix.grad)[-1:].fill_(100.0)  # type: ignore[arg-type]
    norm = grad_clip.gradient_norm([matrix, vector], mesh)

    # Ranks with the same part share its squares, so the sum over all ranks counts each part once.
    shares = []
    for parameter in (matrix, vector):
        gradient_of_rank = parameter.grad
        squares = float64_squares(local_tensor(gradient_of_rank))  # type: ignore[arg-type]
        num_copies = copies_of(gradient_of_rank, num_ranks)  # type: ignore[arg-type]
        shares.append(squares / num_copies)
    return {"norm": float(norm), "squares": math.fsum(shares)}


def norm_error(answers: list[dict[str, Any]]) -> float:
    """Return the relative error of the worst rank's norm."""
    exact_norm = math.sqrt(math.fsum(answer["squares"] for answer in answers))
    return max(abs(answer["norm"] / exact_norm - 1) for answer in answers)


class _Bigrams(nn.Module):
    """Smallest language model: the logits of the next token are a row of a table."""

    def __init__(self, table_PV: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table_PV)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens_BT, self.table)


PREFIXES = 64
"""Number of rows in the table of logits, and so of distinct distributions."""


class _Batches:
    """Micro-batches of random tokens and targets, generated on access, and the float64 sum of their
    losses.
    """

    def __init__(self, count: int, size: int, table_PV: Tensor, seed: int) -> None:
        self._count = count
        self._size = size
        self._table = table_PV
        self._log_sums_P = torch.stack([row_V.double().logsumexp(0) for row_V in table_PV])
        self._generator = torch.Generator().manual_seed(seed)
        self.sums: list[float] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Batch:
        if number >= self._count:
            raise IndexError(number)
        shape = (1, self._size)
        prefixes, vocabulary = self._table.shape
        tokens_BT = torch.randint(0, prefixes, shape, generator=self._generator)
        targets_BT = torch.randint(0, vocabulary, shape, generator=self._generator)
        # The loss of a token is the log-sum-exp of its row minus the logit of its target. Look up both in the
        # table, because the logits of all tokens in float64 would need too much memory.
        places_N = (tokens_BT * vocabulary + targets_BT).view(-1)
        chosen_N = self._table.view(-1).index_select(0, places_N)
        log_sums_N = self._log_sums_P.index_select(0, tokens_BT.view(-1))
        losses_N = log_sums_N - chosen_N
        self.sums.append(float(losses_N.sum()))
        positions_BT = torch.arange(self._size)[None]
        return Batch(tokens_BT, targets_BT, positions_BT, torch.arange(1))


def loss_sum(
    rank: int, num_ranks: int, degrees: dict[str, int], vocabulary: int, tokens: int, batches: int
) -> dict[str, Any]:
    """Compute the runner's loss over ``batches`` micro-batches with ``tokens`` targets in total, over all data
    ranks.

    Ranks of dp divide the tokens, and ranks of tp divide the vocabulary. Return the loss sum over all ranks,
    and this rank's part of it in float64.
    """
    mesh, config = mesh_of(rank, num_ranks, degrees)
    full_PV = torch.empty(PREFIXES, vocabulary)
    tile.fill_(full_PV, "logits")
    part = None
    local_Pv = full_PV
    if mesh.size("tp") > 1:
        part = SplitVocabulary(mesh, vocabulary)
        local_Pv = full_PV[:, part.offset : part.offset + part.columns].contiguous()
    model = _Bigrams(local_Pv)
    runner = PlainRunner(ModelParts([model], mesh, config, None, part))

    # The data rank is the seed, so ranks of tp have the same tokens and data ranks have different ones.
    ranks = mesh.size(*BATCH_AXES)
    data_rank = mesh.rank(*BATCH_AXES)
    tokens_per_batch = tokens // batches
    batches_per_rank = batches // ranks
    inputs = _Batches(batches_per_rank, tokens_per_batch, full_PV, seed=data_rank)
    num_tokens = tokens_per_batch * batches_per_rank * ranks
    weight = torch.tensor(1.0 / num_tokens)
    loss = runner.forward_backward(inputs, weight)  # type: ignore[arg-type]

    # The trainer adds the loss over ranks together with the gradient norm, so use the same function.
    total = grad_clip.Agreement(loss, torch.ones(()), mesh).read().loss
    # Ranks of tp have the same sum. Divide it, so the parts of all ranks add up to the sum.
    part_of_sum = math.fsum(inputs.sums) / mesh.size("tp")
    return {"loss": total / float(weight), "sum": part_of_sum}


def loss_error(answers: list[dict[str, Any]]) -> float:
    """Return the relative error of the worst rank's loss sum."""
    exact_sum = math.fsum(answer["sum"] for answer in answers)
    return max(abs(answer["loss"] / exact_sum - 1) for answer in answers)
