"""Forward and backward of a model in float64 without a float64 copy of its weights.

Large matrices stay in float32, and ``linear`` converts them block by block. Their gradients are stored as
factors: the gradient of y = x W^T is dy^T x, and for few tokens both factors are small. The comparison
computes only the rows that it needs. All other operations (norms, attention, routers, biases) run in PyTorch
on float64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FACTORED_NUMEL = 1 << 22
"""Minimum number of elements of a matrix that stays in float32."""
BLOCK_NUMEL = 1 << 24
"""Number of elements of a matrix that are converted at a time, 128 MiB in float64."""


@dataclass
class Use:
    """One use of a matrix or of some of its rows. The gradient of rows from ``first`` on is ``left^T right``.

    For an embedding, ``ids`` are the rows and ``left`` is the gradient of the lookup.
    """

    first: int
    left: Tensor
    right: Tensor | None = None
    ids: Tensor | None = None


@dataclass
class Gradients:
    """Gradients of one backward pass in float64: factors for large matrices, full gradients for other parameters."""

    factors: dict[str, list[Use]] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)

    def rows(self, name: str, first: int, stop: int, columns: slice) -> Tensor:
        """Return a block of a gradient, viewed as a matrix with the last dimension as columns."""
        if name in self.whole:
            matrix = self.whole[name]
            return matrix.reshape(-1, matrix.shape[-1])[first:stop, columns]
        block = torch.zeros(stop - first, columns.stop - columns.start, dtype=torch.float64)
        for use in self.factors[name]:
            # A lookup adds its gradient to the rows of its ids, so only the ids in this block count.
            if use.ids is not None:
                in_block = (use.ids >= first) & (use.ids < stop)
                block.index_add_(0, use.ids[in_block] - first, use.left[in_block, columns])
                continue
            assert use.right is not None
            # A matrix may be used in parts, for example for queries, keys and values. Take the rows of this
            # use that overlap.
            low = max(first, use.first)
            high = min(stop, use.first + use.left.size(1))
            if low < high:
                part = use.left[:, low - use.first : high - use.first]
                rows_of_block = block[low - first : high - first]
                rows_of_block.addmm_(part.T, use.right[:, columns])
        return block


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, note: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.weight = weight
        ctx.note = note
        ctx.flat = flat
        # A block of rows of the weight computes a block of columns of the output.
        columns = [flat @ block.double().T for block in _blocks(weight)]
        out = torch.cat(columns, dim=1)
        # Pass the size, because -1 would be ambiguous for an input without rows.
        return out.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        flat = gradients[0]
        left = flat.reshape(-1, flat.shape[-1])
        ctx.note(left, ctx.flat)
        dx = torch.zeros_like(ctx.flat)
        first = 0
        for block in _blocks(ctx.weight):
            stop = first + len(block)
            dx.addmm_(left[:, first:stop], block.double())
            first = stop
        return dx.view(*flat.shape[:-1], ctx.weight.size(1)), None, None


class _WideProduct(torch.autograd.Function):
    """``x @ weight``. The gradient of the weight is x^T dy."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, note: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.weight = weight
        ctx.note = note
        ctx.flat = flat
        out = torch.zeros(len(flat), weight.size(1), dtype=torch.float64)
        first = 0
        for block in _blocks(weight):
            stop = first + len(block)
            out.addmm_(flat[:, first:stop], block.double())
            first = stop
        return out.view(*x.shape[:-1], weight.size(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (of_output,) = gradients
        right = of_output.reshape(-1, of_output.shape[-1])
        ctx.note(ctx.flat, right)
        columns = [right @ block.double().T for block in _blocks(ctx.weight)]
        dx = torch.cat(columns, dim=1)
        return dx.view(*of_output.shape[:-1], ctx.weight.size(0)), None, None


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _WideEmbedding(torch.autograd.Function):
    # The table has no gradient. Autograd only calls backward for a result that depends on a tensor with a
    # gradient, so use an anchor, which is zero.
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        ids: Tensor,
        weight: Tensor,
        note: Callable[[Tensor], None],
    ) -> Tensor:
        ctx.note = note
        return weight[ids].double() + anchor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (of_rows,) = gradients
        ctx.note(of_rows.reshape(-1, of_rows.shape[-1]))
        return torch.zeros((), dtype=torch.float64), None, None, None


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    """Yield blocks of rows with about ``BLOCK_NUMEL`` elements."""
    rows_per_block = max(1, BLOCK_NUMEL // weight.size(1))
    return iter(weight.detach().split(rows_per_block))


class _Wide(TorchFunctionMode):
    """Mode that computes linear layers, products and lookups of large matrices in float64.

    It applies wherever a model's code calls them.
    """

    def __init__(self, large: Mapping[str, Tensor], gradients: Gradients) -> None:
        super().__init__()
        # A module may use a view of a parameter, so matrices are recognized by their address.
        starts = []
        for name, tensor in large.items():
            starts.append((tensor.data_ptr(), tensor.numel(), name))
        self._starts = sorted(starts)
        self._gradients = gradients

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Each case records its factors in backward, when the gradient of the result is known.
        large = None
        if function is F.linear or function in _PRODUCTS or function is F.embedding:
            large = self._find(args[1])
        if large is not None and function is F.linear:
            name, first = large
            bias = kwargs.get("bias")
            if len(args) > 2:
                bias = args[2]
            uses = self._gradients.factors.setdefault(name, [])

            def note_factors(left: Tensor, right: Tensor) -> None:
                uses.append(Use(first, left, right))

            out = _WideLinear.apply(args[0], args[1], note_factors)
            if bias is not None:
                out = out + bias
            return out
        if large is not None and function in _PRODUCTS:
            name, first = large
            uses = self._gradients.factors.setdefault(name, [])

            def note_product(left: Tensor, right: Tensor) -> None:
                uses.append(Use(first, left, right))

            return _WideProduct.apply(args[0], args[1], note_product)
        if large is not None and function is F.embedding:
            name, _ = large
            ids = args[0]
            uses = self._gradients.factors.setdefault(name, [])

            def note_rows(left: Tensor) -> None:
                uses.append(Use(0, left, ids=ids.reshape(-1)))

            anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
            return _WideEmbedding.apply(anchor, ids, args[1].detach(), note_rows)
        # Code that computes in at least float32 must not convert float64 to float32.
        narrows = function is torch.Tensor.float
        if function is torch.Tensor.to:
            narrows = torch.float32 in (*args[1:], *kwargs.values())
        if narrows and args[0].dtype == torch.float64:
            return args[0]
        return function(*args, **kwargs)

    def _find(self, weight: Any) -> tuple[str, int] | None:
        """Return the large parameter that contains a matrix, and the matrix's first row in it, or None."""
        if not isinstance(weight, Tensor) or weight.dtype != torch.float32 or weight.ndim != 2:
            return None
        for start, numel, name in self._starts:
            offset, rest = divmod(weight.data_ptr() - start, weight.element_size())
            is_inside = 0 <= offset < numel
            if is_inside and not rest and weight.is_contiguous():
                return name, offset // weight.size(1)
        return None


def loss_and_gradients(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor]
) -> tuple[float, Gradients]:
    """Compute ``loss_of(model)`` and all gradients in float64.

    Small parameters of the float32 model are converted in place.

    Raises:
        RuntimeError: a large matrix is used by another operation than ``linear``, ``@`` and ``embedding``.
    """
    # Large matrices are not changed and get no gradient from autograd. Convert everything else to
    # float64 in place.
    gradients = Gradients()
    large: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{key}" if module_name else key
            if parameter.ndim > 1 and parameter.numel() >= FACTORED_NUMEL:
                parameter.requires_grad_(False)
                large.setdefault(name, parameter)
            elif parameter.dtype != torch.float64:
                parameter.data = parameter.data.double()
    # A matrix with two names, such as a tied embedding and head, keeps its first name.
    unique: dict[int, str] = {}
    for name, tensor in large.items():
        unique.setdefault(tensor.data_ptr(), name)
    for _, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.double()

    matrices = {name: large[name] for name in unique.values()}
    with _Wide(matrices, gradients):
        loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]

    # A matrix that is used in another way has no factors, and its gradient would be missing.
    unused = [name for name in unique.values() if name not in gradients.factors]
    if unused:
        raise RuntimeError(f"{unused[0]} is used by another operation than linear, @ and embedding")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients.whole[name] = parameter.grad
    return float(loss.detach()), gradients


def write(gradients: Gradients, path: str) -> None:
    """Write gradients to a safetensors file."""
    from safetensors.torch import save_file

    parts: dict[str, Tensor] = {}
    for name, tensor in gradients.whole.items():
        parts[f"whole/{name}"] = tensor.contiguous()
    for name, uses in gradients.factors.items():
        for number, use in enumerate(uses):
            key = f"{name}/{number}/{use.first}"
            parts[f"left/{key}"] = use.left.contiguous().clone()
            if use.ids is not None:
                parts[f"ids/{key}"] = use.ids.contiguous().clone()
                continue
            assert use.right is not None
            parts[f"right/{key}"] = use.right.contiguous().clone()
    save_file(parts, path)


def read(path: str) -> Gradients:
    """Read gradients that ``write`` has written."""
    from safetensors.torch import load_file

    parts = load_file(path)
    gradients = Gradients()
    for key, tensor in parts.items():
        kind, _, rest = key.partition("/")
        if kind == "whole":
            gradients.whole[rest] = tensor
        elif kind == "left":
            name, _, first = rest.rsplit("/", 2)
            right = parts.get(f"right/{rest}")
            ids = parts.get(f"ids/{rest}")
            uses = gradients.factors.setdefault(name, [])
            uses.append(Use(int(first), tensor, right, ids))
    return gradients
