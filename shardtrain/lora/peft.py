"""Adapters in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, opened without running
anything in them.

What the file asks for is read key by key. A key whose meaning is not known stops the reading unless it is off, because
it could change what the adapters compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardtrain import models
from shardtrain.checkpoint.agree import together
from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.hub.config_json import read_json
from shardtrain.log import logger
from shardtrain.lora.spec import Spec
from shardtrain.lora.targets import their_names
from shardtrain.shards import local_slices, local_tensor

if TYPE_CHECKING:
    from shardtrain.run import Run

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    "lora_dropout", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    "megatron_core", "layers_to_transform", "layers_pattern", "exclude_modules",
}  # fmt: skip
"""Keys that change nothing of what trained adapters compute: which modules have one, their tensors say themselves."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the weights that the adapters are added to
}


def is_folder(path: object) -> bool:
    """Whether a place is a local folder in this format."""
    return isinstance(path, Path) and (path / CONFIG).exists()


def config_fields(spec: Spec, theirs: Mapping[str, str], linears: list[str], base: str) -> dict[str, Any]:
    """The keys of ``adapter_config.json``.

    ``theirs`` are the adapted modules by our path, ``linears`` all linear modules of theirs: where every module of a
    name is adapted the short name is written, and whole paths where not.
    """
    paths = set(theirs.values())
    ends = sorted({path.rpartition(".")[2] for path in paths})
    every = {path for path in linears if path.rpartition(".")[2] in ends}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rank_stabilized,
        "target_modules": ends if every == paths else sorted(paths),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def names_of(spec: Spec, module: ModuleType, shape: Any) -> dict[str, str]:
    """Each factor's name here -> its name in ``adapter_model.safetensors``.

    Raises:
        ConfigError: when a module is part of a larger one in the format of Hugging Face, or has no place there.
    """
    theirs = their_names(spec.modules, module, shape)
    homeless = [path for path in spec.modules if path not in theirs]
    if homeless:
        raise ConfigError(
            f"{homeless[0]} is no module of its own in the Hugging Face format of this model, so its adapter has no "
            "form there; merge the adapters (shardtrain merge) and export the sum"
        )
    return {f"{p}.{own}": f"{PREFIX}{theirs[p]}.{word}" for p in spec.modules for own, word in _FACTORS.items()}


class PeftFolder:
    """Adapters of a folder, checked against a model of ours."""

    def __init__(self, folder: Path, module: ModuleType, shape: Any) -> None:
        """Read the configuration and the header of the weights.

        Raises:
            ConfigError: when it asks for what is not known here.
            CheckpointError: for a file that is missing, cut or no safetensors, or adapters of another model.
        """
        self.folder = folder
        fields = read_json(folder / CONFIG)
        rank, alpha, stabilized = _read_config(fields, folder / CONFIG)
        self._file = _open(folder)
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        self.spec, self._names = self._recognise(shapes, rank, alpha, stabilized, module, shape)

    def _recognise(
        self, shapes: Mapping[str, tuple[int, ...]], rank: int, alpha: float, stabilized: bool, module: Any, shape: Any
    ) -> tuple[Spec, dict[str, str]]:
        model = models.build(module, shape)
        linears = {path: m for path, m in model.named_modules() if type(m) is torch.nn.Linear}
        ours = {f"{PREFIX}{theirs}": path for path, theirs in their_names(linears, module, shape).items()}
        owners = {name: name.removesuffix(".lora_A.weight") for name in shapes if name.endswith(".lora_A.weight")}
        modules = [path for key, path in ours.items() if key in owners.values()]
        spec = Spec(rank, alpha, stabilized, tuple(path for path in linears if path in modules))
        names = names_of(spec, module, shape)
        expected = {}
        for path in spec.modules:
            linear = linears[path]
            expected[names[f"{path}.lora_a"]] = (rank, linear.in_features)
            expected[names[f"{path}.lora_b"]] = (linear.out_features, rank)
        wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        if wrong or not spec.modules:
            first = wrong[0] if wrong else "no adapter"
            raise CheckpointError(
                f"{self.folder / WEIGHTS} is not of this model: {len(wrong)} tensors do not fit, such as {first}: "
                f"{_shown(shapes.get(first))} in place of {_shown(expected.get(first))}; use its own model"
            )
        return spec, names

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of each factor among our tensors, by their names in the model, in place."""
        for name in self._names.keys() & tensors.keys():
            box = tuple(local_slices(tensors[name]))
            local_tensor(tensors[name]).detach().copy_(self._file.get_slice(self._names[name])[box])


def load(run: Run, folder: Path) -> None:
    """Start a run from the adapters of a folder (a collective): all ranks do, or none.

    Raises:
        ConfigError: when rank, scale or modules are not those of ``[lora]``.
        CheckpointError: when the folder is damaged or of another model.
    """
    model = run.config.model
    module = models.find(model.name)
    shape = models.shape_of(module, model.flavor, model.overrides, model.norm_type)

    def fill() -> None:
        found = PeftFolder(folder, module, shape)
        differ = [
            f"{key} is {theirs!r} and not {run.lora[key]!r}" if key != "modules" else "its modules are others"
            for key, theirs in found.spec.facts().items()
            if key != "dropout" and run.lora[key] != theirs
        ]
        if differ:
            raise ConfigError(f"lora.initial_load_path={folder}: {'; '.join(differ)}; set [lora] to what it says")
        found.fill(run.runner.parameters())

    together(fill)
    logger.info(f"starting from the adapters of {folder}")


def _open(folder: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    if not path.exists():
        legacy = (folder / "adapter_model.bin").exists()
        what = "only adapter_model.bin, a pickle, which is never opened here" if legacy else "no weights"
        raise CheckpointError(f"{folder} has {what}; it needs {WEIGHTS}: save it with safe_serialization=True")
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is cut short or no safetensors file ({error}); fetch it again") from None


def _read_config(fields: Mapping[str, Any], path: Path) -> tuple[int, float, bool]:
    for key, allowed in _ONLY.items():
        if fields.get(key) is not None and not any(fields[key] is a or fields[key] == a for a in allowed):
            rule = f"asks for {key}={fields[key]!r}, which is not known here"
            raise ConfigError(f"{path} {rule}; merge these adapters with PEFT, or train others")
    read = {"r", "lora_alpha", "use_rslora", "target_modules", *_ONLY, *_IGNORED}
    unknown = sorted(key for key, value in fields.items() if key not in read and value)
    if unknown:
        shown = ", ".join(f"{key}={str(fields[key])[:60]!r}" for key in unknown[:5])
        raise ConfigError(
            f"{path} asks for {shown}, which is not known here and may change what the adapters compute; merge these "
            "adapters with PEFT, or train others"
        )
    rank = _number(fields, "r", 8, path, lambda v: isinstance(v, int) and 1 <= v <= 2**20)
    alpha = _number(fields, "lora_alpha", 8, path, lambda v: 0 < v < math.inf)
    return int(rank), float(alpha), bool(fields.get("use_rslora"))


def _number(fields: Mapping[str, Any], key: str, default: float, path: Path, good: Callable[[Any], bool]) -> Any:
    value = fields.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not good(value):
        raise ConfigError(f"{path}: {key}={value!r} is not a number that it can be; use the file as PEFT wrote it")
    return value


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
