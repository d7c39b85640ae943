"""The ``shardtrain`` command, also started as ``python -m shardtrain``."""

from __future__ import annotations

import signal
import sys
import threading


def main() -> int:
    """Run the command and return its exit status. A signal during the imports ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    is_training = sys.argv[1:2] == ["train"]
    if is_training:
        from shardtrain.launch import early_stop

        early_stop.end_at_request()
    from shardtrain import cli

    if handler is signal.default_int_handler and not is_training:
        signal.signal(signal.SIGINT, handler)
    try:
        code = cli.main()
    except SystemExit as error:
        if not isinstance(error.code, int):
            raise
        code = error.code
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads and all(thread.daemon for thread in threads):
        # Python ends daemon threads at their next instruction when the interpreter exits. A thread that returns from
        # C++ code then, such as the keep-alive of PyTorch's rendezvous, aborts the process.
        from shardtrain.launch import local

        local.leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
