"""Rendezvous of nodes: PyTorch's, made independent of wall clocks and restricted to node counts that can work.

PyTorch's handler drops a node whose heartbeat is 15 s old by the wall clock of the reading node. Nodes whose
clocks differ by more drop each other, and each trains separately. Here a node is lost if its heartbeat has
not changed for that time by the reader's monotonic clock.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as pytorch
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from shardtrain.launch.greeting import (
    LOOK_SECONDS,
    QUIET_SECONDS,
    REFUSAL_SECONDS,
    STOP_SECONDS,
    in_background,
    is_telling,
    read_refusal,
    readers_key,
    within,
)
from shardtrain.launch.node_reports import LOST_SECONDS
from shardtrain.launch.nodes import CLOCKS_APART_SECONDS, Nodes
from shardtrain.launch.seal import Seal
from shardtrain.launch.signed_meeting import SignedBackend
from shardtrain.utils.errors import ConfigError, PeerError, Preempted, Problem
from shardtrain.utils.process import SECRET

_NO_NUMBER = 2**31
"""Sort key of a node without --node_rank. It is larger than every --node_rank."""
_TIMEOUTS = ("join", "last_call", "close", "heartbeat")
SILENT_SECONDS = 75.0
"""Time without a reply of the store after which nodes that meet give up. Longer than PyTorch's own timeout of 60 s."""
_MOST_NAMED = 8
"""Number of absent nodes that an error names."""
LONGEST_LOOKS = 2
"""Number of heartbeat intervals without a look at the shared state after which this process was suspended."""
RETURN_SECONDS = 10.0
"""Time in which a node that was removed from the rendezvous joins it again, unless it is lost."""


def open_meeting(nodes: Nodes, listener: socket.socket | None) -> Meeting:
    """Serve the store of the rendezvous on ``listener``, or connect to it if ``listener`` is None.

    The ranks of all nodes use the same store. The shared state is signed if this node has a secret.

    Raises:
        ConfigError: another node was started with another number of nodes.
        DistError: the store does not answer.
    """
    counts = nodes.counts or range(nodes.least, nodes.most + 1)
    settings: dict[str, Any] = {"join_timeout": nodes.join_seconds, **nodes.rendezvous}
    parameters = RendezvousParameters(
        "c10d", nodes.endpoint, nodes.run_id, counts[0], counts[-1], nodes.local_address, **settings
    )
    host, _, port = nodes.endpoint.rpartition(":")
    host = host.strip("[]")
    store = dist.TCPStore(
        host,
        int(port),
        is_master=listener is not None,
        multi_tenant=True,
        timeout=timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60),
        master_listen_fd=listener.detach() if listener else None,
    )
    backend = C10dRendezvousBackend(store, nodes.run_id)
    secret = os.environ.get(SECRET, "")
    _compare_node_counts(nodes, store, secret)
    Meeting.number = _NO_NUMBER if nodes.node_rank is None else nodes.node_rank
    meeting = Meeting.from_backend(
        parameters.run_id,
        store,
        SignedBackend(backend, secret, parameters.run_id) if secret else backend,
        counts[0],
        counts[-1],
        parameters.local_addr,
        pytorch.RendezvousTimeout(*(pytorch._get_timeout(parameters, name) for name in _TIMEOUTS)),
        keep_alive_interval=parameters.get_as_int("keep_alive_interval", 5) or 5,
        keep_alive_max_attempt=parameters.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    # Otherwise PyTorch would serve another store for the ranks, on a random port of every address.
    meeting._bootstrap_store_info = RendezvousStoreInfo(host, int(port))
    meeting._shared_tcp_store_server = store
    meeting.serves_store = listener is not None
    meeting.counts = counts
    meeting.first_decides = nodes.first_decides
    seal = Seal(secret, nodes.run_id)

    def raise_refusal() -> None:
        if is_telling.is_set() or not store.check([nodes.refusal_key]):
            return
        reason = seal.open(store.get(nodes.refusal_key)).decode(errors="replace")
        num_read = store.add(readers_key(nodes.refusal_key), 1)
        error = read_refusal(reason)
        if listener is not None and num_read < nodes.most:
            # The store ends with this process, and the other nodes may not have read the reason yet.
            event = "is asked to stop" if isinstance(error, Preempted) else "cannot run"
            text = f"another node {event}: waiting until all nodes know it"
            print(text, file=sys.stderr, flush=True)
            seconds = STOP_SECONDS if isinstance(error, Preempted) else REFUSAL_SECONDS
            _await_readers(store, nodes, nodes.most, seconds)
        raise error

    meeting._state_holder.raise_refusal = raise_refusal  # type: ignore[attr-defined]
    return meeting


def _await_readers(store: dist.Store, nodes: Nodes, readers: int, seconds: float) -> None:
    """Wait until ``readers`` nodes have read why a node cannot run, at most ``seconds``."""
    end = time.monotonic() + seconds
    counter = readers_key(nodes.refusal_key)
    while store.add(counter, 0) < readers and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)


def _compare_node_counts(nodes: Nodes, store: dist.Store, secret: str) -> None:
    """Reject a node whose number of nodes differs from that of the first node.

    Nodes with different numbers would not agree on when the rendezvous is complete, and would wait for
    ``RDZV_TIMEOUT``.
    """
    seal = Seal(secret, nodes.run_id)
    own_counts = f"{nodes.least}:{nodes.most}"
    key = f"shardtrain/{nodes.run_id}/node-counts"
    sealed = store.compare_set(key, "", seal.close(own_counts.encode()).decode())
    first_counts = seal.open(sealed).decode(errors="replace")
    if not re.fullmatch(r"\d{1,9}:\d{1,9}", first_counts):
        raise RendezvousStateError(
            "the number of nodes is signed with another secret, or was not written by a node"
        )
    if first_counts != own_counts:
        option, _, value = nodes.reason.partition("=")
        least, _, most = first_counts.partition(":")
        rule = f"must be {least if least == most else first_counts}, as on the first node"
        raise ConfigError(Problem(option, value, rule, "start all nodes with the same number"))


def failed(error: Exception, nodes: Nodes, meeting: Meeting | None) -> PeerError:
    """Return the error of a failed rendezvous: missing nodes, a lost host, or a state with an invalid signature."""
    rule = f"has ended, because its host is gone or does not reply ({type(error).__name__}); check the first node"
    if isinstance(error, RendezvousStateError):
        rule = f"was disturbed: {error}; set the same {SECRET} on all nodes, or find out who else connects to the port"
    elif meeting is not None and isinstance(error, RendezvousTimeoutError):
        # The other nodes leave at their own timeouts, which may have been a moment earlier.
        joined = {*meeting.state.participants, *meeting.state.wait_list, *meeting.joined_nodes()}
        others = "the others"
        missing = sorted(set(range(nodes.least)) - {node.number for node in joined})
        # Any node may be absent from an elastic run, and nodes may have no number.
        if nodes.least == nodes.most == len(joined) + len(missing):
            others = f"node {', '.join(map(str, missing[:_MOST_NAMED]))}"
        rule = (
            f"of {nodes.least} nodes did not complete within {nodes.join_seconds} s: "
            f"{len(joined)} joined; check {others}"
        )
        failure = PeerError(f"the meeting at {nodes.endpoint} {rule}")
        if meeting.serves_store:
            _tell_joined(failure, nodes, meeting, len(joined) - 1)
        return failure
    return PeerError(f"the meeting at {nodes.endpoint} {rule}")


def _tell_joined(failure: PeerError, nodes: Nodes, meeting: Meeting, others: int) -> None:
    """Report to the nodes that have joined why this node ends, which serves the store.

    Otherwise they would report that the store is lost.
    """
    store: Any = meeting._shared_tcp_store_server
    reason = f"{failure.exit_code} {failure}"
    seal = Seal(os.environ.get(SECRET, ""), nodes.run_id)
    with contextlib.suppress(DistError):
        store.set(nodes.refusal_key, seal.close(reason.encode()))
        _await_readers(store, nodes, others, STOP_SECONDS)


class _NumberedNode(pytorch._NodeDesc):
    """Node that is ordered by its --node_rank.

    PyTorch compares addresses as text, so 127.0.0.10 precedes 127.0.0.9.
    """

    number = _NO_NUMBER

    def __lt__(self, other: Any) -> bool:
        own_place = (self.number, self.addr, self.pid, self.local_id)
        return own_place < (other.number, other.addr, other.pid, other.local_id)


class _SteadyState(pytorch._BackendRendezvousStateHolder):
    """Shared state from the view of one node. The age of a heartbeat is the time since its last change.

    ``raise_refusal`` raises the error of another node that cannot run.
    """

    raise_refusal: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, backend: Any, settings: Any, own_node: Any) -> None:
        super().__init__(backend, settings)
        self._own_node = own_node
        self._changes: dict[tuple[Any, datetime], float] = {}
        self._looked_at = 0.0
        self.synced_at = 0.0
        """Monotonic time of the last reply of the store."""
        self._joined: dict[Any, float] = {}
        """Nodes that have joined the incomplete round, and the monotonic time at which each was last part of it."""
        self._report_at: float | None = None
        """Monotonic time at which to report that this node waits for others. None if it does not wait."""

    def sync(self) -> bool | None:
        """Read or write the shared state. Until all nodes have joined, also look for a node that cannot run."""
        if self._state.complete:
            self._report_at = None
        else:
            self.raise_refusal()
            self._report_wait()
        has_set = super().sync()
        self.synced_at = time.monotonic()
        self._raise_lost()
        return has_set

    def _raise_lost(self) -> None:
        """Raise PeerError if a node has joined and was lost before all have joined. Elastic runs continue."""
        state = self._state
        if state.complete or self._settings.min_nodes < self._settings.max_nodes:
            self._joined = {}
            return
        now = time.monotonic()
        present = {*state.participants, *state.wait_list} - {self._own_node}
        self._joined.update(dict.fromkeys(present, now))
        for node, seen_at in self._joined.items():
            # A live node that was removed joins again within seconds.
            if now - seen_at > RETURN_SECONDS:
                rank = "" if node.number == _NO_NUMBER else f"{node.number} "
                raise PeerError(
                    f"node {rank}({node.addr}, process {node.pid}) joined the rendezvous and left it before all "
                    "nodes had joined (it was lost, or its RDZV_TIMEOUT is over); check its output and its machine"
                )

    def _report_wait(self) -> None:
        """Print once after ``QUIET_SECONDS`` how many nodes have joined."""
        now = time.monotonic()
        joined = len({*self._state.participants, *self._state.wait_list, self._own_node})
        if self._report_at is None:
            self._report_at = now + QUIET_SECONDS
        elif now >= self._report_at and joined < self._settings.min_nodes:
            self._report_at = math.inf
            text = f"waiting for other nodes: {joined} of {self._settings.min_nodes} have joined"
            print(text, file=sys.stderr, flush=True)

    def _sanitize(self) -> None:
        """Remove nodes whose heartbeats have stopped."""
        told = self._state.last_heartbeats
        now = time.monotonic()
        # If this process was suspended, the pause must not count against the other nodes.
        paused = now - self._looked_at if self._looked_at else 0.0
        if paused > LONGEST_LOOKS * self._settings.keep_alive_interval.total_seconds():
            self._changes = {one: changed + paused for one, changed in self._changes.items()}
        self._looked_at = now
        # Map (node, heartbeat) to the monotonic time at which this node first saw the heartbeat.
        changes = self._changes = {one: self._changes.get(one, now) for one in told.items()}
        # PyTorch compares heartbeats with this node's wall clock, so convert them to it, and restore the
        # original values afterwards.
        wall_clock = datetime.now(UTC)
        own_times = {
            node: wall_clock - timedelta(seconds=now - changed)
            for (node, _), changed in changes.items()
        }
        self._state.last_heartbeats = own_times
        super()._sanitize()
        # Keep this node's own heartbeat converted, because its wall clock may have jumped since it
        # wrote the heartbeat.
        own_times.update({node: told[node] for node in own_times if node != self._own_node})


class Meeting(pytorch.DynamicRendezvousHandler):
    """Rendezvous of one node."""

    counts: Sequence[int]
    """Node counts that can work, ascending."""
    first_decides = False
    """True if later node counts must divide the first node count, which determines the global batch size."""
    serves_store = False
    """True if the store of the rendezvous ends with this process."""
    number = _NO_NUMBER
    """The --node_rank of the next rendezvous that this process opens."""

    def __init__(
        self, node: Any, settings: Any, backend_name: str, store: dist.Store, state_holder: Any
    ) -> None:
        node = _NumberedNode(node.addr, node.pid, node.local_id)
        # The class is a frozen dataclass, so set the attribute without its __setattr__.
        vars(node)["number"] = self.number
        steady = _SteadyState(state_holder._backend, settings, node)
        super().__init__(node, settings, backend_name, store, steady)
        self.own_node = node
        self._is_store_lost = False
        self._members: dict[Any, int] = {}
        """Nodes of the current round, and their numbers."""
        self._missing_since: dict[Any, float] = {}
        """Nodes that are no longer part of the round, and the monotonic time since then."""
        self._round = 0

    @property
    def state(self) -> Any:
        """The shared state as of the last read."""
        return self._state_holder.state

    def joined_nodes(self) -> set[Any]:
        """Return this node, and the others that have joined the incomplete round of a run that is not elastic."""
        others: dict[Any, float] = self._state_holder._joined  # type: ignore[attr-defined]
        return {self.own_node, *others}

    def missing_members(self) -> list[int]:
        """Return the numbers of the nodes that met in this round and have not been part of it for ``RETURN_SECONDS``.

        A node leaves to join again, or is removed because its heartbeat has stopped.
        """
        now = time.monotonic()
        present = self.state.participants
        missing = []
        for node, number in self._members.items():
            if node in present:
                self._missing_since.pop(node, None)
            elif now - self._missing_since.setdefault(node, now) > RETURN_SECONDS:
                missing.append(number)
        return missing

    def _keep_alive(self) -> None:
        """Send a heartbeat. Return to the round first if this node was removed because its heartbeats were late."""
        own_number = self._members.get(self.own_node)
        if own_number is not None:
            with self._heartbeat_lock, contextlib.suppress(RendezvousError):
                self._return_to_round(own_number)
        super()._keep_alive()

    def _return_to_round(self, own_number: int) -> None:
        state = self.state
        if not state.complete or state.round != self._round or self.own_node in state.participants:
            return
        state.participants[self.own_node] = own_number
        state.last_heartbeats[self.own_node] = datetime.now(UTC)
        self._state_holder.mark_dirty()
        self._state_holder.sync()

    def largest(self, nodes: int) -> int:
        """Return the largest node count that can work, at most ``nodes``; 0 if none can."""
        return max((count for count in self.counts if count <= nodes), default=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. Wait and repeat if this node does not fit into the largest node count that can work.

        Raises:
            RendezvousTimeoutError: too few nodes joined, and no active run exists that this node could wait for.
        """
        self._is_store_lost = False
        self._members = {}
        self._missing_since = {}
        holder: Any = self._state_holder
        holder.synced_at = time.monotonic()
        met = in_background(self._meet)
        while not met.done():
            with contextlib.suppress(TimeoutError):
                return met.result(LOOK_SECONDS)
            # A call to a suspended host, or to one without power, would never return.
            if time.monotonic() - holder.synced_at > SILENT_SECONDS:
                raise RendezvousConnectionError("the store does not reply")
        return met.result()

    def _meet(self) -> RendezvousInfo:
        while True:
            try:
                info = super().next_rendezvous()
            except RendezvousTimeoutError:
                if not self.state.complete:
                    raise
                # A run is active and has no place for this node yet.
                continue
            if self.first_decides:
                # Use a key without the prefix of this round, because all nodes and rounds must get the same value.
                own_answer = str(self.largest(info.world_size))
                key = f"shardtrain/{self.settings.run_id}/first-size"
                first_size = int(self._store.compare_set(key, "", own_answer))
                self.counts = [count for count in self.counts if first_size % count == 0]
            size = self.largest(info.world_size)
            if info.rank < size:
                self._round = self.state.round
                members = self.state.participants.items()
                self._members = {node: number for node, number in members if number < size}
                self._compare_clocks(info.store, info.rank, size)
                return RendezvousInfo(info.store, info.rank, size, info.bootstrap_store_info)  # type: ignore[arg-type]
            text = f"{info.world_size} nodes have met, but only {' or '.join(map(str, self.counts))} can work"
            print(f"{text}: this node waits for others", file=sys.stderr, flush=True)

    def _compare_clocks(self, store: dist.Store, rank: int, size: int) -> None:
        """Warn about nodes whose clock differs from the clock of node 0.

        Each node writes its time after all have met.
        """
        if store.add("shardtrain/met", 1) == size:
            store.set("shardtrain/all-met", "")
        store.wait(["shardtrain/all-met"])
        store.set(f"shardtrain/clock-{rank}", str(time.time()))
        if rank != 0:
            return
        own_time, *others = [float(store.get(f"shardtrain/clock-{node}")) for node in range(size)]
        addresses = {number: node.addr for node, number in self.state.participants.items()}
        for node, other_time in enumerate(others, start=1):
            ahead = other_time - own_time
            if abs(ahead) > CLOCKS_APART_SECONDS:
                text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the clock of node 0"
                text = f"the clock of node {node} ({addresses.get(node)}) is {text}; start chrony or ntpd on both"
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes, or 0 if the run cannot grow by them.

        Also return 0 if the store is lost, because no node can join through it. ``NodeReports`` then names
        the lost node.
        """
        if self._is_store_lost:
            return 0
        try:
            waiting = within(LOST_SECONDS, super().num_nodes_waiting)
        except (RendezvousConnectionError, DistError, TimeoutError):
            self._is_store_lost = True
            return 0
        members = len(self.state.participants)
        return waiting if self.largest(members + waiting) > members else 0

    def others_have_ended(self, store: dist.Store, rank: int) -> bool:
        """Record that this node's ranks have ended.

        Return True if the ranks of all remaining nodes have ended, too.
        """
        store.set(f"shardtrain/ended-{rank}", "")
        with self._heartbeat_lock:
            self._state_holder.sync()
        return store.check(
            [f"shardtrain/ended-{number}" for number in self.state.participants.values()]
        )
