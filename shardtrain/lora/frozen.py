"""Frozen base weights of adapters, opened outside of a run: find them, verify their fingerprint,
read them by name.

A fingerprint depends on the content of the files and not on their location. The fingerprint of a
checkpoint is a hash of its manifest, which has the hashes of all its files. The fingerprint of a
Hugging Face folder combines the hashes of its weights and its config.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint import collectives, manifest, tensor_reader
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.storage import Place
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.hf import as_is, importing, mapping
from shardtrain.hf.hub_model import check_same, recognise, translation_of
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.hf.source import dtypes_of
from shardtrain.hf.weights import HubWeights, weight_files
from shardtrain.hub_formats.config_json import CONFIG
from shardtrain.layout import Draw
from shardtrain.lora import FACT, PATH, quantize, stacks
from shardtrain.lora.linear import is_transposed
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem


class FrozenWeights:
    """Unsharded weights from a checkpoint, a Hugging Face folder or the initializer.
    Use as a context manager.

    Attributes:
        path: Checkpoint or Hugging Face folder. None for initial weights.
        shapes: Shape of each parameter and buffer of the model.
        transposed: Names of the weights of linear modules that are (I, O).
        stacks: Stacks of expert weights, by path.
        dtype: dtype of the weights in the source.
        dtypes: dtype of each tensor in the source.
    """

    def __init__(
        self,
        path: Path | None,
        module: ModuleType,
        shape: Any,
        config: Config | None = None,
        kind: str = quantize.WHOLE,
        num_labels: int = 0,
    ) -> None:
        """Open ``path``. Collective: all files of a checkpoint are hashed, and ranks share that work.

        Args:
            path: Checkpoint or Hugging Face folder. If None, ``config`` determines the initial weights.
            kind: Value of ``lora.base_dtype``. With "nf4" or "int8", ``read`` and ``fill`` quantize and
                dequantize the weights like the run does.
            num_labels: Number of rows of a classification head, or 0. Such a head is saved with the adapters.

        Raises:
            CheckpointError: a file is missing, damaged or belongs to another model.
        """
        self.path = path
        self._stack = ExitStack()
        model = models.build(module, shape, num_labels)
        # Parameters and buffers are read by the same names.
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        self.transposed = set()
        for module_path, submodule in model.named_modules():
            if is_transposed(submodule):
                self.transposed.add(f"{module_path}.weight")
        self.stacks = stacks.find(model)
        self._kind = kind
        # Quantized base weights are returned as the run sees them: rounded.
        self._rounded = set()
        if kind != quantize.WHOLE:
            quantized = quantize.names(model, module.LAYOUT)
            self._rounded = {f"{module_path}.weight" for module_path in quantized}
        self._packed_from = torch.float32
        if config is not None:
            self._packed_from = getattr(torch, config.training.dtype)
        self._stored: manifest.Manifest | None = None
        self._weights: HubWeights | None = None
        self._draws: Mapping[str, Draw] = {}
        self._seed = 0

        if path is None:
            assert config is not None
            self.dtype = self._plan_initial(model, module, shape, config)
            self.dtypes = dict.fromkeys(self.shapes, self.dtype)
            return
        if (path / manifest.MANIFEST).exists():
            self.dtype = self._open_checkpoint(path)
            self._translation = translation_of(module, shape, str(path))
        elif as_is.is_as_is(module):
            self.dtype = self._open_as_is(path, model, module, shape, config)
        else:
            self.dtype = self._open_hub(path, module, shape, config)
        # Some tensors may be stored with a different dtype.
        self.dtypes = dict.fromkeys(self.shapes, self.dtype)
        self.dtypes |= dtypes_of(path, self._translation)

    def _plan_initial(
        self, model: torch.nn.Module, module: ModuleType, shape: Any, config: Config
    ) -> str:
        """Prepare initial weights, which are drawn again for each read. Return their dtype."""
        layout = module.LAYOUT
        num_layers = len(getattr(model, layout.layers))
        rules = {**module.initial(shape), **dict.fromkeys(layout.buffers, Draw("zeros"))}
        self._draws = init_weights.plan(self.shapes, rules, layout, num_layers)
        self._seed = config.debug.seed
        return config.training.dtype

    def _open_checkpoint(self, path: Path) -> str:
        """Open a checkpoint of this package. Return the dtype of its first weight."""
        stored = manifest.read(path)
        self._stored = stored
        if FACT in stored.facts:
            raise CheckpointError(
                f"checkpoint {path} contains adapters instead of base weights; name their base weights"
            )
        # Each rank verifies the hashes of some of the files.
        damage = collectives.first_word(tensor_files.find_damaged_file(stored, path))
        if damage:
            raise CheckpointError(f"checkpoint {path}: {damage}; use another checkpoint")
        expected = {}
        for name, size in self.shapes.items():
            expected[WEIGHTS_PREFIX + name] = torch.empty(size, device="meta")
        tensor_files.check_names(expected, stored, path)
        # All weights of a checkpoint usually have one dtype. Exceptions are added by the caller.
        for name, tensor in stored.tensors.items():
            if name.startswith(WEIGHTS_PREFIX):
                return tensor.dtype
        return "float32"

    def _open_as_is(
        self,
        path: Path,
        model: torch.nn.Module,
        module: ModuleType,
        shape: Any,
        config: Config | None,
    ) -> str:
        """Open a Hugging Face folder for a transformers class, whose tensor names are those of the model.

        Return the dtype of its first tensor.
        """
        as_is.check_same(shape, path)
        self._weights = self._stack.enter_context(open_weights(path, None))
        # A resized embedding has more rows in the run than in the folder.
        if config is not None and config.checkpoint.initial_load_resize_embeddings:
            shape = as_is.own_sizes(shape)
            model = models.build(module, shape)
        self._translation, passed = as_is.fit(model, shape, self._weights)
        mapping.check(self._translation, self._weights, passed)
        first_name = self._weights.names()[0]
        return str(self._weights.dtype(first_name)).removeprefix("torch.")

    def _open_hub(self, path: Path, module: ModuleType, shape: Any, config: Config | None) -> str:
        """Open a Hugging Face folder for a model of this package. Return the dtype of its first tensor."""
        recognised = recognise(path)
        chosen: Collection[str] = ()
        if config is not None:
            chosen = config.model.overrides.keys()
            if config.checkpoint.initial_load_resize_embeddings:
                shape = importing.sized_as(recognised, shape)
        self._translation = translation_of(module, shape, str(path))
        check_same(module, shape, recognised, path, chosen)
        prefix = self._translation.hub.prefix
        self._weights = self._stack.enter_context(open_weights(path, recognised.block, prefix))
        mapping.check(self._translation, self._weights, recognised.passed_over)
        first_name = next(iter(self._translation.their_shapes()))
        return str(self._weights.dtype(first_name)).removeprefix("torch.")

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of the tensors in place. Keys are names in our model."""
        exact = {}
        for name, tensor in tensors.items():
            if name in self._rounded:
                rounded = self.read(name)
                local_tensor(tensor).detach().copy_(rounded[local_slices(tensor)])
            else:
                # Tensors that the run does not round are read directly into their place.
                exact[name] = tensor
        self._fill(exact)

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        # A checkpoint of this package.
        if self._stored is not None:
            assert self.path is not None
            by_key = {WEIGHTS_PREFIX + name: tensor.detach() for name, tensor in tensors.items()}
            tensor_reader.read(by_key, self._stored, self.path)
            return
        # A Hugging Face folder. It may lack buffers.
        if self._weights is not None:
            sources = self._translation.sources
            in_folder = {name: tensor for name, tensor in tensors.items() if name in sources}
            importing.fill_rows(in_folder, self._translation, self._weights)
            return
        # Neither: draw the initial weights.
        for name, tensor in tensors.items():
            init_weights.draw_(tensor, name, self._draws[name], self._seed)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Return an unsharded tensor in the dtype of the file. A quantized weight is returned as float32."""
        dtype = getattr(torch, self.dtypes[name])
        tensor = torch.zeros(self.shapes[name], dtype=dtype, device=device)
        self._fill({name: tensor})
        if name not in self._rounded:
            return tensor
        # Quantize from the dtype and orientation that the run uses, so each block contains the same
        # values as in the run.
        weight = tensor.to(self._packed_from)
        if name in self.transposed:
            packed = quantize.Packed(weight.t().contiguous(), self._kind)
            return packed.restored(torch.float32).t()
        return quantize.Packed(weight, self._kind).restored(torch.float32)

    def __enter__(self) -> FrozenWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def find(
    facts: Mapping[str, Any],
    where: Path,
    config: Config,
    named: Path | None,
    module: ModuleType,
    shape: Any,
    num_labels: int = 0,
) -> FrozenWeights:
    """Return the base weights with which the adapters of a checkpoint were trained.

    Args:
        named: Path of the base weights. None for the path in the run's configuration.

    Raises:
        ConfigError: the path does not exist, or its fingerprint differs.
        CheckpointError: the weights cannot be read.
    """
    # Without --base, use the weights that the run's configuration names.
    path = named
    if path is None and not config.lora.random_base:
        path = Path(str(derived.initial_weights(config)))
    option = "--base" if named else PATH
    if path is None:
        actual = random_fingerprint(config, "cpu")
    elif not path.is_dir():
        raise ConfigError(
            Problem(
                option,
                str(path),
                rule="is not a folder, and adapters require the base weights with which they were trained",
                fix="name their folder with --base",
            )
        )
    else:
        actual = fingerprint_of(path)
    # Adapters are differences to exact base weights, so other weights with the same shapes are wrong.
    base = facts[FACT].get("base")
    expected = base.get("fingerprint") if isinstance(base, dict) else None
    if actual != expected:
        raise ConfigError(
            Problem(
                option,
                str(path),
                rule=f"does not contain the base weights with which the adapters of {where} were trained",
                fix="name the original base weights with --base",
            )
        )
    return FrozenWeights(path, module, shape, config, config.lora.base_dtype, num_labels)


def random_fingerprint(config: Config, device_type: str) -> str:
    """Return the fingerprint of initial weights: a hash of the seed, the model and the device type.

    The device type counts because a GPU draws other random numbers than the CPU.
    """
    model = config.model
    overrides = sorted(model.overrides.items())
    facts = (config.debug.seed, device_type, model.name, model.flavor, overrides, model.norm_type)
    return f"random-{hashlib.sha256(repr(facts).encode()).hexdigest()}"


def fingerprint(path: Place, in_hub: bool, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Return the hash of each file of a checkpoint or Hugging Face folder.

    For a Hugging Face folder, only this rank's share of the files is hashed.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if not in_hub:
        return {manifest.MANIFEST: hashlib.sha256(manifest.read_bytes(path)).hexdigest()}
    folder = Path(str(path))
    names = [CONFIG]
    for file in weight_files(folder):
        names.append(file.relative_to(folder).as_posix())
    try:
        return {name: _sha256(folder / name) for name in names[rank::size]}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def joined(hashes: Mapping[str, str]) -> str:
    """Combine the hashes of all files into one fingerprint."""
    return f"sha256-{hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()}"


def fingerprint_of(path: Path) -> str:
    """Return the fingerprint that a run records for these weights. Collective: ranks share the reading."""
    in_hub = not (path / manifest.MANIFEST).exists()
    rank, size = collectives.rank_and_size() if in_hub else (0, 1)
    hashes: dict[str, str] = {}
    for share in collectives.all_gather_json(fingerprint(path, in_hub, rank, size)):
        hashes |= share
    return joined(hashes)


def _sha256(path: Path) -> str:
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
