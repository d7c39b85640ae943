"""Ten faults from public reports, five of them in low precision. Six were chosen before reading ``verify``.

Each is planted before anything runs, like a real one, so the reference has it too where one process runs its code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiers import cases
from tools.verify.test_faults import wrap
from tools.verify.test_precision import FLOAT32, rows_of
from torch.distributed.tensor import Replicate

from shardtrain.distributed import (
    embedding_noise,
    grad_clip,
    multi_token_loss,
    pipeline_parallel,
)
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.models import layers
from shardtrain.ops import loss_terms
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.next_tokens import targets_ahead
from shardtrain.optim.moving_average import MovingAverage
from shardtrain.tasks.kto import KTO
from shardtrain.train.run import Run

EMA = ("--training.ema_decay", "0.999", "--checkpoint.enable", "true")
MTP = ("--model.name", "deepseek_v3", "--model.overrides.num_nextn_predict_layers", "1")


class LaterFault(NamedTuple):
    """A planted fault. ``where`` is the dimension or the row of ``verify`` that must differ."""

    plant: Callable[[pytest.MonkeyPatch], None]
    where: str
    options: tuple[str, ...]
    mesh: str
    answer: tuple[str, ...]


FAULTS: dict[str, LaterFault] = {}
ONE_PROCESS = "one process"


def fault(where: str, *answer: str, options: tuple[str, ...] = (), mesh: str = "") -> Any:
    """Register a function that plants a fault, under its name. ``where`` is a dimension, or a row of ``verify``."""

    def register(plant: Any) -> Any:
        FAULTS[plant.__name__.replace("_", " ")] = LaterFault(plant, where, options, mesh, answer)
        return plant

    return register


# low precision


@fault("accumulation", "average", options=EMA)
def averages_kept_in_bfloat16(monkeypatch):
    """https://github.com/huggingface/diffusers/issues/2124: small changes of the average are lost."""

    def update(original, self, applies=None):
        original(self, applies)
        for average in self.averages.values():
            local_tensor(average).copy_(local_tensor(average).bfloat16())

    wrap(monkeypatch, MovingAverage, "update", update)


@fault(ONE_PROCESS, "layers.0.attn.core", mesh="dp_shard=2")
def attention_probabilities_in_bfloat16(monkeypatch):
    """An eager attention without ``dtype=torch.float32`` in its softmax, as in models of transformers."""

    def forward(self, q_BTNH, k_BSKH, v_BSKH, *others, **named):
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (probabilities @ v).transpose(1, 2)

    monkeypatch.setattr(layers.AttentionCore, "forward", forward)


@fault(
    ONE_PROCESS,
    "not computed in float32",
    options=("--training.z_loss_weight=0.01",),
    mesh="dp_shard=2",
)
def a_z_loss_of_rounded_logits(monkeypatch):
    """The z-loss of the logits in the compute dtype."""

    def chunk_loss(original, self, logits, targets, weight):
        loss, gradient = original(self, logits, targets, weight)
        short = logits.bfloat16().logsumexp(-1).float()
        change = short.square() - logits.float().logsumexp(-1).square()
        kept = targets >= 0
        return loss + self.z_loss_weight * (change * kept).sum(dtype=torch.float64), gradient

    wrap(monkeypatch, loss_terms.LossTerms, "chunk_loss", chunk_loss)


@fault("pp=2", "the forward pass first differs on rank 1", options=FLOAT32, mesh="pp=2")
def activations_between_stages_in_bfloat16(monkeypatch):
    """Megatron's ``pipeline_dtype`` shorter than the residual stream."""

    def forward(original, self, *arguments, **named):
        output = original(self, *arguments, **named)
        return output if self.is_last else output.bfloat16().float()

    wrap(monkeypatch, pipeline_parallel._Stage, "forward_maybe_with_nosync", forward)


@fault("dp_shard=2", "norm.weight", "each number of the gradient is a bfloat16", mesh="dp_shard=2")
def gradients_of_norms_reduced_in_bfloat16(monkeypatch):
    """Megatron's all-reduce of the gradients of norms, in the dtype of the parameters. Norms have few numbers."""

    def rounded(norm, parameters, mesh):
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.ndim == 1:
                gradient = local_tensor(parameter.grad)
                gradient.copy_(gradient.bfloat16())
        return norm(parameters, mesh)

    wrap(monkeypatch, grad_clip, "gradient_norm", rounded)


# mesh, micro-batches and resume


@fault("task", "gradient", options=MTP, mesh="cp=2")
def targets_ahead_rolled_within_each_part(monkeypatch):
    """Megatron's ``roll_tensor`` of multi-token prediction, which ignored context parallelism."""

    def cut(original, self, batch):
        tokens_BtK, targets_BtK = original(self, batch)
        size = self._mesh.size("cp")
        if size == 1:
            return tokens_BtK, targets_BtK
        rank = self._mesh.rank("cp")
        part_Bt = sequence_part(batch.targets_BT, rank, size, self._is_balanced)
        return tokens_BtK, targets_ahead(part_Bt, None, targets_BtK.size(-1))

    wrap(monkeypatch, multi_token_loss.MultiTokenLoss, "cut", cut)


@fault("task", "_norm.weight", options=("--model.name", "qwen3"), mesh="tp=2")
def gradients_of_query_norms_not_summed_over_tp(monkeypatch):
    """The norms of queries and keys have a partial gradient on each tensor-parallel rank."""

    def style(make, path, module, name, splitting):
        if path.endswith((".q_norm", ".k_norm")):
            return tensor_parallel.ReplicatedWeights(Replicate())
        return make(path, module, name, splitting)

    wrap(monkeypatch, tensor_parallel, "style_for", style)


@fault("accumulation", "embed", options=("--training.neftune_noise_alpha", "5"))
def noise_that_depends_on_the_micro_batch(monkeypatch):
    """NEFTune of transformers draws from the generator of the process, in the order of the forward passes."""

    def use_rows(original, self, first, count):
        original(self, first, count)
        if self._rows is not None:
            self._rows = range(count)

    wrap(monkeypatch, embedding_noise.EmbeddingNoise, "use_rows", use_rows)


@fault("resume", "average", options=EMA)
def averages_that_start_again_when_a_run_resumes(monkeypatch):
    """A callback that keeps averages outside of the checkpoint."""
    monkeypatch.setattr(Run, "averages_state_dict", lambda self: {})


@fault("accumulation", "step 1", options=("--task.name", "kto", "--task.label_field", "is_good"))
def kl_of_the_micro_batch(monkeypatch):
    """TRL's KTO estimates KL over the rows of the micro-batch."""

    def forward(original, self, model, batch):
        outputs = original(self, model, batch)
        kl = outputs[..., 1].mean().expand_as(outputs[..., 1])
        return torch.stack((outputs[..., 0], kl), dim=-1)

    wrap(monkeypatch, KTO, "forward", forward)


BY_DEFAULT = ("averages that start again when a run resumes",)
DIMENSIONS = ("accumulation", "resume", "task")


@pytest.mark.parametrize(
    "name", cases(BY_DEFAULT, [name for name in FAULTS if name not in BY_DEFAULT])
)
def test_a_later_fault_is_detected(name, check, tmp_path: Path, monkeypatch):
    planted = FAULTS[name]
    planted.plant(monkeypatch)
    if planted.where in DIMENSIONS:
        meshes = (planted.mesh,) if planted.mesh else ()
        (result, *_) = [
            one
            for one in check(planted.where, *planted.options, meshes=meshes).comparisons
            if one.verdict != "same"
        ] or [None]
        assert result is not None, "not detected"
    else:
        result = rows_of(tmp_path, planted.options, planted.mesh, steps=1)[planted.where]
    assert result.verdict == "differs", result
    answer = f"{result.first}; {result.cause}"
    assert all(text in answer for text in planted.answer), answer
