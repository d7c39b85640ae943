"""Collectives on CPUs for FSDP and tensor parallelism, through memory that the ranks of a machine share.

Each rank writes the data for the other ranks to shared memory, waits until all have written, and reads.
gloo is slower. It uses sockets even within a machine, which copy each number into the kernel and out again.
Its reduce-scatter is an all-reduce that discards most of the result. If ranks share no memory, FSDP's
reduce-scatter becomes an all-to-all and a local sum, which sends half as many bytes as gloo's reduce-scatter.
Tensor parallelism then uses gloo's collectives.

Sums are computed in the order of ranks, in float32 or wider, and rounded once. So FSDP's sums are bitwise
equal with and without shared memory.

Each rank has a buffer with two halves, which it uses in turn (see ``Exchange``).

Shape suffixes: B batch, t tokens of this rank, T all tokens, D features, R ranks, n elements, m elements
of a row, C parts of a rank, O other ranks.
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
"""Size of one half of a rank's buffer, chosen to fit into a core's private cache."""

_MAX_VIEWS = 256
"""Maximum number of cached tensor views of the buffers."""


def use(model: nn.Module) -> None:
    """Make all FSDP units of a model use these collectives. The units' process groups must use gloo."""
    gather = AllGather()
    reduce = ReduceScatter()
    reduce.exchanges = gather.exchanges
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]


class _Collective:
    """Base class: allocates FSDP's buffers, and keeps the shared memory of each process group."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange | None] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate one of FSDP's buffers, in private memory: gradients stay in it until the update."""
        return torch.empty(*size, dtype=dtype, device=device)

    def exchange(self, group: dist.ProcessGroup) -> Exchange | None:
        """Return the shared memory of a group, or None if it has none.

        The first call per group is a collective.
        """
        name = group.group_name
        if name not in self.exchanges:
            self.exchanges[name] = Exchange.between(group)
        return self.exchanges[name]


class AllGather(_Collective):
    """All-gather with the interface that FSDP2 expects."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Concatenate the inputs (n,) of all ranks into the output (ranks * n,)."""
        out_Rn = output_tensor.view(group.size(), -1)
        in_n = input_tensor.flatten()
        exchange = self.exchange(group)
        if exchange is None:
            dist.all_gather(list(out_Rn.unbind()), in_n, group=group)
            return
        # Exchange one piece at a time that fits into half of a buffer.
        for part in exchange.parts(in_n.numel(), in_n.dtype):
            gathered = exchange.all_gather(in_n[part])
            for rank in range(group.size()):
                source = in_n[part] if rank == group.rank() else gathered[rank]
                # Skip this rank's own data if FSDP's input is a view of the output.
                if source.data_ptr() != out_Rn[rank, part].data_ptr():
                    out_Rn[rank, part].copy_(source)


class ReduceScatter(_Collective):
    """Reduce-scatter with the interface that FSDP2 expects."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        """Sum the inputs (ranks * n,) of all ranks, and write this rank's piece of the sum to the output (n,)."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"FSDP requests {op}, but only sums are supported")
        ranks = group.size()
        in_Rn = input_tensor.view(ranks, -1)
        out_n = output_tensor.flatten()
        exchange = self.exchange(group)
        if exchange is None:
            # Use an all-to-all and a local sum, because gloo's reduce-scatter is an all-reduce.
            for_me_Rn = torch.empty_like(in_Rn)
            dist.all_to_all_single(for_me_Rn.view(-1), in_Rn.reshape(-1), group=group)
            _sum(list(for_me_Rn.unbind()), out_n)
            return
        for part in exchange.parts(out_n.numel(), out_n.dtype, rows=ranks - 1):
            _sum(exchange.all_to_all(in_Rn[:, part]), out_n[part])


def _sum(addends: list[Tensor], out: Tensor) -> None:
    """Write the sum of tensors to ``out``, added in the given order in float32 or wider, and rounded once."""
    exact = torch.promote_types(out.dtype, torch.float32)
    if len(addends) == 2 or out.dtype == exact:
        # No float32 copies are needed: PyTorch adds two 16-bit tensors in float32 and rounds once.
        torch.add(addends[0], addends[1], out=out)
        for addend in addends[2:]:
            out += addend
        return
    total = addends[0].to(exact)
    for addend in addends[1:]:
        total += addend
    out.copy_(total)


def _sum_into(total: Tensor, addends: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of ``total`` and the addends to ``out``. ``total`` may be overwritten.

    ``total`` is in float32 or wider. The addends have the dtype of ``out``.
    """
    if total.dtype != out.dtype and len(addends) > 1:
        for addend in addends:
            total += addend
        addends = ()
    if addends and total.dtype == out.dtype:
        torch.add(total, addends[0], out=out)
        addends = addends[1:]
    else:
        # Usually ``total`` is complete here, and is rounded once. With exactly one addend, ``total`` is
        # rounded to the addend's dtype first, and the sum of both is rounded again.
        out.copy_(total)
    for addend in addends:
        out += addend


class SequenceExchange:
    """All-gather and reduce-scatter along the sequence dimension T of tensors (B, T, D).

    Each operation computes the gradient of the other. T must be a multiple of the number of ranks. All
    methods are collectives. PyTorch's collectives would need T as the first dimension, which costs two more
    copies.
    """

    def __init__(self, exchange: Exchange, ranks: int, rank: int) -> None:
        self._exchange = exchange
        self._ranks = ranks
        self._rank = rank

    @classmethod
    def between(cls, group: dist.ProcessGroup) -> SequenceExchange | None:
        """Create an exchange between the ranks of a group.

        Return None if they share no memory (a collective).
        """
        exchange = Exchange.between(group)
        if exchange is None:
            return None
        return cls(exchange, group.size(), group.rank())

    def gather(self, x_BtD: Tensor) -> Tensor:
        """Concatenate the parts (B, t, D) of all ranks to (B, T, D)."""
        rows, tokens, features = x_BtD.shape
        x_Bm = x_BtD.contiguous().view(rows, -1)
        out_BRm = x_Bm.new_empty(rows, self._ranks, x_Bm.size(1))
        # This rank's own part needs no exchange.
        out_BRm[:, self._rank] = x_Bm
        for batch, columns in self._parts(x_Bm, 1):
            for rank, part_bm in enumerate(self._exchange.all_gather(x_Bm[batch, columns])):
                if rank != self._rank:
                    out_BRm[batch, rank, columns] = part_bm
        return out_BRm.view(rows, self._ranks * tokens, features)

    def reduce_scatter(self, x_BTD: Tensor) -> Tensor:
        """Sum the tensors (B, T, D) of all ranks, and return this rank's part (B, t, D) of the sum."""
        rows, tokens, features = x_BTD.shape
        x_BRm = x_BTD.contiguous().view(rows, self._ranks, -1)
        out_Bm = x_BRm.new_empty(rows, x_BRm.size(2))
        for batch, columns in self._parts(out_Bm, self._ranks - 1):
            addends = self._exchange.all_to_all(x_BRm[batch, :, columns].transpose(0, 1))
            _sum(addends, out_Bm[batch, columns])
        return out_Bm.view(rows, tokens // self._ranks, features)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x_n = x.contiguous().view(-1)
        out_n = out.view(-1)
        for part in self._exchange.parts(x_n.numel(), x_n.dtype):
            _sum(self._exchange.all_gather(x_n[part]), out_n[part])
        return out

    def gather_parts(self, parts_RC: Sequence[Sequence[Tensor | None]]) -> None:
        """All-gather the C parts of each rank in place. All parts have the same shape (2, B, K, l, H).

        Args:
            parts_RC: the parts of each rank. This rank's own parts are sent. The parts of the other ranks
                are overwritten, and None skips a part.
        """
        # this filter is only for mypy, because no own part is None
        own_C = [part for part in parts_RC[self._rank] if part is not None]
        for places in self._stretches(own_C[0], len(own_C)):
            # Write this rank's parts to its half, then copy the other ranks' parts from their halves.
            shape = own_C[0][places].shape
            halves_RC = self._exchange.halves(own_C[0].dtype, torch.Size((len(own_C), *shape)))
            for half, part in zip(halves_RC[self._rank], own_C, strict=True):
                half.copy_(part[places])
            self._exchange.wait_for_all()
            for rank, parts_C in enumerate(parts_RC):
                if rank == self._rank:
                    continue
                for half, part_here in zip(halves_RC[rank], parts_C, strict=True):
                    if part_here is not None:
                        part_here[places] = half

    def reduce_scatter_parts(
        self,
        contributions_RC: Sequence[Sequence[Tensor | None]],
        contributes_RC: Sequence[Sequence[bool]],
        out_C: Sequence[Tensor],
    ) -> None:
        """Sum the contributions of all ranks to each of this rank's C parts.

        All tensors have the shape (2, B, K, l, H). Contributions are sent in the dtype of ``out_C``, summed
        in float32 or wider, and the sum is rounded.

        Args:
            contributions_RC: this rank's contributions to the parts of each rank, None for zeros. Its
                contributions to its own parts may be overwritten.
            contributes_RC: for each rank, True for the parts of this rank that it contributes to.
            out_C: receives the sums.
        """
        # this filter is only for mypy, because no own part is None
        own_C = [part for part in contributions_RC[self._rank] if part is not None]
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for places in self._stretches(out_C[0], len(others) * len(out_C)):
            shape = out_C[0][places].shape
            # A rank's half has one slot for each other rank, which contains what it sends to that rank.
            slots = torch.Size((len(others), len(out_C), *shape))
            halves_ROC = self._exchange.halves(out_C[0].dtype, slots)
            for slot_C, receiver in zip(halves_ROC[self._rank], others, strict=True):
                for sent, contribution in zip(slot_C, contributions_RC[receiver], strict=True):
                    if contribution is not None:
                        sent.copy_(contribution[places])
            self._exchange.wait_for_all()
            for part, out in enumerate(out_C):
                # Skip ranks that contribute only zeros, and sum in the order of ranks.
                senders = [rank for rank in others if contributes_RC[rank][part]]
                addends = [
                    halves_ROC[sender][_slot(sender, self._rank), part] for sender in senders
                ]
                _sum_into(own_C[part][places], addends, out[places])

    def _stretches(
        self, part_2BKlH: Tensor, copies: int
    ) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Divide a part into pieces. Half of a buffer has space for ``copies`` tensors of a piece's size.

        Yield the slices of each piece. A piece contains several rows, several heads of one row, or several
        tokens of one head.
        """
        two, rows, heads, tokens, features = part_2BKlH.shape
        token_bytes = copies * two * features * part_2BKlH.element_size()
        max_tokens = max(1, _HALF_BYTES // token_bytes)
        max_row_heads = max(1, max_tokens // tokens)
        heads_at_once = min(heads, max_row_heads)
        rows_at_once = max(1, max_row_heads // heads)
        for row in range(0, rows, rows_at_once):
            row_slice = slice(row, row + rows_at_once)
            for head in range(0, heads, heads_at_once):
                head_slice = slice(head, head + heads_at_once)
                for token in range(0, tokens, max_tokens):
                    token_slice = slice(token, token + max_tokens)
                    yield slice(None), row_slice, head_slice, token_slice

    def _parts(self, x_Bm: Tensor, copies: int) -> Iterator[tuple[slice, slice]]:
        """Divide a tensor into pieces. Half of a buffer has space for ``copies`` tensors of a piece's size.

        Yield the slices of rows and columns of each piece. A piece contains several rows, or part of one row.
        """
        num_rows, num_columns = x_Bm.shape
        bytes_per_element = max(1, copies) * x_Bm.element_size()
        max_elements = max(1, _HALF_BYTES // bytes_per_element)
        rows_at_once = max(1, max_elements // max(1, num_columns))
        for row in range(0, num_rows, rows_at_once):
            row_slice = slice(row, row + rows_at_once)
            for column in range(0, num_columns, max_elements):
                yield row_slice, slice(column, column + max_elements)


class Exchange:
    """Shared memory of a group whose ranks are all on one machine.

    Each rank has one buffer that only this rank writes. It consists of two halves that are used in turn. In
    every turn, a rank writes one half, waits at a barrier, and reads the same half of the other ranks.

    One barrier per turn is enough. Suppose a rank writes a half in turn i, which still contains the data of
    turn i - 2. The rank has passed the barrier of turn i - 1, so every other rank has reached that barrier.
    Before that, each of them has finished reading the data of turn i - 2.
    """

    def __init__(
        self, group: dist.ProcessGroup, memory: mmap.mmap, processes: list[Process]
    ) -> None:
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
        """Return the current timeout in seconds of the group's collectives.

        It changes after the first step.
        """
        options = self._group._get_backend(torch.device("cpu")).options  # type: ignore[attr-defined]
        return float(options._timeout.total_seconds())

    @classmethod
    def between(cls, group: dist.ProcessGroup) -> Exchange | None:
        """Create shared memory for the ranks of a group (a collective).

        Return None if the ranks are on several machines, or the memory is not available.
        """
        if dist.get_backend(group) != "gloo":
            return None
        size = _head_bytes(group.size()) + 2 * group.size() * _HALF_BYTES
        name = torch.zeros(16, dtype=torch.uint8)
        memory = None
        if group.rank() == 0:
            # Choose a name that is hard to guess. Otherwise another user could create the file first.
            token = secrets.token_bytes(16)
            memory = mapped_memory.create(token, size)
            if memory is not None:
                name = torch.tensor(list(token), dtype=torch.uint8)
            else:
                folder = mapped_memory.FOLDER
                logger.info(
                    f"collectives on CPUs: could not reserve {size:,} bytes in {folder}; using gloo's sockets"
                )
        # All ranks take part in both collectives, even if rank 0 could not create the file. It then
        # broadcasts zeros as the name.
        first = dist.get_global_rank(group, 0)
        dist.broadcast(name, first, group=group)
        token = bytes(name.tolist())
        try:
            if group.rank() != 0 and any(token):
                memory = mapped_memory.open_(token, size)
            all_have_memory = torch.tensor([memory is not None], dtype=torch.int32)
            dist.all_reduce(all_have_memory, dist.ReduceOp.MIN, group=group)
        finally:
            if group.rank() == 0 and any(token):
                # All ranks have mapped the file. Delete it, to keep other processes out. Mappings stay valid.
                mapped_memory.path(token).unlink(missing_ok=True)
        if not all_have_memory or memory is None:
            return None
        own_process = torch.tensor(shared_barrier.own_process())
        gathered = [torch.zeros_like(own_process) for _ in range(group.size())]
        dist.all_gather(gathered, own_process, group=group)
        processes = [Process(*row.tolist()) for row in gathered]
        return cls(group, memory, processes)

    def parts(self, numel: int, dtype: torch.dtype, rows: int = 1) -> Iterator[slice]:
        """Split ``numel`` columns into slices. Half of a buffer has space for ``rows`` rows of a slice."""
        bytes_per_column = max(1, rows) * dtype.itemsize
        step = max(1, _HALF_BYTES // bytes_per_column)
        for start in range(0, numel, step):
            yield slice(start, min(start + step, numel))

    def all_gather(self, sent: Tensor) -> list[Tensor]:
        """All-gather: send a tensor to all ranks, and return the tensors of all ranks (a collective).

        The results are in shared memory, and valid until the next call.
        """
        tensors = self.halves(sent.dtype, sent.shape)
        tensors[self._rank].copy_(sent)
        self.wait_for_all()
        return tensors

    def all_to_all(self, own_Rm: Tensor) -> list[Tensor]:
        """All-to-all: send row r to rank r, and return the rows sent to this rank, by sender (a collective).

        The results are in shared memory, and valid until the next call.
        """
        rank = self._rank
        slots_shape = torch.Size((len(own_Rm) - 1, *own_Rm.shape[1:]))
        slots_by_sender = self.halves(own_Rm.dtype, slots_shape)
        # This rank's half has one slot for each other rank, in the order of ranks.
        slots_by_sender[rank][:rank].copy_(own_Rm[:rank])
        slots_by_sender[rank][rank:].copy_(own_Rm[rank + 1 :])
        self.wait_for_all()
        rows = []
        for sender, slots in enumerate(slots_by_sender):
            if sender == rank:
                rows.append(own_Rm[rank])
            else:
                rows.append(slots[_slot(sender, rank)])
        return rows

    def wait_for_all(self) -> None:
        """Wait for all ranks. The halves of this turn may then be read until the next call of ``wait_for_all``."""
        if self._barrier is not None:
            self._barrier.wait()
        else:
            # This also orders the writes on processors that may reorder them, such as ARM's. A message passes from
            # this thread to gloo's, through the kernel's sockets, and to the thread of the other rank. Each
            # of these steps takes and releases a lock, and a lock's release makes all earlier writes visible.
            dist.all_reduce(self._nothing, group=self._group)

    def halves(self, dtype: torch.dtype, shape: torch.Size) -> list[Tensor]:
        """Return the half of each rank's buffer that this turn uses, as tensors of the given shape.

        A rank writes its own half, calls ``wait_for_all``, and reads the others. Turns alternate between
        the two halves. Views are cached, because only few shapes occur.
        """
        key = (self._turn, dtype, shape)
        self._turn = 1 - self._turn
        if key not in self._known_views:
            # Batches of variable length have many shapes, so limit the size of the cache.
            if len(self._known_views) >= _MAX_VIEWS:
                self._known_views.clear()
            used = shape.numel() * dtype.itemsize
            halves_Rb = self._bytes_R2b[:, key[0], :used]
            self._known_views[key] = [half_b.view(dtype).view(shape) for half_b in halves_Rb]
        return self._known_views[key]


def _slot(sender: int, receiver: int) -> int:
    """Return the index of the receiver's slot in the sender's half. A sender has no slot for itself."""
    return receiver if receiver < sender else receiver - 1


def _head_bytes(ranks: int) -> int:
    """Return the size of the barrier's counters at the start of the memory, rounded up to pages."""
    return -(-ranks * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
