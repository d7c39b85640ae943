"""Adam and AdamW with state and parameters in 16 or 8 bits. Updates are computed in float32.

Rounding to nearest in bfloat16 loses an update below 1/512 of a weight. ``bf16_stochastic_round`` keeps it
on average: see ``ops/stochastic_rounding.py``. AdamW8bit stores both means as one byte per element, with a
scale per block of 256 elements along the last dimension. It uses the dynamic code of Dettmers et al. (2022,
arXiv 2110.02861, section 2), and always rounds stochastically. Blocks and random numbers are those of the
unsharded tensor, so results do not depend on the mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from shardtrain.config.schema import Optimizer
from shardtrain.facts.optimizers import SMALLEST_8BIT_NUMEL, STATE_BLOCK
from shardtrain.ops import stochastic_rounding
from shardtrain.ops.accelerator import is_accelerator, is_apple
from shardtrain.ops.dtensor import is_distributed, local_slices, local_tensor
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

_CHUNK = 1 << 24
"""Elements per update. Bounds the memory of the float32 temporaries."""
_COMPILED_CHUNK = 1 << 28
"""Elements per update of a compiled kernel. It has few temporaries or none, and the launch of a kernel takes
longer than the update of 16 million elements."""
_COMPILED_CHUNK_8BIT = 1 << 26
"""The same with 8-bit states."""
EIGHT_BITS = "AdamW8bit"
_RECOMPILE_LIMIT = 256
"""Maximum number of different shapes (of parameters and of their last chunks) for which the update is compiled."""


@functools.cache
def code(signed: bool) -> tuple[float, ...]:
    """Return the codebook of the dynamic 8-bit format: 256 numbers up to 1, half of them between 0.1 and 1,
    half as many in each lower decade.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        # a signed codebook needs the other half of its numbers for negative values
        count = 2**decade if signed else 2 ** (decade + 1)
        largest = 10.0 ** (decade - 6)
        for part in range(count):
            center = largest * (0.1 + 0.9 * (part + 0.5) / count)
            numbers.append(center)
            if signed:
                numbers.append(-center)
    # replace the smallest number with -1, so every value in [-1, 1] lies between two entries of the codebook
    if signed:
        smallest = -max(numbers[2:])
        numbers[numbers.index(smallest)] = -1.0
    return tuple(sorted(numbers))


class LowBitsAdam(torch.optim.Optimizer):
    """Adam, AdamW or AdamW8bit of parameter groups.

    ``names`` are the parameters' names in the unsharded model.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: Optimizer,
        names: Mapping[Parameter, str],
        seed: int,
    ) -> None:
        self._config = config
        # Random numbers depend on the name, so they are the same on every mesh.
        self._keys: dict[Tensor, int] = {}
        for parameter, name in names.items():
            self._keys[parameter] = stochastic_rounding.key_of(seed, name)
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        self._compiled: Callable[..., None] | None = None
        self._constants = Constants(
            is_adam=config.name == "Adam",
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            rounds_stochastically=config.bf16_stochastic_round,
        )
        super().__init__(groups, {"lr": config.lr})
        # A block that is split between ranks would have two scales.
        if config.name == EIGHT_BITS:
            for parameter, name in names.items():
                _check_blocks(parameter, name)

    def zero_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update: the step count, both moments and, for
        moments in 8 bits, their scales.
        """
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        is_8bit = self._config.name == EIGHT_BITS
        dtype = parameter.dtype
        if is_8bit:
            dtype = torch.float32
        elif self._config.state_dtype == "bfloat16":
            dtype = torch.bfloat16
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            # small parameters and vectors keep their state in float32
            if is_8bit and _has_blocks(parameter):
                zero = code(signed).index(0.0)
                state[name] = torch.full_like(
                    parameter, zero, dtype=torch.uint8, requires_grad=False
                )
                state[f"{name}_scale"] = _scales(parameter)
            else:
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.zero_state(parameter))
                self._update(parameter, state, group["lr"], group["weight_decay"])

    def _update(
        self, parameter: Tensor, state: dict[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        """Update the local shard of a parameter and of its state, in chunks of rows."""
        step = state["step"].add_(1)
        strides, row_offset, column_offset = _index_in_unsharded(parameter)
        assert parameter.grad is not None
        weight = _at_least_1d(local_tensor(parameter))
        gradient = _at_least_1d(local_tensor(parameter.grad))
        states = {}
        for name, tensor in state.items():
            if name != "step":
                states[name] = _at_least_1d(local_tensor(tensor))
        # Adam adds the decay to the gradient. AdamW shrinks the weight instead.
        constants = self._constants
        l2_penalty = weight_decay if constants.is_adam else 0.0
        update = self._kernel(weight, states)
        begin = 0
        while begin < weight.size(0):
            rate: Any = lr
            decay: Any = 1 - lr * weight_decay
            chunk_elements = _CHUNK
            if update is not update_part:
                # tensors, because a kernel would be recompiled for each new Python number
                rate = weight.new_full((), rate, dtype=torch.float64)
                decay = weight.new_full((), decay, dtype=torch.float64)
                is_8bit = "exp_avg_scale" in states
                chunk_elements = _COMPILED_CHUNK_8BIT if is_8bit else _COMPILED_CHUNK
            row_elements = max(1, weight[:1].numel())
            chunk_rows = max(1, chunk_elements // row_elements)
            end = min(begin + chunk_rows, weight.size(0))
            first = (row_offset + begin) * strides[0] + column_offset
            key = self._keys[parameter]
            device = weight.device
            states_of_chunk = {name: tensor[begin:end] for name, tensor in states.items()}
            tables = {name: self._table(name, device) for name in ("exp_avg", "exp_avg_sq")}
            try:
                update(
                    weight[begin:end],
                    gradient[begin:end],
                    states_of_chunk,
                    tables,
                    step,
                    torch.full((), key, dtype=torch.int64, device=device),
                    torch.full((), first, dtype=torch.int64, device=device),
                    strides,
                    rate,
                    decay,
                    l2_penalty,
                    constants,
                )
            # compilation fails before any part of the update has run, so repeat the chunk without it
            except torch._dynamo.exc.TorchDynamoException as error:
                name = self._config.name
                cause = str(error).splitlines()[0][:200]
                logger.warning(f"the update of {name} cannot be compiled, so it is slow: {cause}")
                update = self._compiled = update_part
                continue
            begin = end

    # Codebooks are created once per device.
    def _table(self, name: str, device: torch.device) -> Tensor:
        key = (name, device)
        if key not in self._tables:
            codebook = code(signed=name == "exp_avg")
            self._tables[key] = torch.tensor(codebook, dtype=torch.float32, device=device)
        return self._tables[key]

    def _kernel(self, weight: Tensor, states: Mapping[str, Tensor]) -> Callable[..., None]:
        """Return the function that updates a chunk: compiled on an accelerator, ``update_part`` otherwise.

        It is not compiled on Apple's GPUs, where PyTorch's compiler is incomplete.

        Not compiled, the update has about eighty operations, many on 64-bit integers, which take as long as
        a training step of an 8B model.
        """
        if not is_accelerator(weight.device) or is_apple(weight.device):
            return update_part
        # torch 2.11 and 2.13 compile a truncated last block to wrong numbers (seen on a CPU)
        if "exp_avg_scale" in states and weight.size(-1) % STATE_BLOCK:
            return update_part
        if self._compiled is None:
            self._compiled = _compiled(self._config.name)
        return self._compiled


def _compiled(name: str) -> Callable[..., None]:
    # 8-bit blocks are compiled for each parameter shape: PyTorch 2.11 fails with symbolic sizes
    compiled = torch.compile(update_part, dynamic=name != EIGHT_BITS)

    def update(*arguments: Any) -> None:
        with torch._dynamo.config.patch(
            recompile_limit=_RECOMPILE_LIMIT, accumulated_recompile_limit=_RECOMPILE_LIMIT
        ):
            compiled(*arguments)

    return update


class Constants(NamedTuple):
    """Optimizer options that are compile-time constants of a kernel."""

    is_adam: bool
    beta1: float
    beta2: float
    eps: float
    rounds_stochastically: bool
    """True if weights and states in bfloat16 are rounded stochastically."""


def update_part(
    weight: Tensor,
    gradient: Tensor,
    states: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    step: Tensor,
    key: Tensor,
    first: Tensor,
    strides: Sequence[int],
    lr: float | Tensor,
    decay: float | Tensor,
    weight_decay: float,
    c: Constants,
) -> None:
    """Update a chunk of a parameter and of its state in place, in float32.

    Args:
        states: the means, and the scales of 8-bit means.
        tables: the codes of 8-bit means.
        step: number of updates, with this one.
        key: int64 scalar, the seed of random numbers; see ``stochastic_rounding``.
        first: int64 scalar, index of the chunk's first element in the unsharded tensor.
        strides: of the unsharded tensor.
        decay: factor of the weights for AdamW's decoupled weight decay.
        weight_decay: weight decay of Adam, which is added to the gradient.
    """
    place = stochastic_rounding.places(weight.shape, strides, first)
    weight_random, mean_random, squares_random = stochastic_rounding.chances(key, step, place)
    w = weight.float()
    g = gradient.float()
    # Compute in float32, whatever the stored dtypes are.
    mean = _read(states, "exp_avg", tables)
    squares = _read(states, "exp_avg_sq", tables)
    if c.is_adam:
        g = g.add(w, alpha=weight_decay)
    else:
        w = w.mul(decay)
    # Adam with bias correction
    mean = mean.lerp(g, 1 - c.beta1)
    squares = squares.mul(c.beta2).addcmul_(g, g, value=1 - c.beta2)
    mean_correction = 1 - c.beta1**step
    root_correction = (1 - c.beta2**step).sqrt()
    w = w - lr / mean_correction * mean / (squares.sqrt() / root_correction + c.eps)
    # round to the stored dtypes, each with its own random numbers
    weight.copy_(_rounded(w, weight.dtype, weight_random, c))
    _write(states, "exp_avg", mean, mean_random, tables, c)
    _write(states, "exp_avg_sq", squares, squares_random, tables, c)


def _rounded(x: Tensor, dtype: torch.dtype, random: Tensor, c: Constants) -> Tensor:
    if dtype == torch.bfloat16 and c.rounds_stochastically:
        return stochastic_rounding.to_bfloat16(x, random)
    return x.to(dtype)


def _read(states: Mapping[str, Tensor], name: str, tables: Mapping[str, Tensor]) -> Tensor:
    """Return a mean in float32."""
    stored = states[name]
    # States that are not in 8 bits have no scale.
    if f"{name}_scale" not in states:
        return stored.float()
    numbers = tables[name][stored.int()]
    scale = states[f"{name}_scale"].unsqueeze(-1)
    return _rows(_blocks(numbers) * scale, numbers.size(-1))


def _write(
    states: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    random: Tensor,
    tables: Mapping[str, Tensor],
    c: Constants,
) -> None:
    """Round a mean to the stored dtype, and write it to its state."""
    if f"{name}_scale" not in states:
        states[name].copy_(_rounded(x, states[name].dtype, random, c))
        return
    blocks = _blocks(x)
    # Each block is divided by its largest element, so the codebook covers it. Blocks of zeros stay zeros.
    scale = blocks.abs().amax(-1)
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    scaled = _rows(blocks / divisor, x.size(-1))
    bits = stochastic_rounding.to_code(scaled, tables[name], random)
    # a positive value must not become 0, because it is a divisor
    if name == "exp_avg_sq":
        bits = torch.where((scaled > 0) & (bits == 0), 1, bits)
    states[name].copy_(bits)
    states[f"{name}_scale"].copy_(scale)


def _index_in_unsharded(parameter: Tensor) -> tuple[list[int], int, int]:
    """Return the strides of the unsharded tensor, the first row of this rank's shard, and the offset of its
    first column.

    Random numbers depend on the index of an element in the unsharded tensor, so every mesh rounds alike.
    """
    shape = parameter.shape or torch.Size([1])
    # Strides of a contiguous tensor.
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if parameter.ndim == 0:
        return strides, 0, 0
    slices = local_slices(parameter)
    column_offset = 0
    for part, stride in zip(slices[1:], strides[1:], strict=True):
        column_offset += part.start * stride
    return strides, slices[0].start, column_offset


def _at_least_1d(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.ndim == 0:
        return tensor.view(1)
    return tensor


def _blocks(x: Tensor) -> Tensor:
    """Reshape (..., columns) to (..., blocks, 256), padded with zeros."""
    padding = -x.size(-1) % STATE_BLOCK
    if padding:
        x = F.pad(x, (0, padding))
    return x.unflatten(-1, (-1, STATE_BLOCK))


def _rows(blocks: Tensor, columns: int) -> Tensor:
    """Inverse of ``_blocks``."""
    return blocks.flatten(-2)[..., :columns].contiguous()


def _scales(parameter: Tensor) -> Tensor:
    """Return a zero scale for each block of a parameter, with the parameter's placements."""
    local = local_tensor(parameter)
    # A shard contains entire blocks: see ``_check_blocks``.
    local_blocks = -(-local.size(-1) // STATE_BLOCK)
    zeros = torch.zeros(*local.shape[:-1], local_blocks, dtype=torch.float32, device=local.device)
    if not is_distributed(parameter):
        return zeros
    total_blocks = -(-parameter.size(-1) // STATE_BLOCK)
    shape = torch.Size([*parameter.shape[:-1], total_blocks])
    stride = torch.empty(shape, device="meta").stride()
    return type(parameter).from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _has_blocks(parameter: Tensor) -> bool:
    """True if AdamW8bit stores the state of this parameter in 8 bits."""
    return parameter.ndim >= 2 and parameter.numel() >= SMALLEST_8BIT_NUMEL


def _check_blocks(parameter: Tensor, name: str) -> None:
    """Raise ConfigError if a block of 8-bit state is split between ranks."""
    if not _has_blocks(parameter):
        return
    columns = local_slices(parameter)[-1]
    size = parameter.size(-1)
    splits_at_start = columns.start % STATE_BLOCK != 0
    # the last block of a row may be shorter
    splits_at_stop = columns.stop % STATE_BLOCK != 0 and columns.stop != size
    if splits_at_start or splits_at_stop:
        rule = (
            f"requires each block of {STATE_BLOCK} columns on one rank, but the sharding of {name} with {size} columns "
            "splits a block"
        )
        fix = "use a smaller parallelism.tensor_parallel_degree, or AdamW"
        raise ConfigError(Problem("optimizer.name", EIGHT_BITS, rule, fix))
