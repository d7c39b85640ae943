"""Verb ``generate``: run in this process, or on several tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardtrain.tools.generate import generate_request


def main(words: list[str]) -> int:
    """Run the verb with its command-line arguments. Return the exit status."""
    asked = generate_request.read(words)
    from shardtrain.launch.multirank_cli import Verb, start
    from shardtrain.tools.generate import prompts

    rows = None if asked.input is None else prompts.read_rows(asked.input, asked.field, asked.prediction_field)

    def load() -> Callable[[], None]:
        from shardtrain.tools.generate import answer

        return lambda: answer.run(asked, rows)

    check_output = partial(prompts.check_output, asked.output)
    return start(Verb("generate", words, asked.nproc, asked.device or "auto", load, check_output))
