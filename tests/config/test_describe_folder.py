"""Models follow config.json: readers set every field, and treat every key like transformers does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import CONFIGS, FAMILIES, build, save

from shardtrain import models
from shardtrain.cli import main
from shardtrain.config import describe_folder
from shardtrain.config.describe_folder import HUBS, describe
from shardtrain.config.model_file import model_names, read_model_file
from shardtrain.hf import importing
from shardtrain.hf.hub_model import recognise
from shardtrain.hub_formats.format import FREE, Fields, OnlyInTransformers
from shardtrain.utils.errors import ConfigError

transformers = pytest.importorskip("transformers")

MOONLIGHT = {
    # Moonlight-16B-A3B as published. The nearest flavor has another router, balance and scale.
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 11264,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "norm_topk_prob": True,
    "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5, "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
}  # fmt: skip
FLAVORS = [(name, flavor) for name in HUBS for flavor in read_model_file(name).flavors]


def config_of(family: str) -> dict[str, Any]:
    """Return the config.json of one of the tiny folders."""
    if family == "moonlight":
        return dict(MOONLIGHT)
    name, fields = FAMILIES[family]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(
        **fields, architectures=[f"{name}ForCausalLM"]
    )
    return json.loads(config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def write(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def class_of(hub: Any) -> Any:
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[hub.model_type]


def test_every_model_file_with_a_form_is_known_without_torch() -> None:
    having = {
        name: module.HUB for name in model_names() if hasattr(module := models.find(name), "HUB")
    }
    assert having == HUBS


@pytest.mark.parametrize("family", [*FAMILIES, "moonlight"])
def test_a_reader_states_every_field(family: str, tmp_path: Path) -> None:
    described = describe(write(config_of(family), tmp_path / "hf"))
    fields = {field.name for field in dataclasses.fields(models.find(described.name).Config)}
    assert set(described.values) == fields - FREE


@pytest.mark.parametrize("family", [*FAMILIES, "moonlight"])
def test_the_choice_of_the_nearest_flavor_does_not_change_the_model(
    family: str, tmp_path: Path
) -> None:
    described = describe(write(config_of(family), tmp_path / "hf"))
    neighbours = [(name, flavor) for name, flavor in FLAVORS if HUBS[name] is described.hub]
    assert neighbours

    ignored = described.hub.unused(described.values)
    for name, flavor in neighbours:
        overrides = describe_folder.overrides_of(described.hub, name, flavor, described.values)
        shape = models.shape_of(models.find(name), flavor, overrides, "rmsnorm")
        built = dataclasses.asdict(shape)
        for key, value in described.values.items():
            assert built[key] == value or key in ignored, (name, flavor, key)
        assert described.hub.unused(built) == ignored, (name, flavor)


def test_a_sigmoid_router_is_kept_with_a_softmax_flavor(tmp_path: Path) -> None:
    described = recognise(write(MOONLIGHT, tmp_path / "hf"))
    assert (described.name, described.flavor) == ("deepseek_v3", "16B"), (
        "expected the neighbouring flavor"
    )

    config = models.shape_of(
        models.find(described.name), described.flavor, described.overrides, "rmsnorm"
    )

    assert (config.score_func, config.group_top_k, config.load_balance_coeff) == (
        "sigmoid",
        2,
        1e-3,
    )
    with pytest.raises(
        ConfigError, match="scoring_func='softmax' is implemented neither here nor in transformers"
    ):
        recognise(write({**MOONLIGHT, "scoring_func": "softmax"}, tmp_path / "hf"))


@pytest.mark.parametrize(
    "family",
    ["llama2", "llama3", "mistral", "qwen2", "deepseek_v3-plain-queries", "qwen3_moe", "llama4"],
)
def test_fields_reported_as_unused_change_no_logit(family: str, tmp_path: Path) -> None:
    described = describe(write(config_of(family), tmp_path / "hf"))
    values = dict(described.values)
    if "num_groups" in values:
        values |= {"num_groups": 1, "top_groups": 1}
    module = models.find(described.name)
    unused = described.hub.unused(values)
    tokens = torch.arange(40).reshape(1, -1)
    logits = []
    for factor in (1, 2):
        scaled = {key: values[key] * factor for key in unused - {"top_groups"}}
        config = module.Config(**{**values, **scaled})
        torch.manual_seed(0)
        model = module.Model(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        with torch.no_grad():
            logits.append(model(tokens, torch.arange(40).reshape(1, -1)))

    assert torch.equal(*logits)


@pytest.mark.parametrize("name", HUBS)
def test_a_reader_knows_every_key_of_the_class_in_transformers(name: str) -> None:
    """Unknown keys are therefore unused in transformers, and have no effect."""
    hub = HUBS[name]
    cls = class_of(HUBS[name])
    keys = (
        {field.name for field in dataclasses.fields(cls)}
        | set(cls.attribute_map)
        | {"rope_scaling", "rope_theta"}
    )
    values = {**dict.fromkeys(keys), **hub.defaults}
    fields = Fields(values, "config.json", hub.defaults)
    hub.read(fields)

    assert fields.notices(hub.architecture) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_has_the_default_of_transformers(family: str) -> None:
    config = config_of(family)
    hub = next(hub for hub in HUBS.values() if hub.model_type == config["model_type"])

    def read(values: dict[str, Any]) -> Any:
        try:
            return hub.read(Fields(values, "config.json", hub.defaults))
        except (ConfigError, OnlyInTransformers) as error:
            return type(error).__name__

    for key in sorted(set(config) - {"model_type", "architectures"}):
        less = {name: value for name, value in config.items() if name not in (key, "layer_types")}
        try:
            full = json.loads(class_of(hub).from_dict(less).to_json_string(use_diff=False))
        except Exception as error:
            # Without the key, transformers may reject the config: its default may not fit the other sizes.
            assert "Validation" in type(error).__name__, key
            continue
        assert read(less) == read(full), key


KEYS = {
    "use_mrope": False,
    "unsloth_fixed": True,
    "unsloth_version": "2026.1.2",
    "is_llama_config": True,
    "rope_interleaved": False,
    "use_qk_norm": True,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "finetuning_task": "sst2",
    "activation": "swiglu",
    "my_own": {"a": [1]},
    "temperature": 0.7,
    "pruned_heads": {},
    "auto_map": {"AutoModel": "evil.Model"},
    "_attn_implementation_internal": "hub/x",
    "trust_remote_code": True,
    "attention_dropout": 0.1,
}
SILENT = {"finetuning_task", "temperature", "pruned_heads"}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_nothing_uses_is_a_notice(key: str, tmp_path: Path) -> None:
    plain = recognise(write(config_of("llama3"), tmp_path / "a"))
    described = recognise(write({**config_of("llama3"), key: KEYS[key]}, tmp_path / "b"))
    assert described == plain
    assert [key in notice for notice in described.notices] == ([] if key in SILENT else [True])


SLIDING_WINDOW = {
    "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama3", {"attention_bias": True}),
        ("llama3", {"hidden_act": "gelu"}),
        ("llama3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama3", {"architectures": ["LlamaForSequenceClassification"]}),
        ("qwen2", SLIDING_WINDOW),
        ("qwen3", {"attention_bias": True}),
        ("mixtral", {"sliding_window": 16}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("neox", {"attention_bias": False}),
    ],
)
def test_unsupported_variants_use_transformers_with_a_notice(
    family: str, changes: Any, tmp_path: Path
) -> None:
    described = recognise(write({**config_of(family), **changes}, tmp_path / "hf"))
    assert described.name == "transformers"
    assert described.overrides == {"path": str(tmp_path / "hf")}
    assert len(described.notices) == 1
    assert "; using " in described.notices[0]


def test_an_import_compares_logits_and_reports_the_difference(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    folder = save(build("llama3"), tmp_path / "hf")
    assert main(["import", str(folder), "--to", str(tmp_path / "a")]) == 0

    captured = capsys.readouterr()
    assert "transformers returns the same logits: largest error" in captured.out
    assert "Loading weights" not in captured.err

    # A wrong rope_theta changes the logits and no weight, so only the comparison of logits finds it.
    read = importing.recognise

    def wrong(*arguments: Any) -> Any:
        model = read(*arguments)
        return dataclasses.replace(
            model, config=dataclasses.replace(model.config, rope_theta=100.0)
        )

    monkeypatch.setattr(importing, "recognise", wrong)
    assert main(["import", str(folder), "--to", str(tmp_path / "b")]) != 0
    assert "transformers' logits differ by" in capsys.readouterr().err
    assert main(["import", str(folder), "--to", str(tmp_path / "c"), "--check", "weights"]) == 0

    # Without memory for two models, the import succeeds and reports that nothing was compared.
    monkeypatch.setattr(
        "shardtrain.hf.logits.why_not", lambda _: "two float32 copies require too much"
    )

    assert main(["import", str(folder), "--to", str(tmp_path / "d")]) == 0
    assert "logits were not compared: two float32 copies" in capsys.readouterr().out
