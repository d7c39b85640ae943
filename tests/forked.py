"""Run Python commands in a fork of this process, which has already imported PyTorch, instead of a new interpreter.

A new ``python -m shardtrain train`` needs four CPU seconds for imports, while its few steps take a tenth of a second.
``Popen`` and ``run`` behave like those of ``subprocess`` for commands that start with this interpreter: pipes, signals,
sessions, exit statuses, working directory, environment, arguments and standard streams are the same. Differences: an
interpreter's settings at startup (``PYTHONHASHSEED``) have no effect, ``/proc`` shows another command line, and modules
are already imported. Tests that depend on these start a real process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import inspect
import logging
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.utils.tensorboard

import shardtrain.train.trainer  # noqa: F401
from shardtrain.config.options import options
from shardtrain.utils import heartbeat

options()  # fill the cache before forks, which inherit it
SEED = torch.initial_seed()
"""PyTorch's seed in a new interpreter."""
STACKS = signal.SIGRTMAX
"""On this signal, a forked command writes the stacks of its threads to standard error and continues."""


class Popen(subprocess.Popen):
    """``subprocess.Popen`` of ``[sys.executable, "-m", MODULE, ...]`` or ``[sys.executable, FILE, ...]``."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
                       env: Mapping[str, str] | None, startupinfo: Any, creationflags: int, shell: bool,
                       p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
                       restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int, start_new_session: bool,
                       process_group: int) -> None:  # fmt: skip
        command = [os.fspath(argument) for argument in args]
        assert command[0] == sys.executable and not shell, command
        assert command[1] == "-m" or not command[1].startswith("-"), command
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return
        try:
            # Duplicate all pipe ends first: a descriptor below 3 could be overwritten by dup2 before its use.
            ends = [end if end == -1 else os.dup(end) for end in (p2cread, c2pwrite, errwrite)]
            for number, end in enumerate(ends):
                if end != -1:
                    os.dup2(end, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            if start_new_session:
                os.setsid()
            if process_group >= 0:
                os.setpgid(0, process_group)
            if umask >= 0:
                os.umask(umask)
            if cwd is not None:
                os.chdir(cwd)
            _reset_process(dict(os.environ if env is None else env))
            if preexec_fn is not None:
                preexec_fn()
        except BaseException:
            traceback.print_exc()
            os._exit(255)
        _run(command)


def run(
    command: Any, *, input: Any = None, capture_output: bool = False, timeout: float | None = None,
    check: bool = False, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """Run a command like ``subprocess.run``."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _reset_process(environment: dict[str, str]) -> None:
    """Reset process state that tests have changed to that of a new interpreter."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in (signal.SIGPIPE, signal.SIGXFSZ)
        if callable(signal.getsignal(number)) or ignored:
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    heartbeat.not_silent()  # reset the timer, which started before the fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    faulthandler.disable()
    faulthandler.register(STACKS, file=2)
    inspect.stack = _stack  # type: ignore[assignment]
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = sys.__stdin__ = os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    tempfile.tempdir = None  # TMPDIR may have changed
    random.seed()
    torch.manual_seed(SEED)
    gc.enable()


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """Replacement of ``inspect.stack`` that omits source lines, which are slow to find.

    PyTorch's rendezvous inspects the stack for each of its messages. In a test with a hundred frames and six
    thousand modules, each call took seconds. On a busy machine it exceeded the 15 s after which a silent node
    counts as dead, so the rendezvous of two nodes failed.
    """
    frame = sys._getframe(1)
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(
            inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
        )
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _run(command: list[str]) -> NoReturn:
    """Run the command in this process, and exit like an interpreter."""
    code = 0
    try:
        if command[1] == "-m":
            # the working directory may have been deleted
            with contextlib.suppress(FileNotFoundError):
                sys.path.insert(0, os.getcwd())
            sys.path[1:1] = _python_path()
            sys.argv = ["-m", *command[3:]]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [os.path.dirname(os.path.abspath(command[1])), *_python_path()]
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int):
            code = ended.code
        elif ended.code is not None:
            print(ended.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        pass
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            signal.raise_signal(-code)
        os._exit(code & 0xFF)
