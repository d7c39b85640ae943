"""Speed and memory of ``shardtrain import`` and ``export``,
and of ``from_pretrained`` and ``save_pretrained``.

    python benchmarks/hub_transfer.py [--rounds 3] [--out benchmarks/results/hub_transfer.json]

Four commands process a bfloat16 Llama of 2 GiB with random weights in files of 500 MB, in ``--rounds``
interleaved rounds: import and export of shardtrain, and with transformers a process that opens the folder
(``load``) and one that also saves it (``load_save``), because shardtrain leaves a folder on disk, too. Each
command is a separate process. ``seconds`` is the total time; ``anonymous_mib`` is the peak RssAnon, sampled 50 times
per second. shardtrain hashes every byte, syncs files to disk and, in an export, reads back and compares
each weight; transformers does none of these.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from processor import processor_facts
from safetensors.torch import save_file

LAYERS = 16
DIM = 2048
FFN = 8192
VOCAB = 49152
KEYS = 512
SHARD_BYTES = 500 * 10**6
LOAD = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
assert all(not p.is_meta for p in model.parameters())
if len(sys.argv) > 2:
    model.save_pretrained(sys.argv[2], max_shard_size="500MB")
"""


def write_model(folder: Path) -> tuple[int, int]:
    """Write a model in the file layout of the Hugging Face Hub.

    Return the bytes of all tensors and of the largest file.
    """
    folder.mkdir()
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (DIM, DIM) for name in "qo"}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (KEYS, DIM) for name in "kv"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (FFN, DIM) for name in ("gate", "up")}
        shapes |= {
            f"{prefix}.mlp.down_proj.weight": (DIM, FFN),
            f"{prefix}.input_layernorm.weight": (DIM,),
        }
        shapes |= {f"{prefix}.post_attention_layernorm.weight": (DIM,)}
    shapes |= {"model.norm.weight": (DIM,)}
    shares: list[list[str]] = [[]]
    size = 0
    sizes = []
    for name, shape in shapes.items():
        count = 2 * torch.Size(shape).numel()
        if size + count > SHARD_BYTES:
            sizes.append(size)
            shares.append([])
            size = 0
        shares[-1].append(name)
        size += count
    sizes.append(size)
    generator = torch.Generator().manual_seed(0)
    index = {}
    for number, share in enumerate(shares, 1):
        file = f"model-{number:05d}-of-{len(shares):05d}.safetensors"
        tensors = {
            name: torch.randn(shapes[name], generator=generator).mul_(0.02).bfloat16()
            for name in share
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(share, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": DIM,
        "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": KEYS // 64,
        "intermediate_size": FFN, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return sum(sizes), max(sizes)


def measure(arguments: list[str]) -> tuple[float, int]:
    """Run a command. Return its seconds and its peak RssAnon in MiB."""
    started = time.monotonic()
    peak = 0
    with open(os.devnull, "w") as nothing:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=nothing, stderr=subprocess.PIPE
        )
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]))
        time.sleep(0.02)
    assert process.stderr is not None
    if process.wait(timeout=60):
        raise SystemExit(f"{' '.join(arguments)} failed\n{process.stderr.read().decode()[-2000:]}")
    return time.monotonic() - started, round(peak / 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[Any]]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        total, largest = write_model(root / "hf")
        os.sync()
        cli = ["-m", "shardtrain"]
        bound = ["--shard_gigabytes", "0.5", "--check", "weights"]
        hf = str(root / "hf")
        checkpoint = str(root / "checkpoint")
        commands = {
            "import": [*cli, "import", hf, "--to", checkpoint, "--check", "weights"],
            "load": ["-c", LOAD, hf],
            "export": [*cli, "export", checkpoint, "--to", str(root / "back"), *bound],
            "load_save": ["-c", LOAD, hf, str(root / "saved")],
        }
        for _ in range(options.rounds):
            for name, command in commands.items():
                loads.append(round(os.getloadavg()[0], 2))
                seconds, anonymous = measure(command)
                measured = results.setdefault(name, {"seconds": [], "anonymous_mib": []})
                measured["seconds"].append(round(seconds, 1))
                measured["anonymous_mib"].append(anonymous)
                print(name, round(seconds, 1), "s", anonymous, "MiB", "load", loads[-1], flush=True)
            for folder in ("checkpoint", "back", "saved"):
                shutil.rmtree(root / folder)
    for measured in results.values():
        measured["median_seconds"] = statistics.median(measured["seconds"])
    result = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor_facts(),
        "threads_of_torch": os.environ.get("OMP_NUM_THREADS", "default"),
        "load_averages": loads,
        "model_mib": round(total / 2**20),
        "largest_file_mib": round(largest / 2**20),
        **results,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
