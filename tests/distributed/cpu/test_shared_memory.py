"""FSDP's collectives on a CPU give what the ranks have, by memory that they share and without it, to the same bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from shardtrain.distributed.cpu import mapped_memory, shared_barrier, shared_memory
from shardtrain.distributed.cpu.shared_memory import AllGather, Exchange, ReduceScatter, SequenceExchange

HALF_BYTES = 64
"""So small that tensors of a few numbers take many turns."""


def _drawn(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collectives(gather: AllGather, reduce: ReduceScatter, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What this rank gets of an all-gather in place, as FSDP does it, and of a reduce-scatter."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    whole = gather.allocate((numel * ranks,), dtype=dtype, device=torch.device("cpu"))
    own = whole.narrow(0, numel * rank, numel)
    own.copy_(_drawn(rank, numel, dtype))
    gather(output_tensor=whole, input_tensor=own, group=group)
    part = reduce.allocate((numel,), dtype=dtype, device=torch.device("cpu"))
    reduce(output_tensor=part, input_tensor=_drawn(rank, numel * ranks, dtype), group=group, op=dist.ReduceOp.SUM)
    return whole, part


def _check(rank: int, ranks: int, shared: bool, futex: bool = True) -> list[tuple[Tensor, Tensor]]:
    shared_memory._HALF_BYTES = HALF_BYTES
    if not shared:
        mapped_memory.FOLDER = Path("/nowhere")  # as where ranks are on several machines
    if not futex and rank == 1:  # where one rank has no such barrier, all meet by gloo
        shared_barrier.own_process = lambda: shared_barrier.Process(0, 0, 0)
    gather, reduce = AllGather(), ReduceScatter()
    reduce.exchanges = gather.exchanges
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 5, 16, 100, 3):
            whole, part = _collectives(gather, reduce, numel, dtype)
            assert torch.equal(whole, torch.cat([_drawn(one, numel, dtype) for one in range(ranks)]))
            inputs = [_drawn(one, numel * ranks, dtype).view(ranks, numel)[rank].double() for one in range(ranks)]
            exact = torch.stack(inputs).sum(0)
            # float32 adds a rounding for each rank; bfloat16 is summed in float32 and rounded once, to 2^-9
            torch.testing.assert_close(part.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=1e-6)
            found.append((whole, part))
    (exchange,) = gather.exchanges.values()
    assert (exchange is not None) == shared
    has_futex = shared and futex and shared_barrier._has_futex()
    assert (exchange is not None and exchange._barrier is not None) == has_futex
    return found


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory of files")
@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_memory_changes_no_bit(ranks: int) -> None:
    one, other, third = (run_ranks(ranks, _check, ranks, *how) for how in ((True,), (False,), (True, False)))
    for by_rank, by_socket, without_futex in zip(one, other, third, strict=True):
        for got, expected, also in zip(by_rank, by_socket, without_futex, strict=True):
            assert all(torch.equal(*pair) for pair in zip((*got, *also), (*expected, *expected), strict=True))


def _one_cannot_open(rank: int) -> bool:
    if rank == 1:
        mapped_memory.open_ = lambda token, size: None  # on another machine the name says nothing
    return Exchange.between(dist.group.WORLD) is not None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory of files")
def test_where_one_rank_cannot_open_the_memory_none_uses_it() -> None:
    assert run_ranks(2, _one_cannot_open) == [False, False]


def _files(rank: int) -> list[str]:
    tokens: list[bytes] = []
    create = mapped_memory.create

    def note(token: bytes, size: int):
        tokens.append(token)
        made = create(token, size)
        assert mapped_memory.path(token).stat().st_mode & 0o777 == 0o600
        return made

    mapped_memory.create = note
    exchange = Exchange.between(dist.group.WORLD)
    assert exchange is not None
    dist.barrier()
    return [str(mapped_memory.path(token)) for token in tokens]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory of files")
def test_the_file_is_the_users_alone_and_gone_before_it_is_used() -> None:
    (path,) = run_ranks(2, _files)[0]
    assert not Path(path).exists()


def test_memory_that_cannot_be_set_aside_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mapped_memory, "FOLDER", tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert mapped_memory.create(bytes(16), 4096) is None
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_size_or_a_link_is_not_mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mapped_memory, "FOLDER", tmp_path)
    token = bytes(range(16))
    assert mapped_memory.create(token, 4096) is not None
    assert mapped_memory.open_(token, 4096) is not None and mapped_memory.open_(token, 8192) is None
    path = mapped_memory.path(token)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert mapped_memory.open_(token, 4096) is None


def test_what_killed_ranks_left_is_removed_and_what_is_young_or_of_others_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "FOLDER", tmp_path)
    left, young, other = (f"shardtrain-{number:032x}" for number in (1, 2, 3))
    for name in (left, young, other, "shardtrain-of-a-user"):
        (tmp_path / name).write_bytes(b"x")
        if name != young:
            os.utime(tmp_path / name, (0, 0))
    if os.geteuid() == 0:
        os.chown(tmp_path / other, 65534, 65534)
    else:
        (tmp_path / other).unlink()
    memory = mapped_memory.create(bytes(16), 8)
    assert memory is not None and not (tmp_path / left).exists()
    memory.close()
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {young, f"shardtrain-{0:032x}", "shardtrain-of-a-user"} | ({other} if os.geteuid() == 0 else set())


def _sequences(rank: int, ranks: int) -> None:
    """Parts of rows that fit into a turn, rows that need several, and several rows at a time."""
    shared_memory._HALF_BYTES = 16 * ranks * 4
    shared = SequenceExchange.between(dist.group.WORLD)
    assert shared is not None
    for dtype in (torch.float32, torch.bfloat16):
        for rows, tokens, features in ((1, 1, 1), (5, 1, 3), (3, 2, 40), (9, 2, 2), (2, 7, 5)):
            parts = [_drawn(one, rows * tokens * features, dtype).view(rows, tokens, -1) for one in range(ranks)]
            assert torch.equal(shared.gather(parts[rank]), torch.cat(parts, 1))
            turned = parts[rank].transpose(0, 1).contiguous().transpose(0, 1)  # does not lie in a row
            assert torch.equal(shared.gather(turned), torch.cat(parts, 1))
            whole = [_drawn(9 + one, ranks * rows * tokens * features, dtype) for one in range(ranks)]
            sums = [one.view(rows, ranks * tokens, features).chunk(ranks, 1)[rank] for one in whole]
            got = shared.reduce_scatter(whole[rank].view(rows, ranks * tokens, features))
            expected = sums[0].float()
            for one in sums[1:]:
                expected = expected + one
            assert torch.equal(got, expected.to(dtype))  # in the order of ranks, and rounded once
            everywhere = shared.all_reduce(parts[rank])
            expected = parts[0].float()
            for one in parts[1:]:
                expected = expected + one
            assert torch.equal(everywhere, expected.to(dtype))


def _parts(rank: int, ranks: int) -> None:
    """Heads of several rows that fit into a turn, heads of one row, and tokens of one head; some parts are left out."""
    for half_bytes in (64 * 3 * ranks, 64 * 11 * ranks, 1 << 20):
        shared_memory._HALF_BYTES = half_bytes
        shared = SequenceExchange.between(dist.group.WORLD)
        assert shared is not None
        for dtype in (torch.float32, torch.bfloat16):
            for rows, heads, tokens in ((1, 1, 1), (3, 2, 5), (5, 3, 2), (2, 1, 7)):
                shape = (2, rows, heads, tokens, 4)
                drawn = [
                    [_drawn(9 * one + part, 8 * rows * heads * tokens, dtype) for part in (0, 1)]
                    for one in range(ranks)
                ]
                here = [[torch.zeros(shape, dtype=dtype) for _ in (0, 1)] for _ in range(ranks)]
                given = [[None if one > rank and part else here[one][part] for part in (0, 1)] for one in range(ranks)]
                for part in (0, 1):
                    here[rank][part].copy_(drawn[rank][part].view(shape))
                shared.gather_parts(given)
                for one in range(ranks):
                    for part in (0, 1):
                        expected = torch.zeros(shape) if given[one][part] is None else drawn[one][part].view(shape)
                        assert torch.equal(here[one][part], expected.to(dtype))
                # What rank r has for part p of rank s, in float32: nothing for the second parts of later ones
                sums = [
                    [
                        [
                            _drawn(100 * r + 10 * s + p, 8 * rows * heads * tokens, torch.float32).view(shape)
                            for p in (0, 1)
                        ]
                        for s in range(ranks)
                    ]
                    for r in range(ranks)
                ]
                has = [[[s <= r or p == 0 for p in (0, 1)] for s in range(ranks)] for r in range(ranks)]
                mine = [[sums[rank][s][p].clone() if has[rank][s][p] else None for p in (0, 1)] for s in range(ranks)]
                # Tokens before heads: written where they do not lie in a row
                outs = [torch.zeros(2, rows, tokens, heads, 4, dtype=dtype).transpose(2, 3) for _ in (0, 1)]
                shared.reduce_scatter_parts(mine, [has[r][rank] for r in range(ranks)], outs)
                for p in (0, 1):
                    addends = [sums[r][rank][p].to(dtype).double() for r in range(ranks) if has[r][rank][p]]
                    exact = torch.stack(addends).sum(0)
                    rtol = 2**-7 if dtype == torch.bfloat16 else 0.0
                    # each rank's own and the sum are rounded to 2^-9 of themselves; sums near zero have lost digits
                    atol = 2**-7 if dtype == torch.bfloat16 else 1e-6
                    torch.testing.assert_close(outs[p].double(), exact, rtol=rtol, atol=atol)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory of files")
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_gathered_and_scattered_to_where_they_lie(ranks: int) -> None:
    run_ranks(ranks, _parts, ranks)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory of files")
@pytest.mark.parametrize("ranks", [2, 3])
def test_sequences_are_gathered_and_scattered_as_they_lie(ranks: int) -> None:
    run_ranks(ranks, _sequences, ranks)
