"""Test before the first step that a ``transformers`` network computes the same logits on split sequences.

Before ranks start, ``hf_cores.check`` has already inspected the network's operations. This module runs the
network twice on a short row, with the run's weights and mesh. The first time, the row is split over the
context-parallel ranks. The second time, each rank has the full row and uses the attention of
``transformers``. The logits must agree.
They differ, for example, if the network's forward depends on the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardtrain.config.schema import Config
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.pipeline_parallel import AllStages, PipelineRunner
from shardtrain.ops.attention_interface import original_attention
from shardtrain.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from shardtrain.train.run import Run

OPTION = "parallelism.context_parallel_degree"
_LENGTH = 32
_MAX_ERROR = 1e-3
"""Maximum error of the logits, relative to their root mean square, in float32. Rounding is about 1e-6."""
_MAX_ERROR_IN_16_BITS = 0.1
"""Maximum error of the logits in 16-bit dtypes, relative to how much other ranks' tokens change them."""


def check_run(run: Run) -> None:
    """Check the model of a run and its frozen teacher, if they are ``transformers`` networks."""
    if run.mesh.size(context_parallel.AXIS) == 1:
        return
    model = run.runner.parts[0]
    if hasattr(model, "hf"):
        if isinstance(run.runner, PipelineRunner):
            model = AllStages(run.runner)
        check(model, run.runner.parts, run.mesh, run.config)
    teacher = getattr(run.runner, "teacher", None)
    if hasattr(teacher, "hf"):
        check(teacher, [teacher], run.mesh, run.config)


def check(model: Any, parts: Sequence[Any], mesh: Mesh, config: Config) -> None:
    """Reject a network whose logits depend on how its sequences are split (a collective).

    Args:
        model: the model, which returns logits.
        parts: the pipeline stages of this rank, or the model itself.
        mesh: the mesh of the run.
        config: the configuration of the run.

    Raises:
        ConfigError: the logits of a split row differ from those of the full row.
    """
    vocab_size = model.hf.get_input_embeddings().weight.shape[0]
    # Do not use longer rows than the run, because a network with learned position embeddings may not have
    # embeddings for them.
    length = min(context_parallel.splittable_length(_LENGTH, mesh), config.training.seq_len)
    columns_1T = torch.arange(length, device=next(model.parameters()).device)[None]
    tokens_1T = (columns_1T * 37 + 11) % int(vocab_size)
    half = length // 2
    was_training = model.training
    model.eval()
    # Run eagerly, because compiled code for these passes would not be used again.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        split = context_parallel.full_logits(model, tokens_1T, columns_1T, mesh, config)
        with ExitStack() as unsplit:
            for part in parts:
                unsplit.enter_context(original_attention(part.hf, part.original_attention))
            expected = model(tokens_1T, columns_1T)
            # Without the first half, the logits show how much it changes the second half.
            alone = model(tokens_1T[:, half:], columns_1T[:, half:])
    for part in parts:
        free_gathered(part)
    model.train(was_training)

    # If the vocabulary is split, a rank sees only part of the difference. So use the maximum over ranks.
    values = torch.stack([_rms(split - expected), _rms(expected), _rms(expected[:, half:] - alone)])
    error, size, effect = (float(value) for value in mesh.max(values, over=tuple(mesh.sizes)))
    allowed = _MAX_ERROR * size
    if split.dtype in (torch.bfloat16, torch.float16):
        allowed = max(allowed, _MAX_ERROR_IN_16_BITS * effect)
    # Weights without an initializer are NaN until they are loaded. The first step reports them.
    if math.isfinite(size) and not error <= allowed:
        rule = (
            f"changes the logits of {model.config_name} by {error:.2g} (their magnitude is {size:.2g}), "
            "because its forward mixes the tokens of a row in other ways than by attention and positions"
        )
        raise ConfigError(
            Problem(
                OPTION,
                mesh.size(context_parallel.AXIS),
                rule=rule,
                fix="set the degree to 1",
            )
        )


def _rms(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt()
