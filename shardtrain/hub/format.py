"""How a model of ours is written in the format of the Hugging Face hub, as data beside the model. No torch is imported.

A model file that has such a form carries one ``HUB``: the names of tensors, and two functions between ``config.json``
and the model's Config. What is not listed is refused, so that nothing in a file changes a model without our knowing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardtrain.errors import ConfigError


@dataclass(frozen=True)
class Experts:
    """Row e of our tensor's first dimension is their tensor number e: ``#`` in ``name`` stands for the number."""

    name: str


@dataclass(frozen=True)
class Heads:
    """Their tensor holds ``parts`` of ours head by head, all parts of head 0 first: ours is number ``part``."""

    name: str
    part: int
    parts: int


Source = str | Experts | Heads
"""Where one of our tensors lies in their file; a plain name is a tensor of the same shape."""


class Piece(NamedTuple):
    """A box of our tensor, and the equal one of theirs: one slice per dimension.

    Where theirs has a dimension less, our first one is the number of an expert, and its slice is one wide.
    """

    name: str
    theirs: tuple[slice, ...]
    ours: tuple[slice, ...]


@dataclass(frozen=True)
class Hub:
    """The form of one architecture. ``*`` in names is the number of a layer, the same on both sides."""

    architecture: str
    model_type: str
    names: Mapping[str, Source]
    read: Callable[[Fields], dict[str, Any]]
    """config.json -> fields of the model's Config."""
    write: Callable[[Any], dict[str, Any]]
    """The model's Config -> what config.json says of it, beyond what all architectures say."""
    ignored: tuple[str, ...] = ()
    """Their tensors that hold nothing which is not computed, or that we have no place for on purpose."""
    renamed: Callable[[Any], Mapping[str, Source]] = lambda _: {}
    """Names that depend on the model's Config, in place of those in ``names``."""

    def source(self, name: str, config: Any = None) -> Source | None:
        """Where our tensor lies, its layer's number filled in; None where their format has no place for it.

        >>> hub = Hub("A", "a", {"layers.*.w": "model.layers.*.u"}, lambda _: {}, lambda _: {})
        >>> hub.source("layers.3.w"), hub.source("head")
        ('model.layers.3.u', None)
        """
        for pattern, source in {**self.names, **self.renamed(config)}.items():
            found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
            if found is None:
                continue
            layer = found[1] if found.groups() else ""
            if isinstance(source, str):
                return source.replace("*", layer)
            if isinstance(source, Experts):
                return Experts(source.name.replace("*", layer))
            return Heads(source.name.replace("*", layer), source.part, source.parts)
        return None

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of theirs is passed over on purpose."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def pieces(source: Source, shape: tuple[int, ...], head_dim: int) -> Iterator[Piece]:
    """The boxes that make our tensor of ``shape``; for ``Heads``, of rows that are heads of ``head_dim`` each.

    >>> [piece.name for piece in pieces(Experts("experts.#.w"), (2, 3, 4), 0)]
    ['experts.0.w', 'experts.1.w']
    >>> piece = list(pieces(Heads("qkv", 1, 3), (4, 5), 2))[1]
    >>> piece.theirs[0], piece.ours[0]
    (slice(8, 10, None), slice(2, 4, None))
    """
    whole = tuple(slice(0, size) for size in shape)
    if isinstance(source, str):
        yield Piece(source, whole, whole)
    elif isinstance(source, Experts):
        for expert in range(shape[0]):
            yield Piece(source.name.replace("#", str(expert)), whole[1:], (slice(expert, expert + 1), *whole[1:]))
    else:
        for head in range(shape[0] // head_dim):
            begin = (head * source.parts + source.part) * head_dim
            yield Piece(
                source.name,
                (slice(begin, begin + head_dim), *whole[1:]),
                (slice(head * head_dim, (head + 1) * head_dim), *whole[1:]),
            )


_HARMLESS = {
    "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "dtype", "torch_dtype", "initializer_range", "max_position_embeddings", "model_type", "output_router_logits",
    "pretraining_tp", "transformers_version", "use_cache", "router_jitter_noise", "max_window_layers", "aux_loss_alpha",
    "seq_aux", "ep_size", "num_nextn_predict_layers", "classifier_dropout", "is_decoder", "return_dict",
    "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states", "unk_token_id",
    "qk_head_dim", "chunk_size_feed_forward", "is_encoder_decoder",
}  # fmt: skip
"""Keys of config.json that change no number of a forward without dropout, or repeat what other keys say."""
CODE = re.compile(r"auto_map|_implementation|remote_code|custom_pipelines|_commit_hash")
_NEVER = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "add_cross_attention": False
}  # fmt: skip


class Fields:
    """The keys of a ``config.json``: each is asked for by name, and what nobody asked for is refused."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where, self._used = values, where, set(_HARMLESS)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key; a missing one or null is ``default``, and an error where there is none.

        Raises:
            ConfigError: for another type than ``kind``, or a key that is missing without a default.
        """
        self._used.add(key)
        value = self._values.get(key)
        value = default if value is None else value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise ConfigError(f"{self._where}: {key}={value!r} must be a {wanted}; use the model's own config.json")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31."""
        value = self.take(key, int, default)
        if not 1 <= value < 2**31:
            raise ConfigError(f"{self._where}: {key}={value!r} must lie between 1 and 2^31; use the model's own file")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        return float(self.take(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self.take(key, bool, default))

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse every value but these; a missing key is the first of them."""
        self._used.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{self._where}: {key}={value!r} is another architecture than ours, which has {allowed[0]!r}; "
                'use model.name = "transformers"'
            )

    def rope(self, theta: float = 10000.0) -> dict[str, Any]:
        """Rotary angles, in either form of the file: always "rope_theta" and "rope_type", and what the type needs."""
        self._used |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct"}
        new, old = self._values.get("rope_parameters") or {}, self._values.get("rope_scaling") or {}
        if not isinstance(new, dict) or not isinstance(old, dict):
            raise ConfigError(f"{self._where}: rope_scaling must be a table; use the model's own config.json")
        merged = {"rope_theta": self._values.get("rope_theta", theta), **old, **new}
        merged["rope_type"] = merged.pop("type", None) or merged.get("rope_type") or "default"
        for key, value in merged.items():
            if key != "rope_type" and (not isinstance(value, int | float) or isinstance(value, bool)):
                raise ConfigError(f"{self._where}: rope {key}={value!r} must be a number; use the model's own file")
        return merged

    def refuse_rest(self) -> None:
        """Raise ConfigError for keys that ask for code, and for those that nobody asked for."""
        code = sorted(key for key in self._values if CODE.search(key))
        if code:
            raise ConfigError(
                f"{self._where}: {', '.join(code)} asks for code or files from elsewhere, which is never run here; "
                "remove the key"
            )
        for key, value in _NEVER.items():
            self.only(key, value)
        unknown = sorted(set(self._values) - self._used)
        if unknown:
            raise ConfigError(
                f"{self._where}: {', '.join(unknown[:10])} may change what the model computes, and is not known here; "
                'remove it if it does not, or use model.name = "transformers"'
            )


def plain_rope(rope: Mapping[str, Any], where: str = "config.json") -> float:
    """The base of unscaled rotary angles; raises ConfigError for scaled ones."""
    if rope["rope_type"] != "default":
        raise ConfigError(f"{where}: rope type {rope['rope_type']!r} is not known for this architecture")
    return float(rope["rope_theta"])
