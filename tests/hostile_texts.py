"""Random hostile texts, and fake commands that record their arguments.

SHARDTRAIN_HOSTILE sets the number of texts per renderer (default: 500).
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import patience

from shardtrain.config import Config, Loaded
from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch.job import ClusterJob, refuse_unsafe, to_job
from shardtrain.utils.errors import ConfigError

TEXTS = int(os.environ.get("SHARDTRAIN_HOSTILE", "500"))
FEW = TEXTS if TEXTS > 500 else 50
"""Number of texts for tests in which each text needs several processes."""
BATCH_SIZE = min(TEXTS, 1000)
TIMEOUT = 300

PIECES = [
    "$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "|touch canary", "&touch canary",
    "> canary", "$HOME", "${HOME}", "$$", "$(A)", "$$(A)", "${local_rank}", "%j", "%A_%a", "--export=ALL", "-o", "#",
    "#SBATCH --exclusive", "'", '"', "\\", "\\'", "!", "!!", "*", "~", "?", "[a]", "{a,b}", "(", ")", "<<END", "END",
    ";", "=", ":", ": ", "- ", "---", "...", "yes", "no", "null", "~", "2e-05", "0x10", "0o7", "1:30", "1_000",
    ".inf", "&a", "*a", "!!python/name:os", "{{", "}}", "%", "@", "é", "esac", ";;", "done", "/", "..", "--", "-",
    "日本", "🦙", " ", "  ", "", "a", "SECRET:x,y", ",",
    "\n", "\r", "\t", "\0", "\x1b", "\u2028", "\ufeff", "\x85", "\udcff",
]  # fmt: skip
_ALPHABET = [*map(chr, range(0x20, 0x7F)), *"\xa0ÿΩЖ中\u200b\u202e\u3000\U0001f999\U00020000"]


def texts(count: int, seed: str) -> Iterator[str]:
    """Yield ``count`` texts of up to six pieces. One piece in five has random characters. The seed determines them."""
    chance = random.Random(seed)
    for _ in range(count):
        text = ""
        for _ in range(chance.randint(0, 6)):
            random_characters = "".join(chance.choices(_ALPHABET, k=chance.randint(1, 6)))
            text += chance.choice(PIECES) if chance.random() < 0.8 else random_characters
        yield text


def is_safe(text: str) -> bool:
    """True if the launcher accepts a text. Also assert that a refusal is one line."""
    try:
        refuse_unsafe([text])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def all_safe(arguments: Sequence[str]) -> bool:
    try:
        refuse_unsafe(arguments)
    except ConfigError:
        return False
    return True


def batches(seed: str, count: int = TEXTS) -> Iterator[list[str]]:
    """Yield all accepted texts of a test in batches."""
    all_texts = list(texts(count, seed))
    for start in range(0, count, BATCH_SIZE):
        batch = all_texts[start : start + BATCH_SIZE]
        printable = [text for text in batch if text.isprintable()]
        assert all(is_safe(text) == text.isprintable() for text in batch[:20])
        yield printable if all_safe(printable) else list(filter(is_safe, printable))


def job_of(arguments: Sequence[str], launch: Launch | None = None) -> ClusterJob:
    """Return a job whose arguments and environment variables have these texts as values."""
    variables = {f"V{number}": text for number, text in enumerate(arguments)}
    options = replace(launch or Launch(), nodes=2, image="image", env=variables)
    job = to_job(Loaded(replace(Config(), launch=options)), ["--job.description", *arguments])
    assert job.command[6:] == tuple(arguments), "the launcher changed an argument"
    assert dict(job.environment) == variables, "the launcher changed a variable"
    return job


def same(sent: Sequence[str], received: Sequence[str]) -> None:
    """Assert that both sequences are equal, and show the first difference."""
    differing = [(a, b) for a, b in zip(sent, received, strict=False) if a != b]
    assert not differing, f"sent {differing[0][0]!r}, received {differing[0][1]!r}"
    assert len(sent) == len(received)


class Recorder:
    """A folder of fake commands of a platform that record their input. Reading a record deletes it.

    Commands run in the empty folder ``inside``, so an injected command that writes a file is detected.
    """

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder, self.inside, self.record = folder, folder / "inside", folder / "record"
        self.inside.mkdir()
        for name, body in programs.items():
            path = folder / name
            path.write_text(f"#!{body}\n")
            path.chmod(0o755)

    def names(self, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Return the environment of commands."""
        return {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "RECORD": str(self.record),
            "HOME": str(self.inside),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **more,
        }

    def run(self, command: Sequence[str], text: str = "", **more: str) -> None:
        """Run a command that finds the fake programs, and assert that it wrote no file."""
        done = subprocess.run(
            command,
            input=text.encode(),
            cwd=self.inside,
            env=self.names(more),
            capture_output=True,
            timeout=patience.seconds(TIMEOUT),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        self.untouched()

    def untouched(self) -> None:
        assert not list(self.inside.iterdir()), "something ran that should not have"

    def read(self, name: str) -> list[str]:
        """Return the values recorded under a name, and delete the record."""
        path = Path(f"{self.record}.{name}")
        values = path.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        path.unlink()
        return values

    def variables(self) -> dict[str, str]:
        pairs = [text.partition("=") for text in self.read("env")]
        return {name: value for name, _, value in pairs}

    def arrived(self, job: ClusterJob) -> None:
        """Assert that the recorded arguments and variables are those of the job."""
        same(job.command[1:], self.read("argv"))
        recorded = self.variables()
        same(
            list(job.environment.values()),
            [recorded.get(name, "(none)") for name in job.environment],
        )


ARGV = """/bin/sh
printf '%s\\0' "$@" > "$RECORD.argv"
env -0 > "$RECORD.env"
"""
"""Fake program that records its arguments and environment."""
CREATED = """/bin/sh
if [ "$1" = create ]; then cat >> "$RECORD.created"; printf '\\0' >> "$RECORD.created"; fi
"""
"""Fake kubectl that records the input of each ``create`` request."""
EACH = """/bin/sh
printf '%s\\0' "$#" "$PWD" "$@" >> "$RECORD.each"
"""
"""Fake program that appends the number of its arguments, its working directory and the arguments to a record."""
