"""What ``shardtrain verify`` is asked to do, read from its words. No torch: a wrong word is answered at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.utils.errors import ConfigError, Problem

USAGE = """\
usage: shardtrain verify [CONFIG.toml | model.py] [--mesh "tp=2,pp=2" ...] [--schedule NAME ...] [--steps 3]
                         [--full] [--json] [--section.key VALUE ...]
       shardtrain verify --real [CONFIG.toml | model.py] [--memory GIB] [--json] [--section.key VALUE ...]

Train the same batches on one process and on each mesh, in float32, and compare initial weights, loss, every gradient,
the gradient norm and the updated weights. Status 0: all the same. Status 4: the first difference and its likely cause
are printed.

  --mesh      axes: dp_replicate, dp_shard, tp, pp, cp, ep; without it, a list of meshes of up to 8 ranks
  --schedule  pipeline schedules to try on each mesh with pp
  --steps     optimizer steps to compare
  --full      the model, depth and sequence length of the configuration, not a small version of them
  --json      one JSON document
  --real      the sizes that a small model hides, beside float64: norm and loss sums on 1, 2 and 4 ranks, tensors of
              more than 2^31 numbers, one layer and the vocabulary of the configured model at their real width
  --memory    GiB that --real may take; three quarters of what is free unless given. What does not fit is left out,
              and its row says so
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
    real: bool = False
    memory_gib: float = 0.0
    overrides: tuple[str, ...] = ()


def read(words: Sequence[str]) -> Request:
    """Take verify's own options out of the words; all others are overrides of the configuration.

    Raises:
        ConfigError: an option lacks its value, or ``--steps`` is not a whole number above 0.
    """
    path: str | None = None
    lists: dict[str, list[str]] = {"--mesh": [], "--schedule": [], "--steps": [], "--memory": []}
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
        elif word in ("--full", "--json", "--real", "--help", "-h"):
            flags.add(word)
        elif path is None and not overrides and not word.startswith("-"):
            path = word
        else:
            overrides.append(word)
    steps = lists["--steps"][-1] if lists["--steps"] else "3"
    if not steps.isdecimal() or int(steps) < 1:
        rule = "must be a whole number of steps above 0"
        raise ConfigError(Problem("--steps", steps, rule, "write it like --steps 3", "command line"))
    memory = lists["--memory"][-1] if lists["--memory"] else "0"
    if not re.fullmatch(r"\d+(\.\d+)?", memory) or (lists["--memory"] and not float(memory)):
        raise ConfigError(Problem("--memory", memory, "must be GiB above 0", f"write it like {EXAMPLES['--memory']}"))
    real_only = {"--memory"} if lists["--memory"] and "--real" not in flags else set()
    elsewhere = {name for name in ("--mesh", "--schedule", "--steps") if lists[name]} | flags & {"--full"}
    if unused := sorted(real_only or (elsewhere if "--real" in flags else set())):
        rule = "has no effect " + ("without --real" if real_only else "with --real, whose meshes and sizes are fixed")
        raise ConfigError(Problem(unused[0], None, rule, "leave it out", "command line"))
    return Request(
        path,
        tuple(lists["--mesh"]),
        tuple(lists["--schedule"]),
        int(steps),
        "--full" in flags,
        "--json" in flags,
        bool(flags & {"--help", "-h"}),
        "--real" in flags,
        float(memory),
        tuple(overrides),
    )


EXAMPLES = {
    "--mesh": '--mesh "tp=2,pp=2"',
    "--schedule": "--schedule 1F1B",
    "--steps": "--steps 3",
    "--memory": "--memory 8",
}


def _values(remaining: list[str]) -> list[str]:
    values = []
    while remaining and not remaining[0].startswith("-"):
        values.append(remaining.pop(0))
    return values
