"""``python -m shardtrain.compat.main --params=parameters.yml``: as pytorch_universal_trainer is started, on every node.

Its command is ``python main.py --params=parameters.yml``, so this module has the name of its file, as
``python -m shardtrain.train`` has that of torchtitan's; ``main.py`` at the root of the repository is the same. The file
says by ``mode`` whether to train or to test, and by ``current_node`` which of several nodes this is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardtrain import cli
from shardtrain.utils import process
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError
from shardtrain.utils.redact import one_line

USAGE = """\
usage: python -m shardtrain.compat.main --params=parameters.yml [--nproc N] [--section.key VALUE ...]

Train, or with `mode: test` test, as a parameters.yml of pytorch_universal_trainer says. With several nodes the same
command runs on each, with a current_node of its own. Options of this package (`shardtrain config help`) come after.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the file needs, and return the exit status of ``shardtrain``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        process.own_process()
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    try:
        verb, path, rest = _read(words)
    except ShardtrainError as error:
        for problem in getattr(error, "problems", [error]):
            print(f"error[{error.exit_code}]: {one_line(str(problem))}", file=sys.stderr)
        return error.exit_code
    return cli.main([verb, path, *rest])


def _read(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the verb, the file, and all other arguments.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    from shardtrain.compat import migrate
    from shardtrain.compat.migrate import universal_trainer

    # --params is the only option of the other program. All others are options of this package.
    rest = list(words)
    path = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--params":
            path = value if equals else (words[place + 1] if place + 1 < len(words) else "")
            del rest[place : place + (1 if equals else 2)]
            break
    if not path:
        fix = "write --params=parameters.yml"
        raise ConfigError(Problem("--params", path, "needs the parameters file", fix, "command line"))
    file = Path(path).expanduser()
    migrated = migrate.migrate([file])
    if universal_trainer.SYSTEM not in migrated.systems:
        rule = f"is a file of {migrated.systems[0]}"
        fix = f"run `shardtrain train {path}`, or name a parameters.yml"
        raise ConfigError(Problem("--params", path, rule, fix, "command line"))
    return migrated.verb, str(file), rest


if __name__ == "__main__":
    sys.exit(main())
