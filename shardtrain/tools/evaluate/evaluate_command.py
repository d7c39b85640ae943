"""Verb ``evaluate``: run in this process, or on several tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardtrain.tools.evaluate import evaluate_request


def main(arguments: list[str]) -> int:
    """Run the verb with its command-line arguments. Return the exit status."""
    options = evaluate_request.read(arguments)
    from shardtrain.launch.multirank_cli import Verb, start
    from shardtrain.tools.generate import prompts

    def load() -> Callable[[], None]:
        from shardtrain.tools.evaluate import evaluate_rank

        return partial(evaluate_rank.run, options)

    check_output = partial(prompts.check_output, options.output)
    device = options.device or "auto"
    return start(Verb("evaluate", arguments, options.nproc, device, load, check_output))
