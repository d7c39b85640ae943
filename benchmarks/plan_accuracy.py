"""How well ``shardtrain plan`` predicts published runs: plan_accuracy.py [ROWS.jsonl] [--markdown] [--svg FILE].

A row states shape, hardware, layout and what was measured. Nothing is fitted here; the constants of
shardtrain/tools/plan were chosen with the rows that are not held back. About a third is held back, by a hash of the
row's id, so that the choice is the same for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import shardtrain
from shardtrain.config.schema import Parallelism
from shardtrain.tools.plan import hardware, job, memory, planning, schedule, shapes, timing

TORCHTITAN = Path(__file__).with_name("plan_torchtitan.jsonl")
DEVICES = (
    ("A100.*40", "a100-40gb"),
    ("A100", "a100-80gb"),
    ("GH200", "gh200"),
    ("H100", "h100"),
    ("H200", "h200"),
    ("B200", "b200"),
    ("MI300X", "mi300x"),
)


@dataclass(frozen=True)
class Score:
    """A row: seconds of a step and GiB, predicted and measured; None where a row has none."""

    id: str
    series: str
    what: str
    held_back: bool
    seconds: float
    measured_seconds: float | None
    gib: float
    measured_gib: float | None
    costs: tuple[tuple[str, float], ...] = ()

    @property
    def error(self) -> float | None:
        """Signed relative error of the step time."""
        return None if self.measured_seconds is None else self.seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the memory."""
        return None if self.measured_gib is None else self.gib / self.measured_gib - 1


def is_held_back(row_id: str) -> bool:
    """Whether a row takes no part in the choice of constants: a third, by the hash of its id."""
    return hashlib.sha256(row_id.encode()).digest()[0] % 3 == 0


def read(path: Path) -> list[dict[str, Any]]:
    """The fully stated rows with a device that hardware.toml knows."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if row["fully_specified"] and device_of(row)]


def device_of(row: dict[str, Any]) -> str | None:
    """Name of the row of hardware.toml."""
    return next((name for pattern, name in DEVICES if re.search(pattern, row["hardware"]["gpu"])), None)


def score(row: dict[str, Any]) -> Score:
    """Predict one row."""
    m, p, h = row["model"], row["parallel"], row["hardware"]
    device = hardware.find(device_of(row) or "")
    gigabits = re.search(r"(\d+) ?(?:Gbps|Gb/s) per node", h["interconnect"] or "")
    if gigabits:
        rate = float(gigabits[1]) / 8 * 1e9 / h["gpus_per_node"]
        device = replace(device, network=replace(device.network, bytes_per_second=rate))
    if h["gpus_per_node"]:
        device = device.with_nodes_of(h["gpus_per_node"])
    model = shapes.decoder(
        m["name"], m["layers"], m["hidden"], m["heads"], m["kv_heads"], m["ffn"], m["vocab"], row["seq_len"],
        gated=m["gated_ffn"], tied=m["tied_embeddings"], layer_norm="Llama" not in m["name"],
    )  # fmt: skip
    sharding, precision, software = row["sharding"], row["precision"], row["software"]
    replicas, shards = p.get("dp") or 1, p.get("fsdp") or 1
    if p.get("fsdp_group"):
        shards, replicas = p["fsdp_group"], h["count"] // p["fsdp_group"]
    pure = "pure bf16" in precision or precision == "bf16"
    pp = p.get("pp") or 1
    interleaved = (p.get("vpp") or 1) > 1
    name = "Interleaved1F1B" if interleaved else "1F1B"
    pipeline = Parallelism(
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=name,
        pipeline_parallel_layers_per_stage=m["layers"] // (pp * p["vpp"]) if interleaved else None,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    micro = row["micro_batch"]
    count = round(row["global_batch"] / (micro * replicas * shards))
    run = job.Job(
        seq_len=row["seq_len"],
        rows=micro,
        num_microbatches=max(1, count),
        pp=pp,
        dp_replicate=replicas,
        dp_shard=shards,
        tp=p.get("tp") or 1,
        cp=p.get("cp") or 1,
        schedule=name,
        stages=job.layers_of_stages(pipeline, m["layers"]),
        recompute="full" if row["recompute"].startswith("full") else "none",
        reshard="never" if "SHARD_GRAD_OP" in sharding else "always",
        shard_states="ZeRO-1" in sharding and replicas > 1,
        stored_width=2 if pure else 4,
        state_width=2 if "pure" in precision else 4,
        reduce_width=2,
        fused=("torch.compile" in software and "no compile" not in software) or "fused" in software,
        flash="Flash" in software or "FA3" in software,
        split_sequence=not software.startswith("Megatron-LM 2"),
        offload="optimizer" if "CPU-offloaded" in sharding else "nothing",
        loss="fused" if "Liger" in software else "chunked",
        compute_dtype="bfloat16",
    )
    orders = schedule.orders(run.schedule, run.pp, len(run.stages), run.num_microbatches)
    time = timing.of_step(model, run, device, orders)
    held = max(one.total for one in memory.of_ranks(model, run, orders, "cuda"))
    measured = row["derived"].get("step_s") or row["measured"].get("step_s")
    what = f"{m['name']}, {h['count']} x {device.name}, {row['seq_len']} tokens"
    gib = row["measured"].get("mem")
    return Score(
        row["id"], row["series"], what, is_held_back(row["id"]), time.seconds, measured, held / 2**30, gib,
        tuple(time.largest(4)),
    )  # fmt: skip


def score_torchtitan(row: dict[str, Any]) -> Score:
    """Predict one row of plan_torchtitan.jsonl: presets of this package, with torchtitan's published speed and memory.

    None of them is held back, and of them only the three of 8B on 8 devices set a constant: those of h100-96gb.
    """
    plan = shardtrain.plan(row["preset"], row["options"], gpus=row["gpus"], device=row["device"])
    model = shapes.read(shardtrain.load_config(row["preset"], row["options"]).config)
    plan = planning.of_job(model, replace(plan.job, loss="whole"), plan.device)  # torchtitan's loss has all logits
    measured = plan.job.tokens_per_step / row["gpus"] / row["tps"]
    options = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in row["options"].items())
    what = f"{row['preset']}, {row['gpus']} x {row['device']}, {options}"
    return Score(
        row["id"], "torchtitan", what, False, plan.time.seconds, measured, plan.peak_bytes / 2**30, row["gib"],
        tuple(plan.time.largest(4)),
    )  # fmt: skip


def order_right(scores: Sequence[Score]) -> tuple[int, int]:
    """Pairs of one series whose order by measured tokens is the predicted one, and all pairs that differ by 3 %."""
    right = pairs = 0
    for a, b in combinations([one for one in scores if one.measured_seconds], 2):
        if a.series != b.series or abs(a.measured_seconds / b.measured_seconds - 1) < 0.03:
            continue
        pairs += 1
        right += (a.seconds < b.seconds) == (a.measured_seconds < b.measured_seconds)
    return right, pairs


def summary(scores: Sequence[Score]) -> list[tuple[str, int, float, float]]:
    """Median and 90th percentile of the absolute errors of the step time, by series; held-back rows apart."""
    lines = []
    for name in sorted({one.series for one in scores}):
        for held_back in (False, True):
            errors = sorted(
                abs(one.error)
                for one in scores
                if one.series == name and one.held_back == held_back and one.error is not None
            )
            if errors:
                worst = errors[min(len(errors) - 1, round(0.9 * (len(errors) - 1)))]
                lines.append(
                    (f"{name}{', held back' if held_back else ''}", len(errors), statistics.median(errors), worst)
                )
    return lines


def scatter(scores: Sequence[Score]) -> str:
    """Planned over measured step time as SVG, both axes logarithmic.

    Hollow circles are held-back rows; the lines are equality, and 25 % to either side.
    """
    shown = [one for one in scores if one.measured_seconds]
    low, high, size, margin = 0.2, 250.0, 480, 50

    def place(seconds: float) -> float:
        return (math.log10(seconds) - math.log10(low)) / (math.log10(high) - math.log10(low)) * size

    def line(factor: float, style: str) -> str:
        x1, x2 = (place(max(low, low / factor)), place(min(high, high / factor)))
        y1, y2 = (size - place(factor * max(low, low / factor)), size - place(factor * min(high, high / factor)))
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    colours = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
    names = sorted({one.series for one in shown})
    total = size + 2 * margin
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {total}" font-family="sans-serif" ',
        'font-size="12">',
        f'<rect width="{total}" height="{total}" fill="white"/><g transform="translate({margin},{margin})">',
        f'<rect width="{size}" height="{size}" fill="none" stroke="black"/>',
        line(1.0, 'stroke="black"'),
        line(1.25, 'stroke="grey" stroke-dasharray="4"'),
        line(0.8, 'stroke="grey" stroke-dasharray="4"'),
    ]
    for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200):
        at = place(tick)
        parts.append(f'<text x="{at:.1f}" y="{size + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="-6" y="{size - at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for one in shown:
        colour = colours[names.index(one.series) % len(colours)]
        fill = "none" if one.held_back else colour
        x, y = place(one.measured_seconds or low), size - place(one.seconds)
        where = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}"'
        parts.append(f"{where}><title>{one.id} {one.error:+.1%}</title></circle>")
    for number, name in enumerate(names):
        y = 18 + 16 * number
        parts.append(f'<circle cx="14" cy="{y - 4}" r="4" fill="{colours[number]}"/><text x="24" y="{y}">{name}</text>')
    parts.append(f'<text x="{size / 2}" y="{size + 36}" text-anchor="middle">measured step time, seconds</text>')
    parts.append(f'<text transform="rotate(-90)" x="{-size / 2}" y="-34" text-anchor="middle">planned</text></g></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    """Print every row, or with --markdown the tables of docs/plan.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", default=Path(__file__).with_name("plan_published.jsonl"))
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--costs", action="store_true", help="also print what the time goes to")
    parser.add_argument("--svg", type=Path, help="also draw them into this file")
    asked = parser.parse_args()
    scores = [score(row) for row in read(asked.rows)]
    scores += [score_torchtitan(json.loads(line)) for line in TORCHTITAN.read_text(encoding="utf-8").splitlines()]
    if asked.svg:
        asked.svg.write_text(scatter(scores), encoding="utf-8")
    if asked.markdown:
        print("| series | rows | median error | 90th percentile |\n|---|---|---|---|")
        for name, count, median, worst in summary(scores):
            print(f"| {name} | {count} | {median:.1%} | {worst:.1%} |")
        print("\n| row | run | held back | predicted s | measured s | error |\n|---|---|---|---|---|---|")
        for one in scores:
            if one.error is not None:
                held = "yes" if one.held_back else ""
                seconds = f"{one.seconds:.3g} | {one.measured_seconds:.3g} | {one.error:+.1%}"
                print(f"| {one.id} | {one.what} | {held} | {seconds} |")
        print("\n| row | run | predicted GiB | measured GiB | error |\n|---|---|---|---|---|")
        for one in scores:
            if one.memory_error is not None:
                print(f"| {one.id} | {one.what} | {one.gib:.1f} | {one.measured_gib:.1f} | {one.memory_error:+.1%} |")
    else:
        for one in scores:
            error = f"{one.error:+8.1%}" if one.error is not None else " " * 8
            gib = f"{one.gib:8.1f} GiB of {one.measured_gib}" if one.measured_gib else ""
            costs = ", ".join(f"{name} {s:.3g}" for name, s in one.costs) if asked.costs else ""
            seconds = f"{one.seconds:9.3f} s {one.measured_seconds or 0:9.3f}"
            print(f"{one.id:22}{'*' if one.held_back else ' '} {seconds} {error} {gib} {costs}")
        for name, count, median, worst in summary(scores):
            print(f"{name:34}{count:4} rows, median {median:6.1%}, 90th percentile {worst:6.1%}")
    right, pairs = order_right(scores)
    print(f"\norder right in {right} of {pairs} pairs ({right / max(1, pairs):.1%})")


if __name__ == "__main__":
    main()
