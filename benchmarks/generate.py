"""Generated tokens per CPU-second beside ``transformers``' own ``generate``: same weights, same tokens, same run.

    python benchmarks/generate.py [--rounds 5] [--families llama qwen3] [--out benchmarks/results/generate_cpu.json]

Both decode greedily in float32 with a cache of keys and values, one thread, after a prompt of 64 tokens, 48 new ones in
one row or in 8; the tokens must be equal. They take turns, and each round gives one ratio; the median is reported. CPU
time, not wall time, so that a busy machine does not decide.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from hf_models import copy_weights

from shardtrain.models import find
from shardtrain.tools.generate.engine import Generator

PROMPT, NEW = 64, 48
DIM, LAYERS, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 512, 8, 8, 4, 64, 1408, 8192
OURS = {"vocab_size": VOCAB, "dim": DIM, "num_layers": LAYERS, "num_heads": HEADS}
GROUPED = {**OURS, "num_kv_heads": KV_HEADS, "head_dim": HEAD}
THEIRS = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": FFN,
    "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama3", {**GROUPED, "ffn_dim": FFN, "rope_theta": 10000.0}, "Llama", {}),
    "qwen3": ("qwen3", {**GROUPED, "ffn_dim": FFN, "rope_theta": 10000.0}, "Qwen3", {}),
    "mixtral": (
        "mixtral",
        {**GROUPED, "moe_ffn_dim": 512, "num_experts": 8, "top_k": 2, "rope_theta": 1e6},
        "Mixtral",
        {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**GROUPED, "moe_ffn_dim": 192, "num_experts": 32, "top_k": 4, "rope_theta": 10000.0},
        "Qwen3Moe",
        {"moe_intermediate_size": 192, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **OURS,
            **LATENT,
            "ffn_dim": FFN,
            "num_dense_layers": 1,
            "moe_ffn_dim": 192,
            "num_experts": 16,
            "top_k": 4,
            "num_groups": 4,
            "top_groups": 2,
            "rope_factor": 1.0,
        },
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": HEADS,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 192,
        },
    ),
}


def build(family: str) -> tuple[Any, Any, Any]:
    """Their model and ours with the same random weights, and our layout."""
    name, ours, prefix, changed = FAMILIES[family]
    fields = {**THEIRS, **changed}
    if prefix == "DeepseekV3":
        del fields["head_dim"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**fields)
    config.pad_token_id, config.eos_token_id = 0, None
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # far from even, so that rounding decides no token
            if parameter.ndim > 1:
                parameter.mul_(3)
    theirs.generation_config.eos_token_id = None
    module = find(name)
    model = module.Model(module.Config(**{**ours, "norm_eps": config.rms_norm_eps}))
    copy_weights(theirs, model)
    return theirs, model, module.LAYOUT


def compare(family: str, rows: int, rounds: int) -> dict[str, Any]:
    """Tokens per CPU-second of both, taken in turns."""
    theirs, model, layout = build(family)
    prompts_BT = torch.randint(1, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts = prompts_BT.tolist()
    mask_BT = torch.ones_like(prompts_BT)

    def hugging_face() -> list[list[int]]:
        # a tensor of tokens and its mask: transformers' own fast way, without strings or streaming
        found = theirs.generate(
            prompts_BT, attention_mask=mask_BT, max_new_tokens=NEW, do_sample=False, use_cache=True, pad_token_id=0
        )
        return found[:, PROMPT:].tolist()

    def shardtrain() -> list[list[int]]:
        return Generator(model, layout).generate(prompts, NEW)

    assert hugging_face() == shardtrain(), f"{family}: the tokens differ"  # and both have warmed up
    seconds: dict[str, list[float]] = {"transformers": [], "shardtrain": []}
    for number in range(rounds):
        turns = [("transformers", hugging_face), ("shardtrain", shardtrain)]
        for name, run in turns if number % 2 else reversed(turns):
            seconds[name].append(cpu_seconds(run))
    speeds = {name: round(rows * NEW / statistics.median(found), 1) for name, found in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["transformers"], seconds["shardtrain"], strict=True)]
    return {
        "family": family,
        "rows": rows,
        "tokens_per_cpu_second": speeds,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_seconds": {name: [round(s, 3) for s in found] for name, found in seconds.items()},
    }


def cpu_seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for family in options.families:
        for rows in (1, 8):
            result = compare(family, rows, options.rounds)
            speeds = result["tokens_per_cpu_second"]
            print(
                f"{family:12s} {rows} row{'s' if rows > 1 else ' '}  transformers {speeds['transformers']:7.1f}  "
                f"shardtrain {speeds['shardtrain']:7.1f} tokens per CPU-second  ratio {result['ratio']:.3f}",
                flush=True,
            )
            if options.out:
                keep(options.out, result)


def keep(path: Path, result: dict[str, Any]) -> None:
    """Put a result in the place of an older one of the same family and number of rows."""
    old = json.loads(path.read_text())["results"] if path.exists() else []
    others = [one for one in old if (one["family"], one["rows"]) != (result["family"], result["rows"])]
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "model": {**THEIRS, "prompt_tokens": PROMPT, "new_tokens": NEW},
    }
    results = sorted([*others, result], key=lambda one: (list(FAMILIES).index(one["family"]), one["rows"]))
    path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
