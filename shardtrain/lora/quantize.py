"""Frozen weights in 4 or 8 bits (QLoRA: Dettmers et al. 2023), in torchao's formats, dequantized at each use.

Only linear modules in the layers are quantized, not the embedding, norms and head. A weight is dequantized
for each product, in forward and again in backward, and freed afterwards. So only one dequantized weight is in
memory at a time. Each rank stores the unsharded weights of its layers. At 0.5 or 1 byte per weight, this is
cheaper than gathering them.
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
"""Value of ``lora.base_dtype`` for weights in ``training.dtype``, without quantization."""
_BLOCK = 64
"""Number of weights per scale, as in the paper."""
_SCALES = 256
"""Number of 8-bit scales per block of scales, at most, as in the paper."""


class Packed:
    """Quantized weight (O, I)."""

    def __init__(self, weight_OI: Tensor, kind: str) -> None:
        self._packed: Any = _nf4(weight_OI) if kind == "nf4" else _int8(weight_OI)
        self._shape = tuple(weight_OI.shape)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight."""
        # torchao's NF4 tensors have a separate method for a full dequantization.
        dequantize = getattr(self._packed, "get_original_weight", None)
        if dequantize is None:
            dequantize = self._packed.dequantize
        weight: Tensor = dequantize()
        return weight.reshape(self._shape).to(dtype)

    @property
    def bytes(self) -> int:
        """Size of the quantized weight and its scales in bytes."""
        return _bytes(self._packed)

    def __call__(self, x: Tensor) -> Tensor:
        """Map an input (..., I) to its product (..., O)."""
        return _Product.apply(x, self)  # type: ignore[no-any-return]


class DryRunWeight(Packed):
    """Quantized weight of a dry run: its size is known, and ``restored`` returns an uninitialized tensor."""

    def __init__(self, shape_OI: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
        self._shape = shape_OI
        self._bytes = packed_bytes(shape_OI, kind, dtype)

    def restored(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._shape, dtype=dtype)

    @property
    def bytes(self) -> int:
        return self._bytes


class _Product(torch.autograd.Function):
    """x W^T with a gradient for x only. Backward dequantizes W again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return F.linear(x, packed.restored(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.packed.restored(gradients[0].dtype), None


def names(model: nn.Module, layout: Layout) -> list[str]:
    """Return the paths of the linear modules that can be quantized, in model order.

    All of them are in the layers.
    """
    paths = []
    # A transformers class has no tensor-parallel styles. All linear modules of its blocks can be quantized.
    if hasattr(model, "hf"):
        blocks = tuple(f"{block}." for block in model.blocks)  # type: ignore[union-attr]
        for path, module in model.named_modules():
            if not path.startswith(blocks):
                continue
            if is_linear(module) or isinstance(module, FrozenLinear):
                paths.append(path)
        return paths

    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not path.startswith(f"{layout.layers}."):
            continue
        if style_of(layout, path) in ("colwise", "rowwise", "replicate"):
            paths.append(path)
    return paths


def packed_bytes(shape_OI: tuple[int, int], kind: str, dtype: torch.dtype) -> int:
    """Return the bytes of a ``Packed`` weight (O, I) that had this dtype: data,
    scales and the scales of the scales.
    """
    rows = shape_OI[0]
    numel = shape_OI[0] * shape_OI[1]
    if kind == "int8":
        # Each row has a scale and a zero point.
        return numel + rows * (torch.float32.itemsize + 1)
    blocks = numel // _BLOCK
    # Four bits have 16 values.
    table = 16
    return numel // 2 + blocks + dtype.itemsize * (blocks // _scales_per_group(blocks) + 1 + table)


def check_installed(kind: str) -> None:
    """Raise ConfigError if ``kind`` requires torchao and it is not installed."""
    if kind != WHOLE:
        _torchao()


def remove_quantized_weights(model: nn.Module, layout: Layout, kind: str) -> None:
    """Remove the weights that will be quantized from a model on the meta device, in place.

    Raises:
        ConfigError: the size of a weight is not a multiple of the block size.
    """
    if kind == WHOLE:
        return
    for path in names(model, layout):
        linear: Any = model.get_submodule(path)
        # Modules in lora.modules_to_save are trained, so they keep their weights.
        if linear.weight.requires_grad:
            continue
        if kind == "nf4" and linear.weight.numel() % _BLOCK:
            raise ConfigError(
                Problem(
                    OPTION,
                    kind,
                    rule=f"requires a multiple of {_BLOCK} weights, and {path} has {linear.weight.numel()}",
                    fix='use "int8"',
                )
            )
        if not isinstance(linear, FrozenLinear):
            owner, _, leaf = path.rpartition(".")
            linear = FrozenLinear(linear)
            setattr(model.get_submodule(owner), leaf, linear)
        linear.register_parameter("weight", None)


def quantized_linears(module: nn.Module) -> list[FrozenLinear]:
    """Return the modules below ``module`` whose weights ``remove_quantized_weights`` has removed."""
    linears = [inner for inner in module.modules() if isinstance(inner, FrozenLinear)]
    return [linear for linear in linears if linear.weight is None]


def count(module: nn.Module, config: Config) -> int:
    """Add a ``DryRunWeight`` for each removed weight, and return the total size in bytes."""
    dtype = getattr(torch, config.training.dtype)
    total = 0
    for linear in quantized_linears(module):
        packed = DryRunWeight(
            (linear.out_features, linear.in_features), config.lora.base_dtype, dtype
        )
        linear.low_bits = packed
        total += packed.bytes
    return total


def _torchao() -> Any:
    with without_torchao_warnings():
        return libraries.load("torchao.quantization", OPTION, install='"shardtrain[qlora]"')


def _nf4(weight_OI: Tensor) -> Any:
    blocks = weight_OI.numel() // _BLOCK
    return _to_nf4()(weight_OI.contiguous(), _BLOCK, _scales_per_group(blocks))


def _scales_per_group(blocks: int) -> int:
    """Return how many scales are quantized together: the largest power of two up to 256 that divides the number of
    blocks, each of which has one scale.
    """
    size = _SCALES
    while blocks % size:
        size //= 2
    return size


@functools.cache
def _to_nf4() -> Any:
    torchao = _torchao()
    if hasattr(torchao, "to_nf4"):
        return torchao.to_nf4
    with without_torchao_warnings():
        # In versions before torchao 0.18, the function is in another module.
        from torchao.dtypes.nf4tensor import to_nf4

    return to_nf4


def _int8(weight_OI: Tensor) -> Any:
    torchao = _torchao()
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    return linear.weight


def _bytes(tensor: Any) -> int:
    # A tensor subclass lists the names of the plain tensors that it contains.
    inner_names = ()
    if hasattr(tensor, "__tensor_flatten__"):
        inner_names, _ = tensor.__tensor_flatten__()
    if not inner_names:
        return int(tensor.nbytes)
    return sum(_bytes(getattr(tensor, name)) for name in inner_names)
