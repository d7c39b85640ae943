"""Nodes check the rendezvous endpoint before PyTorch uses it, and report every wrong one within the stated time."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import patience
import pytest
import torch.distributed as dist
from ports import free_port

from shardtrain.launch import agent, greeting, nodes
from shardtrain.utils import listening
from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OutOfMemoryError,
    PeerError,
    StorageError,
)

HTTP = b"HTTP/1.0 400 Bad request\r\n\r\n"


@contextlib.contextmanager
def program(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a program that accepts connections and passes each to ``behave``. Yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        behave(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def answer(connection: socket.socket) -> None:
    connection.recv(64)
    connection.sendall(HTTP)


def answer_binary(connection: socket.socket) -> None:
    connection.recv(64)
    connection.sendall(b"\x90" * 4000)


def stay_silent(connection: socket.socket) -> None:
    time.sleep(0.3)


def close(connection: socket.socket) -> None:
    connection.recv(64)


@pytest.mark.parametrize("libuv", [True, False])
def test_pytorch_s_store_answers_the_greeting_immediately(libuv):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=libuv, wait_for_workers=False)
    greeting.await_store(f"127.0.0.1:{store.port}", 30)
    store.set("key", "value")
    assert store.get("key") == b"value", "the store must still work"


@pytest.mark.parametrize("libuv", [True, False])
def test_a_node_that_cannot_run_writes_the_reason_into_the_store_of_pytorch(libuv):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=libuv, wait_for_workers=False)
    greeting.send_refusal(f"127.0.0.1:{store.port}", "a key", b"ulimit -u=3\nulimit -n=4")
    assert store.get("a key") == b"ulimit -u=3\nulimit -n=4"


def test_a_first_node_that_cannot_run_tells_each_other_node_and_no_stranger():
    endpoint = f"127.0.0.1:{free_port()}"
    server = threading.Thread(target=greeting.serve_refusal, args=(endpoint, "7 ulimit -u=3", 2))
    server.start()
    host, _, port = endpoint.partition(":")
    patience.wait_for(lambda: socket.socket().connect_ex((host, int(port))) == 0, 20)
    # A program that does not greet, such as a scanner of ports, is not counted as a node.
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(64) == b""

    with pytest.raises(OutOfMemoryError, match="^ulimit -u=3$"):
        greeting.await_store(endpoint, 30)

    greeting.send_refusal(endpoint, "a key", b"this node cannot run either")
    server.join(patience.seconds(10))
    assert not server.is_alive(), "both nodes have been told"


@pytest.mark.parametrize(
    "kind", [ConfigError, DataError, CheckpointError, OutOfMemoryError, StorageError]
)
def test_the_error_of_another_node_has_its_exit_code_and_its_message(kind):
    error = greeting.read_refusal(greeting.write_refusal(kind("the disk of this node is bad")))
    assert type(error) is kind
    assert "cannot run: the disk of this node is bad" in str(error)


def test_a_node_that_cannot_run_ends_in_time_if_nobody_listens(monkeypatch):
    monkeypatch.setattr(greeting, "REFUSAL_SECONDS", 0.3)
    greeting.send_refusal(f"127.0.0.1:{free_port()}", "a key", b"reason")
    greeting.serve_refusal(f"127.0.0.1:{free_port()}", "reason", 1)
    for host in ("a" * 64, "a..b"):  # invalid host names
        greeting.serve_refusal(f"{host}:{free_port()}", "reason", 1)
        greeting.send_refusal(f"{host}:{free_port()}", "a key", b"reason")


# behavior of the program at the endpoint -> error of a node that is not the first, and part of its message
STRANGERS = {
    "answers": (answer, ConfigError, 'another program, which answers "HTTP/1.0 400 Bad request'),
    "answers with binary data": (answer_binary, ConfigError, r'answers "\x90\x90'),
    "is silent": (stay_silent, PeerError, "accepts the connection but does not reply"),
    "closes": (close, PeerError, "the connection is closed immediately"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_at_the_endpoint_is_named(kind, monkeypatch):
    behave, error, message = STRANGERS[kind]
    monkeypatch.setattr(greeting, "CONNECT_SECONDS", 0.2)
    with program(behave) as port, pytest.raises(error) as raised:
        greeting.await_store(f"127.0.0.1:{port}", 1)

    assert message in str(raised.value)
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 600


# endpoint (PORT is a free port) -> part of the message
NOWHERE = {
    "nothing.invalid:PORT": "Name or service not known",
    "a..b:PORT": "label empty or too long",
    "127.0.0.1:PORT": "Connection refused",
}


@pytest.mark.parametrize("endpoint", NOWHERE)
def test_an_unreachable_endpoint_is_reported_by_a_later_node(endpoint):
    place = endpoint.replace("PORT", str(free_port()))
    with pytest.raises(
        PeerError,
        match=rf"cannot meet at {place}: .*{NOWHERE[endpoint]}.*, after 1 s; check that the first node",
    ):
        greeting.await_store(place, 1)


@pytest.mark.parametrize("endpoint", [name for name in NOWHERE if "127" not in name])
def test_an_unresolvable_name_is_reported_by_the_first_node(endpoint):
    place = endpoint.replace("PORT", str(free_port()))
    with pytest.raises(
        PeerError,
        match=rf"cannot meet at {place}: .*{NOWHERE[endpoint]}.*, after 1 s; name an address",
    ):
        greeting.claim(place, 1)


def test_a_silent_name_service_does_not_extend_the_wait(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(greeting.socket, "create_connection", lambda *_, **__: never.wait())
    with pytest.raises(PeerError, match="no reply, after 1 s"):
        greeting.await_store("slow.invalid:1", 1)

    never.set()


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "::"), ("127.0.0.9", "127.0.0.9"), ("[::1]", "::1")],
)
def test_a_node_with_the_address_of_the_endpoint_can_serve_it(host, address):
    port = free_port()
    with greeting.claim(f"{host}:{port}", 30) as listener:
        assert listener.getsockname()[:2] == (address, port)
        socket.create_connection((host.strip("[]"), port), 5).close()


def test_an_endpoint_of_another_machine_is_named(monkeypatch):
    """A program on another port of this machine plays the other machine."""
    monkeypatch.setattr(greeting, "CONNECT_SECONDS", 0.2)
    connect = socket.create_connection
    with program(stay_silent) as elsewhere:
        monkeypatch.setattr(
            greeting.socket, "create_connection", lambda *_: connect(("127.0.0.1", elsewhere))
        )
        with pytest.raises(
            PeerError,
            match=r"the address belongs to another machine \(127.0.0.1\), after 1 s; name an address",
        ):
            greeting.claim(f"10.9.9.9:{free_port()}", 1)


def test_a_silent_client_does_not_keep_a_node_from_serving(monkeypatch):
    """The client connects before the node itself, and sends nothing."""
    clients = []
    listen = greeting.rendezvous_listener

    def listen_to_a_client(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        clients.append(socket.create_connection(listener.getsockname()[:2], 5))
        return listener

    monkeypatch.setattr(greeting, "rendezvous_listener", listen_to_a_client)
    began = time.monotonic()
    greeting.claim(f"127.0.0.1:{free_port()}", 600).close()

    assert clients
    assert time.monotonic() - began < greeting.CONNECT_SECONDS

    for client in clients:
        client.close()


def test_a_client_that_resets_its_connection_does_not_keep_a_node_from_serving(monkeypatch):
    listen = greeting.rendezvous_listener
    resets = []

    def listen_to_a_client(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        with socket.create_connection(listener.getsockname()[:2], 5) as client:
            # close() sends RST
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            resets.append(client.getsockname())
        return listener

    monkeypatch.setattr(greeting, "rendezvous_listener", listen_to_a_client)
    # Poll only once instead of waiting.
    monkeypatch.setattr(greeting, "_await", lambda endpoint, seconds, look, problem, fix: look())
    port = free_port()
    with greeting.claim(f"127.0.0.1:{port}", 600) as served:
        assert len(resets) == 1
        assert served.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize("find", [greeting.claim, greeting.find_place])
def test_a_listen_address_that_the_endpoint_cannot_reach_is_named(find, monkeypatch):
    monkeypatch.setenv(listening.LISTEN_ADDRESS, "127.0.0.9")
    message = "Connection refused, after 1 s; .*; check SHARDTRAIN_LISTEN_ADDR=127.0.0.9, too"
    with pytest.raises(PeerError, match=message):
        find(f"127.0.0.1:{free_port()}", 1)


@pytest.mark.parametrize("find", [greeting.claim, greeting.find_place])
def test_a_listen_address_that_is_not_an_ip_address_is_reported_immediately(find, monkeypatch):
    monkeypatch.setenv(listening.LISTEN_ADDRESS, "node1")
    with pytest.raises(ConfigError, match='SHARDTRAIN_LISTEN_ADDR="node1" must be an IP address'):
        find(f"127.0.0.1:{free_port()}", 600)


def test_a_local_address_of_another_node_is_named():
    node = nodes.Nodes(2, 2, "127.0.0.1:1", 1, "run", "nothing.invalid", 0, 1, "--nnodes=2")
    with pytest.raises(
        PeerError,
        match="own address .SHARDTRAIN_LOCAL_ADDR. nothing.invalid: Name or service not known",
    ):
        agent._with_address(node)


def test_a_port_in_use_is_reported_immediately():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        endpoint = f"127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{endpoint}.*: Address already in use; choose"):
            greeting.claim(endpoint, 600)


def test_a_node_without_a_node_rank_serves_the_endpoint_or_finds_its_server():
    assert greeting.find_place(f"127.0.0.1:{free_port()}", 30)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not greeting.find_place(f"127.0.0.1:{store.port}", 30)

    with program(answer) as port, pytest.raises(ConfigError, match="another program"):
        greeting.find_place(f"127.0.0.1:{port}", 30)
    with pytest.raises(
        PeerError, match="cannot meet at nothing.invalid:1: Name or service not known, after 1 s"
    ):
        greeting.find_place("nothing.invalid:1", 1)


def test_a_node_without_a_node_rank_waits_for_the_name_service(monkeypatch):
    """The name of a pod resolves only some seconds after its start."""
    connect = socket.create_connection
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 4)

    def connect_later(*arguments: object) -> socket.socket:
        for error in answers:
            raise error
        return connect(*arguments)

    monkeypatch.setattr(greeting.socket, "create_connection", connect_later)
    assert greeting.find_place(f"127.0.0.1:{free_port()}", 30)


def test_a_long_wait_is_reported_once_with_its_cause(monkeypatch, capsys):
    monkeypatch.setattr(greeting, "QUIET_SECONDS", 0.1)
    with pytest.raises(PeerError):
        greeting.await_store("nothing.invalid:1", 1)

    [line] = capsys.readouterr().err.splitlines()
    assert line == "waiting for nothing.invalid:1: Name or service not known"
