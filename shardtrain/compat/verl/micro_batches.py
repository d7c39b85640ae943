"""Conversion between verl's micro-batches, which are nested tensors, and packed rows of the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode

from shardtrain.distributed.token_runner import Outputs, TokenLossBatch
from shardtrain.ops.targets import FILLER_DOCUMENT
from shardtrain.utils.errors import ConfigError, Problem


def check(data: TensorDict) -> None:
    """Raise ConfigError if a batch requires outputs that the engine does not compute."""
    pad_mode = tensordict_utils.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        rule = "is not supported by the engine shardtrain"
        raise ConfigError(Problem("data.pad_mode", str(pad_mode), rule, 'use "no_padding"'))
    for name in ("calculate_sum_pi_squared", "distillation_use_topk", "use_fused_kernels"):
        if tensordict_utils.get_non_tensor_data(data, name, False):
            rule = "is not supported by the engine shardtrain"
            raise ConfigError(Problem(name, True, rule, "set it to false"))
    if "multi_modal_inputs" in data or data["position_ids"].dim() > 2:
        rule = "has images, which the engine shardtrain does not support"
        raise ConfigError(Problem("data", None, rule, "use text, or the engine fsdp"))


def pack(
    micro_batch: TensorDict, length_multiple: int, loss: Callable[[Outputs], Tensor]
) -> TokenLossBatch:
    """Pack the sequences of a micro-batch into one row, and pad the row to a multiple of ``length_multiple``."""
    input_ids = micro_batch["input_ids"]
    tokens_T = input_ids.values()
    lengths_S = input_ids.offsets().diff()
    num_sequences = len(lengths_S)
    device = tokens_T.device
    temperature: Any = micro_batch["temperature"]
    if not isinstance(temperature, Tensor):
        temperature = torch.full((num_sequences,), float(temperature), device=device)
    documents_T = torch.arange(num_sequences, device=device).repeat_interleave(lengths_S)
    # As in verl's engines, the target of a sequence's last token is the first token of the next sequence.
    # Losses mask this target.
    targets_T = tokens_T.roll(-1)
    padding = -len(tokens_T) % length_multiple
    documents_1T = None
    if num_sequences > 1 or padding:
        documents_1T = F.pad(documents_T, (0, padding), value=FILLER_DOCUMENT)[None]
    positions_of_padding = torch.arange(padding, device=device)
    positions_T = micro_batch["position_ids"].values()
    return TokenLossBatch(
        tokens_BT=F.pad(tokens_T, (0, padding))[None],
        targets_BT=F.pad(targets_T, (0, padding))[None],
        positions_BT=torch.cat((positions_T, positions_of_padding))[None],
        temperatures_BT=F.pad(temperature.float()[documents_T], (0, padding), value=1.0)[None],
        documents_BT=documents_1T,
        loss=loss,
    )


def nested_like(values_1T: Tensor, input_ids: Any) -> Tensor:
    """Return the values of a packed row as a nested tensor with the same sequences as ``input_ids``."""
    num_tokens = input_ids.values().size(0)
    return torch.nested.nested_tensor_from_jagged(values_1T[0, :num_tokens], input_ids.offsets())
