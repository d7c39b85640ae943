"""Read the files next to a tokenizer: special tokens, added tokens, and chat templates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import ConfigError, Problem

# The usual texts of BOS, EOS and padding. They are used only if no file names these tokens.
_USUAL_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|bos|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|eos|>"),
    "pad_token": ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>"),
}
END_TOKENS = tuple(_USUAL_NAMES)
MAX_IDS = 2**31
"""Maximum size of a vocabulary."""
_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"
_MAX_FILE_BYTES = 64 * 2**20
_FIX = "replace the file, or remove it"


@dataclass(frozen=True)
class AddedToken:
    """A token that was added to a trained vocabulary."""

    content: str
    special: bool


@dataclass
class TokenizerConfig:
    """Contents of the files next to a tokenizer. A token in ``tokens`` is None if a file sets it to null."""

    tokens: dict[str, str | None] = field(default_factory=dict)
    token_ids: dict[str, Any] = field(default_factory=dict)
    added: dict[int, AddedToken] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    switches: dict[str, bool] = field(default_factory=dict)
    """``add_bos_token`` and ``add_eos_token``, if a file contains them."""

    @property
    def chat_template(self) -> str | None:
        """Template for conversations without tools, or the only template."""
        return self.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """Separate template for conversations with tools, if there is one."""
        return self.templates.get("tool_use")

    def special_id(
        self,
        name: str,
        find: Callable[[str], int | None],
        special: Mapping[str, int],
        vocab_size: int,
        option: str,
    ) -> int | None:
        """Return the id of "bos_token", "eos_token" or "pad_token".

        Args:
            name: one of these names.
            find: returns the id of a token, given its text.
            special: the special tokens. If no file names the token, the usual names are looked up here.
            vocab_size: size of the vocabulary.
            option: option that names the tokenizer, for errors.

        Raises:
            ConfigError: a file names a token without an id, or an id outside the vocabulary.
        """
        number = self.token_ids.get(f"{name}_id")
        if number is not None and (type(number) is not int or not 0 <= number < vocab_size):
            raise ConfigError(
                Problem(
                    f"{option}: {name}_id",
                    number,
                    rule=f"is not in 0..{vocab_size - 1}, the ids of the tokenizer",
                    fix="correct tokenizer_config.json next to the tokenizer",
                )
            )
        if name not in self.tokens:
            if number is not None:
                return number
            for text in _USUAL_NAMES[name]:
                if text in special:
                    return special[text]
            return None
        # If a file sets the token to null, the tokenizer has no such token.
        token = self.tokens[name]
        token_id = None if token is None else find(token)
        if token is not None and token_id is None:
            raise ConfigError(
                Problem(
                    option,
                    None,
                    rule=f"names the {name} {token!r}, which has no id",
                    fix="correct tokenizer_config.json and special_tokens_map.json next to the tokenizer",
                )
            )
        return token_id

    def ends(
        self, bos_id: int | None, eos_id: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids to add before and after a text, for tokenizers that have no post-processor.

        By default these are BOS before a text and nothing after it, as for Llama's tokenizers.
        """
        adds_bos = self.switches.get("add_bos_token", True)
        adds_eos = self.switches.get("add_eos_token", False)
        prefix = (bos_id,) if adds_bos and bos_id is not None else ()
        suffix = (eos_id,) if adds_eos and eos_id is not None else ()
        return prefix, suffix

    def named(self) -> dict[str, str]:
        """Return the texts of the special tokens that have a name."""
        return {name: token for name, token in self.tokens.items() if token is not None}


def read_beside(folder: Path, option: str) -> TokenizerConfig:
    """Read special_tokens_map.json, tokenizer_config.json and chat templates in a folder, if they exist.

    A pipe or a broken link with such a name is an error. Without the file, tokens would silently differ.

    Raises:
        ConfigError: a file cannot be read or is not valid.
    """
    config = TokenizerConfig()
    for name in _CONFIGS:
        file = folder / name
        if os.path.lexists(file):
            _read_config(file, config, option)
    for file in sorted((folder / _TEMPLATES).glob("*.jinja")):
        config.templates[file.stem] = read_text(file, option)
    file = folder / _TEMPLATE
    if os.path.lexists(file):
        config.templates["default"] = read_text(file, option)
    return config


def files_beside(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files that ``read_beside`` reads, by their names in the folder.

    Raises:
        OSError: a file cannot be read.
    """
    templates = [f"{_TEMPLATES}/{file.name}" for file in (folder / _TEMPLATES).glob("*.jinja")]
    contents = {}
    for name in (*_CONFIGS, _TEMPLATE, *templates):
        if os.path.lexists(folder / name):
            contents[name] = bounded_reads.read_all(folder / name, _MAX_FILE_BYTES)
    return contents


def ends_facts(
    prefix_ids: tuple[int, ...], suffix_ids: tuple[int, ...], bos_id: int | None, eos_id: int | None
) -> bytes:
    """Return the facts for a fingerprint about the ids that are added before and after a text.

    Empty in the usual case, in which BOS is added before a text, and EOS or nothing after it. The
    fingerprint is then the same as in versions that supported only this case.
    """
    default_prefix = () if bos_id is None else (bos_id,)
    is_default = prefix_ids == default_prefix and suffix_ids in ((), (eos_id,))
    if is_default:
        return b""
    return f" ends {prefix_ids} {suffix_ids}".encode()


def read_text(file: Path, option: str) -> str:
    """Return the text of a small UTF-8 file.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8.
    """
    try:
        content = bounded_reads.start(file, _MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(
                Problem(
                    option,
                    str(file),
                    rule=f"is larger than {_MAX_FILE_BYTES} bytes",
                    fix=_FIX,
                )
            )
        return content.decode("utf-8-sig")
    except OSError as error:
        raise bounded_reads.unreadable(option, file, error, _FIX) from error
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(option, str(file), "is not UTF-8 text", _FIX)) from error


def _read_config(file: Path, config: TokenizerConfig, option: str) -> None:
    """Read one JSON file into the config."""

    def refusal(rule: str) -> ConfigError:
        return ConfigError(Problem(option, str(file), rule, _FIX))

    text = read_text(file, option)
    try:
        content: Any = checked_json.parse(text, memory_bytes=checked_json.LARGE_MEMORY_BYTES)
    except (ValueError, RecursionError) as error:
        raise refusal(f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise refusal("is not a JSON object")

    # Read named tokens, which are a text, an object with a text, or null. Booleans such as add_bos_token are
    # switches.
    for key, value in content.items():
        if key.endswith("_token_id"):
            config.token_ids[key] = value
        elif key.endswith("_token"):
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str) or value is None:
                config.tokens[key] = token
            elif isinstance(value, bool):
                config.switches[key] = value
            else:
                raise refusal(f"has a {key} that is not text")

    # Read the tokens that were added to the vocabulary, by id.
    added = content.get("added_tokens_decoder")
    if added is not None:
        try:
            for number, token in added.items():
                is_special = bool(token.get("special", False))
                config.added[int(number)] = AddedToken(str(token["content"]), is_special)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            rule = "has an added_tokens_decoder that is not an object of ids and tokens"
            raise refusal(rule) from error
        if any(number < 0 or not token.content for number, token in config.added.items()):
            raise refusal("has an added token without text, or with an id below 0")

    # Read the chat template, or several templates with names.
    template = content.get("chat_template")
    if isinstance(template, str):
        config.templates["default"] = template
    elif template is not None:
        try:
            config.templates.update({str(entry["name"]): entry["template"] for entry in template})
        except (KeyError, TypeError) as error:
            rule = "has a chat_template that is neither a text nor a list of names and templates"
            raise refusal(rule) from error
    if not all(isinstance(template, str) for template in config.templates.values()):
        raise refusal("has a chat_template that is not text")
