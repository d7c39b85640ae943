"""A loopback interface for the processes of one run, in a Linux network namespace (network_namespaces(7)).

Gloo does not authenticate connections, and every user of a machine can connect to its loopback address. A
socket belongs to the network namespace of the thread that creates it. One thread of each rank therefore
creates gloo's sockets in this namespace, and the other threads stay in the normal network.

A user without privileges needs a user namespace around the network namespace. It maps the same user and
group. A process can only enter it while it has a single thread. Inside, a process keeps one capability
(capabilities(7)), so its rights over files do not change. A process with other capabilities would lose
them and does not enter.

If the kernel does not allow this, there is no namespace, and the ranks use the normal loopback interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
NETWORK = "SHARDTRAIN_NETWORK"
"""Variable with the descriptors of the user namespace (-1 if not needed) and the network, as 5:6, for forked ranks."""
_NEW_USER = 0x10000000
_NEW_NET = 0x40000000
_SET_DUMPABLE = 4
_CAPABILITIES_VERSION = 0x20080522
_SYS_ADMIN = 21
_GET_FLAGS = 0x8913
_SET_FLAGS = 0x8914
_IS_UP = 0x1


@contextlib.contextmanager
def create_network_namespace() -> Iterator[dict[str, str]]:
    """Create a loopback-only network namespace for the block.

    Yield the environment variable that passes it to forked ranks, or {} if the system does not allow
    namespaces.
    """
    descriptors = _create() if sys.platform == "linux" else None
    try:
        yield {NETWORK: "{}:{}".format(*descriptors)} if descriptors else {}
    finally:
        for descriptor in descriptors or ():
            if descriptor >= 0:
                os.close(descriptor)


def _create() -> tuple[int, int] | None:
    """Return descriptors of a user namespace (-1 if not needed) and a network namespace. None if not allowed.

    A namespace exists while a process is in it or a descriptor refers to it. A child process creates it,
    and this process opens it.
    """
    kind_reader, kind_writer = os.pipe()
    release_reader, release_writer = os.pipe()
    child = os.fork()
    if child == 0:
        # Keep the namespaces until the parent has opened them or has exited. Both close ``release_writer``.
        try:
            os.close(release_writer)
            kind = _enter_new_network()
            os.write(kind_writer, kind)
            os.read(release_reader, 1)
        finally:
            os._exit(0)
    os.close(kind_writer)
    os.close(release_reader)
    opened: list[int] = []
    try:
        # The result is empty if the child has exited because it could not create the namespaces.
        kind = os.read(kind_reader, 1)
        if not kind:
            return None
        for name in ("net", "user") if kind == b"u" else ("net",):
            opened.append(os.open(f"/proc/{child}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC))
        network = opened[0]
        user = opened[1] if kind == b"u" else -1
        if _can_enter(user, network):
            return user, network
    except OSError:
        pass
    finally:
        os.close(kind_reader)
        os.close(release_writer)
        os.waitpid(child, 0)
    for descriptor in opened:
        os.close(descriptor)
    return None


def _can_enter(user: int, network: int) -> bool:
    """True if a child process can enter the namespaces. Otherwise ranks would wait for one that cannot."""
    child = os.fork()
    if child == 0:
        try:
            os.environ[NETWORK] = f"{user}:{network}"
            enter_user_namespace()
            os._exit(call_inside(lambda: 0))
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _enter_new_network() -> bytes:
    """Enter a new network namespace and bring its loopback interface up.

    Return b"u" if a user namespace is around it, otherwise b"n".

    Raises:
        OSError: the system does not allow it.
    """
    user = os.geteuid()
    group = os.getegid()
    kind = b"n"
    # Root can create a network namespace directly. Other users need a user namespace around it, which
    # maps this user and group to themselves. A process with capabilities over other users' files would
    # lose them in it.
    try:
        _call("unshare", _NEW_NET)
    except OSError:
        if _capabilities():
            raise
        _call("unshare", _NEW_USER | _NEW_NET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        kind = b"u"

    # Bring ``lo`` up with SIOCGIFFLAGS and SIOCSIFFLAGS: it is down in a new network. Check that a socket
    # can be bound.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _IS_UP))
        any_socket.bind(("127.0.0.1", 0))
    return kind


def enter_user_namespace() -> None:
    """Enter the user namespace, if there is one. Call it in a rank that was just forked and has a single thread.

    This resets the parent-death signal of the process (prctl(2)), so set it again afterwards.

    Raises:
        OSError: the kernel does not allow it, although it allowed it to ``create_network_namespace``.
    """
    descriptors = _descriptors()
    if descriptors is None or descriptors[0] < 0:
        return
    _call("setns", descriptors[0], _NEW_USER)
    # Keep only the capability to enter a network namespace. With the others that a user namespace grants,
    # the process could ignore file permissions, and would write to folders that their owner has made
    # read-only.
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    # Six numbers: effective, permitted and inheritable set of the first 32 capabilities, then of the others.
    kept = 1 << _SYS_ADMIN
    library = ctypes.CDLL(None, use_errno=True)
    if library.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # A change of credentials makes a process invisible to its user's debuggers. Make it visible again.
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)


def _capabilities() -> int:
    """Return the bit mask of this process's effective capabilities."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"CapEff:"):
                return int(line.split()[1], 16)
    return 0


def exists() -> bool:
    """True if this run has its own network namespace."""
    return _descriptors() is not None


def call_inside(make: Callable[[], T]) -> T:
    """Call a function in the run's network namespace, if there is one, and return its result.

    Sockets that the function creates, also in threads that it starts, belong to this network.
    """
    descriptors = _descriptors()
    if descriptors is None:
        return make()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _call("setns", descriptors[1], _NEW_NET)
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="private network", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _descriptors() -> tuple[int, int] | None:
    user, _, network = os.environ.get(NETWORK, "").partition(":")
    return (int(user), int(network)) if network else None


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library. Python has functions for namespaces only from version 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
