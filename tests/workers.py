"""Fork the workers of pytest-xdist from one process that has imported all tests.

A normal worker imports PyTorch, transformers and every test file, and rewrites the assertions: 13 CPU seconds, or 25 in
a new clone, for each of four workers. A forked worker only collects, which takes 3 seconds. This works only on Linux.
On other systems, and with one worker, pytest-xdist starts its normal workers.

``Server`` starts the process that forks. ``Server.command`` replaces the Python interpreter of a worker: it passes its
standard streams to a fork, and exits with the status of the fork.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); import workers; workers.serve(int(sys.argv[2]), sys.argv[3:])"
"""Code of the main module. Like that of a worker, it has no file, which spawned processes would run again."""


class Server:
    """The process from which workers are forked. It ends with this process or with ``close``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardtrain-workers-")
        self._path = str(Path(self._folder.name) / "socket")
        tests_folder = str(Path(__file__).parent)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen()
            command = [
                sys.executable,
                "-c",
                BOOTSTRAP,
                tests_folder,
                str(listener.fileno()),
                *arguments,
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
            )

    def command(self) -> str:
        """Return the command that pytest-xdist runs as the Python interpreter of a worker."""
        return shlex.join([sys.executable, "-I", "-S", __file__, self._path])

    def close(self) -> None:
        """Stop the process and the remaining workers."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        import patience  # not importable when this file runs as a command

        try:
            self._process.wait(patience.seconds(20))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def is_possible() -> bool:
    """True if this system can wait for forks and for their callers at the same time."""
    return hasattr(os, "pidfd_open") and hasattr(socket, "send_fds")


def serve(listener_fd: int, arguments: list[str]) -> None:
    """Import the tests that pytest collects with ``arguments``, and fork a worker for each connection."""
    # the controller handles interrupts, and stops its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _collect(arguments)
    with socket.socket(fileno=listener_fd) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        callers: dict[int, tuple[int, socket.socket]] = {}  # key: pidfd of the worker
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    caller = listener.accept()[0]
                    pid = _fork(
                        caller, [listener, selector, *(caller for _, caller in callers.values())]
                    )
                    pidfd = os.pidfd_open(pid)
                    callers[pidfd] = pid, caller
                    selector.register(pidfd, selectors.EVENT_READ)
                    selector.register(caller, selectors.EVENT_READ, pid)
                elif key.fd in callers:
                    pid, caller = callers.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    if caller in selector.get_map():
                        selector.unregister(caller)
                        caller.sendall(bytes([code if code >= 0 else 128 - code]))
                    caller.close()
                elif key.data is not None:  # the caller was killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
                else:  # the controller has closed standard input, or has exited
                    for pid, _ in callers.values():
                        os.kill(pid, signal.SIGKILL)
                    return


def _collect(arguments: list[str]) -> None:
    import gc

    import pytest

    originals = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    helper = _rewrite_from_the_end()
    gc.disable()  # a million objects stay alive, and each collection would visit them
    try:  # the workers report collection errors
        pytest.main(
            [*arguments, "--collect-only", "-n", "0", "-p", "no:cacheprovider"],
            plugins=[_Forgetful()],
        )
    finally:
        for number, original in enumerate(originals, 1):
            os.dup2(original, number)
            os.close(original)
        os.close(null)
    if helper:
        os.waitpid(helper, 0)
    gc.enable()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects that it visits


class _Forgetful:
    """Plugin that drops the collected items and the modules whose import failed.

    Each worker collects again. A failed import leaves an empty module in sys.modules, in which workers
    would find neither tests nor the error.
    """

    @staticmethod
    def pytest_collectreport(report: pytest.CollectReport) -> None:
        if report.failed:
            path = os.path.abspath(report.nodeid.partition("::")[0])
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) == path:
                    del sys.modules[name]

    @staticmethod
    def pytest_sessionfinish(session: pytest.Session) -> None:
        session.items.clear()
        session.config.pluginmanager.getplugin(
            "terminalreporter"
        ).stats.clear()  # stats hold deselected items


def _rewrite_from_the_end() -> int:
    """Fork a process that compiles the package and the tests, in reverse order. Return its process id, or 0.

    In a new clone, compiling is half of the cost of collecting, and the second core is idle meanwhile. Collecting
    starts with the first file, so both meet midway. The functions of pytest used here are not public. If they change,
    files are compiled on import.
    """
    if sys.dont_write_bytecode:
        return 0
    if pid := os.fork():
        return pid
    try:
        import compileall
        from types import SimpleNamespace

        from _pytest.assertion import rewrite

        tests = Path(__file__).parent
        quiet = SimpleNamespace(trace=lambda text: None)
        for path in sorted(tests.rglob("test_*.py"), reverse=True):
            cached = rewrite.get_cache_dir(path) / (path.name[:-3] + rewrite.PYC_TAIL)
            if rewrite.try_makedirs(cached.parent) and rewrite._read_pyc(path, cached) is None:
                stamp, code = rewrite._rewrite_test(path, None)
                rewrite._write_pyc(quiet, code, stamp, cached)
        compileall.compile_dir(tests.parent / "shardtrain", quiet=2)
    finally:
        os._exit(0)


def _fork(caller: socket.socket, others: list[socket.socket | selectors.BaseSelector]) -> int:
    """Fork a worker with the standard streams of ``caller``. Return its process id."""
    _, streams, _, _ = socket.recv_fds(caller, 1, 3)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        return pid
    try:
        for resource in (*others, caller):
            resource.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def _work() -> NoReturn:
    """Run the line with which execnet starts a worker, as ``python -u -c`` does."""
    import random

    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.argv = ["-c"]
    sys.stdin = sys.__stdin__ = os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    code = 0
    try:
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def ask(path: str) -> int:
    """Run a worker with the standard streams of this process. Return its exit status."""

    def end(signum: int, frame: FrameType | None) -> None:
        os._exit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"w"], [0, 1, 2])
        os.close(0)
        os.close(1)
        status = server.recv(1)
    return status[0] if status else 1


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1]))
