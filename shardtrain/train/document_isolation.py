"""Test before the first step that a ``transformers`` network keeps the documents of a packed row apart.

Such networks recognize documents by ``position_ids``, which restart at 0 with each document. Networks that
build their masks with ``create_causal_mask`` of transformers respect these boundaries, but there is no way to
recognize these networks. A network with a convolution or a recurrent state mixes documents even with a
correct mask. So this module computes the logits of a short document twice, after another document and at the
start of a row, and compares them. It uses the run's weights and mesh.
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
"""Number of tokens of each of the two documents. More if the mesh cannot split a row of this length."""
_MAX_RATIO = 0.1
"""Maximum change of the logits by a previous document with a mask, relative to the change without a mask.

With a working mask, only rounding remains in float32 or bfloat16. If the network ignores the mask, the
ratio is about 1."""


def check_run(run: Run) -> None:
    """Call ``check`` for the model of a run. Also call it for a frozen teacher that is a transformers network."""
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
    """Check that a document's logits do not depend on the previous document in the row (a collective).

    Args:
        model: the network.
        module: the Python module that defines the model. Only ``transformers`` networks are tested.
        mesh: None if each rank computes all logits.
        config: required if the mesh splits sequences.

    Raises:
        ConfigError: the logits depend on the previous document, or the network has no ``position_ids``.
    """
    if not is_as_is(module):
        return
    name = model.config_name
    fix = f'set data.packing to "padded", or {OPTION} to "off"'
    if config is not None and config.task.name == "image_text":
        fix = "remove data.packing"
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
    # Make a row of two documents, with distinct tokens that are the same on all ranks.
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

    # Compute the logits of the second document in three cases: as a continuation of the first document, as a
    # separate document after the first, and without any document before it.
    was_training = model.training
    model.eval()
    with torch.no_grad():
        joined = logits(tokens_1T, columns_1T)[:, half:]
        packed = logits(tokens_1T, positions_1T, documents_BT=documents_1T)[:, half:]
        # At the start of a row, no other document comes before it, so its logits do not depend on the mask.
        separate = logits(tokens_1T.roll(-half, dims=1), columns_1T)[:, :half]
    free_gathered(model)
    model.train(was_training)

    changes = torch.stack([_rms(joined - separate), _rms(packed - separate)])
    # If the vocabulary is split, a rank sees only part of the difference. So use the maximum over ranks.
    if mesh is not None:
        changes = mesh.max(changes, over=tuple(mesh.sizes))
    unmasked_change, masked_change = changes
    if not torch.isfinite(unmasked_change) or unmasked_change <= 1e-6 * _rms(separate):
        logger.warning(
            f"{name}: {OPTION} could not be tested, because with these weights a previous document does not "
            "change the logits even without a mask"
        )
    elif not masked_change <= _MAX_RATIO * unmasked_change:  # also if the change is NaN
        rule = (
            f"is ignored by {name}: a previous document in the row changes its logits by "
            f"{float(masked_change):.2g}, and without a mask by {float(unmasked_change):.2g}"
        )
        raise ConfigError(Problem(OPTION, None, rule, fix))


def _rms(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt()
