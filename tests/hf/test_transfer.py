"""Weights in and out of Hugging Face folders: the same logits and gradients, and not a bit changed on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hub_folders import FAMILIES, build, save

from shardtrain import models
from shardtrain.checkpoint import manifest, tensors
from shardtrain.hf import hf_export, importing, logits
from shardtrain.hf.hf_export import Export
from shardtrain.hf.hub_model import HubModel, recognise
from shardtrain.models import moe

pytest.importorskip("transformers")


def imported(folder: Path, checkpoint: Path) -> tuple[HubModel, Export]:
    found = importing.to_checkpoint(folder, checkpoint)
    module = models.find(found.name)
    return found, Export(checkpoint, checkpoint.with_name("back"), module, found.config, max_tokens=128)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_in_and_goes_out_unchanged(family: str, tmp_path: Path) -> None:
    theirs = build(family)
    folder = save(theirs, tmp_path / "hf", shard_bytes=20_000)
    assert (folder / "model.safetensors.index.json").exists()
    found, wanted = imported(folder, tmp_path / "checkpoint")
    ours = logits.own_model(wanted)
    for length in (3, 40, 100):
        tokens_BT = torch.randint(0, 260, (2, length), generator=torch.Generator().manual_seed(length))
        positions_BT = torch.arange(length).expand(2, -1)
        # float32 leaves about 1e-5 of logits up to 10
        with torch.no_grad():
            torch.testing.assert_close(ours(tokens_BT, positions_BT), theirs(tokens_BT).logits, atol=1e-4, rtol=0)

    hf_export.export(wanted)
    error, scale = logits.largest_error(wanted)
    assert error <= 1e-4 and scale > 0.1
    again, _ = imported(wanted.output, tmp_path / "again")
    assert again == found
    one, other = (manifest.read(tmp_path / name) for name in ("checkpoint", "again"))
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors:
        pair = [tensors.read_whole(m, tmp_path / f, name) for m, f in ((one, "checkpoint"), (other, "again"))]
        assert torch.equal(*pair), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = build(family)
    found, wanted = imported(save(theirs, tmp_path / "hf"), tmp_path / "checkpoint")
    ours = logits.own_model(wanted)
    tokens_BT = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(1))
    weights_BTV = torch.randn((2, 33, 260), generator=torch.Generator().manual_seed(2))
    for module in ours.modules():
        if isinstance(module, moe.Balance):
            module.loss_weight = torch.zeros(())  # their logits have no balance loss beside them
    (ours(tokens_BT, torch.arange(33).expand(2, -1)) * weights_BTV).sum().backward()
    (theirs(tokens_BT).logits * weights_BTV).sum().backward()
    for name in ("embed.weight", "layers.0.attn.wo.weight", "layers.1.attn_norm.weight", "norm.weight"):
        expected, own = (
            theirs.get_parameter(str(found.hub.source(name, found.config))).grad,
            ours.get_parameter(name).grad,
        )
        assert (own - expected).norm() <= 1e-4 * expected.norm(), name
    assert recognise(tmp_path / "hf") == found


def test_config_json_is_read_in_its_older_form_too(tmp_path: Path) -> None:
    folder = save(build("llama3"), tmp_path / "hf")
    before = recognise(folder)
    fields = json.loads((folder / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    (folder / "config.json").write_text(json.dumps(fields))
    assert recognise(folder) == before


def test_a_tied_head_that_the_index_lists_may_be_absent(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save(build("llama3-tied"), tmp_path / "hf", shard_bytes=20_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    _, wanted = imported(folder, tmp_path / "checkpoint")
    tokens_BT = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = logits.own_model(wanted)(tokens_BT, torch.arange(40).expand(2, -1))
        # float32 leaves about 1e-5 of logits up to 10
        torch.testing.assert_close(own, theirs(tokens_BT).logits, atol=1e-4, rtol=0)
