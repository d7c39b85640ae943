"""A Llama with torchtitan's parameter names, trained for a few steps by plain PyTorch and saved like torchtitan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OVERRIDES = {
    "vocab_size": 260, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48,
}  # fmt: skip
GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 3
TOKENS = 1234


def linear_layers(**sizes: tuple[int, int]) -> nn.ModuleDict:
    """Return layers without a bias, by name, from their numbers of inputs and outputs."""
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class Block(nn.Module):
    """Stand-in for a transformer layer, with torchtitan's module names. Its forward uses all weights."""

    def __init__(self) -> None:
        super().__init__()
        d = OVERRIDES["dim"]
        f = OVERRIDES["ffn_dim"]
        kv = OVERRIDES["num_kv_heads"] * OVERRIDES["head_dim"]
        self.attention = linear_layers(wq=(d, d), wk=(d, kv), wv=(d, kv), wo=(d, d))
        self.feed_forward = linear_layers(w1=(d, f), w2=(f, d), w3=(d, f))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention
        f = self.feed_forward
        y = self.attention_norm(x)
        x = x + a["wo"](a["wq"](y) + (a["wk"](y) * a["wv"](y)).repeat(1, 2))
        y = self.ffn_norm(x)
        return x + f["w2"](f["w1"](y) * f["w3"](y))


class TitanLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        d = OVERRIDES["dim"]
        v = OVERRIDES["vocab_size"]
        self.tok_embeddings, self.norm = nn.Embedding(v, d), nn.RMSNorm(d)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(OVERRIDES["num_layers"])})
        self.output = nn.Linear(d, v, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def trained(seed: int, steps: int) -> tuple[TitanLlama, torch.optim.AdamW]:
    """Return a model and an optimizer, sharded over all ranks, after some steps."""
    torch.manual_seed(seed)
    model = TitanLlama()
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **GROUP)
    for _ in range(steps):
        model(torch.arange(50)).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict in the layout of torchtitan v0.2."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "train_state": {"step": STEP, "ntokens_seen": TOKENS},
        "dataloader": {"dp_rank_0": b"\x80\x04N."},
    }


def save(rank: int, folder: str) -> dict[str, Tensor]:
    """Save the state of all ranks. Return the unsharded state."""
    model, optimizer = trained(seed=0, steps=2)
    dcp.save(state_dict(model, optimizer), checkpoint_id=folder)
    return full_state(model, optimizer)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors, unsharded, by their names in a checkpoint folder."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    tensors = get_model_state_dict(model, options=options)
    for name, state in get_optimizer_state_dict(model, optimizer, options=options).items():
        tensors[f"optimizer.{name}"] = state
    return {name: tensor.clone() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def load(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Load a folder with PyTorch's own load. Return the unsharded state, the counters and the parameter group."""
    model, optimizer = trained(seed=1, steps=1)
    state = state_dict(model, optimizer)
    del state["dataloader"]
    dcp.load(state, checkpoint_id=folder)

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights = {key: v for key, v in state.items() if key not in ("optimizer", "train_state")}
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
    group = {name: optimizer.param_groups[0][name] for name in GROUP}
    return full_state(model, optimizer), state["train_state"], group


def words(**others: int) -> list[str]:
    """Return command-line options with the sizes of the model. ``others`` override sizes."""
    return [
        f"--model.overrides.{name}={json.dumps(value)}"
        for name, value in {**OVERRIDES, **others}.items()
    ]


def rows(name: str, tensor: Tensor) -> Tensor:
    """Reorder the rows of wq and wk for this package: all even rows of a head, then all odd rows."""
    if not tensor.dim() or not any(f".{w}.weight" in name for w in ("wq", "wk")):
        return tensor
    heads = []
    for head in tensor.split(OVERRIDES["head_dim"]):
        heads += [head[0::2], head[1::2]]
    return torch.cat(heads)


def saved_one(folder: Path) -> Path:
    """Save a checkpoint as the only rank, in this process. Return its folder."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save(0, str(folder))
    finally:
        dist.destroy_process_group()
    return folder
