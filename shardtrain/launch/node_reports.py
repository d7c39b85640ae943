"""Exchange of reports between nodes at the end of an attempt, through the store of the rendezvous.

With the reports, all nodes determine the same cause and make the same decision. A node reports when its ranks
have ended. After the first report of a failure, the other nodes end their ranks, too. Otherwise a stopped
rank, or a rank that waits for a lost peer, would keep its node running.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStateError

from shardtrain.launch import failure
from shardtrain.launch.failure import PREEMPTED, Failure
from shardtrain.launch.greeting import in_background, within
from shardtrain.launch.seal import Seal
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import SECRET

WAIT_SECONDS = 10.0
"""Time that a node waits for the reports of the other nodes after its own report.

Other nodes notice a failure within ``LOOK_SECONDS``, and then give their ranks
``child_watch.PEERS_SPEAK_SECONDS`` to end.
"""
LOST_SECONDS = 15.0
"""Time without a reply after which the store is considered lost."""
MEET_SECONDS = 60.0
"""Time after which a node that has joined the rendezvous without writing its host name is considered lost."""
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.1
_KEY = "shardtrain/nodes"
_ENDED = f"{_KEY}/ended"
_FAILED = f"{_KEY}/failed"
_MET = f"{_KEY}/met"
_READ = f"{_KEY}/read"
_LEFT = f"{_KEY}/left"


def _described_node(fields: Any) -> tuple[int, str, int | None]:
    """Return the first rank, host and ``--node_rank`` that a node wrote about itself."""
    match fields:
        case [int(first_rank), str(host), int() | None as node_rank]:
            return first_rank, host, node_rank
    raise RendezvousStateError(f"{json.dumps(fields)[:100]} does not describe a node")


class NodeReports:
    """Reports of all nodes about one attempt.

    Args:
        number: Position of this node among them.
        missing: Returns the numbers of other nodes that have left the rendezvous.

    Raises:
        ConfigError: two nodes were started with the same ``--node_rank``.
        PeerError: a node joined the rendezvous but did not write its host name within ``MEET_SECONDS``.
        RendezvousStateError: another process wrote the name of a node.
    """

    def __init__(
        self,
        store: Any,
        run_id: str,
        number: int,
        count: int,
        first_rank: int,
        node_rank: int | None = None,
        missing: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._store = store
        self._missing = missing
        self._seal = Seal(os.environ.get(SECRET, ""), run_id)
        self._number = number
        self._looked_at = 0.0
        self._is_store_lost = False
        self._has_reported = False
        self._write("node", (first_rank, socket.gethostname(), node_rank))
        self._nodes = self._read_nodes(count)
        # All nodes get here at the same moment. Each measures time from it, because their clocks may differ.
        self._met_at = time.monotonic()
        hosts: dict[int | None, list[str]] = {}
        for _, host, given_rank in self._nodes:
            hosts.setdefault(given_rank, []).append(host)
        for given_rank, same in hosts.items():
            if given_rank is not None and len(same) > 1:
                # All nodes report this error. The node that serves the store must stay until the
                # other nodes have read it.
                with contextlib.suppress(DistError, TimeoutError):
                    within(
                        WAIT_SECONDS + LOST_SECONDS,
                        lambda: self._await(_MET, lambda: len(self._nodes)),
                    )
                rule = f"is set on {len(same)} nodes ({', '.join(same)})"
                raise ConfigError(
                    Problem(
                        "--node_rank", given_rank, rule, "use a different rank on each node, from 0"
                    )
                )

    def others_have_failed(self) -> bool:
        """True if a rank of another node has failed, or if a node is lost."""
        if self._is_store_lost:
            return True
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = time.monotonic()
        try:
            return within(LOST_SECONDS, self._is_attempt_over)
        except (DistError, TimeoutError):
            self._is_store_lost = True
            return True

    def leave(self) -> None:
        """Note that this node leaves the attempt without a report: its ranks restart with more nodes."""
        with contextlib.suppress(DistError, TimeoutError):
            within(LOST_SECONDS, lambda: self._store.set(f"{_LEFT}/{self._number}", ""))

    def _is_attempt_over(self) -> bool:
        return self._store.add(_FAILED, 0) > 0 or bool(self._lost_nodes())

    def _lost_nodes(self) -> list[int]:
        """Return the nodes that are no longer part of the rendezvous, and neither reported nor left."""
        return [
            number
            for number in self._missing()
            if number != self._number
            and not self._store.check([f"{_KEY}/end/{number}"])
            and not self._store.check([f"{_LEFT}/{number}"])
        ]

    def explain(
        self,
        failures: Sequence[Failure],
        all_done: bool,
        run_folder: Path,
        ends_others: bool = False,
    ) -> Failure | None:
        """Report the failures of this node's ranks. Return the failure that ended the attempt, or None.

        Return when all nodes have reported, or after ``WAIT_SECONDS``. All nodes return the same failure.
        Also write the report to ``logs/node-NUMBER.json``.

        Args:
            all_done: True if all ranks of this node have finished or saved.
            ends_others: True if the ranks of other nodes must end, although those of this node stopped on request.
        """
        report = [asdict(one) for one in failures]
        path = run_folder / "logs" / f"node-{self._number}.json"
        try:
            atomic_io.write(path, json.dumps(report, indent=2) + "\n")
        except OSError as error:
            print(f"warning: {path} is not written: {error.strerror}", file=sys.stderr, flush=True)
        reports = {self._number: list(failures)}
        # If all ranks saved on request, they ended after the same step, and none of them has failed. Ranks of other
        # nodes cannot save without ranks that ended without saving.
        all_stopped = all(one.exit_code == PREEMPTED for one in failures)
        is_failure = ends_others or (not all_done and not (failures and all_stopped))
        if not self._is_store_lost:
            # If the node that serves the store is lost, continue with the reports that were received.
            with contextlib.suppress(DistError, TimeoutError):
                within(WAIT_SECONDS + LOST_SECONDS, lambda: self._exchange(reports, is_failure))
        # After a timeout the exchange continues in its thread.
        reports = dict(reports)
        all_failures = [one for of_node in reports.values() for one in of_node]
        if is_failure and all(one.is_peer for one in all_failures):
            lost = [node for number, node in enumerate(self._nodes) if number not in reports]
            all_failures += [failure.lost_with_node(rank, host) for rank, host, _ in lost]
        return failure.culprit(all_failures) if all_failures else None

    def _exchange(self, reports: dict[int, list[Failure]], is_failure: bool) -> None:
        """Publish this node's report. If a node has failed, add the reports of the other nodes to ``reports``."""
        # The time at which the nodes met, by the current wall clock of this node. Reports have the seconds since then.
        met_at = time.time() - (time.monotonic() - self._met_at)
        own = [
            replace(one, time_seconds=one.time_seconds - met_at) for one in reports[self._number]
        ]
        self._write("end", [asdict(one) for one in own])
        # A request to stop may interrupt the first report, and a second one follows. Count this node once.
        failed_nodes = self._store.add(_FAILED, int(is_failure))
        self._store.add(_ENDED, int(not self._has_reported))
        self._has_reported = True
        if not failed_nodes:
            # This node ends without reading reports. A node that fails later need not wait for it.
            self._store.add(_READ, 1)
            return
        self._await(_ENDED, lambda: len(self._nodes) - len(self._lost_nodes()))
        for number in range(len(self._nodes)):
            if number == self._number or not self._store.check([f"{_KEY}/end/{number}"]):
                continue
            # A corrupted or unsigned report counts as missing.
            with contextlib.suppress(RendezvousError, ValueError, TypeError, KeyError):
                failures = [failure.from_fields(fields) for fields in self._read("end", number)]
                reports[number] = [
                    replace(one, time_seconds=one.time_seconds + met_at) for one in failures
                ]
        # The node that serves the store stays until all that have reported have read the reports.
        self._store.add(_READ, 1)
        self._await(_READ, lambda: len(reports))

    def _read_nodes(self, count: int) -> list[tuple[int, str, int | None]]:
        """Return first rank, host and ``--node_rank`` of each node. Wait until all nodes have written them."""
        nodes: list[tuple[int, str, int | None]] = []

        def read() -> None:
            while len(nodes) < count:
                nodes.append(_described_node(self._read("node", len(nodes))))
            self._store.add(_MET, 1)

        reading = in_background(read)
        until = time.monotonic() + MEET_SECONDS
        while not self._missing() and time.monotonic() < until:
            # The store reports its own timeout as DistStoreError.
            with contextlib.suppress(TimeoutError, DistStoreError):
                reading.result(min(LOOK_SECONDS, MEET_SECONDS))
                return nodes
            if reading.done():
                break
        # The reader may have ended between the last wait and the check.
        if reading.done() and reading.exception() is None:
            return nodes
        rule = f"joined the rendezvous but did not report its host within {MEET_SECONDS:g} s"
        if self._missing():
            rule = "joined the rendezvous and was lost"
        fix = "check the node and its network"
        raise PeerError(f"node {len(nodes)} of {count}, counted from 0, {rule}; {fix}")

    def _await(self, counter: str, count: Callable[[], int]) -> None:
        """Wait at most ``WAIT_SECONDS`` until ``count()`` nodes have added 1 to ``counter``."""
        until = time.monotonic() + WAIT_SECONDS
        while self._store.add(counter, 0) < count() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _write(self, kind: str, value: object) -> None:
        self._store.set(
            f"{_KEY}/{kind}/{self._number}", self._seal.close(json.dumps(value).encode()).decode()
        )

    def _read(self, kind: str, number: int) -> Any:
        """Return the value that node ``number`` wrote.

        Raises:
            RendezvousStateError: the value is not JSON, or not signed with this node's secret.
        """
        text = self._seal.open(self._store.get(f"{_KEY}/{kind}/{number}"))
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RendezvousStateError(f"the report of node {number} is not JSON") from None
