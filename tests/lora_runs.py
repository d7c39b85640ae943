"""Adapters trained for a few steps beside the weights of a tiny folder of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from tiny import Ended, text_file, tiny_config, train_whole
from torch import Tensor

from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.hf.hub_model import recognise
from shardtrain.train.run_folder import write_resolved_config


def adapter_config(base: Path, folder: Path, **sections: dict[str, Any]) -> Config:
    """A run of adapters in ``folder`` whose frozen weights are those of the Hugging Face folder ``base``."""
    found = recognise(base)
    given = {
        "job": {"dump_folder": str(folder)},
        "training": {"steps": 4, "seq_len": 32, "local_batch_size": 4, "dataset_path": text_file()},
        "optimizer": {"lr": 3e-2, "eps": 1e-3, "weight_decay": 0.0},
        "lora": {"enable": True, "rank": 4, "alpha": 8.0},
        "checkpoint": {"enable": True, "initial_load_path": str(base), "initial_load_in_hf": True},
    }
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in given.keys() | sections.keys()}
    config = tiny_config(**merged)
    model = dataclasses.replace(
        config.model, name=found.name, flavor=found.flavor, overrides=dict(found.overrides), hf_assets_path="bytes"
    )
    return dataclasses.replace(config, model=model)


def train(num_ranks: int, config: Config, stop_after: int | None = None) -> list[Ended]:
    """The whole run on so many ranks, with its files as a user finds them."""
    ended = run_ranks(num_ranks, train_whole, config, stop_after)
    write_resolved_config(Loaded(config), Path(config.job.dump_folder), num_ranks)
    return ended


def tokens(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, vocab_size: int) -> Tensor:
    """Of a model of this package."""
    tokens_BT = tokens(vocab_size)
    return model(tokens_BT, torch.arange(tokens_BT.size(1)).expand(2, -1))
