"""A store of several machines in which a rank reads nothing that another has not signed.

PyTorch's TCPStore knows no password: whoever reaches its port sets its keys, and so sends a rank to an address of his
or ends a run with a verdict of his. Ranks that share a secret (the environment's ``SHARDTRAIN_SECRET``) sign what they
set, HMAC of RFC 2104 over SHA-256, and refuse any other value. The key and the attempt are signed with it, so that a
value cannot be moved to another key or kept for another attempt. Numbers that are counted are signed by nobody,
because the store itself adds them up; no decision is made by them alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from shardtrain.utils.process import SECRET

_PREFIX = b"shardtrain-sha256 "
_SIGNATURE_BYTES = 2 * hashlib.sha256().digest_size


_alive: list[SignedStore] = []
"""PyTorch holds the C++ half of a store, such as within a PrefixStore, which does nothing without its Python half."""


def release() -> None:
    """Close the stores of this process that nobody else holds, once its process group has ended."""
    _alive.clear()


class ForgedError(dist.DistStoreError):
    """A value in the store was not signed with this run's secret."""


def signed(store: dist.Store, environment: Mapping[str, str], attempt: str) -> dist.Store:
    """Wrap ``store`` so that the values of this attempt are signed; without a secret it is returned unchanged."""
    secret = environment.get(SECRET, "")
    if not secret:
        return store
    names = (environment.get("TORCHELASTIC_RUN_ID", ""), attempt, secret)
    return SignedStore(store, hashlib.sha256("\0".join(names).encode()).digest())


class SignedStore(dist.Store):
    """A store whose values are signed with a key; counters (``add``) are not."""

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self._store = store
        self._key = key
        _alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """As the store; raises ForgedError where the value is not signed."""
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As the store; raises ForgedError where one of the values is not signed."""
        found = self._store.multi_get(list(keys))
        return [self._opened(key, value) for key, value in zip(keys, found, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """As the store; raises ForgedError where the value that it has is not signed."""
        before = self._seal(key, expected) if expected else b""  # one text has one signature
        found: bytes = self._store.compare_set(key, before, self._seal(key, wanted))  # type: ignore[arg-type]
        return self._opened(key, found)

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
        """False: what is appended to a value would end its signature."""
        return False

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._key)  # type: ignore[attr-defined]

    def _seal(self, key: str, value: str | bytes) -> bytes:
        body = value if isinstance(value, bytes) else value.encode()
        # the length of the key keeps a part of the value from being taken for a part of it
        message = f"{len(key)} {key}\0".encode() + body
        return _PREFIX + hmac.new(self._key, message, hashlib.sha256).hexdigest().encode() + b"\n" + body

    def _opened(self, key: str, sealed: bytes) -> bytes:
        body = bytes(sealed)[len(_PREFIX) + _SIGNATURE_BYTES + 1 :]
        if not hmac.compare_digest(bytes(sealed), self._seal(key, body)):
            raise ForgedError(
                f"the value of {key!r} in the store at which the nodes meet is not signed with this node's {SECRET}: "
                "give every node the same secret, or somebody else has reached the store's port"
            )
        return body
