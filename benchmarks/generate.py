"""Generated tokens per CPU-second of shardtrain and of ``generate`` in ``transformers``,
with the same weights.

    python benchmarks/generate.py [--rounds 5] [--families llama qwen3] [--out benchmarks/results/generate_cpu.json]
    python benchmarks/generate.py --sizes 1B debugmodel [--rows 1 8] [--prompts 32 1024] [--dtypes bfloat16 float32]

The second form uses real sizes of Llama with random weights, and separates the prompt from new tokens: for
`transformers`, for this package with PyTorch's own kernels, and as the command computes.
1B needs 15 GB of memory.

Both decode greedily in float32 with a KV cache and one thread: a prompt of 64 tokens and 48 new ones, in
one row or in
8. The tokens must be equal. Measurements alternate, each round yields one ratio, and the median is
reported. CPU time is used instead of wall time, because it depends less on other load.
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
from hf_models import _find, copy_weights

from shardtrain import distributed
from shardtrain.models import find
from shardtrain.ops import chosen_kernels
from shardtrain.ops.cpu import kernel_speed, packed_linear
from shardtrain.tools.generate.engine import Generator
from shardtrain.utils.allocator import keep_freed_memory

PROMPT = 64
NEW = 48
DIM = 512
LAYERS = 8
HEADS = 8
KV_HEADS = 4
HEAD = 64
FFN = 1408
VOCAB = 8192
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
LATENT = {
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
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
        {
            "moe_intermediate_size": 192,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
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
    """Return the ``transformers`` model, the native model with the same random weights, and its layout."""
    name, ours, prefix, changed = FAMILIES[family]
    fields = {**THEIRS, **changed}
    if prefix == "DeepseekV3":
        del fields["head_dim"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**fields)
    config.pad_token_id = 0
    config.eos_token_id = None
    reference = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # spread the logits, so rounding decides no token
            if parameter.ndim > 1:
                parameter.mul_(3)
    reference.generation_config.eos_token_id = None
    module = find(name)
    model = module.Model(module.Config(**{**ours, "norm_eps": config.rms_norm_eps}))
    copy_weights(reference, model)
    return reference, model, module.LAYOUT


def compare(family: str, rows: int, rounds: int) -> dict[str, Any]:
    """Return tokens per CPU-second of transformers and shardtrain, measured alternately."""
    reference, model, layout = build(family)
    prompts_BT = torch.randint(1, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts = prompts_BT.tolist()
    mask_BT = torch.ones_like(prompts_BT)

    def hugging_face() -> list[list[int]]:
        # transformers is fastest with tensors as input: no strings, no streaming
        generated = reference.generate(
            prompts_BT,
            attention_mask=mask_BT,
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return generated[:, PROMPT:].tolist()

    def shardtrain() -> list[list[int]]:
        return Generator(model, layout).generate(prompts, NEW)

    assert hugging_face() == shardtrain(), f"{family}: the tokens differ"  # also warms up both
    seconds: dict[str, list[float]] = {"transformers": [], "shardtrain": []}
    for number in range(rounds):
        turns = [("transformers", hugging_face), ("shardtrain", shardtrain)]
        for name, run in turns if number % 2 else reversed(turns):
            seconds[name].append(cpu_seconds(run))

    speeds = {}
    rounded_seconds = {}
    for name, values in seconds.items():
        speeds[name] = round(rows * NEW / statistics.median(values), 1)
        rounded_seconds[name] = [round(value, 3) for value in values]
    ratios = [a / b for a, b in zip(seconds["transformers"], seconds["shardtrain"], strict=True)]
    return {
        "family": family,
        "rows": rows,
        "tokens_per_cpu_second": speeds,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_seconds": rounded_seconds,
    }


class Clock(transformers.StoppingCriteria):
    """Stopping criterion that never stops, and records CPU seconds after each new token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seconds.append(time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def build_size(size: str, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """Build the three compared models of one size, with the same weights.

    Returns:
        The ``transformers`` Llama, the native model, the native model as ``shardtrain generate``
        computes it, and the native layout.
    """
    module = find("llama3")
    flavor = module.FLAVORS[size]
    ours = module.Config(**flavor)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": ours.rope_theta}
    if ours.rope_scaling == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": ours.rope_scaling_factor,
            "original_max_position_embeddings": 8192,
        }
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.dim,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        intermediate_size=ours.ffn_dim,
        tie_word_embeddings=ours.tied_embeddings,
        rope_parameters=rope,
        max_position_embeddings=131072,
        rms_norm_eps=ours.norm_eps,
        pad_token_id=0,
    )
    config.eos_token_id = None
    torch.manual_seed(0)
    reference = (
        transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval().requires_grad_(False)
    )
    reference.generation_config.eos_token_id = None
    # spread the logits, so float32 rounding decides no token
    for parameter in reference.parameters():
        if parameter.ndim > 1:
            parameter.mul_(3)
    models = []
    # The two models share the reference's tensors until the weights of one model are packed.
    for _ in range(2):
        with torch.device("meta"):
            model = module.Model(ours)
        source = reference.state_dict()
        model.load_state_dict(
            {name: _find(name, source) for name in model.state_dict()}, assign=True
        )
        if ours.tied_embeddings:
            model.head.weight = model.embed.weight
        models.append(model.eval().requires_grad_(False))
    return reference, *models, module.LAYOUT


def measure_size(size: str, dtype_name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return CPU seconds until the first token and for each following one, for all three alternately."""
    reference, plain, chosen, layout = build_size(size, getattr(torch, dtype_name))
    kernels = kernel_speed.remembered_or_measured()
    chosen_kernels.use(kernels)
    distributed.use_chosen_kernels(chosen)
    vocabulary = plain.embed.num_embeddings
    weight_bytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    results = []
    is_packed = False
    for rows in sorted(options.rows):
        is_packed = is_packed or packed_linear.use_where_it_pays(chosen, 128, rows)
        for tokens in options.prompts:
            prompts_BT = torch.randint(
                1, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1)
            )
            prompts = prompts_BT.tolist()

            def hugging_face(prompts_BT: torch.Tensor = prompts_BT) -> tuple[Any, list[float]]:
                clock = Clock()
                generated = reference.generate(
                    prompts_BT, attention_mask=torch.ones_like(prompts_BT), max_new_tokens=options.new, do_sample=False,
                    use_cache=True, pad_token_id=0, stopping_criteria=transformers.StoppingCriteriaList([clock]),
                )  # fmt: skip
                return generated[:, prompts_BT.size(1) :].tolist(), clock.seconds

            def ours(model: Any, kernels: Any, prompts: Any = prompts) -> tuple[Any, list[float]]:
                seconds: list[float] = []

                def watch(row: int, _: list[int]) -> bool:
                    if row == len(prompts) - 1:
                        seconds.append(time.process_time())
                    return False

                chosen_kernels.use(kernels)
                return Generator(model, layout).generate(prompts, options.new, watch=watch), seconds

            turns: dict[str, Callable[[], tuple[Any, list[float]]]] = {
                "transformers": hugging_face,
                "PyTorch's kernels": lambda: ours(plain, chosen_kernels.PYTORCH),
                "chosen kernels": lambda: ours(chosen, kernels),
            }
            cpu_seconds: dict[str, dict[str, list[float]]] = {
                name: {"first": [], "next": []} for name in turns
            }
            texts = {}
            for number in range(options.rounds):
                # Each round reverses the order.
                for name in list(turns)[:: 1 if number % 2 else -1]:
                    began = time.process_time()
                    texts[name], seconds = turns[name]()
                    seconds_per_step = (seconds[-1] - seconds[0]) / (options.new - 1)
                    cpu_seconds[name]["first"].append(seconds[0] - began)
                    cpu_seconds[name]["next"].append(seconds_per_step)
            if dtype_name == "float32":
                assert len({str(text) for text in texts.values()}) == 1, "the tokens differ"
            result = {
                "size": size, "dtype": dtype_name, "rows": rows, "prompt": tokens, "packed": is_packed,
                "weight_bytes": weight_bytes, "cpu_seconds": cpu_seconds,
            }  # fmt: skip
            print_result(result)
            results.append(result)
    return results


def print_result(result: dict[str, Any]) -> None:
    """Print one line per method: medians of the prompt, of a step, and of a prompt with 128 new tokens."""
    rows = result["rows"]
    case = f"{result['size']:10s} {result['dtype']:8s} {rows} x {result['prompt']:4d}"
    for name, seconds in result["cpu_seconds"].items():
        first = statistics.median(seconds["first"])
        step = statistics.median(seconds["next"])
        work = f"{case}  {name:17s}"
        prompt = f"prompt {first:8.3f} s {rows * result['prompt'] / first:8.1f} tokens/s"
        steps = f"step {1000 * step:7.1f} ms {rows / step:7.2f} tokens/s"
        weights = f"{result['weight_bytes'] / step / 1e9:5.1f} GB/s of weights"
        print(
            f"{work} {prompt}   {steps}   {weights}   128 new tokens {first + 127 * step:6.1f} s",
            flush=True,
        )


def read_gigabytes_per_second() -> float:
    """Return the read bandwidth of one core in GB/s: the sum of 256 MB, best of five."""
    numbers = torch.ones(1 << 26)
    return 4 * numbers.numel() / min(cpu_seconds(numbers.sum) for _ in range(5)) / 1e9


def cpu_seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=[], choices=list(find("llama3").FLAVORS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 1024])
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"]
    )
    parser.add_argument(
        "--new",
        type=int,
        default=17,
        help="new tokens with --sizes: the time of a step is their mean",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if options.sizes:
        # `shardtrain generate` sets this itself. Set it for all compared programs, to be fair
        keep_freed_memory()
        print(f"one core reads {read_gigabytes_per_second():.1f} GB/s", flush=True)
        results = []
        for size in options.sizes:
            for dtype in options.dtypes:
                results += measure_size(size, dtype, options)
        if options.out:
            facts = {"torch": torch.__version__, "transformers": transformers.__version__}
            options.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
        return
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
                store_result(options.out, result)


def store_result(path: Path, result: dict[str, Any]) -> None:
    """Replace an older result with the same family and number of rows."""
    old = json.loads(path.read_text())["results"] if path.exists() else []
    other_results = [
        one for one in old if (one["family"], one["rows"]) != (result["family"], result["rows"])
    ]
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "model": {**THEIRS, "prompt_tokens": PROMPT, "new_tokens": NEW},
    }
    results = sorted(
        [*other_results, result], key=lambda one: (list(FAMILIES).index(one["family"]), one["rows"])
    )
    path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
