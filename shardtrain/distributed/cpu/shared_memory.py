"""Collectives of FSDP and tensor parallelism on CPUs: by memory that the ranks of a machine share.

gloo sends through sockets also within a machine, so that each number is copied into the kernel and out of it again, and
its reduce-scatter is an all-reduce of which most is thrown away. Here each rank writes what the others need to memory
that all have mapped, waits until all have written, and reads. Where there is no such memory, FSDP sends half of gloo's
bytes, and tensor parallelism all of them. Sums are taken in the order of ranks, in float32 or wider and rounded once,
and FSDP's are the same to the bit without shared memory.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardtrain.distributed.cpu import mapped_memory, shared_barrier
from shardtrain.distributed.cpu.shared_barrier import LINE_BYTES, Barrier, Process
from shardtrain.utils.log import logger

_HALF_BYTES = 1 << 20
"""Of a rank's part that is written at a time: what a core's own cache holds. There are two, written in turn."""

_MOST_VIEWS = 256


def use(model: nn.Module) -> None:
    """Let the units of FSDP gather and reduce by these collectives; their groups must be gloo's."""
    gather = AllGather()
    reduce = ReduceScatter()
    reduce.exchanges = gather.exchanges
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]


class _Collective:
    """What both have in common: where FSDP's buffers lie, and the memory that each group shares."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange | None] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of a rank's own: gradients stay in it until the update."""
        return torch.empty(*size, dtype=dtype, device=device)

    def exchange(self, group: dist.ProcessGroup) -> Exchange | None:
        """The memory that the ranks of a group share, or None where they have none (a collective at first)."""
        if group.group_name not in self.exchanges:
            self.exchanges[group.group_name] = Exchange.between(group)
        return self.exchanges[group.group_name]


class AllGather(_Collective):
    """``torch.distributed.fsdp``'s interface of an all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Give all ranks the inputs (n,) of all, in order of ranks: (ranks n,)."""
        out_Rn = output_tensor.view(group.size(), -1)
        in_n = input_tensor.flatten()
        exchange = self.exchange(group)
        if exchange is None:
            dist.all_gather(list(out_Rn.unbind()), in_n, group=group)
            return
        for part in exchange.parts(in_n.numel(), in_n.dtype):
            given = exchange.give(in_n[part])
            for rank in range(group.size()):
                source = in_n[part] if rank == group.rank() else given[rank]
                if source.data_ptr() != out_Rn[rank, part].data_ptr():  # FSDP's input is a part of its output
                    out_Rn[rank, part].copy_(source)


class ReduceScatter(_Collective):
    """``torch.distributed.fsdp``'s interface of a reduce-scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        """Give each rank the sum (n,) of all ranks' inputs (ranks n,) for it."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"FSDP asks for {op}, and gradients are sums")
        ranks = group.size()
        in_Rn = input_tensor.view(ranks, -1)
        out_n = output_tensor.flatten()
        exchange = self.exchange(group)
        if exchange is None:
            for_me_Rn = torch.empty_like(in_Rn)
            dist.all_to_all_single(for_me_Rn.view(-1), in_Rn.reshape(-1), group=group)
            _sum(list(for_me_Rn.unbind()), out_n)
            return
        for part in exchange.parts(out_n.numel(), out_n.dtype, rows=ranks - 1):
            _sum(exchange.give_each(in_Rn[:, part]), out_n[part])


def _sum(addends: list[Tensor], out: Tensor) -> None:
    """Write the sum of tensors to ``out``: add in the given order, in float32 or wider, and round once."""
    exact = torch.promote_types(out.dtype, torch.float32)
    if len(addends) == 2 or out.dtype == exact:
        # PyTorch adds two 16-bit tensors in float32 and rounds once, so they need no copies in float32
        torch.add(addends[0], addends[1], out=out)
        for addend in addends[2:]:
            out += addend
        return
    total = addends[0].to(exact)
    for addend in addends[1:]:
        total += addend
    out.copy_(total)


def _sum_into(own: Tensor, addends: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of ``own``, which may be overwritten, and addends in the dtype of ``out`` to ``out``."""
    if own.dtype != out.dtype and len(addends) > 1:
        for addend in addends:
            own += addend
        addends = ()
    if addends and own.dtype == out.dtype:
        torch.add(own, addends[0], out=out)
        addends = addends[1:]
    else:
        # With one addend, round ``own`` as that was rounded. PyTorch adds both in float32 and rounds the sum once
        out.copy_(own)
    for addend in addends:
        out += addend


class SequenceExchange:
    """Gathers and reduce-scatters (B, T, D) along T, the sequence, without the copies that make T the first dimension.

    Both have the other as their gradient. ``ranks`` divides T.
    """

    def __init__(self, exchange: Exchange, ranks: int, rank: int) -> None:
        self._exchange, self._ranks, self._rank = exchange, ranks, rank

    @classmethod
    def between(cls, group: dist.ProcessGroup) -> SequenceExchange | None:
        """Of the ranks of a group, where they have such memory (a collective)."""
        exchange = Exchange.between(group)
        return None if exchange is None else cls(exchange, group.size(), group.rank())

    def gather(self, x_BtD: Tensor) -> Tensor:
        """The parts (B, t, D) of all ranks, one after the other: (B, T, D)."""
        rows, tokens, features = x_BtD.shape
        x_Bm = x_BtD.contiguous().view(rows, -1)
        out_BRm = x_Bm.new_empty(rows, self._ranks, x_Bm.size(1))
        out_BRm[:, self._rank] = x_Bm
        for batch, columns in self._parts(x_Bm, 1):
            for rank, part_bm in enumerate(self._exchange.give(x_Bm[batch, columns])):
                if rank != self._rank:
                    out_BRm[batch, rank, columns] = part_bm
        return out_BRm.view(rows, self._ranks * tokens, features)

    def reduce_scatter(self, x_BTD: Tensor) -> Tensor:
        """This rank's part (B, t, D) of the sum of what all ranks have, (B, T, D)."""
        rows, tokens, features = x_BTD.shape
        x_BRm = x_BTD.contiguous().view(rows, self._ranks, -1)
        out_Bm = x_BRm.new_empty(rows, x_BRm.size(2))
        for batch, columns in self._parts(out_Bm, self._ranks - 1):
            _sum(self._exchange.give_each(x_BRm[batch, :, columns].transpose(0, 1)), out_Bm[batch, columns])
        return out_Bm.view(rows, tokens // self._ranks, features)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x_n = x.contiguous().view(-1)
        out_n = out.view(-1)
        for part in self._exchange.parts(x_n.numel(), x_n.dtype):
            _sum(self._exchange.give(x_n[part]), out_n[part])
        return out

    def gather_parts(self, parts_RC: Sequence[Sequence[Tensor | None]]) -> None:
        """All-gather the C parts of each rank in place. All parts have the same shape (2, B, K, l, H).

        Args:
            parts_RC: the parts of each rank. This rank's are read, and the others are written, except None.
        """
        own_C = [part for part in parts_RC[self._rank] if part is not None]  # none of its own is None
        for places in self._stretches(own_C[0], len(own_C)):
            shape = own_C[0][places].shape
            halves_RC = self._exchange.halves(own_C[0].dtype, torch.Size((len(own_C), *shape)))
            for half, part in zip(halves_RC[self._rank], own_C, strict=True):
                half.copy_(part[places])
            self._exchange.meet()
            for rank, parts_C in enumerate(parts_RC):
                for half, part_here in zip(halves_RC[rank], parts_C, strict=True):
                    if part_here is not None and rank != self._rank:
                        part_here[places] = half

    def reduce_scatter_parts(
        self,
        contributions_RC: Sequence[Sequence[Tensor | None]],
        contributes_RC: Sequence[Sequence[bool]],
        out_C: Sequence[Tensor],
    ) -> None:
        """For each of this rank's C parts, sum the contributions of all ranks. All have the shape (2, B, K, l, H).

        Contributions are sent in the dtype of ``out_C``. They are added in float32 or wider, and the sum is rounded.

        Args:
            contributions_RC: this rank's contributions to the parts of each rank, None for zeros. Those to its own
                parts may be overwritten.
            contributes_RC: True where a rank contributes to a part of this rank.
            out_C: the sums.
        """
        own_C = [part for part in contributions_RC[self._rank] if part is not None]  # none of its own is None
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for places in self._stretches(out_C[0], len(others) * len(out_C)):
            shape = out_C[0][places].shape
            # Half of each rank, with a slot for each other rank: the contributions to the parts of that rank
            halves_ROC = self._exchange.halves(out_C[0].dtype, torch.Size((len(others), len(out_C), *shape)))
            for slot_C, receiver in zip(halves_ROC[self._rank], others, strict=True):
                for sent, contribution in zip(slot_C, contributions_RC[receiver], strict=True):
                    if contribution is not None:
                        sent.copy_(contribution[places])
            self._exchange.meet()
            for part, out in enumerate(out_C):
                senders = [rank for rank in others if contributes_RC[rank][part]]
                addends = [halves_ROC[sender][_slot(sender, self._rank), part] for sender in senders]
                _sum_into(own_C[part][places], addends, out[places])

    def _stretches(self, part_2BKlH: Tensor, copies: int) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Places that fit into a half ``copies`` times: heads of several rows, heads of one, or tokens of one head."""
        two, rows, heads, tokens, features = part_2BKlH.shape
        most = max(1, _HALF_BYTES // (copies * two * features * part_2BKlH.element_size()))
        at_once = max(1, most // tokens)
        heads_at_once = min(heads, at_once)
        rows_at_once = max(1, at_once // heads)
        for row in range(0, rows, rows_at_once):
            for head in range(0, heads, heads_at_once):
                for token in range(0, tokens, most):
                    pairs = slice(row, row + rows_at_once), slice(head, head + heads_at_once)
                    yield slice(None), *pairs, slice(token, token + most)

    def _parts(self, x_Bm: Tensor, copies: int) -> Iterator[tuple[slice, slice]]:
        """Rows and columns that fit into a half ``copies`` times: several rows, or a part of one."""
        most = max(1, _HALF_BYTES // (max(1, copies) * x_Bm.element_size()))
        at_once = max(1, most // max(1, x_Bm.size(1)))
        for row in range(0, x_Bm.size(0), at_once):
            for column in range(0, x_Bm.size(1), most):
                yield slice(row, row + at_once), slice(column, column + most)


class Exchange:
    """Memory that the ranks of a group on one machine have mapped: two halves for each rank, which it alone writes.

    Halves are written in turn. A rank that writes one has waited for all others since it wrote the other, and each of
    them had read, before it waited too, all that was written two turns ago: so nobody reads what is being written.
    """

    def __init__(self, group: dist.ProcessGroup, memory: mmap.mmap, processes: list[Process]) -> None:
        self._group = group
        self._turn = 0
        halves_b = torch.frombuffer(memory, dtype=torch.uint8, offset=_head_bytes(group.size()))
        self._bytes_R2b = halves_b.view(group.size(), 2, _HALF_BYTES)
        self._rank = group.rank()
        self._known_views: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}
        self._nothing = torch.zeros(1, dtype=torch.uint8)
        self._barrier: Barrier | None = None
        if shared_barrier.can_meet(processes):
            self._barrier = Barrier(memory, processes, group.rank(), self._limit)

    def _limit(self) -> float:
        """Seconds that a collective of the group may take, which may change."""
        options = self._group._get_backend(torch.device("cpu")).options  # type: ignore[attr-defined]
        return float(options._timeout.total_seconds())

    @classmethod
    def between(cls, group: dist.ProcessGroup) -> Exchange | None:
        """Of the ranks of a group, where all are on one machine and it has the memory (a collective)."""
        if dist.get_backend(group) != "gloo":
            return None
        size = _head_bytes(group.size()) + 2 * group.size() * _HALF_BYTES
        name = torch.zeros(16, dtype=torch.uint8)
        memory = None
        if group.rank() == 0:
            token = secrets.token_bytes(16)
            memory = mapped_memory.create(token, size)
            if memory is not None:
                name = torch.tensor(list(token), dtype=torch.uint8)
            else:
                folder = mapped_memory.FOLDER
                logger.info(
                    f"collectives on CPUs: no {size:,} bytes of {folder} could be set aside; gloo's sockets are used"
                )
        # all ranks take part in both collectives, also where the first one has no memory: then the name is zeros
        first = dist.get_global_rank(group, 0)
        dist.broadcast(name, first, group=group)
        token = bytes(name.tolist())
        try:
            if group.rank() != 0 and any(token):
                memory = mapped_memory.open_(token, size)
            have = torch.tensor([memory is not None], dtype=torch.int32)
            dist.all_reduce(have, dist.ReduceOp.MIN, group=group)
        finally:
            if group.rank() == 0 and any(token):
                # those who have mapped it keep it, and nobody else finds it
                mapped_memory.path(token).unlink(missing_ok=True)
        if not have or memory is None:
            return None
        own = torch.tensor(shared_barrier.own_process())
        all_processes = [torch.zeros_like(own) for _ in range(group.size())]
        dist.all_gather(all_processes, own, group=group)
        return cls(group, memory, [Process(*one.tolist()) for one in all_processes])

    def parts(self, numel: int, dtype: torch.dtype, rows: int = 1) -> Iterator[slice]:
        """Stretches of ``rows`` rows of so many numbers that fit into a half."""
        step = max(1, _HALF_BYTES // (max(1, rows) * dtype.itemsize))
        return (slice(start, min(start + step, numel)) for start in range(0, numel, step))

    def give(self, own: Tensor) -> list[Tensor]:
        """Write a tensor, wait, and get that of each rank, to be read before the next call."""
        given = self.halves(own.dtype, own.shape)
        given[self._rank].copy_(own)
        self.meet()
        return given

    def give_each(self, own_Rm: Tensor) -> list[Tensor]:
        """Write a row for each other rank, wait, and get the row of each for this one; read before the next call."""
        rank = self._rank
        given = self.halves(own_Rm.dtype, torch.Size((len(own_Rm) - 1, *own_Rm.shape[1:])))
        given[rank][:rank].copy_(own_Rm[:rank])
        given[rank][rank:].copy_(own_Rm[rank + 1 :])
        self.meet()
        return [own_Rm[rank] if sender == rank else slots[_slot(sender, rank)] for sender, slots in enumerate(given)]

    def meet(self) -> None:
        """Wait for all ranks: then what each has written can be read, until the next but one is written."""
        if self._barrier is not None:
            self._barrier.wait()
        else:
            dist.all_reduce(self._nothing, group=self._group)

    def halves(self, dtype: torch.dtype, shape: torch.Size) -> list[Tensor]:
        """The halves of all ranks, whose turn it is, as tensors of a shape; shapes are few, and each is made once.

        A rank writes its own, then ``meet``s the others and reads theirs.
        """
        key = (self._turn, dtype, shape)
        self._turn = 1 - self._turn
        if key not in self._known_views:
            if len(self._known_views) >= _MOST_VIEWS:
                self._known_views.clear()
            used = shape.numel() * dtype.itemsize
            halves_Rb = self._bytes_R2b[:, key[0], :used]
            self._known_views[key] = [half_b.view(dtype).view(shape) for half_b in halves_Rb]
        return self._known_views[key]


def _slot(sender: int, receiver: int) -> int:
    """Index of the receiver's slot in the sender's half, which has no slot for the sender itself."""
    return receiver if receiver < sender else receiver - 1


def _head_bytes(ranks: int) -> int:
    """Of the memory, for the counters of the barrier: whole pages."""
    return -(-ranks * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
