"""Compare native models with the same network through ``model.name = "transformers"``,
in tokens per CPU-second.

    nice -n -12 python benchmarks/transformers_route.py [--rounds 6]
        [--out benchmarks/results/transformers_route_cpu.json]

Both routes train the same sizes with the kernels that ``train`` would choose, on one process and one
thread, in interleaved rounds of ``train.step``: dim 256, 6 layers, 8 heads, 4 key-value heads, vocabulary
2,048, and 8 sequences of 512 tokens. Llama has 768 feed-forward features, and Qwen3-MoE 64 experts of 96
features, 8 per token. CPU time depends less on other load than wall time. ``docs/figures.py`` writes the
table of docs/models.md from the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import transformers
from processor import measurement_facts

from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import process_group
from shardtrain.train import trainer
from shardtrain.train.build import use_fastest_kernels

ROOT = Path(__file__).parents[1]
ROWS = 8
TOKENS = 512
NATIVE = {
    "Llama": ("llama3", "debugmodel", {"ffn_dim": 768}),
    "Qwen3-MoE": (
        "qwen3_moe",
        "debugmodel_moe",
        {"moe_ffn_dim": 96, "num_experts": 64, "top_k": 8},
    ),
}
COMMON = {
    "vocab_size": 2048,
    "dim": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
}
HF_COMMON = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}
HF = {
    "Llama": ("LlamaForCausalLM", {"intermediate_size": 768}),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {
            "moe_intermediate_size": 96,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
}
ROUTES = ("native", "transformers")


def model_of(name: str, route: str, folder: Path) -> dict[str, Any]:
    """Return the options of ``[model]``. For the transformers route, also write its model folder."""
    if route == "native":
        family, flavor, sizes = NATIVE[name]
        return {"name": family, "flavor": flavor, "overrides": {**COMMON, **sizes}}
    class_name, sizes = HF[name]
    config = getattr(transformers, class_name).config_class(
        **HF_COMMON, **sizes, architectures=[class_name]
    )
    path = folder / name
    config.save_pretrained(path)
    return {"name": "transformers", "flavor": "folder", "overrides": {"path": str(path)}}


def make_config(name: str, route: str, dtype: str, folder: Path) -> Config:
    """Return the configuration of one model, route and compute dtype."""
    config = Config()
    training = {
        "local_batch_size": ROWS,
        "global_batch_size": ROWS,
        "seq_len": TOKENS,
        "steps": 10_000,
        "mixed_precision_param": dtype,
        "device": "cpu",
    }
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=str(folder)),
        model=dataclasses.replace(config.model, **model_of(name, route, folder)),
        training=dataclasses.replace(config.training, **training),
        compile=dataclasses.replace(config.compile, enable=False),
        activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode="none"),
    )


def measure(
    dtype: str, rounds: int, here: process_group.World, folder: Path
) -> list[dict[str, Any]]:
    """Return one row per model: CPU seconds of each step, tokens per CPU-second and their ratio."""
    runs = {}
    for name in NATIVE:
        for route in ROUTES:
            config = make_config(name, route, dtype, folder)
            use_fastest_kernels(config, torch.device("cpu"))
            runs[name, route] = trainer.build(config, here)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for number in range(rounds + 1):
        for key, run in runs.items():
            start = time.process_time()
            trainer.step(run)
            if number:  # warm-up: the first step allocates memory
                seconds[key].append(time.process_time() - start)
    rows = []
    for name in NATIVE:
        speeds = {
            route: ROWS * TOKENS / statistics.median(seconds[name, route]) for route in ROUTES
        }
        pairs = zip(seconds[name, "native"], seconds[name, "transformers"], strict=True)
        num_params = {}
        for route in ROUTES:
            parameters = runs[name, route].runner.parameters()
            num_params[route] = sum(parameter.numel() for parameter in parameters.values())
        row = {
            "model": name,
            "dtype": dtype,
            "tokens_per_cpu_second": speeds,
            "ratio": speeds["transformers"] / speeds["native"],
            "ratios": [native / theirs for native, theirs in pairs],
            "num_params": num_params,
        }
        print(f"{name:10s} {dtype:9s} {row['ratio']:.2f} {speeds}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Print the ratios and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/transformers_route_cpu.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder, process_group.join(Comm(), "cpu") as here:
        for dtype in ("float32", "bfloat16"):
            rows += measure(dtype, options.rounds, here, Path(folder))
    facts = measurement_facts("transformers")
    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
