"""``shardtrain data``: one module of this package per verb."""

from __future__ import annotations

import difflib
import importlib

from shardtrain.tools.data import USAGE
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat

VERBS = ("prepare", "check", "show", "probe", "tokenizer", "download")


def main(words: list[str]) -> int:
    """Run one verb; gives the exit status."""
    if not words:
        fix = f"use one of {', '.join(VERBS)}; shardtrain data --help says what each does"
        raise ConfigError(Problem("shardtrain data", None, "needs a verb", fix, "command line"))
    verb = words[0]
    rest = words[1:]
    if verb in ("help", "--help", "-h"):
        print(USAGE, end="")
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1)
        fix = (f"did you mean {near[0]}? " if near else "") + f"verbs are {', '.join(VERBS)}"
        raise ConfigError(Problem("shardtrain data", verb, "is not a verb", fix, "command line"))
    tool = importlib.import_module(f"shardtrain.tools.data.{verb}")
    if verb in ("prepare", "download"):  # they tell what they have done so far, and prepare forks
        return int(tool.main(rest))
    with heartbeat(f"shardtrain data {verb}"):
        return int(tool.main(rest))
