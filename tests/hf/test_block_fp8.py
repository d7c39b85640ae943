"""Weights published in fp8 with a scale per block are dequantized on import and on any mesh."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_folders import build, save
from hub_runs import config_for, refused, start
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.tensors import read_whole
from shardtrain.config.schema import Config
from shardtrain.hf import importing
from shardtrain.utils.errors import CheckpointError

pytest.importorskip("transformers")
BLOCK = (8, 12)
"""Does not divide the sizes: the last blocks are smaller."""


def quantize(folder: Path) -> dict[str, np.ndarray]:
    """Write the projections of a folder in fp8 with the published layout. Return the dequantized values."""
    tensors = load_file(folder / "model.safetensors")
    numbers = {}
    for name in [name for name in tensors if "proj" in name]:
        weight = tensors[name]
        rows, columns = (-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True))
        generator = torch.Generator().manual_seed(len(name))
        scales = torch.rand((rows, columns), generator=generator) + 0.5
        # Repeat each scale over its block, and cut the last blocks to the size of the weight.
        repeated = np.kron(scales.numpy(), np.ones(BLOCK, np.float32))
        scale_of_value = repeated[: weight.shape[0], : weight.shape[1]]
        stored = (weight / torch.from_numpy(scale_of_value)).to(torch.float8_e4m3fn)
        tensors |= {name: stored, f"{name}_scale_inv": scales}
        numbers[name] = stored.double().numpy() * scale_of_value.astype(np.float64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("deepseek_v3"), tmp_path_factory.mktemp("fp8") / "hf")


@pytest.fixture(scope="module")
def numbers(folder: Path) -> dict[str, np.ndarray]:
    return quantize(folder)


def quantized(config: Config, value: bool = True) -> Config:
    checkpoint = dataclasses.replace(config.checkpoint, initial_load_in_hf_quantized=value)
    return dataclasses.replace(config, checkpoint=checkpoint)


def expected(numbers: dict[str, np.ndarray], name: str) -> torch.Tensor:
    return torch.from_numpy(
        numbers[name]
    ).float()  # the product of fp8 and float32, rounded once to float32


def test_an_import_writes_dequantized_weights(
    folder: Path, numbers: dict[str, np.ndarray], tmp_path: Path
) -> None:
    importing.to_checkpoint(folder, tmp_path / "checkpoint", dtype="float32")
    stored = manifest.read(tmp_path / "checkpoint")
    imported = read_whole(stored, tmp_path / "checkpoint", "model.layers.0.attn.wo.weight")

    assert torch.equal(imported, expected(numbers, "model.layers.0.self_attn.o_proj.weight"))

    # Here, the experts of a layer are one tensor.
    experts = read_whole(stored, tmp_path / "checkpoint", "model.layers.1.moe.experts.w2")
    for number in range(8):
        assert torch.equal(
            experts[number],
            expected(numbers, f"model.layers.1.mlp.experts.{number}.down_proj.weight"),
        )

    importing.to_checkpoint(folder, tmp_path / "other")
    other = manifest.read(tmp_path / "other")
    dtypes = {tensor.dtype for tensor in other.tensors.values()}
    assert dtypes == {"float32"}, "must be the dtype of the embedding"


def test_a_run_starts_from_dequantized_weights_on_any_mesh(
    folder: Path, numbers: dict[str, np.ndarray], tmp_path: Path
) -> None:
    single = run_ranks(1, start, quantized(config_for(folder, tmp_path / "one", "one")))[0]
    several = run_ranks(4, start, quantized(config_for(folder, tmp_path / "four", "fsdp=2 tp=2")))[
        0
    ]

    assert torch.equal(
        single["layers.0.attn.wo.weight"],
        expected(numbers, "model.layers.0.self_attn.o_proj.weight"),
    )
    assert single.keys() == several.keys()
    assert all(torch.equal(single[name], several[name]) for name in single)


def test_the_quantization_option_must_match_the_folder(
    folder: Path, numbers: dict[str, np.ndarray], tmp_path: Path
) -> None:
    kind, text = run_ranks(1, refused, config_for(folder, tmp_path / "run", "one"))[0]
    assert kind == "ConfigError"
    assert "initial_load_in_hf_quantized=false must be true for quantized weights" in text

    plain = save(build("deepseek_v3"), tmp_path / "plain")
    kind, text = run_ranks(1, refused, quantized(config_for(plain, tmp_path / "run", "one")))[0]
    assert kind == "ConfigError"
    assert "requires quantized weights" in text


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = save(build("deepseek_v3"), tmp_path / "hf")
    quantize(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    incomplete = dict(tensors)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(
        CheckpointError, match="is not an fp8 weight with a float32 for each block of 8 x 12"
    ):
        importing.to_checkpoint(folder, tmp_path / "checkpoint")

    # Without scales, an fp8 weight cannot be converted.
    del incomplete[f"{name}_scale_inv"]
    save_file(incomplete, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"with an unsupported dtype: {name}"):
        importing.to_checkpoint(folder, tmp_path / "checkpoint")
