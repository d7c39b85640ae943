"""Gated delta rule (Yang et al. 2024, arXiv 2412.06464): a linear recurrence with a matrix as state.

Token t updates the state S of each value head, (H, V), and reads it with its query:

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T        o_t = S_t^T q_t

where a_t = exp(decay_t) is in (0, 1] and b_t, ``beta``, is in (0, 1). ``step_by_step`` computes these
formulas. ``DeltaChunk`` computes the same values with matrix products, in blocks of ``BLOCK`` tokens: no
tensor has two dimensions of all tokens. A chunk is an affine map of its incoming state, S_out = A S_in +
B, so ranks can compute their chunks in parallel and pass on only A and B.

States and decays are float32, or float64 for float64 inputs.

Shape suffixes: B rows, T tokens, K key heads, G value heads per key head, N = K G value heads, H features
of a key, V features of a value, n blocks, c tokens of a block, C channels of a convolution, w tokens that
it looks back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
"""Tokens of a block. A product within blocks costs as much as a product with a state of 64 rows."""
_NORM_EPS = 1e-6


def document_starts(documents_BT: Tensor | None) -> Tensor | None:
    """Return a mask (B, T) of tokens that have another document than the previous token.
    None without documents.

    The first token of a row is not marked, because its state is zero anyway.
    """
    if documents_BT is None:
        return None
    starts_BT = torch.zeros_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return starts_BT


def unit_length(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1, as the published models do: epsilon is added to the squared length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def convolve(
    x_BTC: Tensor, filters_Cw: Tensor, before_BwC: Tensor, starts_BT: Tensor | None
) -> Tensor:
    """Return the causal convolution of each channel, (B, T, C). Tokens of other documents count as zero.

    Args:
        x_BTC: Inputs.
        filters_Cw: One filter per channel. The last element applies to the token itself.
        before_BwC: Inputs of the w - 1 tokens before the first token, with zeros for tokens of other
            documents.
        starts_BT: Mask of the tokens that begin a document. None without documents.
    """
    tokens = x_BTC.size(1)
    width = filters_Cw.size(1)
    padded_BTC = torch.cat((before_BwC, x_BTC), dim=1)
    out_BTC = x_BTC * filters_Cw[:, -1]
    # A token ``back`` tokens earlier belongs to the same document if no document starts in between.
    is_same_BT1 = None
    for back in range(1, width):
        first = width - 1 - back
        earlier_BTC = padded_BTC[:, first : first + tokens]
        if starts_BT is not None:
            later_starts_BT = F.pad(starts_BT, (back - 1, 0))[:, :tokens]
            crosses_BT1 = later_starts_BT.unsqueeze(-1)
            is_same_BT1 = ~crosses_BT1 if is_same_BT1 is None else is_same_BT1 & ~crosses_BT1
            earlier_BTC = earlier_BTC * is_same_BT1
        out_BTC = torch.addcmul(out_BTC, earlier_BTC, filters_Cw[:, -1 - back])
    return out_BTC


def last_tokens(x_BTC: Tensor, count: int) -> Tensor:
    """Return the last ``count`` tokens, (B, count, C), with zeros in front of shorter inputs."""
    missing = max(0, count - x_BTC.size(1))
    return F.pad(x_BTC, (0, 0, missing, 0))[:, x_BTC.size(1) + missing - count :]


def step_by_step(
    q_BTKH: Tensor,
    k_BTKH: Tensor,
    v_BTNV: Tensor,
    decay_BTN: Tensor,
    beta_BTN: Tensor,
    state_BNHV: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs (B, T, N, V) and the state after the last token (B, N, H, V), one token at a time."""
    groups = v_BTNV.size(2) // q_BTKH.size(2)
    q_BTNH = q_BTKH.repeat_interleave(groups, dim=2)
    k_BTNH = k_BTKH.repeat_interleave(groups, dim=2)
    if state_BNHV is None:
        B, _, N, V = v_BTNV.shape
        state_BNHV = v_BTNV.new_zeros(B, N, q_BTKH.size(3), V)
    outputs = []
    for t in range(q_BTNH.size(1)):
        # Decay the state, or clear it at the start of a document.
        keep_BN = decay_BTN[:, t].exp()
        if starts_BT is not None:
            keep_BN = keep_BN * ~starts_BT[:, t, None]
        state_BNHV = state_BNHV * keep_BN[..., None, None]
        # Move the value that the state returns for the key towards the new value.
        k_BNH1 = k_BTNH[:, t].unsqueeze(-1)
        known_BNV = (state_BNHV * k_BNH1).sum(-2)
        change_BNV = beta_BTN[:, t].unsqueeze(-1) * (v_BTNV[:, t] - known_BNV)
        state_BNHV = state_BNHV + k_BNH1 * change_BNV.unsqueeze(-2)
        outputs.append((state_BNHV * q_BTNH[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, dim=1), state_BNHV


class DeltaChunk:
    """Consecutive tokens of the recurrence.
    The constructor computes everything that no incoming state affects.

    Within a block, the changes b_t (v_t - ...) of all tokens solve a triangular system of equations
    (section 3.2): ``_new`` holds the solution for a zero state, and ``_read`` S_in the part that a state
    takes away.
    """

    def __init__(
        self,
        q_BTKH: Tensor,
        k_BTKH: Tensor,
        v_BTNV: Tensor,
        decay_BTN: Tensor,
        beta_BTN: Tensor,
        starts_BT: Tensor | None = None,
        block: int = BLOCK,
    ) -> None:
        B, T, K, H = q_BTKH.shape
        N, V = v_BTNV.shape[2:]
        c = max(1, min(block, T))
        self._sizes = (B, T, K, N // K, H, V)
        # Put the value heads of one key head into a separate dimension. Products of keys and queries are then
        # computed once for all of them.
        q_nBK1cH = _blocks(q_BTKH.unsqueeze(3), c)
        k_nBK1cH = _blocks(k_BTKH.unsqueeze(3), c)
        v_nBKGcV = _blocks(v_BTNV.unflatten(2, (K, -1)), c)
        decay_nBKGc = _blocks(decay_BTN.unflatten(2, (K, -1)).unsqueeze(-1), c).squeeze(-1)
        beta_nBKGc1 = _blocks(beta_BTN.unflatten(2, (K, -1)).unsqueeze(-1), c)

        # Decay from token j to token i, from the start of the block to each token, and from there to its
        # end. It is 0 across documents.
        between_nBKGcc = _sums_between(decay_nBKGc).exp()
        from_start_nBKGc = decay_nBKGc.cumsum(-1).exp()
        to_end_nBKGc = between_nBKGcc[..., -1, :]
        # A token depends on itself and earlier tokens of its document: those with the same number of
        # document starts before them. The state before a block
        # reaches only the tokens before the block's first document start.
        is_seen = torch.ones(c, c, dtype=torch.bool, device=q_BTKH.device).tril()
        if starts_BT is not None:
            starts_nB11c = _blocks(starts_BT[:, :, None, None, None], c).squeeze(-1)
            count_nB11c = starts_nB11c.long().cumsum(-1)
            is_seen = is_seen & (count_nB11c.unsqueeze(-1) == count_nB11c.unsqueeze(-2))
            from_start_nBKGc = from_start_nBKGc * (count_nB11c == 0)
            to_end_nBKGc = to_end_nBKGc * (count_nB11c == count_nB11c[..., -1:])
        between_nBKGcc = between_nBKGcc.masked_fill(~is_seen, 0.0)

        # Solve for the changes of all tokens of a block together. Both parts have the same matrix.
        system_nBKGcc = beta_nBKGc1 * (k_nBK1cH @ k_nBK1cH.mT) * between_nBKGcc
        read_keys_nBKGcH = k_nBK1cH * from_start_nBKGc.unsqueeze(-1)
        right_side = torch.cat((v_nBKGcV, read_keys_nBKGcH), dim=-1) * beta_nBKGc1
        solved = torch.linalg.solve_triangular(
            system_nBKGcc, right_side, upper=False, unitriangular=True
        )
        self._new_nBKGcV, self._read_nBKGcH = solved.split((V, H), dim=-1)
        self._scores_nBKGcc = (q_nBK1cH @ k_nBK1cH.mT) * between_nBKGcc
        self._keys_nBKGHc = (k_nBK1cH * to_end_nBKGc.unsqueeze(-1)).mT
        self._q_nBK1cH = q_nBK1cH
        self._from_start_nBKGc1 = from_start_nBKGc.unsqueeze(-1)
        self._keeps_nBKG11 = from_start_nBKGc[..., -1:, None]

    def run(self, state_BNHV: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, T, N, V) and the outgoing state for an incoming state, which is zero if None."""
        B, T, K, G, H, V = self._sizes
        if state_BNHV is None:
            state_BNHV = self._new_nBKGcV.new_zeros(B, K * G, H, V)
        # Run through the blocks one after the other, because each needs the state of the previous block.
        state = state_BNHV.flatten(0, 1)
        states = []
        changes = []
        for new_PcV, read_PcH, keys_PHc, keeps_P11 in self._parts_by_block():
            states.append(state)
            change_PcV = torch.baddbmm(new_PcV, read_PcH, state, alpha=-1)
            changes.append(change_PcV)
            state = torch.baddbmm(state * keeps_P11, keys_PHc, change_PcV)
        before = torch.stack(states).unflatten(1, (B, K, G))
        change = torch.stack(changes).unflatten(1, (B, K, G))
        # An output reads the state before its block, and the changes within the block.
        from_state_nBKGcV = self._from_start_nBKGc1 * (self._q_nBK1cH @ before)
        out_nBKGcV = from_state_nBKGcV + self._scores_nBKGcc @ change
        # Put blocks behind each other: (n, B, K, G, c, V) -> (B, n c, K G, V).
        out_BTNV = out_nBKGcV.permute(1, 0, 4, 2, 3, 5).reshape(B, -1, K * G, V)
        return out_BTNV[:, :T], state.unflatten(0, (B, K * G))

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return A (B, N, H, H) and B (B, N, H, V) of the map S_out = A S_in + B from incoming to outgoing state."""
        B, _, K, G, H, V = self._sizes
        # One scan computes both. B starts with a zero state. A starts with the identity, and its values
        # are zero.
        zero = self._new_nBKGcV.new_zeros(B * K * G, H, V)
        identity = torch.eye(H, dtype=zero.dtype, device=zero.device).expand(B * K * G, H, H)
        state = torch.cat((zero, identity), dim=-1)
        for new_PcV, read_PcH, keys_PHc, keeps_P11 in self._parts_by_block():
            change = torch.baddbmm(F.pad(new_PcV, (0, H)), read_PcH, state, alpha=-1)
            state = torch.baddbmm(state * keeps_P11, keys_PHc, change)
        offset, factor = state.unflatten(0, (B, K * G)).split((V, H), dim=-1)
        return factor, offset

    def _parts_by_block(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of the scan for each block: new values, read keys, written keys and decays."""
        tensors = (self._new_nBKGcV, self._read_nBKGcH, self._keys_nBKGHc, self._keeps_nBKG11)
        # Join rows and heads to one dimension P, because baddbmm needs it.
        by_block = [tensor.flatten(1, 3).unbind() for tensor in tensors]
        yield from zip(*by_block, strict=True)


def _blocks(x_BTKGX: Tensor, c: int) -> Tensor:
    """Cut tokens into blocks: (B, T, K, G, X) -> (n, B, K, G, c, X). Zeros fill the last block.

    Tokens of zeros change nothing: their decay is exp(0) = 1 and they write 0.
    """
    missing = -x_BTKGX.size(1) % c
    if missing:
        x_BTKGX = F.pad(x_BTKGX, (0, 0, 0, 0, 0, 0, 0, missing))
    return x_BTKGX.unflatten(1, (-1, c)).permute(1, 0, 3, 4, 2, 5)


def _sums_between(x: Tensor) -> Tensor:
    """For tokens i and j of a block, return the sum of x over the tokens after j up to i.

    (..., c) -> (..., c, c). The sum is 0 for j >= i. Differences of one cumulative sum would cancel, in
    forward and in the gradient of x.
    """
    c = x.size(-1)
    is_later = torch.ones(c, c, dtype=torch.bool, device=x.device).tril(-1)
    x_of_later = x.unsqueeze(-1).expand(*x.shape, c).masked_fill(~is_later, 0.0)
    return x_of_later.cumsum(-2)


def flops_per_token(num_heads: int, key_dim: int, value_dim: int) -> int:
    """Return the FLOPs per token of forward and backward. Each value head reads, changes and queries
    its state.

    Each of the three multiplies and adds H V numbers, and backward costs twice as much as forward. Products
    within blocks, which make the recurrence fast, are not counted: they depend on ``BLOCK``.

    >>> flops_per_token(num_heads=32, key_dim=128, value_dim=128)
    9437184
    """
    return 3 * 3 * 2 * num_heads * key_dim * value_dim
