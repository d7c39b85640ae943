"""Low-rank adapters under tensor parallelism: the word of a module says how its two factors are split.

Outputs split ("colwise", "head"): lora_a whole, lora_b split by rows. Inputs split ("rowwise"): lora_a split by
columns, lora_b whole. So both products have the placement of the module's own (``lora/linear.py`` adds them), and what
is sent beyond the module's own collectives is the gradient of the factor that is whole.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtrain.layout import Layout, word_of
from shardtrain.lora.linear import NAMES, adapted

_SPLITS = {"colwise": (None, 0), "head": (None, 0), "rowwise": (1, None)}
Aside = dict[str, dict[str, nn.Parameter]]


def set_aside(model: nn.Module, layout: Layout) -> Aside:
    """Take the factors of modules that are to be split off: PyTorch's styles would split them as weights."""
    taken = {}
    for path, linear in adapted(model):
        if word_of(layout, path) in _SPLITS:
            taken[path] = {name: linear._parameters.pop(name) for name in NAMES}
    return taken  # type: ignore[return-value]


def put_back(model: nn.Module, layout: Layout, mesh: DeviceMesh, taken: Aside) -> None:
    """Split the factors, and freeze again what a style has made anew."""
    if not any(True for _ in adapted(model)):
        return
    for path, factors in taken.items():
        for (name, factor), dim in zip(factors.items(), _SPLITS[str(word_of(layout, path))], strict=True):
            placement = Replicate() if dim is None else Shard(dim)
            split: DTensor = distribute_tensor(factor.detach(), mesh, (placement,))
            model.get_submodule(path).register_parameter(name, nn.Parameter(split))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in NAMES)
