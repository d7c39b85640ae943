"""An exported folder as transformers opens it: its logits against those of the checkpoint's own weights."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.hub import as_is
from shardtrain.hub.exporting import Export

TOLERANCE = 1e-4
"""Of the largest logit, in float32, between two programs that compute the same formulas in another order."""
_TOKENS = 64


def why_not(wanted: Export) -> str:
    """Why logits cannot be compared here; empty where they can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    stored = manifest.read(wanted.checkpoint)
    needed = 3 * sum(torch.Size(t.shape).numel() * 4 for n, t in stored.tensors.items() if n.startswith(WEIGHTS_PREFIX))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"two copies in float32 need {needed} bytes of memory and {free} are free" if needed > free else ""


@torch.no_grad()
def largest_error(wanted: Export) -> tuple[float, float]:
    """Largest difference of logits over random tokens, and the largest logit; both models in float32."""
    tokens_BT = torch.randint(0, wanted.config.vocab_size, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    if as_is.is_as_is(wanted.module):
        model = wanted.module.Model(wanted.config)
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        ours, theirs = as_is.both_logits(model, {n: _read(wanted, n) for n in names}, wanted.output, tokens_BT)
    else:
        ours = own_model(wanted)(tokens_BT, torch.arange(_TOKENS).expand(2, -1))
        theirs = _theirs(wanted.output, tokens_BT)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


@torch.no_grad()
def own_model(wanted: Export) -> nn.Module:
    """The checkpoint's model in float32 on the CPU, its weights rounded to the exported type."""
    model: nn.Module = wanted.module.Model(wanted.config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(_read(wanted, name))
    return model.float().eval()


def _read(wanted: Export, name: str) -> Tensor:
    found = tensor_files.read_whole(manifest.read(wanted.checkpoint), wanted.checkpoint, WEIGHTS_PREFIX + name)
    return found.to(getattr(torch, wanted.dtype))


def _theirs(folder: Path, tokens_BT: Tensor) -> Tensor:
    # we wrote config.json a moment ago: it names no code, and nothing is fetched
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    logits: Tensor = model.eval()(tokens_BT).logits
    return logits
