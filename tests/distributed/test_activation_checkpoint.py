"""Laws of recomputation: how often each layer runs, what is kept in between, and gradients equal to the bit."""

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
MESH: Any = SimpleNamespace(device=torch.device("cpu"))
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
    """Counts operations, and the bytes of all results that are still alive."""

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
class Seen:
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


def _watch(options: dict[str, Any]) -> Seen:
    module, model = _model()
    activation_checkpoint.apply(model, module.LAYOUT, MESH, _config(options))
    runs: Counter[str] = Counter()
    for name, layer in model.layers.items():
        layer.attn.core.register_forward_hook(lambda *_, name=name: runs.update([name]))
    tokens = torch.arange(64).view(2, 32)
    with Watch() as watch:
        logits = model(tokens, torch.arange(32).expand(2, -1))
        forward, between = watch.operations.copy(), watch.bytes_alive()
        (logits.square().sum() * 1e-3).backward()
    return Seen(runs, forward, watch.operations, between, {n: p.grad for n, p in model.named_parameters()})


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
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
        ("op", [2, 2, 2, 2]),  # each layer's forward runs again, but its kept operations do not
    ],
)
def test_layers_run_again_in_backward_as_asked(mode: str, runs: list[int], seen) -> None:
    assert [seen[mode].layer_runs[str(i)] for i in range(LAYERS)] == runs


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_equal_to_the_bit(mode: str, seen) -> None:
    for name, gradient in seen["none"].gradients.items():
        assert torch.equal(seen[mode].gradients[name], gradient), name


def test_less_is_kept_between_forward_and_backward(seen) -> None:
    kept = {mode: seen[mode].bytes_between for mode in MODES}
    assert kept["none"] > kept["every 2nd"] > kept["full"]
    assert kept["none"] > kept["op"] > kept["full"]
    assert kept["full"] < 0.5 * kept["none"]


def _recomputed(seen: dict[str, Seen], mode: str, operation: str) -> int:
    """How often an operation ran in backward beyond what backward itself needs."""
    in_backward = seen[mode].total[operation] - seen[mode].forward[operation]
    return in_backward - (seen["none"].total[operation] - seen["none"].forward[operation])


def _attention(seen: dict[str, Seen]) -> str:
    (name,) = (op for op in seen["none"].forward if "scaled_dot_product" in op)
    return name


def test_full_runs_every_matmul_and_attention_again(seen) -> None:
    assert seen["none"].forward["mm"] == 7 * LAYERS + 1  # q k v o, three of the feed-forward; the head
    assert _recomputed(seen, "full", "mm") == 7 * LAYERS
    assert _recomputed(seen, "full", _attention(seen)) == LAYERS
    assert _recomputed(seen, "every 2nd", "mm") == 7 * LAYERS // 2


def test_op_runs_every_second_matmul_again_and_no_attention(seen) -> None:
    assert _recomputed(seen, "op", "mm") == 3 * LAYERS  # the first of seven is kept, and every other one
    assert _recomputed(seen, "op", _attention(seen)) == 0


def test_op_recomputes_the_matmuls_that_are_named(seen) -> None:
    forced = {**MODES["op"], "per_op_sac_force_recompute_mm_shapes_by_fqns": ["layers.*.ffn.w1"]}
    seen = {**seen, "forced": _watch(forced)}
    # w1 and w3 have one shape, so both; of the other five every second
    assert _recomputed(seen, "forced", "mm") == (2 + 2) * LAYERS
    assert torch.equal(seen["forced"].gradients["embed.weight"], seen["none"].gradients["embed.weight"])


def test_a_linear_with_bias_is_named_by_the_shape_of_its_weight() -> None:
    """Its matmul is another operation (addmm), whose weight is not its second argument."""

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
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
    # three in forward. Again: the second of three; the named one and, of the two others, the second
    assert counts == {"layers.0.9": 3 + 1, "layers.0.0": 3 + 2, "2": 3 + 2}


def test_inputs_are_kept_in_host_memory_only_when_asked(monkeypatch) -> None:
    opened = []
    original = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda **k: opened.append(k) or original(**k))
    _watch(MODES["full"])
    assert opened == []
    _watch({**MODES["every 2nd"], "cpu_offload": True})
    assert opened == [{"pin_memory": False}] * 2  # one per recomputed layer; pinning needs an accelerator


@pytest.mark.parametrize("mode", MODES)
def test_names_never_change(mode: str) -> None:
    module, model = _model()
    before = list(model.state_dict())
    activation_checkpoint.apply(model, module.LAYOUT, MESH, _config(MODES[mode]))
    assert list(model.state_dict()) == before
    assert [name for name, _ in model.named_modules()] == [name for name, _ in _model()[1].named_modules()]


def test_a_memory_budget_is_the_compilers_and_leaves_layers_alone(monkeypatch) -> None:
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
def test_a_pattern_names_the_end_of_a_path(path: str, pattern: str, named: bool) -> None:
    assert activation_checkpoint._names(path, pattern) is named
