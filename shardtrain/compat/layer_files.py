"""Weights as DeepSpeed's pipelines save them, a file for each layer and model-parallel rank, under Hugging Face names.

Such a folder has config.json, the tokenizer, and ``latest``, which names a step; ``global_step001`` of it holds
``layer_00-model_00-model_states.pt``, the embedding, and then the layers, the last norm and the head. FMEngine begins
and ends with such folders. The files are pickles of PyTorch, and are read as data: nothing in them is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from shardtrain.checkpoint.torch_file import Stored, TorchFile
from shardtrain.hf.weights import HubWeights
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import CheckpointError

LATEST = "latest"
FILE = re.compile(r"layer_(\d{1,5})-model_(\d{1,4})-model_states\.pt")
STEP = re.compile(r"global_step(\d{1,12})")


@dataclass(frozen=True)
class Family:
    """Layout of the files of one architecture, with names of Hugging Face."""

    embed: str
    layers: str
    norm: str
    head: str
    rows: tuple[str, ...]
    """Modules of a layer whose weights and biases are divided by rows, the output dimension."""
    columns: tuple[str, ...]
    """Modules of a layer whose weights are divided by columns, the input dimension."""

    def prefix(self, number: int, num_layers: int) -> str:
        """Return the prefix of the names in one file in a Hugging Face folder."""
        if number == 0:
            return self.embed
        if number <= num_layers:
            return f"{self.layers}{number - 1}."
        return self.norm if number == num_layers + 1 else self.head

    def place(self, name: str, num_layers: int) -> tuple[int, str]:
        """Return the number of the file that contains a tensor, and its name there.

        Raises:
            KeyError: no file contains it.
        """
        if name.startswith(self.layers):
            number, _, rest = name.removeprefix(self.layers).partition(".")
            if number.isdecimal() and int(number) < num_layers:
                return int(number) + 1, rest
        for file, prefix in ((0, self.embed), (num_layers + 1, self.norm), (num_layers + 2, self.head)):
            if name.startswith(prefix):
                return file, name.removeprefix(prefix)
        raise KeyError(name)

    def divided(self, name: str) -> int | None:
        """Return the dimension along which model-parallel ranks split a tensor. None if it is replicated."""
        module, _, kind = name.rpartition(".")
        if f"{module}." in (self.embed, self.head) or module.endswith(self.rows):
            return 0
        return 1 if kind == "weight" and module.endswith(self.columns) else None


_LLAMA = Family(
    "model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.",
    (".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj"), (".o_proj", ".down_proj"),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "gpt_neox": Family(
            "gpt_neox.embed_in.", "gpt_neox.layers.", "gpt_neox.final_layer_norm.", "embed_out.",
            (".query_key_value", ".dense_h_to_4h"), (".attention.dense", ".dense_4h_to_h"),
        ),
    }
)  # fmt: skip
"""By model_type of config.json."""


def family_of(folder: Path) -> tuple[Family, int]:
    """Return the architecture and the number of layers from config.json of a folder.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    count = config.get("num_hidden_layers")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{folder / CONFIG}: model_type {str(kind)[:40]!r} has no files per layer; they are those of "
            f"{', '.join(FAMILIES)}"
        )
    if type(count) is not int or not 0 < count < 10**5:
        raise CheckpointError(f"{folder / CONFIG}: num_hidden_layers={str(count)[:40]} is not a number of layers")
    return FAMILIES[kind], count


def steps_of(folder: Path) -> list[Path]:
    """Return the step folders with files per layer, in order, or ``folder`` itself if it is one."""
    try:
        inside = sorted((p for p in folder.iterdir() if STEP.fullmatch(p.name)), key=_number)
    except OSError:
        return []
    found = [p for p in inside if p.is_dir() and files_of(p)]
    return found or ([folder] if files_of(folder) else [])


def _number(step: Path) -> int:
    return int(step.name.removeprefix("global_step"))


def step_of(folder: Path) -> Path:
    """Return the step that ``latest`` names, or the last step.

    Raises:
        CheckpointError: there is no step.
    """
    steps = steps_of(folder)
    try:
        name = bounded_reads.start(folder / LATEST, 200).decode("ascii", "replace").strip()
    except OSError:
        name = ""
    if name and steps != [folder]:
        named = next((step for step in steps if step.name == name), None)
        if named is None:
            there = ", ".join(step.name for step in steps[:8]) or "none"
            shown = "".join(c if c.isprintable() else "?" for c in name)[:60]
            raise CheckpointError(f"{folder / LATEST} names {shown!r}, which has no files per layer; there is {there}")
        return named
    if not steps:
        raise CheckpointError(f"{folder} has no layer_00-model_00-model_states.pt, nor a step with it")
    return steps[-1]


def files_of(step: Path) -> dict[tuple[int, int], Path]:
    """Return the files of a step by layer number and model-parallel rank."""
    found: dict[tuple[int, int], Path] = {}
    try:
        for path in sorted(step.iterdir()):
            if (match := FILE.fullmatch(path.name)) and path.is_file():
                place = int(match[1]), int(match[2])
                if place in found:
                    raise CheckpointError(f"{step} has both {found[place].name} and {path.name}; remove one")
                found[place] = path
    except OSError:
        return {}
    return found


class LayerWeights(HubWeights):
    """Weights of such a folder, with the names of a Hugging Face folder."""

    def __init__(self, folder: Path, step: Path | None = None) -> None:
        """Read what the files of a step describe, that of ``latest`` unless one is named.

        Raises:
            CheckpointError: when files are missing or surplus, cannot be trusted, or disagree with each other.
        """
        self.folder = folder
        self.step = step or step_of(folder)
        self._family, count = family_of(folder)
        files = files_of(self.step)
        self.num_shards = 1 + max((shard for _, shard in files), default=-1)

        # Refuse files that are not those of a model of so many layers: embedding, layers, last norm
        # and head
        wanted = {(number, shard) for number in range(count + 3) for shard in range(self.num_shards)}
        missing = [f"layer_{n:02d}-model_{s:02d}-model_states.pt" for n, s in sorted(wanted - files.keys())]
        surplus = [files[place].name for place in sorted(files.keys() - wanted)]
        problems = [
            f"{len(names)} {what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
            for what, names in (("missing", missing), ("of no layer", surplus))
            if names
        ]
        if problems:
            raise CheckpointError(
                f"{self.step} is not a model of {count} layers, as its config.json says: {'; '.join(problems)}"
            )

        # Which parts of which files make each tensor, in the order of model-parallel ranks
        self._parts: dict[str, list[tuple[TorchFile, Stored]]] = {}
        for (number, _), path in sorted(files.items()):
            opened = TorchFile(path)
            if not isinstance(opened.value, dict):
                raise CheckpointError(f"{path} holds no table of tensors; use another checkpoint")
            for name, stored in opened.value.items():
                full = f"{self._family.prefix(number, count)}{name}"
                if not isinstance(stored, Stored) or not isinstance(name, str) or not full.isprintable():
                    shown = "".join(c if c.isprintable() else "?" for c in str(name))[:60]
                    raise CheckpointError(f"{path}: {shown} is not a tensor; use another checkpoint")
                self._parts.setdefault(full, []).append((opened, stored))
        adapters = next((name for name in self._parts if "lora_" in name), None)
        if adapters:
            raise CheckpointError(
                f"{self.step} holds adapters, such as {adapters}; "
                "`shardtrain checkpoint from-fmengine --adapter` writes them for PEFT"
            )
        self._shapes = {name: self._whole(name, parts) for name, parts in self._parts.items()}
        self._last: tuple[str, Tensor] | None = None

    def _whole(self, name: str, parts: list[tuple[TorchFile, Stored]]) -> tuple[int, ...]:
        if len(parts) != self.num_shards:
            there = ", ".join(file.path.name for file, _ in parts[:4])
            raise CheckpointError(
                f"{self.step}: {name} is in {len(parts)} of {self.num_shards} model-parallel files ({there})"
            )
        # Parts may differ in size along the dimension that ranks divide, and in nothing else
        dim = self._family.divided(name)
        shapes = [stored.shape for _, stored in parts]
        dtypes = {stored.dtype for _, stored in parts}
        first = shapes[0]
        if dim is not None and len(first) <= dim:
            dim = None
        rest = {(*shape[:dim], *shape[dim + 1 :]) if dim is not None else shape for shape in shapes}
        if len(dtypes) > 1 or len(rest) > 1 or len({len(shape) for shape in shapes}) > 1:
            kinds = ", ".join(f"{stored.dtype} {list(stored.shape)}" for _, stored in parts[:4])
            raise CheckpointError(f"{self.step}: the parts of {name} do not fit each other: {kinds}")
        if dim is None:
            return first
        return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])

    def names(self) -> list[str]:
        return sorted(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._parts[name][0][1].dtype)  # type: ignore[no-any-return]

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """Raise CheckpointError if the copies of a replicated tensor differ."""
        if self._last is None or self._last[0] != name:
            self._last = None  # one tensor at a time is in memory
            self._last = name, self._read(name)
        return self._last[1][tuple(box)] if len(box) else self._last[1]

    def _read(self, name: str) -> Tensor:
        parts = self._parts[name]
        dim = self._family.divided(name)
        first = parts[0][0].tensor(parts[0][1])
        if len(parts) == 1:
            return first
        if dim is None or len(first.shape) <= dim:
            for file, stored in parts[1:]:
                if not torch.equal(file.tensor(stored).view(torch.uint8), first.view(torch.uint8)):
                    raise CheckpointError(
                        f"{self.step}: {name} is not the same in {parts[0][0].path.name} and {file.path.name}, where "
                        "model-parallel ranks hold it alike; are they files of one run?"
                    )
            return first
        whole = torch.empty(self._shapes[name], dtype=first.dtype)
        begin = 0
        for number, (file, stored) in enumerate(parts):
            part = first if number == 0 else file.tensor(stored)
            whole.narrow(dim, begin, part.shape[dim]).copy_(part)
            begin += part.shape[dim]
        return whole

    def __exit__(self, *_: object) -> None:
        self._last = None
