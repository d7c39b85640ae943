"""Verb ``watch``: read the runs once a second, draw a frame, handle keys, and restore the terminal at the end."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.watch.following import FollowedRun
from shardtrain.tools.runs.watch.screen import Terminal, frame
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import color_allowed
from shardtrain.utils.sparkline import BARS, bars_for

_ENTER = "\x1b[?1049h\x1b[?25l"
"""Switch to the alternate screen and hide the cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
"""Show the cursor, and switch back."""
_NEXT = ("\t", "\x1b[B", "\x1b[C", "j", "l")
_BEFORE = ("\x1b[Z", "\x1b[A", "\x1b[D", "k", "h")
_MOST_RUNS = 32


def main(arguments: Sequence[str]) -> int:
    """Show the runs until the user presses q or Ctrl-C, or once with ``--once``. Raises ConfigError."""
    parser = StrictArgumentParser(
        "shardtrain watch",
        "Show runs while they train: loss, speed, memory, time and alerts. "
        "It only reads files of the runs, so it works on any machine that can read the folder, "
        "also before a run has started.",
        example="shardtrain watch outputs",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        default=["outputs"],
        metavar="RUN",
        help="run folders, or a folder that contains them",
    )
    parser.add_argument(
        "--once", action="store_true", help="print once and exit, as without a terminal"
    )
    parser.add_argument(
        "--interval_seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="time between two updates (1)",
    )
    options = parser.read(arguments)
    if not 0.1 <= options.interval_seconds <= 3600:
        raise ConfigError(
            Problem(
                "--interval_seconds",
                options.interval_seconds,
                rule="must be 0.1 to 3600 seconds",
                fix="remove it for one update per second",
                where="command line",
            )
        )
    folders: list[Path] = []
    for name in options.folders:
        folders += _folders(Path(name))
    followed = [FollowedRun(folder) for folder in folders[:_MOST_RUNS]]

    is_interactive = sys.stdout.isatty() and sys.stdin.isatty()
    if options.once or not is_interactive:
        for run in followed:
            run.look()
            lines = frame([run], 0, _terminal())
            # The last two lines are an empty one and that of the keys.
            print("\n".join(lines[:-2]))
        return 0
    with _screen():
        _show(followed, options.interval_seconds)
    return 0


def _folders(path: Path) -> list[Path]:
    """Return the folders of the runs in or below a path.

    Return the path itself if it is a run, or does not exist yet.
    """
    if not path.exists():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            Problem(
                "RUN",
                str(path),
                rule="is not a folder",
                fix="name the folder of a run, which is its job.dump_folder",
                where="command line",
            )
        )
    folders = [run.folder for run in run_files.below(path)]
    return folders or [path]


def _show(followed: Sequence[FollowedRun], interval_seconds: float) -> None:
    """Draw frames and handle keys until the user quits."""
    selected = 0
    due = 0.0
    while True:
        if time.monotonic() >= due:
            for run in followed:
                run.look()
            due = time.monotonic() + interval_seconds

        # Each line overwrites the one before it, so nothing flickers or scrolls.
        terminal = _terminal()
        lines = frame(followed, selected, terminal)
        rows = [f"{line}\x1b[K" for line in lines[: terminal.lines]]
        sys.stdout.write("\x1b[H" + "\r\n".join(rows) + "\x1b[J")
        sys.stdout.flush()

        # Handle a key immediately. Without one, draw the next frame when it is due.
        ready, _, _ = select.select([sys.stdin], [], [], max(0.05, due - time.monotonic()))
        if not ready:
            continue
        keys = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not keys or keys[0] in ("q", "Q", "\x03", "\x04"):
            return
        if keys in _NEXT:
            selected = (selected + 1) % len(followed)
        elif keys in _BEFORE:
            selected = (selected - 1) % len(followed)
        elif keys.isdigit() and 1 <= int(keys) <= len(followed):
            selected = int(keys) - 1


def _terminal() -> Terminal:
    columns, lines = shutil.get_terminal_size((80, 24))
    has_unicode = bars_for(sys.stdout) == BARS
    return Terminal(max(20, columns), max(6, lines), has_unicode, color_allowed(sys.stdout))


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Context with the alternate screen and unbuffered keys.

    Restores the terminal at the end and while stopped.
    """
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def enter() -> None:
        tty.setcbreak(stdin)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()

    def leave() -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)

    def stop(number: int, _frame: FrameType | None) -> None:
        leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the shell continues the process
        signal.signal(signal.SIGTSTP, stop)
        enter()

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Any] = {signal.SIGTSTP: stop, signal.SIGTERM: end, signal.SIGHUP: end}
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        enter()
        yield
    except KeyboardInterrupt:
        # Ctrl-C quits without an error, like the key q.
        pass
    finally:
        with contextlib.suppress(OSError):  # the terminal may be gone
            leave()
        for number, handler in kept.items():
            signal.signal(number, handler)
