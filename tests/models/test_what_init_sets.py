"""Anything that ``__init__`` of a model file sets is kept in training, or the model is rejected.

Each entry of ``REJECTED`` and ``KEPT`` adds a line to ``__init__`` of the feed-forward module ("mlp") or of the model
("model"). ``REJECTED`` has the expected error, and ``KEPT`` has an equivalent model without that line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.test_external_model import config_of, write
from tiers import cases
from tiny import assert_same_numbers, run_tiny

from shardtrain.models import build, find
from shardtrain.utils.errors import ConfigError

MLP = "self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)"
MODEL = "self.out = nn.Linear(c.dim, c.vocab_size, bias=False)"
FORWARD = "self.down(F.gelu(self.up(x)))"
UP = "blocks.*.mlp.up"
PLACES = {"mlp": MLP, "model": MODEL}
BUFFERS = (
    'context="blocks.*.attn.core"',
    'context="blocks.*.attn.core", buffers=("blocks.*.mlp.b",)',
)


def with_line(place: str, line: str) -> list[tuple[str, str]]:
    old = PLACES[place]
    return [
        (old, f"{old}\n        {line}"),
        ("from torch import nn\n", "import torch\nfrom torch import nn\n"),
    ]


SETS = f"__init__ sets values of parameter {UP}.weight (with {{}}), but initial() overwrites them"
HOOK = f"__init__ registers a hook on the gradient of parameter {UP}.weight, which its shards would lose"
STATE_DICT = f"__init__ registers a hook of state_dict or load_state_dict on {UP}, but checkpoints call neither"
COMPUTED = f"{UP} computes its weight from other parameters"
SHARED = "parameters tokens.weight and out.weight share memory, but would be separate in training"
ALIAS = "the model stores parameter tokens.weight as the plain attribute w"
REJECTED = {
    # hooks
    "hook": ("mlp", "self.up.weight.register_hook(lambda g: 2 * g)", HOOK),
    "hook after accumulation": (
        "mlp",
        "self.up.weight.register_post_accumulate_grad_hook(print)",
        HOOK,
    ),
    "state dict hook": (
        "mlp",
        "self.up.register_state_dict_post_hook(lambda *_: None)",
        STATE_DICT,
    ),
    "state dict pre-hook": ("mlp", "self.up.register_state_dict_pre_hook(print)", STATE_DICT),
    "load hook": ("mlp", "self.up.register_load_state_dict_post_hook(print)", STATE_DICT),
    "load pre-hook": ("mlp", "self.up.register_load_state_dict_pre_hook(print)", STATE_DICT),
    # values of parameters
    "data.fill_": ("mlp", "self.up.weight.data.fill_(3.0)", SETS.format("fill_")),
    "data": ("mlp", "self.up.weight.data = torch.zeros(4 * dim, dim)", SETS.format("data")),
    "copy_": (
        "mlp",
        "self.up.weight.detach().copy_(torch.eye(4 * dim, dim))",
        SETS.format("copy_"),
    ),
    "mul_": ("mlp", "self.up.weight.data.mul_(2)", SETS.format("mul_")),
    "slice": ("mlp", "self.up.weight.data[0] = 0", SETS.format("an assignment to a slice")),
    "normal_": ("mlp", "nn.init.normal_(self.up.weight, std=3.0)", SETS.format("normal_")),
    "trunc_normal_": ("mlp", "nn.init.trunc_normal_(self.up.weight)", SETS.format("trunc_normal_")),
    "orthogonal_": ("mlp", "nn.init.orthogonal_(self.up.weight)", SETS.format("orthogonal_")),
    "constant_": ("mlp", "nn.init.constant_(self.up.weight, 1.0)", SETS.format("constant_")),
    "apply": (
        "model",
        "self.apply(lambda m: nn.init.ones_(m.weight) if type(m) is nn.Embedding else None)",
        "__init__ sets values of parameter tokens.weight (with fill_)",
    ),
    "attribute": (
        "mlp",
        "self.up.weight.scale = 0.5",
        f"__init__ sets the attribute scale of parameter {UP}.weight, which its shards would lose",
    ),
    # weights that are computed, or that have no shape
    "weight norm": ("mlp", "nn.utils.parametrizations.weight_norm(self.up)", COMPUTED),
    "weight norm by hook": ("mlp", "nn.utils.weight_norm(self.up)", COMPUTED),
    "spectral norm": ("mlp", "nn.utils.parametrizations.spectral_norm(self.up)", COMPUTED),
    "spectral norm by hook": ("mlp", "nn.utils.spectral_norm(self.up)", COMPUTED),
    "orthogonal": ("mlp", "nn.utils.parametrizations.orthogonal(self.up)", COMPUTED),
    "lazy": (
        "mlp",
        "self.up = nn.LazyLinear(4 * dim)",
        f"parameter {UP}.weight has no shape; set its sizes",
    ),
    # tensors under several names
    "alias": ("model", "object.__setattr__(self, 'w', self.tokens.weight)", ALIAS),
    "alias in a list": ("model", "self.w = [self.tokens.weight]", ALIAS),
    "shared Parameter": (
        "model",
        "self.out.weight = nn.Parameter(self.tokens.weight.data)",
        SHARED,
    ),
    "shared slice": ("model", "self.out.weight = nn.Parameter(self.tokens.weight[1:])", SHARED),
    "shared data": ("model", "self.out.weight.data = self.tokens.weight.data", SHARED),
    # buffers and plain tensors
    "buffer": (
        "mlp",
        "self.register_buffer('b', torch.ones(3))",
        "buffer blocks.*.mlp.b would lose its values",
    ),
    "buffer of ones that is saved": (
        "mlp",
        "self.register_buffer('b', torch.ones(3))",
        "buffer blocks.*.mlp.b in LAYOUT.buffers must start at zero, but __init__ sets it with ones",
    ),
    "tensor": (
        "mlp",
        "self.b = torch.arange(3)",
        "blocks.*.mlp stores a tensor as b, which would lose its values",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_settings_that_training_would_lose_are_rejected(name: str, tmp_path: Path) -> None:
    place, line, message = REJECTED[name]
    changes = [*with_line(place, line), *([BUFFERS] if "saved" in name else [])]
    module = find(write(tmp_path, *changes))

    with pytest.raises(ConfigError) as error:
        build(module, module.Config())
    assert message in str(error.value)


DOUBLED = (FORWARD, FORWARD.replace("(x)", "(2 * x)"))
GRADIENT = """
class Double(torch.autograd.Function):
    forward = staticmethod(lambda _, x: x.clone())
    backward = staticmethod(lambda _, gradient: 2 * gradient)


class Mlp("""
KEPT = {
    # module, line added to its __init__, and changes of the file with the same effect
    "forward pre-hook": (
        "mlp",
        "self.up.register_forward_pre_hook(lambda m, x: 2 * x[0])",
        [DOUBLED],
    ),
    "forward pre-hook with keywords": (
        "mlp",
        "self.up.register_forward_pre_hook(lambda m, x, k: ((2 * x[0],), k), with_kwargs=True)",
        [DOUBLED],
    ),
    "forward hook": (
        "mlp",
        "self.down.register_forward_hook(lambda m, x, y: 2 * y)",
        [(FORWARD, f"2 * {FORWARD}")],
    ),
    "backward hook of a module": (
        "mlp",
        "self.up.register_full_backward_hook(lambda m, given, _: (2 * given[0],))",
        [
            ("class Mlp(", GRADIENT.lstrip()),
            (FORWARD, FORWARD.replace("(x)", "(Double.apply(x))")),
            ("from torch import nn\n", "import torch\nfrom torch import nn\n"),
        ],
    ),
    "slices of one tensor without common elements": (
        "mlp",
        "w = torch.empty(8 * dim, dim); self.up.weight = nn.Parameter(w[: 4 * dim]); "
        "self.down.weight = nn.Parameter(w[4 * dim :].view(dim, 4 * dim))",
        [],
    ),
    "a parameter of other numbers than torch.empty": (
        "mlp",
        "self.up.bias = nn.Parameter(torch.ones(4 * dim))",
        [],
    ),
    "a layer of PyTorch reset": ("mlp", "self.up.reset_parameters()", []),
    "a buffer of zeros": ("mlp", "self.register_buffer('b', torch.zeros(3))", [BUFFERS]),
}
MESHES = {"one process": (1, {}), "fsdp": (2, {}), "tp": (2, {"tensor_parallel_degree": 2})}
DEFAULT = [(name, "one process") for name in KEPT] + [("forward pre-hook with keywords", "tp")]
NIGHTLY = [(name, mesh) for name in KEPT for mesh in ("fsdp", "tp") if (name, mesh) not in DEFAULT]


@pytest.mark.parametrize(("name", "mesh"), cases(DEFAULT, nightly=NIGHTLY))
def test_accepted_settings_take_effect_in_training(name: str, mesh: str, tmp_path: Path) -> None:
    """The reference is the same model on one process, with the effect of the line written into forward."""
    place, line, same = KEPT[name]
    extra = [BUFFERS] if "buffer" in name else []
    plain = write(tmp_path, *(change for change in same if change not in extra), name="plain.py")
    one = {"local_batch_size": 8}
    expected = run_tiny(1, config_of(plain, training=one), steps=3)[0]

    path = write(tmp_path, *with_line(place, line), *extra)
    num_ranks, degrees = MESHES[mesh]
    training = one if num_ranks == 1 else {}

    for result in run_tiny(
        num_ranks, config_of(path, parallelism=degrees, training=training), steps=3
    ):
        assert_same_numbers(result, expected)


@pytest.mark.parametrize("mesh", cases(["one process", "tp"], nightly=["fsdp"]))
@pytest.mark.parametrize(
    ("part", "frozen"), [("self.up", ["weight", "bias"]), ("self.up.bias", ["bias"])]
)
def test_frozen_part_keeps_its_initial_values(
    part: str, frozen: list[str], mesh: str, tmp_path: Path
) -> None:
    path = write(tmp_path, *with_line("mlp", f"{part}.requires_grad_(False)"))
    num_ranks, degrees = MESHES[mesh]
    result = run_tiny(num_ranks, config_of(path, parallelism=degrees), steps=2)[0]

    for name in ("weight", "bias"):
        parameter = f"blocks.0.mlp.up.{name}"
        is_unchanged = torch.equal(result.initial[parameter], result.final[parameter])
        assert is_unchanged == (name in frozen), name
