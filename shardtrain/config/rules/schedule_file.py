"""Rules of a pipeline schedule that is written as CSV: a row per rank, a cell per action, such as 0F1 or 3B0.

PyTorch checks the same when ranks have started, in words that name neither the option nor the file.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

Action = tuple[int, str, int]
"""Stage, what it does (F, B, or I and W), and micro-batch."""
_OPTION = "parallelism.pipeline_parallel_schedule_csv"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def check_schedule_file(loaded: Loaded, num_stages: int, num_microbatches: int | None) -> Iterator[Problem]:
    """Each stage is on its rank, and forward and backward of each micro-batch are there; unknown numbers are None."""
    p = loaded.config.parallelism
    c = loaded.config.compile
    path = Path(p.pipeline_parallel_schedule_csv).expanduser()
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError):
        return  # that it is not there is reported by itself
    degree = p.pipeline_parallel_degree
    if len(rows) != degree:
        rule = f"has {len(rows)} rows, and there are {degree} pipeline ranks"
        yield problem(loaded, _OPTION, rule, "write a row for each rank")
        return

    # Read each cell: an action of a stage of this rank, written once. Two actions in one cell overlap
    done: dict[tuple[int, str], set[int]] = defaultdict(set)
    actions: list[list[Action]] = [[] for _ in rows]
    for rank, row in enumerate(rows):
        for cell in row:
            overlapped = _OVERLAP.fullmatch(cell)
            for text in overlapped[1].split(";") if overlapped else [cell]:
                action = _ACTION.fullmatch(text.strip())
                if action is None:
                    fix = "write stage, F, B, I or W, and micro-batch: 0F1"
                    yield problem(loaded, _OPTION, f"holds {cell!r}, which is not an action", fix)
                    return
                stage = int(action[1])
                kind = action[2]
                microbatch = int(action[3])
                if stage >= num_stages or stage % degree != rank:
                    own = ", ".join(str(n) for n in range(rank, num_stages, degree))
                    rule = f"has {text.strip()} in the row of rank {rank}, which holds the stages {own}"
                    yield problem(loaded, _OPTION, rule, "deal stages to ranks in turn: 0, 1, ..., 0, 1, ...")
                    return
                # B is all of backward, I and W its two halves: B beside a half would count that half twice
                other = {"B": "IW", "I": "B", "W": "B"}.get(kind, "")
                again = next((letter for letter in (kind, *other) if microbatch in done.get((stage, letter), ())), None)
                if again is not None:
                    rule = f"has {text.strip()} beside {stage}{again}{microbatch}, which would count it twice"
                    yield problem(loaded, _OPTION, rule, "write each action once, and B or both I and W")
                    return
                done[stage, kind].add(microbatch)
                actions[rank].append((stage, kind, microbatch))
    if c.enable and "model" in c.components and any(kind in "IW" for _, kind in done):
        rule = "computes gradients of inputs and weights apart (I, W), which torch.compile gets wrong without a word"
        yield problem(loaded, _OPTION, rule, "set compile.enable = false, or write B in place of I and W")

    # Each stage has forward and backward of each micro-batch. Where their number is unknown, that of stage 0 is it
    wanted = set(range(num_microbatches)) if num_microbatches is not None else done[0, "F"]
    for stage in range(num_stages):
        backward = done[stage, "B"] | (done[stage, "I"] & done[stage, "W"])
        for what, found in (("forward", done[stage, "F"]), ("backward", backward)):
            if found != wanted:
                number = min(found ^ wanted)
                rule = f"leaves out {what} of micro-batch {number} of stage {stage}"
                if number in found:
                    rule = f"has {what} of micro-batch {number}, and a step has {len(wanted)}"
                yield problem(loaded, _OPTION, rule, f"write the micro-batches 0 to {len(wanted) - 1} of each stage")
                return
    yield from _check_order(loaded, actions, num_stages)


def _check_order(loaded: Loaded, actions: list[list[Action]], num_stages: int) -> Iterator[Problem]:
    """No action waits for ever, and the last stage computes losses in the order of micro-batches.

    PyTorch notes losses as they come, and takes that of micro-batch 2 for the third: in another order gradients would
    be those of other losses, without a word.
    """
    last = num_stages - 1
    row_of_last = actions[last % len(actions)]
    order = [microbatch for stage, kind, microbatch in row_of_last if (stage, kind) == (last, "F")]
    late = next((number for number, before in zip(order[1:], order, strict=False) if number < before), None)
    if late is not None:
        rule = f"has forward of micro-batch {late} of the last stage ({last}) after that of a later one"
        yield problem(loaded, _OPTION, rule, f"write {last}F0, {last}F1, ... in this order: PyTorch counts losses so")
        return

    # Run the schedule: each rank does what it can, until none can go further
    done: set[Action] = set()
    at = [0] * len(actions)
    while True:
        before = len(done)
        for rank, row in enumerate(actions):
            while at[rank] < len(row) and all(done & choices for choices in _needs(row[at[rank]], last)):
                done.add(row[at[rank]])
                at[rank] += 1
        if len(done) == before:
            break
    for rank, row in enumerate(actions):
        if at[rank] < len(row):
            missing = next(choices for choices in _needs(row[at[rank]], last) if not done & choices)
            names = " or ".join(sorted("".join(map(str, action)) for action in missing))
            own = "".join(map(str, row[at[rank]]))
            rule = f"has rank {rank} wait for ever: {own} needs {names}, which comes later or waits itself"
            yield problem(loaded, _OPTION, rule, f"write {own} behind what it needs")
            return


def _needs(action: Action, last: int) -> Iterator[set[Action]]:
    """What an action needs: of each set, one that is done."""
    stage, kind, n = action
    if kind == "F" and stage > 0:
        yield {(stage - 1, "F", n)}
    if kind in "BI":
        yield {(stage, "F", n)}
        if stage < last:
            yield {(stage + 1, "B", n), (stage + 1, "I", n)}
    if kind == "W":
        yield {(stage, "I", n)}
