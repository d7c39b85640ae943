"""FSDP's collectives on a CPU give bitwise equal results with and without shared memory."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from shardtrain.distributed.cpu import mapped_memory, shared_barrier, shared_memory
from shardtrain.distributed.cpu.shared_memory import (
    AllGather,
    Exchange,
    ReduceScatter,
    SequenceExchange,
)

HALF_BYTES = 64
"""Small enough for a tensor of a few numbers to take many turns."""


def _drawn(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collectives(
    gather: AllGather, reduce: ReduceScatter, numel: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the results of an in-place all-gather (like FSDP) and of a reduce-scatter."""
    group = dist.group.WORLD
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    gathered = gather.allocate((numel * ranks,), dtype=dtype, device=torch.device("cpu"))
    own_part = gathered.narrow(0, numel * rank, numel)
    own_part.copy_(_drawn(rank, numel, dtype))
    gather(output_tensor=gathered, input_tensor=own_part, group=group)
    reduced = reduce.allocate((numel,), dtype=dtype, device=torch.device("cpu"))
    reduce(
        output_tensor=reduced,
        input_tensor=_drawn(rank, numel * ranks, dtype),
        group=group,
        op=dist.ReduceOp.SUM,
    )
    return gathered, reduced


def _check(rank: int, ranks: int, shared: bool, futex: bool = True) -> list[tuple[Tensor, Tensor]]:
    shared_memory._HALF_BYTES = HALF_BYTES
    if not shared:
        mapped_memory.FOLDER = Path("/nowhere")  # like ranks on several machines
    if not futex and rank == 1:  # if one rank has no futex barrier, all use gloo
        shared_barrier.own_process = lambda: shared_barrier.Process(0, 0, 0)
    gather = AllGather()
    reduce = ReduceScatter()
    reduce.exchanges = gather.exchanges
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 5, 16, 100, 3):
            gathered, reduced = _collectives(gather, reduce, numel, dtype)
            parts = [_drawn(peer, numel, dtype) for peer in range(ranks)]
            assert torch.equal(gathered, torch.cat(parts))

            addends = []
            for peer in range(ranks):
                inputs_of_peer = _drawn(peer, numel * ranks, dtype).view(ranks, numel)
                addends.append(inputs_of_peer[rank].double())
            exact = torch.stack(addends).sum(0)
            # float32 rounds once per rank; bfloat16 is summed in float32 and rounded once, to 2^-9
            rtol = 2**-8 if dtype == torch.bfloat16 else 0
            torch.testing.assert_close(reduced.double(), exact, rtol=rtol, atol=1e-6)
            results.append((gathered, reduced))

    (exchange,) = gather.exchanges.values()
    assert (exchange is not None) == shared
    has_futex = shared and futex and shared_barrier._has_futex()
    assert (exchange is not None and exchange._barrier is not None) == has_futex
    return results


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file-backed shared memory")
@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_memory_and_gloo_are_bitwise_equal(ranks: int) -> None:
    shared = run_ranks(ranks, _check, ranks, True)
    by_gloo = run_ranks(ranks, _check, ranks, False)
    without_futex = run_ranks(ranks, _check, ranks, True, False)
    for rank in range(ranks):
        # Each result is a gathered and a reduced tensor.
        for number, (gathered, reduced) in enumerate(by_gloo[rank]):
            for other_results in (shared, without_futex):
                assert torch.equal(other_results[rank][number][0], gathered)
                assert torch.equal(other_results[rank][number][1], reduced)


def _one_cannot_open(rank: int) -> bool:
    if rank == 1:
        mapped_memory.open_ = lambda token, size: None  # like a rank on another machine
    return Exchange.between(dist.group.WORLD) is not None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file-backed shared memory")
def test_no_rank_uses_memory_that_one_rank_cannot_open() -> None:
    assert run_ranks(2, _one_cannot_open) == [False, False]


def _files(rank: int) -> list[str]:
    tokens: list[bytes] = []
    create = mapped_memory.create

    def note(token: bytes, size: int):
        tokens.append(token)
        mapping = create(token, size)
        assert mapped_memory.path(token).stat().st_mode & 0o777 == 0o600
        return mapping

    mapped_memory.create = note
    exchange = Exchange.between(dist.group.WORLD)
    assert exchange is not None
    dist.barrier()
    return [str(mapped_memory.path(token)) for token in tokens]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file-backed shared memory")
def test_shared_file_is_private_and_unlinked_before_use() -> None:
    (path,) = run_ranks(2, _files)[0]
    assert not Path(path).exists()


def test_memory_that_cannot_be_reserved_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mapped_memory, "FOLDER", tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert mapped_memory.create(bytes(16), 4096) is None
    assert not list(tmp_path.iterdir())


def test_file_of_wrong_size_and_link_are_not_mapped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mapped_memory, "FOLDER", tmp_path)
    token = bytes(range(16))
    assert mapped_memory.create(token, 4096) is not None
    assert mapped_memory.open_(token, 4096) is not None
    assert mapped_memory.open_(token, 8192) is None

    path = mapped_memory.path(token)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    assert mapped_memory.open_(token, 4096) is None


def test_leftovers_of_killed_ranks_are_removed_but_not_recent_or_foreign_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "FOLDER", tmp_path)
    leftover, recent, foreign = (f"shardtrain-{number:032x}" for number in (1, 2, 3))
    for name in (leftover, recent, foreign, "shardtrain-of-a-user"):
        (tmp_path / name).write_bytes(b"x")
        if name != recent:
            os.utime(tmp_path / name, (0, 0))
    # Only root can create a file of another user.
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(tmp_path / foreign, 65534, 65534)
    else:
        (tmp_path / foreign).unlink()
    memory = mapped_memory.create(bytes(16), 8)

    assert memory is not None
    assert not (tmp_path / leftover).exists()

    memory.close()
    expected = {recent, f"shardtrain-{0:032x}", "shardtrain-of-a-user"}
    if is_root:
        expected.add(foreign)
    assert {path.name for path in tmp_path.iterdir()} == expected


def _sum_in_order(addends: list[Tensor]) -> Tensor:
    """Sum in float32 in the order of ranks, and round once."""
    total = addends[0].float()
    for addend in addends[1:]:
        total = total + addend
    return total.to(addends[0].dtype)


def _check_sequence(
    shared: SequenceExchange, rank: int, ranks: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, tokens, features = shape
    numel = rows * tokens * features
    parts = [_drawn(peer, numel, dtype).view(shape) for peer in range(ranks)]
    assert torch.equal(shared.gather(parts[rank]), torch.cat(parts, 1))

    not_contiguous = parts[rank].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(shared.gather(not_contiguous), torch.cat(parts, 1))

    full_shape = (rows, ranks * tokens, features)
    full_tensors = [
        _drawn(9 + peer, ranks * numel, dtype).view(full_shape) for peer in range(ranks)
    ]
    addends = [tensor.chunk(ranks, 1)[rank] for tensor in full_tensors]
    assert torch.equal(shared.reduce_scatter(full_tensors[rank]), _sum_in_order(addends))

    assert torch.equal(shared.all_reduce(parts[rank]), _sum_in_order(parts))


def _sequences(rank: int, ranks: int) -> None:
    """Exchange rows that fill the shared buffer several times, and rows of which several fit."""
    shared_memory._HALF_BYTES = 16 * ranks * 4
    shared = SequenceExchange.between(dist.group.WORLD)
    assert shared is not None
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 1, 1), (5, 1, 3), (3, 2, 40), (9, 2, 2), (2, 7, 5)):
            _check_sequence(shared, rank, ranks, shape, dtype)


def _parts(rank: int, ranks: int) -> None:
    """Let the buffer hold several rows, some heads of a row, or some tokens of a head. Some parts are None."""
    for half_bytes in (64 * 3 * ranks, 64 * 11 * ranks, 1 << 20):
        shared_memory._HALF_BYTES = half_bytes
        shared = SequenceExchange.between(dist.group.WORLD)
        assert shared is not None
        for dtype in (torch.float32, torch.bfloat16):
            for rows, heads, tokens in ((1, 1, 1), (3, 2, 5), (5, 3, 2), (2, 1, 7)):
                shape = (2, rows, heads, tokens, 4)
                _check_gathered_parts(shared, rank, ranks, shape, dtype)
                _check_reduced_parts(shared, rank, ranks, shape, dtype)


def _check_gathered_parts(
    shared: SequenceExchange, rank: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Gather two parts of each rank. The second parts of later ranks are not requested."""

    def drawn(peer: int, part: int) -> Tensor:
        return _drawn(9 * peer + part, math.prod(shape), dtype).view(shape)

    gathered = [[torch.zeros(shape, dtype=dtype) for _ in (0, 1)] for _ in range(ranks)]
    parts: list[list[Tensor | None]] = []
    for peer in range(ranks):
        second = None if peer > rank else gathered[peer][1]
        parts.append([gathered[peer][0], second])
    for part in (0, 1):
        gathered[rank][part].copy_(drawn(rank, part))
    shared.gather_parts(parts)

    # A part that was not requested keeps its zeros.
    for peer in range(ranks):
        for part in (0, 1):
            is_requested = parts[peer][part] is not None
            expected = drawn(peer, part) if is_requested else torch.zeros(shape, dtype=dtype)
            assert torch.equal(gathered[peer][part], expected)


def _check_reduced_parts(
    shared: SequenceExchange, rank: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Sum float32 addends of all ranks for the parts of each rank. Second parts of later ranks have no addend."""

    def has_addend(source: int, owner: int, part: int) -> bool:
        return owner <= source or part == 0

    def addend(source: int, owner: int, part: int) -> Tensor:
        return _drawn(100 * source + 10 * owner + part, math.prod(shape), torch.float32).view(shape)

    own_addends: list[list[Tensor | None]] = []
    for owner in range(ranks):
        second = addend(rank, owner, 1) if has_addend(rank, owner, 1) else None
        own_addends.append([addend(rank, owner, 0), second])
    sources = []
    for source in range(ranks):
        sources.append([has_addend(source, rank, 0), has_addend(source, rank, 1)])

    # outputs with tokens before heads in memory, which are not contiguous
    _, rows, heads, tokens, features = shape
    outs = []
    for _ in (0, 1):
        out = torch.zeros(2, rows, tokens, heads, features, dtype=dtype)
        outs.append(out.transpose(2, 3))
    shared.reduce_scatter_parts(own_addends, sources, outs)

    for part in (0, 1):
        exact = torch.zeros(shape, dtype=torch.float64)
        for source in range(ranks):
            if has_addend(source, rank, part):
                exact += addend(source, rank, part).to(dtype).double()
        rtol = 2**-7 if dtype == torch.bfloat16 else 0.0
        # every addend and the sum are rounded to a relative 2^-9; sums near zero lose digits
        atol = 2**-7 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(outs[part].double(), exact, rtol=rtol, atol=atol)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file-backed shared memory")
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_gathered_and_reduce_scattered_in_place(ranks: int) -> None:
    run_ranks(ranks, _parts, ranks)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file-backed shared memory")
@pytest.mark.parametrize("ranks", [2, 3])
def test_sequences_are_gathered_and_reduce_scattered(ranks: int) -> None:
    run_ranks(ranks, _sequences, ranks)
