"""Draw the output of a command: run it in a pseudo-terminal and write one animated SVG file.

    python docs/cast.py -o docs/first_run.svg --columns 96 -- shardtrain train debug
    python docs/cast.py -o docs/first_run.svg --replay outputs/first_run.cast

Lines appear in their order within a few seconds and stay. Without animation all lines are visible. The recording
(--record) is an asciicast of version 2, which asciinema plays too. docs/CONTRIBUTING.md has the command that draws the
picture of the README.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import sys
import termios
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

COLORS = {30: "#6e7681", 31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea",
          37: "#e6edf3", 90: "#8b949e"}  # fmt: skip
TEXT, DIM, BACK = "#e6edf3", "#8b949e", "#0d1117"
CHAR_WIDTH, LINE_HEIGHT, FONT_SIZE, EDGE = 8.4, 19, 14, 16
SECONDS = 8.0
"""Duration of the animation."""
_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]")

Event = tuple[float, str]


@dataclass
class Screen:
    """Content of a terminal. It supports the codes of rich: colors, carriage return, lines up, erase."""

    columns: int
    rows: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    """Characters of each row, with their colors."""
    written: list[float] = field(default_factory=lambda: [0.0])
    """Time of the last change of each row, in seconds."""
    _row: int = 0
    _column: int = 0
    _color: str = TEXT

    def write(self, text: str, seconds: float) -> None:
        """Write a text that arrived at ``seconds``."""
        place = 0
        for code in _CODE.finditer(text):
            self._print(text[place : code.start()], seconds)
            place = code.end()
            if code[2]:
                self._obey(code[1], code[2])
        self._print(text[place:], seconds)

    def _print(self, text: str, seconds: float) -> None:
        for char in text:
            if char == "\r":
                self._column = 0
            elif char == "\n":
                self._line_feed()
            elif char >= " ":
                if self._column >= self.columns:
                    self._column = 0
                    self._line_feed()
                row = self.rows[self._row]
                row += [(" ", TEXT)] * (self._column + 1 - len(row))
                row[self._column] = (char, self._color)
                self.written[self._row] = seconds
                self._column += 1

    def _line_feed(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append([])
            self.written.append(0.0)

    def _obey(self, numbers: str, letter: str) -> None:
        first = int(numbers) if numbers.isdecimal() else 1
        if letter == "m":
            for number in [int(part or 0) for part in numbers.split(";")]:
                if number in (0, 39):
                    self._color = TEXT
                elif number == 2:
                    self._color = DIM
                else:
                    self._color = COLORS.get(number, self._color)
        elif letter == "A":
            self._row = max(0, self._row - first)
        elif letter == "K":
            row = self.rows[self._row]
            del row[self._column if numbers in ("", "0") else 0 :]
        elif letter == "J":
            del self.rows[self._row + 1 :], self.written[self._row + 1 :]


def record(command: list[str], columns: int) -> list[Event]:
    """Run a command in a terminal with ``columns`` and return its output with times. Raises SystemExit if it fails."""
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    events: list[Event] = []
    started = time.monotonic()
    kept = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the end of the output on Linux
            break
        if not data:
            break
        kept += data
        text = kept.decode(errors="ignore")
        kept = kept[len(text.encode()) :]
        events.append((time.monotonic() - started, text))
        sys.stderr.write(text)
        sys.stderr.flush()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with status {status}")
    return events


def write_cast(path: Path, title: str, columns: int, events: list[Event]) -> None:
    """Write the recording."""
    head = {"version": 2, "width": columns, "height": 50, "title": title}
    lines = [json.dumps(head), *(json.dumps([round(at, 3), "o", text]) for at, text in events)]
    path.write_text("\n".join(lines) + "\n")


def read_cast(path: Path) -> tuple[str, int, list[Event]]:
    """Return title, columns and events of a recording."""
    head, *lines = path.read_text().splitlines()
    found = json.loads(head)
    return found["title"], found["width"], [(at, text) for at, _, text in map(json.loads, lines)]


def draw(title: str, columns: int, events: list[Event], keep: str = ":") -> str:
    """Return the SVG. ``keep`` are slices of the rows, such as ``"0:4 -20:"``; dots replace the rows between them."""
    screen = Screen(columns)
    for at, text in events:
        screen.write(text, at)
    rows = list(zip(screen.rows, screen.written, strict=True))
    while rows and not rows[-1][0]:
        rows.pop()
    kept = sorted({place for part in keep.split() for place in _places(part, len(rows))})
    chosen = []
    for before, place in zip([-1, *kept], kept, strict=False):
        if place != before + 1:
            chosen.append(([(char, DIM) for char in "   ..."], rows[place][1]))
        chosen.append(rows[place])
    rows = chosen
    rows = [
        ([(char, COLORS[32] if at == 0 else TEXT) for at, char in enumerate("$ " + title)], 0.0),
        *rows,
    ]
    width, height = columns * CHAR_WIDTH + 2 * EDGE, len(rows) * LINE_HEIGHT + 2 * EDGE
    whole = max(at for _, at in rows) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img" aria-label="{escape(title)} in a terminal" font-size="{FONT_SIZE}" '
        "font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace\">",
        "<style>text{white-space:pre;animation:show .2s backwards}@keyframes show{from{opacity:0}}"
        "@media (prefers-reduced-motion:reduce){text{animation:none}}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>',
    ]
    for number, (row, at) in enumerate(rows):
        spans, place = [], 0
        while place < len(row):
            end = place
            while end < len(row) and row[end][1] == row[place][1]:
                end += 1
            text = "".join(char for char, _ in row[place:end])
            if text.strip():
                # fix position and length of each span, to align columns in any font
                left = len(text) - len(text.lstrip())
                text = text.strip()
                spans.append(
                    f'<tspan x="{EDGE + (place + left) * CHAR_WIDTH:.1f}" textLength="{len(text) * CHAR_WIDTH:.1f}" '
                    f'fill="{row[place][1]}">{escape(text)}</tspan>'
                )
            place = end
        if spans:
            y = EDGE + number * LINE_HEIGHT + FONT_SIZE
            delay = f' style="animation-delay:{at / whole * SECONDS:.2f}s"'
            parts.append(f'<text y="{y}"{delay}>{"".join(spans)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _places(part: str, count: int) -> range:
    first, _, end = part.partition(":")
    return range(count)[int(first) if first else None : int(end) if end else None]


def main() -> None:
    """Record or replay, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--columns", type=int, default=96, help="width of the terminal (96)")
    parser.add_argument("--title", help="shown as the command; the command itself unless given")
    parser.add_argument("--record", type=Path, help="also write the recording here")
    parser.add_argument("--replay", type=Path, help="draw this recording, and run nothing")
    parser.add_argument(
        "--keep", default=":", help='slices of the rows that are drawn: "0:4 -20:" (all)'
    )
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    if asked.replay:
        title, columns, events = read_cast(asked.replay)
        title = asked.title or title
    else:
        title, columns = asked.title or shlex.join(asked.command), asked.columns
        events = record(asked.command, columns)
        if asked.record:
            write_cast(asked.record, title, columns, events)
    asked.output.write_text(draw(title, columns, events, asked.keep))


if __name__ == "__main__":
    main()
