"""Frozen weights in 4 or 8 bits beside adapters (QLoRA: Dettmers et al. 2023): torchao's formats, restored at each use.

The linear modules of the layers are held so; embedding, norms and head are not. A weight is restored for its product
and let go, in forward and again in backward, so that no more than one is in memory. Each rank holds those of its
layers whole: at half a byte or a byte per weight they are cheaper to hold than to gather.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.layout import Layout, style_of
from shardtrain.lora.linear import FrozenLinear, is_linear
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import without_torchao_warnings

if TYPE_CHECKING:
    from shardtrain.config.schema import Config

OPTION = "lora.base_dtype"
WHOLE = "training"
"""The word for weights that are held as ``training.dtype`` says."""
_BLOCK = 64
"""Weights with a scale in common, as in the paper."""
_SCALES = 256
"""Scales that are themselves kept in 8 bits together, as in the paper."""


class Packed:
    """A weight (O, I) in low bits."""

    def __init__(self, weight_OI: Tensor, kind: str) -> None:
        self._packed: Any = _nf4(weight_OI) if kind == "nf4" else _int8(weight_OI)
        self._shape = tuple(weight_OI.shape)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The weight that the bits stand for."""
        # torchao's NF4 tensors have a name of their own for it
        get = getattr(self._packed, "get_original_weight", None) or self._packed.dequantize
        return get().reshape(self._shape).to(dtype)  # type: ignore[no-any-return]

    @property
    def bytes(self) -> int:
        """Memory of all that is held."""
        return _bytes(self._packed)

    def __call__(self, x: Tensor) -> Tensor:
        """The product with an input (..., I): (..., O)."""
        return _Product.apply(x, self)  # type: ignore[no-any-return]


class DryRunWeight(Packed):
    """A weight in low bits as a dry run has it: its bytes are known, and what it restores has a shape alone."""

    def __init__(self, shape_OI: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
        self._shape = shape_OI
        self._bytes = packed_bytes(shape_OI, kind, dtype)

    def restored(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._shape, dtype=dtype)

    @property
    def bytes(self) -> int:
        return self._bytes


class _Product(torch.autograd.Function):
    """x W^T, of which only x has a gradient; W is restored again for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return F.linear(x, packed.restored(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.packed.restored(gradients[0].dtype), None


def names(model: nn.Module, layout: Layout) -> list[str]:
    """Paths of the modules whose weights are held in low bits, those that are trained left out."""
    words = ("colwise", "rowwise", "replicate")
    if hasattr(model, "hf"):
        return [
            path
            for path, module in model.named_modules()
            if (is_linear(module) or isinstance(module, FrozenLinear))
            and any(path.startswith(f"{block}.") for block in model.blocks)  # type: ignore[union-attr]
        ]
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [path for path in linears if path.startswith(f"{layout.layers}.") and style_of(layout, path) in words]


def packed_bytes(shape_OI: tuple[int, int], kind: str, dtype: torch.dtype) -> int:
    """What ``Packed`` holds of a weight (O, I) that had this dtype: bits, scales, and scales of scales."""
    rows = shape_OI[0]
    numel = shape_OI[0] * shape_OI[1]
    if kind == "int8":
        return numel + rows * (torch.float32.itemsize + 1)  # a scale and a zero point for each row
    blocks = numel // _BLOCK
    table = 16  # what four bits can say
    return numel // 2 + blocks + dtype.itemsize * (blocks // _together(blocks) + 1 + table)


def check_installed(kind: str) -> None:
    """Raise ConfigError where weights are to be held in low bits and torchao is missing."""
    if kind != WHOLE:
        _torchao()


def take_out(model: nn.Module, layout: Layout, kind: str) -> None:
    """Leave the weights that will be held in low bits out of a model on the meta device, in place.

    Raises:
        ConfigError: when a weight does not divide into blocks.
    """
    if kind == WHOLE:
        return
    for path in names(model, layout):
        linear: Any = model.get_submodule(path)
        if linear.weight.requires_grad:  # lora.modules_to_save
            continue
        if kind == "nf4" and linear.weight.numel() % _BLOCK:
            rule = (
                f"keeps blocks of {_BLOCK} weights, of which the {linear.weight.numel()} of {path} are not a multiple"
            )
            raise ConfigError(Problem(OPTION, kind, rule, 'use "int8"'))
        if not isinstance(linear, FrozenLinear):
            owner, _, leaf = path.rpartition(".")
            linear = FrozenLinear(linear)
            setattr(model.get_submodule(owner), leaf, linear)
        linear.register_parameter("weight", None)


def held(module: nn.Module) -> list[FrozenLinear]:
    """The modules below this one whose weights were taken out."""
    linears = [inner for inner in module.modules() if isinstance(inner, FrozenLinear)]
    return [linear for linear in linears if linear.weight is None]


def count(module: nn.Module, config: Config) -> int:
    """For a dry run, let what was taken out be there in shape alone; the bytes that it would hold."""
    dtype = getattr(torch, config.training.dtype)
    total = 0
    for linear in held(module):
        packed = DryRunWeight((linear.out_features, linear.in_features), config.lora.base_dtype, dtype)
        linear.low_bits = packed
        total += packed.bytes
    return total


def _torchao() -> Any:
    with without_torchao_warnings():
        return libraries.load("torchao.quantization", OPTION, install='"shardtrain[qlora]"')


def _nf4(weight_OI: Tensor) -> Any:
    blocks = weight_OI.numel() // _BLOCK
    return _to_nf4()(weight_OI.contiguous(), _BLOCK, _together(blocks))


def _together(blocks: int) -> int:
    """How many scales are kept together: the largest power of two up to 256 that divides the number of blocks."""
    return next(size for size in (_SCALES >> shift for shift in range(9)) if blocks % size == 0)


@functools.cache
def _to_nf4() -> Any:
    torchao = _torchao()
    if hasattr(torchao, "to_nf4"):
        return torchao.to_nf4
    with without_torchao_warnings():
        from torchao.dtypes.nf4tensor import to_nf4  # where it was before torchao 0.18

    return to_nf4


def _int8(weight_OI: Tensor) -> Any:
    torchao = _torchao()
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    return linear.weight


def _bytes(tensor: Any) -> int:
    # A tensor subclass names the plain tensors that it is made of
    inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return sum(_bytes(getattr(tensor, name)) for name in inner) if inner else int(tensor.nbytes)
