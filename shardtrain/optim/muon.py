"""Muon: update hidden matrices with their orthogonalized momentum, and all other parameters with AdamW.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. Updates are scaled to the
size of AdamW's and weight decay is decoupled, as in Liu et al., "Muon is scalable for LLM training", 2025.
The iteration always uses the unsharded matrix, so the update is the same on every mesh. The momentum is
sharded like the parameter.
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

# values of the key "algorithm" of a parameter group
MUON = "muon"
ADAMW = "adamw"

# Jordan's quintic polynomial is steep at zero: five steps move singular values to about 0.7 to 1.2, not
# exactly to 1
_A = 3.4445
_B = -4.7750
_C = 2.0315
_EPS = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return the nearest matrix with singular values of about 1 (U V^T of U S V^T), by Newton-Schulz
    iteration.

    Computes in the dtype of the matrix (rows, columns). A zero matrix stays zero.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    # the Frobenius norm bounds the spectral norm, so the iteration starts with singular values up to 1
    x = x / squared_norm([matrix]).sqrt().clamp_min(_EPS).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.addmm(x, polynomial, x, beta=_A)
    return x.T if is_tall else x


def muon_groups(
    named_parameters: Iterable[tuple[str, Parameter]], config: Optimizer
) -> list[dict[str, Any]]:
    """Return parameter groups with a key "algorithm": Muon for matrices and stacks of matrices, AdamW for
    the rest.

    AdamW updates parameters with one dimension or more than three, stacks of vectors, and parameters
    whose name matches a pattern of ``config.muon_adamw_patterns``.
    """
    by_algorithm: dict[str, list[tuple[str, Parameter]]] = {MUON: [], ADAMW: []}
    for name, parameter in named_parameters:
        # A stack of vectors, such as the filters of a convolution per channel, is not a stack of matrices.
        is_stack = parameter.ndim == 3 and min(parameter.shape[1:]) > 1
        is_matrix = parameter.ndim == 2 or is_stack
        if is_matrix and not _matches(name, config.muon_adamw_patterns):
            by_algorithm[MUON].append((name, parameter))
        else:
            by_algorithm[ADAMW].append((name, parameter))
    groups = []
    for algorithm, members in by_algorithm.items():
        for group in parameter_groups(members, config.no_weight_decay, config.weight_decay):
            groups.append({**group, "algorithm": algorithm})
    return groups


def check_patterns(patterns: Sequence[str], names: list[str]) -> None:
    """Check ``optimizer.muon_adamw_patterns`` for the parameters of the unsharded model.

    Raises:
        ConfigError: a pattern that is not a default matches nothing, or the patterns leave no parameter to
            Muon.
    """
    option = "optimizer.muon_adamw_patterns"
    # a default pattern may match nothing: some models have no biases
    default_patterns = Optimizer().muon_adamw_patterns
    problems = []
    for pattern in patterns:
        if pattern in default_patterns:
            continue
        if not any(fnmatchcase(name, pattern) for name in names):
            fix = f"use a pattern of names like {', '.join(names[:3])}"
            problems.append(Problem(option, pattern, rule="matches no parameter", fix=fix))
    if names and all(_matches(name, patterns) for name in names):
        problems.append(
            Problem(
                option,
                list(patterns),
                rule="leave no parameter to Muon",
                fix='set optimizer.name = "AdamW", or use fewer patterns',
            )
        )
    if problems:
        raise ConfigError(problems)


class Muon(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer. The key "algorithm" of each group selects one of them.

    A sharded matrix is gathered on one of its ranks, and the shards of its update are sent back. This
    divides the iterations among the ranks. Replicas (``dp_replicate``) repeat the same work unless
    ``parallelism.shard_optimizer_states`` divides it.
    """

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._config = config
        self._buckets: dict[tuple[int, ...], list[Bucket]] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient (a collective if matrices are sharded).

        A matrix must have a gradient on all ranks that share it, or on none of them.

        Raises:
            ValueError: ``closure`` is not None.
        """
        if closure is not None:
            raise ValueError("Muon does not support closures; compute the gradients before step()")
        with torch.no_grad():
            for group in self.param_groups:
                parameters = []
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    parameters.append(parameter)
                    state = self.state[parameter]
                    if not state:
                        state.update(self.zero_state(parameter, group))
                if not parameters:
                    continue
                if group["algorithm"] == MUON:
                    self.update_matrices(parameters, group)
                else:
                    self._adamw(parameters, group)

    def zero_state(self, parameter: Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update, all zero: ``momentum``, or the state of
        AdamW."""
        if group["algorithm"] == MUON:
            return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
        is_fused = self._config.implementation == "fused"
        return adam_zero_state(parameter, is_fused)

    def update_matrices(self, parameters: list[Parameter], group: dict[str, Any]) -> None:
        """Update matrices and stacks of matrices, all with a gradient (a collective)."""
        # the plan is valid while the same parameters have a gradient
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            self._buckets[key] = plan(parameters)

        def direction_to_update(matrix: Tensor) -> Tensor:
            return orthogonalize(matrix, self._config.muon_steps)

        for bucket in self._buckets[key]:
            directions = [self._direction(parameter) for parameter in bucket.tensors]
            updates = bucket.map(directions, direction_to_update)
            self.apply_updates(bucket.tensors, updates, group)

    def apply_updates(
        self, parameters: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]
    ) -> None:
        """Apply weight decay and this rank's shards of orthogonalized updates."""
        lr = group["lr"]
        decay = 1 - lr * group["weight_decay"]
        for parameter, update in zip(parameters, updates, strict=True):
            # an orthogonal matrix has a root mean square of 1 / sqrt(max(rows, columns))
            larger_side = max(parameter.shape[-2:])
            scale = self._config.muon_update_rms * math.sqrt(larger_side)
            local = local_tensor(parameter)
            local.mul_(decay)
            local.add_(update.to(local.device), alpha=-lr * scale)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Update the momentum with the gradient. Return this rank's shard of the matrix to orthogonalize."""
        assert parameter.grad is not None
        decay = self._config.muon_momentum
        gradient = local_tensor(parameter.grad)
        momentum = local_tensor(self.state[parameter]["momentum"])
        momentum.lerp_(gradient, 1 - decay)
        direction = momentum
        if self._config.muon_nesterov:
            direction = gradient.lerp(momentum, decay)
        # parameters offloaded to the host are exchanged and orthogonalized on the device of the mesh
        device = parameter.device.type
        if isinstance(parameter, DTensor):
            device = parameter.device_mesh.device_type
        dtype: str = self._config.muon_dtype
        if dtype == "default":
            dtype = "float32" if device == "cpu" else "bfloat16"
            if direction.dtype == torch.float64:
                dtype = "float64"
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
