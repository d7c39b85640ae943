"""Folders and commands of torchtrain, torchtitan and Run:ai users run unedited.

The folders contain the files of these systems, retyped, and generated data instead of cloned or downloaded data.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import noted
import patience
import pytest
from launched import losses, newest, record, wait_for
from ports import free_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_tokenizers import bpe_folder, sentencepiece_bytes, tiktoken_bytes

ROOT = Path(__file__).parents[3]
PRESETS = ROOT / "tests/fixtures/configs"
TORCHTRAIN_RUNS = (
    "tests/compat/migrate/test_torchtitan_runs.py::"
    "test_a_torchtrain_folder_trains_with_its_script_and_logs_its_tags"
)
"""The test in the default tier that runs an original script."""
SMALL = "--training.seq_len 32 --training.batch_size 1 --training.device cpu"
TEXTS = [
    "A mesh of ranks holds one model.",
    "Every rank reads its own rows.",
    "The loss is a sum, divided once.",
] * 300

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the loopback interface is called lo"
)


def rows(file: Path, field: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({field: text, "output": text}) + "\n" for text in TEXTS))


@pytest.fixture
def torchtrain(tmp_path):
    """Folder of torchtrain from February 2024: its preset, its tokenizer, and a copy of alpaca."""
    folder = tmp_path / "torchtrain"
    (folder / "train_configs").mkdir(parents=True)
    shutil.copy(PRESETS / "torchtrain_2024_02/debug_model.toml", folder / "train_configs")
    tokenizer = folder / "torchtrain/datasets/tokenizer/tokenizer.model"
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_bytes(sentencepiece_bytes())
    rows(folder / "alpaca/train.jsonl", "instruction")
    return folder


# Rewritten script of torchtitan v0.2 with the same variables
RUN_TRAIN = r"""#!/usr/bin/env bash
set -e
ranks=${NGPU:-8}
shown=${LOG_RANK:-0}
file=${CONFIG_FILE:-./torchtitan/models/llama3/train_configs/debug_model.toml}
trainer=${TRAIN_FILE:-torchtitan.train}
mode=${COMM_MODE:-}
export TORCHFT_LIGHTHOUSE=${TORCHFT_LIGHTHOUSE:-http://localhost:29510}
export PYTORCH_ALLOC_CONF=expandable_segments:True
if [ -n "$mode" ]; then
    NGPU="$ranks" LOCAL_RANK=0 python -m "$trainer" --job.config_file "$file" "$@" --comm.mode="$mode" \
        --training.steps=1
else
    torchrun --nproc_per_node="$ranks" --rdzv_backend c10d --rdzv_endpoint=localhost:0 --local-ranks-filter "$shown" \
        --role rank --tee 3 -m "$trainer" --job.config_file "$file" "$@"
fi
"""


@pytest.fixture
def torchtitan(tmp_path):
    """Clone of torchtitan v0.2.2: its script, its preset, and the files of tests/assets."""
    folder = tmp_path / "torchtitan"
    preset = folder / "torchtitan/models/llama3/train_configs/debug_model.toml"
    preset.parent.mkdir(parents=True)
    shutil.copy(PRESETS / "torchtitan_v0_2_2/debug_model.toml", preset)
    bpe_folder(folder / "tests/assets/tokenizer")
    rows(folder / "tests/assets/c4_test/data.jsonl", "text")
    (folder / "run_train.sh").write_text(RUN_TRAIN)
    (folder / "run_train.sh").chmod(0o755)
    return folder


@pytest.fixture
def runai(tmp_path):
    """A folder like that of the tutorial's image: a preset, a tokenizer, and the volume of a claim."""
    folder = tmp_path / "app"
    (folder / "train_configs").mkdir(parents=True)
    shutil.copy(PRESETS / "torchtitan_2025_02/debug_model.toml", folder / "train_configs")
    (folder / "tests/assets").mkdir(parents=True)
    (folder / "tests/assets/test_tiktoken.model").write_bytes(tiktoken_bytes())
    rows(folder / "tests/assets/c4_test/data.jsonl", "text")
    (tmp_path / "claim").mkdir()
    return folder


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars that ``tensorboard --logdir FOLDER`` shows for its only run: tag -> step -> value."""
    (file,) = folder.rglob("events*")
    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {scalar.step: scalar.value for scalar in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def assert_same(
    actual: dict[int, tuple[float, str]], expected: dict[int, tuple[float, str]], tolerance: float
) -> None:
    """Assert that each step read the same rows in the same order, with losses within a tolerance."""
    assert actual.keys() == expected.keys()
    for step, (loss, order) in actual.items():
        expected_loss, expected_order = expected[step]
        assert order == expected_order, step
        assert loss == pytest.approx(expected_loss, abs=tolerance), step


def test_a_torchtrain_folder_trains_with_its_script_and_logs_its_tags(torchtrain):
    line = (
        f"{ROOT}/run_llama_train.sh --training.dataset_path ./alpaca {SMALL} --metrics.log_freq 5"
    )
    line += " --model.overrides.vocab_size 512"  # 32000, the default, would take most of the time
    result = noted.run(
        torchtrain, line, NGPU="2", LOG_RANK="0,1", CONFIG_FILE="./train_configs/debug_model.toml"
    )

    assert result.returncode == 0, result.stderr
    assert "training with 2 processes" in result.stderr
    assert "[rank1]" in result.stderr

    logged = scalars(torchtrain / "outputs/tb")
    assert {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "wps",
        "throughput(tps)",
    } <= set(logged)
    assert list(logged["wps"]) == [1, 5, 10]
    assert logged["wps"] == logged["throughput(tps)"]

    renames = [
        line for line in result.stderr.splitlines() if "training.batch_size is called" in line
    ]

    assert renames and all(" INFO " in line for line in renames), "a rename must not be a warning"

    # Linear warm-up over int(10 * 0.2) steps, then decay to 1/8 of the peak.
    lr = {
        event["step"]: event["lr"]
        for event in map(json.loads, (torchtrain / "outputs/metrics.jsonl").open())
    }

    assert lr[1] == pytest.approx(8e-4 / 3)
    assert lr[10] == pytest.approx(8e-4 / 8)
    assert (torchtrain / "outputs/profiling/traces/iteration_10/rank1_trace.json").is_file()


@pytest.mark.nightly(
    "the entire preset",
    by=TORCHTRAIN_RUNS,
)
def test_torchrun_runs_train_py_like_torchtrain_s_script(torchtrain):
    """torchrun starts all ranks of train.py with the arguments of torchtrain's script, on smaller data."""
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--rdzv_endpoint=localhost:0",
    ]
    line += [
        "--rdzv_backend=c10d",
        "--local-ranks-filter=0",
        "--role=rank",
        "--tee=3",
        str(ROOT / "train.py"),
    ]
    line += [
        "--job.config_file",
        "./train_configs/debug_model.toml",
        "--training.dataset_path",
        "./alpaca",
    ]
    line += ["--training.seq_len", "64", "--training.device", "cpu"]
    limit = patience.seconds(400)
    names = noted.environment()
    result = subprocess.run(
        line, cwd=torchtrain, env=names, capture_output=True, text=True, timeout=limit
    )

    assert result.returncode == 0, result.stderr
    assert list(losses(torchtrain / "outputs")) == [1, 10]
    assert "on 2 x cpu" in result.stdout + result.stderr


def as_torchrun(
    arguments: list[str], rank: int, size: int, port: int, names: dict[str, str]
) -> tuple[list[str], dict]:
    """Return the command that torchrun starts for one rank: arguments from ``-m`` on, and environment."""
    place = arguments.index("-m")
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    of_rank = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    return arguments[place:], {**names, **rendezvous, **of_rank}


@pytest.mark.nightly("another script", by=TORCHTRAIN_RUNS)
def test_torchtitan_s_own_script_starts_this_trainer(torchtitan):
    """``TRAIN_FILE=shardtrain.train ./run_train.sh`` in an unedited clone of torchtitan."""
    line = "./run_train.sh --training.seq_len 32 --training.local_batch_size 1 --training.steps 3 --training.device cpu"
    line += " --metrics.enable_tensorboard"
    # A stub in place of torchrun records the arguments that the script gives it.
    arguments, names = noted.command_of(torchtitan, line, NGPU="2", TRAIN_FILE="shardtrain.train")

    assert "--nproc_per_node=2" in arguments

    port = free_port()
    started = []
    for rank in (0, 1):
        command = as_torchrun(arguments, rank, 2, port, names)
        process = noted.start(
            torchtitan, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        started.append(process)
    limit = patience.seconds(noted.SECONDS)
    try:
        outputs = [process.communicate(timeout=limit)[0] for process in started]
    finally:
        for process in started:
            process.kill()

    assert [process.returncode for process in started] == [0, 0], outputs
    assert list(losses(torchtitan / "outputs")) == [1, 2, 3]
    assert "on 2 x cpu" in outputs[0]
    tags = {"loss_metrics/global_avg_loss", "throughput(tps)", "grad_norm"}
    assert tags <= set(scalars(torchtitan / "outputs/tb"))


def test_fake_backend_of_torchtitan_builds_any_number_of_ranks(torchtitan):
    result = noted.run(
        torchtitan,
        "./run_train.sh",
        NGPU="64",
        COMM_MODE="fake_backend",
        TRAIN_FILE="shardtrain.train",
    )

    assert result.returncode == 0, result.stderr
    assert "builds rank 0 of 64" in result.stdout, result.stderr


def test_a_missing_torchtitan_file_is_one_line(torchtitan):
    line = "COMM_MODE= ./run_train.sh"
    arguments, names = noted.command_of(
        torchtitan, line, CONFIG_FILE="gone.toml", TRAIN_FILE="shardtrain.train"
    )
    result = noted.run_words(torchtitan, *as_torchrun(arguments, 0, 1, free_port(), names))

    assert result.returncode == 2
    assert result.stdout == ""
    assert [line[:9] for line in result.stderr.splitlines()] == ["error[2]:"]
    assert "gone.toml" in result.stderr


# One line of TOML each, in the order of torchtitan's README: key features, then those "coming soon" in 2024
FEATURES = {
    "FSDP2": "parallelism.data_parallel_shard_degree=2",
    "tensor parallel, with sequences and the loss split": "parallelism.tensor_parallel_degree=2",
    "copies": "parallelism.data_parallel_replicate_degree=2",
    "recomputed layers": "activation_checkpoint.selective_ac_option=2",
    "recomputed operations": "activation_checkpoint.selective_ac_option=op",
    "everything recomputed": "activation_checkpoint.mode=full",
    "context parallel": "parallelism.context_parallel_degree=2",
    "pipeline": "parallelism.pipeline_parallel_degree=2",
    "compiled": "compile.enable=true",
    "checkpoints while it trains": "checkpoint.async_mode=async",
    "fused norms": "model.norm_type=fused_rmsnorm",
    "gradient accumulation": "training.local_batch_size=1",
}


@pytest.mark.nightly(
    "each has separate tests",
    by="tests/test_same_numbers.py::test_mesh_and_memory_options_change_no_number",
)
@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_one_line_of_toml_and_changes_no_loss(torchtitan, feature):
    """Compare 3 float32 steps with one process. The tolerance of 1e-4 allows for compiled kernels."""
    preset = next(torchtitan.rglob("debug_model.toml"))
    option, _, value = FEATURES[feature].partition("=")
    base = "--training.seq_len 32 --training.steps 3 --training.global_batch_size 4 --training.device cpu "
    base += "--training.mixed_precision_param float32 --checkpoint.enable --metrics.log_freq 1"
    splits_rows = not any(axis in option for axis in ("tensor", "context", "pipeline"))
    results = []
    for name, ranks, more in (("one", 1, []), ("with", 2, [f"--{option}={value}"])):
        arguments = ["-m", "shardtrain.train", "--job.config_file", str(preset)]
        arguments += ["--nproc", str(ranks), *base.split(), f"--job.dump_folder={name}", *more]
        # The global batch has four rows. If the ranks split rows, each of them has two.
        if not (more and "batch" in option):
            local_batch_size = 2 if splits_rows and more else 4
            arguments.append(f"--training.local_batch_size={local_batch_size}")
        result = noted.run_words(torchtitan, arguments, noted.environment())
        assert result.returncode == 0, result.stderr
        results.append(losses(torchtitan / name))

    assert list(results[0]) == [1, 2, 3]
    assert_same(results[1], results[0], 1e-4)


@pytest.mark.slow
@pytest.mark.nightly(
    "DCP both ways",
    by="tests/tools/dcp/test_both_ways.py::test_an_exported_checkpoint_loads_in_pytorch_bitwise",
)
def test_bfloat16_weights_load_with_torch_load(torchtitan):
    """Run three commands: train, ``to-dcp`` and PyTorch's converter. Load the file with weights_only=True."""
    import torch

    preset = next(torchtitan.rglob("debug_model.toml"))
    line = f"-m shardtrain.train --job.config_file {preset} --nproc 2 --training.seq_len 32 --training.steps 2 "
    line += "--training.local_batch_size 1 --training.device cpu "
    line += "--checkpoint.enable --checkpoint.export_dtype bfloat16 "
    line += "--checkpoint.last_save_model_only"
    names = noted.environment()
    result = noted.run_words(torchtitan, line.split(), names)

    assert result.returncode == 0, result.stderr

    result = noted.run_words(
        torchtitan,
        ["-m", "shardtrain", "checkpoint", "to-dcp", "outputs", "dcp", "--model-only"],
        names,
    )

    assert result.returncode == 0, result.stderr

    arguments = [
        "-m",
        "torch.distributed.checkpoint.format_utils",
        "dcp_to_torch",
        "dcp",
        "weights.pt",
    ]

    assert noted.run_words(torchtitan, arguments, names).returncode == 0

    weights = torch.load(torchtitan / "weights.pt", weights_only=True)
    assert weights["tok_embeddings.weight"].shape == (2048, 256)
    assert len(weights) > 50
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.nightly(
    "on meshes",
    by="tests/compat/migrate/test_torchtitan_runs.py::test_a_torchtrain_folder_trains_with_its_script_and_logs_its_tags",
)
def test_a_seed_checkpoint_of_one_process_starts_any_mesh(torchtitan):
    """Follow torchtitan's recipe for equal initial weights: one process writes a seed checkpoint."""
    small = "--training.seq_len 32 --training.steps 1 --training.device cpu --metrics.log_freq 1 --checkpoint.enable "
    small += "--training.mixed_precision_param float32 --training.global_batch_size 2 --training.local_batch_size 2"
    preset = next(torchtitan.rglob("debug_model.toml"))
    arguments = ["-m", "shardtrain.train", "--job.config_file", str(preset), *small.split()]
    names = noted.environment()
    seed = ["--nproc", "1", "--checkpoint.create_seed_checkpoint", "--debug.seed", "7"]
    result = noted.run_words(torchtitan, [*arguments, *seed], names)

    assert result.returncode == 0, result.stderr
    assert newest(torchtitan / "outputs") == 0

    # Both meshes start from a copy of the seed checkpoint.
    shutil.copytree(torchtitan / "outputs", torchtitan / "split")
    meshes = {
        "outputs": ["--nproc", "1"],
        "split": ["--nproc", "2", "--parallelism.tensor_parallel_degree", "2"],
    }
    for folder, mesh in meshes.items():
        options = ["--job.dump_folder", folder, "--debug.seed", "7", *mesh]
        result = noted.run_words(torchtitan, [*arguments, *options], names)
        assert result.returncode == 0, result.stderr

    # The meshes sum in different orders, so losses differ by float32 rounding.
    single = losses(torchtitan / "outputs")
    split = losses(torchtitan / "split")
    assert list(single) == [1]
    assert_same(split, single, 1e-5)


POD = {
    "PYTHONUNBUFFERED": "1", "NODE_NAME": "node", "RUNAI_PROJECT": "team", "RUNAI_JOB_NAME": "distributed",
    "RUNAI_JOB_UUID": "8c1c", "RUNAI_NUM_OF_GPUS": "1", "NCCL_DEBUG": "INFO", "HF_HUB_ETAG_TIMEOUT": "500",
}  # fmt: skip
TRAIN = (
    f"{ROOT}/run_llama_train.sh {SMALL} --metrics.log_freq 1 --checkpoint.enable_checkpoint true "
    "--job.dump_folder ../claim --training.on_data_end repeat"
)


@pytest.mark.nightly(
    "in a pod",
    by="tests/compat/migrate/test_torchtitan_runs.py::test_a_torchtrain_folder_trains_with_its_script_and_logs_its_tags",
)
def test_a_pod_of_runai_submit_trains_without_job_variables(runai):
    """Run step C9 of the tutorial. The original trainer failed there because PET_NNODES is empty."""
    names = {
        **POD,
        "CONFIG_FILE": "./train_configs/debug_model.toml",
        "NGPU": "2",
        "PET_NNODES": "",
    }
    result = noted.run(runai, f"{TRAIN} --training.steps 2", **names)

    assert result.returncode == 0, result.stderr
    assert list(losses(runai.parent / "claim")) == [1, 2]
    assert "training with 2 processes" in result.stderr


def pod(folder: Path, number: int, port: int, steps: int) -> subprocess.Popen[str]:
    """A pod of ``runai submit-dist pytorch --workers=1 -g 1 -e CONFIG_FILE=... --existing-pvc ...``."""
    names = {
        **POD, "CONFIG_FILE": "./train_configs/debug_model.toml", "NGPU": "1", "RDZV_TIMEOUT": "120",
        "MAX_RESTARTS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
        "RANK": str(number), "PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
    }  # fmt: skip
    place = folder.parent / f"pod-{number}"
    if not place.exists():
        shutil.copytree(folder, place)
    arguments, variables = noted.command_of(place, f"{TRAIN} --training.steps {steps}", **names)
    return noted.start(place, arguments, variables, stderr=subprocess.PIPE)


@pytest.mark.nightly(
    "two hosts stop and continue",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue",
)
@pytest.mark.slow
def test_two_pods_of_the_tutorial_save_when_one_is_evicted_and_resume(runai):
    steps = 40
    claim = runai.parent / "claim"

    def run_both(until: str) -> list[tuple[int, str]]:
        """Run both pods, and return their exit codes and outputs."""
        port = free_port()
        pods = [pod(runai, number, port, steps) for number in (1, 0)]
        try:
            if until == "SIGTERM":
                # Evict one pod. Both end, because neither can train without the other.
                wait_for(lambda: (claim / "metrics.jsonl").exists() and len(losses(claim)) > 1)
                pods[0].send_signal(signal.SIGTERM)
            results = []
            for process in pods:
                code = process.wait(patience.seconds(180))
                results.append((code, process.communicate()[1]))
            return results
        finally:
            for process in pods:
                process.kill()

    for code, stderr in run_both("SIGTERM"):
        assert code == 75, stderr
        assert "Traceback" not in stderr, stderr
    saved = newest(claim)
    assert 1 < saved < steps
    assert record(claim)["code"] == 75

    for code, stderr in run_both("its end"):
        assert code == 0, stderr
    assert list(losses(claim)) == list(range(1, steps + 1)), "a step was lost or repeated"
    assert os.listdir(claim / "checkpoint")
