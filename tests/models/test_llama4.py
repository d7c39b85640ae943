"""Llama 4: published sizes, Hugging Face's logits, and the folders of the model of images and text."""

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

# of the published weights without those of images; the debug model by hand
SIZES = {"debugmodel": 15_017_216, "17bx16e": 107_769_861_120, "17bx128e": 400_711_848_960}
TOKENS = 24
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Scout": ("llama4", {}),
    "Maverick": ("llama4-interleaved", {}),
    "chunks that end where the row does": ("llama4", {"attention_chunk_size": 12}),
    "no layer without positions": ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
    "the same temperature for all": ("llama4", {"attn_temperature_tuning": False}),
    "full attention": ("llama4", {"layer_types": ["full_attention"] * 4}),
    "experts in the third layer alone": ("llama4", {"moe_layers": [2]}),
    "a head that is the embedding": ("llama4", {"tie_word_embeddings": True}),
}


def ours_of(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Our model with the weights of a folder, as a run would be filled."""
    found = recognise(folder)
    module = find(found.name)
    model: nn.Module = module.Model(found.config).to(dtype)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    importing.fill({f"model.{name}": tensor for name, tensor in tensors.items()}, folder, module, found.config)
    return model.eval()


def rows(vocab_size: int = 260) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(0, vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens_BT, torch.arange(TOKENS).expand(2, -1)


def test_every_flavor_has_its_published_size() -> None:
    module = find("llama4")
    for flavor in module.FLAVORS:
        model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
        assert sum(p.numel() for p in model.parameters()) == SIZES[flavor], flavor


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_hugging_face(variant: str, tmp_path: Path) -> None:
    """In float32, to 1e-5 of logits of size 1: another formula is off by a hundredth and more."""
    pytest.importorskip("transformers")
    family, changed = VARIANTS[variant]
    theirs = build_theirs(family, **changed)
    ours = ours_of(save(theirs, tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    expected_BTV = theirs(tokens_BT).logits
    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(ours(tokens_BT, positions_BT), expected_BTV, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_each_mechanism_changes_logits(tmp_path: Path) -> None:
    """What the law above compares is there to be seen: without each of the parts the numbers are others."""
    folder = save(build_theirs("llama4"), tmp_path / "hf")
    model, config = ours_of(folder), recognise(folder).config
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
        other = find("llama4").Model(dataclasses.replace(config, **{name: value})).eval()
        other.load_state_dict(model.state_dict())
        assert (other(*rows()) - expected_BTV).abs().max() > 1e-3, name


@torch.no_grad()
def test_a_packed_document_is_cut_into_chunks_from_its_own_beginning(tmp_path: Path) -> None:
    model = ours_of(save(build_theirs("llama4"), tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    cut = 10  # neither a multiple of the chunk of 7 tokens nor of the 5 of the temperature
    documents_BT = (positions_BT >= cut).long() * 3
    apart_BT = torch.where(positions_BT >= cut, positions_BT - cut, positions_BT)
    packed_BTV = model(tokens_BT, apart_BT, documents_BT)
    for part in (slice(0, cut), slice(cut, TOKENS)):
        alone_BTV = model(tokens_BT[:, part], apart_BT[:, part])
        torch.testing.assert_close(packed_BTV[:, part], alone_BTV, atol=1e-5, rtol=1e-5)


def whole_folder(tmp_path: Path) -> tuple[Any, Path]:
    """A folder as Llama 4 is published: the text model below ``language_model``, and another one for images."""
    theirs = build_theirs("llama4")
    folder = save(theirs, tmp_path / "hf")
    text = json.loads((folder / "config.json").read_text())
    said = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "boi_token_index": 1,
        "torch_dtype": "float32",
        "text_config": {k: v for k, v in text.items() if k not in ("architectures", "dtype")},
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(said))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["vision_model.class_embedding"] = torch.zeros(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(32, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return theirs, folder


@torch.no_grad()
def test_of_a_model_of_images_and_text_the_text_model_is_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs, folder = whole_folder(tmp_path)
    found = recognise(folder)
    assert found.name == "llama4" and any("vision_config" in notice for notice in found.notices)
    torch.testing.assert_close(ours_of(folder)(*rows()), theirs(rows()[0]).logits, atol=1e-5, rtol=1e-5)
    checkpoint, back = str(tmp_path / "checkpoint"), tmp_path / "back"
    assert main(["import", str(folder), "--to", checkpoint, "--check", "weights"]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "logits"]) == 0
    said = json.loads((back / "config.json").read_text())
    assert said["architectures"] == ["Llama4ForCausalLM"] and said["model_type"] == "llama4_text"
    before, after = theirs.state_dict(), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"no_rope_layers": [0, 1, 1, 0]}, "no_rope_layers"),
        ({"moe_layers": [0, 1]}, "moe_layers"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_another_order_of_layers_is_left_to_transformers(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save(build_theirs("llama4"), tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **said}))
    found = recognise(folder)
    assert found.name == "transformers" and words in found.notices[0]


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
"""The keys of Scout's file; those of Maverick's are the same, with four other values."""
MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None}


@pytest.mark.parametrize(
    ("flavor", "changed"),
    [
        ("17bx16e", {}),
        ("17bx16e", {"attn_temperature_tuning": 4, "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(48)]}),
        ("17bx16e", {"moe_layers": list(range(48))}),
        ("17bx128e", MAVERICK),
        ("17bx128e", {**MAVERICK, "moe_layers": list(range(1, 48, 2))}),
    ],
)
def test_published_files_are_the_flavors(flavor: str, changed: dict[str, Any], tmp_path: Path) -> None:
    said = {**PUBLISHED, "text_config": {**PUBLISHED["text_config"], **changed}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = describe(tmp_path)
    assert (found.name, found.flavor, dict(found.overrides)) == ("llama4", flavor, {})
    assert len(found.notices) == 1 and "vision_config" in found.notices[0]


def test_attention_within_chunks_counts_as_many_tokens_as_a_chunk_has() -> None:
    module = find("llama4")
    shape = shape_of(module, "debugmodel", {}, "rmsnorm")
    model = build(module, shape)
    _, flops = count_model(model, module.LAYOUT, shape)
    # of six layers the fourth alone sees more than 256 tokens
    assert flops(1024) - flops(256) == 12 * shape.num_heads * shape.head_dim * (1024 - 256)
