"""Verb ``generate``: run in this process, or on several tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardtrain.tools.generate import generate_request


def main(arguments: list[str]) -> int:
    """Run the verb with its command-line arguments. Return the exit status."""
    options = generate_request.read(arguments)
    from shardtrain.launch.multirank_cli import Verb, start
    from shardtrain.tools.generate import prompts

    rows = None
    if options.input is not None:
        rows = prompts.read_rows(options.input, options.field, options.prediction_field)

    def load() -> Callable[[], None]:
        from shardtrain.tools.generate import answer

        return lambda: answer.run(options, rows)

    check_output = partial(prompts.check_output, options.output)
    return start(
        Verb("generate", arguments, options.nproc, options.device or "auto", load, check_output)
    )
