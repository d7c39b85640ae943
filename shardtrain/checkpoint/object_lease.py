"""Best-effort lease of a folder in an object store: an object that its holder rewrites every few seconds.

In a store with conditional writes, only one run gets the lease. In other stores, two runs that start within a
second of each other may both assume that they hold it. Each checks the lease before it writes a manifest, so
a checkpoint never mixes files of two runs.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from shardtrain.checkpoint import lease
from shardtrain.checkpoint.lease import (
    LEASE,
    Lease,
    describe,
    is_seen_from_here,
    own_fields,
    parse,
    why_free,
)
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.utils.errors import ConfigError, FolderTaken, fix_first
from shardtrain.utils.log import logger


class ObjectLease(Lease):
    """The right to write below an address of an object store."""

    def __init__(self, folder: ObjectPath) -> None:
        super().__init__(folder)
        self._object = folder / LEASE
        self._beats = 0

    def acquire(self) -> None:
        if self._held:
            return
        holder = self._found()
        if holder:
            self._wait_until_free(holder)
        # Read the lease back: another run may have been faster, or the store may not reject a second writer.
        with contextlib.suppress(FileExistsError):
            if not self._object.put(self._text(), new=not holder):
                logger.info(
                    f"{self._object.parent}: this store cannot reject a second writer; "
                    "if two runs start within a second, one of them will stop at its next save"
                )
        holder_now = self._found()
        if holder_now.get("nonce") != self.nonce:
            self._refuse(holder_now)
        self._hold()

    def check(self) -> None:
        """Check the lease before a write. Raises ConfigError if it is lost, OSError if the store does not answer."""
        holder = self._find_own()
        if not self._held or holder.get("nonce") != self.nonce:
            raise ConfigError(
                fix_first(
                    f"the lease {self._object} of this run was taken over by {describe(holder)}",
                    "set a separate checkpoint.folder for each run",
                    "two runs must not write one folder, and this one writes nothing more",
                )
            )

    def _find_own(self, with_folder: bool = False) -> dict[str, Any]:
        if self._held and not self._found() and not self._ended.is_set():
            with contextlib.suppress(FileExistsError):
                self._object.put(self._text(), new=True)
                logger.warning(
                    f"the lease {self._object} had disappeared and was written again; "
                    "find out what deletes objects there",
                )
        return self._found()

    def _found(self) -> dict[str, Any]:
        try:
            return parse(self._object.read_bytes()[:4096])
        except FileNotFoundError:
            return {}

    def _wait_until_free(self, holder: dict[str, Any]) -> None:
        """Return once the lease is free. If its process cannot be seen from here, watch for a sign of life first.

        Raises:
            FolderTaken: the lease belongs to a live run.
        """
        reason = why_free(holder)
        if not reason and is_seen_from_here(holder):
            self._refuse(holder)
        if not reason:
            logger.info(
                f"{self._object} belongs to another host: waiting {lease.STALE_SECONDS:.0f} s for a sign of life"
            )
            # Use this host's clock. A live holder rewrites the object with a new count of beats.
            deadline = time.monotonic() + lease.STALE_SECONDS
            while time.monotonic() < deadline:
                time.sleep(min(1.0, lease.BEAT_SECONDS))
                current = self._found()
                if not current:
                    # The holder released the lease.
                    return
                if current != holder:
                    self._refuse(current)
            reason = f"no heartbeat for {lease.STALE_SECONDS:.0f} s"
        logger.warning(f"took over {self._object} of {describe(holder)}: {reason}")

    def _refuse(self, holder: dict[str, Any]) -> None:
        raise FolderTaken(
            f"checkpoint.folder: {self._object.parent} is being written by {describe(holder)}; "
            "stop that run, or set another checkpoint.folder for this one"
        )

    def _text(self) -> bytes:
        return (json.dumps({**own_fields(self.nonce), "beats": self._beats}) + "\n").encode()

    def _beat(self) -> None:
        while not self._ended.wait(lease.BEAT_SECONDS):
            # The next save reports the error of the store.
            with contextlib.suppress(OSError):
                if self._find_own().get("nonce") != self.nonce or self._ended.is_set():
                    # The lease is lost. The next save reports it.
                    return
                self._beats += 1
                self._object.put(self._text(), new=False)
