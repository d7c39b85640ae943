"""Accuracy of ``shardtrain plan`` for published runs.

    python benchmarks/plan_accuracy.py [ROWS.jsonl] [--markdown] [--svg FILE]

A row states the model, hardware, layout and measurements. Nothing is fitted here: the constants of
shardtrain/tools/plan were chosen with the rows that are not held back. About a third is held back, by a
hash of the id, so the choice never changes.
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
from shardtrain.config import stages
from shardtrain.config.schema import Parallelism
from shardtrain.tools.plan import (
    hardware,
    job_sizes,
    planning,
    rank_memory,
    schedule,
    shapes,
    timing,
)

TORCHTITAN = Path(__file__).with_name("plan_torchtitan.jsonl")
OTHERS = Path(__file__).with_name("plan_others.jsonl")
BRIDGE = Path(__file__).with_name("plan_bridge.jsonl")
DEVICES = (
    (r"A100.*PCI.*\b40 ?GB|A100.*\b40 ?GB.*PCI", "a100-pcie-40gb"),
    ("A100.*PCI", "a100-pcie-80gb"),
    (r"A100.*\b40 ?GB", "a100-40gb"),
    ("A800", "a800"),
    ("A100", "a100-80gb"),
    ("GH200", "gh200"),
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H100.*PCI", "h100-pcie"),
    ("H100.*NVL", "h100-nvl"),
    ("H100", "h100"),
    ("H200", "h200"),
    ("H800", "h800"),
    ("H20", "h20"),
    ("V100.*PCI.*16|V100.*16.*PCI", "v100-pcie-16gb"),
    ("V100.*PCI", "v100-pcie-32gb"),
    ("V100.*16", "v100-16gb"),
    ("V100", "v100-32gb"),
    ("MI210", "mi210"),
    ("MI250", "mi250x"),
    ("MI300A", "mi300a"),
    ("MI300X", "mi300x"),
    ("MI325", "mi325x"),
    ("MI355", "mi355x"),
    ("Gaudi.?3", "gaudi3"),
    ("Gaudi", "gaudi2"),
    ("PRO 6000", "rtx-pro-6000"),
    ("6000 Ada", "rtx-6000-ada"),
    ("A6000", "rtx-a6000"),
    ("A5000", "rtx-a5000"),
    ("A30", "a30"),
    ("A10G", "a10g"),
    ("A40", "a40"),
    ("L40S", "l40s"),
    ("4090", "rtx-4090"),
    ("5090", "rtx-5090"),
    ("3090", "rtx-3090"),
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    ("Max 1550|PVC", "max-1550"),
    ("TPU.?v3", "tpu-v3"),
    ("TPU.?v4", "tpu-v4"),
    ("TPU.?v5e", "tpu-v5e"),
    ("TPU.?v5p", "tpu-v5p"),
    ("TPU.?v6e|Trillium", "tpu-v6e"),
    ("Trainium.?2|trn2", "trainium2"),
    ("Trainium|trn1", "trainium1"),
)


@dataclass(frozen=True)
class Score:
    """Predicted and measured step time (seconds) and memory (GiB) of one row.

    Measured values are None if the row does not contain them.
    """

    id: str
    series: str
    what: str
    held_back: bool
    seconds: float
    measured_seconds: float | None
    gib: float
    measured_gib: float | None
    costs: tuple[tuple[str, float], ...] = ()
    fits: bool = True
    ran: bool = True

    @property
    def error(self) -> float | None:
        """Signed relative error of the step time."""
        return None if self.measured_seconds is None else self.seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the memory."""
        return None if self.measured_gib is None else self.gib / self.measured_gib - 1


def is_held_back(row_id: str) -> bool:
    """True if the row was not used to choose constants.

    The hash of the id selects about a third of the rows.
    """
    return hashlib.sha256(row_id.encode()).digest()[0] % 3 == 0


def read(path: Path, everything: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a file whose device is in devices.toml.

    Includes rows that do not specify all facts only if ``everything`` is set.
    """
    rows = [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    return [row for row in rows if (row["fully_specified"] or everything) and device_of(row)]


def device_of(row: dict[str, Any]) -> str | None:
    """Return the name under which devices.toml lists the GPU of a row, or None."""
    return next(
        (name for pattern, name in DEVICES if re.search(pattern, row["hardware"]["gpu"])), None
    )


SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved 1f1b": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
    "bfs": "LoopedBFS",
}


def score(row: dict[str, Any]) -> Score:
    """Predict time and memory of one row. ``job_of`` fills in the facts that the row does not specify."""
    device = device_with_links(row)
    model = model_of(row)
    run = job_of(row, device)
    orders = schedule.orders(run.schedule, run.pp, len(run.stages), run.num_microbatches)
    time = timing.of_step(model, run, device, orders)
    # LitGPT computes norms as separate float32 operations, like the CPU kernels of this package.
    kernels = "cpu" if "LitGPT" in (row["software"] or "") else "cuda"
    ranks = rank_memory.of_ranks(model, run, orders, kernels)
    peak = max(rank.peak for rank in ranks)
    reserved = max(rank.reserved for rank in ranks)
    measured = row["derived"].get("step_s") or row["measured"].get("step_s")
    what = f"{row['model']['name']}, {row['hardware']['count']} x {device.name}, {row['seq_len']} tokens"
    gib = row["measured"].get("mem")
    if gib and not str(row["measured"].get("mem_unit", "GiB")).startswith("GiB"):
        gib *= 1e9 / 2**30
    fits = peak + planning.overhead(peak, device) <= device.memory_bytes
    ran = not row["measured"].get("oom", False)
    return Score(
        row["id"], row["series"], what, is_held_back(row["id"]), time.seconds, measured, reserved / 2**30, gib,
        tuple(time.largest(4)), fits, ran,
    )  # fmt: skip


def device_with_links(row: dict[str, Any]) -> hardware.Device:
    """Return the device of a row, with devices per node and network bandwidth if the row specifies them."""
    h = row["hardware"]
    device = hardware.find(device_of(row) or "")
    gigabits = re.search(r"(\d+) ?(?:Gbps|Gb/s) per node", h["interconnect"] or "")
    if gigabits:
        rate = float(gigabits[1]) / 8 * 1e9 / h["gpus_per_node"]
        device = replace(device, network=replace(device.network, bytes_per_second=rate))
    return device.with_nodes_of(h["gpus_per_node"]) if h["gpus_per_node"] else device


def model_of(row: dict[str, Any]) -> shapes.ModelShape:
    """Return the model shape of a row. In an MoE, only the first ``dense_layers`` layers have no experts."""
    m = row["model"]
    heads = m["heads"]
    kv_heads = m["kv_heads"] or m["heads"]
    sizes = (m["hidden"], heads, kv_heads, m["ffn"], m["vocab"], row["seq_len"])
    options: dict[str, Any] = {
        "gated": m["gated_ffn"],
        "tied": m["tied_embeddings"],
        "layer_norm": not m["gated_ffn"],
        "head_dim": m.get("head_dim"),
    }
    if not m.get("experts"):
        model = shapes.decoder(m["name"], m["layers"], *sizes, **options)
        return frozen(model, row["precision"]) if m.get("task") == "LoRA" else model
    experts = shapes.ExpertShape(m["experts"], m["top_k"], m["moe_ffn"])
    shared = m.get("shared_experts", 0) * m["moe_ffn"]
    dense = m.get("dense_layers", 0)
    sparse = shapes.decoder(
        m["name"], m["layers"] - dense, *sizes, **options, experts=experts, shared_ffn=shared
    )
    if not dense:
        return sparse
    first = shapes.decoder(m["name"], dense, *sizes, **options)
    ends = sum(p.numel for p in (*first.first, *first.last)) * (
        1 if not m["tied_embeddings"] else 0
    )
    return replace(
        sparse,
        layers=(*first.layers, *sparse.layers),
        num_params=sparse.num_params + first.num_params - ends,
        flops_per_token=sparse.flops_per_token
        + first.flops_per_token
        - 6 * sum(p.numel for p in first.last),
    )


def frozen(model: shapes.ModelShape, precision: str) -> shapes.ModelShape:
    """Return the model with frozen weights, for LoRA and QLoRA rows.

    Weights are in 4 bits if ``precision`` contains "nf4". The memory of adapters is neglected.
    """

    def untrained(
        parameters: tuple[shapes.ParameterShape, ...],
    ) -> tuple[shapes.ParameterShape, ...]:
        return tuple(replace(parameter, trained=False) for parameter in parameters)

    layer = model.layers[0]
    linears = tuple(replace(linear, trained=False) for linear in layer.linears)
    layer = replace(
        layer,
        parameters=untrained(layer.parameters),
        linears=linears,
        low_bits_bytes=0,
        restored_numel=0,
    )
    if "nf4" in precision:
        # NF4 stores half a byte per element plus one scale per block. Double quantization compresses the scales.
        matrices = [parameter for parameter in layer.parameters if len(parameter.shape) == 2]
        others = tuple(parameter for parameter in layer.parameters if parameter not in matrices)
        bytes_per_number = 0.5 + (1 / 60 if "dq" in precision else 1 / 16)
        numel = sum(matrix.numel for matrix in matrices)
        layer = replace(
            layer,
            parameters=others,
            low_bits_bytes=int(numel * bytes_per_number),
            restored_numel=max(matrix.numel for matrix in matrices),
        )
    return replace(
        model,
        layers=(layer,) * len(model.layers),
        first=untrained(model.first),
        last=untrained(model.last),
    )


def job_of(row: dict[str, Any], device: hardware.Device) -> job_sizes.PlannedJob:
    """Return the planned job that describes the parallel layout of a row.

    Defaults for facts that the row does not specify: no recomputation, sharding by the parallel sizes, and
    replicated optimizer state for systems known to replicate it.
    """
    m = row["model"]
    p = row["parallel"]
    h = row["hardware"]
    sharding = row["sharding"] or ""
    precision = row["precision"] or ""
    software = row["software"] or ""
    replicas = p.get("dp") or 1
    shards = p.get("fsdp") or 1
    if p.get("fsdp_group"):
        shards = p["fsdp_group"]
        replicas = h["count"] // p["fsdp_group"]
    fsdp = shards > 1 or "ZeRO-3" in sharding or bool(p.get("fsdp"))

    # Pipeline stages.
    pp = p.get("pp") or 1
    per_rank = p.get("vpp") or 1
    usual_schedule = "Interleaved1F1B" if per_rank > 1 else "1F1B"
    name = SCHEDULES.get(str(p.get("schedule") or "").lower(), usual_schedule)
    if name in stages.V_SHAPED:
        per_rank = 2
    num_stages = pp * per_rank
    layers_per_stage = max(1, m["layers"] // num_stages) if per_rank > 1 else None
    if m["layers"] % num_stages:
        layers = uneven(m["layers"], num_stages)
    else:
        pipeline = Parallelism(
            pipeline_parallel_degree=pp,
            pipeline_parallel_schedule=name,
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            pipeline_parallel_layers_per_stage=layers_per_stage,
        )
        layers = job_sizes.layers_of_stages(pipeline, m["layers"])

    # Batch, precision and sharding.
    micro = row["micro_batch"]
    batch = row["global_batch"] or micro * replicas * shards
    count = round(batch / (micro * replicas * shards))
    pure = "pure bf16" in precision or "true" in precision
    deepspeed = precision == "bf16" and "DeepSpeed" in software
    pure = pure or deepspeed
    # Megatron and DeepSpeed keep 16-bit weights in addition to float32 weights.
    mixed = not pure and not fsdp and "Lightning" not in software
    shards_states = bool(re.search(r"ZeRO-[12]|distributed optimizer", sharding)) and replicas > 1
    nvidia = "Megatron-Core" in software  # has the fused kernels of Transformer Engine and cuDNN

    # Recomputation and loss.
    recompute = row["recompute"] or "none"
    mode = "none"
    if recompute.startswith("full"):
        mode = "full"
    elif recompute.startswith("selective"):
        # "selective" recomputes only the attention core in Megatron (Korthikanti et al.)
        of_megatron = re.search("Megatron|NeMo|nanotron", software)
        mode = "core" if of_megatron else "op"
    loss = "whole" if "LitGPT" in software else "chunked"
    if re.search("(?<!no )Liger|fused[^,]*CE", software):
        loss = "fused"
    return job_sizes.PlannedJob(
        seq_len=row["seq_len"],
        rows=micro,
        num_microbatches=max(1, count),
        pp=pp,
        dp_replicate=replicas,
        dp_shard=shards,
        tp=p.get("tp") or 1,
        cp=p.get("cp") or 1,
        ep=p.get("ep") or 1,
        schedule=name,
        stages=layers,
        recompute=mode,
        reshard="never" if "SHARD_GRAD_OP" in sharding else "always",
        shard_states=shards_states,
        stored_width=2 if pure or mixed else 4,
        gradient_width=4 if mixed and "DeepSpeed" not in software else 2 if pure or mixed else 4,
        states=3 if mixed or deepspeed else 2,  # with float32 copies of the weights
        state_width=2 if pure and not deepspeed else 4,
        reduce_width=2,
        fsdp=fsdp or "DDP" in sharding,
        fused=bool(re.search("(?<!no )torch.compile|fused|TE", software)) or nvidia,
        float8="fp8" in precision,
        float8_experts="fp8" in precision,
        flash=not software.startswith("Megatron-LM 2"),
        overlaps="DeepSpeed 2022" not in software and not software.startswith("Megatron-LM 2"),
        split_sequence=p.get("sp") is not False and not software.startswith("Megatron-LM 2"),
        offload="optimizer" if "CPU-offloaded" in sharding else "nothing",
        reduces_once=not fsdp,
        attention_speed=1.52 if re.search("FA[34]", software) or nvidia else 1.0,
        loss=loss,
        compute_dtype="float16" if "fp16" in precision or "V100" in h["gpu"] else "bfloat16",
    )


def uneven(layers: int, count: int) -> tuple[range, ...]:
    """Split ``layers`` into ``count`` contiguous ranges. If they do not divide evenly, the first have one more."""
    sizes = [layers // count + (place < layers % count) for place in range(count)]
    return tuple(range(sum(sizes[:place]), sum(sizes[: place + 1])) for place in range(count))


def score_planned(row: dict[str, Any]) -> Score:
    """Predict one row of plan_torchtitan.jsonl, plan_others.jsonl or plan_bridge.jsonl.

    These rows contain options of this package, so ``shardtrain.plan`` reads them directly. ``job`` replaces
    fields of the planned job that differ in the other system. ``seen`` marks rows that were used to choose a
    constant and so are not held back. ``held_back`` overrides the choice by the hash of the id.
    """
    plan = shardtrain.plan(
        row.get("preset"), row["options"], gpus=row["gpus"], device=row["device"]
    )
    model = shapes.read(shardtrain.load_config(row.get("preset"), row["options"]).config)
    # torchtitan computes the loss from the logits of all tokens at once.
    others = {"loss": "whole", **row.get("job", {})}
    if "stages" in others:
        others["stages"] = tuple(range(*pair) for pair in others["stages"])
    changed = replace(plan.job, **others)
    device = plan.device
    if row.get("gpus_per_node"):
        device = device.with_nodes_of(row["gpus_per_node"], row.get("link"))
    plan = planning.of_job(model, changed, device, "cpu" if device.is_cpu else "cuda")
    measured = plan.job.tokens_per_step / row["gpus"] / row["tps"] if row.get("tps") else None
    if row.get("mfu"):
        measured = plan.time.seconds * plan.mfu / row["mfu"]
    if row.get("allocated", False):
        gib = max(rank.peak for rank in plan.ranks) / 2**30
    else:  # most systems report reserved instead of allocated memory
        reserved = max(rank.reserved for rank in plan.ranks)
        gib = reserved / 2**30 * (1 + planning.FRAGMENTS)
    held_back = row.get("held_back", is_held_back(row["id"]) and not row.get("seen"))
    return Score(
        row["id"], row["series"], row["what"], held_back, plan.time.seconds,
        measured, gib, row.get("gib"), tuple(plan.time.largest(4)), plan.fits, row.get("ran", True),
    )  # fmt: skip


def order_right(scores: Sequence[Score]) -> tuple[int, int]:
    """Count pairs of rows of one series whose predicted step times are in the measured order.

    Returns:
        Number of correctly ordered pairs, and number of all pairs. Pairs whose measured times differ
        by less than 3 % are not counted.
    """
    right = pairs = 0
    for a, b in combinations([one for one in scores if one.measured_seconds], 2):
        if a.series != b.series or abs(a.measured_seconds / b.measured_seconds - 1) < 0.03:
            continue
        pairs += 1
        right += (a.seconds < b.seconds) == (a.measured_seconds < b.measured_seconds)
    return right, pairs


def spread(errors: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile."""
    ordered = sorted(errors)
    return statistics.median(ordered), ordered[
        min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))
    ]


def summary(scores: Sequence[Score]) -> list[tuple[str, int, float, float, int, float | None]]:
    """Summarize each series, with held-back rows separately.

    Returns name, number of rows with a time, median and 90th percentile of absolute time errors, number of
    rows with memory, and the median of memory errors.
    """
    lines = []
    for name in sorted({score.series for score in scores}):
        for held_back in (False, True):
            errors = []
            memory_errors = []
            for score in scores:
                if score.series == name and score.held_back == held_back:
                    if score.error is not None:
                        errors.append(abs(score.error))
                    if score.memory_error is not None:
                        memory_errors.append(abs(score.memory_error))
            if errors or memory_errors:
                median, worst = spread(errors) if errors else (math.nan, math.nan)
                of_memory = statistics.median(memory_errors) if memory_errors else None
                label = f"{name}, held back" if held_back else name
                lines.append((label, len(errors), median, worst, len(memory_errors), of_memory))
    return lines


def fitting_right(scores: Sequence[Score]) -> tuple[int, int, int, int]:
    """Count runs predicted to fit, all runs, out-of-memory failures predicted not to fit, and all such failures."""
    ran = [one for one in scores if one.ran]
    failed = [one for one in scores if not one.ran]
    return sum(one.fits for one in ran), len(ran), sum(not one.fits for one in failed), len(failed)


def scatter(scores: Sequence[Score]) -> str:
    """Return an SVG plot of planned over measured step time on logarithmic axes.

    Hollow circles are held-back rows. The lines are equality and deviations of 25 %.
    """
    shown = [one for one in scores if one.measured_seconds]
    low = 0.2
    high = 250.0
    size = 480
    margin = 50

    def place(seconds: float) -> float:
        return (math.log10(seconds) - math.log10(low)) / (math.log10(high) - math.log10(low)) * size

    def line(factor: float, style: str) -> str:
        x1 = place(max(low, low / factor))
        x2 = place(min(high, high / factor))
        y1 = size - place(factor * max(low, low / factor))
        y2 = size - place(factor * min(high, high / factor))
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    colours = (
        "#4477aa",
        "#ee6677",
        "#228833",
        "#ccbb44",
        "#66ccee",
        "#aa3377",
        "#777777",
        "#000000",
        "#ff8800",
    )
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
        x = place(one.measured_seconds or low)
        y = size - place(one.seconds)
        where = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}"'
        parts.append(f"{where}><title>{one.id} {one.error:+.1%}</title></circle>")
    for number, name in enumerate(names):
        y = 18 + 16 * number
        fill = colours[number % len(colours)]
        parts.append(
            f'<circle cx="14" cy="{y - 4}" r="4" fill="{fill}"/><text x="24" y="{y}">{name}</text>'
        )
    parts.append(
        f'<text x="{size / 2}" y="{size + 36}" text-anchor="middle">measured step time, seconds</text>'
    )
    parts.append(
        f'<text transform="rotate(-90)" x="{-size / 2}" y="-34" text-anchor="middle">planned</text></g></svg>'
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    """Print every row, or the tables of benchmarks/LOG.md with --markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "rows", type=Path, nargs="?", default=Path(__file__).with_name("plan_published.jsonl")
    )
    parser.add_argument("--all", action="store_true", help="include partially stated rows")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--costs", action="store_true", help="also print the costs of a step")
    parser.add_argument("--svg", type=Path, help="also plot them into this SVG file")
    options = parser.parse_args()
    planned: tuple[Path, ...] = ()
    if options.rows == parser.get_default("rows"):
        planned = (TORCHTITAN, OTHERS, BRIDGE)
    elif options.rows.name == BRIDGE.name:
        planned = (options.rows,)
    scores = []
    if options.rows not in planned:
        scores = [score(row) for row in read(options.rows, options.all)]
    for path in planned:
        scores += [
            score_planned(json.loads(line))
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
    if options.svg:
        options.svg.write_text(scatter(scores), encoding="utf-8")
    if options.markdown:
        print(
            "| series | rows | time: median error | 90th percentile | rows | memory: median error |"
        )
        print("|---|---|---|---|---|---|")
        for name, count, median, worst, others, found in summary(scores):
            text = f"{others} | {found:.1%}" if found is not None else " |"
            print(f"| {name} | {count} | {median:.1%} | {worst:.1%} | {text} |")
        print(
            "\n| row | run | held back | predicted s | measured s | error |\n|---|---|---|---|---|---|"
        )
        for one in scores:
            if one.error is not None:
                held = "yes" if one.held_back else ""
                seconds = f"{one.seconds:.3g} | {one.measured_seconds:.3g} | {one.error:+.1%}"
                print(f"| {one.id} | {one.what} | {held} | {seconds} |")
        print("\n| row | run | predicted GiB | measured GiB | error |\n|---|---|---|---|---|")
        for one in scores:
            if one.memory_error is not None:
                print(
                    f"| {one.id} | {one.what} | {one.gib:.1f} | {one.measured_gib:.1f} | {one.memory_error:+.1%} |"
                )
    else:
        for one in scores:
            error = f"{one.error:+8.1%}" if one.error is not None else " " * 8
            gib = f"{one.gib:8.1f} GiB of {one.measured_gib}" if one.measured_gib else ""
            costs = ", ".join(f"{name} {s:.3g}" for name, s in one.costs) if options.costs else ""
            seconds = f"{one.seconds:9.3f} s {one.measured_seconds or 0:9.3f}"
            wrong = "" if one.fits == one.ran else f" said to {'fit' if one.fits else 'not fit'}"
            print(
                f"{one.id:22}{'*' if one.held_back else ' '} {seconds} {error} {gib}{wrong} {costs}"
            )
        for name, count, median, worst, others, found in summary(scores):
            of_memory = f", {others} of memory, median {found:6.1%}" if found is not None else ""
            print(
                f"{name:34}{count:4} rows, median {median:6.1%}, 90th percentile {worst:6.1%}{of_memory}"
            )
    right, pairs = order_right(scores)
    ran, of_ran, failed, of_failed = fitting_right(scores)
    print(
        f"\nran and said to fit: {ran} of {of_ran}; out of memory and said not to fit: {failed} of {of_failed}"
    )
    print(f"order right in {right} of {pairs} pairs ({right / max(1, pairs):.1%})")


if __name__ == "__main__":
    main()
