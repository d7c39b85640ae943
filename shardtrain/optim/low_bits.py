"""Adam and AdamW whose state, and parameters, are held in 16 or 8 bits; each update is computed in float32.

In bfloat16 an update below 1/512 of a weight is lost, and with ``bf16_stochastic_round`` it is not: see
``ops/stochastic_rounding.py``. AdamW8bit holds both means as one byte per number, under a scale for each block of 256
along the last dimension, in the dynamic code of Dettmers et al. (2022, arXiv 2110.02861, section 2), always rounded by
chance. Blocks and chance are those of the whole tensor, so that the mesh changes no number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from shardtrain.config.derived import BLOCK_OF_8_BITS
from shardtrain.config.schema import Optimizer
from shardtrain.ops import stochastic_rounding
from shardtrain.ops.dtensor import is_distributed, local_slices, local_tensor
from shardtrain.utils.errors import ConfigError, Problem

BLOCK = BLOCK_OF_8_BITS
SMALLEST = 4096
"""Numbers of a parameter from which on its state is in 8 bits, as in torchao and bitsandbytes."""
_CHUNK = 1 << 24
"""Numbers that are updated at a time: what is computed in float32 takes memory for so many alone."""
EIGHT_BITS = "AdamW8bit"


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


def is_wanted(config: Optimizer) -> bool:
    """Whether the optimizer of a config is one of this file."""
    plain = config.state_dtype == "default" and not config.bf16_stochastic_round
    return config.name == EIGHT_BITS or (config.name in ("Adam", "AdamW") and not plain)


class LowBitsAdam(torch.optim.Optimizer):
    """Adam, AdamW or AdamW8bit of parameter groups; ``names`` are the parameters' in the whole model."""

    def __init__(
        self, groups: list[dict[str, Any]], config: Optimizer, names: Mapping[Parameter, str], seed: int
    ) -> None:
        self._config = config
        self._keys = {parameter: stochastic_rounding.key_of(seed, name) for parameter, name in names.items()}
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        super().__init__(groups, {"lr": config.lr})
        if config.name == EIGHT_BITS:
            for parameter, name in names.items():
                _check_blocks(parameter, name)

    def zero_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first update: a count and two means, in 8 bits each with its scales."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if self._config.name == EIGHT_BITS and parameter.ndim >= 2 and parameter.numel() >= SMALLEST:
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
        c, step = self._config, state["step"].add_(1)
        of_mean, of_squares = 1 - c.beta1**step, (1 - c.beta2**step).sqrt()
        shape = parameter.shape or torch.Size([1])
        slices = local_slices(parameter) or (slice(0, 1),)
        weight, gradient = (_at_least_1d(local_tensor(tensor)) for tensor in (parameter, parameter.grad))  # type: ignore[arg-type]
        held = {name: _at_least_1d(local_tensor(tensor)) for name, tensor in state.items() if name != "step"}
        rows = max(1, _CHUNK // max(1, weight[:1].numel()))
        for start in range(0, weight.size(0), rows):
            chunk = slice(start, min(start + rows, weight.size(0)))
            in_whole = (slice(slices[0].start + chunk.start, slices[0].start + chunk.stop), *slices[1:])
            place = stochastic_rounding.places(shape, in_whole, weight.device)
            by_weight, by_mean, by_squares = stochastic_rounding.chances(self._keys[parameter], step, place)  # type: ignore[index]
            w, g = weight[chunk].float(), gradient[chunk].float()
            mean, squares = self._read(held, "exp_avg", chunk), self._read(held, "exp_avg_sq", chunk)
            if c.name == "Adam":
                g = g.add(w, alpha=weight_decay)
            else:
                w = w.mul(1 - lr * weight_decay)
            mean = mean.lerp(g, 1 - c.beta1)
            squares = squares.mul(c.beta2).addcmul_(g, g, value=1 - c.beta2)
            w = w - lr / of_mean * mean / (squares.sqrt() / of_squares + c.eps)
            weight[chunk] = self._rounded(w, weight.dtype, by_weight)
            self._write(held, "exp_avg", chunk, mean, by_mean)
            self._write(held, "exp_avg_sq", chunk, squares, by_squares)

    def _rounded(self, x: Tensor, dtype: torch.dtype, chance: Tensor) -> Tensor:
        if dtype == torch.bfloat16 and self._config.bf16_stochastic_round:
            return stochastic_rounding.to_bfloat16(x, chance)
        return x.to(dtype)

    def _read(self, held: Mapping[str, Tensor], name: str, chunk: slice) -> Tensor:
        if f"{name}_scale" not in held:
            return held[name][chunk].float()
        bits, scale = held[name][chunk], held[f"{name}_scale"][chunk]
        return self._table(name, bits.device)[bits.int()] * _along(scale, bits.size(-1))

    def _table(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._tables:
            self._tables[name, device] = torch.tensor(code(name == "exp_avg"), dtype=torch.float32, device=device)
        return self._tables[name, device]

    def _write(self, held: Mapping[str, Tensor], name: str, chunk: slice, x: Tensor, chance: Tensor) -> None:
        if f"{name}_scale" not in held:
            held[name][chunk] = self._rounded(x, held[name].dtype, chance)
            return
        missing = -x.size(-1) % BLOCK
        scale = (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK)).abs().amax(-1)
        table = self._table(name, x.device)
        part = x / _along(torch.where(scale > 0, scale, 1.0), x.size(-1))
        bits = stochastic_rounding.to_code(part, table, chance)
        if name == "exp_avg_sq":  # what is not 0 does not become it: it divides
            bits = torch.where((part > 0) & (bits == 0), 1, bits)
        held[name][chunk], held[f"{name}_scale"][chunk] = bits, scale


def _at_least_1d(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.ndim else tensor.view(1)


def _along(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, -1)[..., :columns]


def _scales(parameter: Tensor) -> Tensor:
    """Zeros for each block of a parameter, distributed as it is."""
    local = local_tensor(parameter)
    zeros = torch.zeros(*local.shape[:-1], -(-local.size(-1) // BLOCK), dtype=torch.float32, device=local.device)
    if not is_distributed(parameter):
        return zeros
    shape = torch.Size([*parameter.shape[:-1], -(-parameter.size(-1) // BLOCK)])
    stride = torch.empty(shape, device="meta").stride()
    return type(parameter).from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _check_blocks(parameter: Tensor, name: str) -> None:
    """A block lies on one rank."""
    if parameter.ndim < 2 or parameter.numel() < SMALLEST:
        return
    columns, size = local_slices(parameter)[-1], parameter.size(-1)
    if columns.start % BLOCK or (columns.stop % BLOCK and columns.stop != size):
        rule = f"keeps blocks of {BLOCK} numbers together, and the {size} columns of {name} are cut within one"
        fix = "use a smaller parallelism.tensor_parallel_degree, or AdamW"
        raise ConfigError(Problem("optimizer.name", EIGHT_BITS, rule, fix))
