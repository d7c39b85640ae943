"""A model with dropout continues, bit for bit, as if it had never ended: accumulation, FSDP, an epoch's edge."""

from __future__ import annotations

import dataclasses
import hashlib
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
    return made_once(tmp_path_factory, "dropout", lambda: make_ended(tmp_path_factory.mktemp("dropout")))


def make_ended(root: Path) -> list[dict[str, Ended]]:
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
@pytest.mark.nightly(
    "with dropout",
    by="tests/train/test_resume.py::test_a_resumed_run_has_the_bits_of_the_run_that_never_ended",
)
def test_a_run_with_dropout_continues_to_the_bit(ended: list[dict[str, Ended]], mesh: str, where: str) -> None:
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


SPLIT: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_degree": 2},
    "cp": {"context_parallel_degree": 2},
    "tp x cp": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    "tp x pp": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
}


def masks_of_a_step(rank: int, model: str, parallelism: dict[str, Any]) -> dict[str, list[Tensor]]:
    """What each dropout kept in one training step, by its name; full recompute must drop the same again."""
    made = tiny_config(parallelism=parallelism, activation_checkpoint={"mode": "full"})
    made = dataclasses.replace(
        made, model=dataclasses.replace(made.model, name=model, flavor="small", overrides={"vocab_size": 512})
    )
    run = make_run(rank, made)
    masks: dict[str, list[Tensor]] = {}
    for part in run.runner.parts:
        for name, module in part.named_modules():
            if isinstance(module, nn.Dropout) and module.p:
                kept = masks.setdefault(name, [])
                module.register_forward_hook(lambda _m, _i, out, kept=kept: kept.append(out.detach() != 0))
    trainer.step(run)
    return {name: list(map(local, kept)) for name, kept in masks.items()}


def local(mask: Tensor) -> Tensor:
    return mask.to_local() if hasattr(mask, "to_local") else mask


@pytest.mark.parametrize("mesh", SPLIT)
def test_ranks_that_hold_different_tokens_drop_different_numbers(mesh: str, tmp_path: Path) -> None:
    file, encoder = tmp_path / "dropping.py", tmp_path / "causal_encoder.py"
    file.write_text(MODEL_FILE)
    # under the task of next tokens, for which it would be refused; what it learns does not matter here
    own = (Path(shardtrain.models.__path__[0]) / "encoder.py").read_text()
    encoder.write_text(own.replace("CAUSAL = False", "CAUSAL = True").replace('"debugmodel": {', '"small": {', 1))
    # the encoder sees all tokens of a row, which context parallelism does not carry
    models = [str(file)] if "cp" in mesh else [str(file), str(encoder)]
    if "pp" in mesh:  # which refuses a file that drops between its modules: each stage would drop what it is given
        models = [str(encoder)]
    num_ranks = 4 if " x " in mesh else 2
    for model in models:
        by_rank = run_ranks(num_ranks, masks_of_a_step, model, SPLIT[mesh])
        for name in {name for masks in by_rank for name in masks}:
            holders = [masks[name] for masks in by_rank if name in masks]
            assert len(holders) >= 2
            for i, mine in enumerate(holders):
                for theirs in holders[:i]:
                    assert len(mine) == len(theirs) > 0
                    assert not any(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), name
                    # of independent masks with rate p, p^2 + (1 - p)^2 agree: 0.82 for 0.1 and 0.68 for 0.2
                    together = torch.cat([(a == b).flatten().float() for a, b in zip(mine, theirs, strict=True)])
                    assert together.mean().item() < 0.85


def refusal_of(rank: int, model: str) -> str:
    with pytest.raises(ConfigError) as raised:
        masks_of_a_step(rank, model, SPLIT["tp"])
    return str(raised.value)


def test_dropout_of_what_tensor_parallel_ranks_hold_whole_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dropping.py"
    # on what attention has gathered, before queries, keys and values are made of it
    inside = (
        "class DroppingAttention(Attention):\n    def __init__(self, *sizes, rate):\n        super().__init__(*sizes)\n"
    )
    inside += "        self.early = nn.Dropout(rate)\n\n    def forward(self, x, angles):\n"
    inside += "        return super().forward(self.early(x), angles)\n\n\nclass Block"
    text = MODEL_FILE.replace("class Block", inside, 1)
    text = text.replace(
        "Attention(c.dim, c.num_heads, c.num_heads, c.head_dim)",
        "DroppingAttention(c.dim, c.num_heads, c.num_heads, c.head_dim, rate=c.dropout)",
    )
    file.write_text(text)
    for said in run_ranks(2, refusal_of, str(file)):
        assert said.startswith("parallelism.tensor_parallel_degree=2 applies dropout in blocks.0.attn.early")
        assert "\n" not in said


def drops_beside_latents(rank: int, model: str) -> int:
    return len(masks_of_a_step(rank, model, SPLIT["tp"]))


def test_dropout_behind_a_rowwise_linear_is_not_refused_beside_what_ranks_compute_alike(tmp_path: Path) -> None:
    """Latent attention has "replicate" modules within; what follows its output is of each rank's own tokens."""
    file, text = tmp_path / "latent.py", (Path(__file__).parent / "models/others/mla_moe.py").read_text()
    made = "self.out = nn.Linear(c.num_heads * c.nope_dim, c.dim, bias=False)"
    text = text.replace(made, f"{made}\n        self.drop = nn.Dropout(0.1)").replace('{"tiny": {}}', '{"small": {}}')
    after = "return self.out(out[..., : self.nope_dim].flatten(2))"
    assert made in text and after in text
    file.write_text(text.replace(after, "return self.drop(self.out(out[..., : self.nope_dim].flatten(2)))"))
    assert run_ranks(2, drops_beside_latents, str(file)) == [4, 4]
    file.write_text(text.replace("self.latent_norm(latent)", "self.drop(self.latent_norm(latent))"))
    for said in run_ranks(2, refusal_of, str(file)):
        assert said.startswith("parallelism.tensor_parallel_degree=2 applies dropout in layers.0.attn.drop")
