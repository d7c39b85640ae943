"""Bytes that each rank of a pipeline holds, in closed form: weights, gradients, states, activations, buffers.

Activations are what autograd saves for backward in the layers of this package (models/layers.py), tensor by tensor, as
the dry run finds them by tracing; Korthikanti et al. 2022 (arXiv 2205.05198) count alike. ``kernels`` says whose: the
CPU's have no fused RMSNorm, and add up the gradient of an embedding in float32. The largest of a step is looked for
at four moments: the end of forward, the loss, the backward of the last layer, and the backward of the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardtrain.tools.plan import schedule
from shardtrain.tools.plan.job import Job
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import Layer, ModelShape, Parameter

Kernels = Literal["cpu", "cuda"]
CHUNK_NUMEL = 1 << 24
"""Logits that the loss handles at a time, as ops/cross_entropy.py."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the ranks at one place of the pipeline; the total is a bound, for not all are largest at once.

    ``when`` is the moment of most activations. ``kept`` is what waits from forward to backward.
    """

    pp_rank: int
    layers: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    kept: int
    in_flight: int
    when: str
    on_host: int = 0
    """Of weights, gradients and optimizer state, what is in host memory."""

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Sum of all that is on the device."""
        return self.states - self.on_host + self.activations + self.gathered


@dataclass(frozen=True)
class _LayerBytes:
    """Of one layer and micro-batch: saved for backward without recomputation, with it, and at most in its backward."""

    whole: int
    kept: int
    working: int


@dataclass(frozen=True)
class _Stage:
    kept: int
    most: int
    when: str


def of_ranks(model: ModelShape, job: Job, orders: Sequence[Sequence[Action]], kernels: Kernels) -> list[RankMemory]:
    """Memory of each place of the pipeline; ``orders`` are the actions of each, see ``schedule.orders``."""
    return [of_rank(model, job, rank, orders[rank] if orders else (), kernels) for rank in range(job.pp)]


def of_rank(model: ModelShape, job: Job, rank: int, order: Sequence[Action] | None, kernels: Kernels) -> RankMemory:
    """Memory of the first rank of one place of the pipeline: no other of them holds more.

    Without an ``order`` what is in flight follows from a formula.
    """
    own = job.stages_of_rank(rank) if job.pp > 1 else [0]
    last = len(job.stages) - 1
    owners = [parameters_of_stage(model, job, index) for index in own]
    ends = [(index == 0, index == last) for index in own]
    if model.tied and len({edge for pair in ends for edge in (0, 1) if pair[edge]}) == 2 and job.pp == 1:
        owners = [[p for p in parameters if p.word != "head"] for parameters in owners]
    held = [(one, sharded(one, job)) for parameters in owners for one in parameters]
    parameters = sum(size for _, size in held) * job.stored_width
    parameters += sum(model.layers[number].low_bits_bytes for index in own for number in job.stages[index])
    learning = sum(size for one, size in held if one.trained)
    tensors = sum(one.trained for one, _ in held)
    states = learning * job.states * job.state_width
    if job.shard_states:
        states = math.ceil(states / job.dp_replicate)
    found = {index: _stage(model, job, index, kernels) for index in own}
    if job.pp > 1:
        if order is None:
            in_flight = schedule.in_flight(job.schedule, rank, job.pp, len(own), job.num_microbatches)
            kept = in_flight * sum(one.kept for one in found.values()) // len(own)
        else:
            kept, in_flight = schedule.most_kept({index: one.kept for index, one in found.items()}, order)
        above = max(found.values(), key=lambda one: one.most - one.kept)
        activations, when = kept + above.most - above.kept, above.when
    else:
        kept, in_flight, activations, when = found[0].kept, 1, found[0].most, found[0].when
    gathered = sum(_gathered(model, job, index) for index in own) if job.fsdp else 0
    optimizer = int(states) + 4 * tensors
    gradients = learning * job.stored_width
    on_host = {"nothing": 0, "optimizer": optimizer, "all": parameters + gradients + optimizer}[job.offload]
    return RankMemory(
        rank,
        sum(len(job.stages[index]) for index in own),
        parameters,
        gradients,
        optimizer,
        activations,
        gathered,
        kept,
        in_flight,
        when,
        on_host,
    )


def sharded(one: Parameter, job: Job) -> int:
    """Elements of a parameter that the first rank holds; FSDP splits the first dimension as torch.chunk does."""
    if one.word == "expert":
        count = -(-one.shape[0] // job.ep)
        ranks = job.dp_shard
        if job.ep * job.cp * job.tp > 1 or ranks > count:
            ranks = max(1, job.dp_shard * job.cp * job.tp // job.ep)
            if ranks * job.ep > one.shape[0]:  # split in another dimension
                return -(-count * math.prod(one.shape[1:]) // ranks)
        return -(-count // ranks) * math.prod(one.shape[1:])
    shape = one.on_tensor_rank(job.tp)
    return -(-shape[0] // (job.dp_shard * job.cp)) * math.prod(shape[1:]) if shape else 1


@lru_cache(maxsize=4096)
def unsharded(parameters: tuple[Parameter, ...], tp: int, ep: int) -> int:
    """Elements of parameters that FSDP has gathered on one rank."""
    total = 0
    for one in parameters:
        if one.word == "expert":
            total += -(-one.numel // ep)
        else:
            total += math.prod(one.on_tensor_rank(tp))
    return total


def parameters_of_stage(model: ModelShape, job: Job, index: int) -> list[Parameter]:
    """All parameters of a pipeline stage, whole."""
    layers = [one for number in job.stages[index] for one in model.layers[number].parameters]
    ends = (model.first if index == 0 else (), model.last if index == len(job.stages) - 1 else ())
    return [*ends[0], *layers, *ends[1]]


def recomputes(job: Job, place: int) -> str:
    """How the layer at a place of its stage is recomputed: "none", "full" or "op"."""
    if job.recompute in ("none", "full", "op"):
        return job.recompute
    return "full" if place % int(job.recompute) == 0 else "none"


def _stage(model: ModelShape, job: Job, index: int, kernels: Kernels) -> _Stage:
    first, last = index == 0, index == len(job.stages) - 1
    found: dict[tuple[int, str], _LayerBytes] = {}  # by identity: to hash a layer takes as long as to count it
    layers = []
    for place, number in enumerate(job.stages[index]):
        layer, mode = model.layers[number], recomputes(job, place)
        if (id(layer), mode) not in found:
            found[id(layer), mode] = _layer(layer, job, model.dim, mode, kernels)
        layers.append(found[id(layer), mode])
    c, tokens = job.compute_width, job.local_tokens
    split = tokens // job.tp
    stream = split * model.dim * c
    angles = 2 * tokens * (model.layers[0].qk_dim // 2) * 4
    kept = sum(one.kept for one in layers) + angles
    moments = {"end of forward": kept + (max((one.whole - one.kept for one in layers), default=0))}
    ends = 0
    if last:
        columns = -(-model.vocab // job.tp) if job.loss_parallel else model.vocab
        logits = tokens * columns * c
        rows = min(tokens, max(1, CHUNK_NUMEL // columns))
        copies = 1 + (c < 4) + (job.tp > 1 and job.loss_parallel) + (rows < tokens)  # the last: of the chunk before
        chunk = rows * columns * 4 * copies
        ends = norm_bytes(split * model.dim, split, c, kernels, model.layers[-1].layer_norm) + _input(job, stream)
        if job.loss == "fused":
            logits = 0
        elif job.loss == "whole":  # a float32 copy, its log-softmax and its gradient; the compiler needs one less
            chunk = tokens * columns * 4 * (2 if job.fused else 3)
        moments["loss"] = kept + ends + 2 * logits + chunk
        head = unsharded(tuple(p for p in model.last if p.trained), job.tp, job.ep) * c
        moments["backward of the head"] = kept + ends + logits + head + tokens * model.dim * c
        ends += logits
    if layers:
        moments["backward of a layer"] = kept + layers[-1].working - layers[-1].kept
    if first and any(one.trained for one in model.first):
        table = unsharded(model.first, job.tp, job.ep)
        rounds = kernels == "cpu" and c < 4
        moments["backward of the embedding"] = table * (4 + c if rounds else c) + stream
    when = max(moments, key=lambda moment: moments[moment])
    return _Stage(kept + ends, max(moments.values()), when)


def _input(job: Job, stream: int) -> int:
    """The input of a product whose features tensor parallelism splits: gathered along the sequence."""
    return stream * job.tp


def norm_bytes(numel: int, rows: int, width: int, kernels: Kernels, layer_norm: bool) -> int:
    """What a norm saves of its input, without its output, which the next product saves."""
    if layer_norm or kernels == "cuda":
        return numel * width + rows * 4 * (2 if layer_norm else 1)
    return numel * 8 + rows * 4  # float32 copy and normalised copy; in float32 input and normalised copy


@lru_cache(maxsize=8192)
def _layer(layer: Layer, job: Job, dim: int, mode: str, kernels: Kernels) -> _LayerBytes:
    c, tokens = job.compute_width, job.local_tokens
    split = tokens // job.tp
    stream = split * dim * c
    gathered = _input(job, stream)
    norm = norm_bytes(split * dim, split, c, kernels, layer.layer_norm)
    if (
        kernels == "cpu"
        and not layer.layer_norm
        and not any(p.trained for p in layer.parameters if p.word == "sequence")
    ):
        norm -= split * dim * 4  # only the gradient of its weight needs the normalised copy
    heads, kv_heads = -(-layer.heads // job.tp), -(-layer.kv_heads // job.tp)
    q, k = tokens * heads * layer.qk_dim * c, tokens * kv_heads * layer.qk_dim * c
    v, out = tokens * kv_heads * layer.v_dim * c, tokens * heads * layer.v_dim * c
    cut = 0
    if layer.v_dim < layer.qk_dim:  # kernels want values as wide as keys: they are padded, and the output is cut
        v, out, cut = k, q, out
    scores = tokens * heads * 4
    projections, feed = layer.inside("attn"), layer.inside("ffn")
    attention = norm + q + k + v + out + cut + scores
    attention += gathered if any(one.trained for one in projections if one.word != "rowwise") else 0
    if layer.head_norms:
        for numel in (q // c, k // c):
            attention += norm_bytes(numel, numel // layer.qk_dim, c, kernels, False)
    for one in projections:
        if one.word == "replicate":  # a latent: its norm, and what the next product saves
            attention += norm_bytes(tokens * one.out_features, tokens, c, kernels, False)
            attention += tokens * one.out_features * c
    # each product, what the activation function makes of it, and (a gated one has two products) what they multiply to
    into = [one for one in feed if one.word != "rowwise"]
    hidden = sum(tokens * -(-one.out_features // (job.tp if one.word == "colwise" else 1)) * c for one in into)
    saved_again = [one.trained for one in feed if one.word == "rowwise"]
    ffn = norm + (gathered if any(one.trained for one in into) else 0) + 2 * hidden
    if saved_again and not any(saved_again):
        ffn -= hidden // max(1, len(into))
    if layer.experts:
        rows = split * layer.experts.top_k
        ffn += stream + 2 * rows * dim * c + 4 * rows * layer.experts.ffn * c
        if layer.experts.biased:  # sums with three biases, and a gate of several operations (models/gpt_oss.py)
            ffn += rows * dim * c + 2 * rows * layer.experts.ffn * c
        ffn += split * layer.experts.count * 4 + rows * (8 * 3 + 4 * 3)
        hidden += 2 * rows * layer.experts.ffn * c
    whole = attention + ffn
    weights = unsharded(tuple(p for p in layer.parameters if p.trained), job.tp, job.ep) * c
    if mode == "none":
        kept = whole
    elif mode == "full":
        kept = stream
    else:
        kept = stream + out + scores + _kept_products(layer, job, tokens, dim, c)
        if layer.experts:
            kept += 2 * split * layer.experts.top_k * dim * c if job.ep > 1 else 0
    # the feed-forward's backward is first: gradients of its products, of the stream, and of its own weights
    share = ffn / max(1, whole)
    start = whole + stream + (2 * gathered if job.tp > 1 else 0) + hidden + int(weights * share / 3)
    end = whole - ffn + 2 * stream + gathered + q + k + v + weights
    start, end = (moment + layer.restored_numel * c for moment in (start, end))
    return _LayerBytes(whole, kept, (stream if mode != "none" else 0) + max(start, end))


def _kept_products(layer: Layer, job: Job, tokens: int, dim: int, width: int) -> int:
    """Results that selective recomputation of operations keeps: every second product, and what was reduced over tp."""
    total, number = 0, 0
    for one in layer.linears:
        if one.word == "router":
            continue
        number += 1
        if number % 2 == 1:
            features = -(-one.out_features // job.tp) if one.word == "colwise" else one.out_features
            total += tokens * features * width
        if one.word == "rowwise" and job.tp > 1:
            total += tokens // job.tp * dim * width
    return total


def _gathered(model: ModelShape, job: Job, index: int) -> int:
    """The most that FSDP holds of gathered weights and of gradients on their way.

    Without freeing after forward it is all weights, and the flat buffers of the last two gathers. Else it is largest
    where backward begins (the head's gradients leave, the last layer is there, the one before is being gathered), in
    the middle (a layer's gradients leave), or at the end (the embedding's leave).
    """
    first, last = index == 0, index == len(job.stages) - 1
    c, r, ranks = job.compute_width, job.reduce_width, job.dp_shard * job.cp
    layers = [unsharded(model.layers[number].parameters, job.tp, job.ep) for number in job.stages[index]]
    gradients = [
        unsharded(tuple(p for p in model.layers[number].parameters if p.trained), job.tp, job.ep)
        for number in job.stages[index]
    ]
    largest, most_gradients = max(layers, default=0), max(gradients, default=0)
    pair = 2 * largest
    if job.ep * job.cp * job.tp > 1 and any(model.layers[number].experts for number in job.stages[index]):
        pair = largest  # experts are a unit of their own, and what is gathered next to them is the rest of the layer
    embed = unsharded(model.first, job.tp, job.ep) if first else 0
    head = unsharded(model.last, job.tp, job.ep) if last else 0
    own = [trained(model.first) if first else 0, trained(model.last) if last else 0]
    embed_gradient, head_gradient = (unsharded(one, job.tp, job.ep) if one else 0 for one in own)
    if model.tied and first and last:
        head, head_gradient = 0, 0
    if not job.frees_gathered:
        return (sum(layers) + embed + 2 * head) * c + (layers[-1] if layers else 0) * c * (1 if last else 2)
    moments = [
        head_gradient * r + pair * c + largest // ranks * c,
        most_gradients * r + pair * c,
        embed_gradient * r + embed_gradient // ranks * r + (embed_gradient * c if job.tp > 1 else 0),
        (embed + head + pair) * c if model.tied else (embed + largest) * c,
    ]
    return max(moments)


def trained(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Those that learn."""
    return tuple(one for one in parameters if one.trained)
