"""Measure how much activations change in a few steps at several widths, with and without muP: a coordinate check.

    python benchmarks/mup_coordinates.py

Writes results/mup_coordinates.json, which docs/plots.py draws. With muP (examples/models/mup.py), the change of an
activation does not depend on the width. The models have two layers, and train on the same tokens in each step.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.config.schema import Optimizer
from shardtrain.models import llama
from shardtrain.ops.init_weights import draw_, plan
from shardtrain.optim import build
from shardtrain.utils import own_file

ROOT = Path(__file__).parents[1]
MUP = ROOT / "examples/models/mup.py"
RESULT = ROOT / "benchmarks/results/mup_coordinates.json"
WIDTHS = (64, 128, 256, 512, 1024)
STEPS = 4
LR = 1e-2
WATCHED = {"attention": "layers.1.attn", "feed-forward": "layers.1.ffn", "logits": "head"}


def sizes(width: int) -> dict[str, int]:
    """Return the model sizes for a width. The head dimension is fixed; the number of heads grows."""
    heads = width // 16
    return {
        "vocab_size": 256,
        "dim": width,
        "num_layers": 2,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": 16,
        "ffn_dim": 2 * width,
    }


def changes(module: ModuleType, optimizer_name: str, width: int) -> dict[str, float]:
    """Train a few steps. Return the root mean square of the change of each watched activation."""
    shape = module.Config(**sizes(width))
    model: Any = module.Model(shape)
    names = [name for name, _ in model.named_parameters()]
    draws = plan(names, module.initial(shape), module.LAYOUT, shape.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw_(parameter, name, draws[name], 0)
    options = Optimizer(name=optimizer_name, lr=LR, weight_decay=0.0)
    optimizer = build(model.named_parameters(), options)

    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            outputs[name] = output.detach().clone()

        return hook

    for name, path in WATCHED.items():
        model.get_submodule(path).register_forward_hook(keep(name))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (4, 65), generator=generator)
    positions = torch.arange(64).expand(4, 64)
    before: dict[str, Tensor] = {}
    for _ in range(STEPS):
        logits = model(tokens[:, :-1], positions)
        before = before or dict(outputs)
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(tokens[:, :-1], positions)
    result = {}
    for name in WATCHED:
        change = outputs[name] - before[name]
        result[name] = change.square().mean().sqrt().item()
    return result


def main() -> None:
    """Measure all widths, and write the results."""
    mup = own_file.load(str(MUP), own_file.MODEL, "model.name")
    rows = []
    for width in WIDTHS:
        standard = changes(llama, "AdamW", width)
        rows.append({"width": width, "standard": standard, "mup": changes(mup, str(MUP), width)})
        print(json.dumps(rows[-1]))
    RESULT.write_text(json.dumps({"steps": STEPS, "lr": LR, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
