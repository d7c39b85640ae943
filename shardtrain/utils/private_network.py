"""A loopback interface that only the processes of one run have: a network namespace of Linux (network_namespaces(7)).

Gloo asks nobody who connects for a name, and any user of a machine reaches its loopback address. Sockets belong to the
namespace of the thread that makes them, so that one thread of each rank makes gloo's, in here, and everything else of
a rank stays on the network as it is. A user without rights needs a user namespace around it, which has the same user
and groups in it, and which a process enters while it has one thread only. Rights over files stay what they were: a
process keeps but one capability in there (capabilities(7)), and one that has capabilities outside, which it would lose,
does not enter. Where the kernel allows none of this, there is no such network, and the ranks meet on the loopback
interface of all.
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
"""Descriptors of the user namespace (-1 where none is needed) and of the network, as 5:6; for forked ranks alone."""
_NEW_USER = 0x10000000
_NEW_NET = 0x40000000
_SET_DUMPABLE = 4
_CAPABILITIES_VERSION = 0x20080522
_SYS_ADMIN = 21
_GET_FLAGS = 0x8913
_SET_FLAGS = 0x8914
_IS_UP = 0x1


@contextlib.contextmanager
def made() -> Iterator[dict[str, str]]:
    """The variable that forked ranks find a new network by; none where the system gives none."""
    descriptors = _make() if sys.platform == "linux" else None
    try:
        yield {NETWORK: "{}:{}".format(*descriptors)} if descriptors else {}
    finally:
        for descriptor in descriptors or ():
            if descriptor >= 0:
                os.close(descriptor)


def _make() -> tuple[int, int] | None:
    """Descriptors of a user namespace (-1 where none is needed) and a network; None where the system gives none.

    A namespace lives as long as a process in it or a descriptor of it: a child makes it, and this process opens it.
    """
    done, tell = os.pipe()
    wait, release = os.pipe()
    child = os.fork()
    if child == 0:
        # The child holds the namespaces until the parent has opened them, or has ended: either closes ``release``.
        try:
            os.close(release)
            kind = _build()
            os.write(tell, kind)
            os.read(wait, 1)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(wait)
    opened: list[int] = []
    try:
        # Nothing is read where the child has ended: it could not make them.
        kind = os.read(done, 1)
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
        os.close(done)
        os.close(release)
        os.waitpid(child, 0)
    for descriptor in opened:
        os.close(descriptor)
    return None


def _can_enter(user: int, network: int) -> bool:
    """Try it in a child: ranks of which one cannot would wait for each other."""
    child = os.fork()
    if child == 0:
        try:
            os.environ[NETWORK] = f"{user}:{network}"
            enter_user()
            os._exit(inside(lambda: 0))
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _build() -> bytes:
    """Enter a new network and bring its loopback interface up; b"u" where a user namespace is around it, else b"n".

    Raises:
        OSError: the system does not allow it.
    """
    user = os.geteuid()
    group = os.getegid()
    kind = b"n"
    # Root may make a network as it is. Others need a user namespace around it, in which this user and this group are
    # themselves; who has other capabilities would lose them there, over files that belong to others.
    try:
        _call("unshare", _NEW_NET)
    except OSError:
        if _capabilities():
            raise
        _call("unshare", _NEW_USER | _NEW_NET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        kind = b"u"

    # Bring ``lo`` up, which is down in a new network, and see that a socket can be bound: SIOCGIFFLAGS, SIOCSIFFLAGS.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _IS_UP))
        any_socket.bind(("127.0.0.1", 0))
    return kind


def enter_user() -> None:
    """In a rank that was just forked and has no second thread: become able to enter the network.

    Whatever was asked of the kernel for the death of the parent has to be asked again.

    Raises:
        OSError: the kernel refuses what it allowed to ``made``.
    """
    descriptors = _descriptors()
    if descriptors is None or descriptors[0] < 0:
        return
    _call("setns", descriptors[0], _NEW_USER)
    # Of all capabilities that a user namespace gives, one is kept, with which a network is entered. Another would pass
    # over the permissions of files: a folder that its owner has made read-only would be written.
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    # Six numbers: effective, permitted and inheritable of the first 32 capabilities, then of the others.
    kept = 1 << _SYS_ADMIN
    library = ctypes.CDLL(None, use_errno=True)
    if library.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # A change of credentials hides a process from debuggers of its own user, unless it says otherwise.
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)


def _capabilities() -> int:
    """The capabilities of this process that are in effect, a bit each."""
    with open("/proc/self/status", "rb") as file:
        return next((int(line.split()[1], 16) for line in file if line.startswith(b"CapEff:")), 0)


def is_there() -> bool:
    """Whether this rank's sockets for the other ranks belong into a network of their own."""
    return _descriptors() is not None


def inside(make: Callable[[], T]) -> T:
    """Call a function whose sockets, and those of threads that it starts, are in the network of this run alone."""
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
    """A function of the C library; Python 3.12 alone has those of namespaces."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
