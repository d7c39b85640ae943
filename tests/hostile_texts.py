"""Hostile texts by the thousand, and commands that write down what they were given.

SHARDTRAIN_HOSTILE sets the number of texts for each renderer (500).
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
"""The same where each text costs several processes."""
AT_ONCE = min(TEXTS, 1000)
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
    """``count`` texts of up to six pieces, one in five of them of any characters; the same at each call."""
    chance = random.Random(seed)
    for _ in range(count):
        pieces = []
        for _ in range(chance.randint(0, 6)):
            any_text = "".join(chance.choices(_ALPHABET, k=chance.randint(1, 6)))
            pieces.append(chance.choice(PIECES) if chance.random() < 0.8 else any_text)
        yield "".join(pieces)


def is_safe(one: str) -> bool:
    """Whether a text is handed on; the others are refused in one line."""
    try:
        refuse_unsafe([one])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def all_safe(many: Sequence[str]) -> bool:
    try:
        refuse_unsafe(many)
    except ConfigError:
        return False
    return True


def batches(seed: str, count: int = TEXTS) -> Iterator[list[str]]:
    """All texts of a test, many at once, without those that are refused."""
    everything = list(texts(count, seed))
    for start in range(0, count, AT_ONCE):
        some = everything[start : start + AT_ONCE]
        printed = [one for one in some if one.isprintable()]
        assert all(is_safe(one) == one.isprintable() for one in some[:20])
        yield printed if all_safe(printed) else list(filter(is_safe, printed))


def job_of(many: Sequence[str], launch: Launch | None = None) -> ClusterJob:
    """The job of a configuration whose overrides and variables are these texts, as ``launch`` makes it."""
    variables = {f"V{number}": one for number, one in enumerate(many)}
    wanted = replace(launch or Launch(), nodes=2, image="image", env=variables)
    job = to_job(Loaded(replace(Config(), launch=wanted)), ["--job.description", *many])
    assert job.command[5:] == tuple(many) and dict(job.environment) == variables, "nothing is refused or changed"
    return job


def same(sent: Sequence[str], got: Sequence[str]) -> None:
    """The two are equal; else the first text that is not is shown."""
    differing = [(a, b) for a, b in zip(sent, got, strict=False) if a != b]
    assert not differing, f"sent {differing[0][0]!r}, arrived {differing[0][1]!r}"
    assert len(sent) == len(got)


class Recorder:
    """A folder of commands that stand for a platform's; what they were given is read once each time."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder, self.inside, self.record = folder, folder / "inside", folder / "record"
        self.inside.mkdir()
        for name, body in programs.items():
            path = folder / name
            path.write_text(f"#!{body}\n")
            path.chmod(0o755)

    def names(self, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """The environment of what is run."""
        own = {"PATH": f"{self.folder}:{os.environ['PATH']}", "RECORD": str(self.record), "HOME": str(self.inside)}
        return {**own, "PYTHONPATH": str(Path(__file__).parents[1]), **more}

    def run(self, command: Sequence[str], text: str = "", **more: str) -> None:
        """Run a command with these programs; nothing else may have happened."""
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

    def read(self, what: str) -> list[str]:
        """The words that were written down under a name, and no more of them."""
        path = Path(f"{self.record}.{what}")
        words = path.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        path.unlink()
        return words

    def variables(self) -> dict[str, str]:
        pairs = [one.partition("=") for one in self.read("env")]
        return {name: value for name, _, value in pairs}

    def arrived(self, job: ClusterJob) -> None:
        """Arguments and variables are those of the job."""
        same(job.command[1:], self.read("argv"))
        names = self.variables()
        same(list(job.environment.values()), [names.get(one, "(none)") for one in job.environment])


ARGV = """/bin/sh
printf '%s\\0' "$@" > "$RECORD.argv"
env -0 > "$RECORD.env"
"""
"""Writes down arguments and variables."""
CREATED = """/bin/sh
if [ "$1" = create ]; then cat >> "$RECORD.created"; printf '\\0' >> "$RECORD.created"; fi
"""
"""Stands for kubectl: keeps the input of each request to create something."""
EACH = """/bin/sh
printf '%s\\0' "$#" "$PWD" "$@" >> "$RECORD.each"
"""
"""Adds how many arguments it had, its folder and the arguments to what was written before."""
