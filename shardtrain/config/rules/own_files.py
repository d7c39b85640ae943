"""Files of Python that options name: they are there, and hold what they are named for, as their text tells."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.values import problem
from shardtrain.utils import own_file
from shardtrain.utils.errors import Problem

SINK = (("Sink",), "define a class Sink with write, validation and close, as docs/extend.md shows")
OPTIMIZER = (
    ("build", "initial_state"),
    "define build(param_groups, options) and initial_state(parameter): docs/extend.md",
)
TOKENIZER = (("Tokenizer",), "define a class Tokenizer with encode, decode and vocab_size, as docs/extend.md shows")
"""What a file must hold, and the fix where it does not."""

OPTIMIZERS = ("AdamW", "Adam", "AdamW8bit", "Muon")


def check_own_files(loaded: Loaded) -> Iterator[Problem]:
    """An optimizer, which may be one of this package, a tokenizer, and sinks."""
    tokenizer = loaded.config.model.tokenizer_path
    if tokenizer is not None and tokenizer.endswith(".py"):
        yield from _check(loaded, "model.tokenizer_path", tokenizer, *TOKENIZER)
    for path in loaded.config.metrics.sinks:
        yield from _check(loaded, "metrics.sinks", path, *SINK)
    name = loaded.config.optimizer.name
    if name.endswith(".py"):
        yield from _check(loaded, "optimizer.name", name, *OPTIMIZER)
    elif name not in OPTIMIZERS:
        near = nearest(name, OPTIMIZERS)
        fix = (f'did you mean "{near}"? ' if near else f'use "{OPTIMIZERS[0]}", ') + "or a path that ends in .py"
        yield problem(loaded, "optimizer.name", f"must be one of {', '.join(OPTIMIZERS)}", fix)


def _check(loaded: Loaded, option: str, path: str, names: tuple[str, ...], fix: str) -> Iterator[Problem]:
    found = own_file.fault(path, names, fix)
    if found is not None:
        yield Problem(option, path, *found, loaded.where(option))
