"""A command in a fork of the tests behaves as in a new interpreter: the tests run each command in both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import patience
import pytest

PROGRAM = """\
import atexit, logging, os, random, signal, sys, tempfile, threading, warnings

def show():
    print(__name__, sys.argv[1:], os.getcwd(), sorted(os.environ.items()), sys.path[0] == os.path.dirname(__file__))
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.getsignal(signal.SIGINT), logging.root.handlers)
    print(tempfile.gettempdir(), threading.active_count(), sys.stdin.read(), os.getsid(0) == os.getpid())
    print(sorted(os.listdir("/proc/self/fd"))[:3], sys.excepthook is sys.__excepthook__)
    print("error", file=sys.stderr)

atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.Event().wait(0.1), print("a thread that delays the exit"))).start()
"""
ENDS = {
    "well": "show()",
    "status": "sys.exit(7)",
    "message": "sys.exit('a message')",
    "exception": "raise ValueError('a message')",
    "signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "signal.raise_signal(signal.SIGINT)",
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and forks")


@pytest.mark.parametrize("end", ENDS)
def test_fork_behaves_like_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{PROGRAM}\n{ENDS[end]}\n")
    (tmp_path / "temporary").mkdir()
    # background jobs of a shell ignore SIGINT
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setenv("UNWANTED", "of the tests")
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path / "temporary"),
        "LC_CTYPE": "C.UTF-8",
    }
    answers = []
    for run in (subprocess.run, forked.run):
        done = run(
            [sys.executable, str(program), "--some", "arguments"],
            input="the input", env=environment, cwd=tmp_path, capture_output=True, text=True,
            start_new_session=True, timeout=patience.seconds(60),
        )  # fmt: skip
        # Compare only the last line of a traceback, because a fork has additional frames.
        answers.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))

    assert answers[0] == answers[1]


def test_terminated_fork_closes_its_pipes() -> None:
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with forked.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ)
    ) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=patience.seconds(60))

    assert process.returncode == -signal.SIGTERM


def test_inspecting_the_stack_of_a_fork_reads_no_source(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import inspect, linecache\n"
        "linecache.getlines = lambda *_: 1 / 0\n"
        "def outer():\n    return inner()\n"
        "def inner():\n    return [frame.function for frame in inspect.stack()[:2]]\n"
        "print(outer())\n"
    )
    done = forked.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=patience.seconds(60)
    )

    assert (done.stdout, done.stderr) == ("['inner', 'outer']\n", "")


def test_fork_of_a_process_that_has_compiled_can_compile(tmp_path: Path) -> None:
    """The child has no copy of the parent's compiling thread, and must not wait for it."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.pool().submit(abs, -1).result()  # after the result, the pool has an idle thread
    program = tmp_path / "program.py"
    program.write_text(
        "from torch._inductor.async_compile import AsyncCompile\n"
        "print(AsyncCompile.pool().submit(abs, -1).result(timeout=30))\n"
    )
    done = forked.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=patience.seconds(60)
    )

    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
