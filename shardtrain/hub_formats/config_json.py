"""Read and check the ``config.json`` of a Hugging Face folder. Does not import torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import CheckpointError, ConfigError

CONFIG = "config.json"
MAX_JSON_BYTES = 2**28
MAX_PARTS = 4096
"""Maximum number of layers, and of experts per layer. Building a model takes time and memory for each."""
MAX_EXPERT_ROWS = 2**14
"""Maximum number of experts in a config.json: the default of Doge, whose experts are rows of a table."""
_COUNTS = re.compile(
    r"(num_)?(hidden|encoder|decoder)_layers|num_(decoder_|nextn_predict_)?layers|n_layers?|(num|n)_(\w+_)?experts"
)
_TABLES = ("auto_mappings.py", "configuration_auto.py")
_FP8_KEYS = {
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "scale_fmt",
}
MXFP4 = "mxfp4"
Quantized = tuple[int, int] | Literal["mxfp4"] | None
"""Quantization of weights: fp8 in blocks of (rows, columns), experts in MXFP4, or None."""


def block_of(config: Mapping[str, Any], where: str) -> Quantized:
    """Return the quantization of the weights from ``quantization_config``. None if it is absent.

    Raises:
        ConfigError: the quantization is not supported.
    """
    quantization = config.get("quantization_config") or config.get("quantization")
    if quantization is None:
        return None
    keys = quantization if isinstance(quantization, dict) else {}
    method = keys.get("quant_method")
    # Another key could change how the weights are packed.
    if method == MXFP4 and keys.keys() <= {"quant_method", "modules_to_not_convert"}:
        return "mxfp4"

    block = keys.get("weight_block_size")
    is_block = False
    if isinstance(block, list) and len(block) == 2:
        is_block = all(type(n) is int and 1 <= n <= 2**20 for n in block)
    if method != "fp8" or keys.get("fmt", "e4m3") != "e4m3" or not is_block:
        # MLX does not name its method.
        kind = str(method or ("MLX" if "bits" in keys else "an unnamed method"))
        raise ConfigError(
            f"{where}: quantization_config has weights quantized by {kind}, which is not supported (fp8 e4m3 with a "
            "weight_block_size and mxfp4 are); use the folder of the weights before quantization"
        )
    unknown = sorted(map(str, keys.keys() - _FP8_KEYS))
    if unknown:
        raise ConfigError(
            f"{where}: quantization_config has {', '.join(unknown)}, which may change fp8 weights and is not "
            "supported; use the weights before quantization"
        )
    assert block is not None
    return block[0], block[1]


def _check_counts(config: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if a count of layers is above ``MAX_PARTS``, or of experts above ``MAX_EXPERT_ROWS``."""
    # A model with images has a table for its text model, and another one for its vision model.
    inner_tables = [value for value in config.values() if isinstance(value, dict)]
    for table in (config, *inner_tables):
        # Only counts matter here: each layer or expert costs time and memory when the model is built.
        for key, value in table.items():
            if not _COUNTS.fullmatch(str(key)) or type(value) is not int:
                continue
            maximum = MAX_EXPERT_ROWS if str(key).endswith("experts") else MAX_PARTS
            if value > maximum:
                raise CheckpointError(
                    f"{path}: {key}={value} is above {maximum}, which no model has"
                )


def in_transformers(model_type: Any) -> bool:
    """True if the installed ``transformers`` has a model_type. Its tables are read as text, without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None:
        return False
    # An entry of the library's table of configurations, such as ("llama", "LlamaConfig").
    entry = re.compile(rf'\(\s*"{re.escape(str(model_type))}",\s*"\w+Config"')
    # The file of the table differs between versions of the library.
    for place in spec.submodule_search_locations or ():
        for name in _TABLES:
            file = Path(place, "models", "auto", name)
            if file.is_file() and entry.search(file.read_text(encoding="utf-8")):
                return True
    return False


def read_json(path: Path, memory_bytes: int = checked_json.MEMORY_BYTES) -> Mapping[str, Any]:
    """Read a small JSON object, such as config.json.

    Raises:
        CheckpointError: it is missing, is not an object, or takes more than ``memory_bytes``.
    """
    try:
        data = bounded_reads.read_all(path, MAX_JSON_BYTES)
        content = checked_json.parse(data, memory_bytes=memory_bytes)
    except (FileNotFoundError, NotADirectoryError) as error:
        if bounded_reads.is_present(path):
            raise CheckpointError(f"{path} {error.strerror}; copy or download it again") from None
        fix = "give a folder with config.json and safetensors"
        # A relative name that does not exist may be the ID of a repository on the hub.
        name = path.parent.as_posix()
        looks_like_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None
        if path.name == CONFIG and looks_like_id and not path.parent.exists():
            fix += f"; to download it from the hub, use `shardtrain data download --repo_id {name} --all`"
        raise CheckpointError(f"{path} is missing; {fix}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}; copy or download it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy or download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; copy or download it again")
    if path.name == CONFIG:
        _check_counts(content, path)
    return content
