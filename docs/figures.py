"""Fill the figures of README and the pages from the result files: ``python docs/figures.py [--check]``.

A page marks a figure as ``<!--f:NAME-->12,231<!--/f-->``; Markdown shows only the text between the two comments.
``FIGURES`` has a function for each name, which computes the text from a file in ``benchmarks/results``. So a figure
that appears on several pages has one source. A marker whose text spans several lines holds a table.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
MARKED = re.compile(r"<!--f:(?P<name>[\w.]+)-->(?P<text>.*?)<!--/f-->", re.DOTALL)


def read(name: str) -> Any:
    """Return the content of a JSON file in ``benchmarks/results``."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def claim(name: str, key: str) -> Any:
    """Return a value of ``claims.json``: results that a command prints and no benchmark writes to a file."""
    return read("claims")[name][key]


def _faults(key: str) -> int:
    return int(claim("faults_in_the_engine", key) + claim("faults_in_model_files", key))


# One GPU: benchmarks/accelerator.py


def _speed_rows() -> list[dict[str, Any]]:
    lines = (RESULTS / "accelerator-cuda.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["part"] == "speed" and "tokens_per_second_per_device" in row]


def _gpu(case: str) -> dict[str, Any]:
    """Return the last measured row of a case."""
    return [row for row in _speed_rows() if row["case"] == case][-1]


def gpu_tokens(case: str) -> str:
    """Return tokens per second, such as ``12,231``."""
    return f"{_gpu(case)['tokens_per_second_per_device']:,.0f}"


def gpu_mfu(case: str) -> str:
    """Return the model FLOP/s utilization in percent, such as ``63.7``."""
    return f"{100 * _gpu(case)['mfu']:.1f}"


GPU_CASES = {
    "1B compiled": "Llama 1B, 8 rows",
    "3B compiled": "Llama 3B, 4 rows",
    "8B of five rows": "Llama 3.1 8B, 5 rows",
    "8B of five rows float8": "Llama 3.1 8B in float8, 5 rows",
    "8B recomputed": "Llama 3.1 8B, every layer recomputed, 4 rows",
    "8B rounded by chance": "the same with stochastic rounding of weights and state",
}


def gpu_table() -> str:
    """Return a table of cases on one GPU: tokens per second, utilization and memory."""
    lines = [
        "| Model, sequences of 4,096 tokens | tokens/s | MFU | Peak memory, GiB |",
        "|---|---:|---:|---:|",
    ]
    for case, title in GPU_CASES.items():
        lines.append(
            f"| {title} | {gpu_tokens(case)} | {gpu_mfu(case)} % | {_gpu(case)['peak_memory_gib']:.1f} |"
        )
    return "\n".join(lines)


# Other trainers on a CPU: benchmarks/peers.py


def _tokens_by_round(dtype: str, peer: str) -> dict[int, float]:
    rows = [row for row in read("peers_cpu")["rows"] if row["exit"] == 0]
    return {
        row["round"]: row["tokens_per_cpu_second"]
        for row in rows
        if (row["dtype"], row["peer"]) == (dtype, peer)
    }


def _ratios(dtype: str, peer: str, base: str) -> list[float]:
    """Return the ratio of two programs in each round that both have run in."""
    ours, theirs = _tokens_by_round(dtype, peer), _tokens_by_round(dtype, base)
    return [tokens / theirs[number] for number, tokens in ours.items() if number in theirs]


def peer_ratio(dtype: str, peer: str, base: str) -> str:
    """Return the median ratio of tokens per CPU-second, such as ``1.39``."""
    return f"{statistics.median(_ratios(dtype, peer, base)):.2f}"


def _peak_mib(dtype: str, peer: str) -> float:
    rows = [
        row for row in read("peers_cpu")["rows"] if (row["dtype"], row["peer"]) == (dtype, peer)
    ]
    return statistics.median(max(row["peak_mib"]) for row in rows)


def peer_memory(dtype: str, peer: str, base: str) -> str:
    """Return the ratio of the median peak memory of a rank, such as ``0.75``."""
    return f"{_peak_mib(dtype, peer) / _peak_mib(dtype, base):.2f}"


PEERS = {
    "plain": ("plain loop", "plain"),
    "plain, compiled": ("plain loop, compiled", "plain"),
    "ours": ("shardtrain", "plain"),
    "ours, compiled": ("shardtrain, compiled", "plain"),
    "plain FSDP2, 2 ranks": ("plain FSDP2, 2 ranks", "plain FSDP2, 2 ranks"),
    "plain FSDP2, compiled, 2 ranks": ("plain FSDP2, compiled, 2 ranks", "plain FSDP2, 2 ranks"),
    "ours, FSDP, 2 ranks": ("shardtrain, FSDP, 2 ranks", "plain FSDP2, 2 ranks"),
    "ours, FSDP, compiled, 2 ranks": (
        "shardtrain, FSDP, compiled, 2 ranks",
        "plain FSDP2, 2 ranks",
    ),
    "ours, tensor parallel, 2 ranks": (
        "shardtrain, tensor parallel, 2 ranks",
        "plain FSDP2, 2 ranks",
    ),
    "ours, context parallel, 2 ranks": (
        "shardtrain, context parallel, 2 ranks",
        "plain FSDP2, 2 ranks",
    ),
}


def peers_table() -> str:
    """Return a table of all programs: tokens per CPU-second, and the ratio to the plain loop of the same round."""
    lines = [
        "| Program | float32 | ratio to plain | bfloat16 | ratio to plain | Rounds |",
        "|---|---:|---|---:|---|---:|",
    ]
    for peer, (title, base) in PEERS.items():
        cells = [title]
        for dtype in ("float32", "bfloat16"):
            ratios = _ratios(dtype, peer, base)
            middle = statistics.median(ratios)
            spread = (
                "1" if peer == base else f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
            cells += [f"{statistics.median(_tokens_by_round(dtype, peer).values()):,.0f}", spread]
        rounds = [len(_tokens_by_round(dtype, peer)) for dtype in ("float32", "bfloat16")]
        cells.append(" and ".join(str(number) for number in dict.fromkeys(rounds)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Checkpoints and Hugging Face folders: benchmarks/hub_transfer.py, benchmarks/scale.py


def transfer_seconds(direction: str) -> str:
    """Return the median seconds of an import or export of the folder of 2 GiB."""
    return f"{read('hub_transfer_cpu')[direction]['median_seconds']:.1f}"


def save_table() -> str:
    """Return a table of the plans of saves: CPU seconds, memory, message and manifest by model and mesh."""
    lines = [
        "| Model and mesh | Ranks | Plan, CPU s | Plan, MiB | Sent by a rank, bytes | Manifest, MB |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, row in read("scale_cpu")["saving"].items():
        plan = f"{row['plan_cpu_seconds']:.2f} | {row['plan_mib']:.0f}"
        sent, manifest = max(row["said_bytes"]), row["manifest_bytes"] / 1e6
        lines.append(f"| {name} | {row['ranks']:,} | {plan} | {sent} | {manifest:.1f} |")
    return "\n".join(lines)


def resume_table() -> str:
    """Return a table of resumes: CPU seconds, memory and files of a rank by the meshes that saved and that resume."""
    lines = [
        "| Saved on, resumed on | CPU s of a rank | MiB | Pieces | Files | Bytes read for each needed |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, row in read("scale_cpu")["resuming"].items():
        cost = f"{row['cpu_seconds']:.1f} | {row['mib']:.0f}"
        lines.append(
            f"| {name} | {cost} | {row['pieces']:,} | {row['files']:,} | {row['read_for_needed']:.1f} |"
        )
    return "\n".join(lines)


def host_step_table() -> str:
    """Return a table of the host work of a step, with a delay before each message, by number of ranks."""
    lines = [
        "| Real ranks | Messages in sequence | Processor, ms | With 2 ms for each message, ms |"
    ]
    lines.append("|---:|---:|---:|---:|")
    for ranks in ("16", "32", "64"):
        row = read("scale_cpu")["host_step"][ranks]
        processor, total = row["processor_milliseconds"], row["milliseconds"]
        lines.append(
            f"| {ranks} | {row['messages_in_sequence']:.0f} | {processor:.1f} | {total:.1f} |"
        )
    return "\n".join(lines)


# Checkpoints in an object store: benchmarks/object_store.py


def object_store_requests(ranks: str) -> str:
    """Return the number of requests of rank 0 for the markers of a background save."""
    return str(sum(read("object_store_cpu")["markers"][ranks]["requests"].values()))


# Architectures of transformers on each mesh: benchmarks/architectures.py


def _architecture_cells() -> list[dict[str, Any]]:
    return list(read("architectures_cpu")["cells"])


def _reasons() -> list[str]:
    """Return the distinct reasons of refusals, in the order of the table."""
    texts = [cell["text"] for cell in _architecture_cells() if cell["verdict"] == "refused"]
    return list(dict.fromkeys(texts))


def _shown_verdict(cell: dict[str, Any], reasons: list[str]) -> str:
    if cell["verdict"] == "no experts":
        return ""
    if cell["verdict"] == "refused":
        return f"({reasons.index(cell['text']) + 1})"
    return str(cell["verdict"]) + ("" if cell["loss_parallel"] else " *")


def architectures_table() -> str:
    """Return a table of architectures by meshes. A number refers to ``architectures_reasons_table``."""
    cells = _architecture_cells()
    reasons = _reasons()
    columns = list(dict.fromkeys(cell["mesh"] for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell["architecture"], {})[cell["mesh"]] = _shown_verdict(cell, reasons)
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |")
    return "\n".join(lines)


def architectures_reasons_table() -> str:
    """Return the reasons of ``architectures_table``, by their numbers."""
    lines = ["| | Reason |", "|---|---|"]
    lines += [f"| ({number}) | {reason} |" for number, reason in enumerate(_reasons(), 1)]
    return "\n".join(lines)


def architectures_count(*verdicts: str) -> int:
    """Return the number of cells with these verdicts."""
    return sum(cell["verdict"] in verdicts for cell in _architecture_cells())


def architectures_percent() -> str:
    """Return the share of equal cells among those that apply, such as ``89``."""
    same = architectures_count("same")
    return f"{100 * same / (len(_architecture_cells()) - architectures_count('no experts')):.0f}"


def architectures_measured() -> str:
    """Return the versions of ``transformers`` of all rows, and the dates, such as ``with `transformers` 5.24.0``."""
    rows = read("architectures_cpu")["measured"].values()
    versions = sorted({row["transformers"] for row in rows})
    dates = sorted({row["date"] for row in rows})
    return f"with `transformers` {' and '.join(versions)} on {' to '.join(dates)}"


# The native and the transformers route: benchmarks/transformers_route.py


def routes_table() -> str:
    """Return a table of both routes: tokens per CPU-second, and the ratios of all rounds."""
    result = read("transformers_route_cpu")
    lines = [
        "| Model | Precision | native, tokens/CPU-s | `transformers`, tokens/CPU-s | Ratio (rounds) |"
    ]
    lines.append("|---|---|---:|---:|---|")
    for row in result["rows"]:
        speeds = row["tokens_per_cpu_second"]
        spread = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        cells = [
            row["model"],
            row["dtype"],
            f"{speeds['native']:,.0f}",
            f"{speeds['transformers']:,.0f}",
            spread,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def routes_processor() -> str:
    """Return the processor of ``routes_table``."""
    return str(read("transformers_route_cpu")["processor"])


FIGURES: dict[str, Callable[[], str]] = {
    "routes.table": routes_table,
    "routes.processor": routes_processor,
    "architectures.table": architectures_table,
    "architectures.reasons_table": architectures_reasons_table,
    "architectures.same": lambda: str(architectures_count("same")),
    "architectures.cells": lambda: str(
        len(_architecture_cells()) - architectures_count("no experts")
    ),
    "architectures.percent": architectures_percent,
    "architectures.measured": architectures_measured,
    "gpu.table": gpu_table,
    "gpu.8b.tokens": lambda: gpu_tokens("8B of five rows"),
    "gpu.8b.mfu": lambda: gpu_mfu("8B of five rows"),
    "gpu.8b_float8.tokens": lambda: gpu_tokens("8B of five rows float8"),
    "cpu.bfloat16": lambda: peer_ratio("bfloat16", "ours", "plain"),
    "cpu.bfloat16_compiled": lambda: peer_ratio("bfloat16", "ours, compiled", "plain"),
    "cpu.float32": lambda: peer_ratio("float32", "ours", "plain"),
    "cpu.float32_compiled": lambda: peer_ratio("float32", "ours, compiled", "plain"),
    "cpu.fsdp_bfloat16": lambda: peer_ratio(
        "bfloat16", "ours, FSDP, 2 ranks", "plain FSDP2, 2 ranks"
    ),
    "cpu.fsdp_float32": lambda: peer_ratio(
        "float32", "ours, FSDP, 2 ranks", "plain FSDP2, 2 ranks"
    ),
    "cpu.memory": lambda: peer_memory("bfloat16", "ours", "plain"),
    "cpu.peers_table": peers_table,
    "hub.import_seconds": lambda: transfer_seconds("import"),
    "hub.export_seconds": lambda: transfer_seconds("export"),
    "search.cases": lambda: str(claim("search", "cases")),
    "search.equal": lambda: str(claim("search", "equal")),
    "search.refused": lambda: str(claim("search", "refused")),
    "faults.planted": lambda: str(_faults("planted")),
    "faults.named": lambda: str(_faults("named")),
    "faults.engine": lambda: str(claim("faults_in_the_engine", "planted")),
    "faults.model_files": lambda: str(claim("faults_in_model_files", "planted")),
    "faults.of_a_user_seen": lambda: str(claim("faults_of_a_new_user", "seen_at_first")),
    "faults.of_a_user_named": lambda: str(claim("faults_of_a_new_user", "named_at_first")),
    "faults.of_a_user_named_now": lambda: str(claim("faults_of_a_new_user", "named")),
    "real_sizes.loss": lambda: str(claim("real_sizes", "worst_loss")),
    "real_sizes.norm": lambda: str(claim("real_sizes", "worst_gradient_norm")),
    "plan.memory_percent": lambda: str(claim("plan_memory", "worst_percent")),
    "object_store.requests_64": lambda: object_store_requests("64"),
    "object_store.requests_1024": lambda: object_store_requests("1024"),
    "object_store.requests": lambda: object_store_requests("4096"),
    "object_store.seconds": lambda: f"{read('object_store_cpu')['markers']['4096']['seconds']:.1f}",
    "object_store.run": lambda: str(sum(read("object_store_cpu")["run"]["requests"].values())),
    "scale.save_table": save_table,
    "scale.resume_table": resume_table,
    "scale.host_step_table": host_step_table,
    "scale.host_step_processor": lambda: str(read("scale_cpu")["host_step"]["processor"]),
    "scale.save_plan_seconds": lambda: (
        f"{read('scale_cpu')['saving']['405B fsdp 2048 tp 8']['plan_cpu_seconds']:.0f}"
    ),
}


def pages() -> list[Path]:
    """Return README and all pages that may contain figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks/LOG.md"]


def filled(text: str) -> str:
    """Return the text of a page with each figure computed anew.

    Raises:
        KeyError: a marker has a name that ``FIGURES`` does not have.
    """

    def replace(match: re.Match[str]) -> str:
        value = FIGURES[match["name"]]()
        if "\n" in value:
            value = f"\n{value}\n"
        return f"<!--f:{match['name']}-->{value}<!--/f-->"

    return MARKED.sub(replace, text)


def main() -> int:
    """Write all pages, or list those that differ from the result files; return 1 if ``--check`` finds one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="list pages whose figures differ, and write nothing"
    )
    options = parser.parse_args()
    stale = [
        page for page in pages() if page.exists() and filled(page.read_text()) != page.read_text()
    ]
    for page in stale:
        print(page.relative_to(ROOT))
        if not options.check:
            page.write_text(filled(page.read_text()))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
