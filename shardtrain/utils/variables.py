"""Integers in text, and a check of environment variables that must contain a number."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, MutableMapping

from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import redact


def is_whole_number(text: str) -> bool:
    """True for 1 to 18 ASCII digits. ``str.isdecimal`` also accepts text that ``int`` or PyTorch rejects.

    >>> [is_whole_number(text) for text in ("0", "12", "", "-1", "1_0", "٣", "9" * 5000)]
    [True, True, False, False, False, False, False]
    """
    return text.isascii() and text.isdecimal() and len(text) < 19


def is_seconds(text: str) -> bool:
    """True for a number of seconds that a process can wait.

    >>> [is_seconds(text) for text in ("0", "2.5", "1e3", "nan", "inf", "-1", "1e300", "5s")]
    [True, True, True, False, False, False, False, False]
    """
    try:
        seconds = float(text)
    except ValueError:
        return False
    # Python accepts 1_0 and digits of other scripts, which other programs reject.
    is_plain = text.isascii() and "_" not in text
    return is_plain and math.isfinite(seconds) and 0 <= seconds < 1e9


def is_thread_counts(text: str) -> bool:
    """True for a positive number of threads, or for several with commas: one for each level of nested regions.

    >>> [is_thread_counts(text) for text in ("4", "4,2", "0", "abc", "4,", "100000000")]
    [True, True, False, False, False, False]
    """
    return all(is_whole_number(count) and 0 < int(count) < 1_000_000 for count in text.split(","))


_CHECKED = {
    "OMP_NUM_THREADS": is_thread_counts,
    "RAYON_NUM_THREADS": is_whole_number,
    "SHARDTRAIN_HEARTBEAT_SECONDS": is_seconds,
    "SLURM_JOB_END_TIME": is_whole_number,
    "TORCHELASTIC_RESTART_COUNT": is_whole_number,
}
"""Variables that may be ignored. Those that decide what a run does are refused where they are read."""


def drop_invalid(environment: MutableMapping[str, str]) -> None:
    """Remove variables that should contain a number and do not, with a warning for each.

    Defaults apply then.
    """
    for name, is_valid in _CHECKED.items():
        # An empty variable counts as unset.
        text = environment.get(name, "").strip()
        if text and not is_valid(text):
            # Mask first: part of a secret no longer has its form.
            text = redact(text)
            print(
                f"warning: {name}={text[:40]!a} is not a valid number and is ignored",
                file=sys.stderr,
                flush=True,
            )
            del environment[name]


def rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return RANK and WORLD_SIZE, or 0 and 1 without a launcher. Raises ConfigError."""
    return number(environment, "RANK", "0"), number(environment, "WORLD_SIZE", "1", least=1)


def number(environment: Mapping[str, str], name: str, default: str, least: int = 0) -> int:
    """Return the integer in a variable of a launcher.

    Raises:
        ConfigError: the variable is not a number of at least ``least``, or is not set and ``default`` is "".
    """
    text = environment.get(name) or default
    # A launcher sets all of its variables, so a missing one means leftovers of another launcher.
    if not text:
        raise ConfigError(
            Problem(
                name,
                None,
                rule="is not set, although other variables of a launcher are",
                fix=(
                    "unset the variables of the other launcher (env | grep -E "
                    "'RANK|WORLD|TORCHELASTIC'), or set all of them"
                ),
                where="environment",
            )
        )
    if not is_whole_number(text) or int(text) < least:
        raise ConfigError(
            Problem(
                name,
                text,
                rule=f"must be an integer of at least {least}",
                fix="correct it, or unset it",
                where="environment",
            )
        )
    return int(text)
