"""QK-clip: its factors equal a plain float64 computation, and no mesh changes a number.

The reference computes all logits of a head at once with a mask, in float64, and multiplies queries and keys by hand.
Queries and keys come from the model's own modules in float64, which other tests compare with transformers.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import Result, assert_bitwise, make_run, run_tiny, tiny_config, train_whole
from torch import Tensor

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.distributed import qk_clip
from shardtrain.layout import matches
from shardtrain.ops.attention_logits import max_attention_logits
from shardtrain.ops.dtensor import to_full
from shardtrain.train import trainer
from shardtrain.train.preflight import meta_model
from shardtrain.utils.errors import ConfigError

STEPS = 3
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "llama3": ({}, 0.03),
    "qwen2": ({}, 0.03),
    "mistral": ({"sliding_window": 7}, 0.03),
    "neox": ({"num_heads": 4, "num_kv_heads": None, "init_std": None}, 0.03),
    "gpt_oss": ({"sliding_window": 7, "moe_ffn_dim": 32, "num_experts": 4, "top_k": 4}, 0.03),
    "deepseek_v3": (
        {
            "num_dense_layers": 2,
            "kv_lora_rank": 12,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "init_std": 0.1,
        },
        0.03,
    ),
}
"""Model -> fields of its shape, and a threshold that some heads exceed."""


def clipped(threshold: float, **sections: Any) -> Config:
    optimizer = {"name": "Muon", "lr": 1e-2, "eps": 1e-3, "qk_clip_threshold": threshold}
    return tiny_config(optimizer=optimizer, **sections)


def reference_logits(config: Config, weights: dict[str, Tensor], batches: list[Any]) -> dict:
    """Return the largest logit of each head by the path of its attention module, in float64."""
    module, shape = models.configured(config.model)
    model = models.build(module, shape).to_empty(device="cpu").double()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    largest: dict[str, Tensor] = {}

    def is_visible(window: int, documents_T: Tensor | None, query: int, key: int) -> bool:
        if key > query or (window != 0 and query - key >= window):
            return False
        return documents_T is None or bool(documents_T[query] == documents_T[key])

    def measure(path: str, core: Any, inputs: Any) -> None:
        q, k, _, documents = inputs[:4]
        k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
        logits = torch.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(q.size(-1))
        places = range(q.size(1))
        for row in range(q.size(0)):
            documents_T = None if documents is None else documents[row]
            for query, key in itertools.product(places, places):
                if not is_visible(core.window, documents_T, query, key):
                    logits[row, :, query, key] = -torch.inf
        of_batch = logits.amax(dim=(0, 2, 3))
        largest[path] = torch.maximum(largest.get(path, of_batch), of_batch)

    for path, core in model.named_modules():
        if matches(path, module.LAYOUT.context):
            core.register_forward_pre_hook(functools.partial(measure, path.rpartition(".")[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    return largest


def recorded_steps(rank: int, config: Config) -> list[dict[str, Any]]:
    """Train some steps. Return the weights before and after each update and clip, and the batches."""
    run = make_run(rank, config)
    steps: list[dict[str, Any]] = []

    def weights() -> dict[str, Tensor]:
        parameters = run.runner.parameters().items()
        return {name: to_full(parameter.detach()).clone() for name, parameter in parameters}

    run_forward = run.runner.forward_backward
    clip = run.runner.model_parts.qk_clip
    assert clip is not None
    scale = clip.clip

    def forward_backward(batches: list[Any], weight: Tensor) -> Tensor:
        steps.append({"start": weights(), "batches": batches})
        return run_forward(batches, weight)

    def scale_recorded(parameters: Any) -> None:
        steps[-1]["updated"] = weights()
        scale(parameters)
        steps[-1]["clipped"] = weights()
        steps[-1]["measures"] = clip.measures()

    run.runner.forward_backward = forward_backward  # type: ignore[method-assign]
    clip.clip = scale_recorded  # type: ignore[method-assign]
    for _ in range(STEPS):
        trainer.step(run)
    return steps


def clipped_config(name: str, has_documents: bool) -> Config:
    """Return a tiny configuration of a family, without the fields that its model does not have."""
    fields, threshold = MODELS[name]
    module = models.find(name)
    known_fields = module.Config.__dataclass_fields__
    overrides = {}
    for field, value in {**tiny_config().model.overrides, **fields}.items():
        if field in known_fields and value is not None:
            overrides[field] = value
    flavor = "debugmodel" if "debugmodel" in module.FLAVORS else next(iter(module.FLAVORS))
    model = replace(tiny_config().model, name=name, flavor=flavor, overrides=overrides)
    sections: dict[str, Any] = {"training": {"seq_len": 24}}
    if has_documents:
        sections["data"] = {"document_mask": True}
    return replace(clipped(threshold, **sections), model=model)


@pytest.mark.parametrize("has_documents", cases([True], nightly=[False]))
@pytest.mark.parametrize(
    "name", cases(["llama3", "deepseek_v3"], nightly=["qwen2", "mistral", "neox", "gpt_oss"])
)
def test_factors_equal_the_paper_in_float64(name: str, has_documents: bool) -> None:
    _, threshold = MODELS[name]
    config = clipped_config(name, has_documents)
    _, shape = models.configured(config.model)
    groups = getattr(shape, "num_kv_heads", shape.num_heads)
    heads = shape.num_heads // groups

    (steps,) = run_ranks(1, recorded_steps, config)
    num_clipped = 0
    for step in steps:
        largest = reference_logits(config, step["start"], step["batches"])
        expected = dict(step["updated"])
        for path, largest_N in largest.items():
            for group, largest_of_group in enumerate(largest_N.view(groups, -1).amax(1).tolist()):
                if largest_of_group <= threshold:
                    continue
                num_clipped += 1
                factor = threshold / largest_of_group
                if name == "deepseek_v3":
                    scale_latent(expected, path, group, shape, factor)
                    continue
                # queries and keys share the factor: each is scaled by its root
                for head in range(group * heads, (group + 1) * heads):
                    scale_rows(expected, f"{path}.wq", head * 16, 16, factor**0.5)
                scale_rows(expected, f"{path}.wk", group * 16, 16, factor**0.5)

        # logits in float32 differ from the reference in float64 by rounding
        for parameter, weight in expected.items():
            torch.testing.assert_close(
                step["clipped"][parameter], weight, rtol=2e-5, atol=0, msg=parameter
            )
        exact = max(float(largest_N.max()) for largest_N in largest.values())
        assert step["measures"]["max_attention_logit"] == pytest.approx(exact, rel=1e-4)

    # Some heads exceed the threshold, and some do not.
    num_heads = STEPS * groups * shape.num_layers
    assert 0 < num_clipped < num_heads, (num_clipped, num_heads)


def scale_rows(weights: dict[str, Tensor], layer: str, start: int, count: int, factor: float):
    for name in (f"{layer}.weight", f"{layer}.bias"):
        if name in weights:
            weights[name] = weights[name].clone()
            weights[name][start : start + count] *= factor


def scale_latent(weights: dict[str, Tensor], path: str, head: int, shape: Any, factor: float):
    nope, rope, value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
    start = head * (nope + rope)
    scale_rows(weights, f"{path}.wq_b", start, nope, factor**0.5)
    scale_rows(weights, f"{path}.wq_b", start + nope, rope, factor)
    scale_rows(weights, f"{path}.wkv_b", head * (nope + value), nope, factor**0.5)


THRESHOLD = 0.02
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (1, {}),
    "fsdp 2": (2, {}),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "cp 2 ring": (
        2,
        {"context_parallel_degree": 2, "context_parallel_rotate_method": "alltoall"},
    ),
    "cp 2 ulysses": (2, {"context_parallel_degree": 2, "context_parallel_method": "ulysses"}),
    "zero-1 2": (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
    "fsdp 2 x tp 2": (4, {"tensor_parallel_degree": 2}),
    "cp 2 x tp 2": (4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
}


@functools.cache
def one_process() -> Result:
    return run_tiny(1, clipped(THRESHOLD, training={"local_batch_size": 8}), STEPS)[0]


def assert_same_weights(result: Result, expected: Result) -> None:
    for name, weight in result.final.items():
        torch.testing.assert_close(weight, expected.final[name], atol=2e-6, rtol=0, msg=name)


def test_clipping_changes_the_weights() -> None:
    unclipped = run_tiny(1, clipped(0.0, training={"local_batch_size": 8}), STEPS)[0]
    name = "layers.1.attn.wq.weight"
    assert one_process().final[name].norm() < 0.9 * unclipped.final[name].norm()


@pytest.mark.parametrize(
    "name",
    cases(
        ["accumulation", "tp 2", "cp 2"],
        nightly=[name for name in MESHES if name not in ("accumulation", "tp 2", "cp 2")],
    ),
)
def test_meshes_change_no_number(name: str) -> None:
    num_ranks, parallelism = MESHES[name]
    data = {"document_mask": True} if "ring" in name else {}
    expected = one_process()
    if data:
        config = clipped(THRESHOLD, training={"local_batch_size": 8}, data=data)
        expected = run_tiny(1, config, STEPS)[0]
    results = run_tiny(num_ranks, clipped(THRESHOLD, parallelism=parallelism, data=data), STEPS)

    for result in results:
        assert_bitwise(result.final, results[0].final)
        assert_same_weights(result, expected)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpoint": {"mode": "full"}},
    "op": {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        "training": {"local_batch_size": 8},
    },
    "compiled": {"compile": {"enable": True, "backend": "aot_eager"}},
    "compiled and recomputed": {
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": {"mode": "full"},
    },
}


@pytest.mark.parametrize(
    "name", cases(["op"], nightly=[name for name in RECOMPUTED if name != "op"])
)
def test_recomputation_and_the_compiler_change_no_number(name: str) -> None:
    (result,) = run_tiny(1, clipped(THRESHOLD, **RECOMPUTED[name]), STEPS)
    assert_same_weights(result, one_process())


@pytest.mark.parametrize("degree", cases([2], nightly=[]))
def test_each_pipeline_stage_clips_its_layers(degree: int) -> None:
    config = clipped(THRESHOLD, parallelism={"pipeline_parallel_degree": degree})
    for result in run_tiny(degree, config, STEPS):
        assert_same_weights(result, one_process())


@pytest.mark.nightly("four ranks with latent attention and two depths")
def test_latent_attention_and_prediction_layers_are_clipped_on_meshes() -> None:
    fields = {**tiny_config().model.overrides, **MODELS["deepseek_v3"][0]}
    for unknown in ("num_kv_heads", "head_dim"):
        fields.pop(unknown)
    fields |= {"num_nextn_predict_layers": 1, "num_dense_layers": 3}
    model = replace(tiny_config().model, name="deepseek_v3", flavor="debugmodel", overrides=fields)
    training = {"local_batch_size": 8}
    (expected,) = run_tiny(1, replace(clipped(0.02, training=training), model=model), STEPS)
    (unclipped,) = run_tiny(1, replace(clipped(0.0, training=training), model=model), STEPS)
    name = "mtp_layers.2.attn.wq_b.weight"

    assert expected.final[name].norm() < 0.9 * unclipped.final[name].norm()

    for parallelism in (
        {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
    ):
        config = replace(clipped(0.02, parallelism=parallelism), model=model)
        for result in run_tiny(4, config, STEPS):
            assert_same_weights(result, expected)


@pytest.mark.nightly(
    "the clip has no state",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_run_resumes_bitwise(tmp_path) -> None:
    def config(folder: str) -> Config:
        return clipped(
            THRESHOLD,
            job={"dump_folder": str(tmp_path / folder)},
            training={"steps": 4},
            checkpoint={"enable": True, "interval": 2},
        )

    straight = run_ranks(2, train_whole, config("straight"))
    run_ranks(2, train_whole, config("cut"), 3)
    for resumed, uninterrupted in zip(
        run_ranks(2, train_whole, config("cut")), straight, strict=True
    ):
        assert resumed.error is None
        assert resumed.losses == uninterrupted.losses[2:]
        assert_bitwise(resumed.weights, uninterrupted.weights)


def test_logits_in_blocks_equal_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 4, 8, generator=generator)
    k = torch.randn(2, 9, 2, 8, generator=generator)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
    in_one_block = max_attention_logits(q, k, documents, 3, 0.5)
    monkeypatch.setattr("shardtrain.ops.attention_logits._MAX_NUMEL", 1)

    assert torch.equal(max_attention_logits(q, k, documents, 3, 0.5), in_one_block)

    # the query of token 8 is in document 2, which began at token 7
    of_last_query = max_attention_logits(q[:1, -1:], k[:1], documents[:1], 3, 0.5)
    scaled_query = q[0, -1].view(2, 2, 8) * 0.5
    visible_keys = k[0, 7:].permute(1, 2, 0)
    expected = (scaled_query @ visible_keys).amax(-1).flatten()
    torch.testing.assert_close(of_last_query, expected)


def test_models_that_normalize_queries_and_keys_are_rejected() -> None:
    model = replace(tiny_config().model, name="qwen3", flavor="debugmodel", overrides={})
    errors, _ = meta_model.build(replace(clipped(1.0), model=model))
    assert "optimizer.qk_clip_threshold has no effect on a model that normalizes" in str(errors[0])


def test_own_attention_without_powers_is_rejected() -> None:
    module, shape = models.configured(tiny_config().model)
    model = models.build(module, shape)
    qk_clip.check(model, module.LAYOUT)

    with pytest.raises(ConfigError, match="LAYOUT.context of the model does not name"):
        qk_clip.check(model, replace(module.LAYOUT, context=""))

    for layer in model.layers.values():
        layer.attn = torch.nn.Sequential()
        layer.attn.core = torch.nn.Identity()

    with pytest.raises(ConfigError, match=r"requires the method qk_clip_powers of layers\.0\.attn"):
        qk_clip.check(model, module.LAYOUT)
