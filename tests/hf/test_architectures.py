"""Folders of architectures without a native model: the same logits, and unchanged after a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiers import cases

from shardtrain.cli import main
from shardtrain.hf.hub_model import recognise

transformers = pytest.importorskip("transformers")

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE: dict[str, Any] = {
    **_IDS, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_OLD = {**_IDS, "vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT2LMHead": _OLD,
    "GPTJ": {**_OLD, "rotary_dim": 4, "tie_word_embeddings": False},
    "GPTBigCode": {**_OLD, "multi_query": True},
    "CodeGen": {**_OLD, "rotary_dim": 4, "tie_word_embeddings": False},
    "OPT": {**_BASE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "Bloom": {**_IDS, "vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {**_BASE, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": False},
    "MPT": {**_IDS, "vocab_size": 320, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "GPTNeo": {
        **_IDS, "vocab_size": 320, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128,
    },
    "Phi": _GROUPED,
    "Phi3": _GROUPED,
    "StableLm": _GROUPED,
    "Starcoder2": _GROUPED,
    "Gemma": _HEADS,
    "Gemma2": {**_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "Gemma3": {**_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "Olmo": _GROUPED,
    "Olmo2": _GROUPED,
    "Olmo3": {**_GROUPED, "sliding_window": 16},
    "Cohere": _GROUPED,
    "Cohere2": {**_GROUPED, "sliding_window": 16},
    "Glm": _HEADS,
    "Glm4": _HEADS,
    "Granite": _GROUPED,
    "Helium": _HEADS,
    "Nemotron": _GROUPED,
    "Persimmon": _BASE,
    "SmolLM3": {**_GROUPED, "no_rope_layer_interval": 2},
    "Exaone4": {**_GROUPED, "sliding_window": 16, "sliding_window_pattern": 2},
    "Ernie4_5": _HEADS,
    "Arcee": _GROUPED,
    "SeedOss": _HEADS,
    "BioGpt": _BASE,
    "XGLM": {**_IDS, "vocab_size": 320, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "Olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Dots1": {
        **_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "topk_group": 1,
    },
    "MiniMaxM2": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama": {**_GROUPED, "attention_bias": True},
    "Qwen2": {**_GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}  # fmt: skip
"""The last two belong to native families, but have settings that only ``transformers`` supports."""
DEFAULT_TIER = ("Bloom", "Falcon", "Cohere", "Olmoe", "Qwen2")
OWN = {"unsloth_version": "2026.1", "my_own": {"a": [1, None]}}


def folder(name: str, path: Path) -> Path:
    """Save a folder with random weights, norms and biases in bfloat16, and with custom keys."""
    cls = getattr(
        transformers, name if name.endswith("Head") or name == "MPT" else f"{name}ForCausalLM", None
    )
    cls = cls or getattr(
        transformers, {"GPT2LMHead": "GPT2LMHeadModel", "MPT": "MptForCausalLM"}[name]
    )
    torch.manual_seed(0)
    model = cls(cls.config_class(**SHAPES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    model.bfloat16().save_pretrained(path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **OWN}))
    return path


@pytest.mark.parametrize(
    "name", cases(DEFAULT_TIER, nightly=[name for name in SHAPES if name not in DEFAULT_TIER])
)
def test_logits_are_equal_and_the_folder_survives_a_round_trip(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    source = folder(name, tmp_path / "hf")
    back = tmp_path / "back"
    recognised = recognise(source)

    assert recognised.name == "transformers"
    # Both commands compare logits in float32. They fail if a difference exceeds 1e-4 of the largest
    # logit.
    checkpoint = str(tmp_path / "imported")
    assert main(["import", str(source), "--to", checkpoint, "--check", "logits"]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "logits"]) == 0
    assert capsys.readouterr().out.count("transformers returns the same logits") == 2

    fields = json.loads((source / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == fields

    before = load_file(source / "model.safetensors")
    after = load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        # as bytes, because a NaN does not equal itself
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8))

    generation_config = (source / "generation_config.json").read_bytes()
    assert (back / "generation_config.json").read_bytes() == generation_config


ROPE_SCALING: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-odd-betas": {
        "rope_type": "yarn", "factor": 3.5, "beta_fast": 9.5, "beta_slow": 0.3, "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    cases(
        ["llama3", "yarn-odd-betas"], nightly=sorted({*ROPE_SCALING} - {"llama3", "yarn-odd-betas"})
    ),
)
def test_logits_with_scaled_rotary_positions_equal_those_of_transformers(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    torch.manual_seed(0)
    sizes = {**_GROUPED, "max_position_embeddings": 64, "rope_scaling": ROPE_SCALING[name]}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path / "hf")
    arguments = [
        "import",
        str(tmp_path / "hf"),
        "--to",
        str(tmp_path / "imported"),
        "--check",
        "logits",
    ]

    assert main(arguments) == 0
    assert "transformers returns the same logits" in capsys.readouterr().out


def test_a_model_that_transformers_cannot_compute_is_one_line(tmp_path: Path, capsys: Any) -> None:
    """StableLM rotates a quarter of 12 features. transformers' forward fails for this odd number."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes, **heads)).save_pretrained(
        tmp_path / "hf"
    )
    arguments = ["import", str(tmp_path / "hf"), "--to"]

    assert main([*arguments, str(tmp_path / "one"), "--check", "logits"]) == 2

    message = capsys.readouterr().err.strip().splitlines()[-1]
    reason = "transformers cannot compute logits: RuntimeError: "
    assert f"error[2]: {tmp_path / 'hf'}: {reason}" in message
    assert message.endswith("use --check=weights")

    # The advice of the message works.
    assert main([*arguments, str(tmp_path / "two"), "--check", "weights"]) == 0


def test_a_config_error_of_transformers_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from shardtrain.models import architecture
    from shardtrain.utils.errors import ConfigError

    rope = {
        "rope_type": "yarn",
        "factor": 2.0,
        "odd": 1,
        "beta_fast": 1,
        "beta_slow": 5,
        "attention_factor": -1,
    }
    fields = {
        **_GROUPED,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": rope,
    }
    for name, factor in (("odd", 2.0), ("wrong", "x")):
        rope["factor"] = factor
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    # The warning of transformers about beta_fast is logged for the first of two builds only.
    for _ in range(2):
        architecture.build(str(tmp_path / "odd"), "LlamaForCausalLM", "auto")
    (warning,) = [record.getMessage() for record in caplog.records]

    assert warning.count("beta_fast field must be greater") == 1
    assert len(warning.splitlines()) == 1
    with pytest.raises(
        ConfigError, match=r"cannot be built as LlamaForCausalLM \(.*factor field must be"
    ) as refused:
        architecture.build(str(tmp_path / "wrong"), "LlamaForCausalLM", "auto")
    assert len(str(refused.value).splitlines()) == 1
    assert "TypeError" not in str(refused.value)
    assert capfd.readouterr().err == ""
