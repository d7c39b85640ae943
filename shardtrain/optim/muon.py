"""Muon: the update of a hidden matrix is its momentum made orthogonal; all other parameters are AdamW's.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; scaled to the size of AdamW's updates
and with decoupled decay as in Liu et al., "Muon is scalable for LLM training", 2025. The iteration always sees a matrix
as a whole, so the update is the same on every mesh. Momentum is split like the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from shardtrain.config.schema import Optimizer
from shardtrain.ops.dtensor import local_tensor, squared_norm
from shardtrain.optim.adamw import adam_zero_state
from shardtrain.optim.gather_matrices import Bucket, plan
from shardtrain.optim.param_groups import parameter_groups
from shardtrain.utils.errors import ConfigError, Problem

# what the key "algorithm" of a parameter group says
MUON = "muon"
ADAMW = "adamw"

# Jordan's quintic: steep at zero; it takes singular values to about 0.7 to 1.2 within five steps, not to exactly 1
_A = 3.4445
_B = -4.7750
_C = 2.0315
_EPS = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """The nearest matrix with all singular values about 1 (U V^T of U S V^T), by Newton-Schulz iteration.

    Works in the type of the matrix (rows, columns), which is not changed. A matrix of zeros stays zero.
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    # the Frobenius norm bounds the spectral norm, so that the iteration starts at 1 or below
    x = x / squared_norm([matrix]).sqrt().clamp_min(_EPS).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.addmm(x, polynomial, x, beta=_A)
    return x.T if tall else x


def muon_groups(
    named_parameters: Sequence[tuple[str, Parameter]], config: Optimizer, all_names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups with a key "algorithm": Muon for matrices and stacks of matrices, AdamW for the rest.

    AdamW's are the parameters of one dimension (or more than three) and those whose name matches a pattern of
    ``config.muon_adamw_patterns``. ``all_names`` are the parameters of the whole model, see ``parameter_groups``.

    Raises:
        ConfigError: when a pattern other than the default ones matches nothing, or the patterns leave nothing.
    """
    patterns = config.muon_adamw_patterns
    names = [name for name, _ in named_parameters] if all_names is None else list(all_names)
    # the default patterns fit most models; a model without biases is not a mistake of the user
    usual = Optimizer().muon_adamw_patterns
    unused = [p for p in patterns if p not in usual and not any(fnmatchcase(name, p) for name in names)]
    fix = f"use a pattern of names like {', '.join(names[:3])}"
    problems = [Problem("optimizer.muon_adamw_patterns", p, "matches no parameter", fix) for p in unused]
    if names and all(_matches(name, patterns) for name in names):
        fix = 'set optimizer.name = "AdamW", or use fewer patterns'
        problems.append(Problem("optimizer.muon_adamw_patterns", list(patterns), "leave no parameter to Muon", fix))
    if problems:
        raise ConfigError(problems)
    chosen: dict[str, list[tuple[str, Parameter]]] = {MUON: [], ADAMW: []}
    for name, parameter in named_parameters:
        hidden = parameter.ndim in (2, 3) and not _matches(name, patterns)
        chosen[MUON if hidden else ADAMW].append((name, parameter))
    return [
        {**group, "algorithm": algorithm}
        for algorithm, members in chosen.items()
        for group in parameter_groups(members, config.no_weight_decay, config.weight_decay)
    ]


class Muon(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer; each group of ``muon_groups`` says which of them updates it.

    Where matrices are split, each is gathered to one of the ranks that share it and the parts of its update go back, so
    that the iterations are divided among those ranks. Replicas (``dp_replicate``) repeat each other's work unless
    ``parallelism.shard_optimizer_states`` divides it.
    """

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._config = config
        self._buckets: dict[tuple[int, ...], list[Bucket]] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient (a collective where matrices are split).

        All ranks that share a matrix must agree on whether it has a gradient. There are no closures here.

        Raises:
            ValueError: for a closure.
        """
        if closure is not None:
            raise ValueError("Muon evaluates no closure; compute the gradients before step()")
        with torch.no_grad():
            for group in self.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter].update(self.zero_state(parameter, group))
                if parameters and group["algorithm"] == MUON:
                    self._muon(parameters, group)
                elif parameters:
                    self._adamw(parameters, group)

    def zero_state(self, parameter: Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first update, all zero: ``momentum``, or that of AdamW."""
        if group["algorithm"] == MUON:
            return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
        return adam_zero_state(parameter, self._config.implementation == "fused")

    def _muon(self, parameters: list[Parameter], group: dict[str, Any]) -> None:
        # the plan holds as long as the same parameters have a gradient
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            self._buckets[key] = plan(parameters)
        steps = self._config.muon_steps
        lr = group["lr"]
        for bucket in self._buckets[key]:
            directions = [self._direction(parameter) for parameter in bucket.tensors]
            updates = bucket.map(directions, lambda matrix: orthogonalize(matrix, steps))
            for parameter, update in zip(bucket.tensors, updates, strict=True):
                # an orthogonal matrix has a root mean square of 1 / sqrt(max(rows, columns))
                scale = self._config.muon_update_rms * math.sqrt(max(parameter.shape[-2:]))
                local = local_tensor(parameter)
                local.mul_(1 - lr * group["weight_decay"])
                local.add_(update.to(local.device), alpha=-lr * scale)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Advance the momentum by the gradient; this rank's part of what is to be made orthogonal, ready to be sent."""
        assert parameter.grad is not None
        decay = self._config.muon_momentum
        gradient = local_tensor(parameter.grad)
        momentum = local_tensor(self.state[parameter]["momentum"])
        momentum.lerp_(gradient, 1 - decay)
        direction = gradient.lerp(momentum, decay) if self._config.muon_nesterov else momentum
        # parameters that are offloaded to the host travel and iterate on the mesh's device
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
        dtype = self._config.muon_dtype
        if dtype == "default":
            dtype = "float32" if device == "cpu" else "bfloat16"
        return direction.to(device, getattr(torch, dtype))

    def _adamw(self, parameters: list[Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,  # type: ignore[arg-type]
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=self._config.implementation == "fused",
            foreach=self._config.implementation == "foreach",
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._config.eps,
            maximize=False,
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
