"""A checkpoint that is on disk, written once more in another format beside it: by threads, while training continues.

As with a save, a rank that has written leaves a word, and the first rank's thread makes of the draft what it is to be.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from shardtrain.checkpoint import async_save, files, manifest, retention
from shardtrain.checkpoint.async_save import Writing
from shardtrain.checkpoint.collectives import first_rank
from shardtrain.checkpoint.lease import Lease
from shardtrain.checkpoint.manifest import MANIFEST, TensorFile
from shardtrain.checkpoint.storage import Place


class Exporter(Protocol):
    """What writes the other format. The methods that write raise ShardtrainError and OSError."""

    def is_due(self, step: int, last: bool) -> bool:
        """Whether the checkpoint of a step is to be written; ``last`` is that of the run's last step."""

    def write_share(
        self, checkpoint: Path, draft: Path, rank: int, size: int, check_cancelled: Callable[[], None]
    ) -> None:
        """Write one rank's share of the files, and read it back."""

    def write_rest(self, checkpoint: Path, draft: Path) -> None:
        """Write what is written once."""


def begin(exporter: Exporter, checkpoint: Path, lease: Lease, size: int) -> Writing:
    """Begin to write a checkpoint as ``step-N-hf``, by the first ``size`` ranks (a collective)."""

    def prepare() -> list[Any]:
        lease.check()
        draft = _draft(checkpoint, lease.nonce)
        retention.remove(draft)
        files.make_draft(draft)
        return [lease.nonce, secrets.token_hex(4), (checkpoint / MANIFEST).stat().st_size]

    rank = dist.get_rank()
    nonce, token, manifest_bytes = first_rank(prepare)
    draft = _draft(checkpoint, nonce)

    def write(check_cancelled: Callable[[], None]) -> None:
        if rank < size:
            # Other nodes have written the checkpoint a moment ago.
            files.wait_for_sizes(checkpoint, {MANIFEST: manifest_bytes})
            files.wait_for_sizes(checkpoint, {file.name: file.bytes for file in manifest.read(checkpoint).files})
            exporter.write_share(checkpoint, draft, rank, size, check_cancelled)
        if rank:
            if rank < size:
                async_save.write_marker(draft, rank, token, TensorFile("share", 0, ""))
            return
        for other in range(1, size):
            async_save.wait_for_marker(draft, other, token, check_cancelled)
        exporter.write_rest(checkpoint, draft)
        # As a checkpoint is published: all of it on disk, the lease still held, then one rename.
        files.sync_folder(draft)
        lease.check()
        retention.discard_hub(checkpoint)
        retention.make_room(retention.hub_folder(checkpoint), "")
        files.rename(draft, retention.hub_folder(checkpoint))

    return Writing(retention.step_of(checkpoint) or 0, write, is_export=True)


def abandon(checkpoint: Place, lease: Lease) -> None:
    """Remove the draft of this process, where there is one; raises nothing."""
    if isinstance(checkpoint, Path):
        retention.remove(_draft(checkpoint, lease.nonce))


def _draft(checkpoint: Path, nonce: str) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}{retention.HUB}.tmp-{nonce}")
