"""Pack several short rows with images into one sequence. Tokens attend only to tokens of their row.

The inputs of the rows are concatenated, so the images stay in the order of their tokens. Shape suffixes: B
sequences, T tokens, R rows, L tokens of the longest row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = "rows_BT"
"""Input of a packed batch: the number of the row of each token, -1 for padding."""
IDS = "input_ids"
_MASK = "attention_mask"
PACKING = "first_fit"
"""Value of ``data.packing`` that packs rows."""


_OWN_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""model_type of networks with positions in three dims that accept text positions as a fourth dim."""


def problem_of(network: Any) -> str:
    """Return the reason why a network of ``transformers`` does not support packed rows, or ""."""
    arguments = inspect.signature(network.forward).parameters
    if "position_ids" not in arguments:
        return "takes no position_ids, which separate the rows of a sequence"
    if "token_type_ids" in arguments:
        return "lets the tokens of an image attend to each other, and transformers masks them wrongly in packed rows"
    if computes_positions(network) and network.config.model_type not in _OWN_POSITIONS:
        return "computes positions in several dims, which do not separate the rows of a sequence"
    return ""


def computes_positions(network: Any) -> bool:
    """True if the network has positions in several dims, and computes them from the sizes of images."""
    return hasattr(getattr(network, "model", network), "get_rope_index")


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each row into the first sequence with room for it. Return the numbers of the rows of each sequence.

    >>> first_fit([5, 4, 3, 9], capacity=8)
    [[0, 2], [1], [3]]
    """
    sequences: list[list[int]] = []
    filled: list[int] = []
    for number, length in enumerate(lengths):
        fitting = [place for place, used in enumerate(filled) if used + length <= capacity]
        if fitting:
            sequences[fitting[0]].append(number)
            filled[fitting[0]] += length
        else:
            sequences.append([number])
            filled.append(length)
    return sequences


def concatenated(
    inputs_of_rows: Sequence[Mapping[str, Tensor]], row_inputs: frozenset[str]
) -> dict[str, Tensor]:
    """Concatenate the inputs of the rows of a sequence, along their tokens or their images.

    The images are in dim 1 of the inputs in ``row_inputs``, and in dim 0 of other inputs of images.
    """
    joined: dict[str, Tensor] = {}
    names = dict.fromkeys(name for inputs in inputs_of_rows for name in inputs)
    names.pop(_MASK, None)
    for name in names:
        parts = [inputs[name] for inputs in inputs_of_rows if name in inputs]
        first_values = inputs_of_rows[0].get(name)
        num_tokens = inputs_of_rows[0][IDS].shape[1]
        is_of_tokens = first_values is not None and first_values.shape[:2] == (1, num_tokens)
        dim = 1 if is_of_tokens or name in row_inputs else 0
        joined[name] = torch.cat(parts, dim)
    return joined


def text_positions(rows_BT: Tensor) -> Tensor:
    """Return positions (B, T) that restart at 0 with each row, and with the padding after the last row.

    >>> text_positions(torch.tensor([[3, 3, 1, 1, 1, -1]]))
    tensor([[0, 1, 0, 1, 2, 0]])
    """
    columns_T = torch.arange(rows_BT.size(1), device=rows_BT.device)
    is_start_BT = F.pad(rows_BT[:, 1:] != rows_BT[:, :-1], (1, 0), value=True)
    starts_BT = torch.where(is_start_BT, columns_T, 0).cummax(dim=1).values
    return columns_T - starts_BT


def positions(network: Any, inputs: Mapping[str, Tensor], rows_BT: Tensor) -> Tensor:
    """Return the ``position_ids`` of a packed batch.

    Args:
        network: network of ``transformers``.
        inputs: its inputs, with ``input_ids`` (B, T).

    Returns:
        (B, T), or (4, B, T) for a network with positions in three dims. The first of the four are text
        positions, which separate the rows. The network computes the other three for each row.
    """
    text_BT = text_positions(rows_BT)
    if not computes_positions(network):
        return text_BT
    core = getattr(network, "model", network)

    # Unpack the rows into a batch (R, L), because the network computes positions from the start of each sequence.
    # Padding counts as a row.
    is_start_BT = text_BT == 0
    row_BT = is_start_BT.flatten().cumsum(0).view_as(text_BT) - 1
    num_rows = int(row_BT.max()) + 1
    longest = int(text_BT.max()) + 1
    unpacked = {}
    for name in (IDS, "mm_token_type_ids"):
        values_BT = inputs[name]
        values_RL = values_BT.new_zeros(num_rows, longest)
        values_RL[row_BT, text_BT] = values_BT
        unpacked[name] = values_RL
    mask_RL = torch.zeros_like(unpacked[IDS])
    mask_RL[row_BT, text_BT] = 1
    ids_RL = unpacked.pop(IDS)
    positions_3RL, _ = core.get_rope_index(
        ids_RL, image_grid_thw=inputs.get("image_grid_thw"), attention_mask=mask_RL, **unpacked
    )

    # The network returns positions of separate rows, so put them into the packed order again.
    positions_3BT = positions_3RL[:, row_BT, text_BT]
    return torch.cat((text_BT[None], positions_3BT))


def sums_of_rows(values_BT: Tensor, rows_BT: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the values of each row of a packed batch, (R,)."""
    sums = torch.zeros(num_rows + 1, dtype=torch.int64, device=values_BT.device)
    # Add padding to an additional last entry, which is not returned.
    numbers = torch.where(rows_BT < 0, num_rows, rows_BT).flatten()
    sums.index_add_(0, numbers, values_BT.flatten().long())
    return sums[:num_rows]
