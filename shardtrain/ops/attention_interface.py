"""Route the attention of a ``transformers`` network to cores of this package,
and trace how a network calls attention.

``transformers`` looks up its attention function by a name in the config of each attention module.
``route`` sets that name to a function of this file, which calls the core that it finds in the module.
``trace`` runs a copy of the network on the meta device and returns the arguments of each attention
module, with the mask that ``transformers`` builds for it. Shape suffixes: B batch, T tokens, N heads, K
key-value heads, H head.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from shardtrain.ops import token_mixing
from shardtrain.ops.attention_core import Broken
from shardtrain.ops.meta_autocast import meta_autocast
from shardtrain.ops.no_token_chosen import NoTokenChosen
from shardtrain.ops.trial_failure import failure_of

ROUTED = "shardtrain_core"
"""Name under which ``transformers`` knows the function that calls our cores."""
CORE = "split_core"
"""Attribute of an attention module that holds its core.

Not a submodule, so names of parameters do not change.
"""
_TRACED = "shardtrain_traced"
_FUNCTION = "the attention function"
_FIX = "use a model file of this package"
_HANDLED = {"scaling", "softcap", "s_aux", "dropout", "is_causal", "sliding_window"}
_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Arguments that no attention function of ``transformers`` for training reads."""
_MAX_QUERIES = 16
"""Number of rows of a mask that are evaluated, each for all keys."""
_MIN_TOKENS = 1024
"""Shortest length for which masks are evaluated. If a run has shorter rows, checks use longer rows than the run."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments and mask of an attention module.

    Attributes:
        heads, key_heads: Number of heads of queries, and of keys and values.
        width, value_width: Features of a head of queries and keys, and of values.
        window: Number of tokens that a token attends to. 0 for no window within ``seq_len``.
        chunk: Number of tokens of the chunks that attention stays within. 0 for no chunks.
    """

    heads: int
    key_heads: int
    width: int
    value_width: int
    window: int = 0
    chunk: int = 0


class Untraceable(Exception):
    """Reason why attention cannot be routed to our cores. ``broken`` is the rule and its fix."""

    def __init__(self, broken: Broken) -> None:
        super().__init__(broken.rule)
        self.broken = broken


def route(network: nn.Module, name: str = ROUTED) -> None:
    """Let a network use the attention function of this name, in place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ROUTED, _call_core)
    # Modules may have their own copies of the config
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@contextmanager
def original_attention(network: nn.Module, name: str) -> Iterator[None]:
    """Use the attention function ``name`` of ``transformers`` instead of our cores, for the duration of the block."""
    route(network, name)
    try:
        yield
    finally:
        route(network)


def _call_core(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for ``transformers``: queries (B, N, T, H) to outputs (B, T, N, H), without a mask.

    No mask function is registered for ``ROUTED``, so ``transformers`` builds no masks. The core knows its
    mask.
    """
    core = module.__dict__[CORE]
    return core.forward(query, key, value, scaling, softcap, s_aux), None


def trace(model: Any, seq_len: int) -> dict[str, AttentionCall]:
    """Return the calls of the attention function by the path of the attention module,
    for rows of ``seq_len`` tokens.

    Args:
        model: a ``models.transformers.Model`` with parameters on the meta device. Only a copy of it runs.
        seq_len: length of the rows for which masks are evaluated.

    Raises:
        Untraceable: something other than the attention function mixes tokens, or the function is called
            with a mask
            or arguments that our cores do not support, or the forward pass fails on the meta device.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    copied = copy.deepcopy(model).to("meta")
    copied.passes_positions = True
    watch = token_mixing.watch(copied, _FUNCTION, _FIX)
    if watch is None:
        raise Untraceable(
            Broken("has weights of so many sizes that no test length is unique", _FIX)
        )
    paths = {module: path for path, module in copied.named_modules()}
    calls: dict[str, AttentionCall] = {}

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        path = paths[module]
        with watch.allowing():
            call = _call_of(module, path, query, key, value, attention_mask, arguments)
            if calls.setdefault(path, call) != call:
                raise Untraceable(Broken(f"calls {path} several times with different masks", _FIX))
            return query.new_empty(
                *query.shape[:1], query.size(2), query.size(1), value.size(-1)
            ), None

    ALL_ATTENTION_FUNCTIONS.register(_TRACED, record)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
        _TRACED, functools.partial(_Mask, watch.stack, max(seq_len, _MIN_TOKENS))
    )
    route(copied.hf, _TRACED)
    for module in copied.modules():
        # The shapes in experts depend on values. Experts do not mix tokens.
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda x, *_, **__: x
        # This check for padding reads the values of tokens, which do not exist on the meta device.
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_, **__: None
    find_documents = masking_utils.find_packed_sequence_indices
    # it reads positions, which have no values
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    row_1T = torch.zeros(1, watch.length, dtype=torch.int64, device="meta")
    failure = None
    try:
        with torch.no_grad(), torch.device("meta"), meta_autocast(), NoTokenChosen(), watch:
            copied(row_1T, row_1T)
    except Untraceable:
        raise
    except (
        Exception
    ) as error:  # the code of a network may raise any exception on tensors without values
        failure = error
    finally:
        masking_utils.find_packed_sequence_indices = find_documents
        del ALL_ATTENTION_FUNCTIONS._global_mapping[_TRACED]
        del masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[_TRACED]
    if watch.found:
        raise Untraceable(watch.found)
    if failure is not None:
        raise Untraceable(Broken(failure_of(failure, copied), _FIX))
    if not calls:
        raise Untraceable(Broken("never calls the attention function of transformers", _FIX))
    return calls


class _Mask:
    """A mask function of ``transformers``, kept instead of the tensor that it describes."""

    def __init__(
        self,
        running: Sequence[str],
        seq_len: int,
        *,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        **_: Any,
    ) -> None:
        self.running = running
        self.seq_len = seq_len
        self.function = mask_function
        self.local_size = local_size

    def __getattr__(self, name: str) -> Any:
        """Reject a network that uses its mask itself, as a tensor."""
        raise Untraceable(_changes_its_mask(self.running[-1]))

    def __getitem__(self, _: Any) -> Any:
        raise Untraceable(_changes_its_mask(self.running[-1]))

    @functools.cached_property
    def limits(self) -> tuple[int, int] | None:
        """Window and chunk of a causal mask over the traced length, or None if the mask is something else."""
        with torch.device("cpu"), _MetaIsZero():
            return self._limits(self.seq_len)

    def _limits(self, seq_len: int) -> tuple[int, int] | None:
        key_T = torch.arange(seq_len)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(seq_len, (_MAX_QUERIES - 2,), generator=generator)
        query_Q1 = torch.cat((torch.tensor([0, seq_len - 1]), drawn))[:, None]
        first = torch.zeros((), dtype=torch.int64)
        seen_QT = torch.as_tensor(self.function(first, first, query_Q1, key_T)).expand(
            _MAX_QUERIES, seq_len
        )
        causal_QT = key_T <= query_Q1
        if torch.equal(seen_QT, causal_QT):
            return 0, 0
        window = int(seen_QT[1].sum())
        if torch.equal(seen_QT, causal_QT & (key_T > query_Q1 - window)):
            return window, 0
        chunk = self.local_size or seq_len
        if torch.equal(seen_QT, causal_QT & (key_T // chunk == query_Q1 // chunk)):
            return 0, chunk
        return None


def _changes_its_mask(path: str) -> Broken:
    rule = (
        f"reads or changes its attention mask in {path}, "
        "but attention over split sequences only supports causal masks, windows and chunks"
    )
    return Broken(rule, _FIX)


class _MetaIsZero(TorchFunctionMode):
    """Replace tensors on the meta device by zeros: the padding on the left, which a row of text does not have."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def with_values(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

        args, kwargs = tree_map_only(Tensor, with_values, (args, kwargs or {}))
        return function(*args, **kwargs)


def _call_of(
    module: nn.Module,
    path: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    arguments: Mapping[str, Any],
) -> AttentionCall:
    """Return the facts of a call. Raise Untraceable if our cores do not compute it."""
    # None and False mean that the model does not use an argument.
    for name, argument in arguments.items():
        if (
            name not in _HANDLED | _WITHOUT_EFFECT
            and argument is not None
            and argument is not False
        ):
            raise Untraceable(Broken(f"passes {name} to the attention function in {path}", _FIX))
    for name in ("scaling", "softcap"):
        if isinstance(arguments.get(name), Tensor):
            raise Untraceable(
                Broken(f"passes a tensor as {name} to the attention function in {path}", _FIX)
            )
    if query.size(2) != key.size(2):
        raise Untraceable(Broken(f"attends to tokens outside of the row in {path}", _FIX))

    # The mask contains the limits. Without a mask, Transformers uses the causal mask of the call or module.
    limits: tuple[int, int] | None = None
    if isinstance(mask, _Mask):
        limits = mask.limits
    elif mask is None:
        is_causal = arguments.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        limits = (0, 0) if is_causal else None
    if limits is None:
        raise Untraceable(
            Broken(f"has a mask in {path} that is not causal, a window or chunks", _FIX)
        )
    sinks_N = arguments.get("s_aux")
    if sinks_N is not None and tuple(sinks_N.shape) != (query.size(1),):
        raise Untraceable(Broken(f"has sinks of shape {tuple(sinks_N.shape)} in {path}", _FIX))
    return AttentionCall(query.size(1), key.size(1), query.size(-1), value.size(-1), *limits)
