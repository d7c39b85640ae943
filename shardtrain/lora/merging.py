"""Adapters added to the weights beside which they were trained: a checkpoint of the model as it was before it had any.

The sum is made in float32 and rounded once, to the type of the checkpoint that is written. One tensor is in memory at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtrain.checkpoint import files, manifest, whole
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.errors import CheckpointError
from shardtrain.hub import source as sources
from shardtrain.hub.source import Source
from shardtrain.lora.frozen import Frozen
from shardtrain.lora.linear import merged
from shardtrain.lora.spec import Spec, read_facts
from shardtrain.state import TrainState


class Adapters:
    """The factors of a checkpoint, all its bytes read."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises CheckpointError when it is damaged, or holds no adapters."""
        self._folder, self.stored = checkpoint, manifest.read(checkpoint)
        for file in self.stored.files:
            if damage := files.find_damage(checkpoint, file):
                raise CheckpointError(f"checkpoint {checkpoint}: {damage}; use another one")
        spec = read_facts(self.stored.facts, checkpoint)
        if spec is None:
            raise CheckpointError(f"checkpoint {checkpoint} holds a whole model and no adapters")
        self.spec: Spec = spec
        for path in spec.modules:
            shapes = [self._shape(f"{path}.{name}") for name in ("lora_a", "lora_b")]
            if [len(shape) for shape in shapes] != [2, 2] or not shapes[0][0] == shapes[1][1] == spec.rank:
                raise CheckpointError(f"checkpoint {checkpoint} holds no adapter of rank {spec.rank} for {path}")

    def _shape(self, name: str) -> tuple[int, ...]:
        stored = self.stored.tensors.get(WEIGHTS_PREFIX + name)
        return stored.shape if stored is not None else ()

    def read(self, name: str) -> Tensor:
        """One factor, whole, on the CPU."""
        return tensor_files.read_whole(self.stored, self._folder, WEIGHTS_PREFIX + name)


def merge(
    frozen: Frozen,
    spec: Spec,
    factors: Mapping[str, Tensor] | Adapters,
    output: Path,
    dtype: str,
    model: dict[str, Any],
    source: Source | None = None,
) -> None:
    """Write the sum as a checkpoint that holds weights alone; ``model`` is what it says of its model.

    Each tensor keeps the type that it has beside the adapters where ``dtype`` is empty. ``source`` is the folder that
    the weights came from: what else is in it is kept.

    Raises:
        ConfigError: when ``output`` exists.
        CheckpointError: when the adapters are of another model.
        StorageError: when it cannot be written.
    """

    def factor(name: str) -> Tensor:
        return factors.read(name) if isinstance(factors, Adapters) else factors[name]

    adapted = {f"{path}.weight" for path in spec.modules}
    missing = sorted(adapted - frozen.shapes.keys())
    if missing:
        raise CheckpointError(f"the adapters are for {missing[0]}, which {frozen.path} has not; use their own model")

    def read(name: str) -> Tensor:
        name = name.removeprefix(WEIGHTS_PREFIX)
        weight = frozen.read(name)
        if name not in adapted:
            return weight
        path = name.removesuffix(".weight")
        a_RI, b_OR = factor(f"{path}.lora_a"), factor(f"{path}.lora_b")
        if tuple(weight.shape) != (b_OR.shape[0], a_RI.shape[1]):
            raise CheckpointError(f"the adapter of {path} is for another shape than {list(weight.shape)}")
        return merged(weight, a_RI, b_OR, spec.scale)

    facts: dict[str, Any] = {"state": TrainState().to_dict(), "model": model}
    beside = {}
    if source is not None:
        beside[sources.FILE], facts[sources.FACT] = sources.packed(source)
    kinds = {WEIGHTS_PREFIX + name: dtype or frozen.dtypes[name] for name in frozen.shapes}
    shapes = {WEIGHTS_PREFIX + name: shape for name, shape in frozen.shapes.items()}
    whole.write(output, shapes, kinds, read, facts, beside)
