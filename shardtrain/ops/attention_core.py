"""Check of a user's attention core against the contract in docs/own_model.md, before parallelism
replaces the core.

A core is a module without weights that computes ``softmax(cap(scale q k) - slope distance) v`` with
a causal mask. It is called as ``core(q, k, v)`` or ``core(q, k, v, documents_BT)``; with the
attribute ``has_sinks`` the scores of sinks are a fifth argument. The attributes ``window``,
``chunk``, ``scale``, ``softcap``, ``alibi_slopes`` and ``heads_first`` specify the function.
Parallelism computes that function instead of calling the core. A core that computes anything else
would silently have other results, so it is tested on small tensors.
Shape suffixes: B batch, T tokens, N heads, K key-value heads, H head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain.layout import Layout, matches
from shardtrain.ops import attention_scores
from shardtrain.ops import document_mask as documents
from shardtrain.ops.user_state import trial

CLOSE = 1e-4
"""Tolerated relative error: float32 arithmetic in another order, with a margin."""
_TOKENS = 13
"""Length of test rows.

Few models have 13 heads or batches of 13, so this size identifies the dimension of tokens.
"""
_MAX_SCORES = 1 << 24
"""Number of attention scores of the longest test row, which detects windows. It takes about a second."""


class Broken(NamedTuple):
    """A violation of the contract, and its fix."""

    rule: str
    fix: str


@dataclass(frozen=True)
class CoreCall:
    """The arguments with which a model calls a core. ``shapes`` has the shapes of queries, keys and values."""

    shapes: tuple[tuple[int, ...], ...]
    num_extra: int
    """Number of arguments after the documents."""
    has_documents: bool
    """True if the core receives the documents."""
    has_mask: bool
    """True if the fourth argument is a tensor other than the documents: a mask or a bias."""

    @property
    def has_heads(self) -> bool:
        """True if queries, keys and values are three tensors with a dimension of heads."""
        return len(self.shapes) == 3 and all(len(shape) == 4 for shape in self.shapes)


NOT_FINITE = Broken(
    "returns NaN or infinity for finite inputs", "correct it; a token attends at least to itself"
)


def trace(model: nn.Module, layout: Layout) -> dict[str, CoreCall]:
    """Return the call of each core by its path, from a forward pass on the meta device.

    Cores that the pass does not reach are missing. Experts are skipped, because their shapes depend on
    values.
    """
    calls: dict[str, CoreCall] = {}
    # Trace a copy, because a forward pass may store tensors, such as rotary angles. Documents and
    # positions are separate tensors, so the hook can identify the documents.
    model = copy.deepcopy(model)
    tokens_BT = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    documents_BT = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")

    def record(path: str, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        core = model.get_submodule(path)
        values = [*inputs, *keywords.values()]
        shapes = tuple(tuple(value.shape) for value in values[:3] if isinstance(value, Tensor))
        fourth = values[3] if len(values) > 3 else None
        has_mask = isinstance(fourth, Tensor) and fourth is not documents_BT
        # Only the scores of sinks, one per query head, may follow the documents.
        extra = [value for value in values[4:] if value is not None]
        if getattr(core, "has_sinks", False) and len(extra) == 1 and len(shapes[0]) == 4:
            heads = shapes[0][1 if getattr(core, "heads_first", False) else 2]
            if tuple(extra[0].shape) == (heads,):
                extra = []
        calls[path] = CoreCall(shapes, len(extra), fourth is documents_BT, has_mask)

    def recorder_of(path: str) -> Callable[..., None]:
        return lambda _, inputs, keywords: record(path, inputs, keywords)

    # Add a hook to each core, and replace each block of experts by the identity.
    handles = []
    experts = []
    for path, module in model.named_modules():
        if layout.context and matches(path, layout.context):
            handles.append(module.register_forward_pre_hook(recorder_of(path), with_kwargs=True))
        elif layout.expert and matches(path, layout.expert) and "forward" not in vars(module):
            module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]
            experts.append(module)
    options = {}
    if "documents_BT" in inspect.signature(model.forward).parameters:
        options["documents_BT"] = documents_BT
    try:
        with trial(model), torch.no_grad(), torch.device("meta"):
            model(tokens_BT, tokens_BT, **options)
    except Exception:
        # A forward pass that depends on the values of tensors fails on the meta device. Its real errors are
        # reported when it runs with data.
        pass
    finally:
        for handle in handles:
            handle.remove()
        for module in experts:
            del module.forward
    return calls


def broken_when_split(core: nn.Module, call: CoreCall | None, seq_len: int) -> Broken | None:
    """Return the reason why context parallelism cannot replace a core, or None if it can.

    ``call`` is None if the model was not traced. Windows up to ``seq_len`` tokens are detected, if
    memory allows.
    """
    broken = _broken_call(core, call)
    if broken:
        return broken
    heads, key_heads, width = _sizes(core, call)
    heads_first = bool(getattr(core, "heads_first", False))
    window = int(getattr(core, "window", 0) or 0)
    scoring = attention_scores.scores_of(core)
    if scoring.slopes and len(scoring.slopes) != heads:
        return Broken(
            f"has {len(scoring.slopes)} alibi_slopes for {heads} query heads",
            "set one per query head",
        )
    core = copy.deepcopy(core)

    # Compare the core with attention computed from its attributes, in float32 on random tensors.
    def difference(
        tokens: int, heads: int, key_heads: int, documents_BT: Tensor | None
    ) -> Broken | None:
        rows = 2 if tokens == _TOKENS else 1
        q, k, v = _random(rows, tokens, heads, key_heads, width)
        # Attention in chunks is attention in documents that end at each border of a chunk.
        chunk = int(getattr(core, "chunk", 0) or 0)
        chunks_BT = documents.chunked(documents_BT, chunk, (rows, tokens), q.device)
        expected = attention_scores.attention(
            q, k, v, chunks_BT, window, scoring, _sinks(core, heads)
        )
        output = run(core, q, k, v, documents_BT, heads_first)
        if isinstance(output, Broken):
            return output
        # Name the two layouts that are often returned by mistake.
        if tuple(output.shape) != tuple(expected.shape):
            names = {
                (rows, heads, tokens, width): "(B, N, T, H)",
                (rows, tokens, heads * width): "(B, T, N H)",
            }
            shape = names.get(tuple(output.shape), str(tuple(output.shape)))
            return Broken(
                f"returns {shape} for queries (B, T, N, H)", "return the shape of the queries"
            )
        if not output.isfinite().all():
            return NOT_FINITE
        error = _error(output, expected)
        if error <= CLOSE:
            return None
        known_cause = _diagnose(core, q, k, v, documents_BT, scoring, heads_first)
        if known_cause is not None:
            return known_cause
        return Broken(
            "does not compute the function of its attributes window, chunk, scale, softcap and alibi_slopes "
            f"(off by {error:.0e})",
            "express it by these attributes, as docs/own_model.md explains",
        )

    # Test without documents and with two documents.
    broken = difference(_TOKENS, heads, key_heads, None)
    if broken is None and call is not None and call.has_documents:
        two_documents_BT = (torch.arange(_TOKENS) >= 5).long().expand(2, -1)
        broken = difference(_TOKENS, heads, key_heads, two_documents_BT)
    if broken is not None:
        return broken

    # Test one long row, to detect a window. One group of heads is enough unless heads have different slopes.
    few_heads, few_key_heads = (heads, key_heads) if scoring.slopes else (heads // key_heads, 1)
    longest = min(seq_len, int((_MAX_SCORES / few_heads) ** 0.5))
    if longest <= _TOKENS:
        return None
    return difference(longest, few_heads, few_key_heads, None)


def broken_when_heads_are_dealt(core: nn.Module, call: CoreCall | None) -> Broken | None:
    """Return the reason why tensor parallelism cannot call a core with some of its heads, or None if it can.

    A call with additional arguments is not tested, because only the model can split them.
    """
    if call is None or call.num_extra or call.has_mask or not call.has_heads:
        return None
    heads_first = bool(getattr(core, "heads_first", False)) or _looks_heads_first(call)
    heads, key_heads, width = _sizes(core, call, heads_first)
    if key_heads % 2 or call.shapes[2][-1] != width:
        return None

    # Each half of the heads must have the same output as in a call with all heads.
    slopes = getattr(core, "alibi_slopes", None)
    q, k, v = _random(2, _TOKENS, heads, key_heads, width)
    core = copy.deepcopy(core).eval()
    full_output = run(core, q, k, v, None, heads_first)
    if isinstance(full_output, Broken):
        return full_output
    if not full_output.isfinite().all():
        return NOT_FINITE
    sinks_N = _sinks(core, heads)
    fix = "read the number of heads from shapes; only alibi_slopes, one per query head, may differ between heads"
    for half in (0, 1):
        if slopes:
            first = half * heads // 2
            core.alibi_slopes = tuple(slopes[first : first + heads // 2])  # type: ignore[assignment]
        half_q = q.chunk(2, dim=2)[half]
        half_k = k.chunk(2, dim=2)[half]
        half_v = v.chunk(2, dim=2)[half]
        half_sinks = None if sinks_N is None else sinks_N.chunk(2)[half]
        output = run(core, half_q, half_k, half_v, None, heads_first, half_sinks)
        if isinstance(output, Broken):
            reason = output.rule.removeprefix("fails on small tensors")
            return Broken(f"fails with half of its heads{reason}", fix)
        expected = full_output.chunk(2, dim=2)[half]
        # ``not <=`` is also true for NaN.
        if output.shape != expected.shape or not _error(output, expected) <= CLOSE:
            rule = "returns different values for half of its heads than in a call with all heads"
            return Broken(rule, fix)
    return None


def broken_number_of_heads(core: nn.Module, call: CoreCall | None, ranks: int) -> Broken | None:
    """Return a problem if the number of key-value heads is not divisible by ``ranks``.

    This checks the traced call, because the configuration may not contain the number of heads.
    """
    if call is None or not call.has_heads:
        return None
    heads_first = bool(getattr(core, "heads_first", False)) or _looks_heads_first(call)
    key_heads = _sizes(core, call, heads_first)[1]
    if key_heads % ranks == 0:
        return None
    return Broken(
        f"has {key_heads} key-value heads, which {ranks} ranks cannot divide",
        "use a divisor of them",
    )


def run(
    core: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents_BT: Tensor | None,
    heads_first: bool,
    sinks_N: Tensor | None = None,
) -> Any:
    """Return the output of a core for inputs (B, T, heads, H) in the same layout, or a Broken if it fails."""
    inputs: list[Tensor | None] = [x.transpose(1, 2) if heads_first else x for x in (q, k, v)]
    if getattr(core, "has_sinks", False):
        inputs += [documents_BT, _sinks(core, q.size(2)) if sinks_N is None else sinks_N]
    elif documents_BT is not None:
        inputs.append(documents_BT)
    try:
        with trial(core), torch.no_grad():
            output = core(*inputs)
    except Exception as error:
        # The user's code may raise any exception.
        text = str(error).splitlines() or [""]
        fix = "correct it; it must run on a CPU in float32 and store no tensors (the model is built on the meta device)"
        return Broken(f"fails on small tensors: {type(error).__name__}: {text[0]}", fix)
    if not isinstance(output, Tensor):
        return Broken(f"returns {type(output).__name__}, not a tensor", "return only (B, T, N, H)")
    return output.transpose(1, 2) if heads_first and output.ndim == 4 else output


def _sinks(core: nn.Module, heads: int) -> Tensor | None:
    """Return different scores of sinks per head, (N,), or None for a core without sinks."""
    return torch.linspace(-1.0, 3.0, heads) if getattr(core, "has_sinks", False) else None


def _broken_call(core: nn.Module, call: CoreCall | None) -> Broken | None:
    """Return the first violation of the calling convention, or None."""
    if next(core.parameters(), None) is not None:
        fix = "move them out: a core has no weights (sinks are its fifth argument, see has_sinks)"
        return Broken("contains parameters", fix)
    if call is None:
        return None
    if call.num_extra or call.has_mask:
        rule = "receives other arguments than queries, keys, values and documents_BT, such as a mask or a bias"
        fix = "use the attributes window and alibi_slopes; no other bias is supported"
        return Broken(rule, fix)
    if not call.has_heads:
        rule = f"receives shapes {call.shapes} instead of three tensors (B, T, heads, H)"
        return Broken(rule, "unflatten the heads before the call")
    if _looks_heads_first(call) and not getattr(core, "heads_first", False):
        rule = "receives (B, N, T, H), with heads before tokens"
        fix = "set the attribute heads_first = True of the core, or transpose within it"
        return Broken(rule, fix)
    widths = [shape[-1] for shape in call.shapes]
    if len(set(widths)) > 1:
        rule = f"receives heads of different widths {widths}"
        fix = "pad values with zeros to the width of queries, and truncate the output"
        return Broken(rule, fix)
    return None


def _looks_heads_first(call: CoreCall) -> bool:
    return all(shape[2] == _TOKENS and shape[1] != _TOKENS for shape in call.shapes)


def _sizes(
    core: nn.Module, call: CoreCall | None, heads_first: bool | None = None
) -> tuple[int, int, int]:
    """Return the numbers of query heads and key-value heads, and the width of a head.

    If the model was not traced, they are test sizes.
    """
    if call is None:
        heads = len(getattr(core, "alibi_slopes", None) or ()) or 4
        return heads, heads, 16
    if heads_first is None:
        heads_first = getattr(core, "heads_first", False)
    dim = 1 if heads_first else 2
    return call.shapes[0][dim], call.shapes[1][dim], call.shapes[0][-1]


def _random(
    rows: int, tokens: int, heads: int, key_heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, tokens, count, width, generator=generator)
        for count in (heads, key_heads, key_heads)
    )
    # Use large scores, to detect a soft cap.
    return 4.0 * q, k, v


def _error(output: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    difference = output.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))


def _diagnose(
    core: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents_BT: Tensor | None,
    scoring: attention_scores.Scores,
    heads_first: bool,
) -> Broken | None:
    """Run experiments to find out which property of a core its attributes do not describe.

    Return None if no experiment finds one.
    """

    def output_of(
        k: Tensor = k, v: Tensor = v, documents_BT: Tensor | None = documents_BT
    ) -> Tensor:
        return run(core, q, k, v, documents_BT, heads_first)  # type: ignore[no-any-return]

    # A core with dropout returns different values in two calls with the same inputs.
    first = output_of()
    if _error(output_of(), first) > 0:
        rule = "returns different values in each call, as with dropout"
        return Broken(rule, "remove dropout from the core")

    # A fixed dtype: rounding the inputs to it first does not change the output.
    for dtype in (torch.bfloat16, torch.float16):
        rounded_q, rounded_k, rounded_v = [x.to(dtype).float() for x in (q, k, v)]
        output = run(core, rounded_q, rounded_k, rounded_v, documents_BT, heads_first)
        if _error(output, first) == 0:
            name = str(dtype).removeprefix("torch.")
            rule = f"computes in {name} regardless of the dtype of its inputs"
            fix = "remove the cast: training.mixed_precision_param is the compute dtype of a model"
            return Broken(rule, fix)

    # No causal mask: another value of the last token changes earlier outputs.
    other_v = v.clone()
    other_v[:, -1] += 1.0
    change = output_of(v=other_v)[:, :-1] - first[:, :-1]
    # ``not <=`` is also true for NaN, here and below.
    if not float(change.abs().max()) <= CLOSE:
        rule = "lets tokens attend to later tokens"
        return Broken(rule, "use a causal mask; other cores cannot be split")

    # Check that the weights sum to one. If all values are one, the output is then one, too.
    sums = output_of(v=torch.ones_like(v))
    if not float(sums.sub(1.0).abs().max()) <= CLOSE:
        rule = "has weights that do not sum to one, as with an attention sink or dropout"
        fix = "remove it from the core; sinks can be its fifth argument (has_sinks = True)"
        return Broken(rule, fix)

    # Documents without effect: without documents, the core computes the function of its attributes.
    if documents_BT is not None:
        window = int(getattr(core, "window", 0) or 0)
        plain = attention_scores.attention(q, k, v, None, window, scoring)
        if _error(output_of(documents_BT=None), plain) <= CLOSE:
            rule = "lets tokens attend to other documents"
            return Broken(rule, "use documents_BT, or remove that argument")
    return _fit(core, output_of, q, k, scoring)


def _fit(
    core: nn.Module, output_of: Any, q: Tensor, k: Tensor, scoring: attention_scores.Scores
) -> Broken | None:
    """Measure scale, slope, chunk, window and soft cap of a core, and compare them with its attributes.

    Token 1 attends to two tokens, with log(p_0 / p_1) = scale q (k_0 - k_1) - slope. A value of one
    for token 0, and of zero for token 1, makes p_0 the output.
    """
    heads, width = q.shape[2:]
    k = k.repeat_interleave(heads // k.size(2), dim=2)
    first = torch.zeros_like(k)
    first[:, 0] = 1.0

    def differences(size: float) -> tuple[Tensor, Tensor]:
        p_BN = output_of(k=k * size, v=first)[:, 1, :, 0].double()
        k_difference = (k[:, 0] - k[:, 1]).double() * size
        dots_BN = (q[:, 1].double() * k_difference).sum(-1)
        return dots_BN, p_BN.log() - (1.0 - p_BN).log()

    # For each head, fit a line to log(p_0 / p_1) over the dot products. A soft cap does not affect small
    # scores.
    points = [differences(size) for size in (0.01, 0.02, 0.04)]
    x = torch.cat([dots_BN for dots_BN, _ in points])
    y = torch.cat([logs_BN for _, logs_BN in points])
    x_centered = x - x.mean(0)
    y_centered = y - y.mean(0)
    scale_N = (x_centered * y_centered).sum(0) / x_centered.square().sum(0)
    slope_N = scale_N * x.mean(0) - y.mean(0)
    residual = float((y - scale_N * x + slope_N).abs().max())
    if not bool(torch.isfinite(scale_N).all()) or residual > 1e-2:
        return None

    # Compare scale and slope with the attributes.
    expected_scale = width**-0.5 if scoring.scale is None else scoring.scale
    if float((scale_N / expected_scale - 1).abs().max()) > 0.02:
        measured = f"{float(scale_N.mean()):.4g}"
        rule = f"scales q k by {measured} instead of {expected_scale:.4g}"
        return Broken(rule, f"set the attribute scale of the core, here to {measured}")
    slopes_N = torch.tensor(scoring.slopes or [0.0] * heads, dtype=torch.float64)
    if float((slope_N - slopes_N).abs().max()) > max(1e-3, 3.0 * residual):
        state = "has other values" if scoring.slopes else "is not set"
        rule = f"adds a bias that depends on the distance like ALiBi, but its attribute alibi_slopes {state}"
        fix = "set alibi_slopes to a tuple of one number per query head; no other bias is supported"
        return Broken(rule, fix)

    # Skip the tests of chunk and window with slopes. They require equal weights.
    if not scoring.slopes:
        broken = _broken_range(core, output_of, k)
        if broken is not None:
            return broken

    # A soft cap makes large scores smaller than the line that was fitted above. Ignore score differences
    # above 10, because the smaller weight then has no precision.
    x, y = differences(2.5)
    is_below_line = y.abs() < 0.99 * (scale_N * x).abs()
    if not scoring.softcap and bool((is_below_line & (y.abs() < 10)).any()):
        return Broken("limits its scores", "set the attribute softcap of the core to the bound")
    return None


def _broken_range(core: nn.Module, output_of: Any, k: Tensor) -> Broken | None:
    """Compare the tokens that a token attends to with the attributes ``chunk`` and ``window``.

    Keys of zero make the weights of all these tokens equal. A value of one marks a token.
    """
    tokens = k.size(1)
    zero_keys = torch.zeros_like(k)
    window = int(getattr(core, "window", 0) or 0)
    chunk = int(getattr(core, "chunk", 0) or 0)

    def output_with_mark(token: int) -> Tensor:
        marked = torch.zeros_like(k)
        marked[:, token] = 1.0
        return output_of(k=zero_keys, v=marked)  # type: ignore[no-any-return]

    # If the first token that does not attend to token 0 only attends to itself, it begins a new chunk.
    reach = int((output_with_mark(0)[0, :, 0, 0] > 0).sum())
    if 1 < reach < tokens and reach != chunk:
        weight_of_itself = float(output_with_mark(reach)[:, reach].mean())
        if round(weight_of_itself, 3) == 1.0:
            rule = f"only lets a token attend to its chunk of {reach} tokens, but its attribute chunk is {chunk}"
            return Broken(rule, f"set the attribute chunk of the core, here to {reach}")

    # The weight of the last token for itself is 1 / number of tokens that it attends to.
    weight = float(output_with_mark(-1)[:, -1].mean())
    num_seen = round(1.0 / max(weight, 1.0 / (tokens + 1)))
    if num_seen == min(window or tokens, tokens):
        return None
    sees_all = num_seen >= tokens
    seen = "all tokens before it" if sees_all else f"{num_seen} tokens"
    rule = f"lets a token attend to {seen}, but its attribute window is {window}"
    return Broken(
        rule, f"set the attribute window of the core, here to {0 if sees_all else num_seen}"
    )
