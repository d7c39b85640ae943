"""Runs on CPUs use the kernels measured by rank 0 on all ranks, or PyTorch's own if required."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_config

from shardtrain.config.schema import Config
from shardtrain.ops import chosen_kernels
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import kernel_speed
from shardtrain.train.build import set_numerics


def choose(rank: int, config: Config) -> Kernels:
    kernel_speed.remembered_or_measured = lambda: Kernels(
        onednn_linear=float(rank), blocked_attention=2.0
    )
    chosen_kernels.use(Kernels(3.0, 3.0))
    set_numerics(config, torch.device("cpu"))
    return chosen_kernels.chosen()


def test_all_ranks_use_the_kernels_measured_by_rank_0() -> None:
    assert (
        run_ranks(2, choose, tiny_config())
        == [Kernels(onednn_linear=0.0, blocked_attention=2.0)] * 2
    )


@pytest.mark.parametrize(
    "sections", [{"training": {"cpu_kernels": "pytorch"}}, {"debug": {"deterministic": True}}]
)
def test_portable_determinism_uses_kernels_of_pytorch(sections: dict[str, Any]) -> None:
    assert run_ranks(1, choose, tiny_config(**sections)) == [chosen_kernels.PYTORCH]
