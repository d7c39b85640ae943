"""Runs save Hugging Face folders next to their checkpoints, with the bytes of an export, on any mesh."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import reviews
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import Ended, tiny_config, train_whole

from shardtrain import models
from shardtrain.checkpoint import files, retention
from shardtrain.config.schema import Config
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.hf import hf_export, saving
from shardtrain.hf.generation_config import trained_tokens
from shardtrain.hf.hf_export import Export
from shardtrain.utils.errors import ConfigError, StorageError

SHARD_BYTES = 100_000
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_dim": 32}
MESHES: dict[str, tuple[int, dict[str, int], str]] = {
    "one": (1, {}, "llama3"),
    "fsdp=2 tp=2": (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, "llama3"),
    "pp=2": (2, {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1}, "llama3"),
    "fsdp=2 ep=2": (2, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, "qwen3_moe"),
}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the file size limit, so that exports have several files that different ranks write."""
    monkeypatch.setattr(saving, "SHARD_BYTES", SHARD_BYTES)


def config_for(folder: Path, mesh: str = "one", steps: int = 2, **checkpoint: Any) -> Config:
    config = tiny_config(
        job={"dump_folder": str(folder)},
        parallelism=MESHES[mesh][1],
        training={"steps": steps, "local_batch_size": 4},
        checkpoint={"enable": True, **checkpoint},
    )
    if MESHES[mesh][2] == "qwen3_moe":
        overrides = {
            key: value for key, value in config.model.overrides.items() if key != "ffn_dim"
        }
        model = dataclasses.replace(
            config.model,
            name="qwen3_moe",
            flavor="debugmodel_moe",
            overrides={**overrides, **EXPERTS},
        )
        config = dataclasses.replace(config, model=model)
    return config


def train(config: Config, ranks: int = 1) -> Ended:
    ended: Ended = run_ranks(ranks, train_whole, config)[0]
    return ended


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("mesh", "async_mode"),
    [("one", "async"), ("fsdp=2 tp=2", "async"), ("pp=2", "disabled"), ("fsdp=2 ep=2", "disabled")],
)
def test_the_saved_folder_equals_an_export(mesh: str, async_mode: str, tmp_path: Path) -> None:
    ranks, _, _ = MESHES[mesh]
    config = config_for(
        tmp_path / "run",
        mesh,
        steps=2,
        hf_interval=1,
        last_save_in_hf=True,
        async_mode=async_mode,
        interval=100,
    )

    assert train(config, ranks).error is None

    folder = tmp_path / "run/checkpoint"
    names = sorted(path.name for path in folder.glob("step-*"))
    assert names == ["step-1", "step-1-hf", "step-2", "step-2-hf"]

    module = models.find(config.model.name)
    shape = models.shape_of(
        module, config.model.flavor, config.model.overrides, config.model.norm_type
    )
    tokens = trained_tokens(tokenizer_of(config), config)
    # Exporting a checkpoint writes the same bytes as the folder that the run saved next to it.
    for step in (1, 2):
        back = tmp_path / f"exported-{step}"
        export = Export(folder / f"step-{step}", back, module, shape, max_tokens=64, tokens=tokens)
        hf_export.export(dataclasses.replace(export, shard_bytes=SHARD_BYTES))

        files = bytes_of(folder / f"step-{step}-hf")
        assert files == bytes_of(back)
        assert sum(name.endswith(".safetensors") for name in files) >= 4


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_the_weights_are_rounded_to_the_requested_dtype(dtype: str, tmp_path: Path) -> None:
    ended = train(config_for(tmp_path, last_save_in_hf=True, export_dtype=dtype))
    folder = tmp_path / "checkpoint/step-2-hf"
    weights = {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }

    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    assert torch.equal(
        weights["lm_head.weight"], ended.weights["head.weight"].to(getattr(torch, dtype))
    )
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype


def test_a_folder_is_deleted_with_its_checkpoint(tmp_path: Path) -> None:
    train(config_for(tmp_path, steps=5, interval=1, hf_interval=2, keep_latest_k=2))
    names = sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*"))
    assert names == ["step-4", "step-4-hf", "step-5"]


def no_space(folder: str) -> Any:
    """Return a function that writes files, but fails for weights as on a full disk."""
    write = files.write_hashed

    def full(path: Path, *rest: Any) -> Any:
        if path.name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *rest)

    return full


def test_a_failed_save_of_a_folder_leaves_no_files_and_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "write_hashed", no_space(str(tmp_path)))
    error = train(config_for(tmp_path, last_save_in_hf=True), ranks=1).error
    assert isinstance(error, StorageError)
    assert "No space left" in str(error)
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == ["step-2"], (
        "the checkpoint itself must remain"
    )


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_run_may_continue_after_a_failed_save_of_a_folder(
    async_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "write_hashed", no_space(str(tmp_path)))
    config = config_for(
        tmp_path, steps=4, hf_interval=2, async_mode=async_mode, on_save_error="continue"
    )
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=5))
    ended = train(config, ranks=2)

    assert ended.error is None
    assert ended.state["step"] == 5
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == [
        "step-2",
        "step-4",
        "step-5",
    ]


def test_a_run_that_ends_with_its_data_writes_the_folder(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one line of a text " * 200)
    config = config_for(tmp_path, steps=50, last_save_in_hf=True)
    changed = {"dataset_path": str(text), "on_data_end": "stop", "local_batch_size": 8}
    ended = train(
        dataclasses.replace(config, training=dataclasses.replace(config.training, **changed))
    )
    last = ended.state["step"]

    assert ended.error is None
    assert 0 < last < 50
    assert (tmp_path / f"checkpoint/step-{last}-hf/config.json").is_file()


def test_leftovers_of_a_killed_export_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-2-hf.tmp-0123456789ab").mkdir()
    (tmp_path / "step-2-hf.trash-01234567").mkdir()
    (tmp_path / "step-2-hf").mkdir()
    retention.sweep(tmp_path, "own", now=2e9 + 1e9)

    assert [path.name for path in tmp_path.iterdir()] == ["step-2-hf"]


def test_a_model_without_a_transformers_class_is_rejected_before_the_first_step(
    tmp_path: Path,
) -> None:
    config = config_for(tmp_path, last_save_in_hf=True)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, norm_type="layernorm")
    )
    ended = train(config)

    assert isinstance(ended.error, ConfigError)
    assert "norm_type" in str(ended.error)
    assert not ended.losses

    # Llama 4 has a transformers class for language models, but none with a classification head.
    labels = reviews.config(
        checkpoint={"enable": True, "last_save_in_hf": True}, job={"dump_folder": str(tmp_path)}
    )
    model = dataclasses.replace(labels.model, name="llama4", flavor="debugmodel", overrides={})
    ended = train(dataclasses.replace(labels, model=model))
    message = "transformers has no class like Llama4ForCausalLM with a classification head"

    assert isinstance(ended.error, ConfigError)
    assert message in str(ended.error)
    assert not ended.losses
