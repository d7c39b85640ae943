"""Rules that join the model's sizes and the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardtrain.config import derived
from shardtrain.config.coerce import Unfit, coerce
from shardtrain.config.load import Loaded
from shardtrain.config.model_file import ModelFacts, read_model_file, shape
from shardtrain.config.options import nearest
from shardtrain.config.rules.values import any_of, problem
from shardtrain.config.settings import Value
from shardtrain.utils.errors import ConfigError, Problem

_PARTS = ("num_layers", "num_experts", "num_shared_experts")
_MOST_PARTS = 4096
"""As of a Hugging Face folder: each part is built, if without memory."""
_MOST_SIZE = 2**31 - 1
_KINDS = {"int": int, "float": float, "bool": bool, "str": str}


def model_shape(loaded: Loaded) -> dict[str, Any] | None:
    """Return the sizes of the configured model, or None where its file, flavor or overrides are wrong."""
    model = loaded.config.model
    try:
        return shape(read_model_file(model.name), model.flavor, model.overrides)
    except (ConfigError, KeyError):
        return None


def check_model(loaded: Loaded) -> Iterator[Problem]:
    """The model file, its flavor, and overrides of fields that exist, with values of their types."""
    model = loaded.config.model
    try:
        facts = read_model_file(model.name)
    except ConfigError as error:
        found = error.problems[0]
        if isinstance(found, Problem):
            yield problem(loaded, "model.name", found.rule, found.fix)
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
        fix = f"did you mean {near}?" if near else f"fields are {', '.join(facts.fields)}"
        yield Problem(option, value, f"is not a field of {loaded.config.model.name}", fix, where)
        return
    kind = _KINDS.get(facts.fields[key][0].removesuffix(" | None"))
    if kind is None:
        return
    try:
        coerce(value, kind)
    except Unfit as unfit:
        yield Problem(option, value, unfit.rule, unfit.fix, where)
        return
    if kind is int and value < 0:
        yield Problem(option, value, "must not be negative", "use 0 or more", where)
    # Numbers of parts are bounded in any file, since each part is built; what other fields of a user's file mean is the
    # user's affair
    most = _MOST_SIZE
    if key in _PARTS:
        most = _MOST_PARTS
    elif loaded.config.model.name.endswith(".py"):
        most = 2**63
    if kind is int and value > most:
        yield Problem(option, value, f"is above {most}, which no model has", "use a smaller number", where)


_AT_LEAST_ONE = (
    "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts", "moe_ffn_dim",
    "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rope_original_seq_len", "interleave_moe_layer_step",
    "floor_scale",
)  # fmt: skip
_ABOVE_ZERO = ("rope_theta", "rope_factor", "rope_scaling_factor")


def check_sizes(loaded: Loaded) -> Iterator[Problem]:
    """Sizes with which a model of this package can be built and run; a file of a user's says itself what fits."""
    sizes = model_shape(loaded)
    if sizes is None or loaded.config.model.name.endswith(".py"):
        return

    def wrong(name: str, rule: str, fix: str) -> Problem:
        option = f"model.overrides.{name}"
        return Problem(option, sizes[name], rule, fix, loaded.origins.get(option, ""))

    def number(name: str) -> float | None:
        value = sizes.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    # Sizes that leave nothing to compute; rules that divide by one of them are not asked then
    needed = [*_AT_LEAST_ONE]
    if _has_dense_layers(sizes):
        needed.append("ffn_dim")
    small = []
    for name in needed:
        value = number(name)
        if value is not None and 0 <= value < 1:
            small.append(name)
            least = 2 if name in ("head_dim", "qk_rope_head_dim") else 1  # rotary positions turn pairs
            yield wrong(name, "leaves nothing to compute", f"use {least} or more")
    for name in _ABOVE_ZERO:
        value = number(name)
        if value is not None and value <= 0:
            yield wrong(name, "must be above 0", "use a number above 0")
    if small:
        return

    # Heads
    heads = _size(sizes, "num_heads")
    key_heads = _size(sizes, "num_kv_heads")
    if heads and key_heads and heads % key_heads:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        yield wrong("num_kv_heads", f"does not divide the {heads} attention heads", f"use {any_of(legal)}")
    rotary = "qk_rope_head_dim" if "qk_rope_head_dim" in sizes else "head_dim"
    value = number(rotary)
    # The share of a head that GPT-NeoX turns has a rule of its own
    if value is not None and "rotary_pct" not in sizes and (value < 2 or value % 2):
        yield wrong(rotary, "cannot be turned in pairs by its position", "use an even number above 0")
    width = _size(sizes, "qk_nope_head_dim") + _size(sizes, "qk_rope_head_dim")
    if "v_head_dim" in sizes and _size(sizes, "v_head_dim") > width:
        rule = f"is more than the {width} features of a key, to which values are padded"
        yield wrong("v_head_dim", rule, f"use at most {width}")

    # Rotary angles
    if sizes.get("rope_scaling") not in (None, "none", "linear", "llama3"):
        yield wrong("rope_scaling", "is not a way to scale rotary angles", 'use "none", "linear" or "llama3"')
    low = number("rope_low_freq_factor")
    high = number("rope_high_freq_factor")
    if sizes.get("rope_scaling") == "llama3" and low is not None and high is not None and low > high:
        yield wrong("rope_low_freq_factor", f"is above rope_high_freq_factor {high}", "use a smaller one")
    theta = number("rope_theta")
    if "rope_beta_fast" in sizes and theta is not None and 0 < theta <= 1:
        yield wrong("rope_theta", "leaves no wavelengths for YaRN to choose from", "use a number above 1")

    dropout = number("dropout")
    if dropout is not None and not 0 <= dropout < 1:
        yield wrong("dropout", "must be at least 0 and below 1", "use 0 to 0.5")


def check_tensor_parallel(loaded: Loaded) -> Iterator[Problem]:
    """Tensor parallelism deals whole heads and equal shares of the feed-forward and vocabulary dimensions."""
    sizes = model_shape(loaded)
    tp = loaded.config.parallelism.tensor_parallel_degree
    if sizes is None or tp < 2:
        return
    heads = _size(sizes, "num_heads")
    counts = {
        "{} attention heads": heads,
        "{} KV heads": _size(sizes, "num_kv_heads") or heads,
        "feed-forward dimension {}": _size(sizes, "ffn_dim") if _has_dense_layers(sizes) else 0,
        "shared experts' feed-forward dimension {}": _size(sizes, "num_shared_experts") * _size(sizes, "moe_ffn_dim"),
        "vocabulary of {}": _size(sizes, "vocab_size"),
    }
    known = {text: count for text, count in counts.items() if count}
    broken = [text.format(count) for text, count in known.items() if count % tp]
    if broken:
        common = math.gcd(*known.values())
        legal = [n for n in range(1, min(common, 4096) + 1) if common % n == 0]
        model = f"{loaded.config.model.name}/{loaded.config.model.flavor}"
        rule = f"does not divide the {' nor the '.join(broken)} of model {model}"
        yield problem(loaded, "parallelism.tensor_parallel_degree", rule, f"use {any_of(legal)}")


def _has_dense_layers(sizes: dict[str, Any]) -> bool:
    """Whether ``ffn_dim`` is used: where every layer has experts, there is no other feed-forward."""
    return "moe_ffn_dim" not in sizes or dense_layers(sizes) > 0


def dense_layers(sizes: dict[str, Any]) -> int:
    """How many layers of a model with experts have none."""
    layers = _size(sizes, "num_layers")
    step = _size(sizes, "interleave_moe_layer_step")
    return layers - layers // step if step else min(layers, _size(sizes, "num_dense_layers"))


_OF_TORCHTITAN = ("c4", "c4_mini", "c4_test")


def rotary_notes(loaded: Loaded) -> list[str]:
    """Return where rotary angles are not torchtitan's, for a file of torchtitan's: no option of its says which it has.

    Its files are known by older names of options and by its datasets. v0.2 scales the angles of every Llama 3 and the
    versions before it of none; it stretches DeepSeek-V3's where ``training.seq_len`` is above the original length.
    """
    config = loaded.config
    sizes = model_shape(loaded) or {}
    is_toml = loaded.path is not None and loaded.path.suffix == ".toml"  # not a file of torchtune's, say
    of_torchtitan = loaded.renames or config.training.dataset in _OF_TORCHTITAN
    if not (is_toml and of_torchtitan and loaded.is_set("model.name")):
        return []
    set_by_hand = {"model.overrides.rope_scaling", "model.overrides.rope_factor"} & loaded.origins.keys()
    if set_by_hand or config.model.flavor == "folder":
        return []
    scaling = sizes.get("rope_scaling", "none")
    factor = sizes.get("rope_factor", 1.0)
    if config.model.name == "llama3" and scaling == "none":
        return [
            "rotary angles: torchtitan v0.2 scales those of every Llama 3, its debugmodel too, and this model's are "
            'not; to continue what v0.2 trained, set model.overrides rope_scaling = "llama3", rope_scaling_factor = 8.0'
        ]
    if config.model.name == "llama3" and scaling == "llama3" and loaded.renames:
        return [
            "rotary angles: scaled as Llama 3.1's are, which torchtitan does from v0.2 on; to continue what an older "
            'one trained, set model.overrides rope_scaling = "none"'
        ]
    length = sizes.get("rope_original_seq_len", math.inf)
    if config.model.name == "deepseek_v3" and factor != 1.0 and config.training.seq_len <= length:
        return [
            f"rotary angles: stretched, as DeepSeek's are; torchtitan does so only where training.seq_len is above "
            f"{length}, so to continue what it trained, set model.overrides.rope_factor = 1.0"
        ]
    return []


def check_sequence(loaded: Loaded) -> Iterator[Problem]:
    """Each context-parallel rank holds a part of the sequence, or two with a balanced load, cut again over tp ranks."""
    p = loaded.config.parallelism
    c = loaded.config
    tp = p.tensor_parallel_degree
    cp = p.context_parallel_degree
    if min(tp, cp) < 1:
        return
    # A degree that is refused already is left out: a length that fits it would be of no use
    if any(check_tensor_parallel(loaded)):
        tp = 1
    chunks = 2 if cp > 1 and derived.is_context_balanced(p) else 1
    cuts = cp * math.lcm(chunks, tp)
    parts = [f"context_parallel_degree {cp}" if cp > 1 else "", f"tensor_parallel_degree {tp}" if tp > 1 else ""]
    what = ", ".join(part for part in parts if part)
    what += ', and two chunks a rank of context_parallel_load_balancer "headtail"' if chunks == 2 else ""
    for option, used in (("training.seq_len", True), ("validation.seq_len", c.validation.enable)):
        seq_len = loaded.value(option)
        if used and seq_len >= 1 and seq_len % cuts:
            low = seq_len // cuts * cuts
            high = -(-seq_len // cuts) * cuts
            rule = f"is not a multiple of {cuts} ({what})"
            yield problem(loaded, option, rule, f"use {any_of([n for n in (low, high) if n])}")


def check_layers(loaded: Loaded) -> Iterator[Problem]:
    """Every pipeline rank needs a layer, where stages are not named: those may be an end of the model alone."""
    sizes = model_shape(loaded)
    pp = loaded.config.parallelism.pipeline_parallel_degree
    layers = _size(sizes or {}, "num_layers")
    if layers and pp > layers and loaded.config.parallelism.module_fqns_per_model_part is None:
        rule = f"is more than the {layers} layers of the model"
        yield problem(loaded, "parallelism.pipeline_parallel_degree", rule, f"use at most {layers}")


def check_batch(loaded: Loaded) -> Iterator[Problem]:
    """The global batch is a whole number of local batches on every data-parallel rank that is known of."""
    t = loaded.config.training
    p = loaded.config.parallelism
    ranks = p.data_parallel_replicate_degree * max(p.data_parallel_shard_degree, 1)
    per_pass = t.local_batch_size * ranks
    if t.global_batch_size < 1 or per_pass < 1 or t.global_batch_size % per_pass == 0:
        return
    nearby = [
        n for n in (t.global_batch_size // per_pass * per_pass, -(-t.global_batch_size // per_pass) * per_pass) if n
    ]
    rule = f"is not a multiple of local_batch_size {t.local_batch_size} times {ranks} data-parallel ranks"
    yield problem(loaded, "training.global_batch_size", rule, f"use {any_of(nearby)}, or -1")


def _size(sizes: dict[str, Any], name: str) -> int:
    """Return a size of the model, or 0 where it is unknown or no whole number."""
    value = sizes.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
