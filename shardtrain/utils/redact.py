"""Masking of secrets in text. A secret is recognized by the name of its environment variable or by its form.

``redact`` is applied to each log line, traceback, ``exit.json`` and resolved configuration, and to all
data for W&B. This module imports only the standard library, because every other module may import it.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "***"
"""Replacement of a secret."""

MIN_SECRET_LENGTH = 8
"""Shorter values are not masked. They are not secrets, and masking them would hide ordinary text."""

_SECRET_NAME = re.compile(
    r"TOKEN$|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|(^|_)(KEY|PAT|AUTH)$"
    r"|_(PASS|PWD|CREDS|COOKIE|BEARER)$",
    re.IGNORECASE,
)
# Public values that logs need. A commit has 40 hexadecimal digits, too.
_PUBLIC_NAME = re.compile(
    r"COMMIT|REVISION|(^|_)SHA\d*($|_)|HASH|DIGEST|(^|_)REF($|_)", re.IGNORECASE
)
# Options that may contain a secret although they are not named like a secret variable.
_SECRET_OPTION = re.compile(
    r"(^|_)(WANDB|PWD|PIN|CREDS|COOKIE|BEARER|PASS|PASSCODE)$|AUTH(?!ORS?(_|$))", re.IGNORECASE
)
_NO_SECRET = re.compile(
    r"None|True|False|[-+.\deE]{0,5}|true|false|</?\w+>|<\|[\w-]+\|>|\[[A-Z]+\]"
)
# At least 32 hexadecimal digits. Or at least 32 base64 characters that are not an absolute path, with an
# upper-case letter, a lower-case letter and a digit in a run of 16 without separators
_SECRET_FORM = re.compile(
    r"\b[0-9a-fA-F]{32,}\b"
    r"|^(?!/)(?=[\w+/=-]{32,}$)(?:.*[/_-])?(?=[^/_-]*[a-z])(?=[^/_-]*[A-Z])(?=[^/_-]*[0-9])[^/_-]{16,}"
)
_ARGUMENT = re.compile(r"((?<!\S)(?:--[\w.-]+[ =]|[\w.-]+=))(\S+)")
_LOOKS_SECRET = re.compile(r"[0-9a-fA-F]{40}")

# Tokens of known services. A bare run of 40 hexadecimal digits is not among them, as commits have that
# form, too.
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}\b"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS key ids
    r"|\bsk-[A-Za-z0-9_-]{32,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"  # keys of model and chat services
    r"|\bglpat-[\w-]{20,}|\bnvapi-[\w-]{20,}|\bAIza[\w-]{35}"  # GitLab, NVIDIA, Google
    r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}|\bdckr_pat_[\w-]{20,}"  # package and image registries
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON Web Tokens
)
# In an address, where pathlib and os.path write "//" as "/":
# - [user]:password@, or a token of at least 16 characters as the user of http
# - parameters with a signature of an object store, a token or a key
# - the secret path of a webhook
_IN_ADDRESS = re.compile(
    r"(://|\b\w+:/)[^\s/:@]*:[^\s/@]+(?=@)"
    r"|(?P<http>(?i:\bhttps?://?))[^\s/:@]{16,}(?=@)"
    r"|(?P<parameter>(?i:[?&#](?:(?:x-amz-|x-goog-)?(?:sig|signature|credential|security-token)|policy|key-pair-id"
    r"|[\w.-]*(?:token|password|passwd|secret|api[_-]?key|access[_-]?key)|key|pwd|auth|authorization)=))"
    r"[^\s&#'\"]+"
    r"|(?P<hook>(?i:\bhooks\.slack\.com/\w+/|\bdiscord(?:app)?\.com/api/webhooks/))[^\s'\"]+"
)
# In an HTTP header, or in a connection string of Azure.
_IN_HEADER = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+|\bbearer\s+(?=[\w.~+/=-]{20})"
    r"|\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=)[^\s;,'\"]+"
)
_SAID = re.compile(
    r"(?i)\b([A-Z0-9_-]*(?:TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_?KEY))(\s*[=:]\s*[\"']?)([0-9a-f]{40})\b"
)


def redact(text: str) -> str:
    """Replace secrets in ``text`` by ``***``.

    These are secrets:

    - values of at least 8 characters of environment variables with names like ``HF_TOKEN``, ``DB_PASSWORD``,
      ``WANDB_API_KEY`` or ``MY_SECRET_THING``,
    - values of 40 hexadecimal digits of other environment variables, unless the name contains commit or hash,
    - tokens of known services, recognized by their form,
    - passwords, tokens and signatures in addresses,
    - credentials in HTTP headers and connection strings.

    >>> redact("login with hf_0123456789abcdefghijk failed at https://me:word@host/x")
    'login with *** failed at https://***@host/x'
    """
    for value in secret_values():
        for form in _written_forms(value):
            text = text.replace(form, MASK)
    text = _IN_ADDRESS.sub(
        lambda match: f"{match[match.lastindex or 0]}{MASK}", _FORMS.sub(MASK, text)
    )
    text = _IN_HEADER.sub(rf"\1{MASK}", text)
    return _SAID.sub(rf"\1\2{MASK}", text)


@functools.lru_cache(maxsize=256)
def _written_forms(value: str) -> tuple[str, ...]:
    """Return the forms in which messages and files may contain a secret, longest first.

    Logs contain a secret of several lines, such as a private key, line by line.
    """
    forms = {
        value,
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        visible(value),
        visible(value, lines=False),
    }
    forms.add(json.dumps(value, ensure_ascii=False)[1:-1])
    forms.update((quote(value), quote(value, safe=""), quote_plus(value)))
    forms.update(line.strip() for line in value.splitlines())
    # Masking a short form would mask parts of ordinary words.
    long_forms = [form for form in forms if len(form) >= MIN_SECRET_LENGTH]
    return tuple(sorted(long_forms, key=len, reverse=True))


_COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROLS = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Characters above ASCII text that a terminal obeys, as part of a character class: Latin-1 controls, marks of
text direction and line separators."""
# Tab and newline are kept.
_OBEYED = re.compile(rf"[\x00-\x08\x0b-\x1f{CONTROLS}\ud800-\udfff]")


def visible(text: str, colors: bool = False, lines: bool = True) -> str:
    """Escape the control characters in text of another process or file, for display on a terminal.

    ``colors`` keeps color sequences, ``lines`` keeps line feeds.

    >>> visible("a\\x1b]0;title\\x07b\\r"), visible("\\x1b[31mred", colors=True) == "\\x1b[31mred"
    ('a\\\\x1b]0;title\\\\x07b\\\\x0d', True)
    """
    # Cut out the color sequences, escape the text between them, and put them back.
    if colors and "\x1b" in text:
        parts = [visible(part, lines=lines) for part in _COLOR.split(text)]
        colors_after = [*_COLOR.findall(text), ""]
        return "".join(map(operator.add, parts, colors_after))
    if not lines:
        text = text.replace("\n", "\\n")
    return _OBEYED.sub(_escape, text)


MOST_CHARACTERS = 20_000
"""Maximum length of an error on a terminal. Text from a file in it may have a megabyte."""
# longer than any path (PATH_MAX is 4096), so nothing useful is lost
_LONG_WORD = re.compile(r"\S{4097,}")


def one_line(text: str) -> str:
    """Format an error as one line without secrets. Long text is shortened, with a note of its length.

    >>> one_line(f"of model_type {'a' * 10**6} here")[-30:]
    'a... (1000000 characters) here'
    >>> len(one_line("many words " * 10**6))
    20000
    """
    text = redact(visible(text, lines=False))
    text = _LONG_WORD.sub(lambda word: f"{word[0][:200]}... ({len(word[0])} characters)", text)
    if len(text) <= MOST_CHARACTERS:
        return text
    mark = f" ... ({len(text)} characters) ... "
    end = MOST_CHARACTERS // 8
    return text[: MOST_CHARACTERS - end - len(mark)] + mark + text[-end:]


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shown(name: str, value: Any) -> Any:
    """Return the value of an option for a message: ``***`` if its name or form suggests a secret.

    This also covers options that do not exist. Booleans, numbers of up to 5 digits
    (``max_token=512``) and tokens of a vocabulary (``</s>``) are always shown.

    >>> shown("training.password", "hunter22"), shown("argument", "api_key=hunter22"), shown("max_token", 512)
    ('***', 'api_key=***', 512)
    >>> shown("x", "0123456789abcdef" * 2), shown("model.revision", "0123456789abcdef" * 2)
    ('***', '0123456789abcdef0123456789abcdef')
    """
    if isinstance(value, dict):
        return {key: shown(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(shown(name, item) for item in value)
    words = re.sub(r"\W+", "_", name).strip("_")
    has_secret_name = names_a_secret(words) or _SECRET_OPTION.search(words)
    has_secret_form = _SECRET_FORM.search(str(value)) and not _PUBLIC_NAME.search(words)
    if (has_secret_name or has_secret_form) and not _NO_SECRET.fullmatch(str(value)):
        return MASK
    return redact(_ARGUMENT.sub(_shown_argument, value)) if isinstance(value, str) else value


def _shown_argument(match: re.Match[str]) -> str:
    return f"{match[1]}{shown(match[1], match[2])}"


def redact_all(value: Any) -> Any:
    """Apply ``redact`` to each text in a value: in nested dicts, lists and tuples, and to the keys of dicts."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_all(key): redact_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact_all(item) for item in value)
    return value


def secret_values() -> list[str]:
    """Return the values of this process's secret variables, longest first because one may contain another."""
    # Read the variables each time, because a token may be added after the setup of the log.
    values = set()
    for name, text in os.environ.items():
        value = text.strip()
        if len(value) >= MIN_SECRET_LENGTH and _is_secret(name, value):
            values.add(value)
    return sorted(values, key=len, reverse=True)


def names_a_secret(name: str) -> bool:
    """True if a variable of this name contains a secret, for any value.

    >>> names_a_secret("HF_TOKEN"), names_a_secret("HF_HOME")
    (True, False)
    """
    return bool(_SECRET_NAME.search(name)) or name == "AWS_ACCESS_KEY_ID"


# Called for every variable and logged line.
@functools.lru_cache(maxsize=1024)
def _is_secret(name: str, value: str) -> bool:
    if names_a_secret(name):
        return True
    return bool(_LOOKS_SECRET.fullmatch(value)) and not _PUBLIC_NAME.search(name)
