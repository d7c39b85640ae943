"""A model with dropout resumes bitwise, with accumulation, FSDP and at the end of an epoch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from once import made_once
from ranks import run_ranks
from tiny import Ended, assert_bitwise, make_run, tiny_config, train_whole
from torch import Tensor, nn

import shardtrain.models
from shardtrain.config.schema import Config
from shardtrain.train import trainer
from shardtrain.utils.errors import ConfigError

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
        "blocks.*.ffn": "gather",
        "blocks.*.ffn.up": "colwise",
        "blocks.*.ffn.down": "rowwise",
        "out": "head",
    },
    context="blocks.*.attn.core",
)


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = nn.Linear(c.dim, c.dim, bias=False), nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.dim, c.num_heads, c.num_heads, c.head_dim)
        self.ffn = FeedForward(c)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, angles):
        x = x + self.drop(self.attn(x, angles))
        return x + self.drop(self.ffn(x))


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
    names = ("tokens.weight", "out.weight", "blocks.*.attn.*.weight", "blocks.*.ffn.*.weight")
    return {name: Draw("normal", std=0.1) for name in names}
'''
ROWS = 24
"""Rows per epoch: three steps of eight rows."""
MESHES: dict[str, dict[str, Any]] = {"fsdp": {}, "ddp": {"data_parallel_replicate_degree": 2}}


def config(root: Path, name: str, mesh: str, flavor: str = "small") -> Config:
    base = tiny_config(
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
    model = dataclasses.replace(
        base.model, name=str(root / "dropping.py"), flavor=flavor, overrides={}
    )
    return dataclasses.replace(base, model=model)


def runs(rank: int, root: Path) -> dict[str, Ended]:
    ended = {"sure": train_whole(rank, config(root, "sure", "fsdp", flavor="sure"), stop_after=1)}
    for mesh in MESHES:
        ended[f"{mesh} straight"] = train_whole(rank, config(root, f"{mesh}-straight", mesh))
        # an epoch has three steps: one run stops at its end, and another in the next epoch
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
    return made_once(
        tmp_path_factory, "dropout", lambda: make_ended(tmp_path_factory.mktemp("dropout"))
    )


def make_ended(root: Path) -> list[dict[str, Ended]]:
    (root / "dropping.py").write_text(MODEL_FILE)
    (root / "short.txt").write_text(
        ("mesh shard gather reduce loss token layer rank step seed " * 7)[:383]
    )
    return run_ranks(2, runs, root)


def digest(tensors: dict[str, Tensor]) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("where", ["", "-later"])
@pytest.mark.nightly(
    "with dropout",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_run_with_dropout_resumes_bitwise(
    ended: list[dict[str, Ended]], mesh: str, where: str
) -> None:
    for rank in ended:
        straight = rank[f"{mesh} straight"]
        resumed = rank[f"{mesh}{where}"]
        assert straight.error is None
        assert resumed.error is None
        assert len(straight.sample_ids[0]) == 4  # two micro-batches of two rows each: accumulation
        assert resumed.losses == straight.losses[3:]
        assert resumed.grad_norms == straight.grad_norms[3:]
        assert resumed.sample_ids == straight.sample_ids[3:]
        assert_bitwise(resumed.weights, straight.weights)
        assert digest(resumed.weights) == digest(straight.weights)
        assert digest(resumed.optimizer) == digest(straight.optimizer)


def test_run_is_interrupted_at_the_end_of_an_epoch(ended: list[dict[str, Ended]]) -> None:
    """Three steps read all rows, so a run stopped after step 3 resumes at the end of an epoch."""
    for steps in ((0, 1, 2), (3, 4, 5)):
        sample_ids = [
            i for rank in ended for step in steps for i in rank["fsdp straight"].sample_ids[step]
        ]
        assert sorted(sample_ids) == list(range(ROWS))


def test_model_applies_dropout(ended: list[dict[str, Ended]]) -> None:
    assert ended[0]["sure"].losses[0] != ended[0]["fsdp straight"].losses[0]


SPLIT: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_degree": 2},
    "cp": {"context_parallel_degree": 2},
    "tp x cp": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    "tp x pp": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
}


def masks_of_a_step(rank: int, model: str, parallelism: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the masks of each dropout in one training step, by its name. Recomputation draws each mask again."""
    base = tiny_config(parallelism=parallelism, activation_checkpoint={"mode": "full"})
    overrides = {"vocab_size": 512}
    model_options = dataclasses.replace(base.model, name=model, flavor="small", overrides=overrides)
    run = make_run(rank, dataclasses.replace(base, model=model_options))
    masks: dict[str, list[Tensor]] = {}

    def note_mask(name: str, _module: Any, _inputs: Any, out: Tensor) -> None:
        masks.setdefault(name, []).append(local(out.detach() != 0))

    for part in run.runner.parts:
        for name, module in part.named_modules():
            if isinstance(module, nn.Dropout) and module.p:
                masks[name] = []
                module.register_forward_hook(functools.partial(note_mask, name))
    trainer.step(run)
    return masks


def local(mask: Tensor) -> Tensor:
    return mask.to_local() if hasattr(mask, "to_local") else mask


@pytest.mark.parametrize("mesh", SPLIT)
def test_ranks_with_different_tokens_draw_different_masks(mesh: str, tmp_path: Path) -> None:
    file = tmp_path / "dropping.py"
    encoder = tmp_path / "causal_encoder.py"
    file.write_text(MODEL_FILE)
    # The task only accepts causal models. Pretend that the encoder is one: only its masks are compared.
    text = (Path(shardtrain.models.__path__[0]) / "encoder.py").read_text()
    text = text.replace("CAUSAL = False", "CAUSAL = True")
    text = text.replace('"debugmodel": {', '"small": {', 1)
    encoder.write_text(text)
    # context parallelism does not support bidirectional attention
    models = [str(file)] if "cp" in mesh else [str(file), str(encoder)]
    # Pipelines refuse the dropout between modules of this model: each stage would apply it to its input.
    if "pp" in mesh:
        models = [str(encoder)]
    num_ranks = 4 if " x " in mesh else 2

    for model in models:
        by_rank = run_ranks(num_ranks, masks_of_a_step, model, SPLIT[mesh])
        names: set[str] = set()
        for masks in by_rank:
            names |= masks.keys()
        for name in names:
            masks_of_ranks = [masks[name] for masks in by_rank if name in masks]
            assert len(masks_of_ranks) >= 2
            for first, second in itertools.combinations(masks_of_ranks, 2):
                assert_independent(first, second, name)


def assert_independent(first: list[Tensor], second: list[Tensor], name: str) -> None:
    """Check that the masks of two ranks differ, and agree in no more elements than by chance."""
    assert len(first) == len(second) > 0, name
    agreements = []
    for mask, other_mask in zip(first, second, strict=True):
        assert not torch.equal(mask, other_mask), name
        agreements.append((mask == other_mask).flatten().float())
    # independent masks with rate p agree in p^2 + (1 - p)^2 elements: 0.82 for 0.1 and 0.68 for 0.2
    assert torch.cat(agreements).mean().item() < 0.85, name


def refusal_of(rank: int, model: str) -> str:
    with pytest.raises(ConfigError) as raised:
        masks_of_a_step(rank, model, SPLIT["tp"])
    return str(raised.value)


def test_dropout_of_replicated_activations_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dropping.py"
    # Add dropout to the gathered input of attention, before the query, key and value projections.
    inside = "class DroppingAttention(Attention):\n    def __init__(self, *sizes, rate):\n"
    inside += "        super().__init__(*sizes)\n"
    inside += "        self.early = nn.Dropout(rate)\n\n    def forward(self, x, angles):\n"
    inside += "        return super().forward(self.early(x), angles)\n\n\nclass Block"
    text = MODEL_FILE.replace("class Block", inside, 1)
    text = text.replace(
        "Attention(c.dim, c.num_heads, c.num_heads, c.head_dim)",
        "DroppingAttention(c.dim, c.num_heads, c.num_heads, c.head_dim, rate=c.dropout)",
    )
    file.write_text(text)

    for message in run_ranks(2, refusal_of, str(file)):
        assert message.startswith(
            "parallelism.tensor_parallel_degree=2 applies dropout in blocks.0.attn.early"
        )
        assert "\n" not in message


def num_dropouts(rank: int, model: str) -> int:
    return len(masks_of_a_step(rank, model, SPLIT["tp"]))


def test_dropout_after_a_rowwise_linear_is_allowed_next_to_replicated_modules(
    tmp_path: Path,
) -> None:
    """Latent attention contains "replicate" modules, but its output has different tokens on each rank."""
    file = tmp_path / "latent.py"
    text = (Path(__file__).parent / "models/others/mla_moe.py").read_text()
    definition = "self.out = nn.Linear(c.num_heads * c.nope_dim, c.dim, bias=False)"
    result = "return self.out(out[..., : self.nope_dim].flatten(2))"

    assert definition in text
    assert result in text

    # Dropout after the rowwise linear, whose output is split by tokens, is allowed.
    text = text.replace(definition, f"{definition}\n        self.drop = nn.Dropout(0.1)")
    text = text.replace('{"tiny": {}}', '{"small": {}}')
    file.write_text(
        text.replace(result, "return self.drop(self.out(out[..., : self.nope_dim].flatten(2)))")
    )

    assert run_ranks(2, num_dropouts, str(file)) == [4, 4]

    # Dropout after a replicated module would drop other elements on each rank.
    file.write_text(text.replace("self.latent_norm(latent)", "self.drop(self.latent_norm(latent))"))
    for message in run_ranks(2, refusal_of, str(file)):
        assert message.startswith(
            "parallelism.tensor_parallel_degree=2 applies dropout in layers.0.attn.drop"
        )
