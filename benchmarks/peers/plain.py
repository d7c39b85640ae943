"""A plain PyTorch training loop, as written without a trainer.

bfloat16 uses autocast on one rank, and the mixed precision policy of FSDP2 on several.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from llama import Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from work import BETAS, LEARNING_RATE, MAX_NORM, ROWS, WEIGHT_DECAY, rows

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--compile", action="store_true")
asked = parser.parse_args()

torch.manual_seed(0)
rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
low = asked.dtype == "bfloat16"
model = Llama()
if ranks > 1:
    dist.init_process_group("gloo")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    options = {"mesh": init_device_mesh("cpu", (ranks,)), "mp_policy": policy}
    for layer in model.layers:
        if asked.compile:  # compile each layer separately, as PyTorch recommends with FSDP2
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
elif asked.compile:
    model.compile()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
)
for step in range(asked.steps):
    inputs, targets = rows(step, rank, ROWS // ranks)
    with torch.autocast("cpu", torch.bfloat16, enabled=low and ranks == 1):
        logits = model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
if ranks > 1:
    dist.destroy_process_group()
