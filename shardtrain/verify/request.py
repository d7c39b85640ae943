"""What ``shardtrain verify`` is asked to do, read from its words. No torch: a wrong word is answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.errors import ConfigError, Problem

USAGE = """\
usage: shardtrain verify [CONFIG.toml | model.py] [--mesh "tp=2,pp=2" ...] [--schedule NAME ...] [--steps 3]
                         [--full] [--json] [--section.key VALUE ...]

Train the same batches on one process and on each mesh, in float32, and compare initial weights, loss, every gradient,
the gradient norm and the updated weights. Status 0: all the same. Status 4: the first difference and its likely cause
are printed.

  --mesh      axes: dp_replicate, dp_shard, tp, pp, cp, ep; without it, a list of meshes of up to 8 ranks
  --schedule  pipeline schedules to try on each mesh with pp
  --steps     optimizer steps to compare
  --full      the model, depth and sequence length of the configuration, not a small version of them
  --json      one JSON document
"""


@dataclass(frozen=True)
class Request:
    """The words of ``shardtrain verify``; ``path`` is a TOML file, a model file ending in .py, or None."""

    path: str | None = None
    meshes: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    steps: int = 3
    full: bool = False
    json: bool = False
    help: bool = False
    overrides: tuple[str, ...] = ()


def read(words: Sequence[str]) -> Request:
    """Take verify's own options out of the words; all others are overrides of the configuration.

    Raises:
        ConfigError: an option lacks its value, or ``--steps`` is no whole number above 0.
    """
    path: str | None = None
    lists: dict[str, list[str]] = {"--mesh": [], "--schedule": [], "--steps": []}
    flags: set[str] = set()
    overrides: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name in lists:
            values = [value] if equals else _values(remaining)
            if not any(values):
                raise ConfigError(
                    Problem(name, None, "needs a value", f"write it like {EXAMPLES[name]}", "command line")
                )
            lists[name] += values
        elif word in ("--full", "--json", "--help", "-h"):
            flags.add(word)
        elif path is None and not overrides and not word.startswith("-"):
            path = word
        else:
            overrides.append(word)
    steps = lists["--steps"][-1] if lists["--steps"] else "3"
    if not steps.isdecimal() or int(steps) < 1:
        rule = "must be a whole number of steps above 0"
        raise ConfigError(Problem("--steps", steps, rule, "write it like --steps 3", "command line"))
    return Request(
        path,
        tuple(lists["--mesh"]),
        tuple(lists["--schedule"]),
        int(steps),
        "--full" in flags,
        "--json" in flags,
        bool(flags & {"--help", "-h"}),
        tuple(overrides),
    )


EXAMPLES = {"--mesh": '--mesh "tp=2,pp=2"', "--schedule": "--schedule 1F1B", "--steps": "--steps 3"}


def _values(remaining: list[str]) -> list[str]:
    values = []
    while remaining and not remaining[0].startswith("-"):
        values.append(remaining.pop(0))
    return values
