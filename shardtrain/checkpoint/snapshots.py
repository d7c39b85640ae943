"""Snapshots: copies of the training state in host memory, from which a restarted run continues.

A snapshot is a checkpoint in the usual format whose files are spread over the nodes of the run. Each rank
copies its share into the folder of its node (``snapshot_folder.py``), and a thread sends a second copy to the
next node. There are two generations: a rank overwrites the older one only when the newer one is complete on
all ranks. At a restart, the ranks choose the newest step whose files all exist with the right hash.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import __version__
from shardtrain.checkpoint import async_save, manifest, save_plan, tensor_reader
from shardtrain.checkpoint import snapshot_folder as folders
from shardtrain.checkpoint.collectives import (
    all_gather_json,
    all_ranks,
    first_word,
    gather_distinct_json,
)
from shardtrain.checkpoint.manifest import MANIFEST, Manifest, TensorFile
from shardtrain.checkpoint.snapshot_folder import FileRecord, file_of
from shardtrain.checkpoint.snapshot_peers import (
    MakeGroup,
    Range,
    Ring,
    exchange,
    fetch,
    make_pairs,
)
from shardtrain.checkpoint.storage import SPARE
from shardtrain.config.schema import Config
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import CheckpointError, ConfigError
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_bytes

END_SECONDS = 3.0
"""Time that a rank waits for its thread when the run ends."""
_NO_HASH = "0" * 64


@dataclass(frozen=True)
class CompleteSnapshot:
    """A complete snapshot of an earlier attempt.

    Attributes:
        path: Name of the snapshot for messages. It is not a folder.
        generation: Number of its generation.
        stored: Its manifest, with the hashes of all files.
        nodes_of: Nodes that hold an intact copy of each file.
    """

    path: Path
    generation: int
    stored: Manifest
    nodes_of: Mapping[str, Sequence[int]]


class Snapshots:
    """Take snapshots, find the newest one, and load it. All methods except ``is_due``, ``wait`` and
    ``close`` are collectives.
    """

    def __init__(self, config: Config, make_group: MakeGroup) -> None:
        """Find the nodes of the run. Raises ConfigError if no launcher has created the folder."""
        self._interval = config.checkpoint.snapshot_interval
        folder = folders.of_rank(os.environ)
        if folder is None:
            raise ConfigError(folders.without_restarts(self._interval))
        self._folder = folder
        self._rank = dist.get_rank()
        # Ranks with the same folder on the same host are one node.
        nodes, node_of = gather_distinct_json([os.uname().nodename, str(folder)])
        self._num_nodes = len(nodes)
        self._ring = Ring(node_of)
        self._node = node_of[self._rank]
        self._members = self._ring.members[self._node]
        self._is_speaker = self._rank == self._members[0]
        self._target = self._ring.target(self._rank)
        self._sources = self._ring.sources(self._rank)
        self._pairs = make_pairs(self._ring, make_group, config.comm.init_timeout_seconds)
        self._token = ""
        self._plan: save_plan.SavePlan | None = None
        self._next = 0
        self._buffers: dict[int, dict[int, Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_on = True

    # --- taking snapshots

    def is_due(self, step: int) -> bool:
        """True if a snapshot is due after a step. Equal on all ranks."""
        return self._is_on and step % self._interval == 0

    def take(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        token: str,
        origin: str,
    ) -> None:
        """Copy this rank's share, and start a thread that completes the snapshot (a collective).

        If a rank cannot store its share, snapshots are turned off for this attempt, with one warning.

        Args:
            token: Identifies this attempt. Only rank 0's is used.
            origin: Identifies the run in its manifests. Only rank 0's is used.
        """
        self.wait()
        reason = self._stop_reason(tensors)
        if not reason:
            reason = first_word(self._copy(tensors))
        if reason:
            self._is_on = False
            if self._rank == 0:
                logger.warning(
                    f"{folders.OPTION}={self._interval}: no more snapshots, because {reason}"
                )
            return
        if not self._token:
            self._token = first_word(token)
        generation = self._next
        self._next = 1 - generation
        assert self._plan is not None
        snapshot = Manifest(
            step=step,
            world_size=dist.get_world_size(),
            run=self._token,
            created_by=f"shardtrain {__version__}, torch {torch.__version__}",
            files=_unhashed(self._plan),
            tensors=self._plan.tensors,
            facts=facts,
            origin=origin,
        )
        self._thread = threading.Thread(
            target=self._run, args=(generation, step, snapshot), name="snapshot", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until this rank's part of the last snapshot is complete, or has failed.

        Every rank calls this before the update of the next step. So once a rank has completed that step, the
        snapshot is complete on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait a few seconds for the thread. Other ranks may have ended."""
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def forget(self) -> None:
        """Invalidate all snapshots, because a rollback has undone their steps (a collective)."""
        self.wait()
        if self._is_speaker:
            all_ranks(lambda: folders.forget_all(self._folder))
        else:
            all_ranks(lambda: None)

    def _stop_reason(self, tensors: Mapping[str, Tensor]) -> str:
        """Plan the snapshot (a collective). Return why there can be no more snapshots, or ""."""
        problem = ""
        if self._error is not None:
            problem = f"rank {self._rank} failed to complete one: {_one_line(self._error)}"
        problem = first_word(problem)
        if problem:
            return problem
        plan = save_plan.plan(tensors, self._plan)
        if plan is self._plan:
            return ""
        self._plan = plan
        self._buffers = {}
        # One rank of each node measures the memory, which all ranks of the node share.
        problem = ""
        if self._is_speaker:
            problem = self._memory_problem()
        return first_word(problem)

    def _memory_problem(self) -> str:
        """Return a description if the memory of this node is too small for two generations, or ""."""
        bytes_per_generation = sum(self._sizes_here().values())
        needed = len(folders.GENERATIONS) * bytes_per_generation
        # The new generations reuse the memory of the snapshots that are already stored.
        free = folders.free_bytes(self._folder) + folders.used_bytes(self._folder)
        if self._rank == 0:
            copies = "a copy on the next node"
            if self._num_nodes == 1:
                copies = "no copy on another node, so they do not survive the loss of this node"
            logger.info(
                f"snapshots ({folders.OPTION}={self._interval}): {format_bytes(needed)} in {self._folder}, {copies}"
            )
        if SPARE * needed <= free:
            return ""
        return (
            f"they need {format_bytes(SPARE * needed)} of host memory on {os.uname().nodename}, and "
            f"{format_bytes(free)} are free; use more nodes, or a larger {self._folder.parent}"
        )

    def _sizes_here(self) -> dict[int, int]:
        """Return the bytes of each rank's file that this node holds."""
        assert self._plan is not None
        sizes = {}
        for rank, num_bytes in enumerate(self._plan.bytes_of):
            if self._ring.writer_of(rank, self._node) is not None:
                sizes[rank] = num_bytes
        return sizes

    def _copy(self, tensors: Mapping[str, Tensor]) -> str:
        """Copy this rank's tensors into the next generation. Return a description of an error, or ""."""
        assert self._plan is not None
        generation = self._folder / folders.GENERATIONS[self._next]
        # This rank writes its own file, and the copies that other nodes send to it.
        ranks_written = [self._rank, *self._sources]
        is_mapped = self._next in self._buffers
        try:
            if not is_mapped and self._is_speaker:
                # Free the memory of files that an earlier attempt has left, before the new files need it.
                names = {file_of(rank) for rank in self._sizes_here()}
                if self._ring.writer_of(0, self._node) is not None:
                    names.add(MANIFEST)
                folders.remove_others(generation, names)
            # The files are incomplete from now on. The manifest accompanies the file of rank 0.
            if 0 in ranks_written:
                folders.forget_file(generation, MANIFEST)
            for rank in ranks_written:
                folders.forget_file(generation, file_of(rank))
            # Later snapshots reuse the mappings, until the plan changes.
            if not is_mapped:
                buffers = {}
                for rank in ranks_written:
                    path = generation / file_of(rank)
                    buffers[rank] = _map(path, self._plan.bytes_of[rank])
                self._buffers[self._next] = buffers
            names_of_rank = self._plan.names_of(self._rank)
            local_tensors = [tensors[name] for name in names_of_rank]
            async_save.copy_bytes(local_tensors, self._buffers[self._next][self._rank])
        except OSError as error:
            return f"rank {self._rank} on {os.uname().nodename} cannot store its share: {_one_line(error)}"
        return ""

    def _run(self, generation: int, step: int, snapshot: Manifest) -> None:
        """Complete this rank's part of a snapshot. Runs in a thread."""
        try:
            self._complete(generation, step, snapshot)
        except BaseException as error:
            # ``_stop_reason`` reports it at the next snapshot. An exception in a thread would only be
            # printed.
            self._error = error

    def _complete(self, generation: int, step: int, snapshot: Manifest) -> None:
        folder = self._folder / folders.GENERATIONS[generation]
        buffers = self._buffers[generation]
        data = buffers[self._rank]
        record = FileRecord(self._token, step, file_of(self._rank), data.numel(), _sha256(data))
        text = ""
        if self._rank == 0:
            text = snapshot.to_bytes().decode()
        self._store(folder, record, text)

        # The copy on the next node survives the loss of this node. A run on one node has no next node.
        if self._target is None:
            return
        received = {source: buffers[source] for source in self._sources}
        for copy in exchange(self._pairs, self._target, [record, text], data, received):
            fields, text = copy.description
            record = FileRecord(*fields)
            # A copy of another step under this name would make a snapshot of two states.
            expected = (self._token, step, file_of(copy.source), copy.data.numel())
            if record[:4] != expected:
                raise ValueError(f"rank {copy.source} sent {record[:4]} instead of {expected}")
            self._store(folder, record, text)

    def _store(self, folder: Path, record: FileRecord, text: str) -> None:
        """Write the record of a file, and before it rank 0's manifest."""
        if text:
            data = text.encode()
            atomic_io.write(folder / MANIFEST, data, mode=0o600)
            digest = hashlib.sha256(data).hexdigest()
            folders.write_record(
                folder, record._replace(name=MANIFEST, bytes=len(data), sha256=digest)
            )
        folders.write_record(folder, record)

    # --- finding and loading a snapshot

    def find(self, newer_than: int) -> CompleteSnapshot | None:
        """Return the newest complete snapshot after step ``newer_than``, or None (a collective).

        Every byte is compared with its hash. Damaged copies are reported and not used.
        """
        all_ranks(self._sweep)
        records = folders.records(self._folder)
        nodes_of = self._gather(records)
        candidates = []
        for (token, step), nodes_of_names in nodes_of.items():
            if step > newer_than and MANIFEST in nodes_of_names:
                candidates.append((step, token))
        # ``_verify`` is a collective, so all ranks must try the same candidates in the same order.
        for step, token in sorted(candidates, reverse=True):
            records_here = {}
            generation = -1
            for number, record in records:
                if (record.token, record.step) == (token, step):
                    records_here[record.name] = record
                    generation = number
            snapshot = self._verify(step, token, nodes_of[token, step], generation, records_here)
            if snapshot is not None:
                # The next snapshot must not overwrite the one from which the run continues.
                self._next = 1 - snapshot.generation
                return snapshot
        return None

    def _sweep(self) -> None:
        if self._is_speaker:
            folders.remove_loading_folders(self._folder)

    def _gather(
        self, records: Sequence[tuple[int, FileRecord]]
    ) -> dict[tuple[str, int], dict[str, list[int]]]:
        """Return the nodes that hold each file of each snapshot, by its token and step (a collective)."""
        # Only one rank of each node lists its files.
        listed: list[Any] = []
        if self._is_speaker:
            groups: dict[tuple[str, int], list[str]] = {}
            for _, record in records:
                groups.setdefault((record.token, record.step), []).append(record.name)
            listed = [[token, step, names] for (token, step), names in groups.items()]
        nodes_of: dict[tuple[str, int], dict[str, list[int]]] = {}
        for rank, snapshots in enumerate(all_gather_json(listed)):
            for token, step, names in snapshots:
                for name in names:
                    holders = nodes_of.setdefault((token, step), {}).setdefault(name, [])
                    holders.append(self._ring.node_of[rank])
        return nodes_of

    def _verify(
        self,
        step: int,
        token: str,
        nodes_of: Mapping[str, Sequence[int]],
        generation: int,
        records: Mapping[str, FileRecord],
    ) -> CompleteSnapshot | None:
        """Return a snapshot if each of its files has an intact copy, else None (a collective).

        Args:
            nodes_of: Nodes that list each file.
            generation: Number of the snapshot's generation on this node, -1 if this node has none of its files.
            records: This node's records of the snapshot's files.
        """
        path = self._folder / f"step-{step}"
        folder = self._folder / folders.GENERATIONS[generation]
        # The ranks of a node divide its files among them.
        position = self._members.index(self._rank)
        share = sorted(records)[position :: len(self._members)]
        damages = []
        for name in share:
            damage = folders.find_damage(folder, records[name])
            if damage:
                damages.append([name, f"{damage} (on {os.uname().nodename})"])
        intact: dict[str, list[int]] = {name: list(nodes) for name, nodes in nodes_of.items()}
        for rank, damages_of_rank in enumerate(all_gather_json(damages)):
            for name, damage in damages_of_rank:
                intact[name].remove(self._ring.node_of[rank])
                if self._rank == 0:
                    logger.warning(f"snapshot of step {step}: {damage}: this copy is not used")

        stored = self._read_manifest(path, intact[MANIFEST], folder)
        problem = "its manifest is damaged"
        if stored is not None:
            missing = [file.name for file in stored.files if not intact.get(file.name)]
            problem = ""
            if missing:
                problem = f"no node has an intact {missing[0]}"
            elif (stored.step, stored.run) != (step, token):
                problem = "its manifest belongs to another snapshot"
        if problem or stored is None:
            if self._rank == 0:
                logger.warning(f"snapshot of step {step}: {problem}: skipped")
            return None

        # Nodes without files of this snapshot do not know its generation. The other nodes agree on it.
        numbers = [number for number in all_gather_json(generation) if number >= 0]
        hashes = self._gather_hashes(stored, records, intact)
        stored_files = tuple(replace(file, sha256=hashes[file.name]) for file in stored.files)
        return CompleteSnapshot(path, numbers[0], replace(stored, files=stored_files), intact)

    def _read_manifest(self, path: Path, nodes: Sequence[int], folder: Path) -> Manifest | None:
        """Return the manifest from the first of ``nodes`` (a collective), or None without an intact one."""
        text = ""
        # Ranks send each other JSON. Latin-1 represents any bytes as text, also those of a damaged manifest.
        if nodes and self._rank == self._ring.members[nodes[0]][0]:
            text = manifest.read_bytes(folder).decode("latin-1")
        text = first_word(text)
        if not text:
            return None
        try:
            return manifest.parse(text.encode("latin-1"), path)
        except CheckpointError:
            return None

    def _gather_hashes(
        self,
        stored: Manifest,
        records: Mapping[str, FileRecord],
        intact: Mapping[str, Sequence[int]],
    ) -> dict[str, str]:
        """Return the hash of each file, from the first node that holds it (a collective)."""
        hashes_here: dict[str, str] = {}
        if self._is_speaker:
            for file in stored.files:
                if intact[file.name][0] == self._node:
                    hashes_here[file.name] = records[file.name].sha256
        hashes: dict[str, str] = {}
        for hashes_of_node in all_gather_json(hashes_here):
            hashes.update(hashes_of_node)
        return hashes

    def load(self, tensors: Mapping[str, Tensor], snapshot: CompleteSnapshot) -> None:
        """Fill this rank's shards of the tensors from a snapshot, in place (a collective).

        Raises:
            CheckpointError: on all ranks, if a file cannot be read.
        """
        stored = snapshot.stored
        generation = self._folder / folders.GENERATIONS[snapshot.generation]
        names = [file.name for file in stored.files]
        is_local = [self._node in snapshot.nodes_of[name] for name in names]
        created: list[Path] = []

        # Create a folder that looks like a complete checkpoint to ``tensor_reader``. Files of this node are
        # linked into it. Files of other nodes are sparse, and contain only the bytes that this rank needs.
        def link() -> None:
            loading = folders.loading_folder(self._folder, self._rank)
            created.append(loading)
            for file, is_on_this_node in zip(stored.files, is_local, strict=True):
                if is_on_this_node:
                    os.link(generation / file.name, loading / file.name)

        all_ranks(link)
        loading = created[0]
        read_files = _Files(generation, names)
        written_files = _Files(loading, names)
        try:
            missing = self._missing(tensors, snapshot, is_local)
            fetch(missing, read_files.read, written_files.write)

            def read() -> None:
                try:
                    tensor_reader.read(tensors, stored, loading)
                except OSError as error:
                    raise CheckpointError(
                        f"snapshot {snapshot.path} cannot be loaded: {error}"
                    ) from error

            all_ranks(read)
        finally:
            read_files.close()
            written_files.close()
            shutil.rmtree(loading, ignore_errors=True)

    def _missing(
        self, tensors: Mapping[str, Tensor], snapshot: CompleteSnapshot, is_local: Sequence[bool]
    ) -> Iterator[Range]:
        """Yield the ranges that this rank needs and its node does not hold."""
        names = [file.name for file in snapshot.stored.files]
        for file, begin, num_bytes in tensor_reader.needed_ranges(tensors, snapshot.stored):
            if is_local[file]:
                continue
            # Divide the work among the nodes that hold the file, and among the ranks of the node.
            nodes = snapshot.nodes_of[names[file]]
            node = nodes[self._node % len(nodes)]
            members = self._ring.members[node]
            sender = members[file % len(members)]
            yield Range(sender, file, begin, num_bytes)


class _Files:
    """Random access to the files of a snapshot in a folder, by their numbers. Files are opened once."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._descriptors: dict[int, int] = {}

    def read(self, file: int, begin: int, num_bytes: int) -> Tensor:
        """Return bytes of a file. Raises CheckpointError if it is shorter."""
        data = os.pread(self._open(file, os.O_RDONLY), num_bytes, begin)
        if len(data) != num_bytes:
            raise tensor_reader.shorter()
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def write(self, file: int, begin: int, data: Tensor) -> None:
        """Write bytes of a file, which is created if needed."""
        descriptor = self._open(file, os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, memoryview(data.numpy().data), begin)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _open(self, file: int, flags: int) -> int:
        if file not in self._descriptors:
            path = self._folder / self._names[file]
            self._descriptors[file] = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return self._descriptors[file]


def _map(path: Path, num_bytes: int) -> Tensor:
    """Create a file of this size, or keep its memory if it exists, and map it. Raises OSError without memory."""
    descriptor = atomic_io.open_file(path, os.O_RDWR | os.O_CREAT, mode=0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        # Reserve the memory now. Without it, writing to the mapping would end the process by SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _unhashed(plan: save_plan.SavePlan) -> tuple[TensorFile, ...]:
    """Return the files of a snapshot for its manifest. Their hashes are in their records."""
    stored_files = []
    for rank, num_bytes in enumerate(plan.bytes_of):
        if num_bytes:
            stored_files.append(TensorFile(file_of(rank), num_bytes, _NO_HASH))
    return tuple(stored_files)


def _sha256(data: Tensor) -> str:
    return hashlib.sha256(memoryview(data.numpy().data)).hexdigest()


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    # Some exceptions have no text.
    if not lines:
        return type(error).__name__
    return lines[0][:300]
