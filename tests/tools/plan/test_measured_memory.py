"""The planned peak equals that of a real run: the tensor bytes of each rank, counted in training on a CPU.

Counted in the second of two steps: weights and optimizer states, and every storage from its creation to its release,
including gradients and FSDP's buffers. With the chosen sizes, activations dominate.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hf_architectures import hf_folder
from hf_meshes import hf_tiny
from ranks import run_ranks
from tiers import cases
from tiny import make_run, tiny_config

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Model
from shardtrain.distributed.activation_memory import LiveMemory
from shardtrain.lora.quantize import quantized_linears
from shardtrain.ops import chosen_kernels
from shardtrain.ops.dtensor import local_tensor
from shardtrain.tools.plan import job_sizes, rank_memory, schedule, shapes
from shardtrain.train import resume, trainer

SIZES = {"dim": 128, "num_heads": 8, "vocab_size": 512, "num_layers": 4}
GROUPED = {**SIZES, "num_kv_heads": 4, "head_dim": 16}
LLAMA = {"name": "llama3", "flavor": "debugmodel", "overrides": {**GROUPED, "ffn_dim": 384}}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "flavor": "debugmodel",
        "overrides": {**GROUPED, "ffn_dim": 384, "tied_embeddings": True},
    },
    "qwen3_moe": {
        "flavor": "debugmodel_moe",
        "overrides": {**GROUPED, "moe_ffn_dim": 96, "num_experts": 8, "top_k": 2},
    },
    "qwen3_next": {
        "flavor": "debugmodel",
        "overrides": {
            **GROUPED,
            "linear_key_heads": 2,
            "linear_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "moe_ffn_dim": 96,
            "shared_ffn_dim": 96,
            "num_experts": 8,
            "top_k": 2,
        },
    },
    "mixtral": {
        "flavor": "debugmodel",
        "overrides": {**GROUPED, "moe_ffn_dim": 128, "num_experts": 4},
    },
    "llama4": {
        "flavor": "debugmodel",
        "overrides": {**GROUPED, "ffn_dim": 384, "moe_ffn_dim": 128, "num_experts": 4},
    },
    "gpt_oss": {
        "flavor": "debugmodel",
        "overrides": {**GROUPED, "moe_ffn_dim": 128, "num_experts": 4, "top_k": 2},
    },
    "neox": {"flavor": "debugmodel", "overrides": {**SIZES, "head_dim": 16, "ffn_dim": 512}},
    "deepseek_v3": {
        "flavor": "debugmodel",
        "overrides": {
            **SIZES,
            "ffn_dim": 384,
            "moe_ffn_dim": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    },
}
FULL = {"activation_checkpoint": {"mode": "full"}}
PER_OPERATION = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
EVERY_SECOND = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}
EIGHT_ROWS = {"training": {"local_batch_size": 8}}
LORA = {"enable": True, "random_base": True}


class Counted(LiveMemory):
    """Count the bytes of all storages created by operations: ``now``, and their maximum ``most``."""

    most = 0

    @property
    def now(self) -> int:
        return self.activations + sum(storage.nbytes() for storage in self._buffers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self.most = max(self.most, self.now)
        return result


def measured_bytes(rank: int, config: Any, kernels: rank_memory.Kernels = "cpu") -> int:
    """Return the peak bytes of a rank in the second of two steps."""
    chosen = chosen_kernels.PYTORCH
    if kernels == "cpu by rows":
        chosen = chosen_kernels.Kernels(rms_norm=2.0)
    chosen_kernels.use(chosen)
    run = make_run(rank, config)
    if config.lora.base_dtype != "training":
        resume.resume(run, Checkpoints(config))
    parameters = []
    low_bits_bytes = 0
    for part in run.runner.parts:
        parameters += part.parameters()
        low_bits_bytes += sum(module.low_bits.bytes for module in quantized_linears(part))
    counted = Counted(parameters)
    with counted:
        trainer.step(run)  # warm-up: creates the optimizer states
    counted.most = 0
    with counted:
        trainer.step(run)
    # Parameters may share memory, so count each storage once.
    bytes_of_storages = {}
    for parameter in parameters:
        storage = local_tensor(parameter).untyped_storage()
        bytes_of_storages[storage._cdata] = storage.nbytes()
    return sum(bytes_of_storages.values()) + low_bits_bytes + counted.most


def planned_bytes(config: Any, size: int, kernels: rank_memory.Kernels = "cpu") -> list[int]:
    """Return the peak of each pipeline rank."""
    model = shapes.read(config)
    sizes = job_sizes.of_config(config, size, len(model.layers), has_experts=model.has_experts)
    orders = schedule.orders(
        sizes.schedule, sizes.pp, len(sizes.stages), sizes.num_microbatches, sizes.recomputes_layers
    )
    return [memory.peak for memory in rank_memory.of_ranks(model, sizes, orders, kernels)]


def check(
    size: int,
    sections: dict[str, Any],
    model: dict[str, Any],
    most: float,
    kernels: rank_memory.Kernels = "cpu",
) -> None:
    """The planned bytes of each pipeline rank are within ``most`` of those of a real step."""
    training = {
        "seq_len": 512,
        "mixed_precision_param": "bfloat16",
        "local_batch_size": 2,
        "global_batch_size": -1,
        **sections.get("training", {}),
    }
    config = tiny_config(**{**sections, "training": training})
    config = dataclasses.replace(config, model=Model(**model))
    measured = run_ranks(size, measured_bytes, config, kernels)
    planned = planned_bytes(config, size, kernels)
    # A plan has one entry per pipeline rank, and a measurement one per rank.
    ranks_per_stage = size // len(planned)
    for stage, planned_of_stage in enumerate(planned):
        first = stage * ranks_per_stage
        measured_of_stage = max(measured[first : first + ranks_per_stage])
        assert planned_of_stage == pytest.approx(measured_of_stage, rel=most), f"stage {stage}"


def mesh(**degrees: Any) -> dict[str, Any]:
    return {"parallelism": degrees}


def piped(name: str, **degrees: Any) -> dict[str, Any]:
    ends = {
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    return {
        **mesh(pipeline_parallel_degree=2, pipeline_parallel_schedule=name, **ends, **degrees),
        **EIGHT_ROWS,
    }


@pytest.mark.parametrize(
    ("size", "sections"),
    cases(
        [(2, {}), (2, piped("1F1B"))],
        nightly=[
            (1, {}),
            (1, {"training": {"mixed_precision_param": "float32"}}),
            (1, FULL),
            (1, {"training": {"global_batch_size": 8}, **FULL}),
            (1, mesh(fsdp_reshard_after_forward="always")),
            (1, {"lora": LORA}),
            (2, {"training": {"dtype": "bfloat16"}}),
            (4, {}),
            (2, FULL),
            (2, PER_OPERATION),
            (2, EVERY_SECOND),
            (2, mesh(fsdp_reshard_after_forward="never")),
            (2, {"training": {"global_batch_size": 8}}),
            (2, {"training": {"global_batch_size": 8}, **FULL}),
            (2, mesh(data_parallel_replicate_degree=2, data_parallel_shard_degree=1)),
            (
                2,
                mesh(
                    data_parallel_replicate_degree=2,
                    data_parallel_shard_degree=1,
                    shard_optimizer_states=True,
                ),
            ),
            (4, mesh(data_parallel_replicate_degree=2)),
            (2, mesh(tensor_parallel_degree=2)),
            # This batch is large enough that the loss is computed in chunks.
            (2, {**mesh(tensor_parallel_degree=2), "training": {"local_batch_size": 16}}),
            (2, {**mesh(tensor_parallel_degree=2), **FULL}),
            (2, {**mesh(tensor_parallel_degree=2), **PER_OPERATION}),
            (4, mesh(tensor_parallel_degree=2)),
            (2, mesh(tensor_parallel_degree=2, disable_loss_parallel=True)),
            (2, mesh(context_parallel_degree=2)),
            (2, {**mesh(context_parallel_degree=2), **FULL}),
            (2, mesh(context_parallel_degree=2, context_parallel_rotate_method="alltoall")),
            (2, mesh(context_parallel_degree=2, context_parallel_method="ulysses")),
            (2, piped("GPipe")),
            (2, piped("Interleaved1F1B")),
            (2, {**piped("Interleaved1F1B"), **FULL}),
            (2, piped("LoopedBFS")),
            (2, piped("ZBVZeroBubble")),
            (2, {**piped("ZBVZeroBubble"), **FULL}),
            (2, piped("InterleavedZeroBubble")),
            (2, {**piped("InterleavedZeroBubble"), **FULL}),
            (2, piped("DualPipeV")),
            (2, {**piped("DualPipeV"), **PER_OPERATION}),
            (4, piped("1F1B", data_parallel_shard_degree=2)),
            (4, {**piped("1F1B", tensor_parallel_degree=2), **FULL}),
            (2, {"optimizer": {"name": "Muon"}}),
            (2, {"lora": LORA}),
            (2, {"lora": {**LORA, "base_dtype": "nf4"}}),
            (2, {"lora": {**LORA, "base_dtype": "int8"}}),
        ],
    ),
    ids=str,
)
def test_a_real_step_holds_the_planned_bytes_on_every_rank(size, sections):
    check(size, sections, LLAMA, 0.05)


@pytest.mark.parametrize(
    ("size", "sections"),
    cases(
        [(2, piped("1F1B"))],
        nightly=[
            (2, {**mesh(tensor_parallel_degree=2, disable_loss_parallel=True), **EIGHT_ROWS}),
            (2, {**piped("1F1B"), **FULL}),
            (2, {**piped("GPipe"), **FULL}),
            (2, {**piped("ZBVZeroBubble"), **FULL}),
        ],
    ),
    ids=str,
)
def test_a_real_step_with_a_large_vocabulary_holds_the_planned_bytes(size, sections):
    """Logits dominate the memory, so one copy more or less at any moment is detected."""
    overrides = {**LLAMA["overrides"], "vocab_size": 6000}
    sections = {**sections, "training": {**sections["training"], "seq_len": 256}}
    check(size, sections, {**LLAMA, "overrides": overrides}, 0.05)


@pytest.mark.parametrize(
    ("size", "sections", "family"),
    cases(
        [(1, {}, "llama3")],
        nightly=[
            (1, {"training": {"mixed_precision_param": "float32"}}, "llama3"),
            (1, FULL, "llama3"),
            (2, {}, "llama3"),
            (2, mesh(tensor_parallel_degree=2), "llama3"),
            (2, piped("1F1B"), "llama3"),
            (1, {}, "qwen3"),
            (2, {}, "qwen3_moe"),
            (1, {}, "deepseek_v3"),
            (1, {}, "neox"),
        ],
    ),
    ids=str,
)
def test_a_machine_with_row_wise_norms_holds_the_planned_bytes(size, sections, family):
    model = LLAMA if family == "llama3" else {"name": family, **FAMILIES[family]}
    check(size, sections, model, 0.05, "cpu by rows")


@pytest.mark.parametrize(
    ("name", "sections"),
    cases(
        [("qwen3", {})],
        nightly=[
            ("qwen3_moe", {}),
            ("qwen3_moe", mesh(expert_parallel_degree=2)),
            ("qwen3_moe", {**mesh(expert_parallel_degree=2), **FULL}),
            ("qwen3_moe", {**mesh(expert_parallel_degree=2), **PER_OPERATION}),
            ("qwen3_next", {}),
            ("qwen3_next", FULL),
            ("qwen3_next", mesh(tensor_parallel_degree=2)),
            ("qwen3_next", mesh(context_parallel_degree=2)),
            ("mixtral", mesh(expert_parallel_degree=2)),
            ("llama4", {}),
            ("gpt_oss", {}),
            ("neox", {}),
            ("deepseek_v3", {}),
            ("deepseek_v3", FULL),
        ],
    ),
    ids=str,
)
def test_a_real_step_of_every_family_holds_the_planned_bytes(name, sections):
    check(2, sections, {"name": name, **FAMILIES[name]}, 0.05)


@pytest.mark.parametrize(
    ("size", "sections", "vocab_size"),
    cases(
        [(2, {}, 512)],
        nightly=[
            (1, {}, 512),
            (1, {}, 6000),
            (2, {}, 6000),
            (4, {}, 6000),
            (2, mesh(fsdp_reshard_after_forward="always"), 6000),
            (2, mesh(fsdp_reshard_after_forward="never"), 6000),
            (2, mesh(tensor_parallel_degree=2), 6000),
            (2, piped("1F1B"), 512),
            (2, piped("1F1B"), 6000),
            (4, piped("1F1B", data_parallel_shard_degree=2), 6000),
        ],
    ),
    ids=str,
)
def test_a_real_step_with_multi_token_prediction_holds_the_planned_bytes(
    size, sections, vocab_size
):
    """With one stage, FSDP keeps the embedding and the head gathered, because two modules share each of them."""
    family = FAMILIES["deepseek_v3"]
    overrides = {**family["overrides"], "vocab_size": vocab_size, "num_nextn_predict_layers": 1}
    training = {"seq_len": 256, **sections.get("training", {})}
    model = {"name": "deepseek_v3", "flavor": family["flavor"], "overrides": overrides}
    check(size, {**sections, "training": training}, model, 0.05)


@pytest.mark.parametrize(
    ("size", "sections"), cases([(1, {})], nightly=[(2, {}), (1, FULL)]), ids=str
)
def test_a_real_step_of_experts_in_a_list_holds_the_planned_bytes(size, sections):
    """The plan counts hidden features of two experts per token, not of all eight experts in the list."""
    model = {"name": str(Path(__file__).with_name("listed_experts.py")), "flavor": "tiny"}
    check(size, sections, model, 0.05)


def test_experts_in_a_list_are_recognized():
    path = str(Path(__file__).with_name("listed_experts.py"))
    config = dataclasses.replace(tiny_config(), model=Model(name=path, flavor="tiny"))
    model = shapes.read(config)
    layer = model.layers[0]
    experts = layer.experts

    assert experts.listed
    assert (experts.count, experts.top_k, experts.ffn, experts.gated) == (8, 2, 256, True)
    assert not any("experts" in linear.path for linear in layer.linears)
    # has_experts is False for experts in a list: EP does not split them, and FSDP shards them like other weights.
    assert not model.has_experts


NETWORKS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "intermediate_size": 384,
        "sliding_window": 64,
        "layer_types": ("sliding_attention", "full_attention") * 2,
    },
    "glm4": {"intermediate_size": 384},
    "olmo2": {"intermediate_size": 384},
    # each layer with a sliding window saves its own copy of the mask
    "olmo3": {
        "intermediate_size": 384,
        "sliding_window": 64,
        "layer_types": ("sliding_attention", "full_attention") * 2,
    },
    "phi3": {"intermediate_size": 384},
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 8},
    "gpt_oss": {
        "intermediate_size": 96,
        "num_local_experts": 8,
        "layer_types": ("sliding_attention", "full_attention") * 2,
    },
}
"""Networks of ``transformers`` whose layers save more than those of this package: changed fields of config.json."""


@pytest.mark.parametrize(
    ("size", "sections", "name"),
    cases(
        [(1, {}, "gemma3")],
        nightly=[
            (1, {}, "qwen3_moe"),
            (1, {}, "gpt_oss"),
            (1, FULL, "gemma3"),
            (1, {"training": {"mixed_precision_param": "float32"}}, "gemma3"),
            (2, {}, "qwen3_moe"),
            (2, mesh(tensor_parallel_degree=2), "gemma3"),
            (2, {**mesh(tensor_parallel_degree=2), **FULL}, "gemma3"),
            (2, {**mesh(tensor_parallel_degree=2), **PER_OPERATION}, "gemma3"),
            (2, mesh(tensor_parallel_degree=2), "qwen3_moe"),
            (2, mesh(tensor_parallel_degree=2), "gpt_oss"),
            # every rank computes all heads, or all hidden features
            (2, mesh(tensor_parallel_degree=2), "phi3"),
            (2, mesh(tensor_parallel_degree=2), "olmo2"),
            (2, mesh(tensor_parallel_degree=2), "olmo3"),
            (2, mesh(tensor_parallel_degree=2), "glm4"),
            (2, mesh(expert_parallel_degree=2), "qwen3_moe"),
        ],
    ),
    ids=str,
)
def test_a_real_step_of_a_transformers_network_holds_the_planned_bytes(
    size, sections, name, tmp_path
):
    pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    training = {
        "seq_len": 512, "mixed_precision_param": "bfloat16", "local_batch_size": 2, "global_batch_size": -1
    } | sections.get("training", {})  # fmt: skip
    folder = hf_folder(name, **sizes, **NETWORKS[name])
    config = hf_tiny(folder, tmp_path, **{**sections, "training": training})
    measured = max(run_ranks(size, measured_bytes, config))
    (planned,) = planned_bytes(config, size)

    assert planned == pytest.approx(measured, rel=0.1)
