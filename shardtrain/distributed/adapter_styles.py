"""Split low-rank adapters for tensor parallelism, according to the style of their linear layer.

- Outputs are split ("colwise", "head"): lora_a is replicated, and lora_b is split by rows.
- Inputs are split ("rowwise"): lora_a is split by columns, and lora_b is replicated.

In both cases, the adapter's output has the placement of the layer's output, so ``lora/linear.py`` can add
them. The only extra communication is for the gradient of the replicated factor.

DoRA's magnitude has one number per output, so it is split like the outputs. If inputs are split, the
magnitude is replicated, and each rank has only part of each weight row. The row's norm is then computed
from the squares, summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtrain.lora.linear import NAMES, adapted

# factor -> the dimension that is split, None for replicated
_BY_OUTPUTS = {"lora_a": None, "lora_b": 0, "lora_magnitude": 0}
_BY_INPUTS = {"lora_a": 1, "lora_b": None, "lora_magnitude": None}
_SPLIT_DIMS = {
    "colwise": _BY_OUTPUTS,
    "head": _BY_OUTPUTS,
    "colwise_gather_output": _BY_OUTPUTS,
    "colwise_rep": _BY_OUTPUTS,
    "rowwise": _BY_INPUTS,
    "rowwise_split_input": _BY_INPUTS,
    "rowwise_rep": _BY_INPUTS,
}

StyleLookup = Callable[[str], str | None]
"""Module path -> style name."""
RemovedFactors = tuple[Mapping[str, dict[str, nn.Parameter]], set[str]]
"""Module path -> factors by name, and the names of all trainable parameters of the model."""


def set_aside(model: nn.Module, style_of: StyleLookup) -> RemovedFactors:
    """Remove the adapter factors of split layers from the model and return them for ``put_back``.

    PyTorch's styles would split them like weights. The styles also lose ``requires_grad``, so the names
    of the trainable parameters are returned too.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    factors_by_path = {}
    for path, linear in adapted(model):
        if style_of(path) not in _SPLIT_DIMS:
            continue
        factors = {}
        for name in NAMES:
            if linear._parameters[name] is not None:
                factors[name] = linear._parameters.pop(name)
        factors_by_path[path] = factors
    return factors_by_path, trained  # type: ignore[return-value]


def put_back(
    model: nn.Module, style_of: StyleLookup, mesh: DeviceMesh, removed: RemovedFactors
) -> None:
    """Undo ``set_aside``: register the factors again, now split, and restore every ``requires_grad``."""
    factors_by_path, trained = removed
    for path, factors in factors_by_path.items():
        linear = model.get_submodule(path)
        split_dims = _SPLIT_DIMS[str(style_of(path))]
        for name, factor in factors.items():
            dim = split_dims[name]
            placement = Replicate() if dim is None else Shard(dim)
            split: DTensor = distribute_tensor(factor.detach(), mesh, (placement,))
            linear.register_parameter(name, nn.Parameter(split))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
