"""Check the rendezvous endpoint before PyTorch uses it: host name, connection, and the program that answers.

PyTorch's store retries for minutes in C++. During this time signals are not handled, and the cause is not reported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NotSaved,
    OutOfMemoryError,
    PeerError,
    Preempted,
    Problem,
    ShardtrainError,
    StorageError,
)
from shardtrain.utils.listening import (
    LISTEN_ADDRESS,
    listen_address,
    open_listener,
    rendezvous_listener,
)
from shardtrain.utils.redact import visible

LOOK_SECONDS = 0.1
QUIET_SECONDS = 5.0
"""Time after which a wait is reported with its cause."""
CONNECT_SECONDS = 5.0
MOST_SHOWN_BYTES = 80
"""Length of the part of a stranger's reply that the error shows."""
_NAME_AN_ADDRESS = "name an address of this node that every node can reach"
_IS_IT_UP = "check that the first node is up and its port is open"
# A TCPStore client first sends VALIDATE with a magic number, then PING with a number that the store sends
# back. The bytes of the PING are also an empty line, to which servers of text protocols such as HTTP reply.
_ECHO = b"\r\n\r\n"
_VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)
_PING = b"\x0d" + _ECHO
GREETING = _VALIDATE + _PING
_COUNTER = struct.Struct("<q")
"""Value of a counter in a reply of the store."""
_REFUSED = b"shardtrain refused: "
"""Start of the reply of a first node that cannot run. The reason follows."""
REFUSAL_SECONDS = 120.0
"""Time in which a node that cannot run tries to notify the other nodes, which may still import PyTorch."""
STOP_SECONDS = 20.0
"""Time in which a node that must stop before its ranks run tries to notify the other nodes."""

is_telling = threading.Event()
"""Set while this process tells the other nodes that it stops. Its rendezvous then ignores the reason in the store."""
Result = TypeVar("Result")


def within(seconds: float | None, action: Callable[[], Result]) -> Result:
    """Run ``action`` in another thread and return its result. Meanwhile this thread can handle signals and a timeout.

    Raises:
        TimeoutError: the action takes longer than ``seconds``. Its thread continues in the background.
    """
    return in_background(action).result(seconds)


def in_background(action: Callable[[], Result]) -> Future[Result]:
    """Run ``action`` in another thread, and return its future result."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def write_refusal(error: ShardtrainError) -> str:
    """Return the reason why this node cannot run: its exit code, and one line for each problem."""
    host = f"host {socket.gethostname()}"
    lines = [str(problem) for problem in getattr(error, "problems", (error,))]
    # The messages about limits name the host already.
    named = [line if host in line else f"{host} cannot run: {line}" for line in lines]
    return f"{error.exit_code} " + "\n".join(named)


def read_refusal(text: str) -> ShardtrainError:
    """Return the error of another node that cannot run, from the text of ``write_refusal``."""
    code, _, message = text.partition(" ")
    kinds = {
        str(kind.exit_code): kind
        for kind in (
            ConfigError,
            DataError,
            CheckpointError,
            OutOfMemoryError,
            StorageError,
            Preempted,
            NotSaved,
        )
    }
    lines = tuple(visible(line) for line in message.splitlines())
    error = kinds.get(code, PeerError)("\n".join(lines))
    error.problems = lines
    return error


def claim(endpoint: str, seconds: float) -> socket.socket:
    """Wait until a connection to ``endpoint`` reaches this process. Return the socket, on which the store can listen.

    Raises:
        ConfigError: another program uses the port, or ``SHARDTRAIN_LISTEN_ADDR`` is not an address of this machine.
        PeerError: no connection arrived within ``seconds``.
    """
    fix = _NAME_AN_ADDRESS + _check_listen_address()
    return _await(endpoint, seconds, partial(_serve, endpoint), "the nodes cannot meet at", fix)


def check_own(address: str, seconds: float) -> None:
    """Wait until a connection to ``address``, which the other nodes use for this one, reaches this process.

    Raises:
        PeerError: no connection arrived within ``seconds``.
    """
    problem = "this node cannot be reached at its own address (SHARDTRAIN_LOCAL_ADDR)"

    def look() -> None:
        # Port 0 selects any free port.
        _reach_self(f"{address}:0", open_listener).close()

    _await(address, seconds, look, problem, _NAME_AN_ADDRESS)


def await_store(endpoint: str, seconds: float) -> None:
    """Wait until the store of the first node answers at ``endpoint``.

    Raises:
        ConfigError: another program answers.
        PeerError: no store answered within ``seconds``. The message contains the last cause.
    """
    _await(endpoint, seconds, partial(_greet, endpoint), "the nodes cannot meet at", _IS_IT_UP)


def serve_refusal(
    endpoint: str,
    reason: str,
    other_nodes: int,
    seconds: float | None = None,
    listener: socket.socket | None = None,
) -> bool:
    """Reply to the greetings of the other nodes with the reason why this first node cannot run.

    Starts no thread, because the limit on threads may be the reason. Returns when all nodes have the reply, or after
    ``seconds`` (``REFUSAL_SECONDS`` by default); False immediately if this host cannot listen at ``endpoint``.

    Args:
        listener: A socket that listens at ``endpoint``. This function closes it.
    """
    host, _, port = endpoint.rpartition(":")
    end = time.monotonic() + (REFUSAL_SECONDS if seconds is None else seconds)
    listens = False
    # UnicodeError: a host name with an empty or a very long label
    with (
        contextlib.suppress(OSError, UnicodeError, ConfigError),
        listener or rendezvous_listener(host, int(port)) as server,
    ):
        listens = True
        while other_nodes and (remaining := end - time.monotonic()) > 0:
            server.settimeout(remaining)
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.settimeout(LOOK_SECONDS)
                if connection.recv(65_536).startswith(_VALIDATE):
                    connection.sendall(_REFUSED + reason.encode())
                    other_nodes -= 1
    return listens


def send_refusal(
    endpoint: str, key: str, reason: bytes, seconds: float | None = None, hears_all: int = 0
) -> None:
    """Set ``key`` in the store of the first node to the reason why this node cannot run.

    Starts no thread and does not import PyTorch. Returns without an error if the first node does not reply within
    ``seconds`` (``REFUSAL_SECONDS`` by default), or cannot run either.

    Args:
        hears_all: Number of nodes that must know a reason before this returns. 0 does not wait for them.
    """
    # A SET message of PyTorch's store.
    message = b"\x01" + _store_text(_store_key(key)) + _store_text(reason)
    end = time.monotonic() + (REFUSAL_SECONDS if seconds is None else seconds)
    is_written = False
    while time.monotonic() < end:
        with contextlib.suppress(OSError, UnicodeError):
            try:
                if not is_written:
                    _greet(endpoint, _VALIDATE + message + _PING)
                    is_written = True
                    _add(endpoint, readers_key(key), 1)
                if not hears_all or _add(endpoint, readers_key(key), 0) >= hears_all:
                    return
            except ShardtrainError:
                return
        time.sleep(LOOK_SECONDS)


def readers_key(key: str) -> str:
    """Return the key of the counter of nodes that know the reason at ``key``."""
    return f"{key}/read"


def _store_key(key: str) -> bytes:
    """Return a key as PyTorch's store writes the keys of its clients."""
    return b"/" + key.encode()


def _store_text(text: bytes) -> bytes:
    """Return a key or a value as in a message to PyTorch's store."""
    return struct.pack("<Q", len(text)) + text


def _add(endpoint: str, key: str, amount: int) -> int:
    """Add to a counter of the store at ``endpoint`` without PyTorch, and return its new value.

    Raise OSError without a reply.
    """
    message = b"\x04" + _store_text(_store_key(key)) + struct.pack("<q", amount)
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
        connection.sendall(_VALIDATE + message)
        reply = connection.recv(_COUNTER.size, socket.MSG_WAITALL)
    if len(reply) != _COUNTER.size:
        raise OSError("the connection is closed immediately")
    value: int = _COUNTER.unpack(reply)[0]
    return value


def find_place(endpoint: str, seconds: float) -> socket.socket | None:
    """Wait for the rendezvous, and decide which node serves it.

    If this node can serve it, return a socket on which the store can listen, like ``claim``. If another
    node serves it, return None.

    Raises:
        ConfigError: another program answers, or ``SHARDTRAIN_LISTEN_ADDR`` is not an IP address.
        PeerError: see ``await_store``.
    """
    # Check the variable first, because a ConfigError below means that another node may serve the rendezvous.
    fix = _IS_IT_UP + _check_listen_address()

    def look() -> socket.socket | None:
        with contextlib.suppress(ConfigError, OSError, UnicodeError):
            return _serve(endpoint)
        _greet(endpoint)
        return None

    return _await(endpoint, seconds, look, "the nodes cannot meet at", fix)


def _check_listen_address() -> str:
    """Return the end of a fix that names the variable, or "" if it is not set.

    Raises the errors of ``listen_address``.
    """
    address = listen_address()
    return f"; check {LISTEN_ADDRESS}={address}, too" if address else ""


def _await(
    place: str, seconds: float, look: Callable[[], Result], problem: str, fix: str
) -> Result:
    """Call ``look`` until it raises no OSError, and return its result. ``place`` is the address for messages.

    Raises:
        PeerError: ``look`` still fails after ``seconds``. The message contains its last error.
    """
    end = time.monotonic() + seconds
    cause = "no reply"
    is_reported = False
    while (remaining := end - time.monotonic()) > 0:
        try:
            return within(remaining, look)
        except (OSError, UnicodeError) as error:
            cause = getattr(error, "strerror", None) or str(error) or cause
        if remaining < seconds - QUIET_SECONDS and not is_reported:
            print(f"waiting for {place}: {cause}", file=sys.stderr, flush=True)
            is_reported = True
        time.sleep(LOOK_SECONDS)
    raise PeerError(f"{problem} {place}: {cause}, after {seconds:g} s; {fix}")


def _serve(endpoint: str) -> socket.socket:
    try:
        return _reach_self(endpoint, rendezvous_listener)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        rule = f"cannot be served from this host: {os.strerror(error.errno)}"
        fix = "choose another port, or end the program that uses it"
        raise ConfigError(Problem("rendezvous", endpoint, rule, fix)) from None


def _reach_self(endpoint: str, listen: Callable[[str, int], socket.socket]) -> socket.socket:
    """Listen on the port of ``endpoint`` and connect to it.

    Raise OSError if the connection does not arrive.
    """
    host, _, port = endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(host, int(port)))
        server.settimeout(CONNECT_SECONDS)
        place = (host.strip("[]"), server.getsockname()[1])
        connection = stack.enter_context(socket.create_connection(place, CONNECT_SECONDS))
        token = secrets.token_bytes(16)
        connection.sendall(token)
        received = b""
        # Other clients may connect first. Close their connections, and they will retry.
        while received != token:
            try:
                arrived = server.accept()[0]
            except TimeoutError:
                raise OSError(
                    f"the address belongs to another machine ({connection.getpeername()[0]})"
                ) from None
            # A client that sends nothing must not block this node. The token was sent before this
            # connection is accepted.
            with arrived, contextlib.suppress(TimeoutError, ConnectionError):
                arrived.settimeout(LOOK_SECONDS)
                received = arrived.recv(len(token))
        server.settimeout(None)
        return server.dup()


def _greet(endpoint: str, greeting: bytes = GREETING) -> None:
    """Send a greeting to the store at ``endpoint``.

    Raise OSError without a reply, ConfigError if another program replies, and the first node's error if it cannot
    run.
    """
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
        connection.sendall(greeting)
        try:
            reply = connection.recv(4096)
        except TimeoutError:
            raise OSError("a program accepts the connection but does not reply") from None
    if not reply:
        raise OSError("the connection is closed immediately")
    if reply.startswith(_REFUSED):
        raise read_refusal(reply.removeprefix(_REFUSED).decode(errors="replace"))
    if reply != _ECHO:
        words = visible(reply[:MOST_SHOWN_BYTES].decode("latin-1"), lines=False)
        rule = f'is used by another program, which answers "{words}"'
        raise ConfigError(
            Problem("rendezvous", endpoint, rule, "choose another port, or end that program")
        )
