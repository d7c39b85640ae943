"""Tokenizer libraries abort if memory runs out under a ulimit, so texts that need too much are refused before that."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import forked
import patience
import pytest
from tiny_tokenizers import bpe_folder

from shardtrain.data import sandbox
from shardtrain.data.tokenizers import open_tokenizer
from shardtrain.utils import limits
from shardtrain.utils.errors import ConfigError, OutOfMemoryError

MIB = 2**20
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces these limits")

PROGRAM = """
import resource, sys
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.utils.errors import OutOfMemoryError
limit, free, texts, size = sys.argv[1], *map(int, sys.argv[2:])
tokenizer = open_tokenizer("python_bpe")
tokenizer.encode_batch(["a"] * 8)
field = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}[limit]
(used,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)]
value = used * 1024 + free * 2**20
resource.setrlimit(getattr(resource, limit), (value, value))
try:
    ids = tokenizer.encode_batch(["a, b; " * (size // 6)] * texts)
    print(len(ids), len({row.tobytes() for row in ids}))
except OutOfMemoryError as error:
    print(error)
"""


@LINUX_ONLY
@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
@pytest.mark.parametrize(
    ("texts", "size", "result"),
    [
        # One text that does not fit, and a batch that fits only in parts.
        (
            1,
            4_000_000,
            "memory ran out (tokenizing 3.81 MiB of text may need 1.13 GiB) under ulimit -",
        ),
        (2000, 6_000, "2000 1"),
        (4, 6_000, "4 1"),
    ],
)
def test_batch_is_divided_or_refused_under_a_ulimit(
    limit: str, texts: int, size: int, result: str
) -> None:
    # Threads of the library reserve address space, which counts towards RLIMIT_AS only.
    free = 600 if limit == "RLIMIT_AS" else 300
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, limit, str(free), str(texts), str(size)],
        capture_output=True, text=True, timeout=patience.seconds(120), check=False,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "true"},
    )  # fmt: skip

    assert done.stdout.startswith(result), done
    assert done.returncode == 0


@LINUX_ONLY
def test_run_without_memory_for_its_tokenizer_exits_with_7(tmp_path: Path) -> None:
    """A run of one rank has no launcher that could report an abort."""
    text = tmp_path / "large.txt"
    text.write_text("a, b; " * 500_000)
    command = [
        sys.executable, "-m", "shardtrain", "train", "debug", "--nproc=1", f"--job.dump_folder={tmp_path / 'run'}",
        "--training.dataset=text", f"--training.dataset_path={text}",
    ]  # fmt: skip
    most = 614_400 * 1024
    done = forked.run(
        command, capture_output=True, text=True, timeout=patience.seconds(120),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)),
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip

    assert done.returncode == 7, done.stderr

    written = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert written["code"] == 7
    assert "may need" in written["message"]
    assert "under ulimit -d=600.00 MiB: raise it with ulimit -d" in written["message"]


def test_without_a_ulimit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: infinite)
    limits.require_memory(2**60, "tokenizing a text")

    # Under a ulimit, the same request is refused. Without this check, the test would pass if
    # nothing were ever refused.
    finite = (2**30, 2**30)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: finite)

    with pytest.raises(OutOfMemoryError):
        limits.require_memory(2**60, "tokenizing a text")


@pytest.mark.parametrize("status", [-signal.SIGABRT, -signal.SIGSEGV, 1])
def test_ulimit_below_the_limit_of_the_child_is_named(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = limits.Limit("ulimit -d", 400 * MIB, 0, 0, "raise it with ulimit -d")
    monkeypatch.setattr(limits, "read", lambda: [low])
    with pytest.raises(
        OutOfMemoryError, match=r"^memory ran out .* under ulimit -d=400.00 MiB: raise it"
    ):
        sandbox._verdict(b"", status)

    # The child's own refusal is attributed to the ulimit too.
    too_large = json.dumps(
        {
            "refused": "needs more than data.artefact_memory_bytes=5 to open",
            "failed": [],
            "errno": 0,
        }
    )

    with pytest.raises(OutOfMemoryError, match="^memory ran out"):
        sandbox._verdict(too_large.encode(), 0)

    # Without a ulimit, it is attributed to the limit of the child.
    monkeypatch.setattr(limits, "read", list)
    assert "data.artefact_memory_bytes" in sandbox._verdict(b"", status)


def test_child_that_is_too_late_is_refused_with_limit_time_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_opened_before", set())
    monkeypatch.setattr(sandbox, "wall_seconds", lambda: 0.0)
    with pytest.raises(ConfigError) as refused:
        open_tokenizer.open_tokenizer(str(bpe_folder(tmp_path)))

    message = str(refused.value)
    assert "was not opened within 0 s on the clock" in message
    assert "data.artefact_seconds=30" in message
    assert "of which its process computed for" in message
    assert message.endswith("less busy, or raise data.artefact_seconds")


def test_limit_of_cpu_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        sandbox._verdict(b"", -signal.SIGXCPU)
        == "takes more than data.artefact_seconds=30 of CPU time to open"
    )
    # The wall-clock limit is much longer than the limit of CPU time.
    assert sandbox.wall_seconds() >= 20 * sandbox.limits().seconds
