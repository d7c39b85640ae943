"""A store with signed values, for runs on several machines. Ranks reject values without a valid signature.

PyTorch's TCPStore has no password. Any process that reaches its port can set keys. It could redirect a rank
to another address, or end the run. So ranks that share a secret (``SHARDTRAIN_SECRET`` in the environment)
sign their values with HMAC-SHA-256 (RFC 2104). The signature covers the key and the attempt, so a value is
not valid for another key or a later attempt.

Counters are not signed, because the store itself adds to them. No decision depends only on counters.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from shardtrain.utils.process import SECRET, SIGNATURE_PREFIX

_SIGNATURE_BYTES = 2 * hashlib.sha256().digest_size


_alive: list[SignedStore] = []
"""References that keep the stores alive.

PyTorch keeps only the C++ part of a store, and that part does not work without the Python object.
"""


def release() -> None:
    """Drop the references to the stores of this process. Call it after the process group has ended."""
    _alive.clear()


class ForgedError(dist.DistStoreError):
    """A value in the store was not signed with this run's secret."""


def signed(store: dist.Store, environment: Mapping[str, str], attempt: str) -> dist.Store:
    """Return a wrapper of ``store`` that signs the values of this attempt.

    Without a secret, return ``store``.
    """
    secret = environment.get(SECRET, "")
    if not secret:
        return store
    names = (environment.get("TORCHELASTIC_RUN_ID", ""), attempt, secret)
    key = hashlib.sha256("\0".join(names).encode()).digest()
    return SignedStore(store, key)


class SignedStore(dist.Store):
    """A store that signs values with a key. Counters (``add``) are not signed."""

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self._store = store
        self._key = key
        _alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            ForgedError: the value has no valid signature.
        """
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys.

        Raises:
            ForgedError: a value has no valid signature.
        """
        values = self._store.multi_get(list(keys))
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set a key if it has the expected value. Return the resulting value.

        Raises:
            ForgedError: the resulting value has no valid signature.
        """
        # Signatures are deterministic, so signed values can be compared.
        before = self._seal(key, expected) if expected else b""
        stored: bytes = self._store.compare_set(key, before, self._seal(key, wanted))  # type: ignore[arg-type]
        return self._opened(key, stored)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # type: ignore[attr-defined, no-any-return]

    def has_extended_api(self) -> bool:
        """Return False. The extended API can append to a value, which would invalidate its signature."""
        return False

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._key)  # type: ignore[attr-defined]

    def _seal(self, key: str, value: str | bytes) -> bytes:
        body = value if isinstance(value, bytes) else value.encode()
        # Start the message with the length of the key. Then different pairs of key and value always have
        # different messages.
        message = f"{len(key)} {key}\0".encode() + body
        return (
            SIGNATURE_PREFIX
            + hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()
            + b"\n"
            + body
        )

    def _opened(self, key: str, sealed: bytes) -> bytes:
        body = bytes(sealed)[len(SIGNATURE_PREFIX) + _SIGNATURE_BYTES + 1 :]
        if not hmac.compare_digest(bytes(sealed), self._seal(key, body)):
            raise ForgedError(
                f"the value of {key!r} in the rendezvous store is not signed with this node's {SECRET}, or another "
                "process has written to it; set the same secret on every node"
            )
        return body
