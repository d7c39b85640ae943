"""Merging of adapters into their base weights. The result is a checkpoint of the model without adapters.

The sum is computed in float32 and rounded once, to the dtype of the new checkpoint. Only one tensor is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtrain.checkpoint import files, manifest, single_process_writer, tensors
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.hf import source as sources
from shardtrain.hf.source import FolderSource
from shardtrain.lora import stacks
from shardtrain.lora.frozen import FrozenWeights
from shardtrain.lora.linear import merged
from shardtrain.lora.spec import CLASSIFIES, Spec, read_facts
from shardtrain.utils.errors import CheckpointError


class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        stored: Manifest of the checkpoint.
        spec: Description of the adapters.
    """

    def __init__(self, checkpoint: Path, use_ema: bool = False) -> None:
        """Verify the hash of every file and the shapes of the factors.

        With ``use_ema``, read the averages of the adapters.

        Raises:
            CheckpointError: the checkpoint is damaged, or has no adapters or no averages.
        """
        self._folder = checkpoint
        self.stored = manifest.read(checkpoint)
        if use_ema:
            self.stored = self.stored.with_averages(checkpoint)
        # Merged weights are final, so damaged files must not go unnoticed.
        for file in self.stored.files:
            damage = files.find_damage(checkpoint, file)
            if damage:
                raise CheckpointError(f"checkpoint {checkpoint}: {damage}; use another checkpoint")
        spec = read_facts(self.stored.facts, checkpoint)
        if spec is None:
            raise CheckpointError(
                f"checkpoint {checkpoint} contains a full model without adapters; name a checkpoint of a LoRA run"
            )
        self.spec: Spec = spec
        # The factors of a stack have one more dimension than those of a linear module: the experts.
        for path in spec.modules:
            self._check_factors(path, f"{path}.", dims=2)
        for path in spec.parameters:
            self._check_factors(path, f"{path}_", dims=3)
        for name in spec.factors():
            if not self._shape(name):
                raise CheckpointError(
                    f"checkpoint {checkpoint} lacks {name}; use another checkpoint"
                )

    def _check_factors(self, path: str, prefix: str, dims: int) -> None:
        """Raise CheckpointError unless both factors have this number of dimensions and the adapters' rank."""
        a = self._shape(f"{prefix}lora_a")
        b = self._shape(f"{prefix}lora_b")
        rank = self.spec.rank
        # The rank is the second-last dimension of A, and the last of B.
        has_dims = len(a) == len(b) == dims
        if not has_dims or not a[-2] == b[-1] == rank:
            raise CheckpointError(
                f"checkpoint {self._folder} has no adapter of rank {rank} for {path}; use another checkpoint"
            )

    def num_labels(self, module: Any) -> int:
        """Return the number of rows of the classification head saved with the adapters,
        or 0 without a head.
        """
        head = self._shape(f"{module.LAYOUT.last[-1]}.weight")
        if head and self.spec.task_type == CLASSIFIES:
            return head[0]
        return 0

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor, or () if it is missing."""
        stored = self.stored.tensors.get(WEIGHTS_PREFIX + name)
        if stored is None:
            return ()
        return stored.shape

    def read(self, name: str) -> Tensor:
        """Return an unsharded tensor of the adapters on the CPU."""
        return tensors.read_whole(self.stored, self._folder, WEIGHTS_PREFIX + name)


def merge(
    frozen: FrozenWeights,
    spec: Spec,
    factor: Callable[[str], Tensor],
    output: Path,
    dtype: str,
    model: dict[str, Any],
    source: FolderSource | None = None,
) -> None:
    """Write the merged weights as a checkpoint without optimizer state.

    Args:
        factor: Returns a tensor of the adapters by its name in the model.
        dtype: dtype of all weights. If empty, each keeps its dtype in ``frozen``.
        model: Facts about the model for the checkpoint.
        source: Hugging Face folder of the base weights. The checkpoint keeps its other files.

    Raises:
        ConfigError: ``output`` exists.
        CheckpointError: the adapters belong to another model.
        StorageError: the checkpoint cannot be written.
    """
    # The merge only changes the weights of adapted linear modules and of adapted stacks.
    stacked = _weights_of_stacks(frozen, spec)
    adapted = _weights_of_linears(frozen, spec)

    # The writer reads one tensor at a time, so only one merged weight is in memory.
    def read(key: str) -> Tensor:
        name = key.removeprefix(WEIGHTS_PREFIX)
        # Modules that were trained fully are stored with the adapters.
        if spec.holds(name):
            return factor(name)
        weight = frozen.read(name)
        if name in stacked:
            stack, part = stacked[name]
            return _merged_stack(weight, stack, part, spec, factor)
        if name in adapted:
            return _merged_linear(weight, name, name in frozen.transposed, spec, factor)
        return weight

    facts: dict[str, Any] = {"state": TrainState().to_dict(), "model": model}
    # A Hugging Face folder also has a tokenizer and other files, which the export needs.
    other_files = {}
    if source is not None:
        other_files[sources.FILE], facts[sources.FACT] = sources.packed(source)
    dtypes = {}
    shapes = {}
    for name, shape in frozen.shapes.items():
        dtypes[WEIGHTS_PREFIX + name] = dtype or frozen.dtypes[name]
        shapes[WEIGHTS_PREFIX + name] = shape
    single_process_writer.write(output, shapes, dtypes, read, facts, other_files)


def _weights_of_stacks(frozen: FrozenWeights, spec: Spec) -> dict[str, tuple[stacks.Stack, int]]:
    """Map each weight of an adapted stack to the stack and its number in it. Raises CheckpointError."""
    unknown = sorted(set(spec.parameters) - frozen.stacks.keys())
    if unknown:
        raise CheckpointError(
            f"the adapters are for {unknown[0]}, which {frozen.path} does not have; use the model they were trained on"
        )
    stacked: dict[str, tuple[stacks.Stack, int]] = {}
    for path in spec.parameters:
        stack = frozen.stacks[path]
        for part, weight in enumerate(stack.weights):
            stacked[f"{stack.owner}.{weight}"] = (stack, part)
    return stacked


def _weights_of_linears(frozen: FrozenWeights, spec: Spec) -> set[str]:
    """Return the names of the weights of adapted linear modules. Raises CheckpointError."""
    adapted = {f"{path}.weight" for path in spec.modules}
    missing = sorted(adapted - frozen.shapes.keys())
    if missing:
        raise CheckpointError(
            f"the adapters are for {missing[0]}, which is not a separate tensor in {frozen.path}; "
            "use the model that they were trained on, or, if the weight is tied and a merge would "
            "change two modules, shardtrain generate --adapter"
        )
    return adapted


def _merged_stack(
    weight: Tensor, stack: stacks.Stack, part: int, spec: Spec, factor: Callable[[str], Tensor]
) -> Tensor:
    """Return one weight of a stack of experts with its adapter added."""
    a_ERI = factor(f"{stack.path}_lora_a")
    b_EOR = factor(f"{stack.path}_lora_b")
    a_shape = (stack.experts, spec.rank, stack.inputs)
    b_shape = (stack.experts, stack.outputs, spec.rank)
    # A shape that differs would be broadcast or fail without naming the module.
    if tuple(a_ERI.shape) != a_shape or tuple(b_EOR.shape) != b_shape:
        raise CheckpointError(
            f"the adapter of {stack.path} does not have the shapes {a_shape} and {b_shape}",
        )
    return stacks.merged(weight, stack, a_ERI, b_EOR, part, spec.scale)


def _merged_linear(
    weight: Tensor,
    name: str,
    is_transposed: bool,
    spec: Spec,
    factor: Callable[[str], Tensor],
) -> Tensor:
    """Return the weight of a linear module with its adapter added."""
    path = name.removesuffix(".weight")
    a_RI = factor(f"{path}.lora_a")
    b_OR = factor(f"{path}.lora_b")
    # Adapters are always oriented as outputs by inputs.
    weight_OI = weight.t() if is_transposed else weight
    if tuple(weight_OI.shape) != (b_OR.shape[0], a_RI.shape[1]):
        raise CheckpointError(
            f"the adapter of {path} does not fit a weight of shape {list(weight.shape)}",
        )
    magnitude_O = None
    if spec.use_dora:
        magnitude_O = factor(f"{path}.lora_magnitude")
    merged_OI = merged(weight_OI, a_RI, b_OR, spec.scale, magnitude_O)
    if is_transposed:
        return merged_OI.t().contiguous()
    return merged_OI
