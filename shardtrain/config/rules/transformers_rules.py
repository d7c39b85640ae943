"""Rules of ``model.name = "transformers"``: requirements on its folder, and options that it does not support.

The folder's config.json is read as data; torch and transformers are not imported.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardtrain.config.folder_model import NAME
from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import any_of, divisors, problem
from shardtrain.config.schema import Config
from shardtrain.hub_formats.config_json import in_transformers
from shardtrain.hub_formats.format import CODE
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import Problem

ATTENTION = ("auto", "sdpa", "eager")
_MAX_BYTES = 2**24
# Keys of config.json with the number of heads, and of features of the feed-forward network.
_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "num_heads",
    "encoder_attention_heads",
)
_FEATURES = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "n_inner",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)


def check_transformers(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the folder, the mesh and the options of a transformers model."""
    c = loaded.config
    if c.model.name != NAME:
        return
    if importlib.util.find_spec(NAME) is None:
        yield problem(
            loaded,
            "model.name",
            rule="needs transformers, which is not installed",
            fix="install shardtrain[hf]",
        )
    # Overrides of this model are options of the implementation, not fields of a Config.
    overrides = c.model.overrides
    attention = overrides.get("attention", "auto")
    if attention not in ATTENTION:
        yield Problem(
            "model.overrides.attention",
            attention,
            rule="is unknown",
            fix=f"use {', '.join(ATTENTION)}",
            where=loaded.origins.get("model.overrides.attention", ""),
        )
    yield from _check_options(loaded)
    option, folder = _folder(c)
    where = loaded.origins.get(option, "")
    content = _read(folder)
    if isinstance(content, str):
        yield Problem(
            option,
            folder,
            rule=content,
            fix="name a folder with config.json, weights and tokenizer",
            where=where,
        )
        # Further checks need the folder's config.json.
        return
    kind = content.get("model_type")
    # Code in the folder never runs, so the library must have a class for the architecture.
    code = sorted(key for key in content if CODE.search(key))
    if code and not in_transformers(kind):
        yield Problem(
            option,
            folder,
            rule=f"is of model_type {kind!r}, which transformers does not have, and its own code is never run here",
            fix="write a model file, or install a version that has it",
            where=where,
        )
    yield from _check_balance_loss(loaded, content)
    yield from _check_split(loaded, content)


def _folder(config: Config) -> tuple[str, str]:
    # The folder of the weights may differ from that of the tokenizer.
    path = config.model.overrides.get("path")
    if path is None or path == config.model.hf_assets_path:
        return "model.hf_assets_path", config.model.hf_assets_path
    return "model.overrides.path", str(path)


def _read(folder: str) -> Mapping[str, Any] | str:
    """Return the folder's config.json, or the rule that it violates."""
    path = Path(folder) / "config.json"
    try:
        content = checked_json.parse(bounded_reads.read_all(path, _MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return "has no config.json"
    except OSError as error:
        return f"has a config.json that cannot be read ({error.strerror or error})"
    except (ValueError, RecursionError) as error:
        return f"has a config.json that cannot be read ({type(error).__name__})"
    if isinstance(content, dict):
        return content
    return "has a config.json that is not a JSON object"


def _check_options(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    tp = c.parallelism.tensor_parallel_degree
    if tp > 1 and c.model.overrides.get("dropout"):
        yield Problem(
            "model.overrides.dropout",
            True,
            rule="cannot be used with tensor parallelism: ranks would drop other numbers than one process",
            fix="leave it out, or set the degree to 1",
            where=loaded.origins.get("model.overrides.dropout", ""),
        )
    if c.parallelism.context_parallel_degree > 1 and c.model.overrides.get("dropout"):
        yield Problem(
            "model.overrides.dropout",
            True,
            rule="cannot be used with context parallelism: attention over split sequences has no dropout",
            fix="leave it out, or set the degree to 1",
            where=loaded.origins.get("model.overrides.dropout", ""),
        )
    if tp > 1 and c.compile.enable and "model" in c.compile.components:
        yield problem(
            loaded,
            "compile.enable",
            rule=f"gets gradients wrong where tensor parallelism splits the blocks of model.name={NAME}",
            fix="set it to false, or tensor_parallel_degree to 1",
        )
    compiles_model = c.compile.enable and "model" in c.compile.components
    if c.parallelism.expert_parallel_degree > 1 and compiles_model:
        rule = f"is not supported for model.name={NAME} with experts that are split over ranks"
        yield problem(
            loaded, "compile.enable", rule, "set it to false, or expert_parallel_degree to 1"
        )
    # Muon: the default patterns are names of native models.
    patterns = c.optimizer.muon_adamw_patterns
    if c.optimizer.name == "Muon" and patterns == Config().optimizer.muon_adamw_patterns:
        yield problem(
            loaded,
            "optimizer.muon_adamw_patterns",
            rule=f"names no parameter of model.name={NAME}, whose names are those of transformers",
            fix='name its ends, e.g. ["*embed*", "*lm_head*", "*norm*", "*.bias"]',
        )


def _check_balance_loss(loaded: Loaded, content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems of the balance loss of experts, if config.json or the override switches it on."""
    c = loaded.config
    coefficient = c.model.overrides.get("balance_loss_coeff")
    # The override takes precedence over config.json.
    is_on = bool(content.get("output_router_logits"))
    option, value, fix = "model.overrides.balance_loss_coeff", coefficient, "remove it"
    if coefficient is None:
        fix = "set model.overrides.balance_loss_coeff = 0"
    else:
        is_on = coefficient != 0
    if not is_on:
        return
    where = loaded.origins.get(option, "")
    if c.task.name != "language_model":
        rule = f"is not supported with task.name={c.task.name}"
        if coefficient is None:
            rule = f"follows output_router_logits=true in config.json, and {rule}"
        yield Problem(option, value, rule=rule, fix=fix, where=where)
    if c.compile.enable and "model" in c.compile.components:
        rule = f"is not supported with the balance loss of experts of model.name={NAME}"
        yield problem(
            loaded,
            "compile.enable",
            rule,
            "set it to false, or model.overrides.balance_loss_coeff to 0",
        )


def _check_split(loaded: Loaded, content: Mapping[str, Any]) -> Iterator[Problem]:
    tp = loaded.config.parallelism.tensor_parallel_degree
    # Sizes that config.json lacks are unknown and not checked.
    counts = {}
    for key in (*_HEADS, *_FEATURES):
        size = content.get(key)
        if isinstance(size, int) and size > 0:
            counts[key] = size
    # Each rank has the same number of heads and features.
    broken = [f"{key}={count}" for key, count in counts.items() if tp > 1 and count % tp]
    if broken:
        common = math.gcd(*counts.values())
        legal = divisors(common, limit=4096)
        yield problem(
            loaded,
            "parallelism.tensor_parallel_degree",
            rule=f"does not divide {' nor '.join(broken)} of config.json",
            fix=f"use {any_of(legal)}",
        )
