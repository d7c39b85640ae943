"""Bytes that each rank of a pipeline holds, in closed form: weights, gradients, states, activations, buffers.

Activations are what autograd saves for backward in the layers of this package (models/layers.py), tensor by tensor,
as the dry run finds them by tracing; Korthikanti et al. 2022 (arXiv 2205.05198) count alike. ``kernels`` says whose:
the CPU's have no fused RMSNorm, unless this machine computes it by rows (ops/cpu/rms_norm.py), and add up the
gradient of an embedding in float32. The largest of a step is looked for at its moments: the end of forward, the loss,
the backward of the head, of the last layer and of the embedding. At each, FSDP holds other weights and other
gradients exist, so that the peak is less than the sum of what each is at most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from shardtrain.facts.optimizers import SMALLEST_8BIT_NUMEL, STATE_BLOCK
from shardtrain.ops import cross_entropy, split_cross_entropy
from shardtrain.ops.cpu import expert_mix, rms_norm
from shardtrain.ops.linear_cross_entropy import WORTH_IT_BYTES, rows_of_chunk, saved_bytes
from shardtrain.tools.plan import schedule
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import ExpertShape, Layer, ModelShape, ParameterShape

Kernels = Literal["cpu", "cpu by rows", "cuda"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the ranks at one place of the pipeline.

    ``gradients``, ``activations`` and ``gathered`` are each at most; ``total``, the sum that the dry run also gives, is
    a bound. ``peak`` is the most at one moment, ``when``, and ``at_peak`` what the three are then. ``kept`` is what
    waits from forward to backward; ``piped`` are buffers of a pipeline, which the dry run does not see.
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
    at_peak: tuple[int, int, int] = (0, 0, 0)
    piped: int = 0
    on_host: int = 0
    """Of weights, gradients and optimizer state, what is in host memory."""

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Sum of all that is on the device, each at most."""
        return self.states - self.on_host + self.activations + self.gathered

    @property
    def reserved(self) -> int:
        """What PyTorch's allocator comes to hold on a GPU: FSDP's buffers are of other streams, and do not share."""
        return self.total + self.piped

    @property
    def peak(self) -> int:
        """The most that is on the device at one moment."""
        gradients, activations, gathered = self.at_peak
        return self.parameters + self.optimizer + gradients - self.on_host + activations + gathered

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        names = ("gradients", "activations", "gathered")
        sums = {"total": self.total, "reserved": self.reserved, "peak": self.peak}
        return {**asdict(self), "at_peak": dict(zip(names, self.at_peak, strict=True)), **sums}


@dataclass(frozen=True)
class _LayerBytes:
    """Of one layer and micro-batch: saved for backward without recomputation, with it, and at most in its backward."""

    whole: int
    kept: int
    working: int


@dataclass(frozen=True)
class _Moment:
    """Bytes of activations, of FSDP's buffers and of gradients at a moment; the last without those accumulated."""

    name: str
    activations: int
    gathered: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class _Stage:
    """Bytes of a micro-batch on a stage: kept from forward to backward, and ``extra`` that PyTorch's stage adds to it,
    ``output`` of that because it holds the logits; at most; ``waiting`` for the backward of weights alone; and at each
    moment.
    """

    kept: int
    extra: int
    output: int
    most: int
    waiting: int
    moments: tuple[_Moment, ...]


_BEFORE_BACKWARD = ("the end of forward", "gathering the logits", "the loss")
"""Moments at which no backward of a micro-batch has begun."""


def of_ranks(
    model: ModelShape, job: PlannedJob, orders: Sequence[Sequence[Action]], kernels: Kernels
) -> list[RankMemory]:
    """Memory of each place of the pipeline; ``orders`` are the actions of each, see ``schedule.orders``."""
    return [of_rank(model, job, rank, orders[rank] if orders else (), kernels) for rank in range(job.pp)]


def of_rank(
    model: ModelShape, job: PlannedJob, rank: int, order: Sequence[Action] | None, kernels: Kernels
) -> RankMemory:
    """Memory of the first rank of one place of the pipeline: no other of them holds more.

    Without an ``order`` what is in flight follows from a formula.
    """
    own = job.stages_of_rank(rank) if job.pp > 1 else [0]
    owners = [parameters_of_stage(model, job, index) for index in own]
    if model.tied and job.pp == 1:  # one rank has both ends, which are one tensor
        owners = [[p for p in parameters if p.word != "head"] for parameters in owners]

    # Weights and the optimizer's state, of this rank's shards.
    held = [(one, sharded(one, job)) for parameters in owners for one in parameters]
    parameters = sum(size for _, size in held) * job.stored_width
    parameters += sum(model.layers[number].low_bits_bytes for index in own for number in job.stages[index])
    learning = sum(size for one, size in held if one.trained)
    tensors = sum(one.trained for one, _ in held)
    states = sum(_state_bytes(one, size, job) for one, size in held if one.trained)
    if job.shard_states:
        states = math.ceil(states / job.dp_replicate)
    optimizer = int(states) + 4 * tensors  # PyTorch counts the steps of each parameter in a tensor of its own

    # Gradients. With several micro-batches FSDP reduces them once, after the last: until then they are whole, in the
    # type of the reduction.
    gradients = learning * job.gradient_bytes
    if job.early_step:
        gradients = _gradients_at_once(model, job, own) * job.gradient_bytes
    accumulated = gradients
    if job.fsdp and job.num_microbatches > 1 and job.reduces_once:
        whole = (unsharded(trained(tuple(parameters)), job.tp, job.ep) for parameters in owners)
        accumulated = sum(whole) * job.reduce_width
    if job.num_microbatches == 1:
        accumulated = 0

    # Activations and FSDP's buffers, at each moment of a step.
    found = {index: _stage(model, job, index, kernels) for index in own}
    gathered = sum(_Gathered(model, job, index).most for index in own)
    if job.pp > 1:
        kept, in_flight, moments = _in_pipeline(model, job, rank, order, found, accumulated)
        activations = kept + max(one.most - one.kept for one in found.values())
        piped = max(moment.activations for moment in moments) - activations
    else:
        piped = 0
        kept = found[0].kept
        in_flight = 1
        activations = found[0].most
        moments = [
            replace(one, gradients=max(accumulated, one.gradients))
            for one in (*found[0].moments, _Moment("the update", 0, 0, gradients))
        ]

    # Moments differ in gradients too: an update in backward frees them, and offloaded ones are in host memory.
    host = {"nothing": 0, "optimizer": optimizer, "all": parameters + gradients + optimizer}[job.offload]
    if job.early_step:
        moments = [replace(one, gradients=min(one.gradients, gradients)) for one in moments]
    if job.offload == "all":
        moments = [replace(one, gradients=gradients) for one in moments]
    most = max(moments, key=lambda one: one.activations + one.gathered + one.gradients)
    return RankMemory(
        rank,
        sum(len(job.stages[index]) for index in own),
        parameters,
        max(gradients, accumulated),
        optimizer,
        activations,
        gathered,
        kept,
        in_flight,
        most.name,
        (most.gradients, most.activations, most.gathered),
        piped,
        host,
    )


def _in_pipeline(
    model: ModelShape,
    job: PlannedJob,
    rank: int,
    order: Sequence[Action] | None,
    found: Mapping[int, _Stage],
    accumulated: int,
) -> tuple[int, int, list[_Moment]]:
    """Bytes in flight, how many micro-batches those are, and the moments of a rank of a pipeline.

    Beside what waits for its backward there are PyTorch's buffers: what each stage receives has one for each
    micro-batch of the step. Where a rank has several stages, what was sent is held until the end of the step.
    """
    last = len(job.stages) - 1
    count = job.num_microbatches
    stream = job.local_tokens // job.tp * model.dim * job.compute_width
    own = list(found)
    # Buffers for activations from the stage before and gradients from the stage after. What is sent goes to stages of
    # other ranks; of that, the last quarter comes after the peak.
    received = sum((index > 0) + (index < last) for index in own) * count * stream
    remote = sum((index > 0 and index - 1 not in own) + (index < last and index + 1 not in own) for index in own)
    sent = remote * count * stream * 3 // 4 if len(own) > 1 else 0

    # Micro-batches in flight: at most, and once backward has begun, when gradients exist too.
    by_stage = {index: one.kept for index, one in found.items()}
    with_extra = {
        index: one.kept + one.extra + (stream if index < last and not sent else 0) for index, one in found.items()
    }
    if order is None:
        in_flight = schedule.in_flight(job.schedule, rank, job.pp, len(own), count)
        kept = in_flight * sum(by_stage.values()) // len(own)
        held = later = in_flight * sum(with_extra.values()) // len(own)
        if job.schedule in ("GPipe", "LoopedBFS"):
            later = held * (count - 1) // count
    else:
        kept, in_flight, _ = schedule.most_kept(by_stage, order)
        waiting = {index: one.waiting for index, one in found.items()}
        held, _, later = schedule.most_kept(with_extra, order, waiting)

    # FSDP's gathered weights: those of a moment, or where none are freed all weights of all stages.
    buffers = 0
    if job.fsdp:
        weights = (tuple(parameters_of_stage(model, job, index)) for index in own)
        buffers = sum(unsharded(parameters, job.tp, job.ep) for parameters in weights) * job.compute_width
    frees = job.fsdp and job.frees_gathered
    moments = []
    for one in found.values():
        for moment in one.moments:
            more = moment.activations - one.kept + received + sent
            if moment.name in _BEFORE_BACKWARD:  # the output that is held until then is the one of this moment
                more -= one.output
            gathered = moment.gathered if frees else buffers
            moments.append(_Moment(moment.name, held + more, gathered, 0))
            moments.append(_Moment(moment.name, later + more, gathered, accumulated))
    return kept, in_flight, moments


def _state_bytes(one: ParameterShape, size: int, job: PlannedJob) -> float:
    """Return the bytes that the optimizer keeps for ``size`` elements of a parameter, scales of 8-bit states too."""
    if job.state_width > 1:
        return size * job.states * job.state_width
    if len(one.shape) < 2 or one.numel < SMALLEST_8BIT_NUMEL:
        return size * job.states * 4
    columns = one.shape[-1]
    return job.states * (size + 4 * size / columns * -(-columns // STATE_BLOCK))


def _gradients_at_once(model: ModelShape, job: PlannedJob, own: Sequence[int]) -> int:
    """Elements of the gradients that are there before an update in backward frees them.

    FSDP reduces those of a unit together; without it each parameter's is used when it is whole.
    """
    units = [model.layers[number].parameters for index in own for number in job.stages[index]]
    trained = [[sharded(one, job) for one in unit if one.trained] for unit in (model.first, *units, model.last)]
    return max((sum(sizes) if job.fsdp else max(sizes, default=0) for sizes in trained), default=0)


def sharded(one: ParameterShape, job: PlannedJob) -> int:
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
def unsharded(parameters: tuple[ParameterShape, ...], tp: int, ep: int) -> int:
    """Elements of parameters that FSDP has gathered on one rank."""
    total = 0
    for one in parameters:
        if one.word == "expert":
            total += -(-one.numel // ep)
        else:
            total += math.prod(one.on_tensor_rank(tp))
    return total


def parameters_of_stage(model: ModelShape, job: PlannedJob, index: int) -> list[ParameterShape]:
    """All parameters of a pipeline stage, whole."""
    layers = [one for number in job.stages[index] for one in model.layers[number].parameters]
    ends = (model.first if index == 0 else (), model.last if index == len(job.stages) - 1 else ())
    return [*ends[0], *layers, *ends[1]]


def recomputes(job: PlannedJob, place: int) -> str:
    """How the layer at a place of its stage is recomputed: "none", "full", "op" or "core"."""
    if job.recompute in ("none", "full", "op", "core"):
        return job.recompute
    return "full" if place % int(job.recompute) == 0 else "none"


def _stage(model: ModelShape, job: PlannedJob, index: int, kernels: Kernels) -> _Stage:
    """What a micro-batch needs on a stage: its layers, the ends of the model if they are there, and each moment."""
    first = index == 0
    last = index == len(job.stages) - 1

    # The layers. Equal ones are counted once, known by identity: to hash a layer takes as long as to count it.
    found: dict[tuple[int, str], _LayerBytes] = {}
    layers = []
    for place, number in enumerate(job.stages[index]):
        layer = model.layers[number]
        mode = recomputes(job, place)
        if (id(layer), mode) not in found:
            found[id(layer), mode] = _layer(layer, job, model.dim, mode, kernels)
        layers.append(found[id(layer), mode])
    c = job.compute_width
    tokens = job.local_tokens
    split = tokens // job.tp
    stream = split * model.dim * c
    angles = 2 * tokens * (model.layers[0].qk_dim // 2) * 4
    kept = sum(one.kept for one in layers) + angles
    held = _Gathered(model, job, index)
    recomputed = max((one.whole - one.kept for one in layers), default=0)
    moments = [_Moment("the end of forward", kept + recomputed, held.end_of_forward)]

    # The last stage: the norm before the head, logits, and the loss over chunks of them.
    ends = extra = output = 0
    if last:
        columns = -(-model.vocab // job.tp) if job.loss_parallel else model.vocab
        logits = tokens * columns * c
        small = kernels != "cuda" and not job.fused
        rows = min(tokens, max(1, (cross_entropy.CPU_CHUNK_NUMEL if small else cross_entropy.CHUNK_NUMEL) // columns))
        is_split = job.tp > 1 and job.loss_parallel
        copies = 1 + (c < 4) + is_split + (rows < tokens)  # the last: of the chunk before
        chunk = rows * columns * 4 * copies
        # ops/split_cross_entropy.py keeps exponentials, in the gradient's own memory if that is float32
        if is_split and c == 4:
            chunk = rows * columns * 4
        elif is_split and kernels != "cuda" and tokens * columns <= split_cross_entropy.MOST_KEPT_NUMEL:
            chunk = (tokens + rows) * columns * 4
        ends = norm_bytes(split * model.dim, split, job, kernels, model.layers[-1].layer_norm) + _input(job, stream)
        if job.loss == "fused":
            logits = 0
        elif job.loss == "whole":  # a float32 copy, its log-softmax and its gradient; the compiler needs one less
            chunk = tokens * columns * 4 * (2 if job.fused else 3)
        # the loss at the head makes the gradients of the head's weight and input at once, and never has all logits
        products = 0
        if job.loss == "at head" and saved_bytes(tokens, model.dim, model.vocab, c) >= WORTH_IT_BYTES:
            rows = rows_of_chunk(tokens, model.vocab)
            logits = rows * columns * c
            chunk = rows * columns * 4 * 2
            of_weight = columns * model.dim * 4 if any(one.trained for one in model.last) else 0
            products = of_weight + tokens * model.dim * c
        if job.tp > 1 and not job.loss_parallel:  # this rank's columns, those of all, and those in their order
            whole = logits // job.tp + 2 * logits
            moments.append(_Moment("gathering the logits", kept + ends + whole, held.loss))
        moments.append(_Moment("the loss", kept + ends + 2 * logits + chunk + products, held.loss))
        logits = 0 if products else logits
        head = unsharded(tuple(p for p in model.last if p.trained), job.tp, job.ep) * c
        with_head = kept + ends + logits + head + tokens * model.dim * c
        moments.append(_Moment("backward of the head", with_head, held.backward_of_head))
        ends += logits
        extra = output = logits if job.pp > 1 else 0  # PyTorch's stage holds its output until its backward is over

    # Backward of the layers, of the embedding, and what schedules that split the backward pass keep between its halves.
    if layers:
        behind = kept + layers[-1].working - layers[-1].kept
        moments.append(_Moment("backward of a layer", behind, held.backward_of_last, held.head_shard))
        if len(layers) > 1:
            first_layer = angles + layers[0].working
            done = held.all_shards - held.embed_shard - held.layer_shard
            moments.append(_Moment("backward of the first layer", first_layer, held.backward_of_layer, done))
    if first and any(one.trained for one in model.first):
        table = unsharded(model.first, job.tp, job.ep)
        rounds = kernels != "cuda" and c < 4
        size = table * (4 + c if rounds else c) + stream
        done = held.all_shards - held.embed_shard
        moments.append(_Moment("backward of the embedding", size, held.backward_of_embed, done))
    linears = {id(model.layers[number]): model.layers[number] for number in job.stages[index]}
    waiting = sum(_outputs(linears[id(model.layers[number])], job) * tokens * c for number in job.stages[index])
    if index > 0 and job.stages[index]:
        is_saved = kernels == "cuda" or recomputes(job, 0) != "none"
        extra -= stream if is_saved else 0  # what the first layer saves is the buffer that it was received in
    return _Stage(kept + ends, extra, output, max(one.activations for one in moments), waiting, tuple(moments))


def _outputs(layer: Layer, job: PlannedJob) -> int:
    """Features of what all products of a layer give on a rank, and of what its norms take and give."""
    norms = sum(one.shape[0] for one in layer.parameters if one.word == "sequence") // job.tp
    return 2 * norms + sum(one.out_features // (job.tp if one.word == "colwise" else 1) for one in layer.linears)


def _input(job: PlannedJob, stream: int) -> int:
    """The input of a product whose features tensor parallelism splits: gathered along the sequence."""
    return stream * job.tp


def norm_bytes(numel: int, rows: int, job: PlannedJob, kernels: Kernels, layer_norm: bool) -> int:
    """What a norm saves of its input, without its output, which the next product saves."""
    if layer_norm or _is_one_kernel(numel, job, kernels):
        return numel * job.compute_width + rows * 4 * (2 if layer_norm else 1)
    return numel * 8 + rows * 4  # float32 copy and normalised copy; in float32 input and normalised copy


def _is_one_function(experts: ExpertShape, tokens: int, job: PlannedJob, kernels: Kernels) -> bool:
    """Return True if a CPU computes the experts as one function: see ``ops.cpu.expert_mix.takes``."""
    is_plain = job.ep == 1 and not (experts.biased or experts.weighs_inputs)
    has_many_rows = expert_mix.has_many_rows(tokens * experts.top_k, experts.count)
    return kernels != "cuda" and is_plain and has_many_rows


def _is_one_kernel(numel: int, job: PlannedJob, kernels: Kernels) -> bool:
    """Whether an RMSNorm saves its input alone; by rows where it is not compiled and has more than a few numbers."""
    by_rows = kernels == "cpu by rows" and not job.fused and numel >= rms_norm.SMALLEST_NUMEL
    return by_rows or kernels == "cuda"


@lru_cache(maxsize=8192)
def _layer(layer: Layer, job: PlannedJob, dim: int, mode: str, kernels: Kernels) -> _LayerBytes:
    """What autograd saves in a layer, tensor by tensor, and the most that its backward takes."""
    c = job.compute_width
    tokens = job.local_tokens
    split = tokens // job.tp
    stream = split * dim * c
    gathered = _input(job, stream)
    norm = norm_bytes(split * dim, split, job, kernels, layer.layer_norm)
    if (
        not _is_one_kernel(split * dim, job, kernels)
        and not layer.layer_norm
        and not any(p.trained for p in layer.parameters if p.word == "sequence")
    ):
        norm -= split * dim * 4  # only the gradient of its weight needs the normalised copy

    # Attention: its norm, queries, keys, values, the output, and the log-sum-exp of the scores in float32.
    heads = -(-layer.heads // job.tp)
    kv_heads = -(-layer.kv_heads // job.tp)
    q = tokens * heads * layer.qk_dim * c
    k = tokens * kv_heads * layer.qk_dim * c
    v = tokens * kv_heads * layer.v_dim * c
    out = tokens * heads * layer.v_dim * c
    cut = 0
    if layer.v_dim < layer.qk_dim:  # kernels want values as wide as keys: they are padded, and the output is cut
        v, out, cut = k, q, out
    scores = tokens * heads * 4
    projections = layer.inside("attn")
    feed = layer.inside("ffn")
    squares = 0
    if not job.flash:  # softmax, the mask of dropout and what it leaves (Korthikanti et al. 2022, section 4.1)
        squares = tokens * min(job.seq_len, layer.limit or job.seq_len) * heads * (2 * c + 1)
    attention = norm + q + k + v + out + cut + scores + squares
    if job.repeats_kv:
        attention += 2 * (tokens * heads * layer.qk_dim * c) - k - v
    if job.cp > 1 and job.cp_method == "allgather":  # keys and values of all ranks, and the output of each part
        attention += (job.cp - 1) * (k + v) + out
    elif job.cp > 1 and job.cp_method == "ulysses":  # the output, before and after its exchange
        attention += out
    attention += gathered if any(one.trained for one in projections if one.word != "rowwise") else 0
    if layer.head_norms:
        for numel in (q // c, k // c):
            attention += norm_bytes(numel, numel // layer.qk_dim, job, kernels, False)
    if layer.unit_norms:  # of float32 copies, without weights
        attention += (q + k) // c * 4
    for one in projections:
        if one.word == "replicate":  # a latent: its norm, and what the next product saves
            attention += norm_bytes(tokens * one.out_features, tokens, job, kernels, False)
            attention += tokens * one.out_features * c

    # Feed-forward: each product, what the activation function makes of it, and what the two of a gated one multiply to.
    into = [one for one in feed if one.word != "rowwise"]
    hidden = sum(tokens * -(-one.out_features // (job.tp if one.word == "colwise" else 1)) * c for one in into)
    saved_again = [one.trained for one in feed if one.word == "rowwise"]
    ffn = norm + (gathered if any(one.trained for one in into) else 0) + 2 * hidden
    if saved_again and not any(saved_again):
        ffn -= hidden // max(1, len(into))
    if layer.experts and _is_one_function(layer.experts, split, job, kernels):
        # rows with their room and the weights of small experts in the order of their sizes (ops/cpu/expert_mix.py)
        few = layer.experts
        rows = split * few.top_k
        numbers = 3 * few.ffn * dim
        if c < 4:
            rows += expert_mix.expected_room(rows, few.count)
        if c < 4 and numbers <= expert_mix.SMALL_EXPERT_NUMEL:  # the gate is also held in the product of gate and up
            ffn += few.count * numbers * c + rows * few.ffn * c
        ffn += split * dim * 4 + rows * dim * c + 4 * rows * few.ffn * c + split * few.count * 4 + rows * 24
        hidden += 2 * rows * few.ffn * c + rows * dim * c
    elif layer.experts:
        rows = split * layer.experts.top_k
        ffn += split * dim * 4 + 2 * rows * dim * c + 4 * rows * layer.experts.ffn * c
        if layer.experts.biased:  # sums with three biases, and a gate of several operations (models/gpt_oss.py)
            ffn += rows * dim * c + 2 * rows * layer.experts.ffn * c
        ffn += split * layer.experts.count * 4 + rows * (8 * 3 + 4 * 3)
        hidden += 2 * rows * layer.experts.ffn * c + (2 + (job.ep > 1)) * rows * dim * c  # and gradients of rows

    # What of it is kept, by the mode of recomputation.
    whole = attention + ffn
    weights = unsharded(tuple(p for p in layer.parameters if p.trained), job.tp, job.ep) * c
    if mode == "none":
        kept = whole
    elif mode == "full":
        kept = stream
    elif mode == "core":
        kept = whole - squares
    else:
        kept = stream + out + scores + _kept_products(layer, job, tokens, dim, c)

    # The feed-forward's backward is first: gradients of its products, of the stream, and of its own weights. At the end
    # attention is left, with the gradients of all weights.
    share = ffn / max(1, whole)
    start = whole + stream + (2 * gathered if job.tp > 1 else 0) + hidden + int(weights * share / 3)
    end = whole - ffn + 2 * stream + gathered + q + k + v + weights
    working = max(start, end) + layer.restored_numel * c
    if mode != "none":
        working += stream
    return _LayerBytes(whole, kept, working)


def _kept_products(layer: Layer, job: PlannedJob, tokens: int, dim: int, width: int) -> int:
    """Results that selective recomputation of operations keeps: every second product, and what was reduced over tp."""
    total = 0
    number = 0
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


class _Gathered:
    """What FSDP holds of gathered weights and of gradients on their way at the moments of a stage, in bytes.

    Ranks that cast without FSDP hold copies of all weights in their place, each until its gradient is whole.
    The last layer and the head stay gathered between forward and backward by default. Backward begins with the head's
    gradients on their way, the last layer there and the one before being gathered; in the middle a layer's gradients
    leave; at the end the embedding's. ``*_shard`` are bytes of reduced gradients.
    """

    def __init__(self, model: ModelShape, job: PlannedJob, index: int) -> None:
        first = index == 0
        last = index == len(job.stages) - 1
        c = job.compute_width
        r = job.reduce_width
        ranks = job.dp_shard * job.cp
        numbers = job.stages[index]
        layers = [unsharded(model.layers[number].parameters, job.tp, job.ep) for number in numbers]
        learning = [unsharded(trained(model.layers[number].parameters), job.tp, job.ep) for number in numbers]
        largest = max(layers, default=0)
        most_gradients = max(learning, default=0)
        # The layer in use and the one that is gathered ahead. Experts are a unit of their own, and what is gathered
        # next to them is the rest of the layer.
        pair = 2 * largest if len(layers) > 1 else largest
        if job.ep * job.cp * job.tp > 1 and any(model.layers[number].experts for number in numbers):
            pair = largest

        # The ends of the model; tied, they are one tensor, which counts as the embedding.
        embed = unsharded(model.first, job.tp, job.ep) if first else 0
        head = unsharded(model.last, job.tp, job.ep) if last else 0
        of_embed = trained(model.first) if first else ()
        of_head = trained(model.last) if last else ()
        embed_gradient = unsharded(of_embed, job.tp, job.ep) if of_embed else 0
        head_gradient = unsharded(of_head, job.tp, job.ep) if of_head else 0
        if model.tied and first and last:
            head = 0
            head_gradient = 0

        # Reduced gradients of this rank's shards.
        width = job.gradient_bytes
        of_layers = [
            sum(sharded(p, job) for p in trained(model.layers[number].parameters)) * width for number in numbers
        ]
        self.layer_shard = of_layers[0] if of_layers else 0
        self.head_shard = (sum(sharded(p, job) for p in of_head) if head_gradient else 0) * width
        self.embed_shard = sum(sharded(p, job) for p in of_embed) * width
        self.all_shards = self.head_shard + self.embed_shard + sum(of_layers)

        # Gathered weights and gradients on their way: without FSDP none, or copies of all weights until their
        # backward; without freeing the same and gradients; else two layers at a time.
        whole = (sum(layers) + embed + head) * c
        if job.copies:
            self.most = self.end_of_forward = self.loss = self.backward_of_head = whole
            self.backward_of_last = whole - head * c
            self.backward_of_layer = (embed + (layers[0] if layers else 0)) * c
            self.backward_of_embed = embed * c
            return
        if not job.fsdp:
            self.most = self.end_of_forward = self.loss = self.backward_of_head = 0
            self.backward_of_last = self.backward_of_layer = self.backward_of_embed = 0
            return
        root = embed if model.tied else 0  # tied ends stay with the root, which is whole through the pass
        if not job.frees_gathered:
            self.end_of_forward = self.loss = whole
            self.backward_of_head = whole
            self.backward_of_last = whole - head * c + head_gradient * r
            self.backward_of_layer = (embed + (layers[0] if layers else 0)) * c + most_gradients * r
            self.backward_of_embed = embed * c + embed_gradient * r
            self.most = (sum(layers) + embed + 2 * head) * c + (layers[-1] if layers else 0) * c * (1 if last else 2)
            return
        keeps_last = job.reshard == "default"
        last_layer = layers[-1] if layers else 0
        self.end_of_forward = (last_layer + max(head, largest if len(layers) > 1 else 0) + root) * c
        self.loss = (last_layer + head + root) * c if keeps_last else root * c
        self.backward_of_head = (head + pair + root) * c
        self.backward_of_last = (pair + root) * c + head_gradient * r + head_gradient // ranks * r
        self.backward_of_layer = (pair // 2 + root) * c + most_gradients * r + most_gradients // ranks * r
        self.backward_of_embed = embed_gradient * r + embed_gradient // ranks * r + embed_gradient * c * (job.tp > 1)
        self.most = max(
            head_gradient * r + pair * c + largest // ranks * c,
            most_gradients * r + pair * c,
            self.backward_of_embed,
            (embed + head + pair) * c if model.tied else (embed + largest) * c,
        )


def trained(parameters: Iterable[ParameterShape]) -> tuple[ParameterShape, ...]:
    """Those that learn."""
    return tuple(one for one in parameters if one.trained)
