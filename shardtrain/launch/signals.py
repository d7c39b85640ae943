"""Signal handling: convert signals to a ``StopRequest``, even while the main thread is blocked.

A Python signal handler runs only in the main thread, which may wait in a collective for minutes.
Therefore the interpreter also writes the number of each signal to a socket
(``signal.set_wakeup_fd``), which a thread reads.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

from shardtrain.checkpoint import retention
from shardtrain.checkpoint.storage import Place
from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS, StopRequest
from shardtrain.utils import process
from shardtrain.utils.stop_signals import GRACEFUL, die_with_parent, handle_requests
from shardtrain.utils.variables import is_whole_number

_current = StopRequest()


def current() -> StopRequest:
    """Return the request of this process. It is empty before ``listen``."""
    return _current


def listen(
    grace_seconds: float,
    can_save: bool,
    hurry: Callable[[str], None],
    parent: int = 0,
    end_time: float | None = None,
) -> StopRequest:
    """Start to receive requests to stop. Call this once per process, in its main thread.

    Args:
        hurry: Ends the process. Called in a thread when the grace period is
            over or a second SIGINT arrives.
        parent: Process ID of the launcher, which is notified of the first request
            and forwards it to the other ranks.
    """
    global _current
    _current = stop = StopRequest(grace_seconds, can_save, end_time)
    stop.is_starting = True
    # The C signal handler writes the number of each signal here, even while Python waits inside a collective.
    receiver, sender = socket.socketpair()
    stop.receiver = receiver
    sender.setblocking(False)
    handle_requests(stop.handle)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def notify_launcher() -> None:
        if parent and os.getppid() == parent:
            os.kill(parent, signal.SIGTERM)
        elif stop.was_starting:
            process.stop_agent()

    threading.Thread(
        target=_watch,
        args=(stop, receiver, hurry, notify_launcher),
        name="stopping",
        daemon=True,
    ).start()
    _keep_from_children(sender, os.getpid())
    # The launcher has blocked these signals until a handler exists, so no early
    # signal ends a rank without a save.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GRACEFUL)
    return stop


def _watch(
    stop: StopRequest,
    numbers: socket.socket,
    hurry: Callable[[str], None],
    notify_launcher: Callable[[], None],
) -> None:
    """Thread function: record signals from the bytes in ``numbers``, wake the main thread,
    and enforce the deadline.

    ``hurry`` ends the process for the given reason. ``notify_launcher`` notifies the launcher of the request.
    """

    def end(reason: str) -> None:
        if stop.end_lock.acquire(blocking=False):
            hurry(reason)

    notified = False
    interrupted_at = -math.inf
    while True:
        ready, _, _ = select.select([numbers], [], [], stop.next_look_seconds())
        for number in numbers.recv(64) if ready else b"":
            # A library may have replaced the handler, for example of SIGALRM for a time limit.
            if number in GRACEFUL and signal.getsignal(number) == stop.handle:
                stop.note(signal.Signals(number).name)
            if number == signal.SIGINT:
                # Ctrl-C reaches this process directly and through the launcher, which counts as one request.
                # A later SIGINT is a second request.
                if (
                    interrupted_at > -math.inf
                    and time.monotonic() - interrupted_at > ONE_REQUEST_SECONDS
                ):
                    end("a second SIGINT")
                if interrupted_at == -math.inf:
                    interrupted_at = time.monotonic()
        if stop.is_requested() and not notified:
            notified = True
            notify_launcher()
            # Interrupt the main thread: another thread may have received the signal, and there is no
            # signal when the time of the job runs out.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if stop.remaining_seconds() <= 0 and not stop.closed:
            end(f"{stop.reason} when the grace period was over")


def _keep_from_children(sender: socket.socket, owner: int) -> None:
    """Detach forked data workers from this process's signal socket, and make
    them end when this process ends.
    """
    main = threading.get_ident()

    def forget() -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        sender.close()
        for number in GRACEFUL:
            # A signal may go to the entire process group. Workers ignore it, except SIGTERM, with which this
            # process ends them.
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        # The kernel sends the signal when the forking thread ends, and a thread other than the main thread
        # may end early.
        if threading.get_ident() == main and os.getppid() == owner:
            die_with_parent(signal.SIGKILL)

    os.register_at_fork(after_in_child=forget)


def end_children() -> None:
    """Kill the data workers, because this process is about to exit without joining them."""
    for child in multiprocessing.active_children():
        child.kill()


def end_time_of(environment: Mapping[str, str]) -> float | None:
    """Return the end of the Slurm job in seconds since the epoch, or None outside of one.

    >>> end_time_of({"SLURM_JOB_END_TIME": "1700000000"}), end_time_of({}), end_time_of({"SLURM_JOB_END_TIME": ""})
    (1700000000.0, None, None)
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    if is_whole_number(text) and int(text) > 0:
        return float(text)
    return None


def newest_checkpoint(folder: Place) -> Place | None:
    """Return the checkpoint with the highest step in ``folder``.

    None without one, or if the store does not answer.
    """
    with contextlib.suppress(OSError):
        steps = retention.steps(folder)
        return folder / f"step-{steps[-1]}" if steps else None
    return None


def step_of(checkpoint: Place | None) -> int:
    """Return the step in a checkpoint's name, or -1 for None.

    >>> from pathlib import Path
    >>> step_of(Path("outputs/checkpoint/step-40")), step_of(None)
    (40, -1)
    """
    return int(checkpoint.name[5:]) if checkpoint else -1
