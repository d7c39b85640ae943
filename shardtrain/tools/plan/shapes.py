"""What a plan reads of a model: shapes of its parameters, and of the products in each kind of layer.

The model is built on the meta device, as a run builds it; its LAYOUT says what tensor and expert parallelism split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardtrain import models, tasks
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.layout import SPLIT_ON_DIM_0, Layout, matches, style_of
from shardtrain.metrics.flops import count_model
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class ParameterShape:
    """Name, shape and tensor word of a parameter, and whether it learns."""

    name: str
    shape: tuple[int, ...]
    word: str
    trained: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def on_tensor_rank(self, tp: int) -> tuple[int, ...]:
        """The shape that the first tensor-parallel rank holds; torch.chunk gives it the most."""
        whole = {"lora_a": "colwise", "lora_b": "rowwise"}.get(self.name.rpartition(".")[2]) == self.word
        if tp == 1 or not self.shape or whole:
            return self.shape
        if self.word in SPLIT_ON_DIM_0 and self.shape[0] >= tp:
            return (-(-self.shape[0] // tp), *self.shape[1:])
        if self.word == "rowwise" and len(self.shape) == 2:
            return (self.shape[0], -(-self.shape[1] // tp))
        return self.shape


@dataclass(frozen=True)
class Linear:
    """A linear layer: features in and out of the whole weight, its tensor word, and whether any of it learns."""

    path: str
    in_features: int
    out_features: int
    word: str
    trained: bool = True


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts: how many, how many of them a token uses, and their hidden features.

    ``biased``: they have biases; ``weighs_inputs``: the weights of the choice multiply what experts get.
    """

    count: int
    top_k: int
    ffn: int
    biased: bool = False
    weighs_inputs: bool = False


@dataclass(frozen=True)
class Layer:
    """One kind of layer: its parameters, products in the order of forward, and its attention.

    ``heads``, ``kv_heads``: of the whole model; ``qk_dim`` and ``v_dim`` are features of a head. ``limit`` is the
    tokens that a token attends to at most (0: all before it). ``gated`` says that a feed-forward multiplies two
    products. ``layer_norm``: its norms are LayerNorms, else RMSNorms. ``head_norms``: queries and keys have norms;
    ``unit_norms``: these have no weights.
    ``low_bits_bytes`` are held of frozen weights by lora.base_dtype; ``restored_numel`` elements are the largest's.
    """

    parameters: tuple[ParameterShape, ...]
    linears: tuple[Linear, ...]
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    limit: int = 0
    causal: bool = True
    gated: bool = True
    layer_norm: bool = False
    head_norms: bool = False
    unit_norms: bool = False
    experts: ExpertShape | None = None
    low_bits_bytes: int = 0
    restored_numel: int = 0

    def inside(self, part: str) -> tuple[Linear, ...]:
        """Linears of attention ("attn") or of the feed-forward ("ffn"), in the order of forward; not the router."""
        of_attention = [one for one in self.linears if "attn" in one.path.split(".")[0]]
        if part == "attn":
            return tuple(of_attention)
        return tuple(one for one in self.linears if one not in of_attention and one.word != "router")


@dataclass(frozen=True)
class ModelShape:
    """A model as a plan sees it: its layers in order, and the parameters of its ends.

    ``tied`` says that the embedding is also the head. ``flops_per_token``: 6 N + 12 L H head_dim T.
    """

    name: str
    layers: tuple[Layer, ...]
    first: tuple[ParameterShape, ...]
    last: tuple[ParameterShape, ...]
    dim: int
    vocab: int
    tied: bool
    num_params: int
    flops_per_token: float

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(layer.experts for layer in self.layers)


def read(config: Config) -> ModelShape:
    """The shape of a configuration's model; no memory is used.

    Raises ConfigError where a model has no layers to plan with, which its LAYOUT must name.
    """
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    layout: Layout = module.LAYOUT
    with torch.device("meta"):
        model = task.adapt(models.build(module, shape), layout)
    if config.lora.enable:
        from shardtrain.lora import quantize, spec  # brings DTensor, half a second

        spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    num_params, flops = count_model(model, layout, shape)
    base_dtype = config.lora.base_dtype if config.lora.enable else "training"
    if base_dtype != "training":
        quantize.take_out(model, layout, base_dtype)

    # Layers of one kind are one object, which what counts them knows by identity: they differ in norms, in parameters,
    # in windows of attention, or in linears.
    layers: nn.ModuleDict = getattr(model, layout.layers)
    found: dict[tuple[object, ...], Layer] = {}
    kinds = []
    for name, layer in layers.items():
        key = (
            tuple(getattr(m, "norm_eps", None) for m in layer.modules()),
            tuple((path, tuple(p.shape), p.requires_grad) for path, p in layer.named_parameters()),
            tuple((getattr(m, "window", 0), getattr(m, "chunk", 0)) for m in layer.modules()),
            tuple((m.in_features, m.out_features) for m in layer.modules() if isinstance(m, nn.Linear)),
        )
        if key not in found:
            one = _layer(layer, f"{layout.layers}.{name}", layout, shape)
            if base_dtype != "training":
                one = replace(
                    one,
                    low_bits_bytes=quantize.count(layer, config),
                    restored_numel=max((m.in_features * m.out_features for m in quantize.held(layer)), default=0),
                )
            found[key] = one
        kinds.append(found[key])
    if not kinds:
        rule = f"has no modules in LAYOUT.layers={layout.layers!r}"
        raise ConfigError(Problem("model.name", config.model.name, rule, "a plan needs at least one layer"))

    # The ends, and sizes of the whole model.
    tied = any({name.partition(".")[0] for name in names} & set(layout.last) for names in tied_names(model))
    first = tuple(_parameters(model, layout.first, layout))
    last = tuple(_parameters(model, layout.last, layout))
    dim = int(getattr(shape, "dim", 0)) or kinds[0].parameters[0].shape[-1]
    label = derived.model_label(config.model, num_params)
    columns = task.num_outputs(shape) or int(getattr(shape, "vocab_size", 1))
    flops_per_token = flops(config.training.seq_len)
    return ModelShape(label, tuple(kinds), first, last, dim, columns, tied, num_params, flops_per_token)


def decoder(
    name: str,
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    seq_len: int,
    *,
    gated: bool = True,
    tied: bool = False,
    head_dim: int | None = None,
    layer_norm: bool = False,
    experts: ExpertShape | None = None,
    shared_ffn: int = 0,
) -> ModelShape:
    """The shape of a plain decoder from its sizes alone, for models without a file here.

    ``shared_ffn`` are hidden features of a feed-forward beside the experts.
    """
    head_dim = head_dim or dim // heads
    linears = [
        Linear("attn.wq", dim, heads * head_dim, "colwise"),
        Linear("attn.wk", dim, kv_heads * head_dim, "colwise"),
        Linear("attn.wv", dim, kv_heads * head_dim, "colwise"),
        Linear("attn.wo", heads * head_dim, dim, "rowwise"),
    ]
    if experts is not None and shared_ffn:
        ffn = shared_ffn
    if experts is None or shared_ffn:
        linears += [Linear(f"ffn.w{i}", dim, ffn, "colwise") for i in ((1, 3) if gated else (1,))]
        linears += [Linear("ffn.w2", ffn, dim, "rowwise")]
    parameters = [
        ParameterShape(f"{one.path}.weight", (one.out_features, one.in_features), one.word) for one in linears
    ]
    if experts is not None:
        parameters += [
            ParameterShape(f"moe.experts.w{i}", (experts.count, dim, experts.ffn), "expert")
            for i in ((1, 2, 3) if gated else (1, 2))
        ]
        parameters += [ParameterShape("moe.router.gate.weight", (experts.count, dim), "router")]
    parameters += [ParameterShape(f"{where}_norm.weight", (dim,), "sequence") for where in ("attn", "ffn")]
    layer = Layer(
        tuple(parameters), tuple(linears), heads, kv_heads, head_dim, head_dim,
        gated=gated, layer_norm=layer_norm, experts=experts,
    )  # fmt: skip
    embed = ParameterShape("embed.weight", (vocab, dim), "embed")
    head = ParameterShape("head.weight", (vocab, dim), "head")
    per_layer = sum(p.numel for p in parameters)
    idle = 0
    if experts is not None:
        in_experts = sum(p.numel for p in parameters if p.word == "expert")
        idle = in_experts - in_experts * experts.top_k // experts.count
    used = layers * (per_layer - idle) + vocab * dim + dim
    total = layers * per_layer + vocab * dim * (1 if tied else 2) + dim
    flops = 6 * used + 12 * layers * heads * head_dim * seq_len
    last = (ParameterShape("norm.weight", (dim,), "sequence"), head)
    return ModelShape(name, (layer,) * layers, (embed,), last, dim, vocab, tied, total, flops)


def _layer(layer: nn.Module, path: str, layout: Layout, shape: object) -> Layer:
    """One layer by its modules; what these do not say, as the number of heads, by the usual names of a shape."""
    # Forward runs what it splits by columns before what it splits by rows, whatever the order of definition.
    linears = [
        Linear(
            name,
            module.in_features,
            module.out_features,
            style_of(layout, f"{path}.{name}") or "replicate",
            any(p.requires_grad for p in module.parameters()),
        )
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    order = list(dict.fromkeys(one.path.rpartition(".")[0] for one in linears))
    linears.sort(key=lambda one: (order.index(one.path.rpartition(".")[0]), one.word == "rowwise"))

    # Attention: its core, how far it looks, and its heads.
    cores = [
        core for name, core in layer.named_modules() if layout.context and matches(f"{path}.{name}", layout.context)
    ]
    core = cores[0] if cores else None
    limits = [int(getattr(core, name, 0) or 0) for name in ("window", "chunk")]
    heads = int(getattr(shape, "num_heads", 0) or 1)
    qk_dim = int(getattr(shape, "head_dim", 0) or getattr(shape, "dim", heads) // heads)
    if getattr(shape, "qk_nope_head_dim", 0):
        qk_dim = int(shape.qk_nope_head_dim) + int(getattr(shape, "qk_rope_head_dim", 0))  # type: ignore[attr-defined]

    # Experts, as stacks of matrices. What has their path is a plain feed-forward in some layers of some models.
    moe = next((m for n, m in layer.named_modules() if layout.expert and matches(f"{path}.{n}", layout.expert)), None)
    experts = None
    of_experts = [p for n, p in moe.named_parameters() if n.startswith("experts.")] if moe else []
    stacks = [p for p in of_experts if p.ndim == 3]
    biased = any(p.ndim == 2 for p in of_experts)
    if stacks:
        dim = int(getattr(shape, "dim", 0))
        width = min((size for one in stacks for size in one.shape[1:] if size != dim), default=dim)
        experts = ExpertShape(
            int(stacks[0].shape[0]),
            int(getattr(shape, "top_k", 1)),
            int(width),
            biased,
            bool(getattr(shape, "score_before_experts", False)),
        )
    return Layer(
        tuple(_parameters(layer, None, layout, path)),
        tuple(linears),
        heads,
        int(getattr(shape, "num_kv_heads", 0) or heads),
        qk_dim,
        int(getattr(shape, "v_head_dim", 0) or qk_dim),
        min((limit for limit in limits if limit), default=0),
        causal=not bool(getattr(core, "bidirectional", False)),
        gated=sum(one.word == "colwise" and "attn" not in one.path for one in linears) > 1 or bool(stacks),
        layer_norm=any(isinstance(module, nn.LayerNorm) for module in layer.modules()),
        head_norms=any(name.endswith("k_norm.weight") for name, _ in layer.named_parameters()),
        unit_norms=any(getattr(module, "norm_eps", None) is not None for module in layer.modules()),
        experts=experts,
    )


def _parameters(
    module: nn.Module, names: Iterable[str] | None, layout: Layout, path: str = ""
) -> Iterable[ParameterShape]:
    """Parameters of a module, or of some children; one that is shared is listed once in each."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if names is not None and name.partition(".")[0] not in names:
            continue
        owner = f"{path}.{name}" if path else name
        owner = owner.rpartition(".")[0]
        word = style_of(layout, owner) or style_of(layout, owner.rpartition(".")[0]) or "replicate"
        yield ParameterShape(name, tuple(parameter.shape), word, parameter.requires_grad)
