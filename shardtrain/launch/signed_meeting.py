"""The rendezvous of several nodes, in which a node reads nothing that another has not signed.

PyTorch's rendezvous keeps its state as a pickle under one key of a store that knows no password: who reaches its port
sets the key, and every node runs what is in it. Nodes that share a secret (the environment's ``SHARDTRAIN_SECRET``)
sign the state with it, HMAC of RFC 2104 over SHA-256, and refuse any other before it is unpickled. Without a secret the
rendezvous is PyTorch's, as it is.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

_PREFIX = b"shardtrain-sha256 "


class Seal:
    """Signs messages between the nodes of a run. Without a secret nothing is signed or checked."""

    def __init__(self, secret: str, run_id: str) -> None:
        self._key = hashlib.sha256(f"{run_id}\0{secret}".encode()).digest() if secret else b""

    def close(self, state: bytes) -> bytes:
        """Return the state with its signature in front."""
        if not self._key:
            return state
        # the signature comes first: a node without the secret then fails to unpickle the state
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
    """A backend whose state is signed with a secret, for one run."""

    def __init__(self, backend: RendezvousBackend, secret: str, run_id: str) -> None:
        self._backend = backend
        self._seal = Seal(secret, run_id)

    @property
    def name(self) -> str:
        """That of the backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """As the backend; raises RendezvousStateError where a stranger has written it."""
        found = self._backend.get_state()
        return (self._seal.open(found[0]), found[1]) if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """As the backend; raises RendezvousStateError where a stranger has written before."""
        found: Any = self._backend.set_state(self._seal.close(state), token)
        return (self._seal.open(found[0]), *found[1:]) if found else None
