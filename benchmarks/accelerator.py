"""First checks and measurements on an accelerator: accelerator.py [--device cuda] [--tiny] [--only PART,...].

Parts, each of which relies on the previous ones:

- ``capabilities``: features of the device
- ``waits``: host synchronizations of a step, as counted by PyTorch
- ``numbers``: steps on the device compared with the CPU
- ``losses``: the head with its loss, compared with float64
- ``options``: three steps of every family with every kind of option, several cases in parallel
- ``speed``: tokens per second and MFU of 1B, 3B and 8B at 4,096 tokens, and of float8
- ``experts``: MoE layers of the 16B class
- ``memory``: the prediction of ``shardtrain plan`` and the peak of the allocator
- ``checkpoint``: how long a background save of 8B blocks training, and its GB/s
- ``routes``: a native Llama of 1B compared with the same model through ``model.name = "transformers"``
- ``generation``: new tokens per second of 8B in 1 and in 8 rows

Each part and each timed case runs in a separate process and appends its rows to
benchmarks/results/accelerator-DEVICE.jsonl. A failure becomes a row with its reason, and the others continue.
``--cases TEXT,...`` selects cases of options, speed and experts whose names contain a text. ``--kernels``
writes a kernel profile of each case. ``--tiny`` runs the same code with models that a CPU trains in
seconds, and writes into ``--results``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import accelerator_runs
import torch

import shardtrain
from shardtrain import load_config
from shardtrain.config import Loaded, derived
from shardtrain.distributed.process_group import join, pick_device_type
from shardtrain.facts.devices import DEVICE_TYPES, peak_flops
from shardtrain.launch.environment import set_allocator_default
from shardtrain.metrics.peak_memory import read_peak
from shardtrain.ops import accelerator, cross_entropy, device_kernels
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.linear_cross_entropy import linear_cross_entropy_sum
from shardtrain.ops.targets import IGNORE
from shardtrain.train import trainer

Row = dict[str, Any]
Options = dict[str, Any]
RESULTS = Path(__file__).with_name("results")
PART_SECONDS = 600
CASE_SECONDS = 240
TINY: Options = {
    "model.overrides.vocab_size": 512,
    "model.overrides.dim": 64,
    "model.overrides.num_layers": 2,
    "model.overrides.num_heads": 4,
    "model.overrides.num_kv_heads": 2,
    "model.overrides.head_dim": 16,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "compile.enable": False,
}
TINY_DENSE: Options = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    **TINY,
    "model.overrides.ffn_dim": 128,
}
TINY_EXPERTS: Options = {
    "model.name": "mixtral",
    "model.flavor": "debugmodel",
    **TINY,
    "model.overrides.moe_ffn_dim": 48,
    "model.overrides.num_experts": 4,
    "model.overrides.top_k": 2,
}
COMMON: Options = {
    "model.hf_assets_path": "bytes",
    "training.seq_len": 4096,
    "activation_checkpoint.mode": "none",
    "checkpoint.enable": False,
    "metrics.log_freq": 1000,
}


def model(name: str, flavor: str, rows: int) -> Options:
    """Return the options that select a model, with a local batch size of ``rows``."""
    return {"model.name": name, "model.flavor": flavor, "training.local_batch_size": rows}


COMPILED: Options = {"compile.enable": True}
BFLOAT16: Options = {"training.dtype": "bfloat16"}
"""One device of 80 GB fits 8B only with AdamW states in bfloat16: 64 GB."""
FLOAT8: Options = {
    "model.converters": ["quantize.linear.float8"],
    "quantize.linear.float8.filter_fqns": ["output"],
}
"""As in torchtitan's files, the head remains in bfloat16."""
FOUR_LAYERS: Options = {"model.overrides.num_layers": 4}
FULL: Options = {"activation_checkpoint.mode": "full"}
SPEED: dict[str, Options] = {
    "1B": model("llama3", "1B", 8),
    "1B compiled": {**model("llama3", "1B", 8), **COMPILED},
    "1B compiled float8": {**model("llama3", "1B", 8), **COMPILED, **FLOAT8},
    "1B compiled 8-bit states": {
        **model("llama3", "1B", 8),
        **COMPILED,
        "optimizer.name": "AdamW8bit",
    },
    "3B compiled": {**model("llama3", "3B", 4), **COMPILED},
    "8B of one row": {**model("llama3", "8B", 1), **COMPILED, **BFLOAT16},
    "8B of three rows": {**model("llama3", "8B", 3), **COMPILED, **BFLOAT16},
    "8B of three rows float8": {**model("llama3", "8B", 3), **COMPILED, **BFLOAT16, **FLOAT8},
    "8B of five rows": {**model("llama3", "8B", 5), **COMPILED, **BFLOAT16},
    "8B of five rows float8": {**model("llama3", "8B", 5), **COMPILED, **BFLOAT16, **FLOAT8},
    "8B of two rows of 8192": {
        **model("llama3", "8B", 2),
        **COMPILED,
        **BFLOAT16,
        "training.seq_len": 8192,
    },
    "8B of two rows of 8192 float8": {
        **model("llama3", "8B", 2),
        **COMPILED,
        **BFLOAT16,
        **FLOAT8,
        "training.seq_len": 8192,
    },
    "8B recomputed": {**model("llama3", "8B", 4), **COMPILED, **BFLOAT16, **FULL},
    "8B rounded by chance": {
        **model("llama3", "8B", 4),
        **COMPILED,
        **BFLOAT16,
        **FULL,
        "optimizer.bf16_stochastic_round": True,
    },
}
EXPERTS: dict[str, Options] = {
    "4 layers of 16B": {**model("deepseek_v2", "16B", 4), **COMPILED, **FOUR_LAYERS},
    "4 layers of 30B-A3B": {**model("qwen3_moe", "30B-A3B", 4), **COMPILED, **FOUR_LAYERS},
}
TIMED = {"speed": SPEED, "experts": EXPERTS}
"""Parts whose cases run in separate processes, to start each with an empty device."""

SMALL: Options = {
    **COMMON,
    "model.overrides.num_layers": 2,
    "model.overrides.vocab_size": 2048,
    "training.seq_len": 128,
    "training.local_batch_size": 2,
    "training.steps": 3,
    "training.initial_loss_scale": 1024.0,  # small enough that float16 skips no step
    "optimizer.lr": 1e-3,
    "optimizer.eps": 1e-3,  # with a smaller value, rounding decides the sign of small updates
    "lr_scheduler.warmup_steps": 1,
}
DENSE_FAMILIES = {
    name: "debugmodel" for name in ("llama2", "llama3", "mistral", "qwen2", "qwen3", "neox")
}
EXPERT_FAMILIES = {
    **{
        name: "debugmodel"
        for name in ("llama4", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
    },
    "qwen3_moe": "debugmodel_moe",
}
RECOMPUTE: tuple[Options, ...] = (
    {"activation_checkpoint.mode": "none"},
    {"activation_checkpoint.mode": "full"},
    {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
    {"activation_checkpoint.mode": "full", "activation_checkpoint.cpu_offload": True},
)
PRECISION: tuple[Options, ...] = (
    {"training.mixed_precision_param": "float32"},
    {"training.mixed_precision_param": "bfloat16"},
    {"training.mixed_precision_param": "float16"},
    {"training.dtype": "bfloat16"},
)
PACKING: tuple[Options, ...] = (
    {"data.packing": "concat", "data.document_mask": "off"},
    {"data.packing": "concat", "data.document_mask": "on"},
    {"data.packing": "padded", "data.long_documents": "cut"},
)
OPTIMIZERS: tuple[Options, ...] = (
    {"optimizer.name": "AdamW"},
    {"optimizer.name": "Muon"},
    {"optimizer.name": "AdamW", "optimizer.implementation": "foreach"},
    {"optimizer.name": "Adam"},
    {"optimizer.name": "AdamW8bit"},
    {"optimizer.name": "AdamW", "optimizer.state_dtype": "bfloat16"},
    {"optimizer.name": "AdamW", "optimizer.implementation": "for-loop"},
)
SINGLE: dict[str, Options] = {
    "stochastic rounding": {"training.dtype": "bfloat16", "optimizer.bf16_stochastic_round": True},
    "update in backward": {"optimizer.early_step_in_backward": True, "training.max_norm": math.inf},
    "weights on the host": {"training.enable_cpu_offload": True},
    "accumulation": {"training.global_batch_size": 4},
    "LoRA": {"lora.enable": True},
    "deterministic": {"debug.deterministic": True},
    "gradients in bfloat16": {"training.mixed_precision_reduce": "bfloat16"},
    "layernorm": {"model.norm_type": "layernorm"},
    "averages of weights": {"training.ema_decay": 0.9},
    "embedding noise": {"training.neftune_noise_alpha": 5.0},
    "label smoothing": {"training.label_smoothing": 0.1},
    "z-loss": {"training.z_loss_weight": 1e-3},
    "loss per source": {"metrics.per_source_loss": True},
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def option_cases() -> dict[str, tuple[Options, Options]]:
    """Map case names to options of the device run, and changes for the reference run.

    The reference runs on a CPU, in eager mode or with emulation.
    """
    host: Options = {"training.device": "cpu"}
    eager: Options = {"compile.enable": False}
    cases: dict[str, tuple[Options, Options]] = {}
    for place, (family, flavor) in enumerate({**DENSE_FAMILIES, **EXPERT_FAMILIES}.items()):
        of_family: Options = {"model.name": family, "model.flavor": flavor}
        for turn, precision in enumerate(PRECISION):
            more = {
                **precision,
                **RECOMPUTE[(place + 2 * turn) % len(RECOMPUTE)],
                **PACKING[(place + turn) % len(PACKING)],
                **OPTIMIZERS[(place + 3 * turn) % len(OPTIMIZERS)],
            }
            # a float16 case takes minutes on a CPU, so its reference uses PRECISION[0]
            reference = {**host, **PRECISION[0]} if precision == PRECISION[2] else host
            cases[f"{family}: {words(more)}"] = ({**of_family, **more}, reference)
        cases[f"{family}: compiled"] = ({**of_family, **COMPILED}, eager)
        if family in DENSE_FAMILIES:
            more = {**COMPILED, **PACKING[1], **RECOMPUTE[place % 4]}
            cases[f"{family}: compiled {words(more)}"] = ({**of_family, **more}, eager)
    for name, options in SINGLE.items():
        cases[name] = (options, host)
    cases["memory budget"] = (
        {**COMPILED, "activation_checkpoint.mode": "memory_budget"},
        {**RECOMPUTE[0], **eager},
    )
    for recipe in RECIPES:
        for compiles in (False, True):
            real: Options = {
                **FLOAT8,
                "quantize.linear.float8.recipe_name": recipe,
                "compile.enable": compiles,
            }
            name = f"float8 {recipe}{' compiled' if compiles else ''}"
            cases[name] = (real, {"quantize.linear.float8.emulate": True, **eager})
    experts: Options = {
        "model.name": "mixtral",
        "model.converters": ["quantize.grouped_mm.float8"],
        "quantize.grouped_mm.float8.fqns": ["experts"],
    }
    cases["float8 experts"] = (experts, {"quantize.grouped_mm.float8.emulate": True})
    return cases


def words(options: Options) -> str:
    """Join the values of options into a case name."""
    return " ".join(str(value) for value in options.values())


def timed_run(options: Options, device: str, tiny: bool, steps: int) -> Loaded:
    """Return the configuration of a case: bfloat16, generated text as data, and no checkpoints."""
    options = {**COMMON, **options, "training.steps": steps, "training.device": device}
    if tiny:
        options |= tiny_sizes(options["model.name"])
    if device == "cpu" and FLOAT8.items() <= options.items():
        options["quantize.linear.float8.emulate"] = True  # CPUs have no float8 matmul
    return load_config(None, options)


def tiny_sizes(model_name: str) -> Options:
    """Return the options that make a model tiny.

    A model with ``model.name="transformers"`` gets no ``model.*`` options, because its config.json
    defines the sizes.
    """
    if model_name == "transformers":
        return {name: value for name, value in TINY.items() if not name.startswith("model.")}
    return TINY_DENSE if model_name == "llama3" else TINY_EXPERTS


def timed(loaded: Loaded, warmup: int, steps: int, kernels: Path | None = None) -> Row:
    """Measure tokens per second, MFU and peak memory of ``steps`` after ``warmup``.
    The device is idle at both ends.

    A profile of two more steps is written to ``kernels``.
    """
    config = loaded.config
    began = time.perf_counter()
    with join(config.comm, config.training.device) as here:
        trainer.configs.require(loaded, here.size, here.device.type, here.size)
        with device_kernels.prefer_attention(here.device, config.training.flash_attention):
            run = trainer.build(config, here)
            accelerator.finish(here.device)
            built = time.perf_counter()
            for _ in range(warmup):
                outcome = trainer.step(run)
            accelerator.finish(here.device)
            started = time.perf_counter()
            tokens = 0
            outcomes = []
            for _ in range(steps):
                outcome = trainer.step(run)
                assert outcome is not None
                tokens += outcome.global_tokens
                outcomes.append(outcome)
            accelerator.finish(here.device)
            seconds = time.perf_counter() - started
            assert outcome is not None
            peak = read_peak(here.device.type)
            if kernels is not None:
                _write_kernels(run, kernels)
        name = accelerator.name(here.device)
        flops = run.flops_per_token * tokens / seconds / here.size
        dtype = "bfloat16" if derived.compute_dtype(config) != "float32" else "float32"
        dense = peak_flops(name, dtype)
        losses = []
        for outcome in outcomes:
            losses.append(round(float(outcome.loss_sum) / max(1, outcome.local_tokens), 4))
        return {
            "ranks": here.size,
            "seq_len": config.training.seq_len,
            "rows": config.training.local_batch_size,
            "tokens_per_second_per_device": tokens / seconds / here.size,
            "step_seconds": seconds / steps,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / dense if dense else None,
            "peak_memory_gib": peak.peak_gib,
            "build_seconds": built - began,
            "warmup_seconds": started - built,
            "losses": losses,
        }


def _write_kernels(run: trainer.Run, file: Path) -> None:
    """Write the kernels of two steps by duration, and the operations that launched them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    device = accelerator.profiler_activity(run.mesh.device)
    with torch.profiler.profile(activities=activities + ([device] if device else [])) as trace:
        for _ in range(2):
            trainer.step(run)
        accelerator.finish(run.mesh.device)
    key = "self_device_time_total" if device else "self_cpu_time_total"
    text = trace.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=90)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def capabilities(device: str, tiny: bool) -> Iterator[Row]:
    """Yield the device capabilities that the package queries, and the build of PyTorch."""
    first_device = accelerator.of_rank(device, 0)
    peak = peak_flops(accelerator.name(first_device), "bfloat16")
    row: Row = {
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip or "",
        "collectives": accelerator.collectives(device),
        "pins_memory": accelerator.pins_memory(device),
        "flash_attention": device_kernels.has_flash_attention(first_device),
        "grouped_matmul_bfloat16": device_kernels.has_grouped_matmul(first_device, torch.bfloat16),
        "memory_gib": None,
        "peak_bfloat16_tflops": peak / 1e12 if peak else None,
    }
    if accelerator.is_accelerator(device):
        row["memory_gib"] = accelerator.total_memory_bytes(first_device) / 2**30
        row["matmul_bfloat16_tflops"] = _matmul_tflops(first_device)
        row["copy_bytes_per_second"] = _copy_bytes_per_second(first_device)
    yield row


def _matmul_tflops(device: torch.device) -> dict[str, float]:
    """Map (M, K, N) to the measured TFLOP/s of a matmul of random data, for shapes of the 8B model."""
    tflops = {}
    for m, k, n in (
        (8192, 8192, 8192),
        (12288, 4096, 14336),
        (12288, 14336, 4096),
        (12288, 4096, 6144),
    ):
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        seconds = _seconds_of(lambda a=a, b=b: a @ b, device, 30)  # type: ignore[misc]
        tflops[f"{m}x{k}x{n}"] = 2 * m * k * n / seconds / 1e12
    return tflops


def _copy_bytes_per_second(device: torch.device) -> float:
    """Return bytes read and written per second by a copy of 4 GiB within the device."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds_of(lambda: target.copy_(source), device, 10)


def _seconds_of(work: Callable[[], Any], device: torch.device, times: int) -> float:
    for _ in range(5):
        work()
    accelerator.finish(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    accelerator.finish(device)
    return (time.perf_counter() - started) / times


def waits(device: str, tiny: bool) -> Iterator[Row]:
    """Yield the synchronizations of a step that CUDA's debug mode warns about.

    The only intended wait, for loss and gradient norm, waits for an event, which is not reported. So all
    reported synchronizations are unintended.
    """
    for name, options in (("dense", SPEED["1B"]), ("experts", EXPERTS["4 layers of 30B-A3B"])):
        config = timed_run(options, device, True, 4).config
        with join(config.comm, device) as here:
            run = trainer.build(config, here)
            trainer.step(run)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.showwarning = _with_lines  # type: ignore[assignment]
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                trainer.step(run)
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        positions = [
            f"{warning.filename}:{warning.lineno}"
            for warning in caught
            if "called a synchronizing" in str(warning.message)
        ]
        positions = positions or [line for line in _lines if line]
        yield {
            "case": name,
            "unmeant_waits": len(positions) if device == "cuda" else None,
            "where": positions,
        }
        _lines.clear()


_lines: list[str] = []


def _with_lines(message: Any, *_: Any, **__: Any) -> None:
    """Record the lines of the package that caused a warning."""
    if "called a synchronizing" in str(message):
        lines = [
            f"{frame.filename.split('shardtrain/')[-1]}:{frame.lineno}"
            for frame in traceback.extract_stack()
        ]
        _lines.append(" < ".join(reversed(lines[-12:-1])))


def numbers(device: str, tiny: bool) -> Iterator[Row]:
    """Yield the largest relative differences of three steps on the device and on the CPU,
    from the same weights.

    Differences in float32 (with full-precision products) are rounding. Differences in bfloat16 also come
    from different kernels. With several devices, ``shardtrain verify`` compares a mesh with one device.
    """
    documents: Options = {**SPEED["1B"], **PACKING[1]}
    cases = {
        "dense": SPEED["1B"],
        "documents": documents,
        "experts": EXPERTS["4 layers of 30B-A3B"],
    }
    for name, options in cases.items():
        for dtype in ("float32", "bfloat16"):
            mixed = {**options, "training.mixed_precision_param": dtype}
            ours = timed_run(mixed, device, True, 4)
            theirs = timed_run(mixed, "cpu", True, 4)
            yield {"case": name, "dtype": dtype, **_differences(ours, theirs)}
    count = accelerator.module(device).device_count() if accelerator.is_accelerator(device) else 1
    if count > 1:
        command = [
            sys.executable,
            "-m",
            "shardtrain",
            "verify",
            "--mesh",
            f"dp_shard={count}",
            "--json",
        ]
        done = subprocess.run(
            [*command, "--training.device", device],
            capture_output=True,
            text=True,
            check=False,
            timeout=PART_SECONDS,
        )
        yield {
            "case": "verify",
            "exit_code": done.returncode,
            "output": (done.stdout or done.stderr)[-4000:],
        }


def losses(device: str, tiny: bool) -> Iterator[Row]:
    """Yield relative errors of the bfloat16 head with loss against float64: loss, gradients of input and weight."""
    first_device = accelerator.of_rank(device, 0)
    generator = torch.Generator().manual_seed(0)
    tokens, dim, vocabulary = (300, 64, 512) if tiny else (3000, 512, 20_000)
    hidden = torch.randn(1, tokens, dim, generator=generator).bfloat16()
    head = torch.randn(vocabulary, dim, generator=generator).mul(dim**-0.5).bfloat16()
    targets = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    targets[0, :5] = IGNORE

    def computed(kind: str) -> list[torch.Tensor]:
        is_exact = kind == "float64"
        place = torch.device("cpu") if is_exact else first_device
        dtype = torch.float64 if is_exact else None
        x = hidden.clone().to(place, dtype).requires_grad_()
        w = head.clone().to(place, dtype).requires_grad_()
        factor = torch.tensor(1 / tokens, device=place)
        if is_exact:
            logits_NV = (x @ w.t()).flatten(0, 1)
            targets_N = targets.flatten()
            loss_sum = torch.nn.functional.cross_entropy(
                logits_NV, targets_N, ignore_index=IGNORE, reduction="sum"
            )
            loss = loss_sum * factor
        elif kind == "apart":
            loss = cross_entropy.cross_entropy_sum(x @ w.t(), targets.to(place), factor)
        else:
            chunk = None
            if kind == "compiled":
                chunk = torch.compile(cross_entropy.chunk_loss_without_scatter)
            loss = linear_cross_entropy_sum(x, w, targets.to(place), factor, chunk)
        loss.backward()
        assert x.grad is not None
        assert w.grad is not None
        return [value.detach().cpu().double() for value in (loss, x.grad, w.grad)]

    expected = computed("float64")
    for kind in ("apart", "together", "compiled"):
        errors = []
        for actual, exact in zip(computed(kind), expected, strict=True):
            errors.append(float((actual - exact).norm() / exact.norm()))
        yield {
            "case": kind,
            "loss_error": errors[0],
            "input_gradient_error": errors[1],
            "weight_gradient_error": errors[2],
        }


def _differences(ours: Loaded, theirs: Loaded) -> Row:
    weights: dict[str, torch.Tensor] = {}
    reference = _three_steps(theirs, weights)
    measured = _three_steps(ours, weights)

    def largest(actual: Sequence[float], expected: Sequence[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))

    losses, grad_norms = measured
    expected_losses, expected_grad_norms = reference
    return {
        "loss_difference": largest(losses, expected_losses),
        "grad_norm_difference": largest(grad_norms, expected_grad_norms),
    }


def _three_steps(
    loaded: Loaded, weights: dict[str, torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of three steps from ``weights``. An empty ``weights`` is filled by the run."""
    config = loaded.config
    losses = []
    norms = []
    with join(config.comm, config.training.device) as here:
        trainer.set_numerics(config, here.device)
        with device_kernels.prefer_attention(here.device, config.training.flash_attention):
            run = trainer.build(config, here)
            for name, parameter in run.runner.parameters().items():
                local = local_tensor(parameter).detach()
                if name in weights:
                    local.copy_(weights[name])
                weights.setdefault(name, local.clone().cpu())
            for _ in range(3):
                outcome = trainer.step(run)
                assert outcome is not None
                losses.append(float(outcome.loss_sum) / max(1, outcome.local_tokens))
                norms.append(outcome.grad_norm)
    return losses, norms


def options(device: str, tiny: bool, names: str = "") -> Iterator[Row]:
    """For every kind of option, compare three steps with those of a CPU, of eager mode or of an emulation."""
    cases = option_cases()
    cases = {name: cases[name] for name in chosen(cases, names)}
    if tiny:
        cases = dict(list(cases.items())[::9])
    context = multiprocessing.get_context("spawn")
    at_once = max(1, min(14, (os.cpu_count() or 2) - 1))
    # more threads per case would slow down other cases
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(at_once, mp_context=context) as pool:
        waiting = {pool.submit(compare, device, *case): name for name, case in cases.items()}
        for done in as_completed(waiting):
            yield {"case": waiting[done], **done.result()}


def compare(device: str, wanted: Options, other: Options) -> Row:
    """Compare a pair of runs. Return a row with the differences, or with the reason if one cannot run."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    base = {**SMALL, "training.device": device, **wanted}
    row: Row = {}
    try:
        row = _differences(load_config(None, base), load_config(None, {**base, **other}))
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in trace[-6:]]
        row = {"error": f"{type(error).__name__}: {str(error)[:600]}", "where": where}
    finally:
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
    return {**row, "seconds": time.perf_counter() - started}


def case_of(part: str, name: str, device: str, tiny: bool, steps: int, kernels: Path | None) -> Row:
    """Return the row of a timed case. If it cannot run, the row contains the reason."""
    warmup, steps = (1, 2) if tiny else (3, steps)
    loaded = timed_run(TIMED[part][name], device, tiny, warmup + steps + 2)
    file = kernels / f"{name.replace(' ', '_')}.txt" if kernels else None
    try:
        return {"case": name, **timed(loaded, warmup, steps, file)}
    except Exception as error:
        # For example out of memory, rejected options, or a model that cannot be built.
        where = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]
        ]
        return {
            "case": name,
            "error": f"{type(error).__name__}: {str(error)[:600]}",
            "where": where,
        }


def planned(file: Path) -> str:
    """Return a Markdown table of timed rows, next to what ``shardtrain plan`` predicts for them."""
    lines = [
        "| case | tokens/s | planned | MFU | s a step | peak, GiB reserved | planned |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if row.get("part") not in TIMED or "tokens_per_second_per_device" not in row or row["tiny"]:
            continue
        kind = "h200" if "H200" in row["device"] else "h100"
        options = {**COMMON, **TIMED[row["part"]][row["case"]]}
        plan = shardtrain.plan(None, options, gpus=row["ranks"], device=kind)
        speed = row["tokens_per_second_per_device"]
        lines.append(
            f"| {row['case']} | {speed:,.0f} | {plan.tps:,.0f} ({plan.tps / speed - 1:+.1%}) | {row['mfu']:.1%} "
            f"| {row['step_seconds']:.3f} | {row['peak_memory_gib']:.1f} | {plan.peak_bytes / 2**30:.1f} |"
        )
    return "\n".join(lines)


def memory(device: str, tiny: bool) -> Iterator[Row]:
    """Yield the prediction of a dry run of the same configuration, and the peak of the allocator."""
    from shardtrain.distributed import fake_backend
    from shardtrain.train import dry_run

    loaded = timed_run(SPEED["1B"], device, tiny, 3)
    with fake_backend.join(0, 1) as here:
        foreseen = dry_run.build(loaded.config, here).total_bytes / 2**30
    row = timed(loaded, 1, 2)
    yield {"case": "1B", "foreseen_gib": foreseen, "peak_memory_gib": row["peak_memory_gib"]}


def checkpoint(device: str, tiny: bool) -> Iterator[Row]:
    """Yield the stall and the speed of a background save, with bfloat16 weights and states: 48 GB for 8B."""
    with tempfile.TemporaryDirectory() as folder:
        saving: Options = {
            **SPEED["8B of three rows"],
            "checkpoint.enable": True,
            "checkpoint.async_mode": "async",
            "job.dump_folder": folder,
        }
        loaded = timed_run(saving, device, tiny, 1000)
        yield {"case": "8B", **accelerator_runs.checkpoint_row(loaded)}


def routes(device: str, tiny: bool) -> Iterator[Row]:
    """Yield tokens per second of the native Llama, and of the same sizes through transformers."""
    warmup, steps = (1, 2) if tiny else (3, 10)

    def run(options: Options) -> Row:
        return timed(timed_run(options, device, tiny, warmup + steps), warmup, steps)

    sizes = sizes_of(TINY_DENSE) if tiny else {}
    yield from accelerator_runs.route_rows(SPEED["1B compiled"], sizes, run)


def generation(device: str, tiny: bool) -> Iterator[Row]:
    """Yield new tokens per second of 8B, without its tokenizer."""
    sizes = sizes_of(TINY_DENSE) if tiny else {}
    first_device = accelerator.of_rank(device, 0)
    yield from accelerator_runs.generation_rows(first_device, "8B", sizes)


def sizes_of(options: Options) -> dict[str, Any]:
    """Return the ``model.overrides.*`` options, without that prefix."""
    prefix = "model.overrides."
    return {
        name.removeprefix(prefix): value
        for name, value in options.items()
        if name.startswith(prefix)
    }


PARTS: dict[str, Callable[[str, bool], Iterator[Row]] | None] = {
    "capabilities": capabilities,
    "waits": waits,
    "numbers": numbers,
    "losses": losses,
    "options": options,
    "speed": None,
    "experts": None,
    "memory": memory,
    "checkpoint": checkpoint,
    "routes": routes,
    "generation": generation,
}
"""Functions by part. None for the parts in TIMED."""


def chosen(names: Iterable[str], texts: str) -> list[str]:
    """Return the names selected by comma-separated texts, or all names if ``texts`` is empty.

    A text that equals a name selects only this name. Any other text selects all names that contain it.
    """
    names = list(names)
    if not texts:
        return names
    selected = set()
    for text in texts.split(","):
        if text in names:
            selected.add(text)
        else:
            selected |= {name for name in names if text in name}
    return [name for name in names if name in selected]


def processes(part: str, options: argparse.Namespace) -> list[list[str]]:
    """Return the arguments of each process of a part."""
    names = TIMED.get(part)
    if names is None:
        return [["--part", part]]
    selected = chosen(names, options.cases)
    if options.tiny and part == "speed":
        selected = selected[:1]
    return [["--part", part, "--case", name] for name in selected]


def run_here(arguments: argparse.Namespace, device: str) -> Iterator[Row]:
    """Yield the rows of one part or of one of its cases, with the measured device."""
    device_here = torch.device(device, 0) if device != "cpu" else torch.device(device)
    common = {
        "part": arguments.part,
        "device": accelerator.name(device_here),
        "tiny": arguments.tiny,
    }
    work = PARTS[arguments.part]
    if work is None:
        names = [arguments.case] if arguments.case else list(TIMED[arguments.part])
        rows = (
            case_of(
                arguments.part, name, device, arguments.tiny, arguments.steps, arguments.kernels
            )
            for name in names
        )
    else:
        rows = (
            options(device, arguments.tiny, arguments.cases)
            if work is options
            else work(device, arguments.tiny)
        )
    for row in rows:
        yield {**common, "time": int(time.time()), **row}


def main(arguments: list[str]) -> int:
    """Run the parts. Return 1 if one of them printed no row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", choices=DEVICE_TYPES)
    parser.add_argument("--tiny", action="store_true", help="models that a CPU trains in seconds")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument(
        "--cases",
        default="",
        help="names of timed or compared cases, or parts of names (default: all)",
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after three others")
    parser.add_argument("--kernels", type=Path, help="folder for kernel profiles")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the rows")
    parser.add_argument(
        "--planned",
        type=Path,
        help="print the timed rows of a file with the predictions of plan, without running anything",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.planned:
        print(planned(options.planned))
        return 0
    # As in ``train``: only takes effect before the device is initialized.
    set_allocator_default(os.environ)
    device = pick_device_type(options.device)
    if options.part:
        sys.stdin.readline()  # wait until the previous process has released the device
        for row in run_here(options, device):
            print(json.dumps(row), flush=True)
        return 0
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: use {', '.join(PARTS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    common = ["--device", device, "--steps", str(options.steps), "--cases", options.cases]
    if options.tiny:
        common += ["--tiny"]
    if options.kernels:
        common += ["--kernels", str(options.kernels)]
    commands = []
    for part in parts:
        commands += [
            [*arguments_of_part, *common] for arguments_of_part in processes(part, options)
        ]
    failed = False
    with open(options.results / f"accelerator-{device}.jsonl", "a", encoding="utf-8") as file:
        for line in rows_of(commands):
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            failed = failed or '"failed"' in line
    return 1 if failed else 0


def rows_of(commands: list[list[str]]) -> Iterator[str]:
    """Run commands one after the other, and yield the JSON rows that they print.

    A command that fails, times out or prints nothing yields a row with the reason. While a command runs, the
    next one already imports PyTorch. It waits for a line on stdin before it uses the device.
    """
    waiting = _start(commands[0])
    for place, command in enumerate(commands):
        running = waiting
        limit = CASE_SECONDS if "--case" in command else PART_SECONDS
        if place + 1 < len(commands):
            waiting = _start(commands[place + 1])
        error = ""
        try:
            text, output = running.communicate("begin\n", timeout=limit)
            error = output[-2000:] if running.returncode else ""
        except subprocess.TimeoutExpired:
            running.kill()
            text, _ = running.communicate()
            error = f"took longer than {limit} s"
        rows = [line for line in text.splitlines() if line.startswith("{")]
        yield from rows
        if error or not rows:
            yield json.dumps({"command": command, "failed": error or "printed no row"})


def _start(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, __file__, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
