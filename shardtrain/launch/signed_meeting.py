"""Signatures for the rendezvous of several nodes, so a node reads only values that another node wrote.

PyTorch's rendezvous keeps its state as a pickle under one key of a store without a password. Whoever can
reach the port can set this key, and every node then runs the code in the pickle. Nodes with the same
``SHARDTRAIN_SECRET`` in their environment sign the state (HMAC, RFC 2104, with SHA-256). They reject a state
without a valid signature before they unpickle it. Without a secret, PyTorch's rendezvous is unchanged.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

_PREFIX = b"shardtrain-sha256 "


class Seal:
    """Sign and verify messages between the nodes of a run. Without a secret, messages are unsigned."""

    def __init__(self, secret: str, run_id: str) -> None:
        self._key = hashlib.sha256(f"{run_id}\0{secret}".encode()).digest() if secret else b""

    def close(self, state: bytes) -> bytes:
        """Return the state, preceded by its signature."""
        if not self._key:
            return state
        # Put the signature first, so a node without the secret fails to unpickle the state.
        return _PREFIX + hmac.new(self._key, state, hashlib.sha256).hexdigest().encode() + b"\n" + state

    def open(self, sealed: bytes) -> bytes:
        """Verify a signed state and return it without its signature.

        Raises:
            RendezvousStateError: the state was not signed with this secret.
        """
        state = sealed.partition(b"\n")[2] if self._key else sealed
        if not hmac.compare_digest(sealed, self.close(state)):
            raise RendezvousStateError("data of another process is not signed with the secret of this node")
        return state


class SignedBackend(RendezvousBackend):
    """Rendezvous backend whose state is signed with a secret, for one run."""

    def __init__(self, backend: RendezvousBackend, secret: str, run_id: str) -> None:
        self._backend = backend
        self._seal = Seal(secret, run_id)

    @property
    def name(self) -> str:
        """Name of the wrapped backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the verified state and its token, or None if there is no state.

        Raises:
            RendezvousStateError: the state is not signed with this node's secret.
        """
        found = self._backend.get_state()
        return (self._seal.open(found[0]), found[1]) if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Sign and write the state. Return the state that is stored afterwards, its token, and True if it was set.

        Raises:
            RendezvousStateError: another process wrote a state that is not signed with this node's secret.
        """
        found: Any = self._backend.set_state(self._seal.close(state), token)
        return (self._seal.open(found[0]), *found[1:]) if found else None
