"""Context parallelism of a recurrence: ranks compute their chunks of the sequence in parallel and exchange
states.

A chunk maps its incoming state to its outgoing state by S_out = A S_in + B (``ops/gated_delta_net.py``).
Each rank computes A and B of its own chunks, and an all-gather collects A and B of all chunks. Each rank
then computes its incoming states by applying the maps of the earlier chunks in order. A short
convolution also reads the last tokens before its chunk, so these are gathered too. The size of the
exchanged tensors does not depend on the length of the sequence. Tokens are split over ranks in the same
way as for attention: if chunks are balanced, a rank has two, one in each half of the sequence.

Shape suffixes: B batch, t tokens of this rank, T all tokens, N heads, H rows of a state, V columns of a
state, p chunks of this rank, P chunks of all ranks, w tokens before a chunk, X features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardtrain.distributed.context_parallel.masks import chunks_of
from shardtrain.ops.gated_delta_net import document_starts, last_tokens


class RecurrenceChunk(Protocol):
    """A recurrence over consecutive tokens, whose incoming state is not known yet."""

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs (B, tokens, ...) and the outgoing state for an incoming state (B, N, H, V)."""

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A (B, N, H, H) and B (B, N, H, V): the outgoing state is A times the incoming one, plus B."""


class RecurrenceCore(Protocol):
    """A core that ``LAYOUT.recurrence`` names (docs/own_model.md)."""

    def look_back(self, weights: tuple[Tensor, ...]) -> int:
        """Return the number of tokens before a chunk that a short convolution reads.

        It reads only ``inputs[0]`` of these tokens.
        """

    def chunk(
        self,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        before: Tensor,
        starts_BT: Tensor | None,
    ) -> RecurrenceChunk:
        """Return the chunk of the given tokens.

        Args:
            inputs: inputs of the chunk's tokens, each (B, tokens, ...).
            weights: weights of the core.
            before: ``inputs[0]`` of the tokens before the chunk. Zero for tokens that belong to another
                document than the chunk's first token.
            starts_BT: True for the first token of each document. None without documents.
        """


class SplitRecurrenceCore(nn.Module):
    """Core of a recurrence for a rank's part of the sequence. Every forward is a collective."""

    def __init__(self, core: RecurrenceCore, group: dist.ProcessGroup, balanced: bool) -> None:
        super().__init__()
        self._core = core
        self._group = group
        ranks = group.size()
        self._chunks = chunks_of(group.rank(), ranks, balanced)
        # Map each chunk of the sequence to its rank, and its position on that rank.
        num_chunks = ranks * len(self._chunks)
        self._owners: list[tuple[int, int]] = [(0, 0)] * num_chunks
        for rank in range(ranks):
            for place, chunk in enumerate(chunks_of(rank, ranks, balanced)):
                self._owners[chunk] = (rank, place)

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of this rank's tokens, (B, t, ...).

        Args:
            inputs: inputs of this rank's tokens, each (B, t, ...).
            weights: weights of the core, equal on all ranks.
            documents_BT: document number of each token of the full rows, on every rank.
        """
        parts = len(self._chunks)
        length = inputs[0].size(1) // parts
        befores = self._before(inputs[0], length, self._core.look_back(weights))
        starts_BT = document_starts(documents_BT)
        # Prepare the chunks. Their incoming states are not needed yet.
        chunks = []
        for place, number in enumerate(self._chunks):
            chunk_inputs = tuple(x[:, place * length : (place + 1) * length] for x in inputs)
            chunk_starts = None
            before = befores[place]
            if documents_BT is not None and starts_BT is not None:
                # Document numbers cover the full row, so index them by the chunk's place in the row.
                first = number * length
                chunk_starts = starts_BT[:, first : first + length]
                before = _of_first_document(before, documents_BT, first)
            chunks.append(self._core.chunk(chunk_inputs, weights, before, chunk_starts))
        # Exchange the state transitions, then compute the outputs from the incoming states.
        transitions = [chunk.transition() for chunk in chunks]
        factors, offsets = zip(*transitions, strict=True)
        states_pBNHV = _IncomingStates.apply(torch.stack(factors), torch.stack(offsets), self)
        outputs = []
        for chunk, state_BNHV in zip(chunks, states_pBNHV, strict=True):
            output, _ = chunk.run(state_BNHV)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def _before(self, x_BtX: Tensor, length: int, count: int) -> Tensor:
        """Return the ``count`` tokens before each of this rank's chunks, (p, B, w, X).

        Tokens before the start of the row are zero.
        """
        if count == 0:
            rows, _, *features = x_BtX.shape
            return x_BtX.new_zeros(len(self._chunks), rows, 0, *features)
        ends = [last_tokens(x_BlX, count) for x_BlX in x_BtX.split(length, dim=1)]
        known = min(count, length)
        return _Before.apply(torch.stack(ends), known, self)  # type: ignore[no-any-return]

    def gather(self, x: Tensor) -> list[Tensor]:
        """All-gather one tensor per chunk. Return the tensors of all chunks, in the order of the sequence.

        ``x`` (p, ...) contains the tensors of this rank's chunks.
        """
        x = x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(self._group.size())]
        dist.all_gather(gathered, x, group=self._group)
        return [gathered[rank][place] for rank, place in self._owners]

    def own(self, of_chunks: Sequence[Tensor]) -> Tensor:
        """Select the tensors of this rank's chunks, (p, ...), from the tensors of all chunks."""
        return torch.stack([of_chunks[number] for number in self._chunks])


def _of_first_document(before_BwX: Tensor, documents_BT: Tensor, first: int) -> Tensor:
    """Zero the tokens before a chunk that belong to another document than the chunk's first token."""
    width = before_BwX.size(1)
    known_Bw = documents_BT[:, max(0, first - width) : first]
    is_same_Bw = known_Bw == documents_BT[:, first, None]
    # tokens before the start of the row are zero already
    num_outside = width - known_Bw.size(1)
    is_same_Bw = functional.pad(is_same_Bw, (num_outside, 0))
    return before_BwX * is_same_Bw.unsqueeze(-1)


class _IncomingStates(torch.autograd.Function):
    """Compute the incoming state of this rank's chunks from A and B of all chunks. Both passes are collectives."""

    @staticmethod
    def forward(
        ctx: Any, factors_pBNHH: Tensor, offsets_pBNHV: Tensor, core: SplitRecurrenceCore
    ) -> Tensor:
        H = factors_pBNHH.size(-1)
        # The state before the first chunk is zero. Apply the maps of all chunks but the last.
        states = [torch.zeros_like(offsets_pBNHV[0])]
        # one collective for factors and offsets
        maps = core.gather(torch.cat((factors_pBNHH, offsets_pBNHV), dim=-1))
        for both in maps[:-1]:
            factor, offset = both.tensor_split((H,), dim=-1)
            states.append(factor @ states[-1] + offset)
        own_states_pBNHV = core.own(states)
        ctx.core = core
        ctx.save_for_backward(factors_pBNHH, own_states_pBNHV)
        return own_states_pBNHV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        factors_pBNHH, own_states_pBNHV = ctx.saved_tensors
        H = factors_pBNHH.size(-1)
        # The state after chunk i is the incoming state of chunk i + 1. Its gradient has two parts: one
        # comes from the outputs of chunk i + 1, the other from the state after chunk i + 1.
        after = torch.zeros_like(gradients[0][0])
        of_outgoing = []
        for both in reversed(ctx.core.gather(torch.cat((factors_pBNHH, gradients[0]), dim=-1))):
            factor, of_outputs = both.tensor_split((H,), dim=-1)
            of_outgoing.append(after)
            after = of_outputs + factor.mT @ after
        d_offsets = ctx.core.own(of_outgoing[::-1])
        return d_offsets @ own_states_pBNHV.mT, d_offsets, None


class _Before(torch.autograd.Function):
    """Gather the last tokens of all chunks, and return the tokens before each of this rank's chunks.

    Both passes are collectives. Each chunk contributes its last ``known`` tokens: as many as a chunk
    looks back, or all of its tokens if it is shorter. A shorter chunk's ``ends_pBwX`` begin with zeros.
    """

    @staticmethod
    def forward(ctx: Any, ends_pBwX: Tensor, known: int, core: SplitRecurrenceCore) -> Tensor:
        count = ends_pBwX.size(2)
        ctx.known = known
        ctx.core = core
        ends = core.gather(ends_pBwX)
        # Slide a window of ``count`` tokens over the ends. A short chunk's window thus contains tokens of
        # several chunks before it.
        before = [torch.zeros_like(ends_pBwX[0])]
        for end in ends[:-1]:
            tokens = torch.cat((before[-1], end[:, count - known :]), dim=1)
            before.append(tokens[:, known:])
        return core.own(before)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # In forward, the tokens before a chunk are the last ``known`` tokens of the previous chunk, and
        # before them the last ``count - known`` of the tokens that the previous chunk received itself.
        known = ctx.known
        count = gradients[0].size(2)
        gradient_of_received = torch.zeros_like(gradients[0][0])
        gradients_of_ends = []
        for gradient in reversed(ctx.core.gather(gradients[0])):
            of_own_tokens = gradient_of_received[:, count - known :]
            of_earlier_tokens = gradient_of_received[:, : count - known]
            gradients_of_ends.append(functional.pad(of_own_tokens, (0, 0, count - known, 0)))
            gradient_of_received = gradient + functional.pad(of_earlier_tokens, (0, 0, known, 0))
        return ctx.core.own(gradients_of_ends[::-1]), None, None
