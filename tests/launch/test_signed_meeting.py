"""Nodes that share a secret reject rendezvous states written by strangers."""

from __future__ import annotations

import pickle
from base64 import b64encode
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hostile_files import Bomb
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from shardtrain.launch.meeting import open_meeting
from shardtrain.launch.nodes import Nodes
from shardtrain.launch.signed_meeting import SignedBackend
from shardtrain.utils.listening import open_listener
from shardtrain.utils.process import SECRET

KEY = "torch.rendezvous.run"


def node(store: dist.Store, secret: str = "of all", run_id: str = "run") -> SignedBackend:
    return SignedBackend(C10dRendezvousBackend(store, "run"), secret, run_id)


def test_nodes_with_one_secret_exchange_states() -> None:
    store = dist.HashStore()
    first = node(store)
    second = node(store)

    assert first.get_state() is None

    written = first.set_state(b"one\nstate")
    assert written
    assert (written[0], written[2]) == (b"one\nstate", True)

    read = second.get_state()
    assert read
    assert read[0] == b"one\nstate"

    replaced = second.set_state(b"two", read[1])
    assert replaced
    assert (replaced[0], replaced[2]) == (b"two", True)

    # A write with an outdated token is rejected, and returns the current state.
    late = first.set_state(b"three", written[1])
    assert late
    assert (late[0], late[2]) == (b"two", False)


@pytest.mark.parametrize("other", [{"secret": "of another"}, {"run_id": "another"}])
def test_a_state_with_another_secret_or_run_id_is_rejected(other: dict[str, str]) -> None:
    store = dist.HashStore()
    node(store, **other).set_state(b"state")
    with pytest.raises(RendezvousStateError, match="not signed"):
        node(store).get_state()


def test_a_signed_state_is_not_a_pickle_for_nodes_without_the_secret() -> None:
    store = dist.HashStore()
    node(store).set_state(pickle.dumps("state"))
    state = C10dRendezvousBackend(store, "run").get_state()

    assert state
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(state[0])


@pytest.mark.parametrize("secret", ["of all", ""])
def test_nodes_with_a_secret_do_not_unpickle_a_stranger_s_state(
    secret: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    monkeypatch.setenv(SECRET, secret)
    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    handler = open_meeting(
        Nodes(1, 1, f"127.0.0.1:{port}", None, "run", "127.0.0.1", 0, 60, ""), listener
    )
    stranger = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    stranger.set(KEY, b64encode(pickle.dumps(Bomb(canary))).decode())

    with pytest.raises(RendezvousStateError if secret else Exception):
        handler.next_rendezvous()
    assert canary.exists() is (not secret), (
        "without a secret, PyTorch's rendezvous unpickles the state"
    )
