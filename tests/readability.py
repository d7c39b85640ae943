"""Print how readable the changed files are, at the end of a test run. Nothing fails because of it.

The measure counts phrases that mark prose as hard to follow, and how dense the code is. It is a reminder, not a rule:
docs/CONTRIBUTING.md says how prose and code should read.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from dataclasses import dataclass
from pathlib import Path

import patience
import pytest

PHRASES = (
    r"\b\w+ alone\b",
    r"\b(gives?|given back)\b",
    r"\bwords?\b",
    r"\bask(s|ed|ing)?\b",
    r"\b(told|tells?|says?|said)\b",
    r"\bbeside\b",
    r"\bof (its|their|his|one's) own\b",
    r"\bas (many|much|long|far) as\b",
    r"\b(is|are|was|be) none\b",
    r"(^|[.;:,] |\b(of|to|by|for|and|from|in|with) )what\b",
    r"\bwhole\b",
    r"\b(stands?|lies|lie|lay)\b",
    r"\b(bears?|hangs? on|goes by|go by|goes on)\b",
    r"^Whether\b",
    r"\bso that\b",
    r"\bis (done|made|taken|looked at|looked for)\b",
    r"\bleft (out|alone)\b",
    r"\bat once\b",
)
"""Phrases with a plainer alternative: "only", "returns", "requires", "reports", "next to", "full", "immediately"."""
PHRASES_PER_1000_WORDS = 4
NODES_PER_LINE = 5.5
FEWEST_LINES = 20
"""Files with fewer lines are not measured for density."""
MOST_FILES_LISTED = 10


@dataclass(frozen=True)
class Readability:
    """Counts for one Python file."""

    words: int
    phrases: int
    lines: int
    syntax_nodes: int

    def complaint(self) -> str:
        """The measures that are above the goal, as text. Empty if there are none."""
        complaints = []
        phrases_per_1000_words = 1000 * self.phrases / max(1, self.words)
        if self.phrases > 1 and phrases_per_1000_words > PHRASES_PER_1000_WORDS:
            complaints.append(f"{phrases_per_1000_words:.0f} hard phrases per 1,000 words")
        nodes_per_line = self.syntax_nodes / max(1, self.lines)
        if self.lines >= FEWEST_LINES and nodes_per_line > NODES_PER_LINE:
            complaints.append(f"{nodes_per_line:.1f} syntax nodes a line")
        return ", ".join(complaints)


def prose(source: str) -> list[str]:
    """Docstrings, comments, and string literals of at least four words."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.count(" ") >= 3
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return texts


def measure(source: str) -> Readability:
    """Count phrases and syntax nodes of a Python file."""
    num_words = 0
    num_phrases = 0
    for text in prose(source):
        num_words += len(text.split())
        num_phrases += sum(len(re.findall(phrase, text, re.MULTILINE)) for phrase in PHRASES)
    return Readability(
        words=num_words,
        phrases=num_phrases,
        lines=source.count("\n"),
        syntax_nodes=sum(1 for _ in ast.walk(ast.parse(source))),
    )


def changed_files(root: Path) -> list[Path]:
    """Python files that differ from the last commit or, in a clean checkout, those that it changed."""
    for revision in ("HEAD", "HEAD~1"):
        command = ["git", "diff", "--name-only", "--diff-filter=d", revision, "--", "*.py"]
        git = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=patience.seconds(20),
            check=False,
        )
        if git.returncode == 0 and git.stdout:
            return [root / name for name in git.stdout.splitlines()]
    return []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """List changed files that are hard to read, the hardest prose first."""
    try:
        measures = {
            path: measure(path.read_text(encoding="utf-8"))
            for path in changed_files(config.rootpath)
        }
    except (OSError, SyntaxError, subprocess.SubprocessError):
        return  # no git, or a file that does not parse, which its own tests report
    hard = [path for path, readability in measures.items() if readability.complaint()]
    if not hard:
        return
    hard.sort(key=lambda path: measures[path].phrases, reverse=True)
    terminalreporter.section("readability of changed files")
    for path in hard[:MOST_FILES_LISTED]:
        terminalreporter.line(f"{path.relative_to(config.rootpath)}: {measures[path].complaint()}")
    if len(hard) > MOST_FILES_LISTED:
        terminalreporter.line(f"and {len(hard) - MOST_FILES_LISTED} more")
