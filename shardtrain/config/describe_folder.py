"""Find the native model that the ``config.json`` of a Hugging Face folder describes, without torch."""

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
)
from shardtrain.hub_formats.config_json import CONFIG, Quantised, block_of, read_json
from shardtrain.hub_formats.format import FREE, TRANSFORMERS_HINT, Fields, HubFormat, OnlyInTransformers

HUBS: dict[str, HubFormat] = {
    "llama2": llama_format.HUB,
    "llama3": llama_format.HUB,
    "llama4": llama4_format.HUB,
    "mistral": mistral_format.HUB,
    "qwen2": qwen2_format.HUB,
    "qwen3": qwen3_format.HUB,
    "qwen3_moe": qwen3_moe_format.HUB,
    "mixtral": mixtral_format.HUB,
    "deepseek_v2": deepseek_v2_format.HUB,
    "deepseek_v3": deepseek_v3_format.HUB,
    "gpt_oss": gpt_oss_format.HUB,
    "neox": neox_format.HUB,
}
"""Native model files with a Hugging Face format. Each is the ``HUB`` of the model file."""


@dataclass(frozen=True)
class Description:
    """A native model, as ``config.json`` describes it."""

    name: str
    """The model file: ``model.name``."""
    flavor: str
    overrides: Mapping[str, Any]
    """What makes ``flavor`` this model: ``model.overrides``."""
    values: Mapping[str, Any]
    """Every field of the model's Config but those of ``FREE``."""
    hub: HubFormat
    notices: tuple[str, ...]
    """Lines on keys that change nothing, although they may look as if they did."""
    block: Quantised
    """How the weights are quantised."""
    config: Mapping[str, Any]
    """What config.json says."""


def describe(folder: Path, name: str = "") -> Description:
    """Read a folder's ``config.json``; ``name`` is the model file that is to be used, the nearest one unless given.

    Raises:
        OnlyInTransformers: for a model that is not shardtrain's, and may be a class of ``transformers``.
        ConfigError: for a file that describes no model that can be computed.
        CheckpointError: when the file is missing or no JSON object.
    """
    # A model of text within one of images and text is described by a part of the file
    path = folder / CONFIG
    whole_file = read_json(path)
    found = whole_file
    for architecture in HUBS.values():
        found = architecture.text_config(found)

    # Which model files are of this model_type
    kind = found.get("model_type")
    architectures = found.get("architectures") or []
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

    # Every key that the architecture knows is read; ``rest`` judges those that nobody has asked for
    block = block_of(found, str(path))
    fields = Fields(found, str(path), hub.defaults)
    values = hub.read(fields)
    fields.take("num_nextn_predict_layers", int, 0)
    fields.take("quantization_config", dict, {})
    chosen, flavor, overrides = nearest(hub, [name] if name in fitting else fitting, values)
    notices = fields.notices(hub.architecture)
    if hub.multimodal is not None and found is not whole_file:
        skipped_keys = sorted(key for key in whole_file if key.endswith("_config") and key != hub.multimodal.key)
        skipped = ", ".join(skipped_keys) or "vision"
        notice = (
            f"{path}: only the text model of {hub.multimodal.architecture} is read, as {hub.architecture}; the rest "
            f"({skipped}) is skipped, and an export contains only the text model"
        )
        notices = (notice, *notices)
    return Description(chosen, flavor, overrides, values, hub, notices, block, found)


def nearest(hub: HubFormat, names: list[str], values: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The flavor with the fewest fields that differ, and those fields.

    Every field is compared, also those that a folder says nothing of: what is another's own is never taken over.
    """
    candidates = []
    for name in names:
        for flavor in read_model_file(name).flavors:
            overrides = overrides_of(hub, name, flavor, values)
            candidates.append((len(overrides), "debug" in flavor, name, flavor, overrides))
    _, _, name, flavor, overrides = min(candidates, key=lambda candidate: candidate[:4])
    return name, flavor, overrides


def overrides_of(hub: HubFormat, name: str, flavor: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a flavor the model of ``values``: every field that differs and takes part in what is computed."""
    has = shape(read_model_file(name), flavor, {})
    aside = FREE | hub.unused(values)
    return {key: value for key, value in values.items() if has[key] != value and key not in aside}
