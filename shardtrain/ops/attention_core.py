"""The contract of an attention core, held against a core of a user's file: docs/models.md says it in full.

A core is a module without weights, called as ``core(q, k, v)`` or ``core(q, k, v, documents_BT)``, and with scores of
sinks as a fifth argument where its attribute ``has_sinks`` is true. It computes
``softmax(cap(scale q k) - slope distance) v`` for causal attention; its attributes ``window``, ``chunk``, ``scale``,
``softcap``, ``alibi_slopes`` and ``heads_first`` say what differs from the plain one. Where parallelism computes it in
its place, a core that does anything else would change numbers: it is tried on small tensors before training.
Shape suffixes: B batch, T tokens, N heads, K key-value heads, H head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain.layout import Layout, matches
from shardtrain.ops import attention_scores
from shardtrain.ops import document_mask as documents
from shardtrain.ops.user_state import trial

CLOSE = 1e-4
"""Relative error of float32 arithmetic in another order, with room."""
_TOKENS = 13
"""Of a row that is tried, and of one that is traced: a number that heads and batches seldom have."""
_LONG_NUMBERS = 1 << 24
"""Scores of the row that shows a window: few enough to be computed in about a second."""


class Broken(NamedTuple):
    """What a core does that cannot be carried, and how to fix it."""

    rule: str
    fix: str


@dataclass(frozen=True)
class Given:
    """How the model calls a core: shapes of queries, keys and values, and what comes with them."""

    shapes: tuple[tuple[int, ...], ...]
    more: int
    """Arguments after the documents."""
    documents: bool
    """Whether the core is given the documents."""
    strange: bool
    """Whether the fourth argument is a tensor other than the documents: a mask, or a bias."""


def trace(model: nn.Module, layout: Layout) -> dict[str, Given]:
    """How each core is called, by its path, found by a forward pass on the meta device; those not reached are left out.

    Experts, whose work depends on numbers, are passed by.
    """
    calls: dict[str, Given] = {}
    # A copy, since a forward may keep what it has made, such as rotary angles. Documents are a tensor of their own, by
    # which a hook knows them again among the arguments
    model = copy.deepcopy(model)
    tokens_BT = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    documents_BT = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")

    def note(path: str, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        values = [*inputs, *keywords.values()]
        shapes = tuple(tuple(value.shape) for value in values[:3] if isinstance(value, Tensor))
        fourth = values[3] if len(values) > 3 else None
        strange = isinstance(fourth, Tensor) and fourth is not documents_BT
        # Scores of sinks, one per query head, are the one argument that may follow the documents
        rest = [value for value in values[4:] if value is not None]
        if getattr(model.get_submodule(path), "has_sinks", False) and len(rest) == 1 and len(shapes[0]) == 4:
            heads = shapes[0][1 if getattr(model.get_submodule(path), "heads_first", False) else 2]
            rest = [] if tuple(rest[0].shape) == (heads,) else rest
        calls[path] = Given(shapes, len(rest), fourth is documents_BT, strange)

    # A hook on each core; experts give back what they are given
    handles = []
    experts = []
    for path, module in model.named_modules():
        if layout.context and matches(path, layout.context):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, inputs, keywords, path=path: note(path, inputs, keywords), with_kwargs=True
                )
            )
        elif layout.expert and matches(path, layout.expert) and "forward" not in vars(module):
            module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]
            experts.append(module)
    knows_documents = "documents_BT" in inspect.signature(model.forward).parameters
    try:
        with trial(model), torch.no_grad(), torch.device("meta"):
            model(tokens_BT, tokens_BT, **({"documents_BT": documents_BT} if knows_documents else {}))
    except Exception:  # what cannot run without numbers shows when it runs with them
        pass
    finally:
        for handle in handles:
            handle.remove()
        for module in experts:
            del module.forward
    return calls


def broken_when_split(core: nn.Module, given: Given | None, seq_len: int) -> Broken | None:
    """Why attention over a sequence that is split over ranks cannot take the place of a core; None where it can."""
    wrong = _broken_call(core, given)
    if wrong:
        return wrong
    heads, key_heads, width = _sizes(core, given)
    heads_first = bool(getattr(core, "heads_first", False))
    window = int(getattr(core, "window", 0) or 0)
    scoring = attention_scores.scores_of(core)
    if scoring.slopes and len(scoring.slopes) != heads:
        return Broken(f"has {len(scoring.slopes)} alibi_slopes for {heads} query heads", "give one per query head")
    core = copy.deepcopy(core)

    # The core against attention written out in terms of its attributes, both in float32 on random tensors
    def difference(tokens: int, heads: int, key_heads: int, documents_BT: Tensor | None) -> Broken | None:
        rows = 2 if tokens == _TOKENS else 1
        q, k, v = _random(rows, tokens, heads, key_heads, width)
        seen_BT = documents.chunked(documents_BT, int(getattr(core, "chunk", 0) or 0), (rows, tokens), q.device)
        expected = attention_scores.attention(q, k, v, seen_BT, window, scoring, _sinks(core, heads))
        got = run(core, q, k, v, documents_BT, heads_first)
        if isinstance(got, Broken):
            return got
        if tuple(got.shape) != tuple(expected.shape):
            names = {(rows, heads, tokens, width): "(B, N, T, H)", (rows, tokens, heads * width): "(B, T, N H)"}
            shape = names.get(tuple(got.shape), str(tuple(got.shape)))
            return Broken(f"gives {shape} for queries (B, T, N, H)", "give the shape of the queries")
        if _error(got, expected) > CLOSE:
            return _diagnose(core, q, k, v, documents_BT, scoring, heads_first) or Broken(
                f"computes something else than its attributes window, chunk, scale, softcap and alibi_slopes say "
                f"(off by {_error(got, expected):.0e})",
                "write it in these terms, as docs/models.md says",
            )
        return None

    # Without documents, with two of them, and on one long row with few heads, where a window shows that is shorter
    wrong = difference(_TOKENS, heads, key_heads, None)
    if wrong is None and given is not None and given.documents:
        wrong = difference(_TOKENS, heads, key_heads, (torch.arange(_TOKENS) >= 5).long().expand(2, -1))
    if wrong is None:
        few = (heads, key_heads) if scoring.slopes else (heads // key_heads, 1)
        longest = min(seq_len, int((_LONG_NUMBERS / few[0]) ** 0.5))
        if longest > _TOKENS:
            wrong = difference(longest, *few, None)
    return wrong


def broken_when_heads_are_dealt(core: nn.Module, given: Given | None) -> Broken | None:
    """Why a core may not be given some of its heads alone, as tensor parallelism does; None where it may."""
    if given is None or given.more or given.strange or len(given.shapes) < 3 or any(len(s) != 4 for s in given.shapes):
        return None  # more arguments are the model's own to deal
    heads_first = bool(getattr(core, "heads_first", False)) or _looks_heads_first(given)
    heads, key_heads, width = _sizes(core, given, heads_first)
    if key_heads % 2 or given.shapes[2][-1] != width:
        return None
    slopes = getattr(core, "alibi_slopes", None)
    q, k, v = _random(2, _TOKENS, heads, key_heads, width)
    # All heads at once, and each half of them alone: they must give the same
    core = copy.deepcopy(core).eval()
    whole = run(core, q, k, v, None, heads_first)
    if isinstance(whole, Broken):
        return whole
    fix = "take counts from shapes, and what differs between heads from the attribute alibi_slopes, one per query head"
    for half in (0, 1):
        if slopes:
            core.alibi_slopes = tuple(slopes[half * heads // 2 : (half + 1) * heads // 2])  # type: ignore[assignment]
        half_q, half_k, half_v = (x.chunk(2, dim=2)[half] for x in (q, k, v))
        sinks_N = _sinks(core, heads)
        part = run(core, half_q, half_k, half_v, None, heads_first, None if sinks_N is None else sinks_N.chunk(2)[half])
        if isinstance(part, Broken):
            rule = "cannot be given half of its heads" + part.rule.removeprefix("cannot be tried on small tensors")
            return Broken(rule, fix)
        expected = whole.chunk(2, dim=2)[half]
        if part.shape != expected.shape or _error(part, expected) > CLOSE:
            rule = "gives other numbers for some of its heads than for the same heads among all"
            return Broken(rule, fix)
    return None


def broken_number_of_heads(core: nn.Module, given: Given | None, ranks: int) -> Broken | None:
    """Why the heads of a core cannot be dealt evenly to ranks, which no size of the configuration may show."""
    if given is None or len(given.shapes) < 3 or any(len(shape) != 4 for shape in given.shapes):
        return None
    heads_first = bool(getattr(core, "heads_first", False)) or _looks_heads_first(given)
    key_heads = _sizes(core, given, heads_first)[1]
    if key_heads % ranks == 0:
        return None
    return Broken(f"has {key_heads} key-value heads, which {ranks} ranks cannot share", "use fewer ranks")


def run(
    core: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents_BT: Tensor | None,
    heads_first: bool,
    sinks_N: Tensor | None = None,
) -> Any:
    """What a core gives for (B, T, heads, H), in that layout; or why it gives none."""
    inputs = [x.transpose(1, 2) if heads_first else x for x in (q, k, v)]
    try:
        with trial(core), torch.no_grad():
            if getattr(core, "has_sinks", False):
                out = core(*inputs, documents_BT, _sinks(core, q.size(2)) if sinks_N is None else sinks_N)
            else:
                out = core(*inputs) if documents_BT is None else core(*inputs, documents_BT)
    except Exception as error:  # a user's code may raise anything
        text = str(error).splitlines() or [""]
        fix = "correct it; it must run on a CPU in float32 too, and hold no tensor (the model is built without memory)"
        return Broken(f"cannot be tried on small tensors: {type(error).__name__}: {text[0]}", fix)
    if not isinstance(out, Tensor):
        return Broken(f"gives {type(out).__name__}, not a tensor", "give (B, T, N, H) alone")
    return out.transpose(1, 2) if heads_first and out.ndim == 4 else out


def _sinks(core: nn.Module, heads: int) -> Tensor | None:
    """Scores of sinks that differ between heads, for a core that takes some."""
    return torch.linspace(-1.0, 3.0, heads) if getattr(core, "has_sinks", False) else None


def _broken_call(core: nn.Module, given: Given | None) -> Broken | None:
    """Why a call of a core is not one that can be taken over."""
    if any(True for _ in core.parameters()):
        return Broken(
            "holds parameters", "move them out: a core has no weights (sinks are its fifth argument, see has_sinks)"
        )
    if given is None:
        return None
    if given.more or given.strange:
        rule = "is given more than queries, keys, values and documents_BT, such as a mask or a bias"
        return Broken(rule, "let it follow from the attributes window and alibi_slopes; no other bias can be carried")
    if len(given.shapes) < 3 or any(len(shape) != 4 for shape in given.shapes):
        return Broken(f"is given shapes {given.shapes}, not (B, T, heads, H) three times", "unflatten the heads before")
    if _looks_heads_first(given) and not getattr(core, "heads_first", False):
        rule = "is given (B, N, T, H), heads before tokens"
        return Broken(rule, "set the attribute heads_first = True of the core, or transpose within it")
    if len({shape[-1] for shape in given.shapes}) > 1:
        rule = f"is given heads of different widths {[shape[-1] for shape in given.shapes]}"
        return Broken(rule, "pad values with zeros to the width of queries, and cut the output")
    return None


def _looks_heads_first(given: Given) -> bool:
    return all(shape[2] == _TOKENS and shape[1] != _TOKENS for shape in given.shapes)


def _sizes(core: nn.Module, given: Given | None, heads_first: bool | None = None) -> tuple[int, int, int]:
    """Query heads, key-value heads and the width of a head; a guess where the model was not traced."""
    if given is None:
        heads = len(getattr(core, "alibi_slopes", None) or ()) or 4
        return heads, heads, 16
    place = 1 if (getattr(core, "heads_first", False) if heads_first is None else heads_first) else 2
    return given.shapes[0][place], given.shapes[1][place], given.shapes[0][-1]


def _random(rows: int, tokens: int, heads: int, key_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, count, width, generator=generator) for count in (heads, key_heads, key_heads))
    return 4.0 * q, k, v  # large scores, so that a soft cap shows


def _error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


def _diagnose(
    core: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents_BT: Tensor | None,
    scoring: attention_scores.Scores,
    heads_first: bool,
) -> Broken | None:
    """Name what a core does that its attributes do not say, by experiments on it."""

    def got(k: Tensor = k, v: Tensor = v, documents_BT: Tensor | None = documents_BT) -> Tensor:
        return run(core, q, k, v, documents_BT, heads_first)  # type: ignore[no-any-return]

    # Random numbers: two calls differ
    first = got()
    if _error(got(), first) > 0:
        return Broken("gives other numbers each time, as with dropout", "leave dropout out of the core")
    # A type of its own: inputs that are rounded to it before change nothing
    for short in (torch.bfloat16, torch.float16):
        rounded = [x.to(short).float() for x in (q, k, v)]
        if _error(run(core, rounded[0], rounded[1], rounded[2], documents_BT, heads_first), first) == 0:
            rule = f"computes in {str(short).removeprefix('torch.')}, whatever the type of what it is given"
            return Broken(rule, "cast nothing: training.mixed_precision_param is the type in which a model computes")
    # No causal mask: another value of the last token changes earlier outputs
    later = torch.cat((torch.zeros_like(v[:, :-1]), torch.ones_like(v[:, -1:])), dim=1)
    if float(got(v=v + later)[:, :-1].sub(first[:, :-1]).abs().max()) > CLOSE:
        return Broken("lets tokens see later ones", "use a causal mask; a core without one cannot be split")
    # Values of one give one, where weights sum to one
    if float(got(v=torch.ones_like(v)).sub(1.0).abs().max()) > CLOSE:
        rule = "has weights that do not sum to one, as with an attention sink or dropout"
        return Broken(rule, "leave it out of the core; it can be given sinks as its fifth argument (has_sinks = True)")
    # Documents that change nothing, of a core that is else what its attributes say
    if documents_BT is not None and _error(got(documents_BT=None), run(core, q, k, v, None, heads_first)) == 0:
        plain = attention_scores.attention(q, k, v, None, int(getattr(core, "window", 0) or 0), scoring)
        if _error(got(documents_BT=None), plain) <= CLOSE:
            return Broken("lets documents see each other", "use documents_BT, or leave that argument out")
    return _fit(core, got, q, k, scoring)


def _fit(core: nn.Module, got: Any, q: Tensor, k: Tensor, scoring: attention_scores.Scores) -> Broken | None:
    """Scores are logarithms of weights up to a number per query: fit a scale and a slope of the distance to them.

    Token 1 sees two tokens: log(p_0 / p_1) = scale q (k_0 - k_1) - slope, and values of one and zero show p_0.
    """
    tokens, heads, width = q.shape[1:]
    k = k.repeat_interleave(heads // k.size(2), dim=2)
    first = torch.zeros_like(k)
    last = torch.zeros_like(k)
    first[:, 0] = 1.0
    last[:, -1] = 1.0

    def differences(size: float) -> tuple[Tensor, Tensor]:
        p_BN = got(k=k * size, v=first)[:, 1, :, 0].double()
        dots_BN = (q[:, 1].double() * (k[:, 0] - k[:, 1]).double() * size).sum(-1)
        return dots_BN, p_BN.log() - (1.0 - p_BN).log()

    # A line through log(p_0 / p_1) over the dot products, for each head. Small scores, so that a soft cap does not show
    points = [differences(size) for size in (0.01, 0.02, 0.04)]
    x = torch.cat([dots_BN for dots_BN, _ in points])
    y = torch.cat([logs_BN for _, logs_BN in points])
    scale_N = ((x - x.mean(0)) * (y - y.mean(0))).sum(0) / (x - x.mean(0)).square().sum(0)
    slope_N = scale_N * x.mean(0) - y.mean(0)
    residual = float((y - scale_N * x + slope_N).abs().max())
    if not bool(torch.isfinite(scale_N).all()) or residual > 1e-2:
        return None

    # Its scale, and the slope of the distance
    stated = width**-0.5 if scoring.scale is None else scoring.scale
    if float((scale_N / stated - 1).abs().max()) > 0.02:
        measured = f"{float(scale_N.mean()):.4g}"
        rule = f"scales q k by {measured}, and not by {stated:.4g}"
        return Broken(rule, f"set the attribute scale of the core, here to {measured}")
    slopes_N = torch.tensor(scoring.slopes or [0.0] * heads, dtype=torch.float64)
    if float((slope_N - slopes_N).abs().max()) > max(1e-3, 3.0 * residual):
        rule = "adds a bias that depends on the distance, as ALiBi does, of which its attribute alibi_slopes "
        rule += "says something else" if scoring.slopes else "says nothing"
        return Broken(rule, "set alibi_slopes to a tuple of one number per query head; no other bias can be carried")

    # Which tokens see which: with keys of zero all that are seen weigh alike, and a value of one marks a token
    window = int(getattr(core, "window", 0) or 0)
    chunk = int(getattr(core, "chunk", 0) or 0)
    reach = int((got(k=torch.zeros_like(k), v=first)[0, :, 0, 0] > 0).sum())  # tokens that see the first
    if not scoring.slopes and 1 < reach < tokens and reach != chunk:
        # The token after those that see the first one sees itself alone: a new chunk begins with it
        next_one = torch.zeros_like(k)
        next_one[:, reach] = 1.0
        if round(float(got(k=torch.zeros_like(k), v=next_one)[:, reach].mean()), 3) == 1.0:
            rule = (
                f"lets a token see its chunk of {reach} tokens alone, and its attribute chunk says {chunk or 'nothing'}"
            )
            return Broken(rule, f"set the attribute chunk of the core, here to {reach}")
    seen = round(1.0 / max(float(got(k=torch.zeros_like(k), v=last)[:, -1].mean()), 1.0 / (tokens + 1)))
    if not scoring.slopes and seen != min(window or tokens, tokens):
        how = f"{seen} tokens" if seen < tokens else "all tokens before it"
        rule = f"lets a token see {how}, and its attribute window says {window or 'nothing'}"
        return Broken(rule, f"set the attribute window of the core, here to {seen if seen < tokens else 0}")

    # A soft cap: large scores are smaller than the line says
    x, y = differences(2.5)  # larger differences of scores than 10 leave no digits of the smaller weight
    if not scoring.softcap and bool(((y.abs() < 0.99 * (scale_N * x).abs()) & (y.abs() < 10)).any()):
        return Broken("bounds its scores", "set the attribute softcap of the core to the bound")
    return None
