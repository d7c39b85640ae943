"""The ids that are added before and after a text.
The tokenizer's files define them, unless [data] overrides them.

Training, ``generate``, ``evaluate`` and ``data show`` put BOS before a text only if the tokenizer's files
do. For example, GPT-2, Pythia and SmolLM2 have a BOS token but do not add it, while Llama 3 adds it. If the
tokenizer has EOS, each training document ends with it, because a model that has never seen EOS does not
generate it. A prompt has no EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.config.schema import Data
from shardtrain.config.schema.data_options import END_OPTIONS
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class Ends:
    """The ids to add before a text (prefix), after it (suffix), and then before the next document (separator)."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    separator: tuple[int, ...] = ()

    @property
    def after(self) -> tuple[int, ...]:
        """All ids to add after a text."""
        return self.suffix + self.separator

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a text with the prefix, unless the text already begins with it."""
        has_prefix = tuple(tokens[: len(self.prefix)]) == self.prefix
        return list(tokens) if has_prefix else [*self.prefix, *tokens]


def ends_of(tokenizer: Tokenizer, data: Data) -> Ends:
    """Return the ids to add before and after a document, such as BOS and EOS. A prompt gets only the prefix.

    Raises:
        ConfigError: an option requires an end that the tokenizer does not have, or the separator has no
            tokens.
    """
    # By default, use the tokens that the tokenizer itself adds. If it adds none at the end, use its EOS.
    prefix = tokenizer.prefix_ids
    suffix = tokenizer.suffix_ids or _known(tokenizer.eos_id)
    if data.add_bos:
        prefix = prefix or _known(tokenizer.bos_id)
    elif data.add_bos is False:
        prefix = ()
    if data.add_eos is False:
        suffix = ()
    for option, value, ids, position in (
        ("data.add_bos", data.add_bos, prefix, "begins"),
        ("data.add_eos", data.add_eos, suffix, "ends"),
    ):
        if value and not ids:
            raise ConfigError(
                Problem(
                    option,
                    value,
                    rule=(
                        f"requires a token that {position} a text, which the tokenizer {tokenizer.spec} does not have"
                    ),
                    fix="remove it, or name the token in tokenizer_config.json",
                )
            )

    # Encode the text between documents. It may contain special tokens.
    separator: tuple[int, ...] = ()
    if data.separator is not None:
        separator = tuple(tokenizer.encode_spans([data.separator])[0][0].tolist())
        if not separator:
            raise ConfigError(
                Problem(
                    "data.separator",
                    data.separator,
                    rule=f"has no tokens in the tokenizer {tokenizer.spec}",
                    fix="use another text, or remove it",
                )
            )
    return Ends(prefix, suffix, separator)


def described(tokenizer: Tokenizer, data: Data) -> str:
    """Return a line for the log: the tokens that begin and end a document."""
    ends = ends_of(tokenizer, data)
    begin = _as_text(tokenizer, ends.prefix)
    end = _as_text(tokenizer, ends.after)
    options = []
    for name in END_OPTIONS:
        value = getattr(data, name)
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else repr(value)
            options.append(f"data.{name}={text}")
    source = ", ".join(options) if options else "from the tokenizer"
    return f"documents begin with {begin} and end with {end} ({source})"


def _known(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _as_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return repr(tokenizer.decode(list(ids), keep_special=True)) if ids else "nothing added"
