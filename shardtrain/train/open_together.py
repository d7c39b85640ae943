"""Ranks that open data together: one of them asks the storage, and the others hear what it found.

The first rank asks. What it found goes to all others as one broadcast, whose bytes do not grow with their number. The
first rank of every other node then looks at a few of the files: where it does not find one, all ranks stop and say who;
where their times or inodes are others, the folder is a copy of that node's own, and its first rank asks for that node.
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

from shardtrain.checkpoint.collectives import all_gather_json, all_ranks, any_ranks, gather_distinct_json
from shardtrain.config.schema import Config
from shardtrain.data import shared_opening
from shardtrain.data.shared_opening import Listing, Look, Witness, decode, encode
from shardtrain.distributed.rendezvous import gloo_sockets
from shardtrain.utils import activity, errors, process_identity, reading
from shardtrain.utils.errors import ConfigError, DataError, PeerError, Problem, ShardtrainError, StorageError

_PIECE_BYTES = 16 * 2**20
"""Sent at once: a rank passes a piece on while the next one comes."""
_SIGN_SECONDS = 10.0


def together(config: Config) -> AbstractContextManager[None]:
    """All ranks open the same data inside (a collective); alone, or in a dry run, it has no effect."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return nullcontext()
    return shared_opening.shared(Together(config.comm.init_timeout_seconds))


class Together:
    """The ranks of a run: one of them opens the data, and the others receive what it found."""

    def __init__(self, timeout_seconds: float) -> None:
        self._rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_seconds)
        self._is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        self._sign_seconds = min(_SIGN_SECONDS, timeout_seconds / 4)
        self._some_own: set[str] = set()
        """Places that are some node's own, the same on all ranks; ``_own_here`` are those of this node."""
        self._own_here: set[str] = set()
        self._by_itself: set[str] = set()
        """Places that this rank alone opens."""
        self._node: tuple[int, dist.ProcessGroup | None] | None = None

    def once(self, place: str, look: Look, listing: Listing | None) -> Any:
        # the first rank of all looks, and all ranks hear what it found or why it failed
        first_place, found = self._broadcast_found(place, look, 0, dist.group.WORLD)
        if listing is None:
            return self._own_of_nodes(place, look, found, None, first_place) if first_place in self._some_own else found

        def compare() -> bool:
            if not self._is_first_of_node or self._rank == 0:
                return False
            return place != first_place or _is_own(listing.witnesses(found))

        # every rank enters each of these collectives, in this order, whatever it has found
        is_own = all_ranks_agree(compare)
        if any_ranks([is_own])[0]:
            self._some_own.add(first_place)
            source, group = self._meet_node()
            if self._broadcast(lambda: is_own, source, group):
                self._own_here.add(place)  # the ranks of a node agree on it, whatever each calls the place
        if any_ranks([place != first_place])[0]:
            self._some_own.add(first_place)
        if first_place in self._some_own:
            return self._own_of_nodes(place, look, found, listing, first_place)
        return found

    def is_watched_here(self, place: str) -> bool:
        if place in self._own_here and place not in self._by_itself:
            assert self._node is not None
            return self._node[0] == self._rank
        return self._rank == 0 or place in self._by_itself

    def _own_of_nodes(self, place: str, look: Look, found: Any, listing: Listing | None, first_place: str) -> Any:
        """On nodes whose storage is their own what the first rank of each finds, and elsewhere what was found.

        A rank that opens another place than those beside it looks by itself.
        """

        def own() -> Any:
            other = first_place
            shared = found
            if place in self._own_here:
                source, group = self._meet_node()
                other, shared = self._broadcast_found(place, look, source, group)
            if place != other:
                self._by_itself.add(place)
                return look()
            difference = listing.difference(found, shared) if listing and place == first_place else ""
            if difference:
                rule = f"is a folder of this node's own, which {difference}"
                fix = "give every node a whole copy"
                raise ConfigError(f"{_who()}{Problem('the data', place, rule, fix)}")
            return shared

        return all_ranks_agree(own)

    def _broadcast_found(self, place: str, look: Look, source: int, group: dist.ProcessGroup | None) -> tuple[str, Any]:
        """Where a rank looks and what it finds, on all ranks of a group; its error is raised on all of them."""
        failure: list[Exception] = []

        def tell() -> Any:
            try:
                return {"place": place, "found": look()}
            except Exception as error:
                failure.append(_named(error))
                return {"error": list(_tell(failure[0], is_first=source == 0))}

        answer = self._broadcast(tell, source, group)
        if failure:
            raise failure[0]
        if "error" in answer:
            kind, text = answer["error"]
            raise getattr(errors, kind)(text)
        return answer["place"], answer["found"]

    def _broadcast(self, make: Callable[[], Any], source: int, group: dist.ProcessGroup | None) -> Any:
        """What ``make`` gives on one rank; while it takes its time, the others hear that it has not died.

        ``group`` None is a rank that is alone on its node.
        """
        if group is None:
            return make()
        size = torch.zeros(1, dtype=torch.int64)
        if self._rank != source:
            # a size of 0 is a sign of life and not the end of the wait
            while not int(size):
                dist.broadcast(size, source, group=group)
                activity.tick()  # to wait for a slow storage, or a download, is not a hang
            whole = torch.empty(int(size), dtype=torch.uint8)
            for piece in whole.split(_PIECE_BYTES):
                dist.broadcast(piece, source, group=group)
            return decode(whole.numpy().data)
        with self._signs_of_life(source, group):
            value = make()
            whole = torch.frombuffer(bytearray().join(encode(value)), dtype=torch.uint8)
        size.fill_(len(whole))
        dist.broadcast(size, source, group=group)
        for piece in whole.split(_PIECE_BYTES):
            dist.broadcast(piece, source, group=group)
        return value

    @contextmanager
    def _signs_of_life(self, source: int, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Others wait for a broadcast no longer than ``comm.init_timeout_seconds``; a storage may take longer."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(self._sign_seconds):
                try:
                    dist.broadcast(torch.zeros(1, dtype=torch.int64), source, group=group)
                except RuntimeError:
                    return  # the broadcast that comes next tells what is wrong

        thread = threading.Thread(target=tell, name="opening-data", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _meet_node(self) -> tuple[int, dist.ProcessGroup | None]:
        """The rank that speaks for this node, and the group of its ranks; None where there is one alone.

        The first time a collective of all ranks: 16 bytes of each.
        """
        if self._node is None:
            own = torch.tensor([_node_number(), int(not self._is_first_of_node)])
            # ranks of one machine have one number; LOCAL_RANK 0 of it speaks, else its lowest rank
            every = torch.empty(dist.get_world_size(), 2, dtype=torch.int64)
            dist.all_gather(list(every), own)
            members = (every[:, 0] == own[0]).nonzero().flatten().tolist()
            source = min(members, key=lambda rank: (int(every[rank, 1]), rank))
            group = None
            if len(members) > 1:
                group = gloo_sockets.private(
                    lambda: dist.new_group(
                        members, timeout=self._timeout, backend="gloo", use_local_synchronization=True
                    )
                )
            self._node = source, group
        return self._node


def all_ranks_agree(action: Callable[[], Any]) -> Any:
    """What an action gives on this rank, which all ranks do (a collective); raises on all what one of them met."""
    found: list[Any] = []
    all_ranks(lambda: found.append(action()))
    return found[0]


def _is_own(witnesses: Sequence[Witness]) -> bool:
    """Whether files that the first rank listed are others here.

    Raises:
        ConfigError: one of them is not here; names this rank, its host and the file.
        StorageError: the storage does not answer.
    """
    is_own = False
    for file in witnesses:
        try:
            status = os.stat(file.path)
        except OSError as error:
            trouble = reading.trouble(file.path, error)
            if trouble is not None:
                raise StorageError(f"{_who()}{trouble}") from error
            rule = f"is not here, and rank 0 lists it ({error.strerror})"
            fix = "mount the same storage on every node, or give each a whole copy"
            raise ConfigError(f"{_who()}{Problem(file.option, file.path, rule, fix)}") from error
        is_own |= (status.st_size, status.st_mtime_ns, status.st_ino) != (file.size, file.mtime_ns, file.inode)
    return is_own


def require_same_data(stream: Any, data: str) -> None:
    """Raise ConfigError on all ranks unless they read the same data (a collective).

    The message names ``data``, a file that differs, and the hosts. Without this check ranks with different data would
    train without an error, repeat some rows and miss others.
    """
    fingerprints, number_of_rank = gather_distinct_json(stream.fingerprint)
    if len(fingerprints) == 1:
        return
    rank = number_of_rank.index(1)
    listings, listing_of_rank = gather_distinct_json(dict(stream.sampled_files))
    first_files, other_files = listings[0], listings[listing_of_rank[rank]]
    names = sorted(first_files.keys() | other_files.keys())
    differing = [name for name in names if first_files.get(name) != other_files.get(name)]
    subject = differing[0] if differing else "what reads them (tokenizer, options or versions)"
    hosts = all_gather_json(socket.gethostname())
    where = f"on rank {rank} (host {hosts[rank]}) is not the same as on rank 0 (host {hosts[0]})"
    fix = "give every rank the same files and the same versions"
    raise ConfigError(f"{data} differ between ranks: {subject} {where}; {fix}")


def _who() -> str:
    return f"rank {dist.get_rank()} on {socket.gethostname()}: "


def _tell(error: Exception, is_first: bool) -> tuple[str, str]:
    """The class and the text with which other ranks raise an error of the one that looked for them."""
    who = "" if is_first else _who()
    kind = type(error).__name__
    if isinstance(error, ShardtrainError) and hasattr(errors, kind):
        return kind, f"{who}{error}"
    return PeerError.__name__, f"{_who()}{kind}: {error}".splitlines()[0]


def _named(error: Exception) -> Exception:
    """An error of the system as one of ours."""
    if not isinstance(error, OSError):
        return error
    path = str(error.filename or "the data")
    return reading.trouble(path, error) or DataError(f"cannot read {path}: {error.strerror or error}")


def _node_number() -> int:
    """A number that ranks of one machine have in common."""
    name = f"{socket.gethostname()} {process_identity.boot_id()}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
