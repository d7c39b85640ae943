"""Compiled layers with recomputation: the entire layer is compiled, and the configured activations are saved."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import LAYERS, SHAPE, make_run, tiny_config
from torch import Tensor, nn

from shardtrain.config.schema import ActivationCheckpoint, Compile, Config
from shardtrain.distributed import activation_checkpoint, compile
from shardtrain.layout import Layout
from shardtrain.train import trainer

KINDS: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "every 2nd": {"mode": "selective", "selective_ac_option": "2"},
    "full, on cpu": {"mode": "full", "cpu_offload": True},
    "memory budget": {"mode": "memory_budget", "memory_budget": 0.5},
}
EXPERTS = {"name": "mixtral", "overrides": {"moe_ffn_dim": 32, "num_experts": 4, "top_k": 2}}
DOCUMENTS = {"data": {"packing": "first_fit"}}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (1, {}),
    "documents": (1, DOCUMENTS),
    "windows": (
        1,
        {"model": {"name": "mistral", "overrides": {"sliding_window": 16}}, **DOCUMENTS},
    ),
    "experts": (1, {"model": EXPERTS}),
    "adapters": (1, {"lora": {"enable": True, "random_base": True, "rank": 4}}),
    "float8": (1, {"model": {"converters": ["quantize.linear.float8"]}}),
    "fsdp": (2, {"parallelism": {"data_parallel_shard_degree": 2}}),
    "tp": (2, {"parallelism": {"tensor_parallel_degree": 2}}),
    "cp": (2, {"parallelism": {"context_parallel_degree": 2}}),
    "cp, documents": (2, {"parallelism": {"context_parallel_degree": 2}, **DOCUMENTS}),
    "pp": (2, {"parallelism": {"pipeline_parallel_degree": 2}}),
    "ep": (
        2,
        {
            "model": EXPERTS,
            "parallelism": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
        },
    ),
}
PRODUCTS = {"experts": 4, "ep": 4, "adapters": 7 + 2 * 4}
"""Number of compiled linear layers per layer: attention and feed-forward, but not experts."""
APART = {"experts", "ep", "tp", "cp", "cp, documents"}
"""Settings that compile inside the recomputed region: recomputation runs the graphs again."""
BREAKS = {"cp": "SplitAttentionCore.forward", "cp, documents": "SplitAttentionCore.forward"}
"""Allowed graph breaks: the attention core of a split sequence, which communicates with other ranks."""


@dataclasses.dataclass
class Compiled:
    """Record of a step: its compiled matrix products, and the number of graphs after one and after two steps."""

    products: int
    graphs: list[int]
    breaks: list[str]
    frames: dict[str, int]


def _config(kind: str, setting: str) -> tuple[int, Config]:
    num_ranks, sections = SETTINGS[setting]
    if "model" in sections:
        overrides = {**sections["model"].get("overrides", {}), "num_layers": LAYERS}
        sections = {**sections, "model": {**sections["model"], "overrides": overrides}}
    data_ranks = sections.get("parallelism", {}).get("data_parallel_shard_degree", 1)
    config = tiny_config(
        **sections,
        training={"global_batch_size": 2 * data_ranks},
        activation_checkpoint=KINDS[kind],
        compile={"enable": True, "backend": "counted", "components": ["model"]},
    )
    if "model" in sections and sections["model"].get("name") == "mixtral":
        del config.model.overrides["ffn_dim"]  # Mixtral has only experts, with moe_ffn_dim
    linear = dataclasses.replace(config.quantize.linear.float8, emulate=True)
    quantize = dataclasses.replace(
        config.quantize, linear=dataclasses.replace(config.quantize.linear, float8=linear)
    )
    return num_ranks, dataclasses.replace(config, quantize=quantize)


def _products(graph: torch.fx.GraphModule) -> int:
    """Count linear layers of a graph and of its nested graphs, such as a recomputed region."""
    graphs = [
        module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)
    ]
    targets = [node.target for inner in graphs for node in inner.nodes]
    return targets.count(torch.nn.functional.linear) + targets.count(
        torch.ops.shardtrain.onednn_product.default
    )


def _compiled(rank: int, config: Config) -> Compiled:
    import torch._dynamo
    from torch._dynamo.utils import counters

    products_of_graphs: list[int] = []
    ran: Counter[str] = Counter()

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        products = _products(graph)
        products_of_graphs.append(products)

        def run(*arguments: Any) -> Any:
            ran.update(graphs=1, products=products)
            return graph(*arguments)

        return run

    torch._dynamo.register_backend(counted, name="counted")
    run = make_run(rank, config)
    trainer.step(run)
    graphs = [len(products_of_graphs)]
    ran.clear()
    trainer.step(run)
    graphs.append(len(products_of_graphs))
    breaks = [str(reason) for reason in counters["graph_break"]]
    # float8 products are not linear layers: one graph per layer
    is_float8 = bool(config.model.converters)
    return Compiled(
        ran["graphs" if is_float8 else "products"], graphs, breaks, dict(counters["frames"])
    )


@pytest.mark.parametrize(
    ("kind", "setting"),
    cases(
        [
            *itertools.product(KINDS, ["dense"]),
            *itertools.product(["full", "op"], ["cp", "experts"]),
            ("op", "windows"),
            ("full", "adapters"),
            ("full", "fsdp"),
            ("full, on cpu", "fsdp"),
            ("full", "tp"),
            ("full", "float8"),
            ("op", "pp"),
        ],
        nightly=itertools.product(KINDS, SETTINGS),
    ),
)
def test_entire_layer_is_compiled_with_every_kind_of_recomputation(kind: str, setting: str) -> None:
    """Every product runs in a graph, and graphs break only where allowed."""
    if setting == "float8":
        pytest.importorskip("torchao")
    products = 1 if setting == "float8" else PRODUCTS.get(setting, 7)
    recomputing = {"none": 0, "memory budget": 0, "every 2nd": 1}.get(kind, LAYERS)
    again = recomputing if setting in APART else 0
    allowed = BREAKS.get(setting)
    for compiled in run_ranks(*_arguments(kind, setting)):
        assert compiled.products == products * (LAYERS + again)
        assert compiled.graphs[0] == compiled.graphs[1] > 0  # a later step compiles nothing
        assert compiled.frames["total"] == compiled.frames["ok"]
        for reason in compiled.breaks:
            assert allowed is not None and allowed in reason, compiled.breaks


def _arguments(kind: str, setting: str) -> tuple[int, Any, Config]:
    num_ranks, config = _config(kind, setting)
    return num_ranks, _compiled, config


MESH: Any = SimpleNamespace(device=torch.device("cpu"), size=lambda *axes: 1)


class Kinds(nn.Module):
    """Layers that the compiler treats as different: each has a different constant."""

    class Layer(nn.Module):
        def __init__(self, power: int) -> None:
            super().__init__()
            self.linear, self.power = nn.Linear(4, 4), power

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x) ** self.power

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): self.Layer(i + 1) for i in range(num_layers)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _toy_config(**options: Any) -> Config:
    compiled = Compile(enable=True, backend="counted", components=["model"])
    return dataclasses.replace(
        Config(), compile=compiled, activation_checkpoint=ActivationCheckpoint(**options)
    )


def _graphs_of_kinds(rank: int, num_layers: int, config: Config, kinds: type[Kinds] = Kinds) -> int:
    import torch._dynamo

    graphs = []
    torch._dynamo.register_backend(lambda graph, _: graphs.append(graph) or graph, name="counted")
    model = kinds(num_layers)
    layout = Layout((), "layers", ())
    mesh = MESH
    activation_checkpoint.apply(model, layout, mesh, config)
    compile.apply(model, layout, mesh, config)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return len(graphs)


@pytest.mark.parametrize("options", [{"mode": "none"}, {"mode": "full"}])
def test_any_number_of_different_layers_is_compiled(options: dict[str, Any]) -> None:
    """By default, PyTorch compiles eight graphs of a function and runs the rest eagerly. T5's stacks need ten."""
    assert run_ranks(1, _graphs_of_kinds, 12, _toy_config(**options)) == [12]


class Broken(Kinds):
    """Layers with a graph break."""

    class Layer(Kinds.Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + float(x.detach().sum())


def _uncompiled_layer(rank: int, model: type[Kinds], config: Config) -> str | None:
    _graphs_of_kinds(rank, 1, config, model)
    return compile.graph_break_warning(config)


@pytest.mark.parametrize("options", [{"mode": "none"}, {"mode": "full"}])
def test_layer_with_a_graph_break_is_logged(options: dict[str, Any]) -> None:
    assert run_ranks(1, _uncompiled_layer, Kinds, _toy_config(**options)) == [None]

    (report,) = run_ranks(1, _uncompiled_layer, Broken, _toy_config(**options))
    assert report is not None
    assert report.startswith("compile.enable: ")
    assert "TORCH_LOGS=graph_breaks" in report


@pytest.mark.parametrize(
    ("pattern", "graphs"),
    [("layers.0.ffn.w1", 2), ("layers.1.ffn.w1", 2), ("layers.*.ffn.w1", 1), ("nothing", 1)],
)
def test_product_named_in_one_layer_is_recomputed_only_there(pattern: str, graphs: int) -> None:
    """Layers share a graph only if they save the same activations."""
    num_ranks, config = _config("op", "dense")
    options = dataclasses.replace(
        config.activation_checkpoint, per_op_sac_force_recompute_mm_shapes_by_fqns=[pattern]
    )
    (compiled,) = run_ranks(
        num_ranks, _compiled, dataclasses.replace(config, activation_checkpoint=options)
    )

    assert compiled.graphs == [graphs, graphs]


def _operations_in_backward(rank: int, config: Config) -> list[Counter[str]]:
    import torch._dynamo
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    backward: list[Counter[str]] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # attention is recomputed with the saved random state, an argument of the operation that sets it
        called = [
            operation for node in graph.graph.nodes for operation in (node.target, *node.args)
        ]
        names = Counter(
            getattr(operation, "__name__", "").partition(".")[0] for operation in called
        )
        backward.append(names)
        return make_boxed_func(graph.forward)

    counted = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.register_backend(counted, name="counted")
    trainer.step(make_run(rank, config))
    return backward


@pytest.mark.parametrize(
    ("kind", "products", "attention"),
    # Backward does not need the result of the last of seven products. As in eager mode, "op" saves the first and every
    # second one after it.
    [("none", [0], 0), ("full", [6], 1), ("op", [3], 0), ("every 2nd", [0, 6], 1)],
)
def test_compiled_backward_recomputes_the_operations_of_eager_recomputation(
    kind: str, products: list[int], attention: int
) -> None:
    num_ranks, config = _config(kind, "dense")
    (backward,) = run_ranks(num_ranks, _operations_in_backward, config)
    # two products for the gradients of each linear layer: input and weight
    assert sorted(names["mm"] - 2 * 7 for names in backward) == products

    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert max(names[name] for names in backward) == attention


def _offloaded_shapes(rank: int, config: Config) -> list[tuple[int, ...]]:
    moved: list[tuple[int, ...]] = []
    original = torch.autograd.graph.save_on_cpu

    class Watched(original):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: note(tensor) or pack(tensor)

    def note(tensor: Tensor) -> None:
        if tensor.is_floating_point():  # not the state of a random generator
            moved.append(tuple(tensor.shape))

    torch.autograd.graph.save_on_cpu = Watched
    trainer.step(make_run(rank, config))
    return moved


@pytest.mark.parametrize(
    "setting", cases(["dense"], nightly=["fsdp", "documents", "tp", "experts"])
)
def test_inputs_of_a_compiled_layer_are_offloaded_and_its_weights_are_not(setting: str) -> None:
    """Backward of a compiled layer also reads its weights. Moving them would copy the entire model in every step."""
    num_ranks, config = _config("full, on cpu", setting)
    config = dataclasses.replace(
        config, compile=dataclasses.replace(config.compile, backend="aot_eager")
    )

    for moved in run_ranks(num_ranks, _offloaded_shapes, config):
        assert sum(shape[-1] == SHAPE["dim"] and len(shape) == 3 for shape in moved) == LAYERS
        # two rows, or weights
        assert not [shape for shape in moved if len(shape) < 2 or shape[0] != 2]


def _warnings(rank: int, config: Config) -> list[str]:
    """Return the messages of PyTorch's logger in a step, and that of one more warning."""
    messages: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log = logging.getLogger("torch._higher_order_ops.wrap")
    listen = Listen()
    log.addHandler(listen)
    trainer.step(make_run(rank, config))
    # Other warnings of this logger must still pass.
    log.warning("another")
    return messages


def test_pytorch_warning_about_selective_recomputation_is_suppressed() -> None:
    num_ranks, config = _config("op", "dense")
    config = dataclasses.replace(
        config, compile=dataclasses.replace(config.compile, backend="aot_eager")
    )

    assert run_ranks(num_ranks, _warnings, config) == [["another"]]
