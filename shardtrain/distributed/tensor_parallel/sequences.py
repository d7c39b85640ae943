"""Sequences that are split over tensor-parallel ranks between layers: gathered, and reduced and scattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtrain.utils.errors import ConfigError, Problem


def plain(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


class SequenceLength:
    """The sequence length of the current pass, by which a shape tells this rank's part of a sequence from a whole one.

    It is read from the positions: every pipeline stage gets them, and they are not split over tensor-parallel ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tokens = 0

    def set_from_positions(self, model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Take the length of the sequence from the positions (B, T) that a forward pass was called with."""
        positions_BT = inputs[1] if len(inputs) > 1 else next(iter(keywords.values()))
        self._tokens = positions_BT.size(1)

    def is_part(self, x_BtD: Tensor) -> bool:
        """Whether a plain tensor is this rank's part of a sequence."""
        return x_BtD.ndim == 3 and x_BtD.size(1) * self._ranks == self._tokens

    def require(self, path: str, word: str, x_BtD: Tensor, part: bool) -> Tensor:
        """A module's input as a plain tensor; ConfigError if it is whole and must be a part, or the reverse."""
        x_BtD = plain(x_BtD)
        if part and x_BtD.ndim == 3 and x_BtD.size(1) == self._tokens:
            rule = "works on a part of the sequence, and is given all of it"
            fix = 'write "replicate" for a module within one that is gathered'
        elif not part and self.is_part(x_BtD):
            rule = "works on the whole sequence, and is given this rank's part of it"
            word_for_parts = "router" if word == "rowwise" else "sequence"
            fix = f'write "{word_for_parts}", or put it into a module with the word "gather"'
        else:
            return x_BtD
        raise ConfigError(Problem(f"LAYOUT.tensor[{path!r}]", word, rule, fix))


class Sequences:
    """All-gather and reduce-scatter along the sequence, by PyTorch's collectives."""

    is_shared = False
    """True if CPU ranks of one machine exchange plain tensors by shared memory (``cpu/shared_sequences.py``)."""

    def sum_weights(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function that adds up the ranks' gradients of a weight in backward.

        None where FSDP or ``partial_gradients.py`` does it.
        """
        return None

    def keep_plain(self, module: nn.Module) -> bool:
        """True if a split linear layer takes and returns plain tensors."""
        return False

    def gather(self, x_BtD: Tensor, device_mesh: DeviceMesh) -> DTensor:
        """All-gather the parts of a sequence."""
        if not isinstance(x_BtD, DTensor):
            x_BtD = DTensor.from_local(x_BtD, device_mesh, (Shard(1),), run_check=False)
        return x_BtD.redistribute(placements=(Replicate(),))

    def reduce_scatter(self, sums_BTD: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """Sum over ranks, and keep this rank's part of the sequence; a plain tensor is this rank's addend."""
        if not isinstance(sums_BTD, DTensor):
            sums_BTD = DTensor.from_local(sums_BTD, device_mesh, (Partial(),), run_check=False)
        return sums_BTD.redistribute(placements=(Shard(1),)).to_local()
