"""The ``config.json`` of a Hugging Face folder as data. No torch is imported, and nothing of the configuration."""

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
"""Layers, or experts of one, that a model may have."""
_COUNTS = re.compile(
    r"(num_)?(hidden|encoder|decoder)_layers|num_(decoder_|nextn_predict_)?layers|n_layers?|(num|n)_(\w+_)?experts"
)
_TABLES = ("auto_mappings.py", "configuration_auto.py")
_FP8_KEYS = {"quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "scale_fmt"}
MXFP4 = "mxfp4"
Quantised = tuple[int, int] | Literal["mxfp4"] | None
"""How weights are quantised: in fp8 by blocks of so many rows and columns, experts in MXFP4, or not."""


def block_of(config: Mapping[str, Any], where: str) -> Quantised:
    """How weights are quantised, by ``quantization_config`` of a ``config.json``; None where nothing is.

    Raises:
        ConfigError: for any other kind of quantisation.
    """
    quantization = config.get("quantization_config") or config.get("quantization")
    if quantization is None:
        return None
    keys = quantization if isinstance(quantization, dict) else {}
    if keys.get("quant_method") == MXFP4 and not set(keys) - {"quant_method", "modules_to_not_convert"}:
        return "mxfp4"
    block = keys.get("weight_block_size")
    unknown = sorted(map(str, set(keys) - _FP8_KEYS))
    is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 1 <= n <= 2**20 for n in block)
    if keys.get("quant_method") != "fp8" or keys.get("fmt", "e4m3") != "e4m3" or not is_block:
        kind = str(keys.get("quant_method") or ("MLX" if "bits" in keys else "an unnamed method"))
        raise ConfigError(
            f"{where}: quantization_config says that the weights are quantised by {kind}, which is not read here (fp8 "
            "e4m3 with a weight_block_size is, and mxfp4); use the folder of the weights before quantisation"
        )
    if unknown:
        raise ConfigError(
            f"{where}: quantization_config has {', '.join(unknown)}, which fp8 weights with a weight_block_size do not "
            "need here and may change them; use the weights before quantisation"
        )
    assert block is not None
    return block[0], block[1]


def _check_counts(found: Mapping[str, Any], path: Path) -> None:
    """Stop at numbers of parts that no model has: each part is made, and checked, one by one."""
    for table in (found, *(value for value in found.values() if isinstance(value, dict))):
        for key, value in table.items():
            if _COUNTS.fullmatch(str(key)) and type(value) is int and value > MAX_PARTS:
                raise CheckpointError(f"{path}: {key}={value} is above {MAX_PARTS}, which no model has")


def in_transformers(model_type: Any) -> bool:
    """Whether the installed ``transformers`` names a model_type in its tables, which are read as text."""
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(place, "models", "auto", name) for place in places for name in _TABLES]
    entry = re.compile(rf'\(\s*"{re.escape(str(model_type))}",\s*"\w+Config"')
    return any(file.is_file() and entry.search(file.read_text(encoding="utf-8")) is not None for file in files)


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object of a few keys, such as config.json; raises CheckpointError where it is none."""
    try:
        found = checked_json.parse(bounded_reads.whole(path, MAX_JSON_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        fix = "give a folder with config.json and safetensors"
        name = path.parent.as_posix()
        if path.name == CONFIG and not path.parent.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
            fix += f"; one of the hub comes with `shardtrain data download --repo_id {name} --all`"
        raise CheckpointError(f"{path} is missing; {fix}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy or download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object; copy or download it again")
    if path.name == CONFIG:
        _check_counts(found, path)
    return found
