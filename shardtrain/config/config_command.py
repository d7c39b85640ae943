"""``shardtrain config show``, ``help`` and ``schema``: verbs that only need the configuration."""

from __future__ import annotations

from shardtrain import config
from shardtrain.config.load import Loaded
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import redact


def print_options(loaded: Loaded) -> int:
    """Print every option with its origin, without secrets; return the exit status."""
    print(redact(config.show(loaded)))
    return 0


def print_help(argv: list[str]) -> int:
    """Print the help of a section or an option; return the exit status.

    The name may be followed by a configuration, which can add sections with ``job.custom_config_module``.
    """
    name = argv[0].lstrip("-") if argv else ""
    arguments = argv[1:]
    path = None
    if arguments and not arguments[0].startswith("-"):
        path = arguments.pop(0)
    schema = type(config.load(path, arguments).config)
    try:
        print(config.help_text(name, schema))
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    return 0


def print_schema(arguments: list[str]) -> int:
    """Print the JSON schema of all options; return the exit status."""
    from shardtrain.config.json_schema import json_schema_text

    if arguments:
        raise ConfigError(
            Problem(
                "shardtrain config schema",
                arguments[0],
                rule="takes no argument",
                fix="shardtrain config schema > shardtrain.schema.json",
                where="command line",
            )
        )
    print(json_schema_text(), end="")
    return 0
