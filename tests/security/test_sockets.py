"""Foreign connections to the sockets of a run neither end, stall nor change it."""

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


def attack_open(connection: socket.socket, number: int) -> None:
    """Connect and send nothing."""


def attack_half(connection: socket.socket, number: int) -> None:
    connection.sendall(b"\x01\x00\x00")


def attack_slow(connection: socket.socket, number: int) -> None:
    for _ in range(4):
        connection.sendall(b"\x00")
        time.sleep(0.001)


def attack_garbage(connection: socket.socket, number: int) -> None:
    connection.sendall(os.urandom(64))
    connection.close()


def attack_reset(connection: socket.socket, number: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def attack_number(connection: socket.socket, number: int) -> None:
    """Send the number of a gloo pair, which would identify the sender as that pair. Gloo numbers its pairs from 0."""
    connection.sendall((number % 8).to_bytes(8, "little") + os.urandom(4000))


ATTACKS = [value for name, value in sorted(globals().items()) if name.startswith("attack_")]


def rank_main(rank: int, folder: Path) -> None:
    """All-reduce until the file "stop" exists, and create the file "done-RANK" on success."""
    private_network.enter_user_namespace()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 2)
    options = {"store": store, "rank": rank, "world_size": 2}
    gloo_sockets.private(lambda: dist.init_process_group("gloo", **options))
    descriptors = len(os.listdir("/proc/self/fd"))
    (folder / f"ready-{rank}").touch()
    number = 0
    stops = torch.zeros(())
    while not stops:
        tensor = torch.tensor([rank + number, (folder / "stop").exists()])
        dist.all_reduce(tensor)
        assert tensor[0] == 2 * number + 1, "a sum has other terms than those of the two ranks"
        number = number + 1
        stops = tensor[1]
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a foreign connection was accepted"
    (folder / f"done-{rank}").touch()


@contextlib.contextmanager
def two_ranks(folder: Path, names: Mapping[str, str] = NOTHING) -> Iterator[set[int]]:
    """Run two ranks for the duration of the block. Yield their process ids, and fail the test if a rank fails."""
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
                signal.pause()  # if a rank exits before its peer has the last sum, the peer reports a crash
        pids.add(pid)

    def all_are(state: str) -> bool:
        errors = [path.read_text() for path in folder.glob("error-*")]
        assert not errors, errors
        return all((folder / f"{state}-{rank}").exists() for rank in range(2))

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
    """Return the addresses on which ranks listen, without those inherited from this process (fixtures' servers)."""
    return listeners(pids) - listeners({os.getpid()})


def is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("attack", cases(ATTACKS[:1], nightly=ATTACKS[1:]))
def test_foreign_connections_do_not_affect_an_established_group(
    attack: Callable[[socket.socket, int], None], tmp_path: Path
) -> None:
    with two_ranks(tmp_path) as pids, contextlib.ExitStack() as stack:
        ports = [port for _, port in of_ranks(pids)]
        assert ports, "gloo listens"
        for number in range(NUM_CONNECTIONS):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", ports[number % len(ports)]))
            assert not is_connected(connection)
            with contextlib.suppress(OSError):  # sending fails, because the socket is not connected
                attack(connection, number)


@pytest.fixture
def network() -> Iterator[dict[str, str]]:
    with private_network.create_network_namespace() as names:
        if not names:
            pytest.skip("this system does not allow network namespaces")
        yield names


def test_ranks_do_not_listen_in_the_shared_network(network: dict[str, str], tmp_path: Path) -> None:
    with two_ranks(tmp_path, network) as pids:
        assert not of_ranks(pids), "processes of this network see listeners of ranks"
        this_network = os.readlink("/proc/self/ns/net")
        networks_of_ranks = set()
        networks_of_threads = set()
        for pid in pids:
            networks_of_ranks.add(os.readlink(f"/proc/{pid}/ns/net"))
            for task in Path(f"/proc/{pid}/task").iterdir():
                networks_of_threads.add(os.readlink(task / "ns/net"))

        # Only the threads of the process group are in the private network.
        assert networks_of_ranks == {this_network}
        private_networks = networks_of_threads - {this_network}
        assert len(private_networks) == 1, "the ranks do not share one private network"


def test_error_in_the_private_network_propagates_unchanged(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        private_network.NETWORK, "-1:" + network[private_network.NETWORK].partition(":")[2]
    )
    if os.geteuid() != 0:
        pytest.skip("this process has not entered the user namespace")

    with pytest.raises(ZeroDivisionError):
        private_network.call_inside(lambda: 1 // 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_user_who_connects_during_setup_is_named_and_the_run_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(STORE, "a folder of this machine")

    def make() -> socket.socket:
        server = socket.create_server(("127.0.0.1", 0))
        stranger = socket.socket()
        os.fchown(stranger.fileno(), NOBODY, NOBODY)
        stranger.connect(server.getsockname())
        sockets.extend([server, stranger])
        return server

    sockets: list[socket.socket] = []

    with pytest.raises(PeerError, match=f"the user with id {NOBODY} connected"):
        gloo_sockets.private(make)

    for opened in sockets:
        opened.close()


def as_nobody(function: Callable[[], object]) -> str:
    """Call a function in a process of an unprivileged user. Return its result or error as text."""
    (reader, writer), pid = os.pipe(), os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            # like after an exec
            private_network._call("prctl", private_network._SET_DUMPABLE, 1, 0, 0, 0)
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


def in_a_rank(names: Mapping[str, str], function: Callable[[], object]) -> str:
    """Call a function in a fork that has entered the private network. Return its result or type of error as text."""
    (reader, writer), pid = os.pipe(), os.fork()
    if pid == 0:
        try:
            os.environ.update(names)
            private_network.enter_user_namespace()
            outer_network = os.stat("/proc/self/ns/net").st_ino
            assert (
                private_network.call_inside(lambda: os.stat("/proc/thread-self/ns/net").st_ino)
                != outer_network
            )
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer = os.read(reader, 1000).decode()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_user_namespace_does_not_bypass_file_permissions(tmp_path: Path) -> None:
    """The root user of a user namespace could ignore the permissions of its user's files, which a rank must respect."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    os.chown(folder, NOBODY, NOBODY)

    def write() -> str:
        os.close(os.open(folder / "x", os.O_WRONLY | os.O_CREAT))
        return "written"

    def in_the_network() -> str:
        with private_network.create_network_namespace() as names:
            return in_a_rank(names, write) if names else "no network"

    answer = as_nobody(in_the_network)
    if answer == "no network":
        pytest.skip("this system does not allow network namespaces of users")

    assert answer == "PermissionError"


@pytest.mark.parametrize("capabilities", [0, 1 << 2])
def test_process_with_capabilities_does_not_enter_a_user_namespace(
    capabilities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capabilities, such as ignoring permissions of other users' files, have no effect in a user namespace."""
    all_flags: list[int] = []

    def refuse(name: str, *arguments: int) -> None:
        all_flags.append(arguments[0])
        raise PermissionError

    monkeypatch.setattr(private_network, "_call", refuse)
    monkeypatch.setattr(private_network, "_capabilities", lambda: capabilities)

    with pytest.raises(PermissionError):
        private_network._enter_new_network()

    enters_user_namespace = any(flags & private_network._NEW_USER for flags in all_flags)
    assert enters_user_namespace == (not capabilities)
