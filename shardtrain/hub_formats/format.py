"""How a model is written in the format of the Hugging Face hub, as data beside the model; no torch is imported.

A model file that has such a form carries one ``HUB``: the names of tensors, and two functions between ``config.json``
and the model's Config. A reader knows every key that the architecture's class in ``transformers`` knows, so whatever
else a file says changes nothing there either, and is kept and reported.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardtrain.utils.errors import ConfigError


class OnlyInTransformers(ConfigError):
    """A model that is not shardtrain's, but may be one of the classes of ``transformers``."""


TRANSFORMERS_HINT = '; use model.name = "transformers"'
"""What a user of a model file of ours can do; where a folder says what to use, it is done."""


@dataclass(frozen=True)
class ExpertTensors:
    """Row e of our tensor's first dimension is their tensor number e: ``#`` in ``name`` stands for the number."""

    name: str


@dataclass(frozen=True)
class MergedExperts:
    """Row e of our tensor's first dimension is their matrices number e, one below the other: one of each of ``names``.

    ``#`` in a name stands for the number.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Heads:
    """Their tensor holds ``parts`` of ours head by head, all parts of head 0 first: ours is number ``part``."""

    name: str
    part: int
    parts: int


@dataclass(frozen=True)
class Stacked:
    """Their tensor holds all experts, as ours does, and ``parts`` of ours one after another in its last dimension.

    ``interleaved`` lays the parts in turn, feature by feature; ``transposed`` has the inputs of a matrix before its
    outputs, (E, I, O) for our (E, O, I).
    """

    name: str
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    transposed: bool = True


Source = str | ExpertTensors | MergedExperts | Heads | Stacked
"""Where one of our tensors lies in their file; a plain name is a tensor of the same shape."""


class TensorPiece(NamedTuple):
    """A box of our tensor, and the equal one of theirs: one slice per dimension.

    Where theirs has a dimension less, our first one is the number of an expert, and its slice is one wide. Where it is
    ``transposed``, the last two dimensions of theirs are ours in the other order. The last slice of theirs may have a
    step.
    """

    name: str
    theirs: tuple[slice, ...]
    ours: tuple[slice, ...]
    transposed: bool = False


class MultimodalModel(NamedTuple):
    """The architecture of which one of ours is a part: a model of text within one of images and text."""

    model_type: str
    architecture: str
    key: str
    """Where its config.json describes the part."""
    prefix: str
    """What its names of the part's tensors begin with."""

    def part_of(self, config: Mapping[str, Any], hub: HubFormat) -> Mapping[str, Any] | None:
        """The config.json of the part, from that of the whole; None where this is not the whole."""
        # The type of the weights and their quantisation stand above the parts
        part = config.get(self.key)
        if config.get("model_type") != self.model_type or not isinstance(part, dict):
            return None
        above = {key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in config}
        own = {"architectures": [hub.architecture], "model_type": hub.model_type}
        return {**above, **{key: value for key, value in part.items() if value is not None or key not in above}, **own}


@dataclass(frozen=True)
class HubFormat:
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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the class in ``transformers`` takes for a key that config.json lacks, where null means something else."""
    whole: MultimodalModel | None = None
    """The architecture of which this is a part, whose folders are read too; the rest of them is left out."""
    unused: Callable[[Mapping[str, Any]], set[str]] = lambda _: set()
    """Fields of the Config that take no part in what it computes, by the values of all of them."""

    def source(self, name: str, config: Any = None) -> Source | None:
        """Where our tensor lies, its layer's number filled in; None where their format has no place for it.

        >>> hub = HubFormat("A", "a", {"layers.*.w": "model.layers.*.u"}, lambda _: {}, lambda _: {})
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
            if isinstance(source, MergedExperts):
                return MergedExperts(tuple(name.replace("*", layer) for name in source.names))
            return replace(source, name=source.name.replace("*", layer))
        return None

    def own_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a config.json says of this architecture, where it may be that of the whole."""
        return (self.whole.part_of(config, self) if self.whole is not None else None) or config

    @property
    def prefix(self) -> str:
        """What names of tensors may begin with beyond those of this architecture."""
        return self.whole.prefix if self.whole is not None else ""

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of theirs is skipped on purpose."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def pieces(source: Source, shape: tuple[int, ...], head_dim: int) -> Iterator[TensorPiece]:
    """The boxes that make our tensor of ``shape``; for ``Heads``, of rows that are heads of ``head_dim`` each.

    >>> [piece.name for piece in pieces(ExpertTensors("experts.#.w"), (2, 3, 4), 0)]
    ['experts.0.w', 'experts.1.w']
    >>> [(piece.name, piece.ours[1]) for piece in pieces(MergedExperts(("#.gate", "#.up")), (1, 4, 3), 0)]
    [('0.gate', slice(0, 2, None)), ('0.up', slice(2, 4, None))]
    >>> piece = list(pieces(Heads("qkv", 1, 3), (4, 5), 2))[1]
    >>> piece.theirs[0], piece.ours[0]
    (slice(8, 10, None), slice(2, 4, None))
    >>> next(pieces(Stacked("gate_up", 1, 2, interleaved=True), (4, 6, 5), 0)).theirs
    (slice(0, 4, None), slice(0, 5, None), slice(1, 12, 2))
    """
    whole = tuple(slice(0, size) for size in shape)
    if isinstance(source, str):
        yield TensorPiece(source, whole, whole)
    elif isinstance(source, ExpertTensors):
        for expert in range(shape[0]):
            yield TensorPiece(source.name.replace("#", str(expert)), whole[1:], (slice(expert, expert + 1), *whole[1:]))
    elif isinstance(source, MergedExperts):
        rows = shape[1] // len(source.names)
        rest = whole[2:]
        for expert in range(shape[0]):
            for part, name in enumerate(source.names):
                own = (slice(expert, expert + 1), slice(part * rows, (part + 1) * rows), *rest)
                yield TensorPiece(name.replace("#", str(expert)), (slice(0, rows), *rest), own)
    elif isinstance(source, Stacked):
        experts, *inputs = (whole[0], *whole[2:]) if source.transposed else whole[:-1]
        outputs = shape[1] if source.transposed else shape[-1]
        packed = slice(source.part * outputs, (source.part + 1) * outputs)
        if source.interleaved:
            packed = slice(source.part, outputs * source.parts, source.parts)
        yield TensorPiece(source.name, (experts, *inputs, packed), whole, source.transposed)
    else:
        for head in range(shape[0] // head_dim):
            begin = (head * source.parts + source.part) * head_dim
            yield TensorPiece(
                source.name,
                (slice(begin, begin + head_dim), *whole[1:]),
                (slice(head * head_dim, (head + 1) * head_dim), *whole[1:]),
            )


FREE = {"norm_type", "depth_init", "init_std"}
"""Fields of a Config that config.json does not say: how weights start, and how a norm is computed."""
CHANGEABLE = re.compile(r"rope_.*|mscale.*|sliding_window|attention_chunk_size|.*(dropout|pdrop).*")
"""Fields in which a run may differ from the weights that it loads: positions, attention window and dropout."""
GENERATION_KEYS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time", "stop_strings",
    "do_sample", "num_beams", "num_beam_groups", "penalty_alpha", "cache_implementation", "cache_config",
    "return_legacy_cache", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "diversity_penalty", "repetition_penalty", "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids", "renormalize_logits", "constraints",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "token_healing", "guidance_scale",
    "watermarking_config", "num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate",
}  # fmt: skip
"""Keys of generation_config.json, which older versions of transformers keep in config.json."""
_HARMLESS = GENERATION_KEYS | {
    "_name_or_path", "architectures",
    "sep_token_id", "cls_token_id", "unk_token_id", "prefix", "tokenizer_class", "task_specific_params",
    "dtype", "torch_dtype", "use_bfloat16", "torchscript", "fsdp", "tf_legacy_loss", "finetuning_task",
    "initializer_range", "max_position_embeddings", "original_max_position_embeddings", "model_type",
    "output_router_logits", "pretraining_tp", "transformers_version", "use_cache", "max_window_layers",
    "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "classifier_dropout",
    "is_decoder", "return_dict", "id2label", "label2id", "num_labels", "problem_type", "output_attentions",
    "output_hidden_states", "qk_head_dim", "chunk_size_feed_forward", "is_encoder_decoder", "tie_encoder_decoder",
    "add_cross_attention", "cross_attention_hidden_size", "pruned_heads",
}  # fmt: skip
"""Keys of config.json that change no number of a forward without dropout, or repeat what other keys say."""
CODE = re.compile(r"auto_map|_implementation|remote_code|custom_pipelines|_commit_hash")
"""Keys that ask for code, or for files from elsewhere. They are never followed."""
_NOT_APPLIED = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "router_jitter_noise": 0.0
}  # fmt: skip
"""Keys that change training alone, in ways that no model of ours has; None as good as their values here."""


class Fields:
    """The keys of a ``config.json``: each is asked for by name; ``rest`` judges those that nobody asked for."""

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        """``defaults`` are the values of keys that are missing; one that is there and null is not missing."""
        self._values = {**(defaults or {}), **values}
        self._where = where
        self._used = set(_HARMLESS)
        self._used |= set(defaults or {}) - set(values)

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
            said = f"{key}={value!r}" if key in self._values else f"{key} is missing, and"
            raise ConfigError(f"{self._where}: {said} must be a {wanted}; use the model's own config.json")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least`` to 2^31."""
        value = self.take(key, int, default)
        if not least <= value < 2**31:
            raise ConfigError(
                f"{self._where}: {key}={value!r} must lie between {least} and 2^31; use the model's own file"
            )
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        return float(self.take(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self.take(key, bool, default))

    def only(self, key: str, *allowed: Any) -> None:
        """Leave every value but these to ``transformers``; a missing key is the first of them.

        Raises:
            OnlyInTransformers: for another value.
        """
        self._used.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise self.other(f"{key}={value!r} is another architecture than ours, which has {allowed[0]!r}")

    def must_be(self, key: str, allowed: Any) -> None:
        """Refuse every value but one, which the class in ``transformers`` computes whatever the file says."""
        self._used.add(key)
        value = self._values.get(key)
        if value is not None and value != allowed:
            raise ConfigError(
                f"{self._where}: {key}={value!r} is computed neither here nor by transformers, which both have "
                f"{allowed!r}; write a model file for it"
            )

    def full_attention(self) -> None:
        """Leave windows that only some layers have to ``transformers``; they are off unless ``use_sliding_window``."""
        kinds = set(self.take("layer_types", list, []))
        self._used |= {"use_sliding_window", "sliding_window", "max_window_layers"}
        windowed = self._values.get("use_sliding_window") and self._values.get("sliding_window") is not None
        # Layers from max_window_layers on have the window: none has, where that is beyond the last
        first = self._values.get("max_window_layers")
        beyond = isinstance(first, int) and first >= self.take("num_hidden_layers", int, 0) and not kinds
        if kinds - {"full_attention"} or (windowed and not beyond and kinds != {"full_attention"}):
            raise self.other("use_sliding_window or layer_types give some layers a window, which ours does not")

    def other(self, what: str) -> OnlyInTransformers:
        """The error for a model that may be one of the classes of ``transformers``."""
        return OnlyInTransformers(f"{self._where}: {what}{TRANSFORMERS_HINT}")

    def rope(self, base: str = "rope_theta", share: str = "") -> dict[str, Any]:
        """Rotary angles, in either form of the file: always "rope_theta" and "rope_type", and what the type needs.

        ``base`` and ``share`` are the older keys of the base and of the part of each head that is turned. As in
        ``transformers``, ``rope_scaling`` goes before ``rope_parameters``, and ``rope_type`` before ``type``.

        Raises:
            OnlyInTransformers: for what is not a number, and a part of each head where ``share`` is empty.
        """
        self._used |= {base, share, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
        tables = [self._values.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
        if not all(isinstance(table, dict) for table in tables):
            raise ConfigError(f"{self._where}: rope_scaling must be a table; use the model's own config.json")

        # Base and share may be in the table or beside it, as older files have them
        rope = dict(tables[0] or tables[1])
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = tables[1].get("rope_theta") or self._values.get(base) or 10000.0
        if rope.get("partial_rotary_factor") is None:
            part = self._values.get(share or "partial_rotary_factor")
            rope["partial_rotary_factor"] = 1.0 if part is None else part
        older_type = rope.pop("type", None)
        rope["rope_type"] = rope.get("rope_type") or older_type or "default"
        if rope["rope_type"] in ("llama3", "yarn"):
            length = self._values.get("original_max_position_embeddings")
            length = length or rope.get("original_max_position_embeddings")
            rope["original_max_position_embeddings"] = length or self._values.get("max_position_embeddings")

        for key, value in rope.items():
            if key not in ("rope_type", "truncate") and (not isinstance(value, int | float) or isinstance(value, bool)):
                raise self.other(f"rope {key}={value!r} is not a number")
        if not share and rope["partial_rotary_factor"] != 1.0:
            raise self.other("partial_rotary_factor other than 1 is not known for this architecture")
        return rope

    def rope_number(self, rope: Mapping[str, Any], key: str) -> float:
        """A number that the type of the rotary angles needs; raises ConfigError where it is missing."""
        if key not in rope:
            raise ConfigError(
                f"{self._where}: rotary angles of type {rope['rope_type']!r} need {key}, which is missing; "
                "use the model's own config.json"
            )
        return float(rope[key])

    def plain_rope(self, base: str = "rope_theta", share: str = "") -> dict[str, Any]:
        """Unscaled rotary angles; raises OnlyInTransformers for scaled ones."""
        rope = self.rope(base, share)
        if rope["rope_type"] != "default":
            raise self.other(f"rope type {rope['rope_type']!r} is not known for this architecture")
        return rope

    def rest(self, architecture: str) -> tuple[str, ...]:
        """Lines on keys that change nothing here, although they may look as if they did."""
        notices = []
        asks = sorted(key for key in self._values if CODE.search(key) and key not in _HARMLESS)
        if asks:
            notices.append(
                f"{self._where}: {', '.join(asks)} asks for code or files from elsewhere, which is never run here; "
                f"the model is {architecture}, whose code is here"
            )
        train = [
            f"{k}={self._values[k]!r}" for k, none in _NOT_APPLIED.items() if self._values.get(k) not in (None, none)
        ]
        if train:
            notices.append(f"{self._where}: {', '.join(train)} changes training elsewhere, and is not applied here")
        unknown = sorted(set(self._values) - self._used - set(asks) - set(_NOT_APPLIED))
        if unknown:
            notices.append(
                f"{self._where}: {', '.join(unknown[:20])} is not used by {architecture}, in transformers neither; "
                "it is kept and changes nothing"
            )
        return tuple(notices)
