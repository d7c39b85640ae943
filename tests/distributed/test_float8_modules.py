"""Training with emulated float8 products: the mesh changes no number, and float8 changes numbers little.

A rank scales its tokens or columns of a weight separately from other ranks. Scales are powers of two, so numbers are
rounded alike, except those about 2^-14 below the largest. Sums in a different order differ by 1e-7 in float32, which
can move a number near the midpoint of two float8 values to the other value, an eighth away. That happens a few times in
about a million roundings per step, and changes a gradient of 10^4 numbers by at most 1e-3. A missing sum or a wrong
scale changes it by 1e-1.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import Result, assert_same_numbers, make_run, run_tiny, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from shardtrain.config import load
from shardtrain.config.schema import (
    Config,
    Float8GroupedMM,
    Float8Linear,
    Quantize,
    QuantizeGroupedMM,
    QuantizeLinear,
)
from shardtrain.distributed import float8_modules
from shardtrain.distributed.cpu.shared_memory import AllGather, ReduceScatter
from shardtrain.ops.float8 import Float8Linear as Module
from shardtrain.utils.errors import ConfigError

LINEAR = "quantize.linear.float8"
GROUPED = "quantize.grouped_mm.float8"
STEPS = 3


def with_float8(
    options: dict[str, Any] | None = None, experts: bool = False, **sections: dict[str, Any]
) -> Config:
    """Tiny run with float8 linear layers (except the head) and, optionally, experts."""
    converters = [LINEAR, GROUPED] if experts else [LINEAR]
    config = tiny_config(
        **{**sections, "model": {"converters": converters, **sections.get("model", {})}}
    )
    linear = Float8Linear(**{"emulate": True, "filter_fqns": ["output"], **(options or {})})
    grouped = Float8GroupedMM(fqns=["experts"] if experts else [], emulate=experts)
    quantize = Quantize(
        linear=QuantizeLinear(float8=linear), grouped_mm=QuantizeGroupedMM(float8=grouped)
    )
    return dataclasses.replace(config, quantize=quantize)


MOE = {
    "name": "qwen3_moe",
    "flavor": "debugmodel_moe",
    "overrides": {"num_experts": 4, "moe_ffn_dim": 64, "top_k": 2},
}


@functools.cache
def one_process(recipe: str, experts: bool = False) -> Result:
    sections = {"model": MOE} if experts else {}
    return run_tiny(
        1,
        with_float8({"recipe_name": recipe}, experts, training={"local_batch_size": 8}, **sections),
        STEPS,
    )[0]


MESHES = {
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "cp": (2, {"context_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
    "fsdp and tp": (4, {"tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    cases(
        [("tensorwise", "fsdp and tp"), ("rowwise", "tp"), ("rowwise_with_gw_hp", "fsdp")],
        nightly=[
            (recipe, mesh)
            for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
            for mesh in MESHES
        ],
    ),
)
def test_float8_on_a_mesh_changes_no_number(recipe, mesh):
    ranks, parallelism = MESHES[mesh]
    results = run_tiny(ranks, with_float8({"recipe_name": recipe}, parallelism=parallelism), STEPS)
    # each pipeline stage has a part of the weights
    initial: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    for stage in results:
        initial |= stage.initial
        gradients |= stage.gradients
    result = dataclasses.replace(results[0], initial=initial, gradients=gradients)

    # float8 has 3 bits of mantissa, so a float32 rounding difference may change a rounded operand
    assert_same_numbers(result, one_process(recipe), loss=1e-4, grad_norm=1e-3)
    for name, gradient in one_process(recipe).gradients.items():
        assert (result.gradients[name] - gradient).norm() <= 5e-3 * gradient.norm(), name


@pytest.mark.parametrize(
    "parallelism",
    cases(
        [{"expert_parallel_degree": 2}],
        nightly=[{}, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}],
    ),
    ids=str,
)
def test_experts_in_float8_match_one_process_on_a_mesh(parallelism):
    result = run_tiny(
        2, with_float8({"recipe_name": "rowwise"}, True, model=MOE, parallelism=parallelism), STEPS
    )[0]
    assert_same_numbers(result, one_process("rowwise", True), loss=1e-4, grad_norm=1e-3)


class Gathered(TorchDispatchMode):
    """Record the bytes of FSDP's all-gathers per dtype, and count all-reduces of maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.all_reduces = {}, 0

    def __enter__(self):
        self._patches = pytest.MonkeyPatch()
        for collective in (AllGather, ReduceScatter):
            self._patches.setattr(
                collective, "__call__", self._noting(collective, collective.__call__)
            )
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.undo()
        return super().__exit__(*error)

    def _noting(self, collective, call):
        def noting(instance, output_tensor, input_tensor, **keywords):
            if collective is AllGather:
                self.bytes[input_tensor.dtype] = (
                    self.bytes.get(input_tensor.dtype, 0) + input_tensor.nbytes
                )
            before = self.all_reduces
            call(instance, output_tensor, input_tensor, **keywords)
            self.all_reduces = before  # ignore all-reduces that serve as barriers

        return noting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all_reduces += func.namespace == "c10d" and "allreduce" in func.__name__
        return func(*args, **(kwargs or {}))


def _gather(rank: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Return loss, gradients and sent data of one pass in which FSDP frees weights after forward."""
    training = {"mixed_precision_param": "bfloat16", "global_batch_size": -1}
    run = make_run(
        rank,
        with_float8(
            options, training=training, parallelism={"fsdp_reshard_after_forward": "always"}
        ),
    )
    batch = [next(run.dataloader)]
    with Gathered() as gathered:
        loss = run.runner.forward_backward(batch, torch.tensor(1e-3))
    gradients = [
        parameter.grad.to_local().clone() for parameter in run.runner.parameters().values()
    ]
    weights = [
        weight.shard.nbytes // 4
        for weight in float8_modules.gather_in_float8(run.runner.parts, run.mesh, run.config)
    ]
    return loss, gradients, gathered.bytes, gathered.all_reduces, sum(weights), len(weights)


def test_gathering_in_float8_is_bitwise_equal_and_sends_half():
    plain = run_ranks(2, _gather, {})
    each = run_ranks(2, _gather, {"enable_fsdp_float8_all_gather": True})
    once = run_ranks(
        2,
        _gather,
        {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True},
    )

    for gathered in (each, once):
        for (loss, gradients, *_), (expected, all_expected, *_) in zip(
            gathered, plain, strict=True
        ):
            assert torch.equal(loss, expected)
            assert all(torch.equal(a, b) for a, b in zip(gradients, all_expected, strict=True))

    *_, sent, sums, _, _ = plain[0]
    *_, sent8, sums8, numbers, weights = each[0]
    # 7 linear layers in each of two layers
    assert list(sent) == [torch.bfloat16]
    assert weights == 2 * 7
    # forward and backward gather each weight of a layer once, with one byte per number instead of two
    assert sum(sent.values()) - sum(sent8.values()) == 2 * numbers
    assert sums8 - sums == 2 * weights
    assert once[0][3] - sums == 1


@functools.cache
def _curve(recipe: str | None, steps: int) -> list[float]:
    sections: dict[str, Any] = {
        "training": {"local_batch_size": 8, "mixed_precision_param": "bfloat16", "steps": steps},
        "optimizer": {"lr": 4e-3, "eps": 1e-3},
    }
    config = (
        with_float8({"recipe_name": recipe, "filter_fqns": []}, **sections)
        if recipe
        else tiny_config(**sections)
    )
    return run_tiny(1, config, steps)[0].losses


@pytest.mark.parametrize(
    ("recipe", "steps"),
    cases(
        [("tensorwise", 12)],
        nightly=[(name, 50) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")],
    ),
)
def test_loss_curve_stays_close_to_bfloat16(recipe, steps):
    """With the same model, learning rate and data, losses differ by at most 2e-2 while the model learns."""
    plain = _curve(None, steps)
    losses = _curve(recipe, steps)
    assert plain[-1] < plain[0] - steps / 40
    assert 0 < max(abs(a - b) for a, b in zip(losses, plain, strict=True)) <= 2e-2


@pytest.mark.parametrize(
    "line", ['[training]\nfp8_linear = "dynamic"', "[float8]\nenable_float8_linear = true"]
)
def test_float8_option_of_a_torchtrain_file_works(tmp_path, line):
    """Use files of torchtrain from April and July 2024, with emulation enabled on the command line."""
    (tmp_path / "run.toml").write_text(line)
    loaded = load(str(tmp_path / "run.toml"), ["--quantize.linear.float8.emulate=true"])
    sections = {
        "training": {"local_batch_size": 8},
        "model": {"converters": loaded.config.model.converters},
    }
    config = dataclasses.replace(tiny_config(**sections), quantize=loaded.config.quantize)
    losses = run_tiny(1, config, 2)[0].losses
    without_float8 = run_tiny(1, tiny_config(training={"local_batch_size": 8}), 2)[0].losses

    assert losses[1] < losses[0]
    assert losses != without_float8, "the option had no effect"


@pytest.mark.parametrize(
    "changes",
    cases(
        [{"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}],
        nightly=[{"activation_checkpoint": {"mode": "full"}}],
    ),
    ids=str,
)
def test_recomputation_with_float8_is_bitwise_equal(changes):
    result = run_tiny(
        1,
        with_float8({"recipe_name": "rowwise"}, training={"local_batch_size": 8}, **changes),
        STEPS,
    )[0]

    assert result.losses == one_process("rowwise").losses
    assert result.grad_norms == one_process("rowwise").grad_norms


def _converted(config: Config, tp: int = 1) -> list[str]:
    from shardtrain.models import build, find, shape_of

    module = find(config.model.name)
    model = build(
        module,
        shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type),
    )

    class Mesh:
        device = torch.device("cpu")

        def size(self, *axes: str) -> int:
            return tp if "tp" in axes else 1

    float8_modules.convert(model, module.LAYOUT, Mesh(), config)  # type: ignore[arg-type]
    return [path for path, submodule in model.named_modules() if isinstance(submodule, Module)]


@pytest.mark.parametrize("head", ["output", "head"])
def test_filter_accepts_names_of_torchtitan_and_of_shardtrain(head):
    assert len(_converted(with_float8({"filter_fqns": []}))) == 15
    assert "head" not in _converted(with_float8({"filter_fqns": [head]}))
    assert _converted(with_float8({"filter_fqns": ["attention", "head"]})) == [
        f"layers.{layer}.ffn.{name}" for layer in (0, 1) for name in ("w1", "w2", "w3")
    ]
    assert "layers.0.ffn.w1" not in _converted(with_float8({"filter_fqns": ["feed_forward"]}))


def test_small_layers_are_skipped_on_request():
    large = {
        "overrides": {
            "dim": 2048,
            "ffn_dim": 8192,
            "num_heads": 32,
            "head_dim": 64,
            "num_kv_heads": 8,
        }
    }
    small = {"filter_fqns": [float8_modules.SMALL]}
    tensorwise = _converted(with_float8({**small, "recipe_name": "tensorwise"}, model=large))

    # wk has only 512 output features (8 heads of 64)
    assert "layers.0.attn.wq" in tensorwise
    assert "layers.0.attn.wk" not in tensorwise

    rowwise = _converted(with_float8({**small, "recipe_name": "rowwise"}, model=large))
    assert rowwise == [f"layers.{layer}.ffn.{name}" for layer in (0, 1) for name in ("w1", "w3")]


def test_layers_with_unsupported_sizes_are_skipped_and_counted(caplog):
    config = with_float8({"filter_fqns": ["wq"]}, model={"overrides": {"ffn_dim": 136}})
    with caplog.at_level(logging.INFO):
        assert len(_converted(config)) == 7

    assert (
        "quantize.linear.float8: 7 linear layers compute in float8, tensorwise, emulated; not converted: 2 by "
        "filter_fqns, 6 with sizes that are not multiples of 16" in caplog.text
    )


@pytest.mark.parametrize(
    ("options", "tp", "fragments"),
    [
        ({"filter_fqns": ["wqq"]}, 1, ["filter_fqns", "'wqq'", "matches no module"]),
        ({"filter_fqns": ["layers", "head"]}, 1, ["leaves no linear layer", "filter less"]),
        (
            {"emulate": False},
            4,
            ["tensor_parallel_degree", "leaves each rank 8 of the 32 features of layers.0.attn.wk"],
        ),
    ],
)
def test_impossible_float8_options_are_rejected(options, tp, fragments):
    with pytest.raises(ConfigError) as refused:
        _converted(with_float8(options), tp)
    assert all(fragment in str(refused.value) for fragment in fragments), refused.value


def test_unknown_experts_are_rejected():
    config = with_float8({})
    grouped = dataclasses.replace(
        config.quantize, grouped_mm=QuantizeGroupedMM(float8=Float8GroupedMM(["experts"]))
    )
    model = dataclasses.replace(config.model, converters=[GROUPED])

    with pytest.raises(ConfigError, match="names no experts of this model"):
        _converted(dataclasses.replace(config, quantize=grouped, model=model))
