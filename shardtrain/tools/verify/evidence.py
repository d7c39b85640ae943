"""What a diagnosis looks at: the first difference, the ranks' numbers, and which rows and positions each rank had."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from shardtrain.config import Config
from shardtrain.data.batch import Batch
from shardtrain.layout import Layout
from shardtrain.tools.verify.batches import whole_batch
from shardtrain.tools.verify.compare import MOST, ROUNDING, Errors, Expected, First, assemble
from shardtrain.tools.verify.shares import Shares
from shardtrain.tools.verify.verify_rank import RankRecord, micro_batches, model_of, plain_model

MATCH = 2e-4
"""Relative error up to which a share explains a gradient: far above rounding, far below any two shares' difference."""


class Evidence:
    """One mesh that differs from one process, and one process's model just before the first difference."""

    def __init__(
        self,
        config: Config,
        sizes: Mapping[str, int],
        expected: Expected,
        records: Sequence[RankRecord],
        first: First,
        shaken: RankRecord,
        allowed: Errors,
    ) -> None:
        self.config = config
        self.expected = expected
        self.records = records
        self.first = first
        self.allowed = allowed
        self._shaken = shaken
        self.match = max(MATCH, 2 * allowed.gradient)  # the mesh rounds, and so does the share

        # ep divides experts among ranks that the other axes have already
        self.sizes = {axis: size for axis, size in sizes.items() if axis != "ep"}
        self.experts = sizes.get("ep", 1)
        self.tokens = config.training.seq_len
        self.sequences = config.training.global_batch_size
        self.data_ranks = self.size("dp_replicate") * self.size("dp_shard")
        self.rows_per_rank = self.sequences // self.data_ranks
        self.num_micro, self.micro_rows = micro_batches(config, len(records))

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes.get(axis, 1)

    @property
    def axes(self) -> list[str]:
        """Axes of more than one rank."""
        return [axis for axis, size in self.sizes.items() if size > 1]

    @cached_property
    def layout(self) -> Layout:
        """The model's layout."""
        module, _, _ = model_of(self.config)
        return module.LAYOUT  # type: ignore[no-any-return]

    @cached_property
    def batch(self) -> Batch:
        """All rows of the step of the first difference."""
        _, shape, _ = model_of(self.config)
        return whole_batch(self.config.debug.seed, self.first.step, self.sequences, self.tokens, shape.vocab_size)

    @cached_property
    def shares(self) -> Shares:
        """The step on one process, in plain PyTorch."""
        factor = self.expected.clipping(self.first.step)
        return Shares(plain_model(self.config, self.expected.weights(self.first.step)), self.batch, factor)

    def shares_with(self, step: int = -1, balance: float = 1.0, factor: float = 1.0) -> Shares:
        """The same with weights of another step, another weight of the experts' balance losses, or a factor of all."""
        step = self.first.step if step < 0 else step
        factor *= self.expected.clipping(self.first.step)
        return Shares(plain_model(self.config, self.expected.weights(step)), self.batch, factor, balance)

    @cached_property
    def suspect(self) -> str:
        """The first tensor whose gradient differs and is not nearly zero, which would say nothing about scales."""
        names = self.first.names
        total = self.expected.total(self.first.step)
        least = 1e-4 * total * self.expected.clipping(self.first.step)
        big = [name for name in names if float(self.theirs(name).norm()) > least]
        return (big or list(names))[0]

    def theirs(self, name: str) -> Tensor:
        """A gradient of one process."""
        return self.expected.whole(f"gradient/{self.first.step}", name)

    def mine(self, name: str) -> Tensor | None:
        """The mesh's gradient, put together from its ranks; None where parts are missing."""
        return assemble(self.records, f"gradient/{self.first.step}/{name}", self.theirs(name).shape)

    def holders(self, name: str) -> list[tuple[RankRecord, Tensor, tuple[slice, ...]]]:
        """The ranks that have a part of a gradient, their part, and where it lies."""
        key = f"gradient/{self.first.step}/{name}"
        return [(record, record.parts[key], record.slices[key]) for record in self.records if key in record.parts]

    def explains(self, name: str, candidate: Callable[[RankRecord], Tensor | None]) -> bool:
        """Whether each rank's gradient is the one that a hypothesis gives for it, and not one process's as well."""
        changes = False
        for record, part, slices in self.holders(name):
            whole = candidate(record)
            if whole is None or whole[slices].shape != part.shape:
                return False
            close = self.match * max(float(whole.norm()), 1e-30)
            if float((whole[slices] - part).norm()) > close:
                return False
            changes = changes or float((whole[slices] - self.theirs(name)[slices]).norm()) > close
        return changes

    def explains_loss(self, candidate: float, close: float) -> bool:
        """Whether the mesh's loss is the one that a hypothesis gives, to ``close`` of it, and not one process's too."""
        mine = self.records[0].losses[self.first.step]
        theirs = self.expected.record.losses[self.first.step]
        close = max(close * max(1.0, abs(mine)), self.allowed.loss / 5)
        return abs(candidate - mine) < close < abs(candidate - theirs)

    def close(self, key: str, least: float) -> float:
        """Up to which relative error an activation agrees: ``least``, and more where the shaken run is off by more."""
        mine = self._shaken.parts.get(key)
        theirs = self.expected.record.parts.get(key)
        if mine is None or theirs is None or not theirs.numel():
            return least
        moved = float((mine - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-30)
        return min(MOST * least, max(least, ROUNDING * moved))

    def rows(self, fixed: Mapping[str, int]) -> list[int]:
        """Rows of the data ranks whose places on some axes are given."""
        chosen = []
        for replica, shard in itertools.product(range(self.size("dp_replicate")), range(self.size("dp_shard"))):
            if fixed.get("dp_replicate", replica) == replica and fixed.get("dp_shard", shard) == shard:
                chosen += self.rows_of_rank(replica * self.size("dp_shard") + shard)
        return chosen

    def rows_of_rank(self, data_rank: int) -> list[int]:
        """Rows of one data rank."""
        return list(range(data_rank * self.rows_per_rank, (data_rank + 1) * self.rows_per_rank))

    def micro_rows_of(self, index: int) -> list[int]:
        """Rows of one micro-batch over all data ranks."""
        window = slice(index * self.micro_rows, (index + 1) * self.micro_rows)
        return [row for rank in range(self.data_ranks) for row in self.rows_of_rank(rank)[window]]

    def positions(self, fixed: Mapping[str, int]) -> list[int]:
        """Positions of the activations that ranks with given places on cp and tp hold between gathered modules."""
        chosen: list[int] = []
        for part in range(self.size("cp")):
            if fixed.get("cp", part) == part:
                local = self.context_part(part)
                length = len(local) // self.size("tp")
                first = fixed.get("tp", 0) * length
                chosen += local[first : first + length] if "tp" in fixed else local
        return chosen

    def context_part(self, part: int) -> list[int]:
        """Positions of one part of the sequence."""
        size = self.size("cp")
        # Balanced: a rank has one chunk from either end, since late tokens attend to more than early ones do.
        if size > 1 and self.records[0].facts["balanced"]:
            length = self.tokens // (2 * size)
            chunks = [part, 2 * size - 1 - part]
        else:
            length = self.tokens // size
            chunks = [part]
        return [chunk * length + i for chunk in chunks for i in range(length)]

    def share(self, name: str, fixed: Mapping[str, int]) -> Tensor | None:
        """The gradient from what the ranks at given places computed."""
        positions = self.positions(fixed) if {"cp", "tp"} & fixed.keys() else None
        return self.shares.gradient(name, self.rows(fixed), positions)


def axes_that_differ(one: RankRecord, other: RankRecord) -> list[str]:
    """Axes on which two ranks have different places."""
    return [axis for axis in one.place if one.place[axis] != other.place[axis]]
