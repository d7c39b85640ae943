"""End ``train`` at a request to stop that arrives before the configuration is read.

The command sets these handlers first. Importing its modules takes up to a second on a busy machine, and a signal
in this time would otherwise kill it without a line.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from shardtrain.launch import run_ends
from shardtrain.utils import process, stop_signals


def end_at_request() -> None:
    """Handle requests to stop: print one line and exit. There is no run folder yet, and nothing to save."""
    stop_signals.handle_requests(_end)
    if process.AGENT in os.environ:
        # The agent blocked the stop signals while Python started, because a SIGINT then prints a traceback.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals.GRACEFUL)


def _end(number: int, _frame: FrameType | None) -> None:
    stop_signals.handle_requests(signal.SIG_IGN)
    end = run_ends.UNREAD
    # RANK may also be the number of a node, in an environment without LOCAL_RANK.
    is_later_rank = "LOCAL_RANK" in os.environ and os.environ.get("RANK") != "0"
    if not is_later_rank and not process.is_left_to_parent():
        line = end.line.format(reason=signal.Signals(number).name)
        print(f"stopped[{end.code}]: {line}", file=sys.stderr, flush=True)
    process.stop_agent()
    os._exit(end.code)
