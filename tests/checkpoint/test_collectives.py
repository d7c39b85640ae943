"""Ranks tell each other JSON: what one could not do none has done, and what the first knows is sent once."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from shardtrain.checkpoint import collectives
from shardtrain.utils.errors import CheckpointError, ConfigError, PeerError, Problem, StorageError

RANKS = 3


def raised(action: Any) -> str:
    """The kind and the words of the error in which an action ended."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def many_runs(value: str) -> Any:
    """What ranks say where more of them differ from the one before than are heard one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_MOST_RUNS", 2)
        return collectives.gather_distinct_json(value)


def one_rank(rank: int) -> dict[str, Any]:
    def fails_on(who: int, error: Exception) -> Any:
        def action() -> int:
            if rank == who:
                raise error
            return rank

        return action

    def two_fail() -> None:
        if rank == 1:
            raise KeyError("a bug")
        if rank == 2:
            raise CheckpointError("it is damaged")

    return {
        "gathered": collectives.all_gather_json({"rank": rank, "text": "x" * rank}),
        "first": collectives.broadcast_json([rank, "ä", None]),
        "distinct": collectives.gather_distinct_json("odd" if rank % 2 else "even"),
        "runs": collectives.gather_distinct_json(["a", "b", "b"][rank]),
        "by hash": many_runs("odd" if rank % 2 else "even"),
        "any": collectives.any_ranks([rank == 2, False, True]),
        "no word": collectives.first_word(""),
        "word": collectives.first_word(f"rank {rank}" if rank else ""),
        "done": collectives.all_ranks(lambda: rank + 10),
        "done by the first": collectives.first_rank(lambda: [rank, dist.get_rank()]),
        "done and told": collectives.all_ranks_gather(lambda: rank),
        "told the first": collectives.all_ranks_to_first(lambda: "x" * rank),
        "refused": raised(lambda: collectives.all_ranks(fails_on(1, CheckpointError("no")))),
        "no disk": raised(lambda: collectives.first_rank(fails_on(0, OSError(28, "No space left", "/full")))),
        "a bug": raised(lambda: collectives.all_ranks(fails_on(2, ZeroDivisionError("of rank 2")))),
        "two": raised(lambda: collectives.all_ranks(two_fail)),
        "after all that": collectives.broadcast_json(rank),
    }


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return run_ranks(RANKS, one_rank)


def test_all_ranks_hear_the_same(told: list[dict[str, Any]]) -> None:
    expected = {
        "gathered": [{"rank": rank, "text": "x" * rank} for rank in range(RANKS)],
        "first": [0, "ä", None],
        "distinct": (["even", "odd"], [0, 1, 0]),
        "runs": (["a", "b"], [0, 1, 1]),
        "by hash": (["even", "odd"], [0, 1, 0]),
        "any": [True, False, True],
        "no word": "",
        "word": "rank 1",
        "done": 10,
        "done by the first": [0, 0],
        "done and told": [0, 1, 2],
        "after all that": 0,
    }
    for heard in told:
        assert {name: heard[name] for name in expected} == expected
    assert [heard["told the first"] for heard in told] == [["", "x", "xx"], [], []]


def test_what_one_could_not_do_none_has_done(told: list[dict[str, Any]]) -> None:
    for rank, heard in enumerate(told):
        assert heard["refused"] == "CheckpointError: no"
        assert heard["no disk"].startswith("StorageError: rank 0 on ") and "/full: No space left" in heard["no disk"]
        bug = "ZeroDivisionError: of rank 2" if rank == 2 else "PeerError: rank 2: ZeroDivisionError: of rank 2"
        assert heard["a bug"] == bug
        # an error with a name of ours says more than a bug that may have followed from it
        assert heard["two"] == ("KeyError: 'a bug'" if rank == 1 else "CheckpointError: it is damaged")


def test_a_process_alone_needs_no_group() -> None:
    assert collectives.all_gather_json((1, 2)) == [[1, 2]]
    assert collectives.gather_json((1, 2)) == [[1, 2]]
    assert collectives.gather_distinct_json((1, 2)) == ([[1, 2]], [0])
    assert collectives.broadcast_json({"a": (1,)}) == {"a": [1]}
    assert collectives.any_rank(True) and not collectives.any_rank(False)
    assert collectives.first_word("word") == "word" and collectives.first_word("") == ""


def manifest_sent(rank: int, size: int) -> list[int]:
    """Bytes that pass through each collective while the first rank sends a text of ``size`` bytes."""
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
        assert collectives.first_word("") == "" and not collectives.any_rank(False)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return sent


def test_what_is_held_of_a_manifest_does_not_grow_with_the_ranks() -> None:
    few, many = (run_ranks(ranks, manifest_sent, 100_000) for ranks in (2, 4))
    assert few[0] == few[1] == many[0] == many[3]
    assert sum(few[0]) < 100_100


def test_errors_of_every_kind_arrive_as_what_they_are() -> None:
    kinds: list[Exception] = [StorageError("s"), PeerError("p"), ConfigError(Problem("a.b", 1, "is", "fix"))]
    for error in kinds:
        with pytest.raises(type(error)) as caught:
            collectives._raise_alike(error, [type(error).__name__, str(error)])
        assert str(caught.value) == str(error)
