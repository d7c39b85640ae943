"""Files of an FMEngine user: a Hugging Face folder, documents in JSONL, a DeepSpeed JSON, and runs of its flags."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import hub_folders
import tiny_tokenizers
import torch
from foreign_configs import LLAMA
from tiny import make_run, whole
from torch import Tensor

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.compat import migrate
from shardtrain.train import trainer
from shardtrain.train.resume import resume

VOCABULARY = 512
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "lay", "by", "the", "fire"]


def hf_folder(folder: Path, family: str = "llama2", **changed: Any) -> Path:
    """Write a tiny model with its tokenizer. Return the folder."""
    hub_folders.save(hub_folders.build(family, vocab_size=VOCABULARY, **changed), folder)
    return tiny_tokenizers.bpe_folder(folder)


def jsonl(file: Path, rows: int = 60) -> Path:
    """Write documents of thirty tokens. Return the file."""
    drawn = random.Random(0)
    file.write_text(
        "".join(
            json.dumps({"text": " ".join(drawn.choices(WORDS, k=30))}) + "\n" for _ in range(rows)
        )
    )
    return file


def ds_json(file: Path, micro: int, batch: int, bf16: bool = True, **changed: Any) -> Path:
    """Write FMEngine's llama.json with the given batch sizes. ``changed`` are other top-level keys."""
    content = json.loads(json.dumps(LLAMA))
    content |= {
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": batch,
        "bf16": {"enabled": bf16},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | changed, indent=1))
    return file


def steps_of_flags(
    rank: int, flags: list[str], steps: int
) -> tuple[list[float], list[float], list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Train as one rank of several. Return losses, learning rates, (tokens, targets) of each batch, and all weights."""
    config = migrate.load_flags(flags, torch.distributed.get_world_size()).config
    run = make_run(rank, config)
    resume(run, Checkpoints(config))
    stream = run.dataloader
    rows = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> Any:
            batch = next(stream)
            rows.append((batch.tokens_BT.clone(), batch.targets_BT.clone()))
            return batch

    run.dataloader = Recorded()  # type: ignore[assignment]
    losses = []
    rates = []
    for _ in range(steps):
        outcome = trainer.step(run)
        assert outcome is not None
        total = run.mesh.sum(outcome.loss_sum.double(), over=("pp",)).item()
        losses.append(total / outcome.global_tokens)
        rates.append(outcome.lr)
    return losses, rates, rows, whole(run)


def values(path: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors in a folder."""
    from safetensors.torch import load_file

    return load_file(str(folder / "model.safetensors"))


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that the tensors are equal, including their names and dtypes."""
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
    assert {name: t.dtype for name, t in actual.items()} == {
        name: t.dtype for name, t in expected.items()
    }
