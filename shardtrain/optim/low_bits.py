"""Adam and AdamW whose state, and parameters, are held in 16 or 8 bits; each update is computed in float32.

In bfloat16 an update below 1/512 of a weight is lost, and with ``bf16_stochastic_round`` it is not: see
``ops/stochastic_rounding.py``. AdamW8bit holds both means as one byte per number, under a scale for each block of 256
along the last dimension, in the dynamic code of Dettmers et al. (2022, arXiv 2110.02861, section 2), always rounded by
chance. Blocks and chance are those of the whole tensor, so that the mesh changes no number.
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
from shardtrain.ops.accelerator import is_accelerator
from shardtrain.ops.dtensor import is_distributed, local_slices, local_tensor
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

_CHUNK = 1 << 24
"""Numbers that are updated at a time: what is computed in float32 takes memory for so many alone."""
_COMPILED_CHUNK = {True: 1 << 26, False: 1 << 28}
"""The same where it is compiled, with states in 8 bits and without: then little or none of it lies in memory, and the
host needs longer to start the kernel of a chunk than the device for 16 million numbers."""
EIGHT_BITS = "AdamW8bit"
_SHAPES = 256
"""Of parameters and of their last parts, for which an update may be compiled."""


@functools.cache
def code(signed: bool) -> tuple[float, ...]:
    """The dynamic code: 256 numbers up to 1, half of them between 0.1 and 1, and half as many in each decade below."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + (0 if signed else 1))
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)]
        numbers += [*middles, *(-middle for middle in middles)] if signed else middles
    if signed:  # all that is between -1 and 1 lies between two numbers of the code
        numbers[numbers.index(-max(numbers[2:]))] = -1.0
    return tuple(sorted(numbers))


class LowBitsAdam(torch.optim.Optimizer):
    """Adam, AdamW or AdamW8bit of parameter groups; ``names`` are the parameters' in the whole model."""

    def __init__(
        self, groups: list[dict[str, Any]], config: Optimizer, names: Mapping[Parameter, str], seed: int
    ) -> None:
        self._config = config
        self._keys = {parameter: stochastic_rounding.key_of(seed, name) for parameter, name in names.items()}
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        self._compiled: Callable[..., None] | None = None
        self._constants = Constants(
            config.name == "Adam", config.beta1, config.beta2, config.eps, config.bf16_stochastic_round
        )
        super().__init__(groups, {"lr": config.lr})
        if config.name == EIGHT_BITS:
            for parameter, name in names.items():
                _check_blocks(parameter, name)

    def zero_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first update: a count and two means, in 8 bits each with its scales."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if self._config.name == EIGHT_BITS and parameter.ndim >= 2 and parameter.numel() >= SMALLEST_8BIT_NUMEL:
                state[name] = torch.full_like(
                    parameter, code(signed).index(0.0), dtype=torch.uint8, requires_grad=False
                )
                state[f"{name}_scale"] = _scales(parameter)
            else:
                dtype = {"bfloat16": torch.bfloat16}.get(self._config.state_dtype, parameter.dtype)
                if self._config.name == EIGHT_BITS:
                    dtype = torch.float32
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter].update(self.zero_state(parameter))
                    self._update(parameter, self.state[parameter], group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, state: dict[str, Tensor], lr: float, weight_decay: float) -> None:
        step = state["step"].add_(1)
        shape = parameter.shape or torch.Size([1])
        # chance is drawn by the place of a number in the whole tensor, so that every mesh rounds alike
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        starts = [part.start for part in local_slices(parameter) or (slice(0, 1),)]
        assert parameter.grad is not None
        weight = _at_least_1d(local_tensor(parameter))
        gradient = _at_least_1d(local_tensor(parameter.grad))
        states = {name: _at_least_1d(local_tensor(tensor)) for name, tensor in state.items() if name != "step"}
        update = self._kernel(weight, states)
        begin = 0
        while begin < weight.size(0):
            numbers: tuple[Any, ...] = (lr, 1 - lr * weight_decay)
            if update is not update_part:  # a kernel is made for numbers of the host, and these change
                numbers = tuple(weight.new_full((), number, dtype=torch.float64) for number in numbers)
            # in chunks of rows: what is computed in float32 takes memory for one chunk
            most = _CHUNK if update is update_part else _COMPILED_CHUNK["exp_avg_scale" in states]
            chunk = slice(begin, min(begin + max(1, most // max(1, weight[:1].numel())), weight.size(0)))
            first = (starts[0] + begin) * strides[0] + sum(
                start * stride for start, stride in zip(starts[1:], strides[1:], strict=True)
            )
            try:
                update(
                    weight[chunk],
                    gradient[chunk],
                    {name: tensor[chunk] for name, tensor in states.items()},
                    {name: self._table(name, weight.device) for name in ("exp_avg", "exp_avg_sq")},
                    step,
                    torch.full((), self._keys[parameter], dtype=torch.int64, device=weight.device),  # type: ignore[index]
                    torch.full((), first, dtype=torch.int64, device=weight.device),
                    strides,
                    *numbers,
                    weight_decay if self._constants.is_adam else 0.0,
                    self._constants,
                )
            except torch._dynamo.exc.TorchDynamoException as error:  # raised before anything has run
                name = self._config.name
                why = str(error).splitlines()[0][:200]
                logger.warning(f"the update of {name} is not compiled, and slow: {why}")
                update = self._compiled = update_part
                continue
            begin = chunk.stop

    def _table(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._tables:
            self._tables[name, device] = torch.tensor(code(name == "exp_avg"), dtype=torch.float32, device=device)
        return self._tables[name, device]

    def _kernel(self, weight: Tensor, held: Mapping[str, Tensor]) -> Callable[..., None]:
        """What updates a part: one kernel on an accelerator, on which some eighty operations, many of them on 64-bit
        integers, take as long as the step of an 8B model whose update they are."""
        if not is_accelerator(weight.device):
            return update_part
        if "exp_avg_scale" in held and weight.size(-1) % STATE_BLOCK:
            return update_part  # cutting the last block is compiled to wrong numbers (torch 2.11 and 2.13, on a CPU)
        if self._compiled is None:
            self._compiled = _compiled(self._config.name)
        return self._compiled


def _compiled(name: str) -> Callable[..., None]:
    # blocks of 8 bits are compiled for each shape of a parameter: PyTorch 2.11 fails where sizes are symbols
    compiled = torch.compile(update_part, dynamic=name != EIGHT_BITS)

    def update(*arguments: Any) -> None:
        with torch._dynamo.config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES):
            compiled(*arguments)

    return update


class Constants(NamedTuple):
    """What of an optimizer's options a kernel is made for."""

    is_adam: bool
    beta1: float
    beta2: float
    eps: float
    rounds_by_chance: bool
    """Weights, and states, in bfloat16."""


def update_part(
    weight: Tensor,
    gradient: Tensor,
    held: Mapping[str, Tensor],
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
    """Update a part of a parameter and of its state in place, in float32.

    ``held`` are the means and their scales, ``tables`` the codes of those in 8 bits, ``key`` and ``first`` int64
    scalars that chance is drawn by: see ``stochastic_rounding``.
    """
    place = stochastic_rounding.places(weight.shape, strides, first)
    by_weight, by_mean, by_squares = stochastic_rounding.chances(key, step, place)
    w = weight.float()
    g = gradient.float()
    mean = _read(held, "exp_avg", tables)
    squares = _read(held, "exp_avg_sq", tables)
    if c.is_adam:
        g = g.add(w, alpha=weight_decay)
    else:
        w = w.mul(decay)
    # Adam, with the corrections for means that begin at zero
    mean = mean.lerp(g, 1 - c.beta1)
    squares = squares.mul(c.beta2).addcmul_(g, g, value=1 - c.beta2)
    of_mean = 1 - c.beta1**step
    of_squares = (1 - c.beta2**step).sqrt()
    w = w - lr / of_mean * mean / (squares.sqrt() / of_squares + c.eps)
    # back to the types that are stored, each rounded by chance of its own
    weight.copy_(_rounded(w, weight.dtype, by_weight, c))
    _write(held, "exp_avg", mean, by_mean, tables, c)
    _write(held, "exp_avg_sq", squares, by_squares, tables, c)


def _rounded(x: Tensor, dtype: torch.dtype, chance: Tensor, c: Constants) -> Tensor:
    if dtype == torch.bfloat16 and c.rounds_by_chance:
        return stochastic_rounding.to_bfloat16(x, chance)
    return x.to(dtype)


def _read(held: Mapping[str, Tensor], name: str, tables: Mapping[str, Tensor]) -> Tensor:
    if f"{name}_scale" not in held:
        return held[name].float()
    numbers = tables[name][held[name].int()]
    return _rows(_blocks(numbers) * held[f"{name}_scale"].unsqueeze(-1), numbers.size(-1))


def _write(
    held: Mapping[str, Tensor], name: str, x: Tensor, chance: Tensor, tables: Mapping[str, Tensor], c: Constants
) -> None:
    if f"{name}_scale" not in held:
        held[name].copy_(_rounded(x, held[name].dtype, chance, c))
        return
    blocks = _blocks(x)
    scale = blocks.abs().amax(-1)
    part = _rows(blocks / torch.where(scale > 0, scale, 1.0).unsqueeze(-1), x.size(-1))
    bits = stochastic_rounding.to_code(part, tables[name], chance)
    if name == "exp_avg_sq":  # what is not 0 does not become it: it divides
        bits = torch.where((part > 0) & (bits == 0), 1, bits)
    held[name].copy_(bits)
    held[f"{name}_scale"].copy_(scale)


def _at_least_1d(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.ndim else tensor.view(1)


def _blocks(x: Tensor) -> Tensor:
    """(..., columns) as (..., blocks, 256), zeros added."""
    missing = -x.size(-1) % STATE_BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, STATE_BLOCK))


def _rows(blocks: Tensor, columns: int) -> Tensor:
    return blocks.flatten(-2)[..., :columns].contiguous()


def _scales(parameter: Tensor) -> Tensor:
    """Zeros for each block of a parameter, distributed as it is."""
    local = local_tensor(parameter)
    zeros = torch.zeros(*local.shape[:-1], -(-local.size(-1) // STATE_BLOCK), dtype=torch.float32, device=local.device)
    if not is_distributed(parameter):
        return zeros
    shape = torch.Size([*parameter.shape[:-1], -(-parameter.size(-1) // STATE_BLOCK)])
    stride = torch.empty(shape, device="meta").stride()
    return type(parameter).from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _check_blocks(parameter: Tensor, name: str) -> None:
    """A block lies on one rank."""
    if parameter.ndim < 2 or parameter.numel() < SMALLEST_8BIT_NUMEL:
        return
    columns = local_slices(parameter)[-1]
    size = parameter.size(-1)
    if columns.start % STATE_BLOCK or (columns.stop % STATE_BLOCK and columns.stop != size):
        rule = f"keeps blocks of {STATE_BLOCK} numbers together, and the {size} columns of {name} are cut within one"
        fix = "use a smaller parallelism.tensor_parallel_degree, or AdamW"
        raise ConfigError(Problem("optimizer.name", EIGHT_BITS, rule, fix))
