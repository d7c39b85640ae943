"""Tensor parallelism on architectures of ``transformers``: loss and gradients equal those of ``transformers``."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_architectures import ARCHITECTURES, WITHOUT_PLAN, hf_config, hf_folder, installed
from hf_meshes import first_step, hf_tiny
from ranks import run_ranks
from tiers import cases
from tiny import assert_bitwise, make_run, tiny_config, whole
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.distributed.tensor_parallel import hf_derived_plan, hf_gradients, hf_plan
from shardtrain.ops.dtensor import local_slices, local_tensor, to_full
from shardtrain.train.preflight import meta_model
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

DEFAULT = ["deepseek_v32", "qwen3_next"]
"""Latent attention and experts (deepseek_v32), convolutions and norms of heads (qwen3_next)."""
WITHOUT_SPLIT_HEAD = {"nemotron_h"}


def config_folder(name: str, path: Path, **changes: Any) -> Path:
    """Write a folder with only the config.json of an architecture."""
    config = hf_config(name, **changes)
    config.architectures = [ARCHITECTURES[name][0]]
    config.save_pretrained(path)
    return path


def config_of(folder: Path, **sections: Any) -> Config:
    """Return the tiny configuration of a folder, which starts from random weights."""
    training = {"seq_len": 32, "max_norm": 1e9, "steps": 1, "global_batch_size": 2}
    defaults = {"job": {"dump_folder": str(folder.parent / "out")}, "training": training}
    config = tiny_config(**{**defaults, **sections})
    fields = {"path": str(folder)}
    model = dataclasses.replace(
        config.model, name="transformers", flavor="folder", overrides=fields
    )
    return dataclasses.replace(config, model=model)


def tensor_parallel(folder: Path, ranks: int, **options: Any) -> Config:
    return config_of(folder, parallelism={"tensor_parallel_degree": ranks, **options})


def add_noise(parameters: dict[str, Tensor]) -> None:
    """Add noise to all weights, also to biases that start at zero. It depends only on the names."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            local_tensor(parameter).add_(noise[local_slices(parameter)])


Step = tuple[float, dict[str, Tensor], dict[str, Tensor]]
"""Loss, gradients of all parameters that have one, and initial weights."""


def sharded_step(rank: int, config: Config) -> Step:
    run = make_run(rank, config)
    initial = whole(run)
    add_noise(run.runner.parameters())
    batch = next(run.dataloader)
    loss = float(run.runner.forward_backward([batch], torch.ones(()))) / batch.num_targets
    gradients = {
        name: to_full(p.grad).clone()
        for name, p in run.runner.parameters().items()
        if p.grad is not None
    }
    return loss, gradients, initial


def transformers_step(rank: int, config: Config, name: str) -> Step:
    """Return the step of the ``transformers`` class on the same weights and rows."""
    import transformers

    run = make_run(rank, config)
    initial = whole(run)
    add_noise(run.runner.parameters())
    batch = next(run.dataloader)

    network_class = getattr(transformers, ARCHITECTURES[name][0])
    network_config = network_class.config_class.from_pretrained(config.model.overrides["path"])
    model = network_class(network_config).eval()
    weights = {path.removeprefix("hf."): weight for path, weight in whole(run).items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    # Only buffers may be missing.
    assert not {path for path, _ in model.named_parameters()} & set(missing)

    logits = model(input_ids=batch.tokens_BT).logits
    targets = batch.targets_BT.flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    loss.backward()
    gradients = {f"hf.{path}": p.grad for path, p in model.named_parameters() if p.grad is not None}
    return float(loss) / batch.num_targets, gradients, initial


def assert_equal_steps(step: Step, expected: Step) -> None:
    """Losses may differ by 1e-5 of the loss, and gradients by 1e-5 of the largest value of the same gradient."""
    loss, gradients, initial = step
    expected_loss, expected_gradients, expected_initial = expected
    assert_bitwise(initial, expected_initial)
    assert loss == pytest.approx(expected_loss, rel=1e-5)

    nonzero = {name for name, gradient in expected_gradients.items() if gradient.any()}
    assert nonzero <= gradients.keys()
    assert gradients.keys() <= expected_gradients.keys() | set(initial)
    # Some gradients, such as of biases of keys, are zero except for rounding. Those of decay rates are small
    # differences of large sums.
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name in nonzero:
        expected_gradient = expected_gradients[name]
        scale = max(floor, float(expected_gradient.abs().max()))
        torch.testing.assert_close(
            gradients[name], expected_gradient, atol=1e-5 * scale, rtol=0, msg=name
        )


def check_mesh(name: str, path: Path, ranks: int, changes: dict[str, Any], **options: Any) -> None:
    folder = config_folder(name, path / name, **changes)
    if name in WITHOUT_SPLIT_HEAD:
        options["disable_loss_parallel"] = True
    expected = run_ranks(1, transformers_step, config_of(folder), name)[0]
    degree = options.pop("degree", ranks)
    for step in run_ranks(ranks, sharded_step, tensor_parallel(folder, degree, **options)):
        assert_equal_steps(step, expected)


PLANNED = sorted(set(ARCHITECTURES) - {*WITHOUT_PLAN})


@pytest.mark.parametrize(
    "name", cases(DEFAULT, nightly=[name for name in PLANNED if name not in DEFAULT])
)
def test_two_ranks_match_transformers(name: str, tmp_path: Path) -> None:
    if name not in installed():
        pytest.skip("this version of transformers does not have it")
    check_mesh(name, tmp_path, 2, {})


def test_projection_that_a_layer_uses_without_calling_it_matches_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jamba multiplies by the weight of ``dt_proj`` itself."""
    jamba = {
        **ARCHITECTURES["qwen3_moe"][1],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    }
    monkeypatch.setitem(ARCHITECTURES, "jamba", ("JambaForCausalLM", jamba))
    check_mesh("jamba", tmp_path, 2, {})


FOUR_HEADS = {
    "llama": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gemma3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "olmo3": {},
    "deepseek_v32": {},
    "starcoder2": {"num_key_value_heads": 4},
}


@pytest.mark.nightly(
    "two ranks",
    by="tests/distributed/tensor_parallel/test_hf_plan.py::test_two_ranks_match_transformers",
)
@pytest.mark.parametrize("name", FOUR_HEADS)
def test_four_ranks_match_transformers(name: str, tmp_path: Path) -> None:
    check_mesh(name, tmp_path, 4, FOUR_HEADS[name])


ADAPTERS = {
    "phi3": {"target_modules": ["qkv_proj", "o_proj", "down_proj"]},
    "deepseek_v32": {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "qwen3_moe": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}


@pytest.mark.parametrize("name", cases(["qwen3_moe"], nightly=["phi3", "deepseek_v32"]))
def test_adapters_match_one_process(name: str, tmp_path: Path) -> None:
    folder = config_folder(name, tmp_path / name)
    lora = {"enable": True, "rank": 4, **ADAPTERS[name]}
    expected = run_ranks(1, sharded_step, config_of(folder, lora=lora))[0]
    parallelism = {"tensor_parallel_degree": 2}

    for step in run_ranks(2, sharded_step, config_of(folder, lora=lora, parallelism=parallelism)):
        assert_equal_steps(step, expected)


def problems(folder: Path, ranks: int, **options: Any) -> list[str]:
    """Return the errors that are found before ranks start."""
    errors, _ = meta_model.build(tensor_parallel(folder, ranks, **options))
    assert all(isinstance(error, ConfigError) for error in errors), errors
    assert not any("\n" in str(error) for error in errors)
    return [str(error) for error in errors]


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "message"),
    [
        (
            "gpt2",
            {},
            2,
            "requires a tensor-parallel plan, and transformers has none for GPT2LMHeadModel",
        ),
        ("llama", {}, 4, "does not divide the 2 heads of hf.model.layers.0.self_attn.k_proj"),
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
            2,
            "does not divide the 3 heads",
        ),
        (
            "llama",
            {"intermediate_size": 63},
            2,
            "does not divide the 63 output features of hf.model.layers.0.mlp.gate_proj",
        ),
    ],
)
def test_unsupported_sizes_are_refused_before_ranks_start(
    name: str, changes: dict[str, Any], ranks: int, message: str, tmp_path: Path
) -> None:
    (problem,) = problems(config_folder(name, tmp_path / "folder", **changes), ranks)
    assert message in problem


def test_plan_is_derived_from_the_usual_projections(tmp_path: Path) -> None:
    module = models.find("transformers")
    model: Any = models.build(module, module.Config(str(config_folder("opt", tmp_path / "opt"))))
    plan = hf_derived_plan.derive(model, 2)
    of_first_layer = {
        path.partition(".0.")[2]: style for path, style in plan.items() if ".0." in path
    }

    assert of_first_layer == {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
        "self_attn.out_proj": "rowwise",
        "fc1": "colwise",
        "fc2": "rowwise",
    }


def test_no_plan_is_derived_for_attention_with_other_weights(tmp_path: Path) -> None:
    """StableLM 2 12B has norm weights per head, so a rank would apply the weights of other heads."""
    (problem,) = problems(config_folder("stablelm", tmp_path / "folder", qk_layernorm=True), 2)
    assert (
        "requires a tensor-parallel plan, and transformers has none for StableLmForCausalLM"
        in problem
    )


def test_unknown_style_is_refused_by_name_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(hf_plan.STYLES, "rowwise_split_input")
    (problem,) = problems(config_folder("phi3", tmp_path / "folder"), 2)
    assert "does not support styles in the plan of" in problem
    assert "(rowwise_split_input)" in problem


def resolved(folder: Path, without: str) -> hf_plan.Resolved:
    """Resolve the plan of a folder after removing the rules whose pattern ends with ``without``."""
    module = models.find("transformers")
    model: Any = models.build(module, module.Config(str(folder)))
    plan = {
        pattern: style
        for pattern, style in model.tensor_plan.items()
        if not pattern.endswith(without)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "tensor_plan", plan)
        return hf_plan.resolve(model, tensor_parallel(folder, 2))


def test_norms_of_heads_that_a_plan_omits_are_found(tmp_path: Path) -> None:
    folder = config_folder("qwen3", tmp_path / "folder")
    assert resolved(folder, "_norm").partial == resolved(folder, "nothing").partial != {}


@pytest.mark.parametrize(
    ("name", "without", "message"),
    [
        (
            "llama",
            "o_proj",
            "hf.model.layers.0 combines activations that are split over ranks with others that are not",
        ),
        (
            "llama",
            "up_proj",
            "combines activations that are split over ranks with others that are not",
        ),
        (
            "deepseek_v32",
            "kv_a_proj_with_mqa",
            "combines activations that are split over ranks with others",
        ),
    ],
)
def test_plan_with_wrong_gradients_is_refused(
    name: str, without: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(config_folder(name, tmp_path / "folder"), without)


class Gate(nn.Module):
    """A linear layer whose output is scaled by a replicated weight, and one that is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.ones(4))
        self.down = nn.Linear(4, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.zeros(*tokens.shape, 4) + self.shift
        return self.down(self.up(x) * self.scale)


def test_gradients_are_partial_only_between_split_and_summing_modules() -> None:
    with torch.device("meta"):
        model = Gate()
    effects = {"up": hf_gradients.SPLIT, "down": hf_gradients.SUMMED}
    findings = hf_gradients.follow(model, effects, set(), set())

    assert findings == hf_gradients.Findings({"scale"}, [], is_complete=True)


def test_bfloat16_on_tensor_parallel_ranks_is_close_to_one_process(tmp_path: Path) -> None:
    """The embedding of gpt-oss is replicated, and a CPU sums the gradients of its rows in float32."""
    folder = hf_folder("gpt_oss")
    training = {"mixed_precision_param": "bfloat16"}
    one_process = hf_tiny(folder, tmp_path / "one", training=training)
    split = hf_tiny(
        folder, tmp_path / "tp", training=training, parallelism={"tensor_parallel_degree": 2}
    )
    expected = run_ranks(1, first_step, one_process)[0]

    for result in run_ranks(2, first_step, split):
        assert result.loss == pytest.approx(expected.loss, rel=1e-2)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2)
