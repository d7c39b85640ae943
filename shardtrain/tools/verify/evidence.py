"""Input of a diagnosis: the first difference, the ranks' records, and the rows and positions of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from shardtrain.config import Config
from shardtrain.data.batch import Batch
from shardtrain.layout import Layout
from shardtrain.tools.verify.batches import whole_batch
from shardtrain.tools.verify.compare import Errors, Expected, First, assemble
from shardtrain.tools.verify.shares import Shares
from shardtrain.tools.verify.verify_rank import RankRecord, micro_batches, model_of, plain_model
from shardtrain.tools.verify.verify_report import MOST, ROUNDING

MATCH = 2e-4
"""Maximum relative error of a hypothesis that explains a gradient. It is far above rounding and far below any fault."""


class Evidence:
    """A mesh that differs from one process, and the model of one process directly before the first difference.

    Hypotheses about the fault test predictions of its effect against it (see ``explains``).
    """

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
        # Both the mesh and the hypothesis have rounding errors, so use twice the tolerance.
        self.match = max(MATCH, 2 * allowed.gradient)

        # ep divides experts among ranks of the other axes, so it adds no ranks.
        self.sizes = {axis: size for axis, size in sizes.items() if axis != "ep"}
        self.experts = sizes.get("ep", 1)
        self.tokens = config.training.seq_len
        self.sequences = config.training.global_batch_size
        self.data_ranks = self.size("dp_replicate") * self.size("dp_shard")
        self.rows_per_rank = self.sequences // self.data_ranks
        self.num_micro, self.micro_rows = micro_batches(config, len(records))

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.sizes.get(axis, 1)

    @property
    def axes(self) -> list[str]:
        """Axes with more than one rank."""
        return [axis for axis, size in self.sizes.items() if size > 1]

    @cached_property
    def layout(self) -> Layout:
        """Layout of the model."""
        module, _, _ = model_of(self.config)
        return module.LAYOUT  # type: ignore[no-any-return]

    @cached_property
    def batch(self) -> Batch:
        """All rows of the step with the first difference."""
        _, shape, _ = model_of(self.config)
        return whole_batch(
            self.config.debug.seed,
            self.first.step,
            self.sequences,
            self.tokens,
            shape.vocab_size,
        )

    @cached_property
    def shares(self) -> Shares:
        """The step with the first difference, on one process in plain PyTorch."""
        return self.shares_with()

    def shares_with(self, step: int = -1, balance: float = 1.0, factor: float = 1.0) -> Shares:
        """Run the step with the first difference on one process, with a modification.

        Args:
            step: Use the weights from before this step. Negative for the step itself.
            balance: Weight of the experts' balance losses.
            factor: Multiplies the loss, in addition to clipping.
        """
        if step < 0:
            step = self.first.step
        factor *= self.expected.clipping(self.first.step)
        model = plain_model(self.config, self.expected.weights(step))
        return Shares(model, self.batch, factor, balance)

    @cached_property
    def suspect(self) -> str:
        """First tensor whose gradient differs.

        Gradients close to zero are skipped, because they determine no factor.
        """
        names = self.first.names
        total = self.expected.total(self.first.step)
        smallest = 1e-4 * total * self.expected.clipping(self.first.step)
        for name in names:
            if float(self.theirs(name).norm()) > smallest:
                return name
        return names[0]

    def theirs(self, name: str) -> Tensor:
        """Return a gradient of one process."""
        return self.expected.whole(f"gradient/{self.first.step}", name)

    def mine(self, name: str) -> Tensor | None:
        """Return a gradient of the mesh, assembled from its ranks, or None if parts are missing."""
        return assemble(self.records, f"gradient/{self.first.step}/{name}", self.theirs(name).shape)

    def holders(self, name: str) -> list[tuple[RankRecord, Tensor, tuple[slice, ...]]]:
        """Return each rank with a part of a gradient, the part, and its place in the full tensor."""
        key = f"gradient/{self.first.step}/{name}"
        holders = []
        for record in self.records:
            if key in record.parts:
                holders.append((record, record.parts[key], record.slices[key]))
        return holders

    def explains(self, name: str, candidate: Callable[[RankRecord], Tensor | None]) -> bool:
        """True if each rank's gradient is as a hypothesis predicts, and one process's gradient is not.

        ``candidate`` returns the predicted full gradient of a rank, or None if it is unknown.
        """
        has_difference = False
        for record, part, slices in self.holders(name):
            predicted = candidate(record)
            if predicted is None or predicted[slices].shape != part.shape:
                return False
            # Relative to the full gradient, because a small part has a large relative rounding error.
            tolerance = self.match * max(float(predicted.norm()), 1e-30)
            predicted_part = predicted[slices]
            if float((predicted_part - part).norm()) > tolerance:
                return False
            # A hypothesis that predicts the correct gradient explains no difference.
            correct_part = self.theirs(name)[slices]
            if float((predicted_part - correct_part).norm()) > tolerance:
                has_difference = True
        return has_difference

    def explains_on_all_ranks(self, name: str, candidate: Tensor) -> bool:
        """Same as ``explains``, for a hypothesis that predicts the same full gradient on all ranks."""
        return self.explains(name, lambda _: candidate)

    def explains_loss(self, candidate: float, tolerance: float) -> bool:
        """True if the mesh's loss is as a hypothesis predicts, and the loss of one process is not.

        ``tolerance`` is relative for losses above 1, and absolute otherwise.
        """
        step = self.first.step
        mine = self.records[0].losses[step]
        theirs = self.expected.record.losses[step]
        tolerated = max(tolerance * max(1.0, abs(mine)), self.allowed.loss / 5)
        return abs(candidate - mine) < tolerated < abs(candidate - theirs)

    def close(self, key: str, least: float) -> float:
        """Return the relative tolerance for an activation: ``least``, or more if rounding changes it by more.

        The shaken run shows the effect of rounding: each of its initial weights is moved to a neighboring float.
        """
        shaken = self._shaken.parts.get(key)
        theirs = self.expected.record.parts.get(key)
        if shaken is None or theirs is None or not theirs.numel():
            return least
        difference = float((shaken - theirs).abs().max())
        largest = max(float(theirs.abs().max()), 1e-30)
        moved = difference / largest
        return min(MOST * least, max(least, ROUNDING * moved))

    def data_rank(self, record: RankRecord) -> int:
        """Return the data-parallel rank of a rank."""
        return record.place["dp_replicate"] * self.size("dp_shard") + record.place["dp_shard"]

    def rows(self, fixed: Mapping[str, int]) -> list[int]:
        """Return the rows of the data ranks with the given places on some axes."""
        chosen = []
        num_replicas = self.size("dp_replicate")
        num_shards = self.size("dp_shard")
        for replica, shard in itertools.product(range(num_replicas), range(num_shards)):
            # An axis that is not fixed matches every place.
            is_replica = fixed.get("dp_replicate", replica) == replica
            is_shard = fixed.get("dp_shard", shard) == shard
            if is_replica and is_shard:
                chosen += self.rows_of_rank(replica * num_shards + shard)
        return chosen

    def rows_of_rank(self, data_rank: int) -> list[int]:
        """Return the rows of one data rank."""
        first = data_rank * self.rows_per_rank
        return list(range(first, first + self.rows_per_rank))

    def micro_rows_of(self, index: int) -> list[int]:
        """Return the rows of one micro-batch over all data ranks."""
        window = slice(index * self.micro_rows, (index + 1) * self.micro_rows)
        rows = []
        for rank in range(self.data_ranks):
            rows += self.rows_of_rank(rank)[window]
        return rows

    def positions(self, fixed: Mapping[str, int]) -> list[int]:
        """Return the positions that ranks with the given places on cp and tp hold outside of
        gathered modules.
        """
        chosen: list[int] = []
        for part in range(self.size("cp")):
            if fixed.get("cp", part) != part:
                continue
            local = self.context_part(part)
            if "tp" in fixed:
                length = len(local) // self.size("tp")
                first = fixed["tp"] * length
                local = local[first : first + length]
            chosen += local
        return chosen

    def context_part(self, part: int) -> list[int]:
        """Return the positions of one cp rank's part of the sequence."""
        size = self.size("cp")
        # With balancing, a rank has one chunk from each end, because late tokens attend to more
        # tokens than early tokens.
        if size > 1 and self.records[0].facts["balanced"]:
            length = self.tokens // (2 * size)
            chunks = [part, 2 * size - 1 - part]
        else:
            length = self.tokens // size
            chunks = [part]
        positions: list[int] = []
        for chunk in chunks:
            start = chunk * length
            positions += range(start, start + length)
        return positions

    def share(self, name: str, fixed: Mapping[str, int]) -> Tensor | None:
        """Return the part of a gradient that comes from the ranks at the given places."""
        positions = None
        if {"cp", "tp"} & fixed.keys():
            positions = self.positions(fixed)
        return self.shares.gradient(name, self.rows(fixed), positions)


def axes_that_differ(one: RankRecord, other: RankRecord) -> list[str]:
    """Return the axes on which two ranks have different places."""
    return [axis for axis in one.place if one.place[axis] != other.place[axis]]
