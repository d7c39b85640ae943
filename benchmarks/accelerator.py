"""What to run first where an accelerator can be used: accelerator.py [--device cuda] [--tiny] [--only PART,...].

Parts, in the order in which a later one is of no use without the earlier: ``capabilities`` (what the device can do),
``waits`` (host waits of a step, as PyTorch counts them), ``numbers`` (steps there and on the CPU), ``speed``
(tokens per second and MFU of 1B, 3B and 8B at 4,096 tokens, and of float8), ``experts`` (a block of 16B class) and
``memory`` (what ``shardtrain plan`` predicts against the allocator's peak). Each part runs in a process of its own and
adds its rows to benchmarks/results/accelerator-DEVICE.jsonl; one that fails adds a row that says why, and the others
go on. ``--tiny`` runs the same code with models that a CPU trains in seconds, and writes where ``--results`` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardtrain.config import Loaded, derived
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import join, pick_device_type
from shardtrain.metrics.memory import read_peak
from shardtrain.ops import accelerator, device_kernels
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer
from shardtrain.utils.hardware import peak_flops

Row = dict[str, Any]
RESULTS = Path(__file__).with_name("results")
LIMIT_SECONDS = 1500
"""For one part."""
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
TINY_DENSE = {**TINY, "ffn_dim": 128}
TINY_EXPERTS = {**TINY, "moe_ffn_dim": 48, "num_experts": 4, "top_k": 2}


@dataclasses.dataclass(frozen=True)
class Job:
    """A training to be timed."""

    model: str
    flavor: str
    local_batch_size: int
    sections: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


SPEED = {
    "1B": Job("llama3", "1B", 8),
    "1B compiled": Job("llama3", "1B", 8, {"compile": {"enable": True}}),
    "3B": Job("llama3", "3B", 4, {"compile": {"enable": True}}),
    # one device of 80 GB holds 8B with its AdamW states in bfloat16 alone: 64 GB
    "8B": Job("llama3", "8B", 1, {"compile": {"enable": True}, "training": {"dtype": "bfloat16"}}),
    "8B full recomputation": Job(
        "llama3",
        "8B",
        4,
        {"compile": {"enable": True}, "training": {"dtype": "bfloat16"}, "activation_checkpoint": {"mode": "full"}},
    ),
}
FLOAT8 = {"model": {"converters": ["quantize.linear.float8"]}}
EXPERTS = {
    "4 layers of 16B": Job("deepseek_v2", "16B", 4, {"model": {"overrides": {"num_layers": 4}}}),
    "4 layers of 30B-A3B": Job("qwen3_moe", "30B-A3B", 4, {"model": {"overrides": {"num_layers": 4}}}),
}


def config_of(job: Job, device: str, tiny: bool, steps: int) -> Config:
    """The run of a job: bfloat16, its own text as data, nothing saved."""
    overrides = dict(job.sections.get("model", {}).get("overrides", {}))
    if tiny:
        overrides = dict(TINY_EXPERTS if job.model != "llama3" else TINY_DENSE)
    compiles = bool(job.sections.get("compile")) and not tiny
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "name": "mixtral" if tiny and job.model != "llama3" else job.model,
            "flavor": "debugmodel" if tiny else job.flavor,
            "converters": job.sections.get("model", {}).get("converters", []),
            "overrides": overrides,
            "hf_assets_path": "bytes",
        },
        "training": {
            "seq_len": 64 if tiny else 4096,
            "local_batch_size": 2 if tiny else job.local_batch_size,
            "steps": steps,
            "device": device,
            **job.sections.get("training", {}),
        },
        "compile": {"enable": compiles},
        "activation_checkpoint": {"mode": "none", **job.sections.get("activation_checkpoint", {})},
        "data": job.sections.get("data", {}),
        "checkpoint": {"enable": False},
        "metrics": {"log_freq": steps + 1},
    }
    config = Config()
    for name, values in sections.items():
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **values)})
    return config


def timed(config: Config, warmup: int, steps: int) -> Row:
    """Tokens per second, MFU and peak memory of some steps after others; the device is idle at both ends."""
    loaded = Loaded(config)
    with join(config.comm, config.training.device) as here:
        trainer.configs.require(loaded, here.size, here.device.type, here.size)
        with device_kernels.prefer_attention(here.device, config.training.flash_attention):
            run = trainer.build(config, here)
            for _ in range(warmup):
                outcome = trainer.step(run)
            accelerator.finish(here.device)
            started, tokens = time.perf_counter(), 0
            for _ in range(steps):
                outcome = trainer.step(run)
                assert outcome is not None
                tokens += outcome.global_tokens
            accelerator.finish(here.device)
            seconds = time.perf_counter() - started
        assert outcome is not None
        peak = read_peak(here.device.type)
        name = accelerator.name(here.device)
        flops = run.flops_per_token * tokens / seconds / here.size
        dense = peak_flops(name, derived.compute_dtype(config))
        return {
            "ranks": here.size,
            "seq_len": config.training.seq_len,
            "tokens_per_second_per_device": tokens / seconds / here.size,
            "step_seconds": seconds / steps,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / dense if dense else None,
            "peak_memory_gib": peak.peak_gib,
            "loss": float(outcome.loss_sum) / max(1, outcome.local_tokens),
        }


def capabilities(device: str, tiny: bool) -> Iterator[Row]:
    """What is asked of a device elsewhere, and what PyTorch was built with."""
    there = accelerator.of_rank(device, 0)
    yield {
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip or "",
        "collectives": accelerator.collectives(device),
        "pins_memory": accelerator.pins_memory(device),
        "flash_attention": device_kernels.has_flash_attention(there),
        "grouped_matmul_bfloat16": device_kernels.has_grouped_matmul(there, torch.bfloat16),
        "memory_gib": accelerator.total_memory_bytes(there) / 2**30 if accelerator.is_accelerator(device) else None,
        "peak_bfloat16_tflops": (peak_flops(accelerator.name(there), "bfloat16") or 0) / 1e12 or None,
    }


def waits(device: str, tiny: bool) -> Iterator[Row]:
    """Synchronisations of a step as CUDA's debug mode warns of them: one is meant, for loss and gradient norm.

    A wait for an event is not among them, so that this shows those that nobody meant.
    """
    for name, job in (("dense", SPEED["1B"]), ("experts", EXPERTS["4 layers of 30B-A3B"])):
        config = config_of(job, device, tiny, 4)
        with join(config.comm, device) as here:
            run = trainer.build(config, here)
            trainer.step(run)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                trainer.step(run)
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        told = [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
        yield {"case": name, "unmeant_waits": len(told) if device == "cuda" else None, "where": told}


def numbers(device: str, tiny: bool) -> Iterator[Row]:
    """Three steps on the device and on the CPU, from the same weights: the largest relative differences.

    In float32 (with products of full precision) they are rounding, in bfloat16 those of two kernels. Where there are
    several devices, ``shardtrain verify`` compares a mesh of them with one.
    """
    documents = {"data": {"packing": "concat", "document_mask": "on"}}
    for name, job in (
        ("dense", SPEED["1B"]),
        ("documents", dataclasses.replace(SPEED["1B"], sections=documents)),
        ("experts", EXPERTS["4 layers of 30B-A3B"]),
    ):
        for dtype in ("float32", "bfloat16"):
            config = config_of(job, device, True, 4)
            training = dataclasses.replace(config.training, mixed_precision_param=dtype)
            config = dataclasses.replace(config, training=training)
            weights: dict[str, torch.Tensor] = {}
            theirs = _three_steps(
                dataclasses.replace(config, training=dataclasses.replace(training, device="cpu")), weights
            )
            ours = _three_steps(config, weights)
            worst = [
                max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in zip(ours, theirs, strict=True)
            ]
            yield {"case": name, "dtype": dtype, "loss_difference": worst[0], "grad_norm_difference": worst[1]}
    count = accelerator.module(device).device_count() if accelerator.is_accelerator(device) else 1
    if count > 1:
        command = [sys.executable, "-m", "shardtrain", "verify", "--mesh", f"dp_shard={count}", "--json"]
        done = subprocess.run(
            [*command, "--training.device", device], capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
        )
        yield {"case": "verify", "exit_code": done.returncode, "output": (done.stdout or done.stderr)[-4000:]}


def _three_steps(config: Config, weights: dict[str, torch.Tensor]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run that begins with ``weights``, which are taken from it where there are none."""
    losses, norms = [], []
    with join(config.comm, config.training.device) as here:
        run = trainer.build(config, here)
        for name, parameter in run.runner.parameters().items():
            local = local_tensor(parameter).detach()
            if name in weights:
                local.copy_(weights[name])
            weights.setdefault(name, local.clone().cpu())
        for _ in range(3):
            outcome = trainer.step(run)
            assert outcome is not None
            losses.append(float(outcome.loss_sum))
            norms.append(outcome.grad_norm)
    return losses, norms


def speed(device: str, tiny: bool) -> Iterator[Row]:
    """Dense models, and the same in float8 where the configuration allows it."""
    jobs = dict(list(SPEED.items())[:1]) if tiny else SPEED
    for name, job in jobs.items():
        yield from _tried(name, job, device, tiny)
    for name in ("1B compiled", "8B") if not tiny else ():
        job = SPEED[name]
        eight = dataclasses.replace(job, sections={**job.sections, **FLOAT8})
        yield from _tried(f"{name}, float8", eight, device, tiny)


def experts(device: str, tiny: bool) -> Iterator[Row]:
    """Some layers of models with experts: what one block reaches."""
    for name, job in EXPERTS.items():
        yield from _tried(name, job, device, tiny)


def memory(device: str, tiny: bool) -> Iterator[Row]:
    """What a dry run of the same configuration foresees, and what the allocator had at most."""
    from shardtrain.distributed import fake_backend
    from shardtrain.train import dry_run

    config = config_of(SPEED["1B"], device, tiny, 3)
    with fake_backend.join(0, 1) as here:
        foreseen = dry_run.build(config, here).total_bytes / 2**30
    row = timed(config, 1, 2)
    yield {"case": "1B", "foreseen_gib": foreseen, "peak_memory_gib": row["peak_memory_gib"]}


def _tried(name: str, job: Job, device: str, tiny: bool) -> Iterator[Row]:
    """The row of a job; one that cannot run here says why, and the next begins with an empty device."""
    warmup, steps = (1, 2) if tiny else (5, 20)
    try:
        yield {"case": name, **timed(config_of(job, device, tiny, warmup + steps), warmup, steps)}
    except Exception as error:  # out of memory, refused, or not built
        yield {"case": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    if accelerator.is_accelerator(device):
        accelerator.module(device).empty_cache()


PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    "capabilities": capabilities,
    "waits": waits,
    "numbers": numbers,
    "speed": speed,
    "experts": experts,
    "memory": memory,
}


def run_part(part: str, device: str, tiny: bool) -> Iterator[Row]:
    """Rows of one part, with what they were measured on."""
    common = {
        "part": part,
        "device": accelerator.name(torch.device(device, 0) if device != "cpu" else torch.device(device)),
    }
    for row in PARTS[part](device, tiny):
        yield {**common, "tiny": tiny, "time": int(time.time()), **row}


def main(words: list[str]) -> int:
    """Run the parts; 1 where one gave no row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "xpu"))
    parser.add_argument("--tiny", action="store_true", help="models that a CPU trains in seconds")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    device = pick_device_type(asked.device)
    if asked.part:
        for row in run_part(asked.part, device, asked.tiny):
            print(json.dumps(row), flush=True)
        return 0
    parts = asked.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: use {', '.join(PARTS)}")
    asked.results.mkdir(parents=True, exist_ok=True)
    failed = []
    with open(asked.results / f"accelerator-{device}.jsonl", "a", encoding="utf-8") as file:
        for part in parts:
            command = [
                sys.executable,
                __file__,
                "--part",
                part,
                "--device",
                device,
                *(["--tiny"] if asked.tiny else []),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * LIMIT_SECONDS)
            rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not rows:
                failed.append(part)
                rows.append(json.dumps({"part": part, "tiny": asked.tiny, "error": done.stderr[-2000:]}))
            for line in rows:
                print(line, flush=True)
                file.write(line + "\n")
            file.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
