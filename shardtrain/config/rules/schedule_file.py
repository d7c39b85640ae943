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

_OPTION = "parallelism.pipeline_parallel_schedule_csv"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def check_schedule_file(loaded: Loaded, num_stages: int, num_microbatches: int | None) -> Iterator[Problem]:
    """Each stage is on its rank, and forward and backward of each micro-batch are there; unknown numbers are None."""
    p, c = loaded.config.parallelism, loaded.config.compile
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
    done: dict[tuple[int, str], set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        for cell in row:
            overlapped = _OVERLAP.fullmatch(cell)
            for text in overlapped[1].split(";") if overlapped else [cell]:
                action = _ACTION.fullmatch(text.strip())
                if action is None:
                    fix = "write stage, F, B, I or W, and micro-batch: 0F1"
                    yield problem(loaded, _OPTION, f"holds {cell!r}, which is not an action", fix)
                    return
                stage, kind, microbatch = int(action[1]), action[2], int(action[3])
                if stage >= num_stages or stage % degree != rank:
                    own = ", ".join(str(n) for n in range(rank, num_stages, degree))
                    rule = f"has {text.strip()} in the row of rank {rank}, which holds the stages {own}"
                    yield problem(loaded, _OPTION, rule, "deal stages to ranks in turn: 0, 1, ..., 0, 1, ...")
                    return
                done[stage, kind].add(microbatch)
    if c.enable and "model" in c.components and any(kind in "IW" for _, kind in done):
        rule = "computes gradients of inputs and weights apart (I, W), which torch.compile gets wrong without a word"
        yield problem(loaded, _OPTION, rule, "set compile.enable = false, or write B in place of I and W")
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
