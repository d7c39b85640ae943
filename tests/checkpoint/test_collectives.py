"""JSON collectives: an error on one rank is raised on all, and a broadcast sends each byte once."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from shardtrain.checkpoint import collectives
from shardtrain.utils.errors import CheckpointError, ConfigError, PeerError, Problem, StorageError

RANKS = 3


def raised(action: Any) -> str:
    """Return the type and message of the error that the action raises, or an empty string."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gather_by_hash(value: str) -> Any:
    """Gather distinct values by hash, the path for more than ``_MOST_RUNS`` runs of equal values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_MOST_RUNS", 2)
        return collectives.gather_distinct_json(value)


def answers_of_rank(rank: int) -> dict[str, Any]:
    def failing_on(failing_rank: int, error: Exception) -> Any:
        def action() -> int:
            if rank == failing_rank:
                raise error
            return rank

        return action

    def fail_on_two_ranks() -> None:
        if rank == 1:
            raise KeyError("a bug")
        if rank == 2:
            raise CheckpointError("it is damaged")

    no_disk = OSError(28, "No space left", "/full")
    error_of_rank_2 = ZeroDivisionError("of rank 2")
    return {
        "gathered": collectives.all_gather_json({"rank": rank, "text": "x" * rank}),
        "first": collectives.broadcast_json([rank, "ä", None]),
        "distinct": collectives.gather_distinct_json("odd" if rank % 2 else "even"),
        "runs": collectives.gather_distinct_json(["a", "b", "b"][rank]),
        "by hash": gather_by_hash("odd" if rank % 2 else "even"),
        "any": collectives.any_ranks([rank == 2, False, True]),
        "no text": collectives.first_word(""),
        "text": collectives.first_word(f"rank {rank}" if rank else ""),
        # Actions that succeed, on all ranks or only on rank 0.
        "done": collectives.all_ranks(lambda: rank + 10),
        "first rank only": collectives.first_rank(lambda: [rank, dist.get_rank()]),
        "all ranks gather": collectives.all_ranks_gather(lambda: rank),
        "gathered on rank 0": collectives.all_ranks_to_first(lambda: "x" * rank),
        # Actions that fail on one or two ranks.
        "refused": raised(lambda: collectives.all_ranks(failing_on(1, CheckpointError("no")))),
        "no disk": raised(lambda: collectives.first_rank(failing_on(0, no_disk))),
        "a bug": raised(lambda: collectives.all_ranks(failing_on(2, error_of_rank_2))),
        "two": raised(lambda: collectives.all_ranks(fail_on_two_ranks)),
        "after the errors": collectives.broadcast_json(rank),
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(RANKS, answers_of_rank)


def test_all_ranks_receive_the_same_values(answers: list[dict[str, Any]]) -> None:
    expected = {
        "gathered": [{"rank": rank, "text": "x" * rank} for rank in range(RANKS)],
        "first": [0, "ä", None],
        "distinct": (["even", "odd"], [0, 1, 0]),
        "runs": (["a", "b"], [0, 1, 1]),
        "by hash": (["even", "odd"], [0, 1, 0]),
        "any": [True, False, True],
        "no text": "",
        "text": "rank 1",
        "done": 10,
        "first rank only": [0, 0],
        "all ranks gather": [0, 1, 2],
        "after the errors": 0,
    }

    for answer in answers:
        assert {name: answer[name] for name in expected} == expected
    assert [answer["gathered on rank 0"] for answer in answers] == [["", "x", "xx"], [], []]


def test_error_on_one_rank_is_raised_on_all(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert answer["refused"] == "CheckpointError: no"
        assert answer["no disk"].startswith("StorageError: rank 0 on ")
        assert "/full: No space left" in answer["no disk"]
        bug = (
            "ZeroDivisionError: of rank 2"
            if rank == 2
            else "PeerError: rank 2: ZeroDivisionError: of rank 2"
        )
        assert answer["a bug"] == bug
        # A CheckpointError takes precedence, because the KeyError of rank 1 may only be its consequence.
        assert answer["two"] == (
            "KeyError: 'a bug'" if rank == 1 else "CheckpointError: it is damaged"
        )


def test_single_process_needs_no_process_group() -> None:
    assert collectives.all_gather_json((1, 2)) == [[1, 2]]
    assert collectives.gather_json((1, 2)) == [[1, 2]]
    assert collectives.gather_distinct_json((1, 2)) == ([[1, 2]], [0])
    assert collectives.broadcast_json({"a": (1,)}) == {"a": [1]}
    assert collectives.any_rank(True)
    assert not collectives.any_rank(False)
    assert collectives.first_word("word") == "word"
    assert collectives.first_word("") == ""


def bytes_gathered(rank: int, size: int) -> list[int]:
    """Return the number of bytes received in each all-gather when one rank's value has ``size`` bytes."""
    received: list[int] = []
    original = collectives.host_collectives.all_gather

    def counted(tensor: Any) -> Any:
        gathered = original(tensor)
        received.append(gathered.numel() * gathered.element_size())
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.host_collectives, "all_gather", counted)
        values = collectives.gather_json("m" * size if rank == 1 else "")
    assert len(values) == (RANKS if rank == 0 else 0)
    return received


def test_gathered_values_take_the_longest_size_of_each_rank_on_every_rank() -> None:
    quotes = 2  # bytes that JSON adds around a string
    for received in run_ranks(RANKS, bytes_gathered, 1000):
        assert received == [RANKS * (1000 + quotes)]


def manifest_sent(rank: int, size: int) -> list[int]:
    """Return the size in bytes of each collective while rank 0 broadcasts a text of ``size`` bytes."""
    sent: list[int] = []
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")
    originals = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def collective(tensor: Any, *arguments: Any, **options: Any) -> Any:
            parts = tensor if isinstance(tensor, list) else [tensor]
            sent.append(sum(part.numel() * part.element_size() for part in parts))
            return originals[name](tensor, *arguments, **options)

        return collective

    try:
        for name in names:
            setattr(dist, name, counted(name))
        assert len(collectives.broadcast_json("m" * size if rank == 0 else None)) == size
        assert collectives.first_word("") == ""
        assert not collectives.any_rank(False)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return sent


def test_bytes_of_a_broadcast_do_not_grow_with_ranks() -> None:
    few, many = (run_ranks(ranks, manifest_sent, 100_000) for ranks in (2, 4))
    assert few[0] == few[1] == many[0] == many[3]
    assert sum(few[0]) < 100_100


def test_errors_keep_their_type_on_other_ranks() -> None:
    kinds: list[Exception] = [
        StorageError("s"),
        PeerError("p"),
        ConfigError(Problem("a.b", 1, "is", "fix")),
    ]

    for error in kinds:
        with pytest.raises(type(error)) as caught:
            collectives._raise_alike(error, [type(error).__name__, str(error)])
        assert str(caught.value) == str(error)
