"""The ``shardtrain`` command, also started as ``python -m shardtrain``."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command and return its exit status. Ctrl-C during the imports ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardtrain import cli

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
