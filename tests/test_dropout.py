"""A model that drops at random goes on, bit for bit, as if it had never ended: accumulation, FSDP, an epoch's edge."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiny import Ended, assert_bitwise, tiny_config, train_whole
from torch import Tensor

from shardtrain.config.schema import Config

MODEL_FILE = '''
"""A decoder with dropout after the embedding, in attention's residual and in the feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import Attention, RotaryAngles


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 8
    dropout: float = 0.2


LAYOUT = Layout(
    first=("tokens",),
    layers="blocks",
    last=("out",),
    tensor={
        "tokens": "embed",
        "blocks.*.attn": "gather",
        "blocks.*.attn.w[qkv]": "colwise",
        "blocks.*.attn.wo": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "out": "head",
    },
    context="blocks.*.attn.core",
)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.dim, c.num_heads, c.num_heads, c.head_dim)
        self.up, self.down = nn.Linear(c.dim, c.dim, bias=False), nn.Linear(c.dim, c.dim, bias=False)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, angles):
        x = x + self.drop(self.attn(x, angles))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.head_dim, 10000.0)
        self.blocks = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.drop = nn.Dropout(c.dropout)
        self.out = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x, angles = self.drop(self.tokens(tokens)), self.rope(positions)
        for block in self.blocks.values():
            x = block(x, angles)
        return self.out(x)


FLAVORS = {"small": {}, "sure": {"dropout": 0.0}}


def initial(c):
    names = ("tokens.weight", "out.weight", "blocks.*.attn.*.weight", "blocks.*.up.weight", "blocks.*.down.weight")
    return {name: Draw("normal", std=0.1) for name in names}
'''
ROWS = 24
"""Of an epoch: three steps of eight."""
MESHES: dict[str, dict[str, Any]] = {"fsdp": {}, "ddp": {"data_parallel_replicate_degree": 2}}


def config(root: Path, name: str, mesh: str, flavor: str = "small") -> Config:
    made = tiny_config(
        job={"dump_folder": str(root / name)},
        parallelism=MESHES[mesh],
        training={
            "steps": 7,
            "seq_len": 16,
            "dataset_path": str(root / "short.txt"),
            "on_data_end": "repeat",
        },
        checkpoint={"enable": True, "interval": 3},
    )
    return dataclasses.replace(
        made, model=dataclasses.replace(made.model, name=str(root / "dropping.py"), flavor=flavor, overrides={})
    )


def runs(rank: int, root: Path) -> dict[str, Ended]:
    ended = {"sure": train_whole(rank, config(root, "sure", "fsdp", flavor="sure"), stop_after=1)}
    for mesh in MESHES:
        ended[f"{mesh} straight"] = train_whole(rank, config(root, f"{mesh}-straight", mesh))
        # three steps are an epoch: the run ends at its edge, and, from the same checkpoint, within the next
        train_whole(rank, config(root, mesh, mesh), stop_after=3)
        if rank == 0:
            shutil.copytree(root / mesh, root / f"{mesh}-later")
        dist.barrier()
        train_whole(rank, config(root, f"{mesh}-later", mesh), stop_after=5)
        for name in (mesh, f"{mesh}-later"):
            ended[name] = train_whole(rank, config(root, name, mesh))
    return ended


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    root = tmp_path_factory.mktemp("dropout")
    (root / "dropping.py").write_text(MODEL_FILE)
    (root / "short.txt").write_text(("mesh shard gather reduce loss token layer rank step seed " * 7)[:383])
    return run_ranks(2, runs, root)


def digest(tensors: dict[str, Tensor]) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("where", ["", "-later"])
def test_a_run_with_dropout_goes_on_to_the_bit(ended: list[dict[str, Ended]], mesh: str, where: str) -> None:
    for rank in ended:
        straight, resumed = rank[f"{mesh} straight"], rank[f"{mesh}{where}"]
        assert straight.error is None and resumed.error is None
        assert len(straight.sample_ids[0]) == 4  # two micro-batches of two rows
        assert resumed.losses == straight.losses[3:] and resumed.grad_norms == straight.grad_norms[3:]
        assert resumed.sample_ids == straight.sample_ids[3:]
        assert_bitwise(resumed.weights, straight.weights)
        assert digest(resumed.weights) == digest(straight.weights)
        assert digest(resumed.optimizer) == digest(straight.optimizer)


def test_the_epoch_ends_where_the_run_does(ended: list[dict[str, Ended]]) -> None:
    """Else the law above would be about less than it says."""
    seen = [
        sorted(i for rank in ended for step in steps for i in rank["fsdp straight"].sample_ids[step])
        for steps in ((0, 1, 2), (3, 4, 5))
    ]
    assert seen == [list(range(ROWS))] * 2


def test_the_model_does_drop(ended: list[dict[str, Ended]]) -> None:
    assert ended[0]["sure"].losses[0] != ended[0]["fsdp straight"].losses[0]
