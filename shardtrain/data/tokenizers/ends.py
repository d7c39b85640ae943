"""What comes before and after a text: the ids that its tokenizer's own files put there, unless [data] says otherwise.

A tokenizer that is not told to begin a text with bos does not do so in training, in ``generate``, in ``evaluate`` or in
``data show``: GPT-2's, Pythia's and SmolLM2's name a bos and put none, Llama 3's puts one. eos ends each document that
is trained on, wherever the tokenizer has one, since a model that has never seen an end makes none; a prompt to be
continued has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.config.schema import Data
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class Ends:
    """Ids before a text, after it, and between it and the next document."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    separator: tuple[int, ...] = ()

    @property
    def after(self) -> tuple[int, ...]:
        """All ids that follow a text in a document."""
        return self.suffix + self.separator

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """Put the prefix before the tokens of a text, unless the text spells it out."""
        has_prefix = tuple(tokens[: len(self.prefix)]) == self.prefix
        return list(tokens) if has_prefix else [*self.prefix, *tokens]


def ends_of(tokenizer: Tokenizer, data: Data) -> Ends:
    """The ends of a document; ``prefix`` alone is that of a prompt.

    Raises:
        ConfigError: when an end is asked for that the tokenizer has not, or the separator has no tokens.
    """
    # The tokenizer's own ends, and eos where it has one, unless an option says otherwise.
    prefix = tokenizer.prefix_ids
    suffix = tokenizer.suffix_ids or _known(tokenizer.eos_id)
    if data.add_bos:
        prefix = prefix or _known(tokenizer.bos_id)
    elif data.add_bos is False:
        prefix = ()
    if data.add_eos is False:
        suffix = ()
    for option, value, found, name in (
        ("data.add_bos", data.add_bos, prefix, "begins"),
        ("data.add_eos", data.add_eos, suffix, "ends"),
    ):
        if value and not found:
            rule = f"asks for what the tokenizer {tokenizer.spec} has not, a token that {name} a text"
            raise ConfigError(Problem(option, value, rule, "remove it, or name the token in tokenizer_config.json"))

    # Between documents: a text, in which special tokens may be spelled out.
    separator: tuple[int, ...] = ()
    if data.separator is not None:
        separator = tuple(tokenizer.encode_spans([data.separator])[0][0].tolist())
        if not separator:
            rule = f"has no tokens in the tokenizer {tokenizer.spec}"
            raise ConfigError(Problem("data.separator", data.separator, rule, "use another text, or remove it"))
    return Ends(prefix, suffix, separator)


def described(tokenizer: Tokenizer, data: Data) -> str:
    """What begins and ends a document, in words, for the log."""
    ends = ends_of(tokenizer, data)
    begins = _spelled(tokenizer, ends.prefix)
    stops = _spelled(tokenizer, ends.after)
    asked = [
        f"data.{name}={str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name in ("add_bos", "add_eos", "separator")
        if (value := getattr(data, name)) is not None
    ]
    why = ", ".join(asked) if asked else "as the tokenizer says"
    return f"a text begins with {begins} and ends with {stops} ({why})"


def _known(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return repr(tokenizer.decode(list(ids), keep_special=True)) if ids else "nothing added"
