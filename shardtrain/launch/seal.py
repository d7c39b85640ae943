"""Signatures for messages between the nodes of a run: HMAC (RFC 2104) with SHA-256."""

from __future__ import annotations

import hashlib
import hmac

from shardtrain.utils.process import SIGNATURE_PREFIX


class Seal:
    """Sign and verify messages between the nodes of a run. Without a secret, messages are unsigned."""

    def __init__(self, secret: str, run_id: str) -> None:
        self._key = hashlib.sha256(f"{run_id}\0{secret}".encode()).digest() if secret else b""

    def close(self, state: bytes) -> bytes:
        """Return the state, preceded by its signature."""
        if not self._key:
            return state
        # Put the signature first, so a node without the secret fails to unpickle the state.
        return (
            SIGNATURE_PREFIX
            + hmac.new(self._key, state, hashlib.sha256).hexdigest().encode()
            + b"\n"
            + state
        )

    def open(self, sealed: bytes) -> bytes:
        """Verify a signed state and return it without its signature.

        Raises:
            RendezvousStateError: the state was not signed with this secret.
        """
        # A node that signs a message may be unable to import PyTorch.
        from torch.distributed.elastic.rendezvous.api import RendezvousStateError

        state = sealed.partition(b"\n")[2] if self._key else sealed
        if not hmac.compare_digest(sealed, self.close(state)):
            raise RendezvousStateError(
                "data of another process is not signed with the secret of this node"
            )
        return state
