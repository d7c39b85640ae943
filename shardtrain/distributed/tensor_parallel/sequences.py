"""All-gather and reduce-scatter of sequences that are split over tensor-parallel ranks between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtrain.utils.errors import ConfigError, Problem


def plain(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


class SequenceLength:
    """The sequence length of the current pass, with which styles recognize parts of sequences.

    The length is taken from the positions, because every pipeline stage receives them, and they are never
    split over tensor-parallel ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tokens = 0

    def set_from_positions(
        self, model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Forward pre-hook of the model: store the length T of its argument with the positions (B, T)."""
        positions_BT = inputs[1] if len(inputs) > 1 else next(iter(keywords.values()))
        self._tokens = positions_BT.size(1)

    def is_part(self, x_BtD: Tensor) -> bool:
        """True if a plain tensor is this rank's part of a sequence."""
        return x_BtD.ndim == 3 and x_BtD.size(1) * self._ranks == self._tokens

    def require(self, path: str, style_name: str, x_BtD: Tensor, part: bool) -> Tensor:
        """Check the length of a module's input, and return the input as a plain tensor.

        Args:
            path: the module's path, for the message.
            style_name: its style in LAYOUT.tensor.
            x_BtD: the input.
            part: True if the module needs this rank's part of the sequence, False if it needs the full
                sequence.

        Raises:
            ConfigError: the input is a full sequence instead of a part, or a part instead of a full sequence.
        """
        # The local tensor of a replicated DTensor is the full tensor.
        x_BtD = plain(x_BtD)
        if part and x_BtD.ndim == 3 and x_BtD.size(1) == self._tokens:
            rule = "needs this rank's part of the sequence, but receives the full sequence"
            fix = 'write "replicate" for a module inside a module with the style "gather"'
        elif not part and self.is_part(x_BtD):
            rule = "needs the full sequence, but receives this rank's part of it"
            style_for_parts = "router" if style_name == "rowwise" else "sequence"
            fix = f'write "{style_for_parts}", or put it into a module with the style "gather"'
        else:
            return x_BtD
        raise ConfigError(Problem(f"LAYOUT.tensor[{path!r}]", style_name, rule, fix))


class Sequences:
    """All-gather and reduce-scatter along the sequence with PyTorch's collectives."""

    is_shared = False
    """True if CPU ranks of one machine exchange plain tensors through shared memory
    (``cpu/shared_sequences.py``).
    """

    def sum_weights(self) -> Callable[[Tensor], Tensor] | None:
        """Return a function that sums a weight's gradient over ranks in backward.

        None if FSDP or ``partial_gradients.py`` does this.
        """
        return None

    def keep_plain(self, module: nn.Module) -> bool:
        """True if this split linear layer should receive and return plain tensors."""
        return False

    def gather(self, x_BtD: Tensor, device_mesh: DeviceMesh) -> DTensor:
        """All-gather the parts (B, t, D) of a sequence (a collective)."""
        # A plain tensor is this rank's part of the sequence.
        if not isinstance(x_BtD, DTensor):
            x_BtD = DTensor.from_local(x_BtD, device_mesh, (Shard(1),), run_check=False)
        return x_BtD.redistribute(placements=(Replicate(),))

    def reduce_scatter(self, sums_BTD: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """Sum over ranks and return this rank's part of the sequence, (B, t, D) (a collective).

        If the input is a plain tensor, it is this rank's partial sum.
        """
        if not isinstance(sums_BTD, DTensor):
            sums_BTD = DTensor.from_local(sums_BTD, device_mesh, (Partial(),), run_check=False)
        return sums_BTD.redistribute(placements=(Shard(1),)).to_local()
