"""Whether a network of ``transformers`` keeps the documents of a packed row apart: tried before the first step.

Such networks see documents by ``position_ids``, which begin again at 0 with each document: those that make their masks
with ``create_causal_mask`` of transformers see in them where documents begin. Nothing says which do, and a network with
a memory beside its attention (a convolution, a state) sees other documents however its attention is masked. So a short
document is computed behind another one and alone, by the very weights and on the very mesh of the run.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardtrain import models
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.distributed.mesh import Mesh
from shardtrain.hf.as_is import is_as_is
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

OPTION = "data.document_mask"
_BEFORE = 8
_LENGTH = 8
_SHARE = 0.1
"""Of what a document before changes without a mask, the most that it may change with one. A mask leaves what float32
or bfloat16 rounds; a network that does not heed it is off by about as much as without one."""


def check_run(run: Run) -> None:
    """``check`` the model of a run whose rows hold several documents, and its frozen teacher."""
    check(run.runner.parts[0], models.find(run.config.model.name), run.mesh)
    teacher = getattr(run.runner, "teacher", None)
    if teacher is not None and hasattr(teacher, "hf"):
        check(teacher, models.find("transformers"), run.mesh)


def check(model: nn.Module, module: Any, mesh: Mesh | None = None) -> None:
    """Refuse a network whose logits of a document depend on the one before it in a row (a collective).

    Without a mesh, each rank has all logits.

    Raises:
        ConfigError: when they do.
    """
    if not is_as_is(module):
        return
    name = model.config_name
    fix = 'set data.packing to "padded", or this to "off"'
    if "position_ids" not in inspect.signature(model.hf.forward).parameters:  # type: ignore[union-attr,arg-type]
        raise ConfigError(Problem(OPTION, None, f"cannot be given to {name}, which takes no position_ids", fix))
    embedding = model.hf.get_input_embeddings().weight  # type: ignore[union-attr,operator]
    # tokens that differ from one another, and no random ones: all ranks must try the same
    columns_1T = torch.arange(_BEFORE + _LENGTH, device=embedding.device)[None]
    tokens_1T = (columns_1T * 37 + 11) % int(embedding.shape[0])
    documents_1T = (columns_1T >= _BEFORE).long()
    alone_1T = columns_1T - documents_1T * _BEFORE
    trains = model.training
    model.eval()
    with torch.no_grad():
        # the second document as the rest of the first, behind it as a document of its own, and alone
        joined = model(tokens_1T, columns_1T)[:, _BEFORE:]
        packed = model(tokens_1T, alone_1T, documents_BT=documents_1T)[:, _BEFORE:]
        alone = model(tokens_1T[:, _BEFORE:], alone_1T[:, _BEFORE:])
    free_gathered(model)
    model.train(trains)
    changed = torch.stack([_size(joined - alone), _size(packed - alone)])
    # the largest of all ranks: a rank that holds a part of the vocabulary sees a part of the difference
    without, with_mask = changed if mesh is None else mesh.max(changed, over=tuple(mesh.sizes))
    if not torch.isfinite(without) or without <= 1e-6 * _size(alone):
        logger.warning(f"{name}: a document before another changes nothing yet, so its mask could not be tried")
    elif with_mask > _SHARE * without:
        rule = (
            f"is not heeded by {name}: a document before another in a row changes its logits by "
            f"{float(with_mask):.2g}, and without a mask by {float(without):.2g}"
        )
        raise ConfigError(Problem(OPTION, None, rule, fix))


def _size(values: Tensor) -> Tensor:
    return values.double().square().mean().sqrt()
