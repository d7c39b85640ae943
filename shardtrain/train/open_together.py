"""Open the same data on all ranks, while only one rank reads the storage.

Rank 0 lists the files and broadcasts the result, so the load on the storage does not grow with the number of
ranks. The first rank of every other node then checks a few of the listed files. If the data do not exist there, all
ranks stop with an error that names the rank and its host. If files are missing, or their sizes, times or inodes
differ, the node has its own copy of the folder. The first rank of that node then lists this copy for its node. If
copies have different files, the error names a node that differs from most others.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardtrain.checkpoint.collectives import (
    all_gather_json,
    all_ranks,
    any_ranks,
    gather_distinct_json,
)
from shardtrain.config.schema import Config
from shardtrain.data import shared_opening
from shardtrain.data.shared_opening import Listing, Look, Witness, decode, encode
from shardtrain.distributed.rendezvous import gloo_sockets
from shardtrain.ops import host_collectives
from shardtrain.utils import activity, bounded_reads, errors, majority, process_identity
from shardtrain.utils.errors import (
    ConfigError,
    DataError,
    PeerError,
    Problem,
    ShardtrainError,
    StorageError,
)

_PIECE_BYTES = 16 * 2**20
"""Bytes per broadcast. Small enough that ranks can forward one piece while they receive the next."""
_KEEP_ALIVE_SECONDS = 10.0


def together(config: Config) -> AbstractContextManager[None]:
    """Return a context manager that lets rank 0 open data for all ranks.

    Inside it, opening data is a collective. It does nothing with one rank or in a dry run.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return nullcontext()
    return shared_opening.shared(Together(config.comm.init_timeout_seconds))


class Together:
    """Implements ``shared_opening.Ranks`` with the default process group."""

    def __init__(self, timeout_seconds: float) -> None:
        self._rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_seconds)
        self._is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        self._keep_alive_seconds = min(_KEEP_ALIVE_SECONDS, timeout_seconds / 4)
        self._places_with_copies: set[str] = set()
        """Paths that are a separate copy on at least one node. The set is the same on all ranks."""
        self._copies_here: set[str] = set()
        """Paths that are a separate copy on this node."""
        self._opened_by_this_rank: set[str] = set()
        """Paths that this rank opens itself instead of using another rank's result."""
        self._node: tuple[int, dist.ProcessGroup | None] | None = None
        """Result of ``_find_node``, once it is known."""

    def once(self, place: str, look: Look, listing: Listing | None) -> Any:
        # Rank 0 reads the storage. All ranks receive its result or raise its error.
        first_place, result = self._broadcast_result(place, look, 0, dist.group.WORLD)
        # Without a listing, no files can be compared. Use what is known from earlier calls.
        if listing is None:
            if first_place in self._places_with_copies:
                return self._result_of_node(place, look, result, None, first_place)
            return result

        def has_copy() -> bool:
            # Only one rank per node checks its files, to limit the load on shared storage.
            if not self._is_first_of_node or self._rank == 0:
                return False
            return place != first_place or _differs_here(listing.witnesses(result), place)

        # Find the nodes with a separate copy. These are collectives, so every rank must call all of them in this
        # order, whatever its own result.
        has_copy_here = all_ranks_agree(has_copy)
        if any_ranks([has_copy_here])[0]:
            self._places_with_copies.add(first_place)
            source, group = self._find_node()
            # The first rank decides for its node, even if the node's ranks use different paths.
            if self._broadcast(lambda: has_copy_here, source, group):
                self._copies_here.add(place)
        # If the ranks use different paths, these may also be different copies.
        if any_ranks([place != first_place])[0]:
            self._places_with_copies.add(first_place)

        # With copies, each node uses the result for its own copy.
        if first_place in self._places_with_copies:
            return self._result_of_node(place, look, result, listing, first_place)
        return result

    def is_watched_here(self, place: str) -> bool:
        if place in self._copies_here and place not in self._opened_by_this_rank:
            assert self._node is not None
            return self._node[0] == self._rank
        return self._rank == 0 or place in self._opened_by_this_rank

    def _result_of_node(
        self, place: str, look: Look, result: Any, listing: Listing | None, first_place: str
    ) -> Any:
        """Return the result that this rank should use (a collective).

        Usually, this is rank 0's ``result``. If the node has a separate copy of the data, it is the result of
        the node's first rank. If this rank has a different path than that rank, it opens the data itself.

        Raises:
            ConfigError: nodes have copies with different files.
        """

        def read() -> Any:
            source_place = first_place
            node_result = result
            # The first rank of the node lists the node's copy.
            if place in self._copies_here:
                source, group = self._find_node()
                source_place, node_result = self._broadcast_result(place, look, source, group)
            if place != source_place:
                self._opened_by_this_rank.add(place)
                return look()
            return node_result

        node_result = all_ranks_agree(read)
        # The path of another rank may be the same data under another name, which cannot be compared.
        if listing is not None:
            own_result = node_result if place == first_place else result
            _require_equal_copies(first_place, listing, result, own_result)
        return node_result

    def _broadcast_result(
        self, place: str, look: Look, source: int, group: dist.ProcessGroup | None
    ) -> tuple[str, Any]:
        """Open the data on the source rank with ``look``, and share the result with the group.

        Returns:
            The source rank's place and its result, on all ranks.

        Raises:
            Exception: ``look`` has raised it. Other ranks raise an error with the same class and message.
        """
        failure: list[Exception] = []

        def look_or_error() -> Any:
            try:
                return {"place": place, "found": look()}
            except Exception as error:
                failure.append(_as_data_error(error))
                return {"error": list(_class_and_message(failure[0], is_first=source == 0))}

        answer = self._broadcast(look_or_error, source, group)
        if failure:
            raise failure[0]
        if "error" in answer:
            class_name, message = answer["error"]
            raise getattr(errors, class_name)(message)
        return answer["place"], answer["found"]

    def _broadcast(
        self, make: Callable[[], Any], source: int, group: dist.ProcessGroup | None
    ) -> Any:
        """Call ``make`` on the source rank, and return its value on all ranks of the group.

        The source sends keep-alives while ``make`` runs, because otherwise the other ranks would time out.
        ``group`` is None if it would have only this rank.
        """
        if group is None:
            return make()
        size = torch.zeros(1, dtype=torch.int64)

        # The other ranks wait for the size of the value. A size of 0 is a keep-alive.
        if self._rank != source:
            while not int(size):
                dist.broadcast(size, source, group=group)
                # Waiting for slow storage or a download is not a hang for the watchdog.
                activity.tick()
            buffer = torch.empty(int(size), dtype=torch.uint8)
            for piece in buffer.split(_PIECE_BYTES):
                dist.broadcast(piece, source, group=group)
            return decode(buffer.numpy().data)

        # The source computes the value, and broadcasts its size and then its bytes.
        with self._keep_alives(source, group):
            value = make()
            buffer = torch.frombuffer(bytearray().join(encode(value)), dtype=torch.uint8)
        size.fill_(len(buffer))
        dist.broadcast(size, source, group=group)
        for piece in buffer.split(_PIECE_BYTES):
            dist.broadcast(piece, source, group=group)
        return value

    @contextmanager
    def _keep_alives(self, source: int, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Context manager that broadcasts keep-alives from a thread.

        They are needed because reading the storage may take longer than the timeout of a collective.
        """
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(self._keep_alive_seconds):
                try:
                    dist.broadcast(torch.zeros(1, dtype=torch.int64), source, group=group)
                except RuntimeError:
                    # The main thread's next broadcast raises the same error.
                    return

        thread = threading.Thread(target=send, name="opening-data", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _find_node(self) -> tuple[int, dist.ProcessGroup | None]:
        """Return the first rank of this node, and the process group of its ranks (None for a single rank).

        The first call is a collective over all ranks.
        """
        if self._node is not None:
            return self._node
        # Exchange one row per rank: the number of its node, and 0 if it is the first rank there.
        local_row = torch.tensor([_node_number(), int(not self._is_first_of_node)])
        rows = host_collectives.all_gather(local_row)
        is_on_this_node = rows[:, 0] == local_row[0]
        members = is_on_this_node.nonzero().flatten().tolist()
        # Without a rank with LOCAL_RANK 0, use the lowest rank.
        source = min(members, key=lambda rank: (int(rows[rank, 1]), rank))

        def new_group() -> dist.ProcessGroup:
            # Only the members call this, so synchronize only with them.
            return dist.new_group(
                members, timeout=self._timeout, backend="gloo", use_local_synchronization=True
            )

        group = None
        if len(members) > 1:
            group = gloo_sockets.private(new_group)
        self._node = source, group
        return self._node


def all_ranks_agree(action: Callable[[], Any]) -> Any:
    """Call ``action`` on every rank, and return this rank's result (a collective).

    If it raises on one rank, all ranks raise.
    """
    results: list[Any] = []
    all_ranks(lambda: results.append(action()))
    return results[0]


def _require_equal_copies(place: str, listing: Listing, first_result: Any, own_result: Any) -> None:
    """Raise ConfigError on all ranks unless all copies of the data have the same content (a collective).

    Args:
        first_result: The result of rank 0, on all ranks.
        own_result: The result for the copy of this node.
    """
    distinct, number_of_rank = gather_distinct_json(listing.content(own_result))
    if len(distinct) == 1:
        return
    # One of the two ranks is rank 0, so the other one has the results of both.
    rank, other = majority.named(dict(enumerate(number_of_rank)))
    difference = ""
    if dist.get_rank() == rank != 0:
        difference = listing.difference(first_result, own_result)
    elif dist.get_rank() == other != 0:
        difference = listing.difference(own_result, first_result)
    difference = "".join(all_gather_json(difference))
    hosts = all_gather_json(socket.gethostname())
    where = f"rank {other} (host {hosts[other]})"
    rule = f"is a copy on this node, which differs from the copy of {where}: it {difference}"
    fix = "give every node a complete copy"
    raise ConfigError(f"rank {rank} on {hosts[rank]}: {Problem('the data', place, rule, fix)}")


def _differs_here(witnesses: Sequence[Witness], place: str) -> bool:
    """True if a file that rank 0 listed at ``place`` is missing on this node, or has another size, time or inode.

    Raises:
        ConfigError: ``place`` does not exist here. The message names this rank, its host and the file.
        StorageError: the storage does not answer.
    """
    differs = False
    for file in witnesses:
        try:
            status = os.stat(file.path)
        except OSError as error:
            trouble = bounded_reads.trouble(file.path, error)
            if trouble is not None:
                raise StorageError(f"{_rank_and_host()}{trouble}") from error
            if os.path.exists(place):
                return True
            rule = f"does not exist on this host, but rank 0 lists it ({error.strerror})"
            fix = "mount the same storage on every node, or give each a complete copy"
            raise ConfigError(
                f"{_rank_and_host()}{Problem(file.option, file.path, rule, fix)}"
            ) from error
        local_identity = (status.st_size, status.st_mtime_ns, status.st_ino)
        differs |= local_identity != (file.size, file.mtime_ns, file.inode)
    return differs


def require_same_data(stream: Any, data: str) -> None:
    """Check that all ranks read the same data, and raise ConfigError on all ranks if not (a collective).

    Without this check, ranks with different data would train without an error, but repeat some rows and miss
    others. The message names ``data``, a file that differs, a rank that differs from most others, and two hosts.
    """
    fingerprints, number_of_rank = gather_distinct_json(stream.fingerprint)
    if len(fingerprints) == 1:
        return
    rank, other = majority.named(dict(enumerate(number_of_rank)))
    listings, listing_of_rank = gather_distinct_json(dict(stream.sampled_files))
    files = listings[listing_of_rank[rank]]
    other_files = listings[listing_of_rank[other]]
    names = sorted(files.keys() | other_files.keys())
    differing = [name for name in names if files.get(name) != other_files.get(name)]
    subject = differing[0] if differing else "tokenizer, data options or versions"
    hosts = all_gather_json(socket.gethostname())
    where = f"is not the same as on rank {other} (host {hosts[other]})"
    fix = "give every rank the same files and the same versions"
    raise ConfigError(
        f"rank {rank} on {hosts[rank]}: {data} differ between ranks: {subject} {where}; {fix}"
    )


def _rank_and_host() -> str:
    return f"rank {dist.get_rank()} on {socket.gethostname()}: "


def _class_and_message(error: Exception, is_first: bool) -> tuple[str, str]:
    """Return the class name and the message with which the other ranks raise the source rank's error."""
    # Errors of rank 0 read like those of a run with one rank. Errors of other ranks name the rank and host.
    origin = "" if is_first else _rank_and_host()
    class_name = type(error).__name__
    if isinstance(error, ShardtrainError) and hasattr(errors, class_name):
        return class_name, f"{origin}{error}"
    return PeerError.__name__, f"{_rank_and_host()}{class_name}: {error}".splitlines()[0]


def _as_data_error(error: Exception) -> Exception:
    """Convert an OSError to StorageError or DataError; return other errors unchanged."""
    if not isinstance(error, OSError):
        return error
    path = str(error.filename or "the data")
    return bounded_reads.trouble(path, error) or DataError(
        f"cannot read {path}: {error.strerror or error}"
    )


def _node_number() -> int:
    """Return a number that is the same for all processes of a machine, and different on other machines."""
    name = f"{socket.gethostname()} {process_identity.boot_id()}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
