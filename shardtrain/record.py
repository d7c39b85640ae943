"""Record gradients and weights of any training loop. ``shardtrain verify --compare`` compares two recordings.

    from shardtrain.record import Recorder

    recorder = Recorder("recordings/two_ranks", model)
    for step in range(10):
        loss = ...
        loss.backward()
        recorder.write(step, loss=loss, num_tokens=num_tokens, lr=lr)  # before the optimizer's step
        optimizer.step()
        optimizer.zero_grad()

A recording has, for each parameter, the norm and eight random projections of its gradient and of its weights. The
random signs depend only on the parameter's name and the position of an element in the full tensor. So the parts of a
sharded tensor add up to the projections of the full one, whatever the mesh, and the mean squared difference of two
projections estimates the squared distance of two tensors (Johnson and Lindenstrauss 1984; signs as in Achlioptas
2003). Each rank writes its own file, and ranks communicate only about gradients that are partial sums.

DTensors (FSDP2, tensor parallelism) and plain tensors (one process, DDP) are recorded. Flattened parameters (FSDP1,
ZeRO-3) are not supported: their names and shapes depend on the number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.ops.dtensor import is_distributed, local_slices, local_tensor
from shardtrain.utils import atomic_io, variables
from shardtrain.utils.errors import ConfigError, Problem

FORMAT = 1
NUM_PROJECTIONS = 8
CHUNK_NUMEL = 1 << 18
"""Elements that are projected at once. In float64 they take 2 MiB."""
PRECISIONS = ("float64", "float32", "float16", "bfloat16", "float8")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Modules that compile, FSDP and activation checkpointing add to the path of a parameter."""
_OUTER_WRAPPERS = ("module", "_forward_module")
"""Modules that DDP and Lightning Fabric add at the start of the path."""
# Multipliers of the SplitMix64 generator (Steele, Lea and Flood 2014), as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class Recorder:
    """Recording of one rank, in ``folder/rank-N.jsonl``. Creates the folder and replaces an earlier file.

    Args:
        folder: Folder of the recording, the same on all ranks.
        model: The model, after it was wrapped and sharded.
        precision: Lowest precision of the computation, one of ``PRECISIONS``. It determines which differences
            count as rounding.
        data_rank: Number of the data that this rank trains on. Ranks that split the model and compute the loss of the
            same tokens (tensor and pipeline parallelism) have the same number. Ranks of context parallelism have
            different tokens, so they have different numbers. The default is the rank itself.
        seed: Seed of the random projections. Recordings with different seeds cannot be compared.

    Raises:
        ConfigError: the model has flattened parameters, or the precision is unknown.
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        precision: str = "float32",
        data_rank: int | None = None,
        seed: int = 0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(
                Problem(
                    "precision", precision, f"must be one of {', '.join(PRECISIONS)}", "correct it"
                )
            )
        self._parameters = _named(model)
        self._seed = seed
        rank, num_ranks = _rank_and_size()
        self._path = Path(folder) / f"rank-{rank}.jsonl"
        shapes = {name: list(parameter.shape) for name, parameter in self._parameters.items()}
        header = {
            "format": FORMAT,
            "rank": rank,
            "num_ranks": num_ranks,
            "data_rank": rank if data_rank is None else data_rank,
            "seed": seed,
            "precision": precision,
            "torch": torch.__version__,
            "shapes": shapes,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write(self._path, json.dumps(header) + "\n")

    @torch.no_grad()
    def write(
        self,
        step: int,
        loss: float | Tensor | None = None,
        num_tokens: int | Tensor | None = None,
        lr: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        samples: Sequence[int | str] | Tensor | None = None,
    ) -> None:
        """Record a step. Call it on all ranks, after the last backward pass and before the optimizer's step.

        Args:
            step: Number of the step.
            loss: This rank's mean loss per token.
            num_tokens: Number of tokens with a loss on this rank, over all micro-batches of the step.
            lr: Learning rate.
            grad_norm: Norm of all gradients, as the program computed it.
            samples: Identifiers of this rank's samples in this step, such as their indexes in the dataset. With context
                parallelism, the first rank of each group passes them and the others pass ``[]``.
        """
        gradients: dict[str, list[Any]] = {}
        weights: dict[str, list[Any]] = {}
        for name, parameter in self._parameters.items():
            weights[name] = summary(name, parameter, self._seed)
            if parameter.grad is not None:
                gradients[name] = summary(name, parameter.grad, self._seed)
        record = {
            "step": step,
            "loss": None if loss is None else float(loss),
            "num_tokens": None if num_tokens is None else int(num_tokens),
            "lr": None if lr is None else float(lr),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "samples": None
            if samples is None
            else [one if isinstance(one, str) else int(one) for one in samples],
            "gradients": gradients,
            "weights": weights,
        }
        # JSON has no NaN and no infinity.
        line = json.dumps(_finite(record), allow_nan=False) + "\n"
        descriptor = atomic_io.open_file(self._path, os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(line)


def trainer_callback(folder: str | Path, precision: str = "float32", seed: int = 0) -> Any:
    """Return a callback for the Trainer of ``transformers`` that records each step after gradient clipping.

    It counts the ``labels`` that are not -100 as tokens with a loss. The Trainer clips before the callback runs: set
    ``max_grad_norm=0`` in both runs to compare unclipped gradients.
    """
    from transformers import TrainerCallback

    class RecorderCallback(TrainerCallback):
        """Writes one record before each step of the optimizer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            """Start to count the tokens of the model's inputs."""
            self.num_tokens = 0
            self.recorder: Recorder | None = None
            self.hook = arguments["model"].register_forward_pre_hook(self.count, with_kwargs=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            """Remove the hook. After a second call of ``train``, two hooks would count each token twice."""
            self.hook.remove()

        def count(self, module: nn.Module, _inputs: Any, named_inputs: Mapping[str, Any]) -> None:
            """Add the tokens of one forward pass that have a loss."""
            labels = named_inputs.get("labels")
            if module.training and isinstance(labels, Tensor):
                # The first token of a sequence has no prediction.
                predicted = labels[:, 1:] if labels.ndim == 2 else labels
                self.num_tokens += int((predicted != -100).sum())

        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, **arguments: Any
        ) -> None:
            """Record the gradients of the step."""
            if self.recorder is None:
                self.recorder = Recorder(folder, arguments["model"], precision, seed=seed)
            lr = arguments["optimizer"].param_groups[0]["lr"]
            self.recorder.write(state.global_step, num_tokens=self.num_tokens or None, lr=lr)
            self.num_tokens = 0

    return RecorderCallback()


def summary(name: str, tensor: Tensor, seed: int) -> list[Any]:
    """Return ``[slices, squared norm, projections]`` of this rank's part of a tensor, in float64.

    ``slices`` is the part's position in the full tensor, a pair of numbers per dimension. A collective if the tensor
    is a partial sum.
    """
    if is_distributed(tensor) and any(placement.is_partial() for placement in tensor.placements):
        from torch.distributed.tensor import Replicate

        tensor = tensor.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
        )
    slices = [(one.start, one.stop) for one in local_slices(tensor)]
    squared = 0.0
    projections = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64)
    if local_tensor(tensor).numel():
        for values_n, signs_Pn in _signed_chunks(name, tensor, slices, seed):
            squared += float(values_n @ values_n)
            projections += (signs_Pn @ values_n).cpu()
    return [slices, squared, projections.tolist()]


def _signed_chunks(
    name: str, tensor: Tensor, slices: Sequence[tuple[int, int]], seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield elements (n,) of the local part, and their random signs (NUM_PROJECTIONS, n), both in float64."""
    local = local_tensor(tensor.detach())
    flat = local.reshape(-1)
    key = zlib.crc32(f"{seed}/{name}".encode())
    for begin in range(0, flat.numel(), CHUNK_NUMEL):
        values_n = flat[begin : begin + CHUNK_NUMEL].double()
        positions_n = torch.arange(begin, begin + values_n.numel(), device=local.device)
        bits_n = _mixed(
            _in_full_tensor(positions_n, local.shape, tensor.shape, slices) + (key << 20)
        )
        shifts_P = torch.arange(NUM_PROJECTIONS, device=local.device)
        signs_Pn = 1.0 - 2.0 * ((bits_n >> shifts_P[:, None]) & 1).double()
        yield values_n, signs_Pn


def _in_full_tensor(
    positions: Tensor,
    local_shape: Sequence[int],
    shape: Sequence[int],
    slices: Sequence[tuple[int, int]],
) -> Tensor:
    """Convert row-major positions in a part to positions in the full tensor."""
    converted = torch.zeros_like(positions)
    stride = 1
    for local_size, size, (start, _) in zip(
        reversed(local_shape), reversed(shape), reversed(slices), strict=True
    ):
        converted += (positions % local_size + start) * stride
        positions = positions // local_size
        stride *= size
    return converted


def _mixed(numbers: Tensor) -> Tensor:
    """Return 64 random bits for each number (SplitMix64). Integers of PyTorch wrap around on overflow."""
    mixed = numbers * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift unsigned 64-bit numbers to the right. PyTorch's shift repeats the sign bit."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without wrappers."""
    named = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("flat_param", "_flat_param")):
            rule = "is a flattened parameter of FSDP1, whose shape depends on the number of ranks"
            raise ConfigError(
                Problem("model", name, rule, "wrap the model with fully_shard (FSDP2)")
            )
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        named[".".join(parts)] = parameter
    # A wrapper contains all parameters. A submodule of the same name does not.
    while (
        named
        and len(heads := {name.partition(".")[0] for name in named}) == 1
        and heads <= set(_OUTER_WRAPPERS)
    ):
        if not all("." in name for name in named):
            break
        named = {name.partition(".")[2]: parameter for name, parameter in named.items()}
    return named


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return variables.rank_and_size(os.environ)


def _finite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
