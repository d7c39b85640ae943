"""All nodes of an attempt report the same cause of its end, even if each has seen different failures."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import patience
import pytest
import torch.distributed as dist
from clocks import set_clock
from ports import free_port
from ranks import run_ranks
from tiers import cases
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from shardtrain.launch import failure, node_reports
from shardtrain.launch.failure import Failure
from shardtrain.launch.greeting import within
from shardtrain.launch.node_reports import NodeReports
from shardtrain.utils.errors import ConfigError, PeerError
from shardtrain.utils.process import SECRET

KILLED = failure.killed(3, 9, 10.0)
LEFT = failure.ended(1, 41, 10.0)
MEMORY = Failure(2, "b", "MemoryError", "", "model.py:3", 10.0, 7)
HANG_SEEN_BY_0 = Failure(3, "b", "Hang", "has not arrived", "", 10.0, 6, phase="step")
PEERS = [Failure(rank, "any", "PeerError", "connection closed by peer", "", 9.0 + rank, 6, is_peer=True)
         for rank in range(4)]  # fmt: skip
SAVED = [
    Failure(rank, "any", "Preempted", "everything is saved", "", 10.0 + rank, 75)
    for rank in range(4)
]

# the failures that each of two nodes with two ranks sees -> the cause (rank, code), or None
ENDS: dict[str, tuple[list[Failure], list[Failure], tuple[int, int] | None]] = {
    "done": ([], [], None),
    "a rank of node 1 is killed": ([PEERS[0], PEERS[1]], [PEERS[2], KILLED], (3, 6)),
    "its peer on node 0 is ended by the agent, without a record": ([], [KILLED], (3, 6)),
    "a rank of node 0 leaves with its own status": (
        [PEERS[0], LEFT],
        [PEERS[2], PEERS[3]],
        (1, 41),
    ),
    "memory runs out on node 1": ([PEERS[0]], [MEMORY, PEERS[3]], (2, 7)),
    "a stopped rank is seen by the others": ([HANG_SEEN_BY_0], [], (3, 6)),
    "asked to stop": (SAVED[:2], SAVED[2:], (0, 75)),
}


def meet(store: Any, num_nodes: int, ranks_per_node: int = 2) -> list[NodeReports]:
    """Let all nodes of a run meet in the store. Return their reports."""

    def join(number: int) -> NodeReports:
        return NodeReports(store, "run", number, num_nodes, first_rank=number * ranks_per_node)

    with ThreadPoolExecutor(num_nodes) as nodes:
        return list(nodes.map(join, range(num_nodes)))


def test_other_nodes_end_if_the_ranks_of_one_cannot_save(tmp_path):
    """After a second interrupt on node 0, which hosts the store, node 1 must hear of it before the store ends."""
    store = dist.HashStore()
    (tmp_path / "logs").mkdir()
    interrupted = failure.stopped(0, "a second SIGINT")

    def node(number: int) -> Failure | None:
        reports = NodeReports(store, "run", number, 2, first_rank=number)
        if number == 0:
            return reports.explain([interrupted], False, tmp_path)
        patience.wait_for(reports.others_have_failed, 30)
        return reports.explain([PEERS[1]], False, tmp_path)

    with ThreadPoolExecutor(2) as nodes:
        causes = list(nodes.map(node, range(2)))
    assert [cause and cause.message for cause in causes] == [interrupted.message] * 2
    assert {cause and cause.exit_code for cause in causes} == {76}


def explain_on_both(folder: Path, end: str) -> list[Failure | None]:
    """Return the causes that two nodes with the same store and run folder report."""
    failures = ENDS[end][:2]
    store = dist.HashStore()
    (folder / "logs").mkdir()

    def node(number: int) -> Failure | None:
        reports = NodeReports(store, "run", number, 2, first_rank=2 * number)
        all_done = end in ("done", "asked to stop")
        return reports.explain(failures[number], all_done, folder)

    with ThreadPoolExecutor(2) as nodes:
        return list(nodes.map(node, range(2)))


@pytest.mark.parametrize("end", ENDS)
def test_two_nodes_name_the_same_cause(tmp_path, end):
    expected = ENDS[end][2]
    causes = explain_on_both(tmp_path, end)
    if end == "asked to stop":  # each node names its own first rank: all have saved the same step
        assert [cause.exit_code for cause in causes] == [75, 75]
        return

    assert [cause and (cause.rank, cause.exit_code) for cause in causes] == [expected] * 2
    for number in (0, 1):
        assert (tmp_path / f"logs/node-{number}.json").exists()


def _explain_by_clock(
    number: int, folder: Path, port: int, ahead: list[float]
) -> tuple[int | None, bool]:
    """Return the rank that a node names as the cause, and True if its time is by this node's clock.

    The rank of node ``number`` fails ``number`` + 1 seconds from now.
    """
    set_clock(setattr, ahead[number])
    store = dist.TCPStore("127.0.0.1", port, is_master=number == 0, timeout=timedelta(seconds=60))
    reports = NodeReports(store, "run", number, 2, first_rank=number)
    time.sleep(number + 1)
    failed_at = time.time()
    # Wait, so that both nodes report 2 seconds after the start.
    time.sleep(2 - number)
    cause = reports.explain([failure.killed(number, 9, failed_at)], False, folder)
    store.add("done", 1)
    while number == 0 and store.add("done", 0) < 2:
        time.sleep(0.05)
    assert cause is not None
    return cause.rank, abs(cause.time_seconds - (time.time() - 2)) < 15


@pytest.mark.parametrize(
    "ahead", cases([[20.0, 0.0]], nightly=[[0.0, 0.0], [0.0, 20.0], [3600.0, 0.0]])
)
def test_the_first_failure_is_the_cause_although_clocks_of_nodes_differ(tmp_path, ahead):
    (tmp_path / "logs").mkdir()
    # Both name rank 0, which failed first, with a time by their own clock.
    assert run_ranks(2, _explain_by_clock, tmp_path, free_port(), ahead) == [(0, True), (0, True)]


def test_a_silent_node_is_named_if_no_rank_is_to_blame(tmp_path, monkeypatch):
    monkeypatch.setattr(node_reports, "WAIT_SECONDS", 0.2)
    store = dist.HashStore()
    (tmp_path / "logs").mkdir()
    remaining, _lost = meet(store, 2)
    cause = remaining.explain([PEERS[0], PEERS[1]], False, tmp_path)

    assert cause
    assert (cause.rank, cause.exit_code) == (2, 6)
    assert "did not report" in cause.message

    # A cause on this node takes precedence over a lost node.
    local_cause = remaining.explain([LEFT, PEERS[0]], False, tmp_path)
    assert local_cause
    assert local_cause.rank == 1


def test_a_node_whose_ranks_fail_later_does_not_wait_for_one_that_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(node_reports, "WAIT_SECONDS", 3600.0)
    store = dist.HashStore()
    first, second = meet(store, 2, ranks_per_node=1)

    assert first.explain([], True, tmp_path) is None

    killed = failure.killed(1, 9, 10.0)
    cause = within(patience.seconds(30), lambda: second.explain([killed], False, tmp_path))

    assert cause
    assert cause.rank == 1


def test_another_node_s_failure_is_noticed_but_not_its_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(node_reports, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(node_reports, "WAIT_SECONDS", 0.0)
    for failures, all_done, is_noticed in (
        ([], True, False),
        (SAVED[:2], True, False),
        ([KILLED], False, True),
    ):
        first, second = meet(dist.HashStore(), 2, ranks_per_node=1)
        assert not second.others_have_failed()

        first.explain(failures, all_done, tmp_path)
        assert second.others_have_failed() == is_noticed


@pytest.mark.parametrize(
    ("node_ranks", "is_refused"), [((0, 1), False), ((None, None), False), ((1, 1), True)]
)
def test_two_nodes_with_the_same_node_rank_are_refused_on_both(node_ranks, is_refused):
    store = dist.HashStore()

    def error_of(number: int) -> str:
        try:
            NodeReports(store, "run", number, 2, number, node_ranks[number])
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as nodes:
        errors = list(nodes.map(error_of, range(2)))
    host = socket.gethostname()
    expected = f"--node_rank=1 is set on 2 nodes ({host}, {host}); use a different rank on each node, from 0"
    assert errors == [expected if is_refused else ""] * 2


class _Served:
    """A store that fails once the node that serves it has left."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.is_lost = threading.Event()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        if self.is_lost.is_set():
            raise dist.DistNetworkError("Connection refused")
        return getattr(self._store, name)


@pytest.mark.parametrize("slow", [1, 2])
def test_a_node_that_reads_late_still_detects_a_duplicate_node_rank(slow):
    """The node that serves the store stays until all nodes have read the node ranks."""
    store = _Served()

    def error_of(number: int) -> str:
        own_store = _Late(store) if number == slow else store
        try:
            NodeReports(own_store, "run", number, 3, number, (0, 1, 1)[number])
        except ConfigError as error:
            return str(error)
        finally:
            if number == 0:
                store.is_lost.set()
        return ""

    with ThreadPoolExecutor(3) as nodes:
        errors = list(nodes.map(error_of, range(3)))
    assert len(set(errors)) == 1, errors
    assert errors[0].startswith("--node_rank=1 is set on 2 nodes")


class _Late:
    """A store whose reads are slow."""

    def __init__(self, store: _Served) -> None:
        self.set = store.set
        self.add = store.add
        self.check = store.check
        self._served = store

    def get(self, key: str) -> bytes:
        time.sleep(0.1)
        return bytes(self._served.get(key))


def test_two_nodes_name_the_same_cause_although_one_reads_slowly(tmp_path):
    """The node that serves the store stays until the other one has read its report."""
    store = _Served()
    (tmp_path / "logs").mkdir()

    def node(number: int) -> Failure | None:
        reports = NodeReports(_Late(store) if number else store, "run", number, 2, number)
        killed = replace(KILLED, rank=number, time_seconds=time.time() + number)
        try:
            return reports.explain([killed], False, tmp_path)
        finally:
            if number == 0:
                store.is_lost.set()

    with ThreadPoolExecutor(2) as nodes:
        causes = list(nodes.map(node, range(2)))
    assert [cause and cause.rank for cause in causes] == [0, 0]


def test_a_lost_store_is_not_called_again_and_its_node_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(node_reports, "LOOK_SECONDS", 0.0)
    store = _Served()
    _first, second = meet(store, 2)

    assert not second.others_have_failed()

    store.is_lost.set()
    assert second.others_have_failed()

    calls = store.calls
    assert second.others_have_failed()
    cause = second.explain([PEERS[2], PEERS[3]], False, tmp_path)
    assert cause
    assert (cause.rank, cause.exit_code) == (0, 6)
    assert "was lost with its node" in cause.message
    # A lost store is not called again: each call would take the full timeout.
    assert store.calls == calls


def test_a_report_that_is_not_signed_with_the_secret_of_the_nodes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, "of all")
    store = dist.HashStore()
    NodeReports(store, "run", 0, 1, first_rank=0)
    store.set("shardtrain/nodes/node/0", '[0, "stranger", null]')

    with pytest.raises(RendezvousStateError, match="not signed"):
        NodeReports(_Frozen(store, frozen="shardtrain/nodes/node/0"), "run", 0, 1, first_rank=0)


def forged(**fields: object) -> str:
    """Return the report of a rank with some fields replaced."""
    return json.dumps([{**asdict(LEFT), "time_seconds": 1.0, **fields}])


FORGED = {
    "no JSON": "{",
    "no text": b"\xff\xfe\xff",
    "deep JSON": "[" * 100_000,
    "no list": "7",
    "null": "null",
    "no failures": "[7]",
    "fields that are missing": "[{}]",
    "a field that does not exist": forged(color="red"),
    "problems that are no list": forged(problems=None),
    "a time that is a text": forged(time_seconds="soon"),
    "a rank that is a list": forged(rank=[1]),
    "a code that means success": forged(exit_code=0),
    "a code that no process can have": forged(exit_code=256),
}


@pytest.mark.parametrize("secret", ["", "of all"])
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_report_of_one_node_does_not_change_those_of_others(
    name, secret, tmp_path, monkeypatch
):
    """Node 1 of 3 reports, and a stranger forges the reports of nodes 0 and 2."""
    monkeypatch.setenv(SECRET, secret)
    monkeypatch.setattr(node_reports, "WAIT_SECONDS", 0.1)
    store = dist.HashStore()
    first, second, third = meet(store, 3, ranks_per_node=1)

    assert third.explain([KILLED], False, tmp_path) == KILLED

    store.set("shardtrain/nodes/end/0", FORGED[name])
    store.set("shardtrain/nodes/end/1", FORGED[name])
    cause = second.explain([PEERS[1]], False, tmp_path)
    assert cause
    assert replace(cause, time_seconds=KILLED.time_seconds) == KILLED

    # A node does not read its own report from the store.
    store.set("shardtrain/nodes/end/2", FORGED[name])
    store.set("shardtrain/nodes/end/0", FORGED[name])
    store.set("shardtrain/nodes/end/1", "[]")
    assert first.explain([LEFT], False, tmp_path) == LEFT


def test_a_node_ignores_a_forged_report_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(node_reports, "WAIT_SECONDS", 0.0)
    store = _Frozen(dist.HashStore(), frozen="shardtrain/nodes/end/0")
    reports = NodeReports(store, "run", 0, 1, 0)
    store.store.set(store.frozen, forged(exit_code=75))

    assert reports.explain([KILLED], False, tmp_path) == KILLED


@pytest.mark.parametrize(
    "text", ["{", "7", '["0", "host", null]', '[0, "host"]', '[0, "host", "1"]']
)
def test_a_description_of_a_node_that_is_broken_is_refused(text):
    store = _Frozen(dist.HashStore(), frozen="shardtrain/nodes/node/0")
    store.store.set(store.frozen, text)
    with pytest.raises(RendezvousStateError, match="does not describe a node|is not JSON"):
        NodeReports(store, "run", 0, 1, first_rank=0)


@pytest.mark.parametrize("store_seconds", [0.1, 60])
def test_a_node_that_joins_and_does_not_report_its_host_is_named(store_seconds, monkeypatch):
    monkeypatch.setattr(node_reports, "MEET_SECONDS", 1.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=store_seconds))
    with pytest.raises(
        PeerError,
        match="node 1 of 2, counted from 0, joined .* did not report its host within 1 s; check",
    ):
        NodeReports(store, "run", 0, 2, first_rank=0)


class _Frozen:
    """A store in which one key keeps the value that a stranger wrote."""

    def __init__(self, store: dist.Store, frozen: str) -> None:
        self.store = store
        self.frozen = frozen

    def set(self, key: str, value: str) -> None:
        if key != self.frozen:
            self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)
