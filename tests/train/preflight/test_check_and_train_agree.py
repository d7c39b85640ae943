"""Random configurations: if ``config check`` finds no error, ``train`` makes a step.

Sizes, optimizers, adapters and meshes are drawn together. Each may be valid by itself while a rank rejects their
combination: tensor parallelism may split a row of a weight within a block of optimizer state.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases

from shardtrain.facts.optimizers import OPTIMIZERS

MESHES: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "fsdp": (2, []),
    "tp": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "pp": (2, ["--parallelism.pipeline_parallel_degree=2"]),
    "zero-1": (
        2,
        ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.shard_optimizer_states"],
    ),
    "cp": (2, ["--parallelism.context_parallel_degree=2"]),
}
TARGETS = ["layers.*.attn.wq", "layers.*.attn.wo", "layers.*.w2"]


def draw(seed: int) -> tuple[int, list[str]]:
    """Return the number of processes and the flags of a random configuration."""
    rng = random.Random(seed)
    num_processes, arguments = MESHES[rng.choice(list(MESHES))]
    num_kv_heads = rng.choice([1, 2, 3])
    sizes = {
        "head_dim": rng.choice([6, 8, 16, 64]),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * rng.choice([1, 2, 4]),
        "dim": rng.choice([36, 64, 96, 512]),
        "ffn_dim": rng.choice([36, 100, 512, 768]),
        "num_layers": rng.choice([1, 2]),
    }
    arguments = [*arguments, *(f"--model.overrides.{name}={size}" for name, size in sizes.items())]
    arguments.append(f"--optimizer.name={rng.choice([*OPTIMIZERS, 'AdamW8bit'])}")
    arguments.append(f"--training.dtype={rng.choice(['float32', 'float32', 'bfloat16'])}")
    if rng.random() < 0.5:
        arguments += ["--lora.enable", "--lora.random_base", f"--lora.rank={rng.choice([1, 4])}"]
        arguments += [f"--lora.target_modules={rng.choice(TARGETS)}"]
        arguments += [f"--lora.base_dtype={rng.choice(['training', 'int8', 'nf4', 'nf4'])}"]
    return num_processes, arguments


SMALL = [
    "--model.overrides.dim=36",
    "--model.overrides.head_dim=6",
    "--model.overrides.ffn_dim=100",
]
WIDE = ["--model.overrides.dim=192", "--model.overrides.ffn_dim=768"]
NF4 = [
    "--lora.enable",
    "--lora.random_base",
    "--lora.base_dtype=nf4",
    "--lora.target_modules=layers.*.attn.wq",
]
KNOWN: dict[str, tuple[int, list[str], str]] = {
    "blocks of 8-bit states split by tp": (
        2,
        ["--optimizer.name=AdamW8bit", "--parallelism.tensor_parallel_degree=2", *WIDE],
        'optimizer.name="AdamW8bit" requires each block of 256 columns on one rank',
    ),
    "weights that are not a multiple of 64": (
        1,
        [*NF4, *SMALL],
        'lora.base_dtype="nf4" requires a multiple of 64 weights',
    ),
}
"""Configurations that failed after ranks had started, and the error that ``config check`` must report."""


def shardtrain(folder: Path, *arguments: str) -> tuple[int, str]:
    done = forked.run(
        [sys.executable, "-m", "shardtrain", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience.seconds(100),
    )
    return done.returncode, str(done.stdout) + str(done.stderr)


def common(num_processes: int) -> list[str]:
    """Flags of a run of one step on CPUs that reads few rows and measures no kernels."""
    rows = [f"--training.global_batch_size={2 * num_processes}", "--training.local_batch_size=2"]
    length = ["--training.steps=1", "--training.seq_len=32", "--lr_scheduler.warmup_steps=0"]
    device = ["--training.device=cpu", "--training.cpu_kernels=pytorch", "--compile.enable=false"]
    quiet = ["--validation.enable=false", "--metrics.sample_prompt=", "--checkpoint.enable=false"]
    return [*rows, *length, *device, *quiet, f"--nproc={num_processes}"]


@pytest.mark.parametrize("name", KNOWN)
def test_check_reports_errors_that_ranks_would_raise(tmp_path: Path, name: str) -> None:
    num_processes, arguments, error = KNOWN[name]
    code, output = shardtrain(
        tmp_path, "config", "check", "debug", *common(num_processes), *arguments
    )
    assert code == 2, output
    assert error in output, output


@pytest.mark.parametrize("seed", cases([0, 2], nightly=[1, *range(3, 60)]))
def test_configuration_without_errors_makes_a_step(tmp_path: Path, seed: int) -> None:
    num_processes, arguments = draw(seed)
    arguments = [*common(num_processes), *arguments]
    code, output = shardtrain(tmp_path, "config", "check", "debug", *arguments)

    assert code in (0, 2), output

    if code == 2:
        assert "error" in output
        return
    code, output = shardtrain(tmp_path, "train", "debug", *arguments, "--job.dump_folder=run")
    assert code == 0, f"{arguments}\n{output[-2000:]}"

    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
