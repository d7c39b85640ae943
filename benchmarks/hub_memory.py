"""Memory of ``shardtrain import`` and ``shardtrain export`` for a generated model.

    python benchmarks/hub_memory.py [--out benchmarks/results/hub_memory.json]

A Llama of about 1.3 GB in float32 is written as a Hugging Face folder of several files, imported, and
exported again. Each command is a separate process whose memory is sampled from /proc 50 times per second.
``anonymous_mib`` is private memory; ``resident_mib`` also counts pages of mapped files, which the kernel
can reclaim. ``empty_anonymous_mib`` is the memory of a process that has only imported torch; the
rest is due to the model.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = 12
DIM = 1536
FFN = 4096
VOCAB = 16384
SHARD_GIGABYTES = 0.3


def write_model(folder: Path) -> tuple[int, int, int]:
    """Write a model in the file layout of the Hugging Face Hub.

    Return the bytes of all tensors, of the largest file and of the largest tensor.
    """
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (DIM, DIM) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (FFN, DIM) for name in ("gate", "up")}
        shapes |= {
            f"{prefix}.mlp.down_proj.weight": (DIM, FFN),
            f"{prefix}.input_layernorm.weight": (DIM,),
        }
        shapes |= {f"{prefix}.post_attention_layernorm.weight": (DIM,)}
    shapes |= {"model.norm.weight": (DIM,), "lm_head.weight": (VOCAB, DIM)}
    files: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    for name, shape in shapes.items():
        tensor = torch.full(shape, 0.01)
        if sizes[-1] + tensor.nbytes > SHARD_GIGABYTES * 1e9:
            files.append({})
            sizes.append(0)
        files[-1][name] = tensor
        sizes[-1] += tensor.nbytes

    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": DIM,
        "num_hidden_layers": LAYERS, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": FFN,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return sum(sizes), max(sizes), max(torch.Size(shape).numel() * 4 for shape in shapes.values())


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run a command. Return its seconds and peak memory."""
    started = time.monotonic()
    peaks = {"RssAnon": 0, "VmRSS": 0}
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for key in peaks:
            values = [
                int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{key}:")
            ]
            peaks[key] = max([peaks[key], *values])
        time.sleep(0.02)
    if process.wait(timeout=60):
        raise SystemExit(f"{' '.join(arguments)} failed")
    seconds = time.monotonic() - started
    return {
        "seconds": round(seconds, 1),
        "anonymous_mib": round(peaks["RssAnon"] / 1024),
        "resident_mib": round(peaks["VmRSS"] / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        total, largest_file, largest_tensor = write_model(root / "hf")
        empty = measure(
            ["-c", "import torch, safetensors, shardtrain.hf.importing, time; time.sleep(0.3)"]
        )
        cli = ["-m", "shardtrain"]
        bound = ["--shard_gigabytes", str(SHARD_GIGABYTES), "--check", "weights"]
        checkpoint = str(root / "checkpoint")
        of_import = measure([*cli, "import", str(root / "hf"), "--to", checkpoint])
        of_export = measure([*cli, "export", checkpoint, "--to", str(root / "back"), *bound])
    mib = {"model": total, "largest_file": largest_file, "largest_tensor": largest_tensor}
    result = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        **{f"{key}_mib": round(value / 2**20) for key, value in mib.items()},
        "empty_anonymous_mib": empty["anonymous_mib"],
        "import": of_import,
        "export": of_export,
    }
    for memory in (of_import, of_export):
        model_mib = memory["anonymous_mib"] - result["empty_anonymous_mib"]
        memory["of_the_model_mib"] = model_mib
        memory["in_files"] = round(model_mib / result["largest_file_mib"], 2)
    text = json.dumps(result, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
