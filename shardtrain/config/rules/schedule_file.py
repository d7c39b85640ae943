"""Rules about a pipeline schedule in a CSV file: a row per rank, a cell per action, such as 0F1 or 3B0.

PyTorch checks the same after ranks have started, with messages that name neither the option nor the file.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import problem
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import Problem

Action = tuple[int, str, int]
"""Stage, kind (F forward, B backward, or its halves: I for inputs and W for weights), and micro-batch."""
Done = dict[tuple[int, str], set[int]]
"""(Stage, kind) -> micro-batches with this action."""
_OPTION = "parallelism.pipeline_parallel_schedule_csv"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_DUPLICATES = {"F": "F", "B": "BIW", "I": "IB", "W": "WB"}
"""Kind -> the kinds that may not exist for the same stage and micro-batch: B is I and W together."""


def check_schedule_file(
    loaded: Loaded, num_stages: int, num_microbatches: int | None
) -> Iterator[Problem]:
    """Yield the first problem of the file: its actions, their completeness, or their order.

    ``num_microbatches`` is None if unknown. A file that does not exist is reported by another rule.
    """
    p = loaded.config.parallelism
    path = Path(p.pipeline_parallel_schedule_csv).expanduser()
    try:
        with open(path, newline="", encoding="utf-8", opener=atomic_io.without_waiting) as file:
            rows = []
            for row in csv.reader(file):
                cells = [cell.strip() for cell in row]
                rows.append([cell for cell in cells if cell])
    except (OSError, UnicodeDecodeError):
        return
    if len(rows) != p.pipeline_parallel_degree:
        yield problem(
            loaded,
            _OPTION,
            rule=f"has {len(rows)} rows, and there are {p.pipeline_parallel_degree} pipeline ranks",
            fix="write a row for each rank",
        )
        return

    # Parse each action, and collect those of each rank and of each stage.
    actions: list[list[Action]] = [[] for _ in rows]
    done: Done = defaultdict(set)
    for rank, row in enumerate(rows):
        for text in _action_texts(row):
            action = _parse_action(loaded, text, rank, num_stages, done)
            if isinstance(action, Problem):
                yield action
                return
            stage, kind, microbatch = action
            done[stage, kind].add(microbatch)
            actions[rank].append(action)

    c = loaded.config.compile
    has_split_backward = any(kind in "IW" for _, kind in done)
    if c.enable and "model" in c.components and has_split_backward:
        yield problem(
            loaded,
            _OPTION,
            rule=(
                "computes gradients of inputs and weights separately (I, W), "
                "for which torch.compile returns wrong gradients"
            ),
            fix="set compile.enable = false, or write B instead of I and W",
        )

    # The order is only worth checking if every stage has all of its actions.
    incomplete = _incomplete_stage(loaded, done, num_stages, num_microbatches)
    if incomplete is not None:
        yield incomplete
        return
    yield from _check_loss_order(loaded, actions, num_stages - 1)


def _action_texts(row: list[str]) -> Iterator[str]:
    """Yield the actions of a row. A cell may contain two actions that overlap."""
    for cell in row:
        overlapped = _OVERLAP.fullmatch(cell)
        if overlapped:
            yield from overlapped[1].split(";")
        else:
            yield cell


def _parse_action(
    loaded: Loaded, text: str, rank: int, num_stages: int, done: Done
) -> Action | Problem:
    """Return an action, or a problem if it is malformed, of another rank's stage, or a duplicate."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        return problem(
            loaded,
            _OPTION,
            rule=f"contains {text!r}, which is not an action",
            fix="write stage, F, B, I or W, and micro-batch: 0F1",
        )
    stage = int(match[1])
    kind = match[2]
    microbatch = int(match[3])

    # Stages are assigned to ranks round-robin.
    degree = loaded.config.parallelism.pipeline_parallel_degree
    if stage >= num_stages or stage % degree != rank:
        stages_of_rank = ", ".join(str(n) for n in range(rank, num_stages, degree))
        return problem(
            loaded,
            _OPTION,
            rule=f"has {text.strip()} in the row of rank {rank}, which holds the stages {stages_of_rank}",
            fix="assign stages to ranks in turn: 0, 1, ..., 0, 1, ...",
        )
    for other in _DUPLICATES[kind]:
        if microbatch in done.get((stage, other), ()):
            return problem(
                loaded,
                _OPTION,
                rule=f"has {text.strip()} as well as {stage}{other}{microbatch}, which would count it twice",
                fix="write each action once, and B or both I and W",
            )
    return stage, kind, microbatch


def _incomplete_stage(
    loaded: Loaded,
    done: Done,
    num_stages: int,
    num_microbatches: int | None,
) -> Problem | None:
    """Return a problem if a stage lacks forward or backward of a micro-batch, or has too many."""
    # If the number of micro-batches is unknown, stage 0 determines it.
    expected = done[0, "F"]
    if num_microbatches is not None:
        expected = set(range(num_microbatches))
    for stage in range(num_stages):
        # A backward pass is done if both of its halves are.
        backward = done[stage, "B"] | (done[stage, "I"] & done[stage, "W"])
        for direction, microbatches in (("forward", done[stage, "F"]), ("backward", backward)):
            if microbatches == expected:
                continue
            number = min(microbatches ^ expected)
            rule = f"lacks {direction} of micro-batch {number} of stage {stage}"
            if number in microbatches:
                rule = f"has {direction} of micro-batch {number}, and a step has {len(expected)}"
            return problem(
                loaded,
                _OPTION,
                rule=rule,
                fix=f"write the micro-batches 0 to {len(expected) - 1} of each stage",
            )
    return None


def _check_loss_order(loaded: Loaded, actions: list[list[Action]], last: int) -> Iterator[Problem]:
    """The last stage computes losses in the order of micro-batches; then check for deadlocks.

    PyTorch appends losses as they are computed, and takes the third for that of micro-batch 2. In
    another order it would silently compute gradients of other losses.
    """
    row_of_last = actions[last % len(actions)]
    order = [microbatch for stage, kind, microbatch in row_of_last if (stage, kind) == (last, "F")]
    for before, number in itertools.pairwise(order):
        if number < before:
            yield problem(
                loaded,
                _OPTION,
                rule=f"has forward of micro-batch {number} of the last stage ({last}) after that of a later one",
                fix=f"write {last}F0, {last}F1, ... in this order: PyTorch requires it",
            )
            return
    yield from _check_deadlock(loaded, actions, last)


def _check_deadlock(loaded: Loaded, actions: list[list[Action]], last: int) -> Iterator[Problem]:
    """Simulate the schedule: each rank runs actions in order until one requires an action that is
    not done.
    """
    done: set[Action] = set()
    position = [0] * len(actions)
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, row in enumerate(actions):
            while position[rank] < len(row) and _missing(row[position[rank]], last, done) is None:
                done.add(row[position[rank]])
                position[rank] += 1
                has_progress = True

    # No rank can proceed. Report the first one that has actions left.
    for rank, row in enumerate(actions):
        if position[rank] == len(row):
            continue
        action = row[position[rank]]
        missing = _missing(action, last, done) or set()
        names = " or ".join(sorted(_name(other) for other in missing))
        yield problem(
            loaded,
            _OPTION,
            rule=(
                f"has rank {rank} wait indefinitely: {_name(action)} requires {names}, "
                "which comes later or waits itself"
            ),
            fix=f"write {_name(action)} after the actions that it requires",
        )
        return


def _missing(action: Action, last: int, done: set[Action]) -> set[Action] | None:
    """Return the alternatives of the first unmet requirement of an action, or None if it can run."""
    for alternatives in _requirements(action, last):
        if not done & alternatives:
            return alternatives
    return None


def _requirements(action: Action, last: int) -> Iterator[set[Action]]:
    """Yield sets of actions. One of each set must be done before ``action``."""
    stage, kind, n = action
    if kind == "F" and stage > 0:
        yield {(stage - 1, "F", n)}
    if kind in "BI":
        yield {(stage, "F", n)}
        if stage < last:
            yield {(stage + 1, "B", n), (stage + 1, "I", n)}
    if kind == "W":
        yield {(stage, "I", n)}


def _name(action: Action) -> str:
    return "".join(map(str, action))
