"""Errors about unsupported ``transformers`` networks name a module and a rule that users understand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtrain import config as configs
from shardtrain.models import transformers as route
from shardtrain.train.preflight import meta_model

transformers = pytest.importorskip("transformers")

RESULTS = Path(__file__).parents[3] / "benchmarks/results/architectures_cpu.json"
INTERNAL = ("meta device", "meta tensor", "NotImplementedError", "our cores", "hook")
"""Words of the implementation, which do not help a user."""
JETMOE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
ROUTER = "reads values of tensors in hf.model.layers.0.self_attention.experts.router"
REFUSED = {
    "pipeline_parallel_degree": ROUTER,
    "context_parallel_degree": ROUTER,
    "tensor_parallel_degree": "requires a tensor-parallel plan, and transformers has none",
    "expert_parallel_degree": "hf.model.layers.0.mlp.input_linear of JetMoeForCausalLM does not",
}
"""Option -> part of the message for JetMoe, whose router needs the values of its scores."""


def folder_of(name: str, fields: dict[str, object], folder: Path) -> Path:
    """Write the config.json of a class."""
    content = getattr(transformers, name).config_class(**fields).to_dict()
    (folder / "config.json").write_text(json.dumps({**content, "architectures": [name]}))
    return folder


@pytest.mark.parametrize("option", REFUSED)
def test_a_refusal_names_the_module_and_the_rule(option, tmp_path):
    folder = folder_of("JetMoeForCausalLM", JETMOE, tmp_path)
    options = ["--model.name", "transformers", "--model.overrides.path", str(folder)]
    loaded = configs.load(None, [*options, f"--parallelism.{option}", "2"])
    (error,), _ = meta_model.build(loaded.config, 2)
    assert REFUSED[option] in str(error)
    assert "\n" not in str(error)
    assert not any(text in str(error) for text in INTERNAL), error


def test_no_refusal_of_the_table_has_words_of_the_implementation():
    text = RESULTS.read_text()
    assert not [word for word in INTERNAL if word in text]


@pytest.mark.parametrize(
    ("fields", "warns"), [({}, False), ({"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}, True)]
)
def test_dropout_without_a_rate_is_a_warning(fields, warns, tmp_path, caplog):
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "summary_first_dropout": 0}
    folder = folder_of("GPT2LMHeadModel", {**sizes, **fields}, tmp_path)
    for _ in range(2):
        route.Model(route.Config(path=str(folder), dropout=True))
    warnings = [text for text in caplog.messages if "dropout=true has no effect" in text]
    assert len(warnings) == warns
    if warns:
        assert "all dropout rates of GPT2LMHeadModel are 0" in warnings[0]
        assert "attn_pdrop" in warnings[0]
