"""Find the native model for the ``config.json`` of a Hugging Face folder, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.config.model_file import read_model_file, shape
from shardtrain.hub_formats import (
    deepseek_v2_format,
    deepseek_v3_format,
    gpt_oss_format,
    llama4_format,
    llama_format,
    mistral_format,
    mixtral_format,
    neox_format,
    qwen2_format,
    qwen3_format,
    qwen3_moe_format,
    qwen3_next_format,
)
from shardtrain.hub_formats.config_json import CONFIG, Quantized, block_of, read_json
from shardtrain.hub_formats.format import (
    FREE,
    TRANSFORMERS_HINT,
    Fields,
    HubFormat,
    OnlyInTransformers,
)

HUBS: dict[str, HubFormat] = {
    "llama2": llama_format.HUB,
    "llama3": llama_format.HUB,
    "llama4": llama4_format.HUB,
    "mistral": mistral_format.HUB,
    "qwen2": qwen2_format.HUB,
    "qwen3": qwen3_format.HUB,
    "qwen3_moe": qwen3_moe_format.HUB,
    "qwen3_next": qwen3_next_format.HUB,
    "mixtral": mixtral_format.HUB,
    "deepseek_v2": deepseek_v2_format.HUB,
    "deepseek_v3": deepseek_v3_format.HUB,
    "gpt_oss": gpt_oss_format.HUB,
    "neox": neox_format.HUB,
}
"""Hugging Face format of each native model file that has one."""


@dataclass(frozen=True)
class Description:
    """A native model that matches a ``config.json``.

    Attributes:
        name: the model file, for ``model.name``.
        flavor: the most similar flavor, for ``model.flavor``.
        overrides: differences from ``flavor``, for ``model.overrides``.
        values: every field of the model's Config except those in ``FREE``.
        hub: Hugging Face format of the model.
        notices: lines about keys that have no effect here.
        block: quantization of the weights.
        config: content of config.json, for a multimodal model only the part of the text model.
    """

    name: str
    flavor: str
    overrides: Mapping[str, Any]
    values: Mapping[str, Any]
    hub: HubFormat
    notices: tuple[str, ...]
    block: Quantized
    config: Mapping[str, Any]


def describe(folder: Path, name: str = "") -> Description:
    """Read a folder's ``config.json`` and find its model.

    ``name`` selects the model file. If empty, the most similar model is used.

    Raises:
        OnlyInTransformers: the model has no native implementation, but may be a class of ``transformers``.
        ConfigError: the file describes an unsupported model.
        CheckpointError: the file does not exist or is not a JSON object.
    """
    # A multimodal model describes its text model in a part of the file.
    path = folder / CONFIG
    whole_file = read_json(path)
    content = whole_file
    for architecture in HUBS.values():
        content = architecture.text_config(content)

    # Find the model files with this model_type.
    kind = content.get("model_type")
    architectures = content.get("architectures") or []
    fitting = [name for name, hub in HUBS.items() if hub.model_type == kind]
    if not fitting:
        known = sorted({hub.model_type for hub in HUBS.values()})
        raise OnlyInTransformers(
            f"{path}: model_type={kind!r} is not one of {', '.join(known)}{TRANSFORMERS_HINT} and "
            f'model.hf_assets_path = "{folder}"'
        )
    hub = HUBS[fitting[0]]
    if isinstance(architectures, list) and architectures and hub.architecture not in architectures:
        raise OnlyInTransformers(
            f"{path}: architectures={architectures!r} is not {hub.architecture}{TRANSFORMERS_HINT}"
        )

    # Read every key of the architecture, because ``notices`` reports the keys that were not read.
    block = block_of(content, str(path))
    fields = Fields(content, str(path), hub.defaults)
    values = hub.read(fields)
    fields.take("num_nextn_predict_layers", int, 0)
    fields.take("quantization_config", dict, {})
    chosen, flavor, overrides = nearest(hub, [name] if name in fitting else fitting, values)
    notices = fields.notices(hub.architecture)
    if hub.multimodal is not None and content is not whole_file:
        skipped_keys = sorted(
            key for key in whole_file if key.endswith("_config") and key != hub.multimodal.key
        )
        skipped = ", ".join(skipped_keys) or "vision"
        notice = (
            f"{path}: only the text model of {hub.multimodal.architecture} is read, "
            f"as {hub.architecture}; the rest ({skipped}) is skipped, "
            "and an export contains only the text model"
        )
        notices = (notice, *notices)
    return Description(chosen, flavor, overrides, values, hub, notices, block, content)


def nearest(
    hub: HubFormat, names: list[str], values: Mapping[str, Any]
) -> tuple[str, str, dict[str, Any]]:
    """Return the model file and flavor with the fewest differing fields, and the overrides for these fields.

    For fields that the folder does not set, their default is compared, so a flavor's value never replaces it.
    """
    candidates = []
    for name in names:
        for flavor in read_model_file(name).flavors:
            overrides = overrides_of(hub, name, flavor, values)
            candidates.append((len(overrides), "debug" in flavor, name, flavor, overrides))
    _, _, name, flavor, overrides = min(candidates, key=lambda candidate: candidate[:4])
    return name, flavor, overrides


def overrides_of(
    hub: HubFormat, name: str, flavor: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of ``values`` that differ from a flavor and affect the computation."""
    has = shape(read_model_file(name), flavor, {})
    aside = FREE | hub.unused(values)
    return {key: value for key, value in values.items() if has[key] != value and key not in aside}
