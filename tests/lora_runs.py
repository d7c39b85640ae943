"""Train adapters for a few steps on the frozen weights of a tiny Hugging Face folder."""

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
    """Return a configuration that trains adapters in ``folder`` on the weights of the Hugging Face folder ``base``."""
    hub_model = recognise(base)
    defaults = {
        "job": {"dump_folder": str(folder)},
        "training": {"steps": 4, "seq_len": 32, "local_batch_size": 4, "dataset_path": text_file()},
        "optimizer": {"lr": 3e-2, "eps": 1e-3, "weight_decay": 0.0},
        "lora": {"enable": True, "rank": 4, "alpha": 8.0},
        "checkpoint": {"enable": True, "initial_load_path": str(base), "initial_load_in_hf": True},
    }
    names = defaults.keys() | sections.keys()
    config = tiny_config(
        **{name: {**defaults.get(name, {}), **sections.get(name, {})} for name in names}
    )
    model = dataclasses.replace(
        config.model,
        name=hub_model.name,
        flavor=hub_model.flavor,
        overrides=dict(hub_model.overrides),
        hf_assets_path="bytes",
    )
    return dataclasses.replace(config, model=model)


def train(num_ranks: int, config: Config, stop_after: int | None = None) -> list[Ended]:
    """Run to the end on ``num_ranks`` ranks, with all files of a real run."""
    ended = run_ranks(num_ranks, train_whole, config, stop_after)
    write_resolved_config(Loaded(config), Path(config.job.dump_folder), num_ranks)
    return ended


def tokens(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, vocab_size: int) -> Tensor:
    """Return the logits of a model of this package."""
    tokens_BT = tokens(vocab_size)
    return model(tokens_BT, torch.arange(tokens_BT.size(1)).expand(2, -1))
