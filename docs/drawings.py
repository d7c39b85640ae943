"""Drawings of docs/concepts.md and docs/plan.md, as SVG: python docs/drawings.py [FOLDER].

Where possible, their content comes from the package: the order of the mesh's axes, the actions of a pipeline's
schedule, the order of the data, the memory of a step.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import svg
from svg import Canvas

from shardtrain import config
from shardtrain.data.order import sample_at
from shardtrain.distributed.mesh import AXES
from shardtrain.tools.plan import job_sizes, rank_memory, schedule, shapes, stage_memory

FOLDER = Path(__file__).parent / "pictures"
KINDS = ("a", "b", "c", "d", "e")


def mesh() -> str:
    """Sixteen ranks on two nodes, as the program numbers them."""
    sizes = {"pp": 2, "dp_shard": 4, "tp": 2}
    names = [axis for axis in AXES if axis in sizes]
    canvas = Canvas(720, 340, "Sixteen ranks on two nodes: pp = 2, dp_shard = 4, tp = 2")
    for pp in range(2):
        left = 96 + pp * 340
        canvas.box(left - 16, 44, 244, 252)
        canvas.text(
            left + 106,
            30,
            f"node {pp + 1}: pp {pp}, layers {16 * pp} to {16 * pp + 15}",
            "head",
            "middle",
        )
        for tp in range(2):
            canvas.text(left + 54 + tp * 104, 66, f"tp {tp}", "dim", "middle")
        for shard in range(4):
            if pp == 0:
                canvas.text(left - 24, 99 + shard * 54, f"dp_shard {shard}", "dim small", "end")
            for tp in range(2):
                place = {"pp": pp, "dp_shard": shard, "tp": tp}
                rank = sum(
                    place[axis] * prod(sizes[inner] for inner in names[number + 1 :])
                    for number, axis in enumerate(names)
                )
                canvas.box(left + 4 + tp * 104, 76 + shard * 54, 100, 46, KINDS[shard])
                canvas.text(left + 54 + tp * 104, 104 + shard * 54, f"rank {rank}", "", "middle")
    canvas.arrow(330, 130, 414, 130)
    canvas.text(372, 122, "activations", "dim small", "middle")
    canvas.arrow(414, 230, 330, 230)
    canvas.text(372, 222, "gradients", "dim small", "middle")
    canvas.text(360, 322, "One color: the ranks that read the same sequences.", "dim", "middle")
    return canvas.svg()


SPLITS = (
    # axis, weights that rank 0 and rank 1 hold, data that they read, tensors that they exchange
    ("dp_replicate", "all", "rows", "gradients, once a step"),
    ("dp_shard (FSDP)", "rows", "rows", "weights of a layer; gradients"),
    ("tp", "columns", "all", "activations, in each layer"),
    ("cp", "all", "tokens", "keys and values, in attention"),
    ("pp", "layers", "all", "activations, at the cut"),
    ("ep", "experts", "rows", "tokens, to their experts"),
)


def axes() -> str:
    """Draw which parts of four layers and of four sequences two ranks along each axis hold and read."""
    canvas = Canvas(720, 84 + 66 * len(SPLITS), "What each axis divides between two ranks")
    for x, words in (
        (128, "weights of four layers"),
        (370, "a step's sequences"),
        (552, "exchanged"),
    ):
        canvas.text(x, 26, words, "head")
    for rank in range(2):
        canvas.text(128 + rank * 122, 48, f"rank {rank}", "dim small")
        canvas.text(372 + rank * 90, 48, f"rank {rank}", "dim small")
    for number, (name, weights, reads, talks) in enumerate(SPLITS):
        y = 62 + 66 * number
        canvas.line(12, y - 6, 708, y - 6, "grid")
        canvas.text(14, y + 26, name, "code")
        canvas.text(552, y + 26, talks, "small")
        for rank in range(2):
            kind = KINDS[rank]
            for layer in range(4):
                _layer(canvas, 128 + rank * 122 + layer * 28, y + 8, weights, rank, layer, kind)
            for row in range(4):
                _row(canvas, 372 + rank * 90, y + 2 + row * 13, reads, rank, row, kind)
    canvas.text(
        14,
        76 + 66 * len(SPLITS),
        "Filled: held or read by this rank. Empty: held or read by the other rank.",
        "dim",
    )
    return canvas.svg()


def _layer(
    canvas: Canvas, x: float, y: float, weights: str, rank: int, layer: int, kind: str
) -> None:
    size = 24
    held = {
        "all": (0, 0, size, size),
        "rows": (0, rank * size / 2, size, size / 2),
        "columns": (rank * size / 2, 0, size / 2, size),
        "layers": (0, 0, size, size if layer // 2 == rank else 0),
        "experts": (0, rank * size / 2, size, size / 2),
    }[weights]
    canvas.box(x, y, size, size, "none")
    if held[2] and held[3]:
        canvas.box(x + held[0], y + held[1], held[2], held[3], kind)
    if weights == "experts":  # four in each layer
        canvas.line(x + size / 2, y, x + size / 2, y + size)
        canvas.line(x, y + size / 2, x + size, y + size / 2)


def _row(canvas: Canvas, x: float, y: float, reads: str, rank: int, row: int, kind: str) -> None:
    width, height = 78.0, 10
    canvas.box(x, y, width, height, "none")
    if reads == "all" or (reads == "rows" and row // 2 == rank):
        canvas.box(x, y, width, height, kind)
    elif (
        reads == "tokens" and rank == 0
    ):  # a piece from each end: then causal attention costs both ranks the same
        canvas.box(x, y, width / 4, height, kind)
        canvas.box(x + 3 * width / 4, y, width / 4, height, kind)
    elif reads == "tokens":
        canvas.box(x + width / 4, y, width / 2, height, kind)


LENGTHS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Slots of an action. A backward pass takes about two forward passes, and each of its halves one."""


def times(
    name: str, degree: int, per_rank: int, count: int
) -> tuple[list[tuple[int, int, schedule.Action]], int]:
    """Each action of a schedule as (rank, slot in which it begins, action), as early as its inputs allow; the end."""
    orders = schedule.orders(name, degree, degree * per_rank, count)
    last = degree * per_rank - 1
    done: dict[tuple[str, int, int], int] = {}
    clock, place = [0] * degree, [0] * degree
    placed: list[tuple[int, int, schedule.Action]] = []
    while any(place[rank] < len(orders[rank]) for rank in range(degree)):
        moved = False
        for rank in range(degree):
            while place[rank] < len(orders[rank]):
                action = orders[rank][place[rank]]
                needs: list[tuple[str, int, int]] = []
                if action.kind == "F" and action.stage > 0:
                    needs = [("F", action.stage - 1, action.microbatch)]
                elif action.kind in "BI":
                    above = ("back", action.stage + 1, action.microbatch)
                    needs = [
                        above if action.stage < last else ("F", action.stage, action.microbatch)
                    ]
                if any(need not in done for need in needs):
                    break
                begin = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = begin + LENGTHS[action.kind]
                done[
                    "back" if action.kind in "BI" else action.kind, action.stage, action.microbatch
                ] = clock[rank]
                placed.append((rank, begin, action))
                place[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"{name} waits for itself")
    return placed, max(clock)


SCHEDULES = (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2))


def pipelines() -> str:
    """Four schedules of a step, as PyTorch orders them."""
    degree, count, scale, height = 4, 8, 15, 20
    canvas = Canvas(
        720,
        66 + len(SCHEDULES) * (degree * height + 44),
        "A step of 4 pipeline ranks and 8 micro-batches",
    )
    canvas.text(14, 26, canvas.title, "head")
    for number, (name, per_rank) in enumerate(SCHEDULES):
        top = 72 + number * (degree * height + 44)
        placed, end = times(name, degree, per_rank, count)
        busy = sum(LENGTHS[action.kind] for _, _, action in placed)
        slot = scale / per_rank  # a stage is a part of a rank's layers
        words = f"{name}: ranks wait {1 - busy / (degree * end):.0%} of the time"
        canvas.text(96, top - 8, words, "head small")
        for rank in range(degree):
            canvas.text(88, top + rank * height + 14, f"rank {rank}", "dim small", "end")
            canvas.box(96, top + rank * height, end * slot, height - 2, "none")
        for rank, begin, action in placed:
            first = action.stage < degree
            back = "c" if first else "e"
            kind = {"F": "a" if first else "d", "B": back, "I": back, "W": "b"}[action.kind]
            width = LENGTHS[action.kind] * slot
            canvas.box(96 + begin * slot, top + rank * height, width, height - 2, kind)
            if width > 12:
                x = 96 + begin * slot + width / 2
                canvas.text(x, top + rank * height + 14, str(action.microbatch), "small", "middle")
    foot = 72 + len(SCHEDULES) * (degree * height + 44) - 28
    for x, kind, words in (
        (96, "a", "forward"),
        (180, "c", "backward"),
        (274, "d", "forward and"),
        (368, "e", "backward of a rank's second stage"),
        (606, "b", "weights alone"),
    ):
        canvas.box(x, foot, 12, 12, kind)
        canvas.text(x + 18, foot + 11, words, "small")
    return canvas.svg()


def batch() -> str:
    """From files to the rows of a rank."""
    canvas = Canvas(720, 330, "The life of a batch")
    heads = ((16, "1 documents"), (172, "2 packed"), (368, "3 in a drawn order"), (560, "4 read"))
    for x, words in heads:
        canvas.text(x, 26, words, "head")
    lengths = (70, 110, 40, 90, 130, 60)
    for number, length in enumerate(lengths):
        canvas.box(16, 46 + number * 26, length, 18, KINDS[number % 5])
    # one after another into rows of 125, cut where a row is full
    place, row = 0.0, 0
    for number, length in enumerate(lengths):
        left = float(length)
        while left:
            take = min(left, 125 - place)
            canvas.box(172 + place, 46 + row * 34, take, 18, KINDS[number % 5])
            place, left = place + take, left - take
            if place == 125:
                place, row = 0.0, row + 1
    for number in range(4):
        canvas.text(306, 60 + number * 34, f"sample {number}", "dim small")
    order = [int(number) for number in sample_at(range(4), 4, 42)]
    for place_, sample in enumerate(order):
        y = 46 + place_ * 34
        canvas.box(410, y, 92, 18)
        canvas.text(456, y + 14, f"sample {sample}", "small", "middle")
        canvas.text(402, y + 14, str(place_), "dim small", "end")
        canvas.arrow(506, y + 9, 556, y + 9)
        canvas.text(562, y + 14, f"step {place_ // 2 + 1}, data rank {place_ % 2}", "small")
    canvas.arrow(150, 108, 168, 108)
    canvas.arrow(352, 108, 384, 108)
    rows = (
        "1  The tokenizer makes token ids of each document.",
        "2  Documents are packed into samples of seq_len tokens. Each token knows its document.",
        "3  Position and seed determine the sample, by a permutation that is computed, not stored.",
        "4  Data ranks share the samples of a step. Tensor, context and pipeline peers read the same sample.",
        f"Here: seed 42, order {', '.join(map(str, order))}. On another mesh the order is the same.",
    )
    for number, words in enumerate(rows):
        canvas.text(16, 226 + number * 22, words, "dim" if number == 4 else "")
    return canvas.svg()


FILES = (
    ("metrics.jsonl", "a line per logged step", 0),
    ("exit.json", "how the last attempt ended", 0),
    ("checkpoint/", "", 0),
    ("lease.json", "the run that writes here now", 1),
    ("step-500/", "one checkpoint; it never changes", 1),
    ("manifest.json", "names, shapes, pieces, counters; a SHA-256 of each file", 2),
    ("rank-00000.bin", "the pieces that rank 0 holds", 2),
    ("rank-00001.bin", "those of rank 1", 2),
)


def checkpoint() -> str:
    """The files of a run, and how a save becomes one."""
    canvas = Canvas(720, 440, "A checkpoint: its files, and how it is committed")
    canvas.text(16, 26, "outputs/", "head")
    for number, (name, words, depth) in enumerate(FILES):
        y = 50 + number * 22
        canvas.line(24 + depth * 22, y - 4, 34 + depth * 22, y - 4)
        canvas.line(24 + depth * 22, y - 18, 24 + depth * 22, y - 4)
        canvas.text(40 + depth * 22, y, name, "code")
        canvas.text(250, y, words, "dim")
    canvas.text(16, 252, "A save", "head")
    steps = (
        ("draft", ("every rank writes its", "pieces, hashed, to disk"), "b"),
        ("manifest", ("the first rank writes", "the list of all files"), "b"),
        ("commit", ("one rename makes", "the draft step-500"), "c"),
        ("older ones", ("beyond keep_latest_k", "are deleted, renamed first"), "a"),
    )
    for number, (name, lines, kind) in enumerate(steps):
        x = 16 + number * 176
        canvas.box(x, 268, 156, 82, kind)
        canvas.text(x + 78, 288, name, "head", "middle")
        for at, words in enumerate(lines):
            canvas.text(x + 78, 312 + at * 20, words, "small", "middle")
        if number < 3:
            canvas.arrow(x + 158, 309, x + 174, 309)
    canvas.line(359, 262, 359, 372, dashed=True)
    canvas.text(352, 392, "killed here: the draft is ignored,", "small", "end")
    canvas.text(352, 410, "the previous checkpoint is the newest", "small", "end")
    canvas.text(366, 392, "killed here: step-500 is complete,", "small")
    canvas.text(366, 410, "and the run continues from it", "small")
    return canvas.svg()


def resharding() -> str:
    """One tensor of a checkpoint, written by four FSDP ranks and read by two FSDP times two tensor-parallel ranks."""
    canvas = Canvas(720, 300, "A checkpoint on two meshes")
    canvas.text(110, 30, "written with dp_shard = 4", "head", "middle")
    canvas.text(360, 30, "one tensor, in global rows", "head", "middle")
    canvas.text(600, 30, "read with dp_shard = 2, tp = 2", "head", "middle")
    for rank in range(4):
        y = 50 + rank * 52
        canvas.box(40, y, 140, 46, KINDS[rank])
        canvas.text(110, y + 28, f"rank {rank}", "", "middle")
        canvas.arrow(186, y + 23, 284, y + 23)
        canvas.box(290, y, 140, 46, KINDS[rank])
        canvas.text(360, y + 28, f"rows {rank * 256} to {rank * 256 + 255}", "", "middle")
    for shard in range(2):
        middle = 50 + shard * 104 + 49
        for piece in range(2):
            canvas.arrow(
                436, 50 + (2 * shard + piece) * 52 + 23, 504, middle + (4 if piece else -4)
            )
        for tp in range(2):
            x = 510 + tp * 94
            canvas.box(x, 50 + shard * 104, 88, 98, KINDS[2 * shard])
            canvas.text(x + 44, middle - 4, f"rank {2 * shard + tp}", "", "middle")
            canvas.text(
                x + 44, middle + 16, "left half" if tp == 0 else "right half", "small", "middle"
            )
    canvas.text(360, 282, "Each rank reads only the pieces that overlap its part.", "dim", "middle")
    return canvas.svg()


STEP = (
    # name of the plan's moment, name in the drawing
    ("the end of forward", "end of the forward pass"),
    ("the loss", "loss"),
    ("backward of the head", "backward of the head"),
    ("backward of a layer", "backward of the last layer"),
    ("backward of the first layer", "backward of the first layer"),
    ("backward of the embedding", "backward of the embedding"),
)
PARTS = (
    ("weights", "a"),
    ("optimizer states", "d"),
    ("gradients", "e"),
    ("activations", "c"),
    ("gathered weights", "b"),
)


def step_memory() -> str:
    """Draw the memory of a rank at each moment of a step, as ``plan`` counts it."""
    ranks = 8
    options = [
        "--training.global_batch_size",
        str(ranks),
        "--activation_checkpoint.mode",
        "selective",
    ]
    settings = config.load("llama3_8b", options).config
    model = shapes.read(settings)
    job = job_sizes.of_config(settings, ranks, len(model.layers), 1, model.has_experts)
    rank = rank_memory.of_rank(model, job, 0, None, "cuda")
    moments = {
        moment.name: moment for moment in stage_memory.stage_bytes(model, job, 0, "cuda").moments
    }
    states = [rank.parameters, rank.optimizer]
    rows = [("before the step", [*states, 0, 0, 0])]
    for moment, name in STEP:
        found = moments[moment]
        rows.append((name, [*states, found.gradients, found.activations, found.gathered]))
    rows.append(("update", [*states, rank.gradients, 0, 0]))
    largest = max(sum(sizes) for _, sizes in rows)

    canvas = Canvas(
        720,
        144 + 34 * len(rows),
        f"Llama 3 8B on {ranks} GPUs: memory of a GPU in a step, as planned",
    )
    canvas.text(16, 26, canvas.title, "head")
    left, width = 216, 390
    for number, (name, sizes) in enumerate(rows):
        y = 46 + 34 * number
        canvas.text(left - 10, y + 17, name, "", "end")
        x = float(left)
        for size, (part, kind) in zip(sizes, PARTS, strict=True):
            length = size / largest * width
            if length >= 1:
                canvas.box(x, y, length, 24, kind, f"{part}: {size / 2**30:.1f} GiB")
            x += length
        total = sum(sizes)
        peak = ", the peak" if total == largest else ""
        canvas.text(x + 8, y + 17, f"{total / 2**30:.1f} GiB{peak}", "small")
    x = 16.0
    foot = 68 + 34 * len(rows)
    for part, kind in PARTS:
        canvas.box(x, foot, 12, 12, kind)
        canvas.text(x + 18, foot + 11, part, "small")
        x += 46 + 6.4 * len(part)
    canvas.text(
        16,
        foot + 38,
        "The forward pass adds activations; the backward pass frees them and leaves gradients.",
        "dim",
    )
    canvas.text(
        16,
        foot + 58,
        "FSDP gathers the weights of one layer at a time, and of two in the backward pass.",
        "dim",
    )
    return canvas.svg()


ALL = {
    "mesh": mesh,
    "axes": axes,
    "pipelines": pipelines,
    "batch": batch,
    "checkpoint": checkpoint,
    "resharding": resharding,
    "step_memory": step_memory,
}


if __name__ == "__main__":
    svg.write_all(ALL, FOLDER)
