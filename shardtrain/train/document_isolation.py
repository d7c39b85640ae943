"""Test before the first step that a ``transformers`` network keeps the documents of a packed row apart.

Such networks see documents by ``position_ids``, which restart at 0 with each document. Networks that build
their masks with ``create_causal_mask`` of transformers respect these document boundaries, but no
flag marks these networks. A network with other memory than attention (a convolution, a state) mixes
documents whatever its mask is. So this module computes a short document once behind another one and once
without it, with the weights and on the mesh of the run, and compares the logits.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.pipeline_parallel import AllStages, PipelineRunner
from shardtrain.hf.as_is import is_as_is
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

OPTION = "data.document_mask"
_LENGTH = 8
"""Number of tokens of each of the two documents. Rows of a mesh that splits sequences may need more."""
_MAX_RATIO = 0.1
"""Maximum ratio of the logit change with a mask to the change without one. With a working mask only
rounding in float32 or bfloat16 remains. If the network ignores the mask, the ratio is about 1."""


def check_run(run: Run) -> None:
    """Call ``check`` for the model of a run, and for its frozen teacher if it is a transformers network."""
    model = run.runner.parts[0]
    if isinstance(run.runner, PipelineRunner):
        model = AllStages(run.runner)
    check(model, models.find(run.config.model.name), run.mesh, run.config)
    teacher = getattr(run.runner, "teacher", None)
    if teacher is not None and hasattr(teacher, "hf"):
        check(teacher, models.find("transformers"), run.mesh, run.config)


def check(
    model: nn.Module, module: Any, mesh: Mesh | None = None, config: Config | None = None
) -> None:
    """Reject a network whose logits of a document depend on the previous document in the row (a collective).

    ``mesh`` None means that each rank has all logits. ``config`` is required if the mesh splits sequences.

    Raises:
        ConfigError: the logits depend on it, or the network has no ``position_ids``.
    """
    if not is_as_is(module):
        return
    name = model.config_name
    fix = 'set data.packing to "padded", or this to "off"'
    if "position_ids" not in inspect.signature(model.hf.forward).parameters:  # type: ignore[union-attr,arg-type]
        raise ConfigError(
            Problem(
                OPTION,
                None,
                rule=f"is not supported by {name}, which takes no position_ids",
                fix=fix,
            )
        )
    embedding = model.hf.get_input_embeddings().weight  # type: ignore[union-attr,operator]
    # distinct tokens that are the same on all ranks
    length = 2 * _LENGTH
    if mesh is not None and config is not None and mesh.size(context_parallel.AXIS) > 1:
        length = min(context_parallel.splittable_length(length, mesh), config.training.seq_len)
    half = length // 2
    device = next(model.parameters()).device  # a stage may lack the embedding
    columns_1T = torch.arange(length, device=device)[None]
    tokens_1T = (columns_1T * 37 + 11) % int(embedding.shape[0])
    documents_1T = (columns_1T >= half).long()
    positions_1T = columns_1T - documents_1T * half

    def logits(tokens: Tensor, positions: Tensor, **documents: Tensor) -> Tensor:
        if mesh is None or config is None:
            return model(tokens, positions, **documents)  # type: ignore[no-any-return]
        return context_parallel.full_logits(model, tokens, positions, mesh, config, **documents)

    # Logits of the second document in three cases: it continues the first document, it is a separate document
    # after the first, or it is alone.
    was_training = model.training
    model.eval()
    with torch.no_grad():
        joined = logits(tokens_1T, columns_1T)[:, half:]
        packed = logits(tokens_1T, positions_1T, documents_BT=documents_1T)[:, half:]
        # With the second document first, its logits do not depend on the mask.
        separate = logits(tokens_1T.roll(-half, dims=1), columns_1T)[:, :half]
    free_gathered(model)
    model.train(was_training)

    changes = torch.stack([_rms(joined - separate), _rms(packed - separate)])
    # A rank with a part of the vocabulary sees only a part of the difference, so use the maximum over ranks.
    if mesh is not None:
        changes = mesh.max(changes, over=tuple(mesh.sizes))
    unmasked_change, masked_change = changes
    if not torch.isfinite(unmasked_change) or unmasked_change <= 1e-6 * _rms(separate):
        logger.warning(
            f"{name}: {OPTION} could not be tested, because a previous document does not change the logits yet"
        )
    elif not masked_change <= _MAX_RATIO * unmasked_change:  # also if the change is NaN
        rule = (
            f"is ignored by {name}: a previous document in the row changes its logits by "
            f"{float(masked_change):.2g}, and without a mask by {float(unmasked_change):.2g}"
        )
        raise ConfigError(Problem(OPTION, None, rule, fix))


def _rms(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt()
