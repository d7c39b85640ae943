"""Activation checkpointing: how often layers run, memory between forward and backward, and bitwise equal gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import SHAPE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from shardtrain.config.schema import ActivationCheckpoint, Config
from shardtrain.distributed import activation_checkpoint
from shardtrain.layout import Layout
from shardtrain.models import build, find, shape_of
from shardtrain.ops import init_weights

LAYERS = 4
MESH: Any = SimpleNamespace(device=torch.device("cpu"), size=lambda _axis: 1)
MODES = {
    "none": {"mode": "none"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "every 2nd": {"mode": "selective", "selective_ac_option": "2"},
    "every 3rd": {"mode": "selective", "selective_ac_option": "3"},
    "full": {"mode": "full"},
    "full, on cpu": {"mode": "full", "cpu_offload": True},
    "full, early stop": {"mode": "full", "early_stop": True},
}


class Watch(TorchDispatchMode):
    """Count operations, and the bytes of all results that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._alive = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage] = storage.nbytes()
        return result

    def bytes_alive(self) -> int:
        return sum(self._alive.values())


def _config(options: dict[str, Any]) -> Config:
    return dataclasses.replace(Config(), activation_checkpoint=ActivationCheckpoint(**options))


@dataclasses.dataclass
class Observations:
    layer_runs: Counter
    forward: Counter
    total: Counter
    bytes_between: int
    gradients: dict[str, Tensor]


def _model() -> tuple[Any, nn.Module]:
    module = find("llama3")
    shape = shape_of(module, "debugmodel", SHAPE, "rmsnorm")
    names = [name for name, _ in build(module, shape).named_parameters()]
    draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, LAYERS)
    model = module.Model(shape)
    for name, parameter in model.named_parameters():
        init_weights.draw_(parameter, name, draws[name], 0)
    return module, model


def _watch(options: dict[str, Any]) -> Observations:
    module, model = _model()
    activation_checkpoint.apply(model, module.LAYOUT, MESH, _config(options))
    runs: Counter[str] = Counter()
    for name, layer in model.layers.items():
        layer.attn.core.register_forward_hook(lambda *_, name=name: runs.update([name]))
    tokens = torch.arange(64).view(2, 32)
    with Watch() as watch:
        logits = model(tokens, torch.arange(32).expand(2, -1))
        forward = watch.operations.copy()
        between = watch.bytes_alive()
        (logits.square().sum() * 1e-3).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Observations(runs, forward, watch.operations, between, gradients)


@pytest.fixture(scope="module")
def observed() -> dict[str, Observations]:
    return {name: _watch(options) for name, options in MODES.items()}


@pytest.mark.parametrize(
    ("mode", "runs"),
    [
        ("none", [1, 1, 1, 1]),
        ("full", [2, 2, 2, 2]),
        ("full, on cpu", [2, 2, 2, 2]),
        ("full, early stop", [2, 2, 2, 2]),
        ("every 2nd", [2, 1, 2, 1]),
        ("every 3rd", [2, 1, 1, 2]),
        ("op", [2, 2, 2, 2]),  # each layer's forward runs again, except for saved operations
    ],
)
def test_layers_run_again_in_backward_as_configured(mode: str, runs: list[int], observed) -> None:
    assert [observed[mode].layer_runs[str(i)] for i in range(LAYERS)] == runs


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_equal(mode: str, observed) -> None:
    for name, gradient in observed["none"].gradients.items():
        assert torch.equal(observed[mode].gradients[name], gradient), name


def test_less_memory_is_kept_between_forward_and_backward(observed) -> None:
    bytes_kept = {mode: observed[mode].bytes_between for mode in MODES}
    assert bytes_kept["none"] > bytes_kept["every 2nd"] > bytes_kept["full"]
    assert bytes_kept["none"] > bytes_kept["op"] > bytes_kept["full"]
    assert bytes_kept["full"] < 0.5 * bytes_kept["none"]


def _recomputed(observed: dict[str, Observations], mode: str, operation: str) -> int:
    """Return how often an operation ran in backward, in addition to the calls that backward itself needs."""
    in_backward = observed[mode].total[operation] - observed[mode].forward[operation]
    return in_backward - (observed["none"].total[operation] - observed["none"].forward[operation])


def _attention(observed: dict[str, Observations]) -> str:
    (name,) = (op for op in observed["none"].forward if "scaled_dot_product" in op)
    return name


def test_full_runs_every_matmul_and_attention_again(observed) -> None:
    # q, k, v, o, three of the feed-forward, and the head
    assert observed["none"].forward["mm"] == 7 * LAYERS + 1
    assert _recomputed(observed, "full", "mm") == 7 * LAYERS
    assert _recomputed(observed, "full", _attention(observed)) == LAYERS
    assert _recomputed(observed, "every 2nd", "mm") == 7 * LAYERS // 2


def test_op_runs_every_second_matmul_again_and_no_attention(observed) -> None:
    # every second of seven is saved, beginning with the first
    assert _recomputed(observed, "op", "mm") == 3 * LAYERS
    assert _recomputed(observed, "op", _attention(observed)) == 0


def test_op_recomputes_named_matmuls(observed) -> None:
    forced = {**MODES["op"], "per_op_sac_force_recompute_mm_shapes_by_fqns": ["layers.*.ffn.w1"]}
    observed = {**observed, "forced": _watch(forced)}
    # w1 and w3 have the same shape, so both are recomputed, as is every second of the other five
    assert _recomputed(observed, "forced", "mm") == (2 + 2) * LAYERS
    assert torch.equal(
        observed["forced"].gradients["embed.weight"], observed["none"].gradients["embed.weight"]
    )


def test_linear_with_bias_is_named_by_the_shape_of_its_weight() -> None:
    """Its matmul is a different operation (addmm), in which the weight is not the second argument."""

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Sequential(
                nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()
            )
            self.layers = nn.ModuleDict({"0": layer})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["0"](x)

    counts = {}
    for pattern in ("layers.0.9", "layers.0.0", "2"):
        torch.manual_seed(0)
        model = Toy()
        options = {**MODES["op"], "per_op_sac_force_recompute_mm_shapes_by_fqns": [pattern]}
        activation_checkpoint.apply(model, Layout((), "layers", ()), MESH, _config(options))
        with Watch() as watch:
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        counts[pattern] = watch.operations["addmm"]

    # Three run in forward. Backward repeats the second of three, or the named one and the second of
    # the others.
    assert counts == {"layers.0.9": 3 + 1, "layers.0.0": 3 + 2, "2": 3 + 2}


def test_inputs_are_offloaded_to_the_host_only_if_configured(monkeypatch) -> None:
    opened = []
    original = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(
        torch.autograd.graph, "save_on_cpu", lambda **k: opened.append(k) or original(**k)
    )
    _watch(MODES["full"])

    assert opened == []

    _watch({**MODES["every 2nd"], "cpu_offload": True})
    # one per recomputed layer; pinned memory needs an accelerator
    assert opened == [{"pin_memory": False}] * 2


@pytest.mark.parametrize("mode", MODES)
def test_names_never_change(mode: str) -> None:
    module, model = _model()
    before = list(model.state_dict())
    activation_checkpoint.apply(model, module.LAYOUT, MESH, _config(MODES[mode]))

    assert list(model.state_dict()) == before
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in _model()[1].named_modules()
    ]


def test_memory_budget_configures_the_compiler_and_wraps_no_layers(monkeypatch) -> None:
    import torch._functorch.config as compiler

    module, model = _model()
    forwards = [layer.forward for layer in model.layers.values()]
    with compiler.patch(activation_memory_budget=1.0):
        activation_checkpoint.apply(
            model, module.LAYOUT, MESH, _config({"mode": "memory_budget", "memory_budget": 0.25})
        )
        assert compiler.activation_memory_budget == 0.25

    assert [layer.forward for layer in model.layers.values()] == forwards


@pytest.mark.parametrize(
    ("path", "pattern", "named"),
    [
        ("layers.0.moe.router.gate", "moe.router.gate", True),
        ("layers.0.moe.router.gate", "layers.*.moe.router.gate", True),
        ("layers.0.moe.router.gate", "gate", True),
        ("layers.0.moe.router.gate", "router", False),
        ("layers.0.attn.investigate", "gate", False),
    ],
)
def test_pattern_matches_the_end_of_a_path(path: str, pattern: str, named: bool) -> None:
    assert activation_checkpoint._names(path, pattern) is named
