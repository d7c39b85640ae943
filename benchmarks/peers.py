"""Tokens per CPU-second of other trainers, of plain PyTorch loops and of shardtrain on one CPU.

    python benchmarks/peers.py [--rounds 3] [--steps 8] [--only 'plain;ours'] [--out benchmarks/results/peers_cpu.json]
        [--environments FOLDER]

All train the same model in interleaved rounds. A trainer that is not installed gets a separate environment,
created once under ``--environments`` (default ``$XDG_CACHE_HOME/shardtrain/peers``), which shares the
installed PyTorch. Each row is a separate program with one thread per process, whose first two steps are not
counted. CPU seconds are summed over ranks; they depend less on other load than wall time. The output also
has the processor, and the GFLOP/s of one core at the model's shapes with MKL and oneDNN.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path

from processor import processor_facts

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "peers"
TOKENS_PER_STEP = 8 * 512
sys.path.insert(0, str(SCRIPTS))  # for ``work.py``, which defines the model sizes
LEFT_OUT = 2
"""Number of first steps that are not measured, because they allocate memory and may compile."""

SIZES = {
    "vocab_size": 2048, "dim": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "ffn_dim": 768,
    "rope_scaling": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A compared training program, run by ``timed.py FOLDER``."""

    words: Callable[[str, int, int, Path], list[str]]
    """Arguments after ``timed.py FOLDER``, for a dtype, numbers of steps and ranks, and an output folder."""
    ranks: int = 1
    needs: tuple[str, ...] = ()
    """Requirements installed into the separate environment."""


def litgpt(dtype: str, steps: int, ranks: int, folder: Path) -> list[str]:
    """LitGPT's command with a configuration file (JSON is valid YAML). LitGPT always compiles."""
    from work import BETAS, EPS, LEARNING_RATE, MAX_NORM, ROWS, THETA, TOKENS, WEIGHT_DECAY

    model = {
        "name": "common", "block_size": TOKENS, "vocab_size": SIZES["vocab_size"],
        "padded_vocab_size": SIZES["vocab_size"], "n_layer": SIZES["num_layers"], "n_head": SIZES["num_heads"],
        "n_query_groups": SIZES["num_kv_heads"], "n_embd": SIZES["dim"], "head_size": SIZES["head_dim"],
        "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
        "norm_eps": EPS, "mlp_class_name": "LLaMAMLP", "intermediate_size": SIZES["ffn_dim"], "rope_base": int(THETA),
    }  # fmt: skip
    file = folder / "litgpt.yaml"
    settings = {
        "model_name": "common", "model_config": model, "data": "litgpt_rows.Rows", "devices": 1,
        "precision": "bf16-mixed" if dtype == "bfloat16" else "32-true", "out_dir": str(folder / "out"),
        "train": {
            "global_batch_size": ROWS, "micro_batch_size": ROWS, "max_seq_length": TOKENS, "log_interval": 1,
            "max_tokens": steps * TOKENS_PER_STEP, "save_interval": None, "lr_warmup_steps": 1, "max_norm": MAX_NORM,
            "tie_embeddings": False, "min_lr": LEARNING_RATE,
        },
        "eval": {"interval": 100_000, "initial_validation": False, "final_validation": False},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": list(BETAS)},
        },
        "logger_name": "csv",
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    return ["-m", "litgpt", "pretrain", "--config", str(file)]


def script(name: str, *flags: str) -> Callable[[str, int, int, Path], list[str]]:
    """Return the arguments of a script in ``benchmarks/peers``, which trains with a peer or plain PyTorch."""

    def words(dtype: str, steps: int, ranks: int, folder: Path) -> list[str]:
        return [str(SCRIPTS / name), "--dtype", dtype, "--steps", str(steps), *flags]

    return words


def ours(*flags: str) -> Callable[[str, int, int, Path], list[str]]:
    """Return the arguments of ``shardtrain train`` as a user runs it, but without the final checkpoint."""

    def words(dtype: str, steps: int, ranks: int, folder: Path) -> list[str]:
        options = {f"model.overrides.{name}": size for name, size in SIZES.items()} | {
            "model.name": "llama3", "model.flavor": "debugmodel", "job.dump_folder": folder, "training.seq_len": 512,
            "training.local_batch_size": 8 // ranks, "training.steps": steps, "training.mixed_precision_param": dtype,
            "activation_checkpoint.mode": "none", "lr_scheduler.warmup_steps": 1, "checkpoint.enable": "false",
        }  # fmt: skip
        command = ["-m", "shardtrain", "train", "debug"]
        if ranks == 1 and "parallel_degree" not in " ".join(flags):
            command += ["--nproc", "1"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        return [*command, *flags]

    return words


PEERS = {
    "plain": Peer(script("plain.py")),
    "plain, compiled": Peer(script("plain.py", "--compile")),
    "Hugging Face Trainer": Peer(
        script("hugging_face.py"), needs=("transformers>=5", "accelerate")
    ),
    "Fabric": Peer(script("fabric.py"), needs=("lightning",)),
    "litgpt (compiled)": Peer(litgpt, needs=("litgpt", "lightning", "requests")),
    "ours": Peer(ours()),
    "ours, PyTorch's kernels": Peer(ours("--training.cpu_kernels", "pytorch")),
    "ours, compiled": Peer(ours("--compile.enable", "true")),
    "plain FSDP2, 2 ranks": Peer(script("plain.py"), 2),
    "plain FSDP2, compiled, 2 ranks": Peer(script("plain.py", "--compile"), 2),
    "ours, FSDP, 2 ranks": Peer(ours(), 2),
    "ours, FSDP, compiled, 2 ranks": Peer(ours("--compile.enable", "true"), 2),
    "ours, tensor parallel, 2 ranks": Peer(
        lambda d, s, r, f: ours("--parallelism.tensor_parallel_degree", "2")(d, s, 1, f), 2
    ),
    "ours, context parallel, 2 ranks": Peer(
        lambda d, s, r, f: ours("--parallelism.context_parallel_degree", "2")(d, s, 1, f), 2
    ),
}


def python_of(peer: Peer, environments: Path) -> str:
    """Return the interpreter with the requirements of a peer. Creates the environment if needed."""
    if not peer.needs:
        return sys.executable
    folder = environments / "-".join(re.sub(r"[^a-z0-9]+", "_", need) for need in peer.needs)
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (site,) = (folder / "lib").glob("python3*/site-packages")
        # All trainers share this PyTorch, but no other package, because they require different versions.
        # The constraint file stops pip from replacing PyTorch.
        torch_package = distribution("torch")
        names = {file.parts[0] for file in torch_package.files or ()}
        for name in names - {"..", "__pycache__"}:
            (site / name).symlink_to(Path(str(torch_package.locate_file(name))))
        pinned = folder / "constraints.txt"
        pinned.write_text(f"torch=={version('torch')}\n")
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "-c", str(pinned), *peer.needs],
            check=True,
            stdout=sys.stderr,
        )
        (folder / "done").touch()
    return str(python)


def run(
    peer: Peer, dtype: str, steps: int, timeout_seconds: float, python: str = sys.executable
) -> dict[str, object]:
    """Run one program and return its row."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        times = folder / "times"
        work = folder / "work"
        times.mkdir()
        work.mkdir()
        start = [python]
        if peer.ranks > 1:
            start += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={peer.ranks}",
            ]
        command = [
            *start,
            str(SCRIPTS / "timed.py"),
            str(times),
            *peer.words(dtype, steps, peer.ranks, work),
        ]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(HERE.parent)]),
        }  # fmt: skip
        # allow bytecode caches; without them, each start takes a second longer
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        load = os.getloadavg()[0]
        started = time.time()
        with open(folder / "log", "w+") as log:
            try:
                code = subprocess.run(
                    command,
                    cwd=work,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_seconds,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            log.seek(0)
            last = log.read()[-1500:]
        ranks = [list(_steps(path)) for path in sorted(times.glob("*.jsonl"))]
    row: dict[str, object] = {"exit": code, "load": round(load, 1)}
    if code or len(ranks) < peer.ranks or any(len(rank) <= LEFT_OUT + 1 for rank in ranks):
        # remove paths of this machine from the output
        return {
            **row,
            "last_lines": re.sub(r"/[^\s\"':]*/", "", last),
        }
    cpu_seconds_of_ranks = []
    median_cpu_seconds = 0.0
    for rank in ranks:
        # Each line has the CPU seconds since the start, so differences are seconds per step.
        totals = [cpu_seconds for _, cpu_seconds, _ in rank[LEFT_OUT - 1 :]]
        per_step = [after - before for before, after in itertools.pairwise(totals)]
        median_cpu_seconds += statistics.median(per_step)
        cpu_seconds_of_ranks.append([round(value, 4) for value in per_step])
    return {
        **row,
        "tokens_per_cpu_second": round(TOKENS_PER_STEP / median_cpu_seconds),
        "cpu_seconds_per_step": cpu_seconds_of_ranks,
        "seconds_to_first_step": round(ranks[0][0][0] - started, 2),
        "cpu_seconds_to_first_step": round(ranks[0][0][1], 2),
        "peak_mib": [rank[-1][2] for rank in ranks],
    }


def _steps(path: Path) -> Iterator[tuple[float, float, float]]:
    """Yield wall seconds, CPU seconds and peak memory after each optimizer step.

    Wrappers of an optimizer report each step again. Only the lines of the first optimizer are yielded.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return ((wall, cpu, peak) for name, wall, cpu, peak in lines if name == lines[0][0])


GEMM = """
import json, time, torch
torch.set_num_threads(1)
found = {}
for dtype in (torch.float32, torch.bfloat16):
    for inputs, outputs in ((256, 768), (768, 256), (256, 2048), (1024, 1024)):
        rows = 1024 if inputs == 1024 else 4096
        x, w = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        ways = {"linear": lambda: torch.nn.functional.linear(x, w)}
        if dtype == torch.float32:
            ways["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
        for name, way in ways.items():
            seconds = []
            for _ in range(12):
                began = time.process_time(); way(); seconds.append(time.process_time() - began)
            shape = f"{str(dtype)[6:]} {rows}x{inputs}x{outputs} {name}"
            found[shape] = round(2 * rows * inputs * outputs / sorted(seconds)[2] / 1e9)
print(json.dumps(found))
"""


def gemm_ceilings() -> dict[str, int]:
    """Return GFLOP/s of one core by shape."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GEMM], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def summary(rows: list[dict[str, object]]) -> Iterator[str]:
    """Yield a line per dtype and peer: medians over rounds, and the ratio to a plain loop on as many ranks."""
    for dtype in dict.fromkeys(str(row["dtype"]) for row in rows):
        of_type = [row for row in rows if row["dtype"] == dtype]
        for name in dict.fromkeys(str(row["peer"]) for row in of_type):
            rows_of_peer = {row["round"]: row for row in of_type if row["peer"] == name}
            base = "plain FSDP2, 2 ranks" if PEERS[name].ranks > 1 else "plain"
            rows_of_base = {row["round"]: row for row in of_type if row["peer"] == base}
            speed = {
                number: row["tokens_per_cpu_second"]
                for number, row in rows_of_peer.items()
                if "peak_mib" in row
            }
            if not speed:
                yield f"{dtype} | {name} | failed | | | |"
                continue
            ratios = [
                speed[number] / rows_of_base[number]["tokens_per_cpu_second"]  # type: ignore[operator]
                for number in speed
                if "peak_mib" in rows_of_base.get(number, {})
            ]
            ratio = (
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                if ratios
                else ""
            )
            first = statistics.median(
                row["seconds_to_first_step"] for row in rows_of_peer.values() if "peak_mib" in row
            )  # type: ignore[type-var]
            first_cpu = statistics.median(
                row["cpu_seconds_to_first_step"]
                for row in rows_of_peer.values()
                if "peak_mib" in row  # type: ignore[type-var]
            )
            peak = max(max(row["peak_mib"]) for row in rows_of_peer.values() if "peak_mib" in row)  # type: ignore[type-var]
            median = statistics.median(speed.values())  # type: ignore[type-var]
            yield f"{dtype} | {name} | {median:.0f} | {ratio} | {first:.1f} ({first_cpu:.1f}) | {peak}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--only", help="names of peers, separated by semicolons")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one program")
    parser.add_argument("--out", type=Path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--environments", type=Path, default=cache / "shardtrain" / "peers")
    options = parser.parse_args()
    names = options.only.split(";") if options.only else list(PEERS)
    rows: list[dict[str, object]] = []
    facts: dict[str, object] = {
        "processor": processor_facts(), "torch": version("torch"), "python": platform.python_version(),
        "gemm_gflops": gemm_ceilings(),
    }  # fmt: skip
    print(json.dumps(facts))
    pythons = {name: python_of(PEERS[name], options.environments) for name in names}
    for number in range(options.rounds):
        for dtype in options.dtypes.split(","):
            for name in names:
                row = run(PEERS[name], dtype, options.steps, options.timeout, pythons[name])
                rows.append({"round": number, "dtype": dtype, "peer": name, **row})
                print(json.dumps(rows[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print("type | program | tokens per CPU-second | ratio | seconds (CPU) to the first step | MiB")
    for line in summary(rows):
        print(line)


if __name__ == "__main__":
    main()
