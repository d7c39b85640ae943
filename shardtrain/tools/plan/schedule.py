"""What each rank of a pipeline does in a step, in order, and when: PyTorch's own schedules, asked without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from shardtrain.config import stages


@dataclass(frozen=True)
class Action:
    """A forward ("F"), a whole backward ("B"), or its halves for inputs ("I") and weights ("W"), of a micro-batch."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Timeline:
    """How long a step's pipeline takes, how long each rank computes, and the share of the time that ranks wait."""

    seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Mean share of the time in which a rank waits, 0..1."""
        return 1 - sum(self.busy_seconds) / max(len(self.busy_seconds) * self.seconds, 1e-30)


@lru_cache(maxsize=256)
def orders(
    schedule: str, degree: int, num_stages: int, num_microbatches: int, recomputes: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each pipeline rank in a step, as PyTorch's schedule of that name lists them; empty without one.

    A model that ``recomputes`` computes gradients of weights with those of inputs, whatever the schedule says.
    """
    if degree == 1:
        return ()
    if schedule == "GPipe":
        return tuple(
            tuple(Action(kind, rank, number) for kind in ("F", "B") for number in range(num_microbatches))
            for rank in range(degree)
        )
    if schedule == "1F1B":
        return tuple(_one_f_one_b(rank, degree, num_microbatches) for rank in range(degree))
    from torch.distributed.pipelining.schedules import get_schedule_class  # takes a second to import

    def stage(index: int) -> Any:
        return SimpleNamespace(
            group_size=degree, group_rank=0, num_stages=num_stages, stage_index=index, has_backward=True,
            is_first=index == 0, is_last=index == num_stages - 1, submod=None, device="cpu",
            stage_index_to_group_rank={},
        )  # fmt: skip

    # PyTorch's schedules list the actions of all ranks when they are made, and ask nothing more of a stage than this.
    kind: Any = get_schedule_class(schedule)
    own = [stage(index) for index in stages.stages_of_rank(schedule, 0, degree, num_stages)]
    found = kind(own, n_microbatches=num_microbatches, loss_fn=lambda *_: 0).pipeline_order
    answer = []
    for rank in range(degree):
        parts = [part for action in found[rank] if action for part in (action.sub_actions or (action,))]
        actions = [Action(one.computation_type.value, one.stage_index, one.microbatch_index) for one in parts]
        if recomputes:
            actions = [replace(one, kind="B") if one.kind == "I" else one for one in actions if one.kind != "W"]
        answer.append(tuple(actions))
    return tuple(answer)


def _one_f_one_b(rank: int, degree: int, count: int) -> tuple[Action, ...]:
    warm = min(degree - rank, count)
    actions = [Action("F", rank, number) for number in range(warm)]
    for number in range(count):
        actions.append(Action("B", rank, number))
        if warm + number < count:
            actions.append(Action("F", rank, warm + number))
    return tuple(actions)


def most_kept(
    kept_by_stage: Mapping[int, int], actions: Sequence[Action], waiting_by_stage: Mapping[int, int] | None = None
) -> tuple[int, int, int]:
    """Bytes and micro-batches that wait between forward and backward when most bytes do; the first again, once a
    backward is over and gradients exist.

    The backward of inputs alone ("I") frees nothing, and adds what that of the weights needs: ``waiting_by_stage``.
    """
    now = most = flying = most_flying = later = 0
    began = False
    for action in actions:
        change = (action.kind == "F") - (action.kind in ("B", "W"))
        now = now + change * kept_by_stage.get(action.stage, 0)
        flying = flying + change
        if waiting_by_stage and action.kind in ("I", "W"):
            now += waiting_by_stage.get(action.stage, 0) * (1 if action.kind == "I" else -1)
        began = began or action.kind in ("B", "W")
        most = max(most, now)
        most_flying = max(most_flying, flying)
        if began:
            later = max(later, now)
    return most, most_flying, later


def in_flight(schedule: str, rank: int, degree: int, per_rank: int, num_microbatches: int) -> int:
    """Micro-batches, times stages of the rank, between forward and backward at most: what ``most_kept`` counts.

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
    """Time that ranks wait over the time that they compute, by the formulas of Narayanan et al. 2021, Qi et al. 2024.

    >>> bubble("1F1B", 4, 1, 8), bubble("Interleaved1F1B", 4, 2, 8)
    (0.375, 0.1875)
    """
    share = (degree - 1) / (per_rank * num_microbatches)
    return share / 3 if schedule in stages.V_SHAPED else share


def simulate(
    order: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], send_seconds: float
) -> Timeline:
    """Run the actions of all ranks as early as their inputs allow.

    ``seconds`` are those of an action by (kind, stage); ``send_seconds`` pass between two stages on different ranks. A
    forward needs that of the stage before, a backward that of the stage after, both of the same micro-batch.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last = max(rank_of)
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * len(order)
    place = [0] * len(order)
    busy = [0.0] * len(order)

    # Each rank continues until it needs what is not done yet, and is taken up again when that is.
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ready = list(range(len(order)))
    while ready:
        rank = ready.pop()
        while place[rank] < len(order[rank]):
            action = order[rank][place[rank]]
            if action.kind == "F":
                need = ("F", action.stage - 1, action.microbatch) if action.stage else None
            elif action.kind == "W":
                need = None
            else:
                need = ("B", action.stage + 1, action.microbatch) if action.stage < last else None
            start = clock[rank]
            if need is not None:
                if need not in done:
                    waiting.setdefault(need, []).append(rank)
                    break
                start = max(start, done[need] + (send_seconds if rank_of[need[1]] != rank else 0.0))
            took = seconds[action.kind, action.stage]
            clock[rank] = start + took
            busy[rank] = busy[rank] + took
            place[rank] += 1
            if action.kind != "W":
                key = ("F" if action.kind == "F" else "B", action.stage, action.microbatch)
                done[key] = clock[rank]
                ready += waiting.pop(key, [])
    return Timeline(max(clock), tuple(busy))
