"""Plots of our own measurements, as SVG: python docs/plots.py [FOLDER].

Each plot shows one file of benchmarks/results. After a new measurement, run this program again.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any

import svg
from svg import Canvas

FOLDER = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parents[1] / "benchmarks/results"
NAMES = {
    "ours": "shardtrain",
    "plain": "plain loop",
    "ours, FSDP, 2 ranks": "shardtrain, FSDP, 2 ranks",
}


def read(name: str) -> Any:
    """Return the content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def bars(
    canvas: Canvas, top: float, rows: list[tuple[str, float, str, str]], left: float = 280
) -> None:
    """Draw a bar for each (name, value, label at its end, kind). The longest bar fills the width."""
    scale = (canvas.width - left - 120) / max(value for _, value, _, _ in rows)
    for number, (name, value, words, kind) in enumerate(rows):
        y = top + 26 * number
        canvas.text(left - 10, y + 14, name, "", "end")
        canvas.box(left, y, max(value * scale, 1), 18, kind)
        canvas.text(left + value * scale + 8, y + 14, words, "dim")


def peers() -> str:
    """Return the plot of tokens per CPU-second, compared with plain loops."""
    found: dict[str, list[float]] = {}
    for row in read("peers_cpu")["rows"]:
        if row["exit"] == 0 and row["dtype"] == "bfloat16":
            found.setdefault(NAMES.get(row["peer"], row["peer"]), []).append(
                row["tokens_per_cpu_second"]
            )
    rows = sorted(
        ((name, statistics.median(rates)) for name, rates in found.items()),
        key=lambda pair: -pair[1],
    )
    canvas = Canvas(
        720, 64 + 26 * len(rows), "Tokens per CPU-second, bfloat16: the median of its rounds"
    )
    canvas.text(16, 26, canvas.title, "head")
    bars(
        canvas,
        46,
        [
            (name, rate, f"{rate:,.0f}", "a" if name.startswith("shardtrain") else "box")
            for name, rate in rows
        ],
    )
    return canvas.svg()


def generating() -> str:
    """Return the plot of generated tokens per CPU-second, compared with transformers."""
    results = read("generate_cpu")["results"]
    canvas = Canvas(
        720, 84 + 26 * len(results), "Generating: tokens per CPU-second, of those of transformers"
    )
    canvas.text(16, 26, canvas.title, "head")
    rows = []
    for row in results:
        name = f"{row['family']}, {row['rows']} row{'s' if row['rows'] > 1 else ''}"
        rows.append((name, row["ratio"], f"{row['ratio']:.2f}", "a"))
    bars(canvas, 46, rows)
    x = 280 + (720 - 280 - 120) / max(row["ratio"] for row in results)
    canvas.line(x, 40, x, 50 + 26 * len(results), "line", dashed=True)
    canvas.text(x, 68 + 26 * len(results), "1: as fast as transformers", "dim small", "middle")
    return canvas.svg()


def memory() -> str:
    """Return the plot of the peak memory of a rank, measured and planned."""
    rows = read("memory_cpu")["rows"]
    canvas = Canvas(
        720,
        92 + 26 * len(rows),
        "Peak memory of a rank in a step, MiB: measured (blue), planned (orange)",
    )
    canvas.text(16, 26, canvas.title, "head")
    left = 280
    scale = (canvas.width - left - 120) / max(row["measured_bytes"] for row in rows)
    for number, row in enumerate(rows):
        y, measured, planned = 46 + 26 * number, row["measured_bytes"], row["planned_bytes"]
        canvas.text(left - 10, y + 14, row["name"], "", "end")
        canvas.box(left, y, measured * scale, 9, "a")
        canvas.box(left, y + 9, planned * scale, 9, "b")
        words = f"{measured / 2**20:,.0f}, planned {planned / measured - 1:+.1%}"
        canvas.text(left + max(measured, planned) * scale + 8, y + 14, words, "dim small")
    words = "4 layers of width 128, 8 sequences of 512 tokens for all ranks together; bfloat16 but in the first row"
    canvas.text(16, 74 + 26 * len(rows), words, "dim small")
    return canvas.svg()


def stalls() -> str:
    """Return the plot of the seconds that training waits for a save, by the size of the save."""
    sizes = read("checkpoint_stall_cpu")["sizes"]
    kinds = {"shardtrain": "a", "shardtrain async": "c", "dcp": "b", "dcp async": "e"}
    words = {"shardtrain": "shardtrain", "shardtrain async": "shardtrain, in the background", "dcp": "DCP",
             "dcp async": "DCP, in the background"}  # fmt: skip
    canvas = Canvas(720, 366, "What a save keeps training waiting, in seconds")
    canvas.text(16, 26, canvas.title, "head")
    left, right, top, foot = 70, 500, 46, 316
    low, high = -3.0, 1.0

    def height(seconds: float) -> float:
        return foot - (log10(seconds) - low) / (high - low) * (foot - top)

    for power in range(int(low), int(high) + 1):
        canvas.line(left, height(10.0**power), right, height(10.0**power), "grid")
        canvas.text(left - 8, height(10.0**power) + 4, f"{10.0**power:g}", "dim small", "end")
    places = {
        size: left + 30 + number * (right - left - 60) / (len(sizes) - 1)
        for number, size in enumerate(sizes)
    }
    for size, x in places.items():
        canvas.text(x, foot + 20, size, "dim small", "middle")
    for number, (name, kind) in enumerate(kinds.items()):
        points = [
            (x, height(sizes[size][name]["stall"]))
            for size, x in places.items()
            if name in sizes[size]
        ]
        for one, other in pairwise(points):
            canvas.line(*one, *other)
        for x, y in points:
            canvas.circle(x, y, 5, kind)
        canvas.circle(528, 80 + 26 * number, 5, kind)
        canvas.text(542, 84 + 26 * number, words[name], "small")
    canvas.text(left, foot + 40, "weights and optimizer state that are saved", "dim small")
    return canvas.svg()


def rounding() -> str:
    """The largest relative difference of a gradient to one process, by mesh."""
    found = read("verify_cpu")
    rows = [row for row in found["rows"] if row["verdict"] == "same"]
    canvas = Canvas(
        720,
        104 + 22 * len(rows),
        "Largest difference of a gradient from one process, relative to its norm",
    )
    canvas.text(16, 26, canvas.title, "head")
    left, right, low, high = 350, 690, -9.0, -4.0
    foot = 52 + 22 * len(rows)

    def place(value: float) -> float:
        return left + (log10(max(value, 10**low)) - low) / (high - low) * (right - left)

    for power in range(int(low), int(high) + 1):
        canvas.line(place(10.0**power), 42, place(10.0**power), foot, "grid")
        canvas.text(
            place(10.0**power),
            foot + 18,
            f"1e{power}" if power > low else "0",
            "dim small",
            "middle",
        )
    canvas.line(place(1e-5), 38, place(1e-5), foot + 4, "line", dashed=True)
    canvas.text(place(1e-5), foot + 38, "verify allows 1e-5", "dim small", "middle")
    for number, row in enumerate(rows):
        y = 56 + 22 * number
        more = ", ".join(word for word in (row["schedule"], row["options"]) if word)
        canvas.text(left - 10, y + 4, row["mesh"] + (f" ({more})" if more else ""), "small", "end")
        canvas.circle(place(row["gradient"]), y, 5, "a")
    return canvas.svg()


def coordinates() -> str:
    """Change of activations after a few steps, by width, with and without muP."""
    found = read("mup_coordinates")
    rows = found["rows"]
    title = f"Change of activations after {found['steps']} steps, by width"
    canvas = Canvas(720, 330, title)
    canvas.text(16, 26, canvas.title, "head")
    left, right, top, foot = 70, 470, 46, 276
    low, high = -1.5, 1.5
    kinds = {"attention": "a", "feed-forward": "b", "logits": "c"}

    def height(value: float) -> float:
        return foot - (log10(value) - low) / (high - low) * (foot - top)

    for value in (0.1, 1.0, 10.0):
        canvas.line(left, height(value), right, height(value), "grid")
        canvas.text(left - 8, height(value) + 4, f"{value:g}", "dim small", "end")
    step = (right - left - 60) / (len(rows) - 1)
    places = [left + 30 + number * step for number in range(len(rows))]
    for row, x in zip(rows, places, strict=True):
        canvas.text(x, foot + 20, str(row["width"]), "dim small", "middle")
    for method, dashed in (("standard", True), ("mup", False)):
        for name, kind in kinds.items():
            points = []
            for row, x in zip(rows, places, strict=True):
                points.append((x, height(row[method][name])))
            for one, other in pairwise(points):
                canvas.line(*one, *other, dashed=dashed)
            for x, y in points:
                canvas.circle(x, y, 4, kind)
    for number, (name, kind) in enumerate(kinds.items()):
        canvas.circle(498, 80 + 26 * number, 5, kind)
        canvas.text(512, 84 + 26 * number, name, "small")
    canvas.line(490, 170, 520, 170)
    canvas.text(528, 174, "muP", "small")
    canvas.line(490, 196, 520, 196, dashed=True)
    canvas.text(528, 200, "the same rate for all widths", "small")
    canvas.text(left, foot + 40, "width of the model", "dim small")
    return canvas.svg()


ALL = {
    "peers": peers,
    "generating": generating,
    "memory": memory,
    "stalls": stalls,
    "rounding": rounding,
    "coordinates": coordinates,
}


if __name__ == "__main__":
    svg.write_all(ALL, FOLDER)
