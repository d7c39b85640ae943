"""Training with emulated MX linear layers: the mesh changes no number, and MX changes numbers little.

Blocks contain 32 numbers along the summed dimension: features of a rank's part of a weight, or tokens. The runs here
split both at multiples of 32, so ranks use the scales of one process. Only the order of float32 sums differs, which can
round single numbers to the neighboring float8 value (see test_float8_modules.py).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import pytest
import torch
from tiers import cases
from tiny import Result, assert_same_numbers, run_tiny, tiny_config

from shardtrain import models
from shardtrain.config import load
from shardtrain.config.schema import Config, MXLinear
from shardtrain.distributed import float8_modules
from shardtrain.ops import microscaling
from shardtrain.utils.errors import ConfigError

STEPS = 3
OVERRIDES = {"num_kv_heads": 4}  # half of the keys' features are 32
TRAINING = {"seq_len": 128, "local_batch_size": 8}


def with_mx(options: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """Tiny run with MX linear layers, except the head."""
    model = {"converters": [float8_modules.MX], **sections.get("model", {})}
    model["overrides"] = {**OVERRIDES, **model.get("overrides", {})}
    config = tiny_config(**{**sections, "model": model})
    mx = MXLinear(**{"recipe_name": "mxfp8_emulated", **(options or {})})
    linear = dataclasses.replace(config.quantize.linear, mx=mx)
    return dataclasses.replace(config, quantize=dataclasses.replace(config.quantize, linear=linear))


@functools.cache
def one_process() -> Result:
    return run_tiny(1, with_mx(training=TRAINING), STEPS)[0]


MESHES = {
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "cp": (2, {"context_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
    "fsdp and tp": (4, {"tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize("mesh", cases(["tp", "cp"], nightly=MESHES))
def test_mx_on_a_mesh_changes_no_number(mesh):
    ranks, parallelism = MESHES[mesh]
    training = {**TRAINING, "local_batch_size": 2}
    results = run_tiny(ranks, with_mx(training=training, parallelism=parallelism), STEPS)
    # each pipeline stage has a part of the weights
    initial: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    for stage in results:
        initial |= stage.initial
        gradients |= stage.gradients
    result = dataclasses.replace(results[0], initial=initial, gradients=gradients)

    # float8 has 3 bits of mantissa, so a float32 rounding difference may change a rounded operand
    assert_same_numbers(result, one_process(), loss=1e-4, grad_norm=1e-3)
    for name, gradient in one_process().gradients.items():
        assert (result.gradients[name] - gradient).norm() <= 5e-3 * gradient.norm(), name


@pytest.mark.parametrize(
    "changes",
    cases(
        [{"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}],
        nightly=[{"activation_checkpoint": {"mode": "full"}}],
    ),
    ids=str,
)
def test_recomputation_with_mx_is_bitwise_equal(changes):
    result = run_tiny(1, with_mx(training=TRAINING, **changes), STEPS)[0]
    assert result.losses == one_process().losses
    assert result.grad_norms == one_process().grad_norms


@pytest.mark.nightly("the compiler", by="tests/distributed/test_float8_mx.py::test_mx_is_one_graph")
def test_compilation_changes_no_number_of_mx():
    result = run_tiny(1, with_mx(training=TRAINING, compile={"enable": True}), STEPS)[0]
    assert_same_numbers(result, one_process(), loss=1e-4, grad_norm=1e-3)


def test_mx_is_one_graph():
    """Rounding, its random bits and its backward are traced into one graph by a backend that generates no code."""
    layer = torch.nn.Linear(64, 48)
    microscaling.convert(layer, "mxfp8_emulated")
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = layer(x)
    plain.sum().backward()
    expected = x.grad
    x.grad = None
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    out.sum().backward()

    assert torch.equal(out, plain)
    assert torch.equal(x.grad, expected)


@functools.cache
def _curve(rule: str, steps: int) -> list[float]:
    sections: dict[str, Any] = {
        "training": {"local_batch_size": 8, "mixed_precision_param": "bfloat16", "steps": steps},
        "optimizer": {"lr": 4e-3, "eps": 1e-3},
    }
    model = {"overrides": OVERRIDES}
    config = with_mx(**sections) if rule else tiny_config(model=model, **sections)
    return run_tiny(1, config, steps)[0].losses


@pytest.mark.parametrize(
    ("rule", "apart", "steps"),
    cases([("rceil", 2e-2, 12)], nightly=[("rceil", 2e-2, 50), ("floor", 3e-2, 50)]),
)
def test_loss_curve_stays_close_to_bfloat16(monkeypatch, rule, apart, steps):
    """With the same model, learning rate and data, losses differ by at most 2e-2 during training, as with float8.

    The difference is larger with ``floor``, which clips up to an eighth of the largest number of a block.
    """
    monkeypatch.setitem(microscaling.RECIPES, "mxfp8_emulated", (rule, True))
    plain = _curve("", steps)
    losses = _curve(rule, steps)

    assert plain[-1] < plain[0] - steps / 40
    assert 0 < max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= apart


def test_file_of_torchtitan_trains_in_mx(tmp_path):
    """Uses torchtitan's converter, section and name of the head, with emulation enabled on the command line."""
    lines = '[model]\nconverters = ["quantize.linear.mx"]\n[quantize.linear.mx]\nrecipe_name = "mxfp8_cublas_rceil"\n'
    (tmp_path / "run.toml").write_text(
        lines + 'filter_fqns = ["output"]\nmxfp8_dim1_cast_kernel_choice = "cuda"\n'
    )
    loaded = load(str(tmp_path / "run.toml"), ["--quantize.linear.mx.recipe_name=mxfp8_emulated"])
    sections = {
        "training": {"local_batch_size": 8},
        "model": {"converters": loaded.config.model.converters},
    }
    config = dataclasses.replace(tiny_config(**sections), quantize=loaded.config.quantize)
    losses = run_tiny(1, config, 2)[0].losses

    assert losses[1] < losses[0]
    assert losses != run_tiny(1, tiny_config(training={"local_batch_size": 8}), 2)[0].losses


def _model(config: Config) -> tuple[torch.nn.Module, Any]:
    module = models.find(config.model.name)
    shape = models.shape_of(
        module, config.model.flavor, config.model.overrides, config.model.norm_type
    )
    return models.build(module, shape), module.LAYOUT


def _converted(config: Config, tp: int = 1) -> list[str]:
    model, layout = _model(config)

    class Mesh:
        device = torch.device("cpu")

        def size(self, *axes: str) -> int:
            return tp if "tp" in axes else 1

    float8_modules.convert(model, layout, Mesh(), config)  # type: ignore[arg-type]
    return [
        path for path, module in model.named_modules() if isinstance(module, microscaling.MXLinear)
    ]


def test_head_is_skipped_unless_requested_by_either_name(caplog):
    with caplog.at_level(logging.INFO):
        assert len(_converted(with_mx())) == 14
    expected = "quantize.linear.mx: 14 linear layers compute in MX, mxfp8_emulated; not converted: 1 by filter"

    assert expected in caplog.text
    assert len(_converted(with_mx({"filter_fqns": []}))) == 15
    assert "head" not in _converted(with_mx({"filter_fqns": ["head"]}))
    assert _converted(with_mx({"filter_fqns": ["attention", "head"]})) == [
        f"layers.{layer}.ffn.{name}" for layer in (0, 1) for name in ("w1", "w2", "w3")
    ]


def test_default_filter_may_match_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    float8_modules.check(model, with_mx())
    with pytest.raises(ConfigError, match="contains 'head', which matches no module of this model"):
        float8_modules.check(model, with_mx({"filter_fqns": ["head"]}))


@pytest.mark.parametrize(
    ("options", "tp", "fragments"),
    [
        (
            {"filter_fqns": ["wqq"]},
            1,
            ["quantize.linear.mx.filter_fqns", "'wqq'", "matches no module"],
        ),
        (
            {"filter_fqns": ["layers", "head"]},
            1,
            ["leaves no linear layer to compute in MX", "'quantize.linear.mx'"],
        ),
        (
            {},
            4,
            [
                "tensor_parallel_degree",
                "leaves each rank 16 of the 64 features",
                "not a multiple of 32",
                "add 'wq'",
            ],
        ),
    ],
)
def test_impossible_mx_options_are_rejected(options, tp, fragments):
    config = with_mx(options, parallelism={"tensor_parallel_degree": tp})
    for refuse in (
        lambda: _converted(config, tp),
        lambda: float8_modules.check(_model(config)[0], config),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert all(fragment in str(refused.value) for fragment in fragments), refused.value


class _Gpu:
    device = torch.device("cuda")

    def size(self, *axes: str) -> int:
        return 1


@pytest.mark.parametrize("recipe", ["mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"])
@pytest.mark.parametrize(
    ("capability", "hip"), [((9, 0), None), ((10, 0), None), ((12, 0), None), ((9, 5), "7.0")]
)
def test_gpu_without_mx_products_is_rejected(monkeypatch, recipe, capability, hip):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    config = with_mx({"recipe_name": recipe})
    model, layout = _model(config)
    if recipe == "mxfp8_emulated" or (capability >= (10, 0) and not hip):
        float8_modules.convert(model, layout, _Gpu(), config)  # type: ignore[arg-type]
        return

    with pytest.raises(ConfigError) as refused:
        float8_modules.convert(model, layout, _Gpu(), config)  # type: ignore[arg-type]
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    assert "needs MXFP8 matmuls (CUDA capability 10.0 or higher), which A GPU" in message
