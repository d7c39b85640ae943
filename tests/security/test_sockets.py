"""A stranger who reaches the sockets of a run, or would like to, neither ends nor stalls nor changes it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist
from listening import listeners
from tiers import cases

from shardtrain.distributed.rendezvous import gloo_sockets
from shardtrain.utils import private_network
from shardtrain.utils.errors import PeerError
from shardtrain.utils.process import STORE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and filters of Linux")
NOBODY = 65534
NUM_CONNECTIONS = 1000
NOTHING: Mapping[str, str] = {}


def attack_open(one: socket.socket, number: int) -> None:
    """Nothing is ever said."""


def attack_half(one: socket.socket, number: int) -> None:
    one.sendall(b"\x01\x00\x00")


def attack_slow(one: socket.socket, number: int) -> None:
    for _ in range(4):
        one.sendall(b"\x00")
        time.sleep(0.001)


def attack_garbage(one: socket.socket, number: int) -> None:
    one.sendall(os.urandom(64))
    one.close()


def attack_reset(one: socket.socket, number: int) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def attack_number(one: socket.socket, number: int) -> None:
    """Gloo counts its pairs from 0: to say a number is to be that pair."""
    one.sendall((number % 8).to_bytes(8, "little") + os.urandom(4000))


ATTACKS = [value for name, value in sorted(globals().items()) if name.startswith("attack_")]


def rank_main(rank: int, folder: Path) -> None:
    """A rank that adds up until both are told to end, and leaves a file where all was well."""
    private_network.enter_user_namespace()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 2)
    made = {"store": store, "rank": rank, "world_size": 2}
    gloo_sockets.private(lambda: dist.init_process_group("gloo", **made))
    descriptors = len(os.listdir("/proc/self/fd"))
    (folder / f"ready-{rank}").touch()
    number, stops = 0, torch.zeros(())
    while not stops:
        tensor = torch.tensor([rank + number, (folder / "stop").exists()])
        dist.all_reduce(tensor)
        assert tensor[0] == 2 * number + 1, "each sum is that of the two ranks"
        number, stops = number + 1, tensor[1]
    assert len(os.listdir("/proc/self/fd")) == descriptors, "nobody's connection was taken"
    (folder / f"done-{rank}").touch()


@contextlib.contextmanager
def two_ranks(folder: Path, names: Mapping[str, str] = NOTHING) -> Iterator[set[int]]:
    """Two ranks at work, whose process ids are given; they end well after the block, or the test fails."""
    pids = set()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.update(names)
                rank_main(rank, folder)
            except BaseException as error:
                (folder / f"error-{rank}").write_text(repr(error))
            finally:
                signal.pause()  # a rank that ends before its peer has heard the last sum would be taken for a crash
        pids.add(pid)

    def all_are(word: str) -> bool:
        errors = [one.read_text() for one in folder.glob("error-*")]
        assert not errors, errors
        return all((folder / f"{word}-{rank}").exists() for rank in range(2))

    try:
        patience.wait_for(lambda: all_are("ready"), 60)
        yield pids
        (folder / "stop").touch()
        patience.wait_for(lambda: all_are("done"), 60)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def of_ranks(pids: set[int]) -> set[tuple[str, int]]:
    """On what ranks listen, but for what they have from this process: servers of other tests' fixtures."""
    return listeners(pids) - listeners({os.getpid()})


def is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("attack", cases(ATTACKS[:1], nightly=ATTACKS[1:]))
def test_no_connection_ends_stalls_or_changes_a_group_that_is_made(
    attack: Callable[[socket.socket, int], None], tmp_path: Path
) -> None:
    with two_ranks(tmp_path) as pids, contextlib.ExitStack() as stack:
        ports = [port for _, port in of_ranks(pids)]
        assert ports, "gloo listens"
        for number in range(NUM_CONNECTIONS):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", ports[number % len(ports)]))
            assert not is_connected(one)
            with contextlib.suppress(OSError):  # as it is not
                attack(one, number)


@pytest.fixture
def network() -> Iterator[dict[str, str]]:
    with private_network.create_network_namespace() as names:
        if not names:
            pytest.skip("this system gives no network namespace")
        yield names


def test_nothing_of_a_run_listens_where_others_are(network: dict[str, str], tmp_path: Path) -> None:
    with two_ranks(tmp_path, network) as pids:
        assert not of_ranks(pids), "as any process of this network sees it"
        threads = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
        own = {os.readlink(task / "ns/net") for task in threads} - {os.readlink("/proc/self/ns/net")}
        assert len(own) == 1, "both are in one network, which is not this one"
        assert {os.readlink(f"/proc/{pid}/ns/net") for pid in pids} == {os.readlink("/proc/self/ns/net")}


def test_what_fails_in_the_private_network_fails_with_its_own_error(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(private_network.NETWORK, "-1:" + network[private_network.NETWORK].partition(":")[2])
    if os.geteuid() != 0:
        pytest.skip("this process has not entered the user namespace")
    with pytest.raises(ZeroDivisionError):
        private_network.call_inside(lambda: 1 // 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_user_who_connects_while_ranks_do_is_named_and_no_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, "a folder of this machine")

    def make() -> socket.socket:
        server = socket.create_server(("127.0.0.1", 0))
        stranger = socket.socket()
        os.fchown(stranger.fileno(), NOBODY, NOBODY)
        stranger.connect(server.getsockname())
        kept.extend([server, stranger])
        return server

    kept: list[socket.socket] = []
    with pytest.raises(PeerError, match=f"the user with id {NOBODY} of this machine connected"):
        gloo_sockets.private(make)
    for one in kept:
        one.close()


def as_nobody(function: Callable[[], object]) -> str:
    """What a function says in a process of a user without rights."""
    (answer, tell), pid = os.pipe(), os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            private_network._call("prctl", private_network._SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec
            os.write(tell, str(function()).encode())
        except BaseException as error:
            os.write(tell, repr(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(answer) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def in_a_rank(names: Mapping[str, str], function: Callable[[], object]) -> str:
    """What a function says in a fork that has entered the network, as a rank does."""
    (answer, tell), pid = os.pipe(), os.fork()
    if pid == 0:
        try:
            os.environ.update(names)
            private_network.enter_user_namespace()
            own = os.stat("/proc/self/ns/net").st_ino
            assert private_network.call_inside(lambda: os.stat("/proc/thread-self/ns/net").st_ino) != own
            os.write(tell, str(function()).encode())
        except BaseException as error:
            os.write(tell, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(tell)
    said = os.read(answer, 1000).decode()
    os.waitpid(pid, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_rank_of_a_user_may_write_what_he_may_write(tmp_path: Path) -> None:
    """In a user namespace a process may pass over the permissions of its user's files, which protect them from him."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o555)
    os.chown(folder, NOBODY, NOBODY)

    def write() -> str:
        os.close(os.open(folder / "x", os.O_WRONLY | os.O_CREAT))
        return "written"

    def in_the_network() -> str:
        with private_network.create_network_namespace() as names:
            return in_a_rank(names, write) if names else "no network"

    said = as_nobody(in_the_network)
    if said == "no network":
        pytest.skip("this system gives users no network namespace")
    assert said == "PermissionError"


@pytest.mark.parametrize("capabilities", [0, 1 << 2])
def test_a_process_that_would_lose_rights_in_a_user_namespace_enters_none(
    capabilities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of passing over the permissions of what others own, which is of no effect in there."""
    asked: list[int] = []

    def refuse(name: str, *arguments: int) -> None:
        asked.append(arguments[0])
        raise PermissionError

    monkeypatch.setattr(private_network, "_call", refuse)
    monkeypatch.setattr(private_network, "_capabilities", lambda: capabilities)
    with pytest.raises(PermissionError):
        private_network._enter_new_network()
    assert any(flags & private_network._NEW_USER for flags in asked) == (not capabilities)
