"""Compare a training step with float64 on one layer and the vocabulary of the configured model, at
their real width.

A model that does not fit into memory is split into pieces: the layer with a small vocabulary, and the
vocabulary with a small layer. The row of a piece lists the reduced sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain import distributed, models
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import Config, Loaded
from shardtrain.config.rules.model_rules import dense_layers, model_shape
from shardtrain.data.batch import Batch
from shardtrain.distributed import BATCH_AXES, expert_parallel
from shardtrain.distributed.process_group import World
from shardtrain.hub_formats.config_json import read_json
from shardtrain.models import architecture
from shardtrain.models.transformers import EXPERTS_PER_TOKEN
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.ops.seeding import set_determinism
from shardtrain.ops.tied import tied_names, to_empty
from shardtrain.tools.verify.batches import SyntheticStream, whole_batch
from shardtrain.tools.verify.meshes import changed
from shardtrain.tools.verify.real import float64, tile
from shardtrain.tools.verify.real.sums import copies_of, float64_squares
from shardtrain.utils.units import GIB

SEQUENCES, TOKENS = 4, 4
"""Number of sequences per step, and of tokens per sequence.

More would only take longer: rounding grows with the width.
"""
FEW_ROWS = 1024
"""Rows of a reduced embedding or vocabulary."""
INNER = {
    "ffn_dim": 1024,
    "moe_ffn_dim": 64,
    "num_experts": 16,
    "num_heads": 8,
    "num_kv_heads": 8,
    "linear_key_heads": 4,
    "linear_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
}
"""Maximum value of each size field in a reduced layer."""
NETWORK_INNER = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
"""Maximum value of size fields in a config.json, in the reduced layers of a network of ``transformers``."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in a config.json."""


@dataclass(frozen=True)
class PartialModel:
    """A reduced model that trains one step.

    Attributes:
        name: Name of the piece.
        loaded: Its configuration.
        size_text: Reduced sizes, as text for the row.
        cut_embedding: True if the embedding has only ``FEW_ROWS`` rows.
        numel: Number of parameters.
        largest_unit: Number of parameters of the largest unit that FSDP gathers.
        widest: Longest side of a matrix, which is the number of terms in its longest sum.
    """

    name: str
    loaded: Loaded
    size_text: str
    cut_embedding: bool
    numel: int = 0
    largest_unit: int = 0
    widest: int = 0

    def bytes_on(self, degrees: Mapping[str, int], num_ranks: int) -> int:
        """Return the bytes of weights, gradients and FSDP buffers over all ranks."""
        replicas = num_ranks // degrees.get("tp", 1)
        # FSDP has a copy of a unit's weights, its unreduced gradient and its reduced gradient. With several
        # ranks it also has a send buffer.
        bytes_per_element = 16 * replicas if replicas > 1 else 12
        gathered = bytes_per_element * self.largest_unit
        return 8 * self.numel + gathered + GIB // 4 * num_ranks


def pieces(
    loaded: Loaded,
    budget: int,
    count: Callable[[PartialModel], PartialModel],
) -> Iterator[PartialModel]:
    """Yield the full layer with its vocabulary if it fits into ``budget`` bytes, or else pieces that fit.

    ``count`` returns a piece with its numbers of parameters.
    """
    # Keep one layer of each kind. If this takes two layers, the second layer
    # has experts or no rotary positions, or attention after a recurrence.
    sizes = model_shape(loaded) or {}
    shallow: dict[str, Any] = {}
    if "num_layers" in sizes:
        shallow = {"num_layers": 1}
    if sizes.get("no_rope_layer_interval"):
        shallow |= {"num_layers": 2, "no_rope_layer_interval": 2}
    if sizes.get("full_attention_interval", 1) > 1:
        shallow |= {"num_layers": 2, "full_attention_interval": 2}
    if sizes.get("interleave_moe_layer_step", 1) > 1:
        shallow |= {"num_layers": 2, "interleave_moe_layer_step": 2}
    if sizes.get("num_dense_layers"):
        shallow = {"num_layers": 2, "num_dense_layers": 1}
    layers = f"num_layers {sizes.get('num_layers')} -> {shallow.get('num_layers')}"
    if sizes.get("dropout"):
        shallow["dropout"] = 0.0
        layers += ", no dropout"
    if "dropout" in sizes and loaded.config.model.name == "transformers":
        shallow.pop("dropout")

    # Everything together, if it fits, or if the size of the vocabulary is unknown.
    everything = count(_piece("layer and vocabulary", loaded, shallow, layers, False))
    if everything.bytes_on({}, 1) <= budget or "vocab_size" not in sizes:
        yield everything
        return

    # The layer with a small vocabulary. A model with both dense layers and layers of experts has a
    # piece for each.
    few = {**shallow, "vocab_size": min(FEW_ROWS, sizes["vocab_size"])}
    size_text = f"{layers}, vocabulary {sizes['vocab_size']} -> {few['vocab_size']}"
    if dense_layers({**sizes, **shallow}):
        inner = {**few, **_inner(sizes, ("moe_ffn_dim", "num_experts"))}
        text_of_dense = f"{size_text}, experts {sizes['num_experts']} -> 16"
        yield count(_piece("dense layer", loaded, inner, text_of_dense, False))
        few |= _inner(sizes, ("ffn_dim",))
        size_text += f", ffn_dim {sizes['ffn_dim']} -> {few['ffn_dim']}"
    yield _layer(sizes, loaded, few, size_text, budget, count)

    # The vocabulary with a small layer. The output has its real size, and so does a tied embedding.
    small = {**shallow, **_inner(sizes, tuple(INNER))}
    tied = bool(sizes.get("tied_embeddings"))
    size_text = f"{layers}, a small layer"
    if not tied:
        size_text += f", embedding of {FEW_ROWS} rows"
    yield count(_piece("vocabulary", loaded, small, size_text, not tied))


def network_pieces(
    loaded: Loaded,
    folder: Path,
    budget: int,
    count: Callable[[PartialModel], PartialModel],
) -> Iterator[PartialModel]:
    """Yield a network of ``transformers`` with one layer of each kind,
    or pieces that fit into ``budget`` bytes.

    Each piece has its config.json in a folder below ``folder``. No weights are read, so a checkpoint
    with quantized weights is allowed. ``count`` returns a piece with its numbers of parameters.
    """
    config = loaded.config.model
    source = Path(str(config.overrides.get("path") or config.hf_assets_path)) / "config.json"
    fields = dict(read_json(source))
    for name in ("quantization_config", "quantization"):
        fields.pop(name, None)
    if config.overrides.get("vocab_size"):
        fields["vocab_size"] = config.overrides["vocab_size"]
    layers = _one_layer_of_each_kind(fields, folder)
    everything = count(_network(loaded, folder / "layers", fields, "layers", layers, False))
    vocabulary = fields.get("vocab_size")
    if everything.bytes_on({}, 1) <= budget or not isinstance(vocabulary, int):
        yield everything
        return

    # The layers with a small vocabulary and as many experts as fit
    few = _with_fields(fields, {"vocab_size": min(FEW_ROWS, vocabulary)})
    size_text = f"{layers}, vocabulary {vocabulary} -> {few['vocab_size']}"
    yield _layers_of_network(loaded, folder, few, size_text, budget, count)

    # The vocabulary with small layers. The output has its real size, and so does a tied embedding.
    reduced = {}
    for name, limit in NETWORK_INNER.items():
        if isinstance(fields.get(name), int):
            reduced[name] = min(fields[name], limit)
    for name in _EXPERTS:
        if isinstance(fields.get(name), int):
            reduced[name] = min(fields[name], _top_k(fields))
    if (fields.get("n_group") or 1) > 1:
        reduced |= {"n_group": 1, "topk_group": 1}
    tied = bool(architecture.read(str(folder / "layers")).get_text_config().tie_word_embeddings)
    size_text = f"{layers}, small layers"
    if not tied:
        size_text += f", embedding of {FEW_ROWS} rows"
    small = _with_fields(fields, reduced)
    yield count(_network(loaded, folder / "vocabulary", small, "vocabulary", size_text, not tied))


def _one_layer_of_each_kind(fields: dict[str, Any], folder: Path) -> str:
    """Reduce the fields of a config.json in place to the first layer of each kind. Return the change as text.

    Kinds are dense layers before experts, and the combinations of lists over layers.
    """
    # Some configs compute these lists, such as Qwen3-Next from an interval
    path = folder / "parsed"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    parsed = architecture.read(str(path)).get_text_config()
    name = "n_layer" if "n_layer" in fields else "num_hidden_layers"
    num_layers = int(fields[name])
    for key in ("layer_types", "mlp_layer_types"):
        value = getattr(parsed, key, None)
        if isinstance(value, list) and len(value) == num_layers:
            fields[key] = value

    dense = int(fields.get("first_k_dense_replace") or 0)
    attention_layers = fields.get("attn_layer_indices")
    lists = {}
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == num_layers:
            lists[key] = value
    # The first layer of each kind
    kept: dict[tuple[object, ...], int] = {}
    for index in range(num_layers):
        kinds = [json.dumps(value[index]) for value in lists.values()]
        has_attention = index in (attention_layers or ())
        kept.setdefault((index < dense, has_attention, *kinds), index)
    indices = list(kept.values())
    fields[name] = len(indices)
    if dense:
        fields["first_k_dense_replace"] = min(dense, 1)
    if attention_layers:
        # Bamba lists the layers with attention. All others are recurrent
        kept_attention_layers = []
        for place, index in enumerate(indices):
            if index in attention_layers:
                kept_attention_layers.append(place)
        fields["attn_layer_indices"] = kept_attention_layers
    for key, value in lists.items():
        fields[key] = [value[index] for index in indices]
    return f"{name} {num_layers} -> {len(indices)}"


def _layers_of_network(
    loaded: Loaded,
    folder: Path,
    fields: dict[str, Any],
    size_text: str,
    budget: int,
    count: Callable[[PartialModel], PartialModel],
) -> PartialModel:
    """Return the layers of a network with the largest number of experts that fits."""
    path = folder / "few_rows"
    piece = count(_network(loaded, path, fields, "layers", size_text, False))
    # A config.json may have the number under two names
    names = [name for name in _EXPERTS if isinstance(fields.get(name), int)]
    if not names:
        return piece
    top_k = _top_k(fields)
    num_groups = fields.get("n_group") or 1
    all_experts = fields[names[0]]
    experts = all_experts
    while piece.bytes_on({}, 1) > budget and experts // 2 >= top_k:
        experts //= 2
        text = f"{size_text}, {names[0]} {all_experts} -> {experts}"
        reduced = dict.fromkeys(names, experts)
        # A router that first selects groups ranks each by its best two experts
        of_group, remaining = divmod(experts, num_groups)
        selected = (fields.get("topk_group") or 1) * of_group
        if num_groups > 1 and (remaining or of_group < 2 or selected < top_k):
            reduced |= {"n_group": 1, "topk_group": 1}
            text += ", one group"
        few = _with_fields(fields, reduced)
        piece = count(_network(loaded, folder / f"experts_{experts}", few, "layers", text, False))
    return piece


def _top_k(fields: Mapping[str, Any]) -> int:
    """Return the number of experts per token according to a config.json. 1 if it does not specify it."""
    for name in EXPERTS_PER_TOKEN:
        if isinstance(fields.get(name), int):
            return int(fields[name])
    return 1


def _with_fields(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with changes, without special tokens beyond the vocabulary."""
    changed_fields = {**fields, **changes}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = changed_fields.get(name)
        # A config.json may have several tokens that end a text
        tokens = token if isinstance(token, list) else [token]
        known = [one for one in tokens if isinstance(one, int)]
        if any(one >= changed_fields["vocab_size"] for one in known):
            changed_fields[name] = None
    return changed_fields


def _network(
    loaded: Loaded, path: Path, fields: Mapping[str, Any], name: str, size_text: str, cut: bool
) -> PartialModel:
    """Write a config.json to the folder ``path`` and return the piece that it describes."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    overrides: dict[str, Any] = {"path": str(path)}
    if "vocab_size" in loaded.config.model.overrides:
        overrides["vocab_size"] = fields["vocab_size"]
    return _piece(name, loaded, overrides, size_text, cut)


def _inner(sizes: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return reduced sizes of a layer for some fields."""
    reduced = {}
    for name in names:
        if isinstance(sizes.get(name), int):
            reduced[name] = min(sizes[name], INNER[name])
    if "num_heads" in reduced and "num_kv_heads" in reduced:
        reduced["num_kv_heads"] = min(reduced["num_kv_heads"], reduced["num_heads"])
    return reduced


def _layer(
    sizes: Mapping[str, Any],
    loaded: Loaded,
    few: dict[str, Any],
    size_text: str,
    budget: int,
    count: Callable[[PartialModel], PartialModel],
) -> PartialModel:
    """Return the layer with the largest number of experts that fits."""
    experts = sizes.get("num_experts", 0)
    groups: dict[str, int] = {}
    while True:
        text = size_text
        if experts != sizes.get("num_experts", 0):
            text += f", experts {sizes['num_experts']} -> {experts}"
        if groups:
            text += ", one group"
        overrides = few
        if experts:
            overrides = {**few, "num_experts": experts, **groups}
        piece = count(_piece("layer", loaded, overrides, text, False))
        if not experts or piece.bytes_on({}, 1) <= budget or experts // 2 < sizes.get("top_k", 1):
            return piece

        # Halve the number of experts. A router that first selects groups needs enough experts in each
        # group. If there are too few, use one group.
        experts //= 2
        of_group = experts // sizes.get("num_groups", 1)
        if sizes.get("top_groups", 1) * of_group < sizes.get("top_k", 1):
            groups = {"num_groups": 1, "top_groups": 1}


def _piece(
    name: str, loaded: Loaded, overrides: dict[str, Any], size_text: str, cut: bool
) -> PartialModel:
    """Return a piece in float32 on a CPU, without options that change numbers or end the step."""
    model = {"overrides": {**loaded.config.model.overrides, **overrides}, "converters": []}
    sections: dict[str, dict[str, Any]] = {
        "model": model,
        "training": {
            "dtype": "float32",
            "mixed_precision_param": "float32",
            "mixed_precision_reduce": "float32",
            "max_norm": math.inf,
            "steps": 1,
            "epochs": None,
            "seq_len": TOKENS,
            "local_batch_size": 1,
            "global_batch_size": SEQUENCES,
            "enable_cpu_offload": False,
            "replica_check_interval": 0,
            "nonfinite_policy": "stop",
            "spike_policy": "off",
            "device": "cpu",
        },
        "optimizer": {
            "name": "AdamW",
            "no_weight_decay": [],
            "implementation": "for-loop",
            "qk_clip_threshold": 0.0,
        },
        "lr_scheduler": {"warmup_steps": 0, "total_steps": None},
        "activation_checkpoint": {"mode": "none", "cpu_offload": False},
        "compile": {"enable": False},
        "lora": {"enable": False},
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": 1,
            "pipeline_parallel_degree": 1,
            "context_parallel_degree": 1,
            "expert_parallel_degree": 1,
            "enable_async_tensor_parallel": False,
            "shard_optimizer_states": False,
            "module_fqns_per_model_part": None,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
    }
    return PartialModel(name, changed(loaded, sections, set(), ""), size_text, cut)


def on_mesh(piece: PartialModel, degrees: Mapping[str, int]) -> Loaded:
    """Return the piece's configuration on a mesh. ``dp_shard`` takes the remaining ranks."""
    options = {
        "tensor_parallel_degree": degrees.get("tp", 1),
        "data_parallel_replicate_degree": degrees.get("dp_replicate", 1),
    }
    return changed(piece.loaded, {"parallelism": options}, set(), "")


def build(config: Config, cut_embedding: bool) -> tuple[Any, Any, nn.Module]:
    """Return the model file, the sizes, and the model on the meta device without dropout.

    ``cut_embedding`` reduces the embedding to ``FEW_ROWS`` rows.
    """
    module, shape = models.configured(config.model)
    model = models.build(module, shape)
    first: set[nn.Module] = set()
    for name in module.LAYOUT.first:
        first.update(getattr(model, name).modules())
    for path, part in list(model.named_modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if not cut_embedding or not isinstance(part, nn.Embedding):
            continue
        if part in first:
            num_rows = min(FEW_ROWS, part.num_embeddings)
            with torch.device("meta"):
                model.set_submodule(path, nn.Embedding(num_rows, part.embedding_dim))
    return module, shape, model


def count(rank: int, num_ranks: int, config: Config, cut_embedding: bool) -> list[int]:
    """Return the parameters of the model and of its largest FSDP unit, and the longest side of a matrix."""
    module, _, model = build(config, cut_embedding)

    def numel(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters())

    # FSDP gathers each layer and each first or last module separately. Modules with tied weights
    # form one unit.
    layers = [numel(layer) for layer in getattr(model, module.LAYOUT.layers).values()]
    names_of_ends = (*module.LAYOUT.first, *module.LAYOUT.last)
    ends = [numel(getattr(model, name)) for name in names_of_ends]
    if tied_names(model):
        ends = [numel(model) - sum(layers)]
    largest_unit = max([*layers, *ends])
    widest = max(max(parameter.shape, default=0) for parameter in model.parameters())
    return [numel(model), largest_unit, widest]


def gradient_limit(widest: int) -> float:
    """Return the largest relative error (Frobenius norm) of a gradient that rounding can explain.

    With random signs, the rounding error of a sum of n terms grows with the square root of n. About four such
    sums follow each other between the loss and a gradient.
    """
    return 4 * 2.0**-24 * math.sqrt(widest)


def fill(parameters: Mapping[str, Tensor], module: Any, shape: Any, num_layers: int) -> None:
    """Fill this rank's parameters with values as in a trained model: matrices at unit gain, and no zeros."""
    draws = init_weights.plan(parameters, module.initial(shape), module.LAYOUT, num_layers)
    for name, parameter in parameters.items():
        if parameter.ndim in (2, 3):
            tile.fill_(parameter, name, parameter.shape[-1] ** -0.5)
            continue
        # Vectors are near zero, and weights of norms near one.
        normal = replace(draws[name], distribution="normal", std=0.05, depth="none")
        init_weights.draw_(parameter, name, normal, 0)
        if draws[name].distribution == "ones":
            local_tensor(parameter).detach().add_(1.0)


class _Stream(SyntheticStream):
    """Synthetic batches whose tokens are below the number of rows of a reduced embedding."""

    def __init__(self, rows: int, *arguments: int) -> None:
        super().__init__(*arguments)
        self._embedding_rows = rows

    def __next__(self) -> Batch:
        batch = super().__next__()
        return replace(batch, tokens_BT=batch.tokens_BT % self._embedding_rows)


def _rows(piece: PartialModel, vocabulary: int) -> int:
    if piece.cut_embedding:
        return min(FEW_ROWS, vocabulary)
    return vocabulary


def reference(rank: int, num_ranks: int, piece: PartialModel, path: str) -> dict[str, float]:
    """Compute the loss sum and gradients in float64 on one process. Write the gradients to ``path``.

    The weights are the same as those of the ranks.
    """
    config = piece.loaded.config
    if config.debug.deterministic:
        set_determinism(config.debug.deterministic_warn_only)
    module, shape, model = build(config, piece.cut_embedding)
    network: Any = getattr(model, "hf", None)
    if network is not None and getattr(model, "experts", None):
        # one product per expert, which the float64 mode can compute in blocks
        network.set_experts_implementation("eager")
    to_empty(model)
    for _, buffer in model.named_buffers():
        buffer.zero_()
    fill(dict(model.named_parameters()), module, shape, len(getattr(model, module.LAYOUT.layers)))
    batch = whole_batch(config.debug.seed, 0, SEQUENCES, TOKENS, shape.vocab_size)
    tokens_BT = batch.tokens_BT % _rows(piece, shape.vocab_size)

    # The trainer divides in float32. Gradients have the rounding error of that divisor, but the
    # loss sum does not.
    weight = torch.tensor(1.0 / batch.num_targets, dtype=torch.float32)
    expert_parallel.before_step([model], weight)

    def loss_of(model: nn.Module) -> Tensor:
        logits_BTV = model(tokens_BT, batch.positions_BT)
        loss_sum = nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum"
        )
        return loss_sum * weight.double()

    loss, gradients = float64.loss_and_gradients(model, loss_of)
    float64.write(gradients, path)
    return {"loss": loss / float(weight), "targets": batch.num_targets}


class _Compared(torch.optim.Optimizer):
    """Optimizer that compares gradients with the reference instead of updating weights.

    Attributes:
        errors: This rank's share of the squared difference and of the squared reference, by parameter name.
        squares: This rank's share of the squared norm of all gradients.
    """

    def __init__(self, parameters: Mapping[str, Tensor], path: str, num_ranks: int) -> None:
        super().__init__(list(parameters.values()), {"lr": 0.0})
        self._parameters = parameters
        self._path = path
        self._num_ranks = num_ranks
        self.errors: dict[str, tuple[float, float]] = {}
        self.squares = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        expected = float64.read(self._path)
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            # Ranks with the same part share the comparison, so the errors add up over all ranks.
            copies = copies_of(gradient, self._num_ranks)
            self.squares += float64_squares(local_tensor(gradient)) / copies
            difference, size = _distance(gradient, name, expected)
            self.errors[name] = difference / copies, size / copies


def _distance(gradient: Tensor, name: str, expected: float64.Gradients) -> tuple[float, float]:
    """Return the squared difference of this rank's part of a gradient from float64, and its squared
    norm in float64.
    """
    local = local_tensor(gradient).detach()
    slices = local_slices(gradient)
    if local.numel() == 0:
        return 0.0, 0.0
    if local.ndim < 2:
        wanted = expected.whole[name][slices]
        difference = float((local.double() - wanted).square().sum())
        return difference, float(wanted.square().sum())

    # Compute the reference only for one block of rows at a time. Matrices of experts are stacked in
    # one tensor, and the reference numbers their rows consecutively.
    differences = []
    sizes = []
    rows_per_block = max(1, (1 << 22) // local.shape[-1])
    matrices = [local] if local.ndim == 2 else local.flatten(0, -3).unbind()
    for number, matrix in enumerate(matrices):
        rows_above = 0
        if local.ndim != 2:
            rows_above = (slices[0].start + number) * gradient.shape[-2]
        for start in range(0, len(matrix), rows_per_block):
            part = matrix[start : start + rows_per_block]
            first = rows_above + slices[-2].start + start
            wanted = expected.rows(name, first, first + len(part), slices[-1])
            sizes.append(float(wanted.square().sum()))
            differences.append(float(wanted.sub_(part).square_().sum()))
    return math.fsum(differences), math.fsum(sizes)


def step(
    rank: int,
    num_ranks: int,
    trainer: Any,
    config: Config,
    piece: PartialModel,
    path: str,
) -> dict[str, Any]:
    """Run one training step as one rank. Return its loss and norm, and the errors of its gradients.
    Collective.
    """
    if config.debug.deterministic:
        set_determinism(config.debug.deterministic_warn_only)
    # Build the trainer's runner, and fill its weights as the reference does.
    mesh = distributed.build(config, World(rank, num_ranks, rank, torch.device("cpu")))
    module, shape, model = build(config, piece.cut_embedding)
    num_layers = len(getattr(model, module.LAYOUT.layers))
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)
    nothing = init_weights.Draw("zeros")
    runner.materialize(dict.fromkeys(runner.parameters(), nothing), 0)
    fill(runner.parameters(), module, shape, num_layers)
    compared = _Compared(runner.parameters(), path, num_ranks)
    stream = _Stream(
        _rows(piece, shape.vocab_size),
        config.debug.seed,
        TOKENS,
        shape.vocab_size,
        SEQUENCES,
        1,
        mesh.rank(*BATCH_AXES),
        mesh.size(*BATCH_AXES),
    )
    # One step of the trainer, with an optimizer that compares the gradients instead of applying them.
    run = trainer.Run(
        config=config,
        mesh=mesh,
        runner=runner,
        optimizer=compared,
        scaler=None,
        dataloader=stream,
        state=TrainState(),
        total_steps=1,
        num_params=0,
        flops_per_token=0.0,
    )
    outcome = trainer.step(run)
    share = float(outcome.loss_sum) / mesh.size("tp")  # the ranks of a tp group have the same sum
    return {
        "loss": share,
        "norm": outcome.grad_norm,
        "squares": compared.squares,
        "errors": compared.errors,
    }


def errors(answers: list[dict[str, Any]], expected: Mapping[str, float]) -> dict[str, Any]:
    """Return the relative errors of the loss, of the norm and of the worst gradient,
    from the results of all ranks.

    The norm is compared with the float64 norm of the same gradients. The error of an almost zero gradient,
    such as the gradient of a key bias, is relative to a thousandth of the norm of all gradients.
    """
    loss = math.fsum(answer["loss"] for answer in answers)
    norm = math.sqrt(math.fsum(answer["squares"] for answer in answers))
    # Each rank has compared its shares of some parameters: squared differences and squared sizes.
    differences: dict[str, list[float]] = {}
    sizes: dict[str, list[float]] = {}
    for answer in answers:
        for name, (difference, size) in answer["errors"].items():
            differences.setdefault(name, []).append(difference)
            sizes.setdefault(name, []).append(size)

    floor = 1e-6 * norm**2
    worst = 0.0
    where = ""
    for name in sorted(differences):
        squared_size = max(math.fsum(sizes[name]), floor)
        error = math.sqrt(math.fsum(differences[name]) / squared_size)
        # Negate the comparison, so NaN counts as the worst error.
        if not error <= worst:
            worst = error
            where = name
    return {
        "loss": abs(loss / expected["loss"] - 1),
        "norm": max(abs(answer["norm"] / norm - 1) for answer in answers),
        "gradient": worst,
        "where": where,
    }
