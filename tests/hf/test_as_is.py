"""Folders of any architecture keep their tensor names, and survive a bitwise round trip."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import config_for, folder
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import make_run, train_whole

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.tools.convert.convert_command import export_main
from shardtrain.train import trainer
from shardtrain.train.resume import resume
from shardtrain.utils.errors import CheckpointError, ShardtrainError

pytest.importorskip("transformers")


def seed_checkpoint(rank: int, config: Config) -> None:
    """Save the initial weights of a run as a checkpoint."""
    ended = train_whole(rank, config)
    assert ended.error is None


def toml(name: str, path: Path) -> Path:
    file = path / RESOLVED_CONFIG
    path.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'[model]\nname = "transformers"\n[model.overrides]\npath = "{folder(name)}"\n[training]\nseq_len = 32\n'
    )
    return file


@pytest.mark.parametrize(
    ("name", "ranks"), [("gpt2", 2), ("gemma2", 1), ("t5", 1), ("bart", 1), ("bert", 1)]
)
def test_an_import_exports_bitwise(name: str, ranks: int, tmp_path: Path, capsys: Any) -> None:
    tasks = {
        "bert": "masked_language_model",
        "bart": "sequence_to_sequence",
        "t5": "sequence_to_sequence",
    }
    folder(name)
    sections: dict[str, Any] = {}
    if name in tasks:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"text": "one two", "prompt": "one", "completion": "two"}\n' * 8)
        sections["task"] = {"name": tasks[name], "options": {"mask_token_id": 300}}
        sections["training"] = {"dataset": "jsonl", "dataset_path": str(rows)}
    sections["checkpoint"] = {"create_seed_checkpoint": True}
    config = config_for(name, tmp_path / "run", **sections)
    run_ranks(ranks, seed_checkpoint, config)
    output = tmp_path / "out"
    arguments = [str(tmp_path / "run/checkpoint/step-0"), "--to", str(output), "--check", "logits"]

    assert export_main([*arguments, "--config", str(toml(name, tmp_path))]) == 0

    captured = capsys.readouterr()
    assert "transformers returns the same logits" in captured.out
    assert "Loading weights" not in captured.err

    before = load_file(folder(name) / "model.safetensors")
    after = load_file(output / "model.safetensors")
    for key in before.keys() & after.keys():
        assert torch.equal(after[key], before[key])
    # Shared tensors may be stored under another of their names.
    assert len(before.keys() ^ after.keys()) <= 2

    fields_before = json.loads((folder(name) / "config.json").read_text())
    fields_after = json.loads((output / "config.json").read_text())
    assert fields_after["architectures"] == fields_before["architectures"]
    assert fields_after["model_type"] == fields_before["model_type"]


def started(rank: int, config: Config) -> dict[str, torch.Tensor] | str:
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    try:
        resume(run, checkpoints)
    except ShardtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpoints.close()
    return {name: p.detach().clone() for name, p in run.runner.parameters().items()}


def rewritten(name: str, path: Path, change: Any) -> Path:
    """Copy a folder with changed tensors."""
    path.mkdir()
    (path / "config.json").write_bytes((folder(name) / "config.json").read_bytes())
    tensors = load_file(folder(name) / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path


def begun(name: str, source: Path, tmp_path: Path, **overrides: Any) -> Any:
    load = {"initial_load_path": str(source)}
    return run_ranks(
        1, started, config_for(name, tmp_path / "run", overrides=overrides, checkpoint=load)
    )[0]


def test_base_prefix_and_duplicate_tensors_do_not_matter(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return {
            **bare,
            "lm_head.weight": bare["wte.weight"].clone(),
            "h.0.attn.bias": torch.ones(1, 1, 4, 4),
        }

    weights = begun("gpt2", rewritten("gpt2", tmp_path / "bare", change), tmp_path)
    expected = load_file(folder("gpt2") / "model.safetensors")
    assert isinstance(weights, dict), weights
    assert torch.equal(weights["hf.transformer.wte.weight"], expected["transformer.wte.weight"])
    assert torch.equal(
        weights["hf.transformer.h.1.mlp.c_fc.bias"], expected["transformer.h.1.mlp.c_fc.bias"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"] + 1},
            "1 not in this model: lm_head.weight",
        ),
        (
            lambda t: {k: v for k, v in t.items() if "ln_f" not in k},
            "2 missing: transformer.ln_f.bias",
        ),
        (
            lambda t: {**t, "transformer.ln_f.bias": torch.ones(3)},
            "transformer.ln_f.bias [3] instead of [32]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    weights = begun("gpt2", rewritten("gpt2", tmp_path / "other", change), tmp_path)
    assert isinstance(weights, str)
    assert weights.startswith("CheckpointError")
    assert message in weights


def test_a_truncated_file_another_model_and_converted_names_are_one_line(tmp_path: Path) -> None:
    source = rewritten("gpt2", tmp_path / "cut", lambda tensors: tensors)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])

    assert "is truncated" in begun("gpt2", source, tmp_path)

    another_model = begun("gpt2", folder("opt"), tmp_path / "b")
    assert "contains another model than" in another_model
    assert another_model.startswith("ConfigError")

    # Some versions of transformers rename the experts of Mixtral while loading. Both outcomes are
    # valid.
    experts = begun("mixtral", folder("mixtral"), tmp_path / "c")
    assert isinstance(experts, dict) or "that only transformers can convert" in experts


def test_a_new_head_is_initialized_for_another_architecture(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": "one two", "label": number % 3}) for number in range(9)]
    rows.write_text("\n".join(lines) + "\n")
    config = config_for(
        "bart",
        tmp_path / "run",
        overrides={"architecture": "BartForSequenceClassification", "num_labels": 3},
        task={"name": "classification", "num_labels": 3},
        training={"dataset": "jsonl", "dataset_path": str(rows)},
    )
    weights = run_ranks(1, started, config)[0]

    assert isinstance(weights, dict), weights

    # The body has the weights of the folder, and the head random ones instead of zeros.
    expected = load_file(folder("bart") / "model.safetensors")
    key = "model.encoder.layers.1.fc1.weight"
    assert torch.equal(weights[f"hf.{key}"], expected[key])
    assert weights["hf.classification_head.out_proj.weight"].std() > 0


def without_network(rank: int, config: Config) -> float:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a connection was requested")

    for name in ("connect", "connect_ex", "bind"):
        setattr(socket.socket, name, refuse)
    socket.getaddrinfo = refuse  # type: ignore[assignment]
    run = make_run(rank, config)
    resume(run, Checkpoints(config))
    outcome = trainer.step(run)
    assert outcome is not None
    return outcome.grad_norm


def test_no_connection_is_opened(tmp_path: Path) -> None:
    config = config_for("llama", tmp_path)
    assert run_ranks(1, without_network, config)[0] > 0


def test_an_architecture_without_a_native_model_uses_transformers(tmp_path: Path) -> None:
    from shardtrain.hf.hub_model import recognise

    recognised = recognise(folder("gpt2"))
    assert (recognised.name, recognised.overrides) == (
        "transformers",
        {"path": str(folder("gpt2"))},
    )
    assert "model_type='gpt2' is not one of" in recognised.notices[0]
    assert "GPT2LMHeadModel of transformers" in recognised.notices[0]
    with pytest.raises(CheckpointError, match="is missing"):
        recognise(tmp_path)
