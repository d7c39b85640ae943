"""Shapes of a model for a plan: its parameters, and the linears of each kind of layer.

The model is built on the meta device, as a run builds it. Its LAYOUT determines what tensor and
expert parallelism split.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from shardtrain import models, tasks
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.layout import SPLIT_ON_DIM_0, Layout, all_layers, matches, style_of
from shardtrain.metrics.flops import count_model
from shardtrain.models.experts_interface import is_experts
from shardtrain.ops.tied import tied_names
from shardtrain.tasks.image_text import ImageText
from shardtrain.tasks.images.image_work import VisionTower
from shardtrain.tools.plan import network_layout
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.network_memory import SavedBytes, saved_by_gate, saved_per_token
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class ParameterShape:
    """A parameter: its name, unsharded shape, style in LAYOUT.tensor, and False for ``trained`` if
    it is frozen.
    """

    name: str
    shape: tuple[int, ...]
    style: str
    trained: bool = True

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    def on_tensor_rank(self, tp: int) -> tuple[int, ...]:
        """Return the shape on the first tensor-parallel rank, which has the largest chunk of
        ``torch.chunk``.
        """
        if tp == 1 or not self.shape:
            return self.shape
        # All ranks have one matrix of a LoRA adapter in full: A of colwise linears, B of rowwise.
        matrix = self.name.rpartition(".")[2]
        if (matrix, self.style) in (("lora_a", "colwise"), ("lora_b", "rowwise")):
            return self.shape
        rows = self.shape[0]
        if self.style in SPLIT_ON_DIM_0 and rows >= tp:
            rows_per_rank = -(-rows // tp)
            return (rows_per_rank, *self.shape[1:])
        if self.style == "rowwise" and len(self.shape) == 2:
            columns_per_rank = -(-self.shape[1] // tp)
            return (rows, columns_per_rank)
        return self.shape


@dataclass(frozen=True)
class Linear:
    """A linear layer: unsharded features in and out, style, and False for ``trained`` if all of it
    is frozen.
    """

    path: str
    in_features: int
    out_features: int
    style: str
    trained: bool = True


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts.

    Attributes:
        count: Number of experts.
        top_k: Experts per token.
        ffn: Hidden features of an expert.
        biased: Experts have biases.
        weighs_inputs: Router weights multiply the inputs of experts instead of their outputs.
        gated: An expert multiplies two products.
        listed: Experts are the modules of a list, which run one after the other. Otherwise their weights are stacks.
        gate_bytes: Bytes that the activation of an expert of a ``transformers`` network saves for each row, if it
            was traced. Otherwise 0.
    """

    count: int
    top_k: int
    ffn: int
    biased: bool = False
    weighs_inputs: bool = False
    gated: bool = True
    listed: bool = False
    gate_bytes: int = 0


@dataclass(frozen=True)
class RecurrenceShape:
    """A recurrence with a matrix as state, instead of attention.

    Attributes:
        block: Name of the module in the layer that has its linears.
        key_heads, value_heads: Numbers of heads, before tensor parallelism.
        key_dim, value_dim: Features of a key and of a value.
            A state has ``key_dim`` rows and ``value_dim`` columns.
    """

    block: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class TowerShape:
    """The sequences that a layer of a vision tower processes for each row of the data.

    Attributes:
        dim: Width of the residual stream.
        sequences: Images or tiles per row.
        length: Patches of a sequence.
    """

    dim: int
    sequences: int
    length: int

    def job(self, job: PlannedJob) -> PlannedJob:
        """Return a job whose sequences are those of the tower, which each tensor-parallel rank processes in full."""
        return replace(job, rows=job.rows * self.sequences, seq_len=self.length, tp=1)


@dataclass(frozen=True)
class Layer:
    """One kind of layer.

    Attributes:
        parameters: All parameters.
        linears: Linear layers in the order of forward.
        heads, kv_heads: Numbers of heads, before tensor parallelism.
        qk_dim, v_dim: Features of a head.
        limit: Largest number of tokens that a token attends to. 0 for all earlier ones.
        causal: Attention is causal.
        gated: The feed-forward multiplies two products.
        layer_norm: Norms are LayerNorms, otherwise RMSNorms.
        head_norms: Queries and keys are normalized per head.
        unit_norms: These norms have no weights.
        experts: The mixture of experts, if any.
        recurrence: The recurrence, if the layer has one instead of attention. ``heads`` are then those of
            values, and ``kv_heads`` those of keys.
        attention: Attention function of a ``transformers`` network, such as "sdpa" or "eager". "" if the layer
            has an attention core of this package.
        saved: Traced bytes per token of a layer of such a network. None if only formulas describe the layer.
        low_bits_bytes: Bytes of frozen weights in the dtype lora.base_dtype.
        tower: The sequences of a layer of a vision tower. None for a layer that processes the tokens.
        restored_numel: Elements of the largest of these weights, which is restored to the compute dtype.
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
    recurrence: RecurrenceShape | None = None
    attention: str = ""
    saved: SavedBytes | None = None
    low_bits_bytes: int = 0
    restored_numel: int = 0
    tower: TowerShape | None = None

    def inside(self, part: str) -> tuple[Linear, ...]:
        """Return the linears of attention or recurrence ("attn") or of the feed-forward ("ffn"), without the router."""
        block = self.recurrence.block if self.recurrence else "attn"
        mixer = []
        feed_forward = []
        for linear in self.linears:
            first_module = linear.path.split(".")[0]
            if block in first_module:
                mixer.append(linear)
            elif linear.style != "router":
                feed_forward.append(linear)
        return tuple(mixer if part == "attn" else feed_forward)


@dataclass(frozen=True)
class ModelShape:
    """A model: its layers in order, and the parameters of its first and last modules.

    Attributes:
        name: Label for output.
        layers: Equal layers are the same object. Those of multi-token prediction are last.
        first, last: Parameters of the modules before and after the layers.
        dim: Width of the residual stream.
        vocab: Number of output columns.
        tied: The embedding is also the head.
        num_params: Number of parameters.
        flops_per_token: 6 N + 12 L H head_dim T.
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
        """True if any layer has stacked experts, which FSDP shards separately and expert parallelism splits."""
        return any(layer.experts and not layer.experts.listed for layer in self.layers)

    @property
    def head_counts(self) -> set[int]:
        """Numbers of heads of all layers, which tensor parallelism must divide."""
        counts = set()
        for layer in self.layers:
            counts |= {layer.heads, layer.kv_heads}
        return counts


def read(config: Config) -> ModelShape:
    """Return the shapes of the configured model, without allocating it.

    Raises:
        ConfigError: the model has no layers.
    """
    # Build the model as training does, on the meta device.
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    layout: Layout = module.LAYOUT
    with torch.device("meta"):
        model = task.adapt(models.build(module, shape), layout)
    if config.lora.enable:
        from shardtrain.lora import quantize, spec  # imports DTensor, which takes half a second

        spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    num_params, flops = count_model(model, layout, shape)
    flops_per_row = task.planned_flops_per_row(model)
    is_network = hasattr(model, "tensor_plan")
    compute_width = ITEM_BYTES[derived.compute_dtype(config)]
    saved_by_path: dict[str, SavedBytes] = {}
    if is_network:
        saved_by_path = saved_per_token(model, config.training.seq_len, compute_width)
        p = config.parallelism
        tensor_ranks, expert_ranks = p.tensor_parallel_degree, p.expert_parallel_degree
        layout = network_layout.of(model, layout, tensor_ranks, expert_ranks)
    base_dtype = config.lora.base_dtype if config.lora.enable else "training"
    if base_dtype != "training":
        quantize.remove_quantized_weights(model, layout, base_dtype)

    # Layers of one kind become one object, because memory and time are counted once per object.
    image_paths: Collection[str] = ()
    if isinstance(task, ImageText):
        image_paths = cast(Any, model).image_modules.keys()
    limits = _limits_of_network(model, shape, config) if is_network else {}
    layer_by_kind: dict[tuple[object, ...], Layer] = {}
    layer_shapes = []
    for layer_path, layer in all_layers(model, layout).items():
        name = layer_path.removeprefix(f"{layout.layers}.")
        is_of_images = any(name.startswith(f"{path}.") for path in image_paths)
        kind = (is_of_images, limits.get(name, 0), *_kind(layer))
        if kind not in layer_by_kind:
            layer_shape = _layer(layer, layer_path, layout, shape)
            if is_network:
                layer_shape = replace(
                    layer_shape,
                    attention=network_layout.attention_function(model),
                    limit=limits.get(name, 0),
                    saved=saved_by_path.get(name),
                    experts=_with_traced_gate(layer_shape.experts, layer, compute_width),
                )
            if base_dtype != "training":
                layer_shape = _quantized(layer_shape, layer, config)
            if is_of_images:
                assert isinstance(task, ImageText)
                layer_shape = _of_tower(layer_shape, task)
            layer_by_kind[kind] = layer_shape
        layer_shapes.append(layer_by_kind[kind])
    if not layer_shapes:
        raise ConfigError(
            Problem(
                "model.name",
                config.model.name,
                rule=f"has no modules in LAYOUT.layers={layout.layers!r}",
                fix="a plan needs at least one layer",
            )
        )

    # The modules before and after the layers. Their embedding and head may be one tensor.
    first, last = layout.first, layout.last
    if is_network:
        first, last = network_layout.outside_blocks(model)
    tied = False
    for names in tied_names(model):
        if any(_is_inside(name, last) for name in names):
            tied = True
    seq_len = config.training.seq_len
    return ModelShape(
        name=derived.model_label(config.model, num_params),
        layers=tuple(layer_shapes),
        first=tuple(_parameters(model, first, layout)),
        last=tuple(_parameters(model, last, layout)),
        dim=int(getattr(shape, "dim", 0)) or layer_shapes[0].parameters[0].shape[-1],
        vocab=task.num_outputs(shape) or int(getattr(shape, "vocab_size", 1)),
        tied=tied,
        num_params=num_params,
        flops_per_token=flops(seq_len) + flops_per_row / seq_len,
    )


def _quantized(layer_shape: Layer, layer: nn.Module, config: Config) -> Layer:
    """Return the shape of a layer whose frozen weights are stored in few bits.

    The weights are restored to the compute dtype one at a time.
    """
    from shardtrain.lora import quantize  # imports DTensor, which takes half a second

    largest_numel = 0
    for linear in quantize.quantized_linears(layer):
        largest_numel = max(largest_numel, linear.in_features * linear.out_features)
    return replace(
        layer_shape,
        low_bits_bytes=quantize.count(layer, config),
        restored_numel=largest_numel,
    )


def _with_traced_gate(
    experts: ExpertShape | None, layer: nn.Module, width: int
) -> ExpertShape | None:
    """Return a mixture of experts with the bytes that its activation saves for each row."""
    if experts is None:
        return None
    for module in layer.modules():
        if is_experts(module):
            return replace(experts, gate_bytes=saved_by_gate(module, experts.ffn, width))
    return experts


def _of_tower(layer: Layer, task: ImageText) -> Layer:
    """Return a layer with the heads and sequences of the vision tower of the task's model."""
    tower = VisionTower.of(task.folder)
    work = task.planned_work()
    if tower is None or not work.sequences:
        # A batch without images gets a small one.
        return replace(layer, tower=TowerShape(dim=1, sequences=1, length=1))
    head_dim = tower.dim // tower.heads
    return replace(
        layer,
        heads=tower.heads,
        kv_heads=tower.heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        causal=False,
        tower=TowerShape(tower.dim, work.sequences, work.patches // work.sequences),
    )


def _is_inside(name: str, paths: Iterable[str]) -> bool:
    """True if a parameter belongs to one of these modules."""
    return any(name.startswith(f"{path}.") for path in paths)


def _limits_of_network(model: Any, shape: Any, config: Config) -> dict[str, int]:
    """Return the tokens that a token attends to in each block of a ``transformers`` network with a window."""
    paths = [path for path in model.blocks if path not in model.tower_blocks]
    reaches = shape.attention_reaches
    # Without a reach for each block, it is not known which blocks have a window.
    if len(reaches) != len(paths):
        return {}
    limits = {}
    for path, reach in zip(paths, reaches, strict=True):
        if 0 < reach < config.training.seq_len:
            limits[path] = int(reach)
    return limits


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for layers with the same norms, parameters, attention windows and linears."""
    # Parameters do not suffice: two windows, or two epsilons, differ only in attributes.
    norms = []
    windows = []
    linears = []
    for module in layer.modules():
        norms.append(getattr(module, "norm_eps", None))
        windows.append((getattr(module, "window", 0), getattr(module, "chunk", 0)))
        if isinstance(module, nn.Linear):
            linears.append((module.in_features, module.out_features))
    parameters = []
    for path, parameter in layer.named_parameters():
        parameters.append((path, tuple(parameter.shape), parameter.requires_grad))
    return tuple(norms), tuple(parameters), tuple(windows), tuple(linears)


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
    """Return the shapes of a plain decoder with these sizes, for models without a model file.

    ``shared_ffn`` are hidden features of a feed-forward next to the experts.
    """
    # The linears: attention, and the feed-forward unless experts replace it.
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
        linears.append(Linear("ffn.w1", dim, ffn, "colwise"))
        if gated:
            linears.append(Linear("ffn.w3", dim, ffn, "colwise"))
        linears.append(Linear("ffn.w2", ffn, dim, "rowwise"))

    # The weights of the linears and of the experts, and the norms.
    parameters = []
    for linear in linears:
        weight_shape = (linear.out_features, linear.in_features)
        parameters.append(ParameterShape(f"{linear.path}.weight", weight_shape, linear.style))
    if experts is not None:
        stack_shape = (experts.count, dim, experts.ffn)
        matrices = ("w1", "w2", "w3") if gated else ("w1", "w2")
        for matrix in matrices:
            parameters.append(ParameterShape(f"moe.experts.{matrix}", stack_shape, "expert"))
        parameters.append(ParameterShape("moe.router.gate.weight", (experts.count, dim), "router"))
    for block in ("attn", "ffn"):
        parameters.append(ParameterShape(f"{block}_norm.weight", (dim,), "sequence"))
    layer = Layer(
        parameters=tuple(parameters),
        linears=tuple(linears),
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        gated=gated,
        layer_norm=layer_norm,
        experts=experts,
    )

    # Only the parameters that a token uses count for its FLOPs.
    per_layer = 0
    in_experts = 0
    for parameter in parameters:
        per_layer += parameter.numel
        if parameter.style == "expert":
            in_experts += parameter.numel
    idle = 0
    if experts is not None:
        idle = in_experts - in_experts * experts.top_k // experts.count
    used = layers * (per_layer - idle) + vocab * dim + dim
    flops = 6 * used + 12 * layers * heads * head_dim * seq_len
    num_vocabulary_matrices = 1 if tied else 2
    num_params = layers * per_layer + vocab * dim * num_vocabulary_matrices + dim

    embed = ParameterShape("embed.weight", (vocab, dim), "embed")
    norm = ParameterShape("norm.weight", (dim,), "sequence")
    head = ParameterShape("head.weight", (vocab, dim), "head")
    return ModelShape(
        name=name,
        layers=(layer,) * layers,
        first=(embed,),
        last=(norm, head),
        dim=dim,
        vocab=vocab,
        tied=tied,
        num_params=num_params,
        flops_per_token=flops,
    )


def _layer(layer: nn.Module, path: str, layout: Layout, shape: object) -> Layer:
    """Return the shapes of one layer.

    They are read from its modules. Sizes that no module has, such as the number of heads, are read
    from the usual fields of ``shape``.
    """
    heads = int(getattr(shape, "num_heads", 0) or 1)
    kv_heads = int(getattr(shape, "num_kv_heads", 0) or heads)
    qk_dim = int(getattr(shape, "head_dim", 0) or getattr(shape, "dim", heads) // heads)
    # Latent attention has keys of two parts, with and without rotary positions, and narrower values.
    qk_nope_dim = int(getattr(shape, "qk_nope_head_dim", 0) or 0)
    if qk_nope_dim:
        qk_dim = qk_nope_dim + int(getattr(shape, "qk_rope_head_dim", 0))
    v_dim = int(getattr(shape, "v_head_dim", 0) or qk_dim)
    recurrence = _recurrence(layer, path, layout, shape)
    mixer = "attn"
    if recurrence is not None:
        heads = recurrence.value_heads
        kv_heads = recurrence.key_heads
        qk_dim = recurrence.key_dim
        v_dim = recurrence.value_dim
        mixer = recurrence.block

    # Attention is limited to a window or a chunk, whichever is smaller.
    core = _first_matching(layer, path, layout.context)
    limits = []
    for name in ("window", "chunk"):
        limit = int(getattr(core, name, 0) or 0)
        if limit:
            limits.append(limit)
    # A gated feed-forward has two input linears: gate and up.
    linears = _linears(layer, path, layout)
    num_ffn_inputs = 0
    for linear in linears:
        if linear.style == "colwise" and mixer not in linear.path:
            num_ffn_inputs += 1
    experts = _experts(layer, path, layout, shape)
    is_gated = num_ffn_inputs > 1
    if experts is not None and experts.gated:
        is_gated = True
    has_layer_norm = False
    has_unit_norms = False
    for module in layer.modules():
        if isinstance(module, nn.LayerNorm):
            has_layer_norm = True
        if getattr(module, "norm_eps", None) is not None:
            has_unit_norms = True
    parameters = tuple(_parameters(layer, None, layout, path))
    return Layer(
        parameters=parameters,
        linears=tuple(linears),
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        limit=min(limits, default=0),
        causal=not bool(getattr(core, "bidirectional", False)),
        gated=is_gated,
        layer_norm=has_layer_norm,
        head_norms=any(parameter.name.endswith("k_norm.weight") for parameter in parameters),
        unit_norms=has_unit_norms,
        experts=experts,
        recurrence=recurrence,
    )


def _recurrence(
    layer: nn.Module, path: str, layout: Layout, shape: object
) -> RecurrenceShape | None:
    """Return the shape of a layer's recurrence. None if the layer has attention."""
    core = _first_matching(layer, path, layout.recurrence)
    if core is None:
        return None
    return RecurrenceShape(
        block=layout.recurrence.removeprefix(f"{layout.layers}.*.").partition(".")[0],
        key_heads=int(getattr(shape, "linear_key_heads", 0) or 1),
        value_heads=int(getattr(shape, "linear_value_heads", 0) or 1),
        key_dim=int(getattr(core, "key_dim", 0) or 1),
        value_dim=int(getattr(core, "value_dim", 0) or 1),
    )


def _linears(layer: nn.Module, path: str, layout: Layout) -> list[Linear]:
    """Return the linears of a layer in the order of forward."""
    linears = []
    list_path, _ = _list_of_experts(layer)
    for name, module in layer.named_modules():
        # Only some tokens pass an expert, so ExpertShape describes its linears
        if list_path and name.startswith(f"{list_path}."):
            continue
        if isinstance(module, nn.Linear):
            style = style_of(layout, f"{path}.{name}") or "replicate"
            is_trained = any(parameter.requires_grad for parameter in module.parameters())
            linears.append(Linear(name, module.in_features, module.out_features, style, is_trained))
    # Within a block, forward runs colwise linears before rowwise ones, whatever the order of their
    # definition.
    blocks: list[str] = []
    for linear in linears:
        block = linear.path.rpartition(".")[0]
        if block not in blocks:
            blocks.append(block)

    def place_in_forward(linear: Linear) -> tuple[int, bool]:
        block = linear.path.rpartition(".")[0]
        return blocks.index(block), linear.style == "rowwise"

    linears.sort(key=place_in_forward)
    return linears


def _first_matching(layer: nn.Module, path: str, pattern: str | None) -> nn.Module | None:
    """Return the first module inside a layer whose path matches a pattern of the layout."""
    if not pattern:
        return None
    for name, module in layer.named_modules():
        if matches(f"{path}.{name}", pattern):
            return module
    return None


def _experts(layer: nn.Module, path: str, layout: Layout, shape: object) -> ExpertShape | None:
    """Return the shape of a mixture of experts. None if the layer has a plain feed-forward."""
    list_path, expert_list = _list_of_experts(layer)
    if expert_list is not None:
        return _listed_experts(
            layer.get_submodule(list_path.rpartition(".")[0]), expert_list, shape
        )
    mixture = _first_matching(layer, path, layout.expert)
    if mixture is None:
        return None
    # Weights of experts are stacks of matrices, and biases are stacks of vectors. In some layers of some
    # models, this path is a plain feed-forward.
    stacks = []
    has_biases = False
    for name, parameter in mixture.named_parameters():
        if not name.startswith("experts."):
            continue
        if parameter.ndim == 3:
            stacks.append(parameter)
        elif parameter.ndim == 2:
            has_biases = True
    if not stacks:
        return None
    matrices = [stack.shape[1:] for stack in stacks]
    return ExpertShape(
        count=int(stacks[0].shape[0]),
        top_k=int(getattr(shape, "top_k", 1)),
        ffn=_hidden_features(matrices, shape),
        biased=has_biases,
        weighs_inputs=bool(getattr(shape, "score_before_experts", False)),
    )


def _list_of_experts(layer: nn.Module) -> tuple[str, nn.ModuleList | None]:
    """Return path and module of the list "experts" of a layer. The path is "" if the layer has none.

    Networks of ``transformers`` 4 and some model files have such lists.
    """
    for path, module in layer.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if path.rpartition(".")[2] == "experts":
            return path, module
    return "", None


def _listed_experts(block: nn.Module, experts: nn.ModuleList, shape: object) -> ExpertShape:
    """Return the shape of a list of experts. ``block`` is the module that owns the list."""
    # A model file may have the number of experts per token in its config or in the block
    top_k = getattr(shape, "top_k", None) or getattr(block, "top_k", None) or 1
    parameters = list(experts[0].parameters())
    matrices = [parameter.shape for parameter in parameters if parameter.ndim == 2]
    return ExpertShape(
        count=len(experts),
        top_k=min(int(top_k), len(experts)),
        ffn=_hidden_features(matrices, shape),
        biased=any(parameter.ndim == 1 for parameter in parameters),
        gated=len(matrices) > 2,
        listed=True,
    )


def _hidden_features(matrices: Iterable[Sequence[int]], shape: object) -> int:
    """Return the hidden features of an expert from the shapes of its matrices."""
    # Each matrix has one side of the residual stream. A fused gate and up has twice the hidden features,
    # so take the smallest of the other sides.
    dim = int(getattr(shape, "dim", 0))
    widths: list[int] = []
    for matrix in matrices:
        widths += [size for size in matrix if size != dim]
    return min(widths, default=dim)


def _parameters(
    module: nn.Module, names: Iterable[str] | None, layout: Layout, path: str = ""
) -> Iterable[ParameterShape]:
    """Yield the parameters of a module, or of its submodules ``names``.

    A shared parameter is listed in each owner.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if names is not None and not _is_inside(name, names):
            continue
        full_name = f"{path}.{name}" if path else name
        owner = full_name.rpartition(".")[0]
        owner_of_owner = owner.rpartition(".")[0]
        style = style_of(layout, owner) or style_of(layout, owner_of_owner) or "replicate"
        yield ParameterShape(name, tuple(parameter.shape), style, parameter.requires_grad)
