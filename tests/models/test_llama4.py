"""Llama 4: published sizes, Hugging Face's logits, and folders of the multimodal model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build as build_theirs
from hub_folders import save
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardtrain.cli import main
from shardtrain.config.describe_folder import describe
from shardtrain.hf import importing
from shardtrain.hf.hub_model import recognise
from shardtrain.metrics.flops import count_model
from shardtrain.models import build, find, shape_of

# published weights without the vision model; computed for the debug model
SIZES = {"debugmodel": 15_017_216, "17bx16e": 107_769_861_120, "17bx128e": 400_711_848_960}
TOKENS = 24
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Scout": ("llama4", {}),
    "Maverick": ("llama4-interleaved", {}),
    "chunks that end at the end of the row": ("llama4", {"attention_chunk_size": 12}),
    "positions in all layers": ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
    "no temperature tuning": ("llama4", {"attn_temperature_tuning": False}),
    "full attention": ("llama4", {"layer_types": ["full_attention"] * 4}),
    "experts only in the third layer": ("llama4", {"moe_layers": [2]}),
    "tied embeddings": ("llama4", {"tie_word_embeddings": True}),
}


def native_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the native model and load the weights of a folder, as a run does."""
    description = recognise(folder)
    module = find(description.name)
    model: nn.Module = module.Model(description.config).to(dtype)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    importing.fill(
        {f"model.{name}": tensor for name, tensor in tensors.items()},
        folder,
        module,
        description.config,
    )
    return model.eval()


def rows(vocab_size: int = 260) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(
        0, vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    return tokens_BT, torch.arange(TOKENS).expand(2, -1)


def test_every_flavor_has_its_published_size() -> None:
    module = find("llama4")
    for flavor in module.FLAVORS:
        model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
        assert sum(p.numel() for p in model.parameters()) == SIZES[flavor], flavor


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_match_hugging_face(variant: str, tmp_path: Path) -> None:
    """Float32 logits of about 1 agree within 1e-5. A wrong formula would change them by at least 1e-2."""
    pytest.importorskip("transformers")
    family, changed = VARIANTS[variant]
    reference = build_theirs(family, **changed)
    ours = native_model(save(reference, tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    expected_BTV = reference(tokens_BT).logits

    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(ours(tokens_BT, positions_BT), expected_BTV, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_each_mechanism_changes_logits(tmp_path: Path) -> None:
    """Disabling any of these mechanisms changes the logits, so the comparison above covers each of them."""
    folder = save(build_theirs("llama4"), tmp_path / "hf")
    model = native_model(folder)
    config = recognise(folder).config
    expected_BTV = model(*rows())
    changes = {
        "attention_chunk_size": 0,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "no_rope_layer_interval": 0,
        "rope_scaling": "none",
        "score_before_experts": False,
    }
    for name, value in changes.items():
        changed = find("llama4").Model(dataclasses.replace(config, **{name: value})).eval()
        changed.load_state_dict(model.state_dict())
        assert (changed(*rows()) - expected_BTV).abs().max() > 1e-3, name


@torch.no_grad()
def test_packed_document_is_chunked_from_its_own_beginning(tmp_path: Path) -> None:
    model = native_model(save(build_theirs("llama4"), tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    cut = 10  # not a multiple of the chunk (7 tokens) or of the temperature interval (5)
    documents_BT = (positions_BT >= cut).long() * 3
    positions_BT = torch.where(positions_BT >= cut, positions_BT - cut, positions_BT)
    packed_BTV = model(tokens_BT, positions_BT, documents_BT)

    for document in (slice(0, cut), slice(cut, TOKENS)):
        expected_BTV = model(tokens_BT[:, document], positions_BT[:, document])
        # float32 sums over rows of different lengths
        torch.testing.assert_close(packed_BTV[:, document], expected_BTV, atol=1e-5, rtol=1e-5)


def multimodal_folder(tmp_path: Path) -> tuple[Any, Path]:
    """Return a folder like the published Llama 4: the text model below ``language_model``, and a vision model."""
    reference = build_theirs("llama4")
    folder = save(reference, tmp_path / "hf")
    text = json.loads((folder / "config.json").read_text())
    model_config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "boi_token_index": 1,
        "torch_dtype": "float32",
        "text_config": {k: v for k, v in text.items() if k not in ("architectures", "dtype")},
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(model_config))
    tensors = {
        f"language_model.{name}": tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["vision_model.class_embedding"] = torch.zeros(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(32, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return reference, folder


@torch.no_grad()
def test_text_model_of_a_multimodal_folder_is_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reference, folder = multimodal_folder(tmp_path)
    description = recognise(folder)

    assert description.name == "llama4"
    assert any("vision_config" in notice for notice in description.notices)

    tokens_BT, positions_BT = rows()
    logits = native_model(folder)(tokens_BT, positions_BT)
    expected = reference(tokens_BT).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)  # float32 rounding

    # Import and export lose nothing. The exported folder is that of the text model.
    checkpoint = str(tmp_path / "checkpoint")
    back = tmp_path / "back"
    assert main(["import", str(folder), "--to", checkpoint, "--check", "weights"]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "logits"]) == 0

    exported_config = json.loads((back / "config.json").read_text())
    assert exported_config["architectures"] == ["Llama4ForCausalLM"]
    assert exported_config["model_type"] == "llama4_text"

    before = reference.state_dict()
    after = load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_rope_layers": [0, 1, 1, 0]}, "no_rope_layers"),
        ({"moe_layers": [0, 1]}, "moe_layers"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_different_order_of_layers_uses_transformers(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = save(build_theirs("llama4"), tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))
    description = recognise(folder)

    assert description.name == "transformers"
    assert reason in description.notices[0]


PUBLISHED: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "boi_token_index": 200080,
    "eoi_token_index": 200081, "image_token_index": 200092, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408},
    "text_config": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
        "attn_temperature_tuning": True, "bos_token_id": 200000, "cache_implementation": "hybrid",
        "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
        "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
        "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True,
        "vocab_size": 202048,
    },
}  # fmt: skip
"""Configuration of Scout. Maverick's has the same keys, with four different values."""
MAVERICK = {
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    ("flavor", "changed"),
    [
        ("17bx16e", {}),
        (
            "17bx16e",
            {
                "attn_temperature_tuning": 4,
                "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(48)],
            },
        ),
        ("17bx16e", {"moe_layers": list(range(48))}),
        ("17bx128e", MAVERICK),
        ("17bx128e", {**MAVERICK, "moe_layers": list(range(1, 48, 2))}),
    ],
)
def test_published_configurations_match_the_flavors(
    flavor: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    published_config = {**PUBLISHED, "text_config": {**PUBLISHED["text_config"], **changed}}
    (tmp_path / "config.json").write_text(json.dumps(published_config))
    description = describe(tmp_path)

    assert (description.name, description.flavor, dict(description.overrides)) == (
        "llama4",
        flavor,
        {},
    )
    assert len(description.notices) == 1
    assert "vision_config" in description.notices[0]


def test_flops_of_attention_within_chunks_count_only_the_chunk() -> None:
    module = find("llama4")
    shape = shape_of(module, "debugmodel", {}, "rmsnorm")
    model = build(module, shape)
    _, flops = count_model(model, module.LAYOUT, shape)

    # only the fourth of six layers attends to more than 256 tokens
    assert flops(1024) - flops(256) == 12 * shape.num_heads * shape.head_dim * (1024 - 256)
