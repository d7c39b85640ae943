"""gpt-oss: published sizes, Hugging Face's logits, and MXFP4 weights."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build as build_theirs
from hub_folders import save
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardtrain.cli import main
from shardtrain.hf import importing, mapping
from shardtrain.hf.hub_model import recognise, translation_of
from shardtrain.hf.quantized_weights import open_weights
from shardtrain.models import build, find, shape_of
from shardtrain.utils.errors import CheckpointError

SIZES = {"debugmodel": 8_033_120, "20b": 20_914_757_184, "120b": 116_829_156_672}
"""Parameter counts from the published weights, and computed for the debug model."""
TOKENS = 24
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "full attention": {"layer_types": ["full_attention"] * 2},
    "unscaled angles": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "a tight limit": {"swiglu_limit": 0.3, "swiglu_alpha": 1.0},
    "tied embeddings": {"tie_word_embeddings": True},
}


def native_model(folder: Path) -> nn.Module:
    """Build the native model and load the weights of a folder, as a run does."""
    description = recognise(folder)
    module = find(description.name)
    model: nn.Module = module.Model(description.config)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    importing.fill(
        {f"model.{name}": tensor for name, tensor in tensors.items()},
        folder,
        module,
        description.config,
    )
    return model.eval()


def rows() -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(0, 260, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens_BT, torch.arange(TOKENS).expand(2, -1)


def test_every_flavor_has_its_published_size() -> None:
    module = find("gpt_oss")
    for flavor in module.FLAVORS:
        model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
        assert sum(p.numel() for p in model.parameters()) == SIZES[flavor], flavor


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_match_hugging_face(variant: str, tmp_path: Path) -> None:
    """Float32 logits of about 1 agree within 1e-5. A wrong formula would change them by at least 1e-2."""
    pytest.importorskip("transformers")
    reference = build_theirs("gpt_oss", **VARIANTS[variant])
    ours = native_model(save(reference, tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    expected_BTV = reference(tokens_BT).logits

    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(ours(tokens_BT, positions_BT), expected_BTV, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_each_mechanism_changes_logits(tmp_path: Path) -> None:
    folder = save(build_theirs("gpt_oss"), tmp_path / "hf")
    model = native_model(folder)
    config = recognise(folder).config
    expected_BTV = model(*rows())

    changes = {"sliding_window": 0, "rope_factor": 1.0, "swiglu_limit": 0.5, "swiglu_alpha": 1.0}
    for name, value in changes.items():
        changed = find("gpt_oss").Model(dataclasses.replace(config, **{name: value})).eval()
        changed.load_state_dict(model.state_dict())
        assert (changed(*rows()) - expected_BTV).abs().max() > 1e-3, name

    # A sink of -100 has no weight in the softmax.
    without_sinks = find("gpt_oss").Model(config).eval()
    weights = model.state_dict()
    for name in weights:
        if "sinks" in name:
            weights[name] = weights[name] - 100.0
    without_sinks.load_state_dict(weights)
    assert (without_sinks(*rows()) - expected_BTV).abs().max() > 1e-3


def test_gradients_of_sinks_and_biases_match_hugging_face(tmp_path: Path) -> None:
    reference = build_theirs("gpt_oss")
    ours = native_model(save(reference, tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    for logits_BTV in (reference(tokens_BT).logits, ours(tokens_BT, positions_BT)):
        logits_BTV.log_softmax(-1)[..., 7].sum().backward()

    for index, reference_layer in enumerate(reference.model.layers):
        layer = ours.get_submodule(f"layers.{index}")
        experts = layer.moe.experts
        reference_experts = reference_layer.mlp.experts
        # Hugging Face interleaves the gate and up projections, and stores inputs before outputs.
        expected_gate = reference_experts.gate_up_proj_bias.grad[:, ::2]
        expected_up = reference_experts.gate_up_proj.grad[..., 1::2].transpose(1, 2)
        expected_down = reference_experts.down_proj_bias.grad
        pairs = {
            "sinks": (layer.attn.sinks.weight.grad, reference_layer.self_attn.sinks.grad),
            "gate": (experts.w1_bias.grad, expected_gate),
            "down": (experts.w2_bias.grad, expected_down),
            "up": (experts.w3.grad, expected_up),
            "router": (layer.moe.router.gate.bias.grad, reference_layer.mlp.router.bias.grad),
        }

        for name, (gradient, expected) in pairs.items():
            # float32 sums in a different order
            assert (gradient - expected).norm() <= 1e-4 * expected.norm(), (index, name)


@torch.no_grad()
def test_different_order_of_layers_uses_transformers(tmp_path: Path) -> None:
    folder = save(build_theirs("gpt_oss"), tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**fields, "layer_types": ["full_attention", "sliding_attention"]})
    )
    description = recognise(folder)

    assert description.name == "transformers"
    assert "layer_types" in description.notices[0]


def packed_folder(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return a folder with MXFP4 experts, like the published gpt-oss, and the weights transformers reads from it."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder = save(build_theirs("gpt_oss", hidden_size=64, intermediate_size=32), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=generator
        ).to(torch.uint8)
        scales = torch.randint(118, 127, (experts, outputs, inputs // 32), generator=generator).to(
            torch.uint8
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model_config = json.loads((folder / "config.json").read_text())
    model_config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(model_config))
    return folder, expected


@torch.no_grad()
def test_mxfp4_weights_match_transformers(tmp_path: Path) -> None:
    folder, expected = packed_folder(tmp_path)
    ours = native_model(folder)
    for name, stack in expected.items():
        layer = name.split(".")[2]
        experts = ours.get_submodule(f"layers.{layer}.moe.experts")
        ours_first = stack.float().transpose(1, 2)
        if name.endswith("down_proj"):
            assert torch.equal(experts.w2, ours_first)
        else:  # gate and up projections are interleaved
            assert torch.equal(experts.w1, ours_first[:, ::2])
            assert torch.equal(experts.w3, ours_first[:, 1::2])
    with open_weights(folder, "mxfp4") as weights:  # a box with boundaries inside MXFP4 blocks
        name, stack = next(iter(expected.items()))
        box = (slice(1, 3), slice(5, 41), slice(3, 11))
        assert torch.equal(weights.read(name, box), stack[box])


def test_mxfp4_weights_are_exported_dequantized(tmp_path: Path) -> None:
    folder, expected = packed_folder(tmp_path)
    checkpoint = str(tmp_path / "checkpoint")
    back = tmp_path / "back"
    assert main(["import", str(folder), "--to", checkpoint, "--check", "weights"]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "logits"]) == 0
    assert "quantization_config" not in json.loads((back / "config.json").read_text())

    written = load_file(back / "model.safetensors")
    assert all(torch.equal(written[name], stack) for name, stack in expected.items())


def remove_scales(tensors: dict[str, torch.Tensor]) -> None:
    first = next(name for name in tensors if name.endswith("_scales"))
    del tensors[first]


def shorten_blocks(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            tensors[name] = tensor[..., :8].contiguous()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(remove_scales, "requires .*_scales"), (shorten_blocks, "are not blocks")],
)
def test_mismatched_blocks_and_scales_are_rejected(
    damage: Any, message: str, tmp_path: Path
) -> None:
    folder, _ = packed_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=message):
        native_model(folder)


def test_boxes_of_a_stack_match_the_full_stack(tmp_path: Path) -> None:
    """Ranks read parts of stacks: some experts, rows and columns of interleaved and transposed weights."""
    folder, _ = packed_folder(tmp_path)
    description = recognise(folder)
    translation = translation_of(find("gpt_oss"), description.config, "")
    generator = random.Random(1)
    with open_weights(folder, description.block) as weights:
        for name, shape in translation.shapes.items():
            if ".experts." not in name:
                continue
            stack = mapping.read_whole(name, translation, weights, torch.float32)
            for _ in range(4):
                ends = [sorted(generator.sample(range(size + 1), 2)) for size in shape]
                box = tuple(slice(start, stop) for start, stop in ends)
                part = mapping.read_part(name, box, translation, weights, torch.float32)
                assert torch.equal(part, stack[box]), (name, box)
