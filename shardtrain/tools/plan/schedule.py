"""Actions of each pipeline rank in a step, from PyTorch's own schedules but without a model, and
their timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from shardtrain.config import stages


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch: forward ("F"), backward ("B"), or its halves for inputs ("I") and
    weights ("W").
    """

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step's pipeline, and seconds that each rank computes."""

    seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Mean share of the time that a rank waits, 0..1."""
        seconds_of_ranks = len(self.busy_seconds) * self.seconds
        return 1 - sum(self.busy_seconds) / max(seconds_of_ranks, 1e-30)


@lru_cache(maxsize=256)
def orders(
    schedule: str, degree: int, num_stages: int, num_microbatches: int, recomputes: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each pipeline rank in a step, as PyTorch's schedule lists them.
    Empty for one rank.

    With ``recomputes``, gradients of weights are computed together with gradients of inputs in every
    schedule.
    """
    if degree == 1:
        return ()
    # Schedules with one stage per rank follow a simple rule.
    if schedule in ("GPipe", "1F1B"):
        simple_orders = []
        for rank in range(degree):
            num_warmup = num_microbatches
            if schedule == "1F1B":
                num_warmup = min(degree - rank, num_microbatches)
            simple_orders.append(_of_single_stage(rank, num_warmup, num_microbatches))
        return tuple(simple_orders)
    # Takes a second to import.
    from torch.distributed.pipelining.schedules import get_schedule_class

    def stage(index: int) -> Any:
        return SimpleNamespace(
            group_size=degree, group_rank=0, num_stages=num_stages, stage_index=index, has_backward=True,
            is_first=index == 0, is_last=index == num_stages - 1, submod=None, device="cpu",
            stage_index_to_group_rank={},
        )  # fmt: skip

    # A schedule of PyTorch lists the actions of all ranks when it is created. It needs only these
    # attributes of a stage.
    schedule_class: Any = get_schedule_class(schedule)
    indices = stages.stages_of_rank(schedule, 0, degree, num_stages)
    stages_of_first_rank = [stage(index) for index in indices]
    created = schedule_class(
        stages_of_first_rank, n_microbatches=num_microbatches, loss_fn=lambda *_: 0
    )
    order = []
    for rank in range(degree):
        # An entry is None while the rank waits, and may combine several actions.
        actions = []
        for combined in created.pipeline_order[rank]:
            if combined:
                actions += _plain_actions(combined.sub_actions or (combined,), recomputes)
        order.append(tuple(actions))
    return tuple(order)


def _plain_actions(parts: Sequence[Any], recomputes: bool) -> list[Action]:
    """Convert actions of PyTorch. With ``recomputes``, "B" replaces the separate "I" and "W"."""
    actions = []
    for part in parts:
        action = Action(part.computation_type.value, part.stage_index, part.microbatch_index)
        if recomputes and action.kind == "W":
            continue
        if recomputes and action.kind == "I":
            action = replace(action, kind="B")
        actions.append(action)
    return actions


def _of_single_stage(rank: int, num_warmup: int, count: int) -> tuple[Action, ...]:
    """Return the actions of a rank: forwards to fill the pipeline, then backward and forward in turns."""
    actions = [Action("F", rank, number) for number in range(num_warmup)]
    for number in range(count):
        actions.append(Action("B", rank, number))
        if num_warmup + number < count:
            actions.append(Action("F", rank, num_warmup + number))
    return tuple(actions)


def most_kept(
    kept_by_stage: Mapping[int, int],
    actions: Sequence[Action],
    waiting_by_stage: Mapping[int, int] | None = None,
) -> tuple[int, int, int]:
    """Return the peak of the activations that are kept for backward.

    Args:
        kept_by_stage: Bytes of a micro-batch from forward to backward.
        actions: Actions of one rank.
        waiting_by_stage: Additional bytes that the backward of inputs ("I") keeps for the later backward of
            weights ("W"). "I" frees nothing.

    Returns:
        The largest number of bytes, the largest number of micro-batches, and the largest number of
        bytes after the first backward, when gradients exist.
    """
    current_bytes = 0
    most_bytes = 0
    most_bytes_with_gradients = 0
    in_flight = 0
    most_in_flight = 0
    has_gradients = False
    # Follow the memory through the actions, and note its maxima.
    for action in actions:
        kept = kept_by_stage.get(action.stage, 0)
        waiting = 0
        if waiting_by_stage:
            waiting = waiting_by_stage.get(action.stage, 0)
        if action.kind == "F":
            in_flight += 1
            current_bytes += kept
        elif action.kind == "I":
            current_bytes += waiting
        elif action.kind in ("B", "W"):
            has_gradients = True
            in_flight -= 1
            current_bytes -= kept
            if action.kind == "W":
                current_bytes -= waiting
        most_bytes = max(most_bytes, current_bytes)
        most_in_flight = max(most_in_flight, in_flight)
        if has_gradients:
            most_bytes_with_gradients = max(most_bytes_with_gradients, current_bytes)
    return most_bytes, most_in_flight, most_bytes_with_gradients


def in_flight(schedule: str, rank: int, degree: int, per_rank: int, num_microbatches: int) -> int:
    """Return the largest number of micro-batches in flight, by a formula. Each stage of the rank
    counts separately.

    >>> in_flight("1F1B", 0, 4, 1, 8), in_flight("Interleaved1F1B", 0, 4, 2, 16), in_flight("DualPipeV", 1, 4, 2, 16)
    (4, 11, 8)
    """
    every = num_microbatches * per_rank
    if schedule in ("GPipe", "LoopedBFS"):
        return every
    if schedule in stages.V_SHAPED:
        return min(every, 2 * degree)
    if per_rank == 1:
        return min(every, degree - rank)
    return min(every, 2 * (degree - rank - 1) + (per_rank - 1) * degree + 1)


def bubble(schedule: str, degree: int, per_rank: int, num_microbatches: int) -> float:
    """Return the waiting time of a rank relative to its computing time (Narayanan et al. 2021, Qi
    et al. 2024).

    >>> bubble("1F1B", 4, 1, 8), bubble("Interleaved1F1B", 4, 2, 8)
    (0.375, 0.1875)
    """
    share = (degree - 1) / (per_rank * num_microbatches)
    if schedule in stages.V_SHAPED:
        return share / 3
    return share


def simulate(
    order: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], send_seconds: float
) -> Timeline:
    """Run the actions of all ranks as early as their inputs allow.

    A forward needs the forward of the previous stage, and a backward needs the backward of the next stage.

    Args:
        order: Actions of each rank.
        seconds: Seconds of an action, by kind and stage.
        send_seconds: Seconds of a transfer between stages on different ranks.
    """
    rank_of = {}
    for rank, actions in enumerate(order):
        for action in actions:
            rank_of[action.stage] = rank
    last = max(rank_of)
    end_seconds: dict[tuple[str, int, int], float] = {}  # by kind, stage and micro-batch
    clock = [0.0] * len(order)
    position = [0] * len(order)
    busy = [0.0] * len(order)

    # Each rank runs until it needs an action that has not run yet, and continues after that action.
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ready = list(range(len(order)))
    while ready:
        rank = ready.pop()
        while position[rank] < len(order[rank]):
            action = order[rank][position[rank]]
            # An action starts when its rank is free and its input has arrived.
            start = clock[rank]
            need = _input_of(action, last)
            if need is not None:
                if need not in end_seconds:
                    waiting.setdefault(need, []).append(rank)
                    break
                arrival = end_seconds[need]
                _, stage_of_need, _ = need
                if rank_of[stage_of_need] != rank:
                    arrival += send_seconds
                start = max(start, arrival)
            duration = seconds[action.kind, action.stage]
            clock[rank] = start + duration
            busy[rank] += duration
            position[rank] += 1
            # Gradients of weights are the input of no other action.
            if action.kind == "W":
                continue
            kind = "F" if action.kind == "F" else "B"
            key = (kind, action.stage, action.microbatch)
            end_seconds[key] = clock[rank]
            ready += waiting.pop(key, [])
    return Timeline(max(clock), tuple(busy))


def _input_of(action: Action, last: int) -> tuple[str, int, int] | None:
    """Return kind, stage and micro-batch of the action whose result an action needs."""
    if action.kind == "F" and action.stage > 0:
        return ("F", action.stage - 1, action.microbatch)
    if action.kind not in ("F", "W") and action.stage < last:
        return ("B", action.stage + 1, action.microbatch)
    return None
