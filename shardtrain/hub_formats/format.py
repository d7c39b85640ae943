"""Translation between a native model and its Hugging Face format, as data. Does not import torch.

Each architecture defines one ``HUB``: the names of its tensors, and two functions that convert ``config.json`` to the
model's Config and back. They know every key that the architecture's class in ``transformers`` reads. Other keys have
no effect there either, so they are kept and reported.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardtrain.utils.errors import ConfigError


class OnlyInTransformers(ConfigError):
    """The architecture has no native implementation, but ``transformers`` may have a class for it."""


TRANSFORMERS_HINT = '; use model.name = "transformers"'
"""Fix for a folder without a native implementation. ``train`` applies it where the folder chooses the model."""


@dataclass(frozen=True)
class ExpertTensors:
    """One hub tensor per expert. Ours stacks them in its first dimension. ``#`` in ``name`` is the expert's number."""

    name: str


@dataclass(frozen=True)
class MergedExperts:
    """Several hub tensors per expert, such as gate and up projection. Ours concatenates them along the rows.

    The first dimension of ours is the expert. ``#`` in a name is the expert's number.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Heads:
    """A fused hub tensor, such as QKV, that interleaves ``parts`` tensors by head. Ours is number ``part``.

    The rows of head 0 of all parts come first, then those of head 1.
    """

    name: str
    part: int
    parts: int


@dataclass(frozen=True)
class Stacked:
    """A hub tensor of all experts that concatenates ``parts`` of our tensors along its last dimension.

    Attributes:
        part: The number of our tensor.
        interleaved: The parts alternate feature by feature instead of following each other.
        transposed: The hub tensor is (E, I, O), with inputs before outputs, where ours is (E, O, I).
    """

    name: str
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    transposed: bool = True


@dataclass(frozen=True)
class HeadGroups:
    """A hub tensor that concatenates parts by rows, such as all queries, all keys and all values.

    Our tensor orders its rows by group of heads: group 0 of all parts comes first, then group 1.

    Attributes:
        widths: Rows of each part per group.
    """

    name: str
    widths: tuple[int, ...]


Source = str | ExpertTensors | MergedExperts | Heads | Stacked | HeadGroups
"""Location of one of our tensors in the hub format. A string is the name of a tensor of the same shape."""


class TensorPiece(NamedTuple):
    """A box of our tensor and the equal box of a hub tensor, with one slice per dimension.

    If the hub tensor has one dimension less, the first dimension of ours is the expert, and its slice has length 1. If
    it is ``transposed``, its last two dimensions are those of ours in reverse order. Its last slice may have a step.
    """

    name: str
    theirs: tuple[slice, ...]
    ours: tuple[slice, ...]
    transposed: bool = False


class MultimodalModel(NamedTuple):
    """A multimodal architecture that contains one of ours as its text model.

    Attributes:
        key: The key of its config.json that contains the text model's configuration.
        prefix: The prefix of the text model's tensor names.
    """

    model_type: str
    architecture: str
    key: str
    prefix: str

    def text_config(self, config: Mapping[str, Any], hub: HubFormat) -> Mapping[str, Any] | None:
        """Return the text model's configuration. None if ``config`` is not of this multimodal architecture."""
        text = config.get(self.key)
        if config.get("model_type") != self.model_type or not isinstance(text, dict):
            return None
        # The dtype and the quantization of the weights are at the top level. The text model may repeat them.
        shared = {
            key: config[key]
            for key in ("dtype", "torch_dtype", "quantization_config")
            if key in config
        }
        # A null in the text model's table must not hide the value of the top level.
        specific = {
            key: value for key, value in text.items() if value is not None or key not in shared
        }
        return {
            # The text model is read as if its folder contained nothing else.
            **shared,
            **specific,
            "architectures": [hub.architecture],
            "model_type": hub.model_type,
        }


@dataclass(frozen=True)
class HubFormat:
    """The Hugging Face format of one architecture.

    Attributes:
        names: Our tensor name -> its location. ``*`` is a layer number, equal on both sides.
        read: Converts config.json to fields of the model's Config.
        write: Converts the model's Config to keys of config.json, without those that all architectures share.
        ignored: Globs of hub tensors that are skipped: they can be computed, or the native model does not use them.
        renamed: Returns locations that depend on the model's Config and replace those in ``names``.
        defaults: Values that the class in ``transformers`` uses for missing keys. A null is not a missing key.
        multimodal: The multimodal architecture that contains this one. Its folders can be read too, without the other
            parts.
        unused: Returns the fields of the Config that have no effect, given the values of all fields.
        copies: Returns hub tensors that repeat one of our tensors, for the model's Config: their name -> our name.
            An export writes them, and an import requires that they are equal, if they exist.
    """

    architecture: str
    model_type: str
    names: Mapping[str, Source]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    ignored: tuple[str, ...] = ()
    renamed: Callable[[Any], Mapping[str, Source]] = lambda _: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)
    multimodal: MultimodalModel | None = None
    unused: Callable[[Mapping[str, Any]], set[str]] = lambda _: set()
    copies: Callable[[Any], Mapping[str, str]] = lambda _: {}

    def source(self, name: str, config: Any = None) -> Source | None:
        """Return the location of our tensor ``name``, with its layer number. None if the hub format lacks it.

        >>> hub = HubFormat("A", "a", {"layers.*.w": "model.layers.*.u"}, lambda _: {}, lambda _: {})
        >>> hub.source("layers.3.w"), hub.source("head")
        ('model.layers.3.u', None)
        """
        # Locations that depend on the Config replace those of the same name.
        for pattern, source in {**self.names, **self.renamed(config)}.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
            if match is None:
                continue
            # Only patterns with a layer have a group.
            layer = match[1] if match.groups() else ""
            if isinstance(source, str):
                return source.replace("*", layer)
            if isinstance(source, MergedExperts):
                return MergedExperts(tuple(name.replace("*", layer) for name in source.names))
            return replace(source, name=source.name.replace("*", layer))
        return None

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the configuration of this architecture from a config.json, which may be multimodal."""
        if self.multimodal is None:
            return config
        return self.multimodal.text_config(config, self) or config

    @property
    def prefix(self) -> str:
        """Prefix that tensor names have in a multimodal folder, or ""."""
        return self.multimodal.prefix if self.multimodal is not None else ""

    def is_ignored(self, name: str) -> bool:
        """True if a hub tensor is skipped intentionally."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def pieces(source: Source, shape: tuple[int, ...], head_dim: int) -> Iterator[TensorPiece]:
    """Yield the boxes that make up our tensor of ``shape``. Only ``Heads`` uses ``head_dim``, the rows of a head.

    >>> [piece.name for piece in pieces(ExpertTensors("experts.#.w"), (2, 3, 4), 0)]
    ['experts.0.w', 'experts.1.w']
    >>> [(piece.name, piece.ours[1]) for piece in pieces(MergedExperts(("#.gate", "#.up")), (1, 4, 3), 0)]
    [('0.gate', slice(0, 2, None)), ('0.up', slice(2, 4, None))]
    >>> piece = list(pieces(Heads("qkv", 1, 3), (4, 5), 2))[1]
    >>> piece.theirs[0], piece.ours[0]
    (slice(8, 10, None), slice(2, 4, None))
    >>> next(pieces(Stacked("gate_up", 1, 2, interleaved=True), (4, 6, 5), 0)).theirs
    (slice(0, 4, None), slice(0, 5, None), slice(1, 12, 2))
    >>> [(piece.ours[0].start, piece.theirs[0].start) for piece in pieces(HeadGroups("qv", (1, 3)), (8,), 0)]
    [(0, 0), (1, 2), (4, 1), (5, 5)]
    """
    if isinstance(source, str):
        full = _full(shape)
        yield TensorPiece(source, full, full)
    elif isinstance(source, ExpertTensors):
        matrix = _full(shape[1:])
        for expert in range(shape[0]):
            name = source.name.replace("#", str(expert))
            yield TensorPiece(name, matrix, (slice(expert, expert + 1), *matrix))
    elif isinstance(source, MergedExperts):
        yield from _merged_expert_pieces(source, shape)
    elif isinstance(source, Stacked):
        yield _stacked_piece(source, shape)
    elif isinstance(source, HeadGroups):
        yield from _head_group_pieces(source, shape)
    else:
        yield from _head_pieces(source, shape, head_dim)


def _full(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _merged_expert_pieces(source: MergedExperts, shape: tuple[int, ...]) -> Iterator[TensorPiece]:
    rows = shape[1] // len(source.names)
    columns = _full(shape[2:])
    # All parts have the same number of rows, so each has its share of ours.
    theirs = (slice(0, rows), *columns)
    for expert in range(shape[0]):
        for part, name in enumerate(source.names):
            part_rows = slice(part * rows, (part + 1) * rows)
            ours = (slice(expert, expert + 1), part_rows, *columns)
            yield TensorPiece(name.replace("#", str(expert)), theirs, ours)


def _stacked_piece(source: Stacked, shape: tuple[int, ...]) -> TensorPiece:
    full = _full(shape)
    # The hub tensor packs the parts along the outputs, which are last in it, but not always in ours.
    if source.transposed:
        num_outputs = shape[1]
        leading = (full[0], *full[2:])
    else:
        num_outputs = shape[-1]
        leading = full[:-1]
    if source.interleaved:
        # Interleaved parts alternate: output i of this part is number i * parts + part.
        packed = slice(source.part, num_outputs * source.parts, source.parts)
    else:
        packed = slice(source.part * num_outputs, (source.part + 1) * num_outputs)
    return TensorPiece(source.name, (*leading, packed), full, source.transposed)


def _head_group_pieces(source: HeadGroups, shape: tuple[int, ...]) -> Iterator[TensorPiece]:
    rest = _full(shape[1:])
    num_groups = shape[0] // sum(source.widths)
    # In the hub tensor, the parts follow each other. In ours, the groups do.
    for group in range(num_groups):
        our_start = group * sum(source.widths)
        part_start = 0
        for width in source.widths:
            their_start = part_start + group * width
            yield TensorPiece(
                source.name,
                (slice(their_start, their_start + width), *rest),
                (slice(our_start, our_start + width), *rest),
            )
            our_start += width
            part_start += num_groups * width


def _head_pieces(source: Heads, shape: tuple[int, ...], head_dim: int) -> Iterator[TensorPiece]:
    rest = _full(shape[1:])
    num_heads = shape[0] // head_dim
    for head in range(num_heads):
        # Each head of the hub tensor contains the rows of all parts.
        begin = (head * source.parts + source.part) * head_dim
        theirs = slice(begin, begin + head_dim)
        ours = slice(head * head_dim, (head + 1) * head_dim)
        yield TensorPiece(source.name, (theirs, *rest), (ours, *rest))


FREE = {"norm_type", "depth_init", "init_std", "num_nextn_predict_layers"}
"""Fields of a Config that are not read from config.json: initialization, the implementation of norms, and multi-token
prediction, which a run turns on itself."""
CHANGEABLE = re.compile(r"rope_.*|mscale.*|sliding_window|attention_chunk_size|.*(dropout|pdrop).*")
"""Fields that a run may change when it loads weights: positions, attention window and dropout."""
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
"""Keys of generation_config.json. Older versions of transformers write them to config.json."""
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
"""Keys of config.json that do not affect a forward pass without dropout, or that repeat other keys."""
CODE = re.compile(r"auto_map|_implementation|remote_code|custom_pipelines|_commit_hash")
"""Keys that name code or files to download. They are ignored."""
_NOT_APPLIED = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "router_jitter_noise": 0.0
}  # fmt: skip
"""Keys that only affect training and that native models do not implement, with the value that disables each.

None disables them, too.
"""


def values_of(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a native Config as keys of config.json. ``names`` maps ours to theirs."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


class Fields:
    """Typed access to the keys of a ``config.json``. ``notices`` reports the keys that were not read."""

    def __init__(
        self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """``defaults`` are the values of missing keys. A null is not a missing key."""
        self._values = {**(defaults or {}), **values}
        self._where = where
        # A default is not a key of the file, so ``notices`` does not report it as unknown.
        missing_keys = set(defaults or {}) - set(values)
        self._used = set(_HARMLESS) | missing_keys

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if it is missing or null.

        Raises:
            ConfigError: the type is not ``kind``, or the key is missing and there is no default.
        """
        self._used.add(key)
        value = self._values.get(key)
        if value is None:
            value = default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # Some files write 1.0 as 1. A bool is an int in Python, but is not accepted for a number.
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            subject = f"{key}={value!r}" if key in self._values else f"{key} is missing, and"
            raise ConfigError(
                f"{self._where}: {subject} must be a {wanted}; use the model's own config.json"
            )
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer from ``least`` to 2^31 - 1."""
        value = self.take(key, int, default)
        if not least <= value < 2**31:
            raise ConfigError(
                f"{self._where}: {key}={value!r} must be between {least} and 2^31; use the model's own file"
            )
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float. Integers are converted."""
        return float(self.take(key, float, default))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return bool(self.take(key, bool, default))

    def only(self, key: str, *allowed: Any) -> None:
        """Check that a key is missing or has a value that the native model implements, the first by default.

        Raises:
            OnlyInTransformers: it has another value.
        """
        self._used.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise self.other(
                f"{key}={value!r} has no native implementation, which supports {allowed[0]!r}"
            )

    def must_be(self, key: str, allowed: Any) -> None:
        """Reject all other values: the class in ``transformers`` ignores this key and always computes ``allowed``.

        Raises:
            ConfigError: it has another value.
        """
        self._used.add(key)
        value = self._values.get(key)
        if value is not None and value != allowed:
            raise ConfigError(
                f"{self._where}: {key}={value!r} is implemented neither here nor in transformers, which both use "
                f"{allowed!r}; write a model file for it"
            )

    def full_attention(self) -> None:
        """Check that no layer has a sliding window. ``use_sliding_window`` is off by default.

        Raises:
            OnlyInTransformers: some layers have a window.
        """
        layer_types = set(self.take("layer_types", list, []))
        self._used |= {"use_sliding_window", "sliding_window", "max_window_layers"}
        is_enabled = bool(self._values.get("use_sliding_window"))
        has_window = is_enabled and self._values.get("sliding_window") is not None
        # Newer files list the type of each layer. The list takes precedence over the older keys.
        if layer_types == {"full_attention"}:
            has_window = False
        if not layer_types:
            # Layers from max_window_layers on have the window, so there is none if the model has fewer layers.
            first_layer = self._values.get("max_window_layers")
            num_layers = self.take("num_hidden_layers", int, 0)
            if isinstance(first_layer, int) and first_layer >= num_layers:
                has_window = False
        if has_window or layer_types - {"full_attention"}:
            raise self.other(
                "use_sliding_window or layer_types give some layers a window, which is not supported"
            )

    def other(self, what: str) -> OnlyInTransformers:
        """Return the error for a model without a native implementation, with ``transformers`` as the fix."""
        return OnlyInTransformers(f"{self._where}: {what}{TRANSFORMERS_HINT}")

    def rope(self, base: str = "rope_theta", share: str = "") -> dict[str, Any]:
        """Return the RoPE parameters: always "rope_theta" and "rope_type", and those that the type requires.

        Both formats of config.json are read. As in ``transformers``, ``rope_scaling`` takes precedence over
        ``rope_parameters``, and ``rope_type`` over ``type``.

        Args:
            base: The older key of the base (theta).
            share: The older key of the rotary fraction of each head, or "" if the model does not support one.

        Raises:
            ConfigError: a table is not a table.
            OnlyInTransformers: a parameter is not a number, or there is a rotary fraction and ``share`` is "".
        """
        # Count keys of both formats as used, even if the other format takes precedence.
        self._used |= {
            base,
            share,
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "partial_rotary_factor",
        }
        tables = [self._values.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
        if not all(isinstance(table, dict) for table in tables):
            raise ConfigError(
                f"{self._where}: rope_scaling must be a table; use the model's own config.json"
            )

        # Base and rotary fraction may be in the table or, in older files, at the top level.
        rope = dict(tables[0] or tables[1])
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = tables[1].get("rope_theta") or self._values.get(base) or 10000.0
        if rope.get("partial_rotary_factor") is None:
            fraction = self._values.get(share or "partial_rotary_factor")
            rope["partial_rotary_factor"] = 1.0 if fraction is None else fraction
        older_type = rope.pop("type", None)
        rope["rope_type"] = rope.get("rope_type") or older_type or "default"
        # Both types need the sequence length of the original model.
        if rope["rope_type"] in ("llama3", "yarn"):
            original = "original_max_position_embeddings"
            length = self._values.get(original) or rope.get(original)
            rope[original] = length or self._values.get("max_position_embeddings")

        # The arithmetic of RoPE must not fail on a text or a list from a damaged file.
        for key, value in rope.items():
            if key in ("rope_type", "truncate"):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise self.other(f"rope {key}={value!r} is not a number")
        if not share and rope["partial_rotary_factor"] != 1.0:
            raise self.other("partial_rotary_factor must be 1 for this architecture")
        return rope

    def rope_number(self, rope: Mapping[str, Any], key: str) -> float:
        """Return a parameter that the RoPE type requires. Raises ConfigError if it is missing."""
        if key not in rope:
            raise ConfigError(
                f"{self._where}: rope type {rope['rope_type']!r} requires {key}, which is missing; "
                "use the model's own config.json"
            )
        return float(rope[key])

    def plain_rope(self, base: str = "rope_theta", share: str = "") -> dict[str, Any]:
        """Return the parameters of unscaled RoPE. Raises OnlyInTransformers for scaled RoPE."""
        rope = self.rope(base, share)
        if rope["rope_type"] != "default":
            raise self.other(
                f"rope type {rope['rope_type']!r} is not supported for this architecture"
            )
        return rope

    def notices(self, architecture: str) -> tuple[str, ...]:
        """Return lines about keys without an effect that a user may expect to have one."""
        # Keys of code are reported first: a user may believe that the folder's own code runs.
        lines = []
        code_keys = sorted(key for key in self._values if CODE.search(key) and key not in _HARMLESS)
        if code_keys:
            lines.append(
                f"{self._where}: {', '.join(code_keys)} names code or files to download, which are never used; "
                f"the model is shardtrain's {architecture}"
            )

        # Dropout changes training, so a value that has no effect here must be visible.
        not_applied = []
        for key, disabled in _NOT_APPLIED.items():
            if self._values.get(key) not in (None, disabled):
                not_applied.append(f"{key}={self._values[key]!r}")
        if not_applied:
            lines.append(
                f"{self._where}: {', '.join(not_applied)} is not supported and not applied in training"
            )

        # The remaining keys are unknown to the class in transformers, too.
        unknown = sorted(set(self._values) - self._used - set(code_keys) - set(_NOT_APPLIED))
        if unknown:
            lines.append(
                f"{self._where}: {', '.join(unknown[:20])} is not used by {architecture}, nor by its class in "
                "transformers; it is kept and has no effect"
            )
        return tuple(lines)
