"""gpt-oss: published sizes, Hugging Face's logits, and weights in MXFP4."""

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
"""Of the published weights; the debug model by hand."""
TOKENS = 24
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "full attention": {"layer_types": ["full_attention"] * 2},
    "angles that are not scaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "a tight bound": {"swiglu_limit": 0.3, "swiglu_alpha": 1.0},
    "a head that is the embedding": {"tie_word_embeddings": True},
}


def ours_of(folder: Path) -> nn.Module:
    """Our model with the weights of a folder, as a run would be filled."""
    found = recognise(folder)
    module = find(found.name)
    model: nn.Module = module.Model(found.config)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    importing.fill({f"model.{name}": tensor for name, tensor in tensors.items()}, folder, module, found.config)
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
def test_logits_are_those_of_hugging_face(variant: str, tmp_path: Path) -> None:
    """In float32, to 1e-5 of logits of size 1: another formula is off by a hundredth and more."""
    pytest.importorskip("transformers")
    theirs = build_theirs("gpt_oss", **VARIANTS[variant])
    ours = ours_of(save(theirs, tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    expected_BTV = theirs(tokens_BT).logits
    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(ours(tokens_BT, positions_BT), expected_BTV, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_each_mechanism_changes_logits(tmp_path: Path) -> None:
    folder = save(build_theirs("gpt_oss"), tmp_path / "hf")
    model, config = ours_of(folder), recognise(folder).config
    expected_BTV = model(*rows())
    changes = {"sliding_window": 0, "rope_factor": 1.0, "swiglu_limit": 0.5, "swiglu_alpha": 1.0}
    for name, value in changes.items():
        other = find("gpt_oss").Model(dataclasses.replace(config, **{name: value})).eval()
        other.load_state_dict(model.state_dict())
        assert (other(*rows()) - expected_BTV).abs().max() > 1e-3, name
    without = find("gpt_oss").Model(config).eval()
    weights = model.state_dict()
    without.load_state_dict({name: w - 100.0 if "sinks" in name else w for name, w in weights.items()})
    assert (without(*rows()) - expected_BTV).abs().max() > 1e-3


def test_gradients_of_sinks_and_biases_are_those_of_hugging_face(tmp_path: Path) -> None:
    theirs = build_theirs("gpt_oss")
    ours = ours_of(save(theirs, tmp_path / "hf"))
    tokens_BT, positions_BT = rows()
    for logits_BTV in (theirs(tokens_BT).logits, ours(tokens_BT, positions_BT)):
        logits_BTV.log_softmax(-1)[..., 7].sum().backward()
    for index, layer in enumerate(theirs.model.layers):
        mine = ours.get_submodule(f"layers.{index}")
        pairs = {
            "sinks": (mine.attn.sinks.weight.grad, layer.self_attn.sinks.grad),
            "gate": (mine.moe.experts.w1_bias.grad, layer.mlp.experts.gate_up_proj_bias.grad[:, ::2]),
            "down": (mine.moe.experts.w2_bias.grad, layer.mlp.experts.down_proj_bias.grad),
            "up": (mine.moe.experts.w3.grad, layer.mlp.experts.gate_up_proj.grad[..., 1::2].transpose(1, 2)),
            "router": (mine.moe.router.gate.bias.grad, layer.mlp.router.bias.grad),
        }
        for name, (gradient, expected) in pairs.items():
            assert (gradient - expected).norm() <= 1e-4 * expected.norm(), (index, name)


@torch.no_grad()
def test_another_order_of_layers_is_left_to_transformers(tmp_path: Path) -> None:
    folder = save(build_theirs("gpt_oss"), tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "layer_types": ["full_attention", "sliding_attention"]}))
    found = recognise(folder)
    assert found.name == "transformers" and "layer_types" in found.notices[0]


def packed_folder(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder as gpt-oss is published, its experts in MXFP4, and what transformers makes of these."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder = save(build_theirs("gpt_oss", hidden_size=64, intermediate_size=32), tmp_path / "hf")
    tensors, expected = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(118, 127, (experts, outputs, inputs // 32), generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(said))
    return folder, expected


@torch.no_grad()
def test_weights_in_mxfp4_are_the_numbers_that_transformers_makes_of_them(tmp_path: Path) -> None:
    folder, expected = packed_folder(tmp_path)
    ours = ours_of(folder)
    for name, stack in expected.items():
        layer = ours.get_submodule(f"layers.{name.split('.')[2]}.moe.experts")
        if name.endswith("down_proj"):
            assert torch.equal(layer.w2, stack.float().transpose(1, 2))
        else:
            assert torch.equal(layer.w1, stack[..., ::2].float().transpose(1, 2))
            assert torch.equal(layer.w3, stack[..., 1::2].float().transpose(1, 2))
    with open_weights(folder, "mxfp4") as weights:  # boxes that begin and end within a block
        name, stack = next(iter(expected.items()))
        box = (slice(1, 3), slice(5, 41), slice(3, 11))
        assert torch.equal(weights.read(name, box), stack[box])


def test_what_was_in_mxfp4_is_written_as_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    folder, expected = packed_folder(tmp_path)
    checkpoint, back = str(tmp_path / "checkpoint"), tmp_path / "back"
    assert main(["import", str(folder), "--to", checkpoint, "--check", "weights"]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "logits"]) == 0
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    written = load_file(back / "model.safetensors")
    assert all(torch.equal(written[name], stack) for name, stack in expected.items())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop(next(name for name in t if name.endswith("_scales"))), "beside it"),
        (
            lambda t: t.update({n: x[..., :8].contiguous() for n, x in t.items() if n.endswith("_blocks")}),
            "are not bytes",
        ),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(damage: Any, words: str, tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        ours_of(folder)


def test_each_box_of_a_stack_is_that_of_the_whole(tmp_path: Path) -> None:
    """Ranks read a part of each stack: some experts, some rows, some columns, of what lies interleaved and turned."""
    folder, _ = packed_folder(tmp_path)
    found = recognise(folder)
    translation = translation_of(find("gpt_oss"), found.config, "")
    generator = random.Random(1)
    with open_weights(folder, found.block) as weights:
        for name, shape in translation.shapes.items():
            if ".experts." not in name:
                continue
            whole = mapping.read_whole(name, translation, weights, torch.float32)
            for _ in range(4):
                ends = [sorted(generator.sample(range(size + 1), 2)) for size in shape]
                box = tuple(slice(start, stop) for start, stop in ends)
                part = mapping.read_part(name, box, translation, weights, torch.float32)
                assert torch.equal(part, whole[box]), (name, box)
