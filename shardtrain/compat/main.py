"""``python -m shardtrain.compat.main --params=parameters.yml``: the command line of pytorch_universal_trainer.

That program runs ``python main.py --params=parameters.yml`` on every node. This module, and ``main.py``
in the root of the repository, accept the same arguments. In the file, ``mode`` selects training or
testing, and ``current_node`` is the number of this node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardtrain import cli
from shardtrain.utils import process
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError, print_error

USAGE = """\
usage: python -m shardtrain.compat.main --params=parameters.yml [--nproc N] [--section.key VALUE ...]

Train with a parameters.yml of pytorch_universal_trainer, or test with `mode: test` in it. For several nodes, run the
same command on each node with its own current_node. Options of this package (`shardtrain config help`) may follow.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train or test as the file's ``mode`` requires, and return the exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        process.own_process()
    if "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0
    try:
        verb, path, rest = _read(argv)
    except ShardtrainError as error:
        return print_error(error)
    return cli.main([verb, path, *rest])


def _read(arguments: list[str]) -> tuple[str, str, list[str]]:
    """Return the verb, the path of the parameters file, and all other arguments.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    from shardtrain.compat import migrate
    from shardtrain.compat.migrate import universal_trainer

    # --params is the only option of pytorch_universal_trainer. All others are options of this package.
    rest = list(arguments)
    path = None
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != "--params":
            continue
        if equals:
            path = value
            del rest[index]
        else:
            path = arguments[index + 1] if index + 1 < len(arguments) else ""
            del rest[index : index + 2]
        break
    if not path:
        raise ConfigError(
            Problem(
                "--params",
                path,
                rule="requires the parameters file",
                fix="write --params=parameters.yml",
                where="command line",
            )
        )
    file = Path(path).expanduser()
    migrated = migrate.migrate([file])
    if universal_trainer.SYSTEM not in migrated.systems:
        raise ConfigError(
            Problem(
                "--params",
                path,
                rule=f"must be a parameters.yml, but is a file of {migrated.systems[0]}",
                fix=f"run `shardtrain train {path}` instead",
                where="command line",
            )
        )
    return migrated.verb, str(file), rest


if __name__ == "__main__":
    sys.exit(main())
