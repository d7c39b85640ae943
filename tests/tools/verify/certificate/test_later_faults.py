"""Twenty faults, ten of them in low precision.

Ten are from public reports, and six of these were chosen before reading ``verify``. A new user of the
certificate chose the others after reading its pages, and before reading ``verify``.

Each is planted before anything runs, like a real one, so the reference has it too where one process runs its code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiers import cases
from tools.verify.certificate.test_dimensions import VALIDATION
from tools.verify.test_faults import wrap
from tools.verify.test_precision import FLOAT8, FLOAT16, FLOAT32, QWEN3_MOE, rows_of
from torch.distributed.tensor import Replicate

from shardtrain.data.loader import DataLoader
from shardtrain.distributed import (
    compute_copies,
    embedding_noise,
    expert_parallel,
    fsdp,
    grad_clip,
    multi_token_loss,
    pipeline_parallel,
)
from shardtrain.distributed.context_parallel import masks
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.lora.linear import LoraLinear
from shardtrain.models import layers, llama, moe
from shardtrain.ops import float8, loss_terms
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.next_tokens import targets_ahead
from shardtrain.optim import grad_scaler, optimizer_builder
from shardtrain.optim.moving_average import MovingAverage
from shardtrain.tasks.kto import KTO
from shardtrain.train import trainer
from shardtrain.train.run import Run

EMA = ("--training.ema_decay", "0.999", "--checkpoint.enable", "true")
LORA = ("--lora.enable", "true", "--lora.random_base", "true", "--lora.alpha", "16")
UNDER_CP = (
    *("--training.mixed_precision_param", "bfloat16"),
    *("--parallelism.context_parallel_degree", "2"),
)
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
        q = q_BTNH.transpose(1, 2)
        k = k_BSKH.transpose(1, 2)
        v = v_BSKH.transpose(1, 2)
        groups = q.size(1) // k.size(1)
        k = k.repeat_interleave(groups, 1)
        v = v.repeat_interleave(groups, 1)
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
    """Compute the z-loss from logits in the compute dtype instead of float32."""

    def chunk_loss(original, self, logits, targets, weight):
        loss, gradient = original(self, logits, targets, weight)
        short = logits.bfloat16().logsumexp(-1).float()
        change = short.square() - logits.float().logsumexp(-1).square()
        kept = targets >= 0
        return loss + self.z_loss_weight * (change * kept).sum(dtype=torch.float64), gradient

    wrap(monkeypatch, loss_terms.LossTerms, "chunk_loss", chunk_loss)


@fault("pp=2", "the forward pass first differs on rank 1", options=FLOAT32, mesh="pp=2")
def activations_between_stages_in_bfloat16(monkeypatch):
    """Megatron's ``pipeline_dtype`` has a lower precision than the residual stream."""

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
    """A callback keeps the averages, so checkpoints do not contain them."""
    monkeypatch.setattr(Run, "averages_state_dict", lambda self: {})


@fault("accumulation", "step 1", options=("--task.name", "kto", "--task.label_field", "is_good"))
def kl_of_the_micro_batch(monkeypatch):
    """TRL's KTO estimates KL over the rows of the micro-batch."""

    def forward(original, self, model, batch):
        outputs = original(self, model, batch)
        kl = outputs[..., 1].mean().expand_as(outputs[..., 1])
        return torch.stack((outputs[..., 0], kl), dim=-1)

    wrap(monkeypatch, KTO, "forward", forward)


# faults chosen by a new user: low precision


@fault(
    ONE_PROCESS,
    "layers.0",
    "rounded to it, although the result is float16",
    options=FLOAT16,
    mesh="dp_shard=2",
)
def a_residual_stream_rounded_to_bfloat16(monkeypatch):
    """A cast at one place of a model that was written for bfloat16, in a run in float16."""

    def forward(original, self, x_BTD, angles, documents_BT=None):
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        if x_BTD.dtype == torch.float16:
            x_BTD = x_BTD.bfloat16().half()
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))

    wrap(monkeypatch, llama.LlamaBlock, "forward", forward)


@fault("precision", "each number of the gradient is a bfloat16", options=UNDER_CP)
def gradients_reduced_in_bfloat16_under_cp(monkeypatch):
    """With context parallelism, gradients are reduced in the compute dtype."""

    def policy(original, config):
        dtypes = original(config)
        if config.parallelism.context_parallel_degree > 1:
            return dataclasses.replace(dtypes, reduce_dtype=dtypes.param_dtype)
        return dtypes

    wrap(monkeypatch, fsdp, "precision_policy", policy)


@fault(
    ONE_PROCESS,
    "0.5 times",
    "loss scale of float16 of the next step",
    options=FLOAT16,
    mesh="dp_shard=2",
)
def an_update_divided_by_the_next_loss_scale(monkeypatch):
    """The scale grows after the backward pass and before the update, and the update reads it."""

    def grow(original, self, finite):
        self.scale_of_backward = self.scale
        return original(self, finite)

    def update(original, run, factor, applies=None):
        if run.scaler:
            factor = factor * run.scaler.scale_of_backward / run.scaler.scale
        original(run, factor, applies)

    wrap(monkeypatch, grad_scaler.LossScaler, "update", grow)
    wrap(monkeypatch, trainer, "_update", update)


@fault(
    ONE_PROCESS,
    "module embed",
    "gradients of several micro-batches are added in bfloat16",
    mesh="dp_shard=2",
)
def earlier_micro_batches_rounded_to_bfloat16(monkeypatch):
    """The sum of all micro-batches but the last is kept in the compute dtype."""

    def add(original, self, parameter, copy):
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            gradient.copy_(gradient.bfloat16())
        original(self, parameter, copy)

    wrap(monkeypatch, compute_copies.ComputeCopies, "_add_gradient", add)


@fault(ONE_PROCESS, "layers.1.attn.wo", "8-bit operands", options=FLOAT8, mesh="dp_shard=2")
def a_float8_scale_of_half_the_rows(monkeypatch):
    """The scale is computed from the first half of the rows only, so larger elements of other rows are clipped."""

    def to_float8(original, x, dim, name, amax=None):
        if dim is not None or x.ndim != 2 or x.size(0) < 2:
            return original(x, dim, name, amax)
        half = x[: x.size(0) // 2].abs().amax()
        power = float8.powers(half, float8.dtype_of(name))
        limit = torch.finfo(float8.dtype_of(name)).max / float8.two_to_the(power)
        return original(x.clamp(-limit, limit), dim, name, half)

    wrap(monkeypatch, float8, "to_float8", to_float8)


# faults chosen by a new user: masks, updates, adapters, resume and routers


@fault(
    "task",
    "output of module layers.0.attn.core",
    options=("--data.document_mask", "on"),
    mesh="cp=2",
)
def the_last_key_of_the_previous_rank_is_masked_in_packed_rows(monkeypatch):
    """An attention mask that is off by one, only at a shard's border and only with document numbers."""

    def by_document(original, pieces, queries_Bl, keys_Bs):
        if keys_Bs is not None:
            kept = []
            for rows, columns, causal in pieces:
                if not causal:
                    columns = slice(columns.start, columns.stop - 1)
                kept.append((rows, columns, causal))
            pieces = kept
        return original(pieces, queries_Bl, keys_Bs)

    wrap(monkeypatch, masks, "_by_document", by_document)


@fault(
    "task",
    "attn_norm",
    "times the weight: check which weights have weight decay",
    options=("--optimizer.no_weight_decay", "*norm*"),
    mesh="dp_shard=2",
)
def weight_decay_of_sharded_norms(monkeypatch):
    """Names of sharded parameters have a prefix, so no pattern matches them."""

    def groups(original, named_parameters, no_weight_decay, weight_decay):
        named = list(named_parameters)
        if any(hasattr(parameter, "device_mesh") for _, parameter in named):
            no_weight_decay = ()
        return original(named, no_weight_decay, weight_decay)

    wrap(monkeypatch, optimizer_builder, "parameter_groups", groups)


@fault(
    "validation",
    "module layers.0.attn.wq computes something else in evaluation",
    options=(*LORA, *VALIDATION),
)
def adapters_without_their_scale_in_evaluation(monkeypatch):
    """A merged weight for validation that forgets alpha / rank. All validations of a run have it."""

    def added(original, self, x, a_RI, b_OR):
        output = original(self, x, a_RI, b_OR)
        return output if self.training else output / self.scale

    wrap(monkeypatch, LoraLinear, "_added", added)


@fault("resume", "does not continue at its position in the data")
def a_resume_that_forgets_the_epoch(monkeypatch):
    """A resume restores the position within the epoch, but starts again at epoch 0."""

    def seek(original, self, samples_consumed, cursors=None):
        original(self, samples_consumed % self.num_samples, cursors)

    wrap(monkeypatch, DataLoader, "seek", seek)


@fault(
    "accumulation",
    "the buffer layers.0.moe.router.expert_bias",
    "update is made once a step",
    options=(*QWEN3_MOE, "--model.overrides.load_balance_coeff", "0.01"),
)
def a_router_bias_that_is_updated_for_each_micro_batch(monkeypatch):
    """The signs of the micro-batches are added, instead of the sign of their sum."""

    def record(original, self, count_E, loss):
        original(self, count_E, loss)
        self.of_batches = [*getattr(self, "of_batches", []), count_E]

    def reset(original, self):
        original(self)
        self.of_batches = []

    def update(original, parts, mesh, applies=None):
        for moe_of_layer in expert_parallel._all_blocks(parts):
            for count_E in moe_of_layer.balance.of_batches:
                total_E = mesh.sum(count_E.clone(), over=expert_parallel.TOKEN_AXES)
                direction_E = (total_E.sum() - total_E * total_E.numel()).sign()
                coefficient = moe_of_layer.routing.load_balance_coeff
                moe_of_layer.router.expert_bias.add_(direction_E, alpha=coefficient)

    wrap(monkeypatch, moe.Balance, "_record", record)
    wrap(monkeypatch, moe.Balance, "reset", reset)
    wrap(monkeypatch, expert_parallel, "update_biases", update)


BY_DEFAULT = (
    "averages that start again when a run resumes",
    "a resume that forgets the epoch",
    "adapters without their scale in evaluation",
)
DIMENSIONS = ("accumulation", "precision", "resume", "task", "validation")


@pytest.mark.parametrize(
    "name", cases(BY_DEFAULT, [name for name in FAULTS if name not in BY_DEFAULT])
)
def test_a_later_fault_is_detected(name, check, tmp_path: Path, monkeypatch):
    planted = FAULTS[name]
    planted.plant(monkeypatch)
    if planted.where in DIMENSIONS:
        meshes = (planted.mesh,) if planted.mesh else ()
        comparisons = check(planted.where, *planted.options, meshes=meshes).comparisons
        different = [comparison for comparison in comparisons if comparison.verdict != "same"]
        assert different, "not detected"
        result = different[0]
    else:
        result = rows_of(tmp_path, planted.options, planted.mesh, steps=1)[planted.where]

    assert result.verdict == "differs", result

    answer = f"{result.first}; {result.cause}"
    for text in planted.answer:
        assert text in answer
