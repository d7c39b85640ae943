"""``comm.mode="fake_backend"``: one process reports the memory of a rank of any world, without training."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from tiny import deep_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardtrain import cli, models
from shardtrain.distributed import build, fake_backend, parallelize
from shardtrain.distributed.activation_memory import LiveMemory
from shardtrain.layout import Draw
from shardtrain.ops import cross_entropy
from shardtrain.train import dry_run

ROOT = Path(__file__).parents[2]
FLOAT32_BYTES = 4
ANYWHERE = [
    "--comm.mode",
    "fake_backend",
    "--model.hf_assets_path",
    "bytes",
    "--training.dataset_path",
    str(ROOT),
]


def dry(config, rank=0, size=1):
    with fake_backend.join(rank, size) as here:
        return dry_run.build(config, here)


def answer(capsys, *arguments):
    code = cli.main(("train", *arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NGPU", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_shards_of_all_ranks_add_up_to_the_model():
    config = deep_config(
        parallelism={"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 4}
    )
    runs = [dry(config, rank, 8) for rank in range(8)]
    assert sum(run.parameter_bytes for run in runs) == FLOAT32_BYTES * runs[0].num_params
    # gradients of several micro-batches are accumulated unsharded, and reduced to shards once
    assert [run.gradient_bytes for run in runs] == [4 * run.parameter_bytes for run in runs]


@pytest.mark.nightly(
    "a single axis",
    by="tests/train/test_fake_backend.py::test_shards_of_all_ranks_add_up_to_the_model",
)
def test_tensor_parallelism_replicates_norms_and_splits_other_weights():
    config = deep_config(parallelism={"tensor_parallel_degree": 2})
    runs = [dry(config, rank, 8) for rank in range(8)]
    norms = (2 * 4 + 1) * 64  # two in each of 4 layers and the last one, with 64 features
    assert sum(run.parameter_bytes for run in runs) == FLOAT32_BYTES * (runs[0].num_params + norms)


def test_adamw_has_two_numbers_per_weight_and_a_count_per_tensor():
    run = dry(deep_config(), rank=3, size=4)
    tensors = 4 * 9 + 3
    assert run.optimizer_bytes == 2 * run.parameter_bytes + FLOAT32_BYTES * tensors


def test_replicas_have_equal_memory_and_optionally_split_optimizer_states():
    replicas = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
    replicated = dry(deep_config(parallelism=replicas), size=4)
    shared = dry(deep_config(parallelism={**replicas, "shard_optimizer_states": True}), size=4)

    assert (
        replicated.parameter_bytes
        == shared.parameter_bytes
        == FLOAT32_BYTES * replicated.num_params
    )
    assert shared.optimizer_bytes < replicated.optimizer_bytes / 3


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("rank", [0, 31])
def test_all_axes_together_are_built_and_traced(rank, schedule):
    degrees = {
        "pipeline_parallel_degree": 2,
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 2,
        "context_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    run = dry(deep_config(parallelism=degrees, training={"global_batch_size": 16}), rank, 32)

    assert run.sizes == {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    assert run.place["pp"] == (rank > 15)
    assert (run.traced.layers, run.traced.not_traced) == (2, "")
    assert run.traced.activations_bytes > 0

    # With a V-shaped schedule, the first rank has the first and the last stage.
    text = "\n".join(run.stages)
    has_last_stage = rank == (0 if schedule == "ZBVZeroBubble" else 31)
    assert ("embed" in text) == (rank == 0)
    assert ("head" in text) == has_last_stage


@pytest.mark.parametrize(
    "method",
    [{"context_parallel_rotate_method": "alltoall"}, {"context_parallel_method": "ulysses"}],
)
def test_every_way_to_split_a_sequence_is_traced(method):
    run = dry(deep_config(parallelism={"context_parallel_degree": 2, **method}), rank=1, size=4)
    assert run.traced.not_traced == ""
    assert run.traced.layers == 4


def test_micro_batch_has_no_memory_and_is_not_counted_as_activation(monkeypatch):
    """A batch with memory would be counted as an activation when autograd saves its first view."""
    batches = []
    trace = fake_backend.trace

    def watched(runner, layout, mesh, config, batch):
        batches.append(batch)
        return trace(runner, layout, mesh, config, batch)

    monkeypatch.setattr(fake_backend, "trace", watched)
    dry(deep_config(parallelism={"tensor_parallel_degree": 2}), size=2)
    (batch,) = batches

    assert [type(tensor) for tensor in vars(batch).values() if isinstance(tensor, torch.Tensor)][
        :1
    ] == [FakeTensor]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("tp", [1, 2])
def test_skipped_layers_are_counted_as_if_traced(monkeypatch, mode, tp):
    """Results agree to 0.1 %, because loss scalars have other lifetimes, and to 1 % with FSDP, which pads buffers."""
    shape = {"num_layers": 10}
    config = deep_config(
        model={"overrides": shape},
        activation_checkpoint={"mode": mode},
        parallelism={"tensor_parallel_degree": tp, "fsdp_reshard_after_forward": "always"},
    )
    few_layers = dry(config, size=4)
    monkeypatch.setattr(fake_backend, "LAYERS_OF_A_KIND", 10)
    everything = dry(config, size=4)

    assert few_layers.traced.layers_traced == (4 if mode == "selective" else 2)
    assert everything.traced.layers_traced == 10
    assert few_layers.traced.activations_bytes == pytest.approx(
        everything.traced.activations_bytes, rel=1e-3
    )
    assert few_layers.traced.gathered_bytes == pytest.approx(
        everything.traced.gathered_bytes, rel=1e-2
    )


@pytest.mark.parametrize("mode", ["none", "full"])
def test_copies_of_skipped_layers_are_counted_as_if_traced(monkeypatch, mode):
    config = deep_config(
        model={"overrides": {"num_layers": 10}},
        activation_checkpoint={"mode": mode},
        training={"mixed_precision_param": "bfloat16"},
    )
    few_layers = dry(config)
    monkeypatch.setattr(fake_backend, "LAYERS_OF_A_KIND", 10)
    everything = dry(config)

    assert (few_layers.traced.layers_traced, everything.traced.layers_traced) == (2, 10)
    # plus the temporary float32 gradient of the head
    assert (
        few_layers.traced.gathered_bytes
        == everything.traced.gathered_bytes
        == 2 * few_layers.num_params + 4 * 512 * 64
    )
    # without recomputation, 128 KiB more, as with FSDP on one process: a float32 copy of the embedding
    assert (
        0
        <= few_layers.traced.activations_bytes - everything.traced.activations_bytes
        <= 4 * 512 * 64 + 1024
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_skipped_chunks_of_the_loss_are_counted_as_if_traced(monkeypatch, tp):
    # a few tokens per chunk, about forty chunks
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", 1000)
    config = deep_config(
        parallelism={"tensor_parallel_degree": tp, "data_parallel_shard_degree": 2}
    )
    chunk_counts = []

    def chunks(num_tokens, rows):
        parts = original(num_tokens, rows)
        chunk_counts.append(len(parts))
        return parts

    original = cross_entropy._chunks
    monkeypatch.setattr(cross_entropy, "_chunks", chunks)
    few = dry(config, size=2 * tp).traced
    monkeypatch.setattr(cross_entropy, "few_chunks", contextlib.nullcontext)
    all_of_them = dry(config, size=2 * tp).traced

    assert chunk_counts[0] == 2 < chunk_counts[1]
    assert few.gathered_bytes == all_of_them.gathered_bytes
    # The two may differ by a scalar of the loss, a few bytes.
    assert few.activations_bytes == pytest.approx(all_of_them.activations_bytes, rel=1e-5)


def test_fake_tensors_are_counted_like_real_ones():
    config = deep_config(training={"mixed_precision_param": "bfloat16"})
    without_memory = dry(config).traced
    module = models.find("llama3")
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, "rmsnorm")
    with fake_backend.join(0, 1) as here:
        mesh = build(config, here)
        runner = parallelize(
            models.build(module, shape), module.LAYOUT, mesh, config, shape.vocab_size
        )
        runner.materialize({name: Draw("zeros") for name in runner.parameters()}, 0)
        real = fake_backend.trace(runner, module.LAYOUT, mesh, config, dry_run._micro_batch(config))

    # real kernels allocate a few scratch tensors
    assert without_memory.activations_bytes == pytest.approx(real.activations_bytes, rel=0.01)
    assert without_memory.layers_traced == real.layers_traced


def test_bytes_alive_count_results_that_are_still_referenced():
    with FakeTensorMode():
        existing = torch.empty(1000)
        with LiveMemory([]) as memory:
            result = existing.exp()
            existing.view(10, 100)
            assert memory.activations == 4000
            dropped = result.double()
            assert memory.activations == 12000
            del dropped

    assert (memory.activations, memory.most_activations, memory.gathered) == (4000, 12000, 0)


@pytest.mark.parametrize(
    ("schedule", "rank", "in_flight"),
    [("1F1B", 0, 4), ("1F1B", 3, 1), ("GPipe", 0, 8), ("GPipe", 3, 8)],
)
def test_pipeline_keeps_the_micro_batches_in_flight_of_its_schedule(schedule, rank, in_flight):
    degrees = {
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    run = dry(deep_config(parallelism=degrees), rank, 4)

    assert run.traced.most_in_flight == in_flight


@pytest.mark.nightly(
    "at full size",
    by="tests/train/test_fake_backend.py::test_all_axes_together_are_built_and_traced",
)
@pytest.mark.nightly(
    "at full size",
    by="tests/train/test_fake_backend.py::test_all_axes_together_are_built_and_traced",
)
def test_configuration_of_405b_on_512_ranks_is_checked_in_seconds_without_files(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("RANK", "511")
    monkeypatch.chdir(tmp_path)
    degrees = ["--parallelism.pipeline_parallel_degree", "8", "--training.local_batch_size", "8"]
    config = str(ROOT / "configs/llama3_405b.toml")
    code, out, err = answer(capsys, config, "--nproc", "512", *ANYWHERE, *degrees)

    assert (code, err) == (0, "")
    assert "rank 511 of 512" in out
    assert "nothing is trained, read or written" in out
    assert "405.85B parameters\nmesh: 512 ranks, pp 8 x dp_shard 8 x tp 8" in out
    assert (
        "8 sequences x 1 accumulation x 8 data ranks = 64 sequences x 8192 = 524288 tokens per step"
        in out
    )
    assert "stage of this rank: layers.111 to 125, norm, head" in out
    assert "2 of 15 layers traced" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 4096])
def test_worlds_of_one_and_of_thousands_are_built(capsys, size):
    arguments = [
        "--nproc",
        str(size),
        *ANYWHERE,
        "--training.seq_len",
        "64",
        "--compile.enable",
        "true",
    ]
    code, out, _ = answer(capsys, str(ROOT / "configs/debug.toml"), *arguments)

    assert code == 0
    assert f"rank 0 of {size}" in out
    assert "note: compile.enable=true: a dry run does not compile" in out


def test_buffers_of_experts_have_no_memory_with_selective_recomputation(monkeypatch):
    """FSDP's hooks of experts run outside of the mode that counts operations, which once disabled fake tensors."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    allocate = DefaultAllocMixin.allocate
    buffers = []

    def noted(*arguments, **keywords):
        buffers.append(allocate(*arguments, **keywords))
        return buffers[-1]

    monkeypatch.setattr(DefaultAllocMixin, "allocate", noted)
    config = deep_config(
        model={
            "name": "qwen3_moe",
            "flavor": "debugmodel_moe",
            "overrides": {"moe_ffn_dim": 32, "num_experts": 4, "top_k": 2},
        },
        activation_checkpoint={"mode": "selective", "selective_ac_option": "op"},
        training={"seq_len": 32},
    )
    dry(config, size=8)  # two ranks per expert

    assert len(buffers) > 10
    assert all(isinstance(tensor, FakeTensor) for tensor in buffers)


def test_experts_are_traced_with_equal_load():
    config = deep_config(
        model={
            "name": "qwen3_moe",
            "flavor": "debugmodel_moe",
            "overrides": {"moe_ffn_dim": 32, "num_experts": 8},
        },
        parallelism={"expert_parallel_degree": 4},
    )
    run = dry(config, size=8)

    assert run.traced.not_traced == ""
    assert run.traced.activations_bytes > 0


def test_untraceable_configuration_is_reported():
    config = deep_config(
        model={
            "name": "qwen3_moe",
            "flavor": "debugmodel_moe",
            "overrides": {"moe_ffn_dim": 32, "num_experts": 8},
        },
        training={
            "mixed_precision_param": "float16"
        },  # a loop over experts, with data-dependent numbers of rows
    )
    run = dry(config, size=2)

    assert "shapes depend on data" in run.traced.not_traced
    assert any("activations: not traced" in line for line in dry_run.report(run, config))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--parallelism.tensor_parallel_degree", "3"], "tensor_parallel_degree=3"),
        (["--parallelism.data_parallel_shard_degree", "3"], "data_parallel_shard_degree=3"),
        (["--training.global_batch_size", "12"], "training.global_batch_size=12"),
        (["--training.steps", "0"], "training.steps=0"),
        (["--comm.mode", "local_tensor"], "comm.mode"),
    ],
)
def test_invalid_configuration_fails_as_in_a_run(capsys, arguments, fragment):
    code, out, err = answer(capsys, "--nproc", "8", *ANYWHERE, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[2]: ")
    assert fragment in err


def test_device_missing_on_this_machine_is_accepted(capsys):
    assert (
        answer(
            capsys,
            "--nproc",
            "8",
            *ANYWHERE,
            "--training.device",
            "cuda",
            "--training.seq_len",
            "64",
        )[0]
        == 0
    )


@pytest.mark.parametrize(
    ("names", "fragment"),
    [
        ({"RANK": "8"}, 'RANK="8" is not a rank of a world of 8; use 0 to 7'),
        ({"RANK": "first"}, "is not a rank"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "start it without torchrun"),
    ],
)
def test_invalid_environment_is_rejected(capsys, monkeypatch, names, fragment):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    code, out, err = answer(capsys, "--nproc", "8", *ANYWHERE)
    assert (code, out) == (2, "")
    assert fragment in err
