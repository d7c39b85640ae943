"""Export a saved checkpoint to another format, next to it, in background threads during training.

As in ``async_save``, each rank adds a marker when it has written its share, and rank 0's thread
publishes the draft.
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
    """Writer of the other format. The methods that write raise ShardtrainError and OSError."""

    def is_due(self, step: int, last: bool) -> bool:
        """True if the checkpoint of a step must be exported. ``last`` is true for the run's last step."""

    def write_share(
        self,
        checkpoint: Path,
        draft: Path,
        rank: int,
        size: int,
        check_cancelled: Callable[[], None],
    ) -> None:
        """Write one rank's share of the files and verify it by reading it back."""

    def write_rest(self, checkpoint: Path, draft: Path) -> None:
        """Write the files that exist once per export. Called on rank 0."""


def begin(exporter: Exporter, checkpoint: Path, lease: Lease, size: int) -> Writing:
    """Start the export of a checkpoint to ``step-N-hf`` on the first ``size`` ranks (a collective)."""

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
            # Other nodes have just written the checkpoint. A network filesystem may not show it on
            # this node yet.
            files.wait_for_sizes(checkpoint, {MANIFEST: manifest_bytes})
            files.wait_for_sizes(
                checkpoint,
                {file.name: file.bytes for file in manifest.read(checkpoint).files},
            )
            exporter.write_share(checkpoint, draft, rank, size, check_cancelled)
        if rank:
            if rank < size:
                async_save.write_marker(draft, rank, token, TensorFile("share", 0, ""))
            return
        async_save.wait_for_markers(draft, range(1, size), token, check_cancelled)
        exporter.write_rest(checkpoint, draft)
        # Publish it like a checkpoint: sync all files, check the lease, then rename once.
        files.sync_folder(draft)
        lease.check()
        retention.discard_hub(checkpoint)
        retention.make_room(retention.hub_folder(checkpoint), "")
        files.rename(draft, retention.hub_folder(checkpoint))

    return Writing(retention.step_of(checkpoint) or 0, write, is_export=True)


def abandon(checkpoint: Place, lease: Lease) -> None:
    """Remove the draft of this process, if there is one. Never raises."""
    if isinstance(checkpoint, Path):
        retention.remove(_draft(checkpoint, lease.nonce))


def _draft(checkpoint: Path, nonce: str) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}{retention.HUB}.tmp-{nonce}")
