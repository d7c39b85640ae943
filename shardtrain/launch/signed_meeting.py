"""Signatures for the rendezvous of several nodes, so a node reads only values that another node wrote.

PyTorch's rendezvous keeps its state as a pickle under one key of a store without a password. Whoever can
reach the port can set this key, and every node then runs the code in the pickle. Nodes with the same
``SHARDTRAIN_SECRET`` in their environment sign the state (HMAC, RFC 2104, with SHA-256). They reject a state
without a valid signature before they unpickle it. Without a secret, PyTorch's rendezvous is unchanged.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shardtrain.launch.seal import Seal


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
        stored = self._backend.get_state()
        if stored:
            return (self._seal.open(stored[0]), stored[1])
        return None

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Sign and write the state. Return the state that is stored afterwards, its token,
        and True if it was set.

        Raises:
            RendezvousStateError: another process wrote a state that is not signed with this node's secret.
        """
        stored: Any = self._backend.set_state(self._seal.close(state), token)
        if stored:
            return (self._seal.open(stored[0]), *stored[1:])
        return None
