"""Reader of the weights that DeepSpeed's pipelines save: a file for each layer and model-parallel rank.

FMEngine loads and saves such folders. They contain config.json, the tokenizer, and ``latest`` with the
name of a step folder such as ``global_step001``. File ``layer_00-model_00-model_states.pt`` of a step
contains the embedding; the next files contain the layers, the last norm and the head. Tensors get the
names of a Hugging Face folder. The files are pickles of PyTorch, which this module parses without running
code.
"""

from __future__ import annotations

import itertools
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
from shardtrain.utils.variables import is_whole_number

LATEST = "latest"
FILE = re.compile(r"layer_(\d{1,5})-model_(\d{1,4})-model_states\.pt")
STEP = re.compile(r"global_step(\d{1,12})")


@dataclass(frozen=True)
class Family:
    """Names of one architecture's tensors in a Hugging Face folder, and how model-parallel ranks split them.

    Attributes:
        embed: Prefix of the embedding.
        layers: Prefix of the layers, before their number.
        norm: Prefix of the last norm.
        head: Prefix of the head.
        output_split: Modules whose weights and biases are split along the output dimension (column-parallel).
        input_split: Modules whose weights are split along the input dimension (row-parallel).
    """

    embed: str
    layers: str
    norm: str
    head: str
    output_split: tuple[str, ...]
    input_split: tuple[str, ...]

    def prefix(self, number: int, num_layers: int) -> str:
        """Return the Hugging Face prefix of the tensors in file ``number``."""
        # Files follow the order of the pipeline: embedding, layers, norm, head.
        if number == 0:
            return self.embed
        if number <= num_layers:
            return f"{self.layers}{number - 1}."
        return self.norm if number == num_layers + 1 else self.head

    def place(self, name: str, num_layers: int) -> tuple[int, str]:
        """Return the number of the file that contains a tensor, and the tensor's name in that file.

        Raises:
            KeyError: no file contains it.
        """
        if name.startswith(self.layers):
            number, _, rest = name.removeprefix(self.layers).partition(".")
            if is_whole_number(number) and int(number) < num_layers:
                return int(number) + 1, rest
        # All other tensors are outside of the layers.
        for file, prefix in (
            (0, self.embed),
            (num_layers + 1, self.norm),
            (num_layers + 2, self.head),
        ):
            if name.startswith(prefix):
                return file, name.removeprefix(prefix)
        raise KeyError(name)

    def split_dim(self, name: str) -> int | None:
        """Return the dimension along which model-parallel ranks split a tensor.

        None for a replicated tensor.
        """
        # The embedding and the head are split over the vocabulary.
        module, _, kind = name.rpartition(".")
        if f"{module}." in (self.embed, self.head) or module.endswith(self.output_split):
            return 0
        if kind == "weight" and module.endswith(self.input_split):
            return 1
        return None


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
"""Layout of each model_type in config.json."""


def family_of(folder: Path) -> tuple[Family, int]:
    """Return the layout and the number of layers from a folder's config.json.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    count = config.get("num_hidden_layers")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{folder / CONFIG}: model_type {str(kind)[:40]!r} is not supported with one file per layer; "
            f"supported are {', '.join(FAMILIES)}"
        )
    if type(count) is not int or not 0 < count < 10**5:
        raise CheckpointError(
            f"{folder / CONFIG}: num_hidden_layers={str(count)[:40]} must be a number of layers"
        )
    return FAMILIES[kind], count


def steps_of(folder: Path) -> list[Path]:
    """Return the step folders in order, or ``folder`` itself if it is a step folder. [] if there is none."""
    try:
        candidates = [path for path in folder.iterdir() if STEP.fullmatch(path.name)]
    except OSError:
        return []
    candidates.sort(key=_number)
    # A step folder without files cannot be loaded.
    steps = [path for path in candidates if path.is_dir() and files_of(path)]
    if not steps and files_of(folder):
        steps = [folder]
    return steps


def _number(step: Path) -> int:
    return int(step.name.removeprefix("global_step"))


def step_of(folder: Path) -> Path:
    """Return the step folder that ``latest`` names. Without that file, return the last step.

    Raises:
        CheckpointError: the step does not exist.
    """
    steps = steps_of(folder)
    try:
        # Read at most 200 bytes, because the file is untrusted and contains only a folder's name.
        name = bounded_reads.start(folder / LATEST, 200).decode("ascii", "replace").strip()
    except OSError:
        name = ""
    # Without ``latest``, or for a step folder itself, use the last step.
    if name and steps != [folder]:
        named = next((step for step in steps if step.name == name), None)
        if named is None:
            others = ", ".join(step.name for step in steps[:8]) or "no step"
            raise CheckpointError(
                f"{folder / LATEST} names {_printable(name)!r}, which has no files per layer; they exist for {others}"
            )
        return named
    if not steps:
        raise CheckpointError(
            f"{folder} and its subfolders contain no layer_00-model_00-model_states.pt"
        )
    return steps[-1]


def _printable(text: object) -> str:
    """Return at most 60 characters of untrusted text without control characters."""
    return "".join(char if char.isprintable() else "?" for char in str(text))[:60]


def files_of(step: Path) -> dict[tuple[int, int], Path]:
    """Return the files of a step by file number and model-parallel rank. {} if the folder cannot be read.

    Raises:
        CheckpointError: two files have the same numbers, with different numbers of leading zeros.
    """
    files: dict[tuple[int, int], Path] = {}
    try:
        for path in sorted(step.iterdir()):
            match = FILE.fullmatch(path.name)
            if match is None or not path.is_file():
                continue
            # Numbers may have leading zeros, which differ between writers.
            key = int(match[1]), int(match[2])
            if key in files:
                raise CheckpointError(
                    f"{step} has both {files[key].name} and {path.name}; remove one"
                )
            files[key] = path
    except OSError:
        return {}
    return files


class LayerWeights(HubWeights):
    """Weights of a folder with files per layer, by the tensor names of a Hugging Face folder."""

    def __init__(self, folder: Path, step: Path | None = None) -> None:
        """Read the names, shapes and dtypes in the files of a step. The default is the step of ``latest``.

        Raises:
            CheckpointError: files are missing, surplus or invalid, or do not fit together.
        """
        self.folder = folder
        self.step = step or step_of(folder)
        self._family, num_layers = family_of(folder)
        files = files_of(self.step)
        self.num_shards = 1 + max((shard for _, shard in files), default=-1)
        self._require_all_files(files, num_layers)

        # Parts of each tensor, in the order of model-parallel ranks.
        self._parts: dict[str, list[tuple[TorchFile, Stored]]] = {}
        # Files are sorted by number and rank, so parts are appended in rank order.
        for (number, _), path in sorted(files.items()):
            opened = TorchFile(path)
            if not isinstance(opened.value, dict):
                raise CheckpointError(f"{path} contains no state dict; use another checkpoint")
            prefix = self._family.prefix(number, num_layers)
            # Names come from a pickle, so they may be of any type.
            for name, stored in opened.value.items():
                full_name = f"{prefix}{name}"
                if (
                    not isinstance(stored, Stored)
                    or not isinstance(name, str)
                    or not full_name.isprintable()
                ):
                    raise CheckpointError(
                        f"{path}: {_printable(name)} is not a tensor; use another checkpoint"
                    )
                self._parts.setdefault(full_name, []).append((opened, stored))
        # Adapters have names that no Hugging Face folder of a model has.
        adapter = next((name for name in self._parts if "lora_" in name), None)
        if adapter:
            raise CheckpointError(
                f"{self.step} contains adapters, such as {adapter}; "
                "write them for PEFT with `shardtrain checkpoint from-fmengine --adapter`"
            )
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, parts in self._parts.items():
            self._shapes[name] = self._full_shape(name, parts)
        self._last: tuple[str, Tensor] | None = None

    def _require_all_files(self, files: Mapping[tuple[int, int], Path], num_layers: int) -> None:
        """Raise CheckpointError unless there is a file for embedding, layers, last norm and head of each rank."""
        expected = set(itertools.product(range(num_layers + 3), range(self.num_shards)))
        missing = []
        for number, shard in sorted(expected - files.keys()):
            missing.append(f"layer_{number:02d}-model_{shard:02d}-model_states.pt")
        surplus = [files[key].name for key in sorted(files.keys() - expected)]
        problems = []
        for kind, names in (("missing", missing), ("surplus", surplus)):
            if not names:
                continue
            shown = ", ".join(names[:8])
            if len(names) > 8:
                shown += f" and {len(names) - 8} more"
            problems.append(f"{len(names)} {kind}: {shown}")
        if problems:
            raise CheckpointError(
                f"{self.step} does not fit the {num_layers} layers in config.json: {'; '.join(problems)}"
            )

    def _full_shape(self, name: str, parts: list[tuple[TorchFile, Stored]]) -> tuple[int, ...]:
        """Return the unsharded shape of a tensor.

        Raises:
            CheckpointError: a part is missing, or the parts do not fit together.
        """
        if len(parts) != self.num_shards:
            files = ", ".join(file.path.name for file, _ in parts[:4])
            raise CheckpointError(
                f"{self.step}: {name} is in {len(parts)} of {self.num_shards} model-parallel files ({files})"
            )

        # A dimension that the tensor does not have cannot be split.
        shapes = [stored.shape for _, stored in parts]
        first = shapes[0]
        dim = self._family.split_dim(name)
        if dim is not None and len(first) <= dim:
            dim = None
        # Parts may only differ in size along the dimension that ranks split.
        common_shapes = set(shapes)
        if dim is not None:
            common_shapes = set()
            for shape in shapes:
                common_shapes.add((*shape[:dim], *shape[dim + 1 :]))
        dtypes = {stored.dtype for _, stored in parts}
        ranks = {len(shape) for shape in shapes}
        if len(dtypes) > 1 or len(common_shapes) > 1 or len(ranks) > 1:
            kinds = ", ".join(f"{stored.dtype} {list(stored.shape)}" for _, stored in parts[:4])
            raise CheckpointError(f"{self.step}: the parts of {name} do not fit together: {kinds}")
        if dim is None:
            return first
        size = sum(shape[dim] for shape in shapes)
        return (*first[:dim], size, *first[dim + 1 :])

    def names(self) -> list[str]:
        return sorted(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._parts[name][0][1].dtype)  # type: ignore[no-any-return]

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """Read a slice. Raise CheckpointError if the copies of a replicated tensor differ."""
        # Keep only one tensor in memory: free the last one before reading the next.
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._read(name)
        tensor = self._last[1]
        return tensor[tuple(box)] if len(box) else tensor

    def _read(self, name: str) -> Tensor:
        """Join the parts of a split tensor, or compare the copies of a replicated one."""
        parts = self._parts[name]
        dim = self._family.split_dim(name)
        first_file, first_stored = parts[0]
        first = first_file.tensor(first_stored)
        if len(parts) == 1:
            return first
        if dim is None or len(first.shape) <= dim:
            # Compare bytes, because NaN is not equal to itself.
            first_bytes = first.view(torch.uint8)
            for file, stored in parts[1:]:
                if not torch.equal(file.tensor(stored).view(torch.uint8), first_bytes):
                    raise CheckpointError(
                        f"{self.step}: {name} differs between {first_file.path.name} and {file.path.name}, but is "
                        "replicated over model-parallel ranks; check that both files are from the same run"
                    )
            return first
        joined = torch.empty(self._shapes[name], dtype=first.dtype)
        begin = 0
        for number, (file, stored) in enumerate(parts):
            part = first if number == 0 else file.tensor(stored)
            joined.narrow(dim, begin, part.shape[dim]).copy_(part)
            begin += part.shape[dim]
        return joined

    def __exit__(self, *_: object) -> None:
        self._last = None
