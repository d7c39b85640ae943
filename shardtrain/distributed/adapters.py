"""Low-rank adapters under tensor parallelism: the word of a module says how its two factors are split.

Outputs split ("colwise", "head"): lora_a whole, lora_b split by rows. Inputs split ("rowwise"): lora_a split by
columns, lora_b whole. So both products have the placement of the module's own (``lora/linear.py`` adds them), and what
is sent beyond the module's own collectives is the gradient of the factor that is whole. A magnitude of DoRA, one number
per output, is split as outputs are; where inputs are, ranks add the squares of their parts of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtrain.lora.linear import NAMES, adapted

_BY_OUTPUTS = {"lora_a": None, "lora_b": 0, "lora_magnitude": 0}
_BY_INPUTS = {"lora_a": 1, "lora_b": None, "lora_magnitude": None}
_SPLITS = {
    **dict.fromkeys(("colwise", "head", "colwise_gather_output", "colwise_rep"), _BY_OUTPUTS),
    "rowwise": _BY_INPUTS,
}
Words = Callable[[str], str | None]
Aside = tuple[Mapping[str, dict[str, nn.Parameter]], set[str]]


def set_aside(model: nn.Module, word_of: Words) -> Aside:
    """Take the factors of modules that are to be split off, which PyTorch's styles would split as weights; note what
    is trained, which they forget."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    taken = {}
    for path, linear in adapted(model):
        if word_of(path) in _SPLITS:
            own = {name: factor for name in NAMES if (factor := linear._parameters[name]) is not None}
            for name in own:
                del linear._parameters[name]
            taken[path] = own
    return taken, trained


def put_back(model: nn.Module, word_of: Words, mesh: DeviceMesh, aside: Aside) -> None:
    """Split the factors, and freeze again what a style has made again."""
    taken, trained = aside
    for path, factors in taken.items():
        linear = model.get_submodule(path)
        splits = _SPLITS[str(word_of(path))]
        for name, factor in factors.items():
            dim = splits[name]
            placement = Replicate() if dim is None else Shard(dim)
            split: DTensor = distribute_tensor(factor.detach(), mesh, (placement,))
            linear.register_parameter(name, nn.Parameter(split))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
