"""How signs of life and verdicts travel: through the run's store, and of each node one rank alone speaks with it.

Ranks of a node leave their signs in a folder there that no other user can enter, and the lowest of them that is alive
sends all of them on as one text. So what the store's host has to do grows with nodes and not with ranks, and a rank
that stops does not silence its neighbours. Where there is no such folder, each rank speaks for itself.
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
from shardtrain.utils import process_identity
from shardtrain.utils.errors import StorageError

STALE_BEATS = 2.5
"""A neighbour that has said nothing new for so many beats no longer speaks for the node."""
FOLDER_SECONDS = 20.0
"""How long a rank waits to be told its node's folder, before it speaks for itself."""
SPARE_PLACES = 1024
"""A node whose folder goes away speaks in new places; more than these nobody has, whatever the counter says."""
VERDICT = "verdict"
DUMPED = "dumped"
ALL_DUMPED = "all-dumped"
_PLACES = "places"
_PLACE = "place"


class HeartbeatExchange:
    """What one rank says to all others, and hears; all methods but the last are for one thread."""

    def __init__(self, store: Any, rank: int, world_size: int, beat_seconds: float) -> None:
        """``store`` is a connection that nobody else uses."""
        self._store = store
        self._rank = rank
        self._beat = beat_seconds
        self._most_places = world_size + SPARE_PLACES
        self._node: FolderStore | None = None
        self._folder: Path | None = None
        self._begun = time.monotonic()
        self._first = False
        self._changed: dict[int, tuple[int, float]] = {}
        """Of each lower rank of this node: when its file was written, by its clock, and when that was seen."""
        self._place = ""
        """The key of the store under which this rank, or its node, speaks."""
        self._known: set[str] = set()
        self._heard: dict[str, tuple[bytes, dict[int, Heartbeat]]] = {}
        self._newest: dict[int, Heartbeat] = {}

    def meet(self, environment: Mapping[str, str]) -> None:
        """Find the folder of this node, which its first rank makes; without one this rank speaks for itself."""
        if isinstance(self._store, FolderStore) or int(environment.get("LOCAL_WORLD_SIZE", "1")) < 2:
            return
        # two hosts may have one name: the boot id tells them apart
        node = f"folder/{socket.gethostname()}/{process_identity.boot_id()}"
        self._first = environment.get("LOCAL_RANK") == "0"
        with contextlib.suppress(OSError, StorageError, dist.DistError):
            if self._first:
                folder = private_store.new_folder(environment, "signs")
                self._store.set(node, str(folder))
            else:
                self._store.wait([node], timedelta(seconds=FOLDER_SECONDS))
                folder = private_store.own(Path(self._store.get(node).decode()))
            self._node = FolderStore(folder)
            self._folder = folder

    def say(self, sign: Heartbeat) -> None:
        """Give a sign of this rank's life."""
        text = rank_heartbeat.write(sign)
        if self._node is not None:
            try:
                return self._say_on_node(self._node, text, sign.has_left)
            except (dist.DistError, OSError):
                self._node = None  # somebody has cleaned the folder away
        self._post(f'{{"{self._rank}":{text}}}')

    def verdict(self) -> bytes | None:
        """The verdict on the run, once there is one."""
        if self._node is not None:
            with contextlib.suppress(dist.DistError):
                if self._node.check([VERDICT]):
                    return self._node.get(VERDICT)
            if not self._speaks():
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
        """Make a verdict that of the run, where there is none yet; gives the one that there is."""
        try:
            # the first verdict wins: two monitors may come to different ones in the same second
            verdict = bytes(self._store.compare_set(VERDICT, "", text))
        except ForgedError:  # a stranger has taken its key, and may keep doing so: this node at least hears it
            verdict = text.encode()
            self._store.set(VERDICT, verdict)
        self.send_to_node(verdict)
        return verdict

    def send_to_node(self, verdict: bytes) -> None:
        """Let the other ranks of this node know a verdict, from whatever source."""
        if self._node is not None:
            with contextlib.suppress(dist.DistError):
                self._node.set(VERDICT, verdict)

    def receive(self) -> dict[int, Heartbeat]:
        """The last sign of every rank that has ever given one."""
        count = min(self._store.add(_PLACES, 0), self._most_places)  # adding 0 reads; a stranger may have added more
        places = [f"{_PLACE}-{number}" for number in range(1, count + 1)]
        self._known |= {place for place in places if place not in self._known and self._store.check([place])}
        asked = [place for place in places if place in self._known]
        found: dict[int, Heartbeat] = {}
        for place, text in zip(asked, self._signs_at(asked), strict=True):
            # most texts are those of the last look, and are not parsed again
            if text is not None and self._heard.get(place, (b"",))[0] != text:
                self._heard[place] = bytes(text), rank_heartbeat.read_many(text)
            for rank, sign in self._heard.get(place, (b"", {}))[1].items():
                # a node whose folder went away speaks in several places, and who kept an old sign may set it again
                if rank not in self._newest or self._newest[rank].beat < sign.beat:
                    self._newest[rank] = sign
                found[rank] = self._newest[rank]
        return found

    def _signs_at(self, places: list[str]) -> list[bytes | None]:
        """What is said at each place; None where a stranger says it."""
        if not places:
            return []
        with contextlib.suppress(ForgedError):
            return list(self._store.multi_get(places))

        def sign_at(place: str) -> bytes | None:
            with contextlib.suppress(ForgedError):
                return bytes(self._store.get(place))
            return None

        return [sign_at(place) for place in places]

    def wait_for_others(self, living: int, seconds: float) -> None:
        """Wait until as many ranks have come to the same point, but no longer than that; from any thread."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(dist.DistError, OSError):
            if self._node is not None and self._node.add(DUMPED, 1) > 1:  # the first of a node counts for it
                while not self._node.check([ALL_DUMPED]) and time.monotonic() < deadline:
                    time.sleep(0.05)
                return
            # in a thread of its own, for the store may not answer
            thread = threading.Thread(target=self._count_others, args=(living, deadline), daemon=True)
            thread.start()
            thread.join(seconds)
            if self._node is not None:
                self._node.set(ALL_DUMPED, "")

    def _count_others(self, living: int, deadline: float) -> None:
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
        assert self._folder is not None
        node.set(f"sign-{self._rank}", text)
        if has_left:
            node.set(f"left-{self._rank}", "")
        if not has_left and not self._speaks():
            return
        # one key of the store holds the signs of the whole node, so that its load grows with nodes and not with ranks
        ranks = self._ranks("sign-")
        texts = [f'"{rank}":{node.get(f"sign-{rank}").decode()}' for rank in ranks]
        self._post("{" + ",".join(texts) + "}")
        if has_left and len(self._ranks("left-")) == len(ranks):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _speaks(self) -> bool:
        """Whether this rank speaks for its node: no lower one is there that lives."""
        now = time.monotonic()
        left = self._ranks("left-")
        for rank in self._ranks("sign-"):
            if rank >= self._rank or rank in left:
                continue
            assert self._folder is not None
            written = os.stat(self._folder / f"sign-{rank}").st_mtime_ns
            if rank not in self._changed or self._changed[rank][0] != written:
                self._changed[rank] = written, now
            if now - self._changed[rank][1] < STALE_BEATS * self._beat:
                return False
        # at the start lower ranks may still be on their way
        return self._first or now - self._begun > STALE_BEATS * self._beat

    def _ranks(self, prefix: str) -> list[int]:
        assert self._folder is not None
        return sorted(int(name.removeprefix(prefix)) for name in os.listdir(self._folder) if name.startswith(prefix))

    def _post(self, text: str) -> None:
        if not self._place:
            number = 0
            if self._node is not None and self._node.check([_PLACE]):
                number = int(self._node.get(_PLACE))
            # a counter of the store gives each node a place of its own, which the others find by counting up to it
            number = number or self._store.add(_PLACES, 1)
            if self._node is not None:
                self._node.set(_PLACE, str(number))
            self._place = f"{_PLACE}-{number}"
        self._store.set(self._place, text)
