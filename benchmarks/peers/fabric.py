"""Train the plain Llama of ``llama.py`` on the shared work, with Lightning Fabric."""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from llama import Llama
from torch.nn import functional as F
from work import BETAS, LEARNING_RATE, MAX_NORM, PARAMETERS, ROWS, WEIGHT_DECAY, rows

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--steps", type=int, default=8)
asked = parser.parse_args()

fabric = Fabric(
    accelerator="cpu", devices=1, precision="bf16-mixed" if asked.dtype == "bfloat16" else "32-true"
)
fabric.launch()
torch.manual_seed(0)
plain = Llama()
assert sum(parameter.numel() for parameter in plain.parameters()) == PARAMETERS
model, optimizer = fabric.setup(
    plain,
    torch.optim.AdamW(
        plain.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    ),
)
for step in range(asked.steps):
    inputs, targets = rows(step, 0, ROWS)
    loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
