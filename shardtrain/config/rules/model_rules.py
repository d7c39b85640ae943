"""Rules about the model: its file, flavor and overrides, and the sizes that the mesh must divide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardtrain.config import derived, ramps
from shardtrain.config.aliases import TORCHTITAN_DATASETS
from shardtrain.config.coerce import PLAIN_KINDS, Unfit, coerce
from shardtrain.config.load import Loaded
from shardtrain.config.model_file import ModelFacts, read_model_file, shape
from shardtrain.config.options import nearest
from shardtrain.config.rules.ramp_rules import check_batch_on, nearest_multiples
from shardtrain.config.rules.values import any_of, divisors, problem
from shardtrain.config.settings import Value
from shardtrain.hub_formats.config_json import MAX_PARTS
from shardtrain.utils.errors import ConfigError, Problem

_PARTS = ("num_layers", "num_experts", "num_shared_experts", "num_nextn_predict_layers")
"""Sizes of at most ``MAX_PARTS``, because each layer and expert is built on the meta device."""
_MAX_SIZE = 2**31 - 1


def model_shape(loaded: Loaded) -> dict[str, Any] | None:
    """Return the sizes of the configured model, or None if its file, flavor or overrides are wrong."""
    model = loaded.config.model
    try:
        return shape(read_model_file(model.name), model.flavor, model.overrides)
    except (ConfigError, KeyError):
        return None


def check_model(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the model file, of its flavor, and of overrides with unknown fields or
    wrong types.
    """
    model = loaded.config.model
    try:
        facts = read_model_file(model.name)
    except ConfigError as error:
        reason = error.problems[0]
        if isinstance(reason, Problem):
            yield problem(loaded, "model.name", reason.rule, reason.fix)
        return
    if model.flavor not in facts.flavors:
        near = nearest(model.flavor, facts.flavors)
        fix = f"did you mean {near}? " if near else ""
        fix += f"flavors are {', '.join(facts.flavors)}"
        yield problem(loaded, "model.flavor", f"is not a flavor of {model.name}", fix)
    for key, value in model.overrides.items():
        yield from _check_override(loaded, facts, key, value)


def _check_override(loaded: Loaded, facts: ModelFacts, key: str, value: Value) -> Iterator[Problem]:
    option = f"model.overrides.{key}"
    where = loaded.origins.get(option, "")
    if key not in facts.fields:
        near = nearest(key, facts.fields)
        yield Problem(
            option,
            value,
            rule=f"is not a field of {loaded.config.model.name}",
            fix=f"did you mean {near}?" if near else f"fields are {', '.join(facts.fields)}",
            where=where,
        )
        return
    kind = PLAIN_KINDS.get(facts.fields[key][0].removesuffix(" | None"))
    if kind is None:
        return
    try:
        coerce(value, kind)
    except Unfit as unfit:
        yield Problem(option, value, unfit.rule, unfit.fix, where)
        return
    if kind is int and value < 0:
        yield Problem(option, value, "must not be negative", "use 0 or more", where)
    # The number of layers and experts is bounded in every file, because each of them is built. The
    # other fields of a user's file may have any meaning.
    maximum = _MAX_SIZE
    if key in _PARTS:
        maximum = MAX_PARTS
    elif loaded.config.model.name.endswith(".py"):
        maximum = 2**63
    if kind is int and value > maximum:
        yield Problem(
            option,
            value,
            rule=f"is above {maximum}, which no model has",
            fix="use a smaller number",
            where=where,
        )


_AT_LEAST_ONE = (
    "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts", "moe_ffn_dim",
    "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rope_original_seq_len", "interleave_moe_layer_step",
    "floor_scale", "full_attention_interval", "linear_key_heads", "linear_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_width", "shared_ffn_dim",
)  # fmt: skip
_ABOVE_ZERO = ("rope_theta", "rope_factor", "rope_scaling_factor")


def check_sizes(loaded: Loaded) -> Iterator[Problem]:
    """Yield sizes with which a model of this package cannot be built or run. A user's model file
    checks its own.
    """
    sizes = model_shape(loaded)
    if sizes is None or loaded.config.model.name.endswith(".py"):
        return
    empty_sizes = list(nonempty_sizes(loaded, sizes))
    yield from empty_sizes
    yield from positive_numbers(loaded, sizes)
    # The other rules divide by these sizes.
    if empty_sizes:
        return
    yield from head_sizes(loaded, sizes)
    yield from rotary_options(loaded, sizes)
    dropout = _number(sizes, "dropout")
    if dropout is not None and not 0 <= dropout < 1:
        yield _size_problem(
            loaded,
            sizes,
            "dropout",
            rule="must be at least 0 and below 1",
            fix="use 0 to 0.5",
        )


def nonempty_sizes(loaded: Loaded, sizes: dict[str, Any]) -> Iterator[Problem]:
    """Sizes are at least 1."""
    names = [*_AT_LEAST_ONE]
    if _has_dense_layers(sizes):
        names.append("ffn_dim")
    for name in names:
        value = _number(sizes, name)
        # check_model reports negative sizes
        if value is not None and 0 <= value < 1:
            # Rotary positions rotate pairs of features.
            lowest = 2 if name in ("head_dim", "qk_rope_head_dim") else 1
            yield _size_problem(
                loaded,
                sizes,
                name,
                rule="leaves nothing to compute",
                fix=f"use {lowest} or more",
            )


def positive_numbers(loaded: Loaded, sizes: dict[str, Any]) -> Iterator[Problem]:
    """Constants of the rotary angles are positive."""
    for name in _ABOVE_ZERO:
        value = _number(sizes, name)
        if value is not None and value <= 0:
            yield _size_problem(loaded, sizes, name, "must be above 0", "use a number above 0")


def head_sizes(loaded: Loaded, sizes: dict[str, Any]) -> Iterator[Problem]:
    """Key-value heads divide the query heads, rotary features are pairs, and values are at most as
    wide as keys.
    """
    heads = _size(sizes, "num_heads")
    kv_heads = _size(sizes, "num_kv_heads")
    if heads and kv_heads and heads % kv_heads:
        legal = divisors(heads)
        yield _size_problem(
            loaded,
            sizes,
            "num_kv_heads",
            rule=f"does not divide the {heads} attention heads",
            fix=f"use {any_of(legal)}",
        )

    # GPT-NeoX checks its rotary fraction itself.
    name = "qk_rope_head_dim" if "qk_rope_head_dim" in sizes else "head_dim"
    value = _number(sizes, name)
    if value is not None and "rotary_pct" not in sizes and (value < 2 or value % 2):
        yield _size_problem(
            loaded,
            sizes,
            name,
            rule="must be even because rotary positions rotate pairs of features",
            fix="use an even number above 0",
        )

    key_width = _size(sizes, "qk_nope_head_dim") + _size(sizes, "qk_rope_head_dim")
    if "v_head_dim" in sizes and _size(sizes, "v_head_dim") > key_width:
        yield _size_problem(
            loaded,
            sizes,
            "v_head_dim",
            rule=f"exceeds the {key_width} features of a key, to which values are padded",
            fix=f"use at most {key_width}",
        )


def rotary_options(loaded: Loaded, sizes: dict[str, Any]) -> Iterator[Problem]:
    """The kind of rotary scaling is known, and its constants are valid.

    With llama3 scaling, the low frequency factor is at most the high one. With YaRN, rope_theta is above 1.
    """
    scaling = sizes.get("rope_scaling")
    if scaling not in (None, "none", "linear", "llama3"):
        yield _size_problem(
            loaded,
            sizes,
            "rope_scaling",
            rule="is not a scaling of rotary angles",
            fix='use "none", "linear" or "llama3"',
        )
    low = _number(sizes, "rope_low_freq_factor")
    high = _number(sizes, "rope_high_freq_factor")
    if scaling == "llama3" and low is not None and high is not None and low > high:
        yield _size_problem(
            loaded,
            sizes,
            "rope_low_freq_factor",
            rule=f"is above rope_high_freq_factor {high}",
            fix="use a smaller one",
        )
    theta = _number(sizes, "rope_theta")
    if "rope_beta_fast" in sizes and theta is not None and 0 < theta <= 1:
        yield _size_problem(
            loaded,
            sizes,
            "rope_theta",
            rule="leaves no wavelengths for YaRN to choose from",
            fix="use a number above 1",
        )


def _size_problem(loaded: Loaded, sizes: dict[str, Any], name: str, rule: str, fix: str) -> Problem:
    option = f"model.overrides.{name}"
    return Problem(option, sizes[name], rule, fix, loaded.origins.get(option, ""))


def _number(sizes: dict[str, Any], name: str) -> float | None:
    value = sizes.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return None


def check_tensor_parallel(loaded: Loaded) -> Iterator[Problem]:
    """The tensor-parallel degree divides the heads, the feed-forward dimensions and the vocabulary."""
    sizes = model_shape(loaded)
    tp = loaded.config.parallelism.tensor_parallel_degree
    if sizes is None or tp < 2:
        return
    # Collect the sizes that tensor parallelism divides. 0 is unknown, or the model does not have it.
    heads = _size(sizes, "num_heads")
    ffn_dim = 0
    if _has_dense_layers(sizes):
        ffn_dim = _size(sizes, "ffn_dim")
    divided = {
        "{} attention heads": heads,
        "{} KV heads": _size(sizes, "num_kv_heads") or heads,
        "feed-forward dimension {}": ffn_dim,
        "shared experts' feed-forward dimension {}": (
            _size(sizes, "num_shared_experts") * _size(sizes, "moe_ffn_dim")
        ),
        "shared expert's feed-forward dimension {}": _size(sizes, "shared_ffn_dim"),
        "{} key heads of linear attention": _size(sizes, "linear_key_heads"),
        "vocabulary of {}": _size(sizes, "vocab_size"),
    }
    divided = {text: count for text, count in divided.items() if count}
    uneven = [text.format(count) for text, count in divided.items() if count % tp]
    if uneven:
        # Any degree that divides all of them is legal.
        common = math.gcd(*divided.values())
        legal = divisors(common, limit=4096)
        model = f"{loaded.config.model.name}/{loaded.config.model.flavor}"
        yield problem(
            loaded,
            "parallelism.tensor_parallel_degree",
            rule=f"does not divide the {' nor the '.join(uneven)} of model {model}",
            fix=f"use {any_of(legal)}",
        )


def _has_dense_layers(sizes: dict[str, Any]) -> bool:
    """True if a layer has a feed-forward of ``ffn_dim`` instead of experts."""
    return "moe_ffn_dim" not in sizes or dense_layers(sizes) > 0


def dense_layers(sizes: dict[str, Any]) -> int:
    """Return the number of layers without experts, of a model with experts."""
    layers = _size(sizes, "num_layers")
    step = _size(sizes, "interleave_moe_layer_step")
    if step:
        return layers - layers // step
    return min(layers, _size(sizes, "num_dense_layers"))


def rotary_notes(loaded: Loaded) -> list[str]:
    """Return a note if the rotary angles differ from those that torchtitan uses with this file.

    No option of torchtitan selects the scaling. v0.2 scales the angles of every Llama 3, and
    earlier versions of none. It stretches those of DeepSeek-V3 if ``training.seq_len`` exceeds the
    original length. A file of torchtitan is recognized by older names of options and by its
    datasets.
    """
    config = loaded.config
    sizes = model_shape(loaded) or {}
    is_toml = loaded.path is not None and loaded.path.suffix == ".toml"
    is_from_torchtitan = loaded.renames or config.training.dataset in TORCHTITAN_DATASETS
    if not (is_toml and is_from_torchtitan and loaded.is_set("model.name")):
        return []
    set_by_hand = {
        "model.overrides.rope_scaling",
        "model.overrides.rope_factor",
    } & loaded.origins.keys()
    if set_by_hand or config.model.flavor == "folder":
        return []
    scaling = sizes.get("rope_scaling", "none")
    factor = sizes.get("rope_factor", 1.0)
    if config.model.name == "llama3" and scaling == "none":
        return [
            "rotary angles: not scaled, but torchtitan v0.2 scales those of every Llama 3, "
            "including its debugmodel; "
            'to continue a run of v0.2, set model.overrides rope_scaling = "llama3", '
            "rope_scaling_factor = 8.0"
        ]
    if config.model.name == "llama3" and scaling == "llama3" and loaded.renames:
        return [
            "rotary angles: scaled like those of Llama 3.1, as in torchtitan since v0.2; "
            "to continue a run of an older "
            'version, set model.overrides rope_scaling = "none"'
        ]
    length = sizes.get("rope_original_seq_len", math.inf)
    if config.model.name == "deepseek_v3" and factor != 1.0 and config.training.seq_len <= length:
        return [
            "rotary angles: stretched like DeepSeek's, but torchtitan only does so if "
            f"training.seq_len exceeds {length}; to continue a run of torchtitan, "
            "set model.overrides.rope_factor = 1.0"
        ]
    return []


def check_sequence(loaded: Loaded) -> Iterator[Problem]:
    """The sequence length is a multiple of the number of parts that context and tensor parallelism
    split it into.

    A context-parallel rank has one part of the sequence, or two chunks with a balanced load.
    Sequence parallelism splits each of them over the tensor-parallel ranks.
    """
    p = loaded.config.parallelism
    c = loaded.config
    tp = p.tensor_parallel_degree
    cp = p.context_parallel_degree
    if min(tp, cp) < 1:
        return
    # Ignore a degree that is already reported, because it will change.
    if any(check_tensor_parallel(loaded)):
        tp = 1
    is_balanced = cp > 1 and derived.is_context_balanced(p)
    divisor = cp * math.lcm(2 if is_balanced else 1, tp)
    reasons = []
    if cp > 1:
        reasons.append(f"context_parallel_degree {cp}")
    if tp > 1:
        reasons.append(f"tensor_parallel_degree {tp}")
    if is_balanced:
        reasons.append('and two chunks per rank of context_parallel_load_balancer "headtail"')

    lengths = ["training.seq_len"]
    if c.validation.enable:
        lengths.append("validation.seq_len")
    for option in lengths:
        seq_len = loaded.value(option)
        if seq_len >= 1 and seq_len % divisor:
            yield problem(
                loaded,
                option,
                rule=f"is not a multiple of {divisor} ({', '.join(reasons)})",
                fix=f"use {any_of(nearest_multiples(seq_len, divisor))}",
            )
    # The last length of a ramp is that of training.seq_len.
    lengths_of_ramp = ramps.sequence_lengths(c.training)[:-1]
    wrong_lengths = [length for length in lengths_of_ramp if length % divisor]
    if wrong_lengths:
        yield problem(
            loaded,
            ramps.SEQUENCE_RAMP,
            rule=(
                f"has {', '.join(map(str, wrong_lengths))}, which must be multiples of {divisor} "
                f"({', '.join(reasons)})"
            ),
            fix="use multiples",
        )


def check_layers(loaded: Loaded) -> Iterator[Problem]:
    """Every pipeline rank needs a layer, unless the stages are named: a named stage may be only an
    embedding or head.
    """
    sizes = model_shape(loaded)
    pp = loaded.config.parallelism.pipeline_parallel_degree
    layers = _size(sizes or {}, "num_layers")
    if layers and pp > layers and loaded.config.parallelism.module_fqns_per_model_part is None:
        yield problem(
            loaded,
            "parallelism.pipeline_parallel_degree",
            rule=f"exceeds the {layers} layers of the model",
            fix=f"use at most {layers}",
        )


def check_batch(loaded: Loaded) -> Iterator[Problem]:
    """The global batch is a multiple of the local batch times the known number of data-parallel ranks."""
    p = loaded.config.parallelism
    ranks = p.data_parallel_replicate_degree * max(p.data_parallel_shard_degree, 1)
    yield from check_batch_on(loaded, ranks)


def _size(sizes: dict[str, Any], name: str) -> int:
    """Return a size of the model, or 0 if it is unknown or not an integer."""
    value = sizes.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return 0
