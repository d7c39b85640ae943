"""Laws of ``comm.mode="fake_backend"``: one process says what a rank of any world would hold, and trains nothing."""

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
ANYWHERE = ["--comm.mode", "fake_backend", "--model.hf_assets_path", "bytes", "--training.dataset_path", str(ROOT)]


def dry(config, rank=0, size=1):
    with fake_backend.join(rank, size) as here:
        return dry_run.build(config, here)


def answer(capsys, *words):
    code = cli.main(("train", *words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NGPU", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_the_shards_of_all_ranks_are_the_model_once():
    config = deep_config(parallelism={"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 4})
    runs = [dry(config, rank, 8) for rank in range(8)]
    assert sum(run.parameter_bytes for run in runs) == FLOAT32_BYTES * runs[0].num_params
    # those of several micro-batches are added up whole, and reduced to shards once
    assert [run.gradient_bytes for run in runs] == [4 * run.parameter_bytes for run in runs]


@pytest.mark.nightly(
    "one axis alone",
    by="tests/train/test_fake_backend.py::test_the_shards_of_all_ranks_are_the_model_once",
)
def test_tensor_parallelism_repeats_the_norms_and_splits_all_else():
    config = deep_config(parallelism={"tensor_parallel_degree": 2})
    runs = [dry(config, rank, 8) for rank in range(8)]
    norms = (2 * 4 + 1) * 64  # two in each of 4 layers and the last, of 64 features
    assert sum(run.parameter_bytes for run in runs) == FLOAT32_BYTES * (runs[0].num_params + norms)


def test_adamw_holds_two_numbers_for_each_of_the_ranks_and_a_count_for_each_tensor():
    run = dry(deep_config(), rank=3, size=4)
    tensors = 4 * 9 + 3
    assert run.optimizer_bytes == 2 * run.parameter_bytes + FLOAT32_BYTES * tensors


def test_replicas_hold_the_same_and_share_optimizer_states_where_asked():
    replicas = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
    whole = dry(deep_config(parallelism=replicas), size=4)
    shared = dry(deep_config(parallelism={**replicas, "shard_optimizer_states": True}), size=4)
    assert whole.parameter_bytes == shared.parameter_bytes == FLOAT32_BYTES * whole.num_params
    assert shared.optimizer_bytes < whole.optimizer_bytes / 3


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("rank", [0, 31])
def test_all_axes_at_once_are_built_and_traced(rank, schedule):
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
    text = "\n".join(run.stages)
    first, last = ("embed" in text, "head" in text)
    assert (first, last) == (
        (True, True)
        if schedule == "ZBVZeroBubble" and rank == 0
        else ((False, False) if schedule == "ZBVZeroBubble" else (rank == 0, rank == 31))
    )


@pytest.mark.parametrize(
    "method", [{"context_parallel_rotate_method": "alltoall"}, {"context_parallel_method": "ulysses"}]
)
def test_every_way_to_split_a_sequence_is_traced(method):
    run = dry(deep_config(parallelism={"context_parallel_degree": 2, **method}), rank=1, size=4)
    assert run.traced.not_traced == "" and run.traced.layers == 4


def test_the_micro_batch_has_no_memory_and_counts_as_no_activation(monkeypatch):
    """A real batch would be counted when its first view is saved, and grow the result with its size."""
    batches = []
    trace = fake_backend.trace

    def watched(runner, layout, mesh, config, batch, hidden_size):
        batches.append(batch)
        return trace(runner, layout, mesh, config, batch, hidden_size)

    monkeypatch.setattr(fake_backend, "trace", watched)
    dry(deep_config(parallelism={"tensor_parallel_degree": 2}), size=2)
    (batch,) = batches
    assert [type(tensor) for tensor in vars(batch).values() if isinstance(tensor, torch.Tensor)][:1] == [FakeTensor]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_left_out_count_as_much_as_they_would(monkeypatch, mode, tp):
    """To a thousandth, for scalars of the loss are made earlier or later; FSDP pads its buffers by unit: a percent."""
    shape = {"num_layers": 10}
    config = deep_config(
        model={"overrides": shape},
        activation_checkpoint={"mode": mode},
        parallelism={"tensor_parallel_degree": tp, "fsdp_reshard_after_forward": "always"},
    )
    some = dry(config, size=4)
    monkeypatch.setattr(fake_backend, "LAYERS_OF_A_KIND", 10)
    everything = dry(config, size=4)
    assert some.traced.layers_traced == (4 if mode == "selective" else 2) and everything.traced.layers_traced == 10
    assert some.traced.activations_bytes == pytest.approx(everything.traced.activations_bytes, rel=1e-3)
    assert some.traced.gathered_bytes == pytest.approx(everything.traced.gathered_bytes, rel=1e-2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_copies_of_layers_left_out_count_as_much_as_they_would(monkeypatch, mode):
    config = deep_config(
        model={"overrides": {"num_layers": 10}},
        activation_checkpoint={"mode": mode},
        training={"mixed_precision_param": "bfloat16"},
    )
    some = dry(config)
    monkeypatch.setattr(fake_backend, "LAYERS_OF_A_KIND", 10)
    everything = dry(config)
    assert (some.traced.layers_traced, everything.traced.layers_traced) == (2, 10)
    # and for a moment the float32 gradient of the head
    assert some.traced.gathered_bytes == everything.traced.gathered_bytes == 2 * some.num_params + 4 * 512 * 64
    # 128 KiB more where nothing is recomputed, as with FSDP on one process: a float32 table of the embedding's size
    assert 0 <= some.traced.activations_bytes - everything.traced.activations_bytes <= 4 * 512 * 64 + 1024


@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_of_the_loss_left_out_count_as_much_as_they_would(monkeypatch, tp):
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", 1000)  # a few tokens a chunk, some forty chunks
    config = deep_config(parallelism={"tensor_parallel_degree": tp, "data_parallel_shard_degree": 2})
    seen = []

    def chunks(num_tokens, rows):
        seen.append(len(parts := kept(num_tokens, rows)))
        return parts

    kept = cross_entropy._chunks
    monkeypatch.setattr(cross_entropy, "_chunks", chunks)
    few = dry(config, size=2 * tp).traced
    monkeypatch.setattr(cross_entropy, "few_chunks", contextlib.nullcontext)
    all_of_them = dry(config, size=2 * tp).traced
    assert seen[0] == 2 < seen[1]
    assert few.gathered_bytes == all_of_them.gathered_bytes
    assert few.activations_bytes == pytest.approx(all_of_them.activations_bytes, rel=1e-5)  # a scalar of the loss


def test_tensors_without_memory_count_as_real_ones():
    config = deep_config(training={"mixed_precision_param": "bfloat16"})
    without_memory = dry(config).traced
    module = models.find("llama3")
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, "rmsnorm")
    with fake_backend.join(0, 1) as here:
        mesh = build(config, here)
        runner = parallelize(models.build(module, shape), module.LAYOUT, mesh, config, shape.vocab_size)
        runner.materialize({name: Draw("zeros") for name in runner.parameters()}, 0)
        real = fake_backend.trace(runner, module.LAYOUT, mesh, config, dry_run._micro_batch(config), hidden=64)
    # real kernels make a few scratch tensors of their own
    assert without_memory.activations_bytes == pytest.approx(real.activations_bytes, rel=0.01)
    assert without_memory.layers_traced == real.layers_traced


def test_bytes_alive_are_those_of_what_operations_made_and_nobody_dropped():
    with FakeTensorMode():
        given = torch.empty(1000)
        with LiveMemory([]) as memory:
            kept = given.exp()
            given.view(10, 100)
            assert memory.activations == 4000
            dropped = kept.double()
            assert memory.activations == 12000
            del dropped
    assert (memory.activations, memory.most_activations, memory.gathered) == (4000, 12000, 0)


@pytest.mark.parametrize(
    ("schedule", "rank", "in_flight"), [("1F1B", 0, 4), ("1F1B", 3, 1), ("GPipe", 0, 8), ("GPipe", 3, 8)]
)
def test_a_pipeline_keeps_the_micro_batches_that_its_schedule_has_in_flight(schedule, rank, in_flight):
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
    by="tests/train/test_fake_backend.py::test_all_axes_at_once_are_built_and_traced",
)
@pytest.mark.nightly(
    "at full size",
    by="tests/train/test_fake_backend.py::test_all_axes_at_once_are_built_and_traced",
)
def test_a_configuration_of_405b_on_512_ranks_is_checked_in_seconds_without_a_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "511")
    monkeypatch.chdir(tmp_path)
    degrees = ["--parallelism.pipeline_parallel_degree", "8", "--training.local_batch_size", "8"]
    config = str(ROOT / "configs/llama3_405b.toml")
    code, out, err = answer(capsys, config, "--nproc", "512", *ANYWHERE, *degrees)
    assert (code, err) == (0, "")
    assert "rank 511 of 512" in out and "nothing is trained, read or written" in out
    assert "405.85B parameters\nmesh: 512 ranks, pp 8 x dp_shard 8 x tp 8" in out
    assert "8 sequences x 1 accumulation x 8 data ranks = 64 sequences x 8192 = 524288 tokens per step" in out
    assert "stage of this rank: layers.111 to 125, norm, head" in out
    assert "2 of 15 layers traced" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 4096])
def test_worlds_of_one_and_of_thousands_are_built(capsys, size):
    words = ["--nproc", str(size), *ANYWHERE, "--training.seq_len", "64", "--compile.enable", "true"]
    code, out, _ = answer(capsys, str(ROOT / "configs/debug.toml"), *words)
    assert code == 0
    assert f"rank 0 of {size}" in out
    assert "note: compile.enable=true: nothing is compiled here" in out


def test_buffers_of_experts_have_no_memory_where_layers_are_recomputed_in_part(monkeypatch):
    """FSDP's hooks of experts run apart from what counts recomputed operations; that took fake tensors away, too."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    allocate, made = DefaultAllocMixin.allocate, []

    def noted(*arguments, **keywords):
        made.append(allocate(*arguments, **keywords))
        return made[-1]

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
    dry(config, size=8)  # two ranks to an expert
    assert len(made) > 10 and all(isinstance(tensor, FakeTensor) for tensor in made)


def test_experts_are_traced_with_an_even_load():
    config = deep_config(
        model={"name": "qwen3_moe", "flavor": "debugmodel_moe", "overrides": {"moe_ffn_dim": 32, "num_experts": 8}},
        parallelism={"expert_parallel_degree": 4},
    )
    run = dry(config, size=8)
    assert run.traced.not_traced == "" and run.traced.activations_bytes > 0


def test_what_cannot_be_traced_is_said():
    config = deep_config(
        model={"name": "qwen3_moe", "flavor": "debugmodel_moe", "overrides": {"moe_ffn_dim": 32, "num_experts": 8}},
        training={"mixed_precision_param": "float16"},  # experts one by one: as many rows as the data say
    )
    run = dry(config, size=2)
    assert "shapes depend on data" in run.traced.not_traced
    assert any("activations: not traced" in line for line in dry_run.report(run, config))


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--parallelism.tensor_parallel_degree", "3"], "tensor_parallel_degree=3"),
        (["--parallelism.data_parallel_shard_degree", "3"], "data_parallel_shard_degree=3"),
        (["--training.global_batch_size", "12"], "training.global_batch_size=12"),
        (["--training.steps", "0"], "training.steps=0"),
        (["--comm.mode", "local_tensor"], "comm.mode"),
    ],
)
def test_a_wrong_configuration_fails_as_it_would_in_a_run(capsys, words, fragment):
    code, out, err = answer(capsys, "--nproc", "8", *ANYWHERE, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error[2]: ") and fragment in err


def test_a_device_that_this_machine_lacks_is_not_a_problem(capsys):
    assert answer(capsys, "--nproc", "8", *ANYWHERE, "--training.device", "cuda", "--training.seq_len", "64")[0] == 0


@pytest.mark.parametrize(
    ("names", "fragment"),
    [
        ({"RANK": "8"}, 'RANK="8" is not a rank of a world of 8; use 0 to 7'),
        ({"RANK": "first"}, "is not a rank"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "start it without torchrun"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(capsys, monkeypatch, names, fragment):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    code, out, err = answer(capsys, "--nproc", "8", *ANYWHERE)
    assert (code, out) == (2, "")
    assert fragment in err
