"""Exchange heartbeats and verdicts through the run's store. Only one rank of each node writes to the store.

Ranks of a node write their heartbeats to a private folder on the node. The lowest live rank, the speaker,
sends all of them to the store as one value. So the load on the store grows with the number of nodes, not
ranks, and a stopped rank does not silence the other ranks of its node. Without such a folder, each rank
writes to the store itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardtrain.distributed.rendezvous import private_store
from shardtrain.distributed.rendezvous.private_store import FolderStore
from shardtrain.distributed.rendezvous.signed_store import ForgedError
from shardtrain.resilience.watchdog import rank_heartbeat
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.utils import process_identity, variables
from shardtrain.utils.errors import StorageError

STALE_BEATS = 2.5
"""Number of intervals without a new heartbeat after which a rank can no longer be the speaker of its node."""
FOLDER_SECONDS = 20.0
"""Time for which a rank waits for the path of its node's folder, before it writes to the store itself."""
SPARE_PLACES = 1024
"""Number of additional keys (places) beyond one per rank, for nodes whose folder disappears.

Limits a forged counter.
"""
VERDICT = "verdict"
REPORTED = "reported"
DUMPED = "dumped"
ALL_DUMPED = "all-dumped"
_PLACES = "places"
_PLACE = "place"


class HeartbeatExchange:
    """Connection of one rank to all others.

    All methods except ``wait_for_others`` and ``is_first_to_report`` must be called in one thread.
    """

    def __init__(self, store: Any, rank: int, world_size: int, beat_seconds: float) -> None:
        """``store`` must be a separate connection that no other code uses."""
        self._store = store
        self._rank = rank
        self._beat = beat_seconds
        self._most_places = world_size + SPARE_PLACES
        self._node: FolderStore | None = None
        self._folder: Path | None = None
        self._begun = time.monotonic()
        self._first = False
        self._changed: dict[int, tuple[int, float]] = {}
        """Lower rank of this node -> modification time of its file, and our time when it was first seen."""
        self._place = ""
        """Key of the store to which this rank or its node writes."""
        self._known: set[str] = set()
        self._heard: dict[str, tuple[bytes, dict[int, Heartbeat]]] = {}
        self._newest: dict[int, Heartbeat] = {}

    def meet(self, environment: Mapping[str, str]) -> None:
        """Find the folder of this node, which its first rank creates.

        Without one, this rank writes to the store itself.
        """
        if isinstance(self._store, FolderStore):
            return
        if variables.number(environment, "LOCAL_WORLD_SIZE", "1") < 2:
            return
        # Two hosts may have the same name, but their boot IDs differ.
        node = f"folder/{socket.gethostname()}/{process_identity.boot_id()}"
        self._first = environment.get("LOCAL_RANK") == "0"
        with contextlib.suppress(OSError, StorageError, dist.DistError):
            if self._first:
                folder = private_store.new_folder(environment, "signs")
                self._store.set(node, str(folder))
            else:
                self._store.wait([node], timedelta(seconds=FOLDER_SECONDS))
                path = self._store.get(node).decode()
                folder = private_store.checked_folder(Path(path))
            self._node = FolderStore(folder)
            self._folder = folder

    def say(self, sign: Heartbeat) -> None:
        """Publish a heartbeat of this rank."""
        text = rank_heartbeat.write(sign)
        if self._node is not None:
            try:
                return self._say_on_node(self._node, text, sign.has_left)
            except (dist.DistError, OSError):
                self._node = None  # the folder was deleted
        self._post(f'{{"{self._rank}":{text}}}')

    def verdict(self) -> bytes | None:
        """Return the verdict on the run, or None. The speaker also copies it to the node's folder."""
        if self._node is not None:
            with contextlib.suppress(dist.DistError):
                if self._node.check([VERDICT]):
                    return self._node.get(VERDICT)
            if not self._is_speaker():
                return None
        if not self._store.check([VERDICT]):
            return None
        try:
            verdict = bytes(self._store.get(VERDICT))
        except ForgedError:
            return None
        self.send_to_node(verdict)
        return verdict

    def declare(self, text: str) -> bytes:
        """Set the verdict of the run, unless it has one already. Return the run's verdict."""
        try:
            # The first verdict wins, because two monitors may reach different verdicts in the same second.
            verdict = bytes(self._store.compare_set(VERDICT, "", text))
        except ForgedError:
            # Another process has overwritten the key, and may do so again. At least this node gets the verdict.
            verdict = text.encode()
            self._store.set(VERDICT, verdict)
        self.send_to_node(verdict)
        return verdict

    def is_first_to_report(self) -> bool:
        """Return True in the first rank of the run that calls this, or if the store is lost."""
        if self._node is not None:
            with contextlib.suppress(dist.DistError, OSError):
                if self._node.add(REPORTED, 1) > 1:
                    return False
        with contextlib.suppress(dist.DistError, OSError):
            return bool(self._store.add(REPORTED, 1) == 1)
        return True

    def send_to_node(self, verdict: bytes) -> None:
        """Publish a verdict to the other ranks of this node."""
        if self._node is not None:
            with contextlib.suppress(dist.DistError):
                self._node.set(VERDICT, verdict)

    def receive(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of every rank that has ever sent one."""
        # Adding 0 reads the counter. Another process may have increased it, so limit it.
        count = min(self._store.add(_PLACES, 0), self._most_places)
        written_places = []
        for number in range(1, count + 1):
            place = f"{_PLACE}-{number}"
            if place not in self._known and self._store.check([place]):
                self._known.add(place)
            if place in self._known:
                written_places.append(place)

        heartbeats: dict[int, Heartbeat] = {}
        for place, text in zip(written_places, self._signs_at(written_places), strict=True):
            previous_text, signs = self._heard.get(place, (b"", {}))
            # Most texts have not changed, so parse only those that have.
            if text is not None and text != previous_text:
                signs = rank_heartbeat.read_many(text)
                self._heard[place] = (bytes(text), signs)
            for rank, sign in signs.items():
                # Keep the newest heartbeat: a node that lost its folder has written to several store
                # keys, and old heartbeats can be replayed.
                newest = self._newest.get(rank)
                if newest is None or newest.beat < sign.beat:
                    newest = sign
                    self._newest[rank] = sign
                heartbeats[rank] = newest
        return heartbeats

    def _signs_at(self, places: list[str]) -> list[bytes | None]:
        """Return the text at each place, or None if the text is forged."""
        if not places:
            return []
        with contextlib.suppress(ForgedError):
            return list(self._store.multi_get(places))

        # One of them is forged. Read them one at a time to keep the others.
        texts: list[bytes | None] = []
        for place in places:
            text = None
            with contextlib.suppress(ForgedError):
                text = bytes(self._store.get(place))
            texts.append(text)
        return texts

    def wait_for_others(self, living: int, seconds: float) -> None:
        """Wait until ``living`` ranks have called this, for at most ``seconds``. May be called in any thread."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(dist.DistError, OSError):
            # The first rank of a node counts for all its ranks. The others wait for its result.
            if self._node is not None and self._node.add(DUMPED, 1) > 1:
                while not self._node.check([ALL_DUMPED]) and time.monotonic() < deadline:
                    time.sleep(0.05)
                return
            # Use a separate thread, because the store may not answer.
            thread = threading.Thread(
                target=self._count_others, args=(living, deadline), daemon=True
            )
            thread.start()
            thread.join(seconds)
            if self._node is not None:
                self._node.set(ALL_DUMPED, "")

    def _count_others(self, living: int, deadline: float) -> None:
        """Add the ranks of this node to the store's counter until it reaches ``living``."""
        amount = 1
        counted = 0
        with contextlib.suppress(dist.DistError, OSError):
            while time.monotonic() < deadline:
                if self._node is not None:
                    amount = self._node.add(DUMPED, 0)
                if self._store.add(DUMPED, amount - counted) >= living:
                    return
                counted = amount
                time.sleep(0.05 if living < 1000 else 0.5)

    def _say_on_node(self, node: FolderStore, text: str, has_left: bool) -> None:
        """Write a heartbeat to the node's folder. The speaker sends all heartbeats of the folder to the store."""
        assert self._folder is not None
        node.set(f"sign-{self._rank}", text)
        if has_left:
            node.set(f"left-{self._rank}", "")
        elif not self._is_speaker():
            return
        # One key of the store holds all heartbeats of the node.
        ranks = self._ranks("sign-")
        entries = []
        for rank in ranks:
            sign_text = node.get(f"sign-{rank}").decode()
            entries.append(f'"{rank}":{sign_text}')
        self._post("{" + ",".join(entries) + "}")
        if has_left and len(self._ranks("left-")) == len(ranks):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _is_speaker(self) -> bool:
        """True if no lower rank of this node is alive."""
        assert self._folder is not None
        now = time.monotonic()
        stale_seconds = STALE_BEATS * self._beat
        left = self._ranks("left-")
        for rank in self._ranks("sign-"):
            if rank >= self._rank or rank in left:
                continue
            written = os.stat(self._folder / f"sign-{rank}").st_mtime_ns
            known_written, first_seen = self._changed.get(rank, (None, now))
            if written != known_written:
                first_seen = now
                self._changed[rank] = (written, now)
            if now - first_seen < stale_seconds:
                return False
        # At the start, lower ranks may not have written a heartbeat yet.
        return self._first or now - self._begun > stale_seconds

    def _ranks(self, prefix: str) -> list[int]:
        """Return the ranks that have a file with this prefix in the node's folder."""
        assert self._folder is not None
        ranks = []
        for name in os.listdir(self._folder):
            if name.startswith(prefix):
                ranks.append(int(name.removeprefix(prefix)))
        return sorted(ranks)

    def _post(self, text: str) -> None:
        """Write a text to this rank's or node's key of the store. The first call reserves the key."""
        if not self._place:
            number = 0
            if self._node is not None and self._node.check([_PLACE]):
                number = int(self._node.get(_PLACE))
            # A counter in the store assigns a separate number to each node. Readers iterate up to the counter.
            number = number or self._store.add(_PLACES, 1)
            if self._node is not None:
                self._node.set(_PLACE, str(number))
            self._place = f"{_PLACE}-{number}"
        self._store.set(self._place, text)
