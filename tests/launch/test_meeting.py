"""The rendezvous of nodes: wrong clocks, node order, possible numbers of nodes, and the end of a node."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import signal
import socket
import threading
import time
from typing import Any

import patience
import pytest
import torch.distributed as dist
from clocks import set_clock
from ports import free_port
from ranks import run_ranks
from tiers import cases
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as pytorch
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from shardtrain.launch import greeting, meeting, nodes
from shardtrain.launch.greeting import within
from shardtrain.launch.meeting import Meeting, open_meeting
from shardtrain.launch.seal import Seal
from shardtrain.utils.errors import ConfigError, OutOfMemoryError, PeerError
from shardtrain.utils.listening import open_listener
from shardtrain.utils.process import SECRET


def node(rank: int, port: int, **options: Any) -> nodes.Nodes:
    count = options.pop("most", 2)
    return nodes.Nodes(
        least=options.pop("least", count),
        most=count,
        endpoint=f"127.0.0.1:{port}",
        node_rank=rank,
        run_id="run",
        local_address="127.0.0.1",
        max_restarts=0,
        join_seconds=round(patience.seconds(30)),
        reason="--nnodes=2",
        **options,
    )


def listener(rank: int, port: int) -> socket.socket | None:
    return open_listener("127.0.0.1", port) if rank == 0 else None


def end_together(rendezvous: Meeting, store: dist.Store, rank: int) -> None:
    """Wait for all nodes before the first one, which serves the store, leaves."""
    while not rendezvous.others_have_ended(store, rank):
        time.sleep(0.05)
    if rank == 0:
        time.sleep(1)


def meet(rank: int, port: int, clocks: list[float]) -> tuple[int, int]:
    set_clock(setattr, clocks[rank])
    rendezvous = open_meeting(node(rank, port, most=len(clocks)), listener(rank, port))
    info = rendezvous.next_rendezvous()
    time.sleep(2)  # two checks of the heartbeats, after which a wrong clock could still drop a node
    assert rendezvous.num_nodes_waiting() == 0
    assert len(rendezvous.state.participants) == len(clocks)
    end_together(rendezvous, info.store, info.rank)
    return info.rank, info.world_size


# seconds by which the clock of each node is ahead
CLOCKS = {
    "second behind": [0, -20],
    "second ahead": [0, 60],
    "first behind": [-3600, 0],
    "first ahead": [86_400, 0],
    "three nodes": [0, 20, -20],
    "equal": [0, 0],
}


@pytest.mark.parametrize(
    "name", cases(["second behind"], nightly=[name for name in CLOCKS if name != "second behind"])
)
def test_nodes_with_any_clocks_meet_in_one_world_and_the_difference_is_named(name, capfd):
    clocks = CLOCKS[name]
    worlds = run_ranks(len(clocks), meet, free_port(), clocks)
    assert sorted(worlds) == [(number, len(clocks)) for number in range(len(clocks))]

    warnings = re.findall(
        r"the clock of node \d \(127.0.0.1\) is (\d+) s (ahead of|behind)", capfd.readouterr().err
    )
    differences = []
    for seconds, direction in warnings:
        differences.append(int(seconds) if direction == "ahead of" else -int(seconds))

    ranks = [rank for rank, _ in worlds]
    clock_of_rank_0 = clocks[ranks.index(0)]
    expected = [clock - clock_of_rank_0 for clock in clocks if clock != clock_of_rank_0]
    # All nodes compare their clocks at the same moment, so only the pauses of a busy machine differ.
    assert sorted(differences) == pytest.approx(sorted(expected), abs=patience.seconds(1))


def meet_by_number(rank: int, port: int, numbers: list[int], least: int) -> int:
    # Sorted as text, the address of a later node comes first.
    options = {"local_address": f"127.0.0.{11 - rank}", "node_rank": numbers[rank]}
    own_node = dataclasses.replace(node(rank, port, least=least, most=len(numbers)), **options)
    rendezvous = open_meeting(own_node, listener(rank, port))
    info = rendezvous.next_rendezvous()
    end_together(rendezvous, info.store, info.rank)
    return info.rank


ORDERS = {
    "fixed": ([0, 1], 2, [0, 1]),
    "fixed, three nodes": ([0, 2, 1], 3, [0, 2, 1]),
    "elastic": ([0, 1], 1, [0, 1]),
    "elastic, numbers with a gap": ([0, 7, 3], 1, [0, 2, 1]),
}


@pytest.mark.parametrize(
    "name", cases(["fixed"], nightly=[name for name in ORDERS if name != "fixed"])
)
def test_the_given_node_ranks_decide_the_order_of_nodes(name):
    numbers, least, expected = ORDERS[name]
    assert run_ranks(len(numbers), meet_by_number, free_port(), numbers, least) == expected


@pytest.mark.parametrize("secret", ["", "of all"])
def test_a_node_that_waits_for_one_that_cannot_run_ends_with_its_reason(secret, monkeypatch):
    monkeypatch.setenv(SECRET, secret)
    port = free_port()
    nodes_of_run = node(0, port)
    rendezvous = open_meeting(nodes_of_run, listener(0, port))
    reason = Seal(secret, nodes_of_run.run_id).close(b"7 ulimit -u=13 is too small")
    later = threading.Timer(
        0.5, greeting.send_refusal, (nodes_of_run.endpoint, nodes_of_run.refusal_key, reason)
    )
    later.start()

    with pytest.raises(OutOfMemoryError, match="^ulimit -u=13 is too small$"):
        rendezvous.next_rendezvous()


def read_reason(rank: int, port: int, refused: int) -> list[str]:
    """Return the lines with which a node ends if node ``refused`` of three cannot run."""
    own_node = node(rank, port, most=3)
    if rank == refused:
        greeting.send_refusal(
            own_node.endpoint, own_node.refusal_key, b"7 ulimit -u=13\nulimit -n=14"
        )
        return []
    if rank == 2:
        time.sleep(2)  # this node connects after the first one has read the reason
    with pytest.raises(OutOfMemoryError) as caught:
        open_meeting(own_node, listener(rank, port)).next_rendezvous()
    return [str(line) for line in caught.value.problems]


def test_the_first_node_stays_until_all_others_know_why_a_node_cannot_run():
    lines = ["ulimit -u=13", "ulimit -n=14"]
    assert run_ranks(3, read_reason, free_port(), 1) == [lines, [], lines]


def state_of(store: dist.Store, name: str) -> Any:
    """Return a node called ``name`` and its view of the state that nodes share. Heartbeats expire after 15 s."""
    settings = pytorch.RendezvousSettings(
        "run",
        1,
        2,
        pytorch.RendezvousTimeout(),
        datetime.timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    own_node = pytorch._NodeDesc(name, 1, 0)
    holder = meeting._SteadyState(C10dRendezvousBackend(store, "run"), settings, own_node)
    return own_node, holder


def beat(own_node: Any, holder: Any, at: datetime.datetime) -> None:
    holder._last_sync_time = -1  # the holder reads at most once per second
    holder.sync()
    holder.state.participants[own_node] = 0
    holder.state.last_heartbeats[own_node] = at
    holder.mark_dirty()
    assert holder.sync()


@pytest.mark.parametrize("ahead", [0, -3600, 3600])
def test_a_node_is_lost_when_its_heartbeat_has_not_changed_for_fifteen_seconds(monkeypatch, ahead):
    passed = [0.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: 1000.0 + passed[0])
    store = dist.HashStore()
    reader = state_of(store, "reader")
    other = state_of(store, "other")
    wrong_clock = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)

    def sees_other() -> bool:
        beat(*reader, datetime.datetime.now(datetime.UTC))
        return other[0] in reader[1].state.participants

    # The clock of the other node may be wrong by an hour, which must not matter.
    beat(*other, wrong_clock)
    for passed[0] in (0, 10, 14):
        assert sees_other()

    passed[0] = 20
    beat(*other, wrong_clock + datetime.timedelta(seconds=5))
    for passed[0] in (20, 30, 34):
        assert sees_other(), "a heartbeat must count from the time of its arrival"

    passed[0] = 36
    assert not sees_other()


def test_a_node_that_was_removed_before_all_have_joined_may_return_for_some_seconds(monkeypatch):
    """A node removed for late heartbeats may rejoin within 10 s. After that, it is reported as lost."""
    passed = [0.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: 1000.0 + passed[0])
    backend = C10dRendezvousBackend(dist.HashStore(), "run")
    rendezvous = Meeting.from_backend("run", dist.HashStore(), backend, 3, 3, "127.0.0.1")
    holder = rendezvous._state_holder
    other = meeting._NumberedNode("node-b", 7, 0)
    vars(other)["number"] = 1

    def see(present: bool, at: float) -> None:
        passed[0] = at
        holder.state.participants = {other: 0} if present else {}
        holder._raise_lost()

    # Absences of 9 seconds are tolerated, and each return restarts the clock. 11 seconds are too
    # long.
    for present, at in ((True, 0), (False, 9), (True, 12), (False, 21)):
        see(present, at)
    with pytest.raises(PeerError, match=r"^node 1 \(node-b, process 7\) joined .* and left it"):
        see(False, 23)
    assert len(rendezvous.joined_nodes()) == 2


def test_a_removed_node_returns_to_its_round_and_is_missing_only_without_it(monkeypatch):
    passed = [0.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: 1000.0 + passed[0])
    backend = C10dRendezvousBackend(dist.HashStore(), "run")
    rendezvous = Meeting.from_backend("run", dist.HashStore(), backend, 2, 2, "127.0.0.1")
    rendezvous._members = {rendezvous.own_node: 1}
    rendezvous.state.complete = True

    assert rendezvous.missing_members() == []

    passed[0] = 9
    assert rendezvous.missing_members() == [], "it may return"

    passed[0] = 11
    assert rendezvous.missing_members() == [1]

    rendezvous._keep_alive()
    assert rendezvous.state.participants == {rendezvous.own_node: 1}
    assert rendezvous.missing_members() == []

    # The others have begun another round.
    rendezvous.state.participants.clear()
    rendezvous.state.round = 1
    rendezvous._keep_alive()

    assert not rendezvous.state.participants


def test_a_pause_of_this_process_does_not_count_against_other_nodes(monkeypatch):
    passed = [0.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: 1000.0 + passed[0])
    store = dist.HashStore()
    own_node, reader = state_of(store, "reader")
    other, holder = state_of(store, "other")
    now = datetime.datetime.now(datetime.UTC)
    beat(other, holder, now)
    for passed[0] in (0, 4, 40, 48):
        beat(own_node, reader, now + datetime.timedelta(seconds=passed[0]))
        assert other in reader.state.participants
    passed[0] = 56
    beat(own_node, reader, now + datetime.timedelta(seconds=passed[0]))

    assert other not in reader.state.participants


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_node_whose_clock_jumps_still_sends_heartbeats(monkeypatch, jump):
    passed = [0.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: 1000.0 + passed[0])
    own_node, holder = state_of(dist.HashStore(), "own")
    beat(own_node, holder, datetime.datetime.now(datetime.UTC))
    with monkeypatch.context() as patch:
        set_clock(patch.setattr, jump)
        passed[0] = 6
        holder._last_sync_time = -1
        holder.sync()
        context = pytorch._RendezvousContext(own_node, holder.state, holder._settings)
        assert own_node in holder.state.participants
        assert pytorch._should_keep_alive(context)


def test_a_world_with_too_few_nodes_does_not_train(monkeypatch, capsys):
    """If a node drops out of a complete world, the others wait for it again until their time limit."""
    store = dist.HashStore()
    backend = C10dRendezvousBackend(dist.HashStore(), "run")
    rendezvous = Meeting.from_backend("run", store, backend, 2, 2, "127.0.0.1")
    rendezvous.counts = [2]
    world_of_one = pytorch.RendezvousInfo(dist.HashStore(), 0, 1, None)
    answers = iter([world_of_one])

    def next_rendezvous(self: Any) -> Any:
        for answer in answers:
            return answer
        raise pytorch.RendezvousTimeoutError

    monkeypatch.setattr(pytorch.DynamicRendezvousHandler, "next_rendezvous", next_rendezvous)
    with pytest.raises(pytorch.RendezvousTimeoutError):
        rendezvous.next_rendezvous()
    assert "1 nodes have met, but only 2 can work: this node waits" in capsys.readouterr().err


def test_a_node_reports_that_it_waits_for_others(monkeypatch, capsys):
    """Node 0 has no endpoint to check, and would be silent for RDZV_TIMEOUT."""
    monkeypatch.setattr(meeting, "QUIET_SECONDS", 0.0)
    backend = C10dRendezvousBackend(dist.HashStore(), "run")
    second = datetime.timedelta(seconds=1)
    timeout = pytorch.RendezvousTimeout(join=3 * second)
    rendezvous = Meeting.from_backend("run", dist.HashStore(), backend, 2, 2, "127.0.0.1", timeout)
    rendezvous.counts = [2]

    with pytest.raises(pytorch.RendezvousTimeoutError):
        rendezvous.next_rendezvous()
    assert capsys.readouterr().err.count("waiting for other nodes: 1 of 2 have joined\n") == 1


def join_and_follow(rank: int, port: int) -> list[int]:
    """Return the sizes of the worlds in which a node works, up to one of four nodes. The last node starts late."""
    if rank == 3:
        late = dist.TCPStore(
            "127.0.0.1", port, timeout=datetime.timedelta(seconds=patience.seconds(60))
        )
        late.wait(["two have worked"])
    settings = {"last_call_timeout": "5"}
    rendezvous = open_meeting(
        node(rank, port, least=2, most=4, counts=[2, 4], rendezvous=settings), listener(rank, port)
    )
    worlds = []
    while 4 not in worlds:
        info = rendezvous.next_rendezvous()
        worlds.append(info.world_size)
        assert info.rank < info.world_size
        looks = 0
        while info.world_size == 2 and not rendezvous.num_nodes_waiting():
            time.sleep(0.5)
            looks += 1
            if looks == 10:  # the two nodes were not interrupted meanwhile
                rendezvous._store.set("two have worked", "")
    end_together(rendezvous, info.store, info.rank)
    return worlds


@pytest.mark.parametrize(
    ("members", "waiting", "counts", "counted"),
    [
        (2, 1, [1, 2, 4], 0),
        (2, 2, [1, 2, 4], 2),
        (1, 1, [1, 2, 4], 1),
        (2, 1, [2, 3], 1),
        (1, 2, [2, 4], 2),  # one of two members has left to join again
        (4, 1, [1, 2, 4], 0),
        (2, 0, [1, 2, 4], 0),
    ],
)
def test_nodes_that_wait_count_once_a_larger_number_can_work(
    monkeypatch, members, waiting, counts, counted
):
    rendezvous = Meeting.from_backend(
        "run", dist.HashStore(), C10dRendezvousBackend(dist.HashStore(), "run"), 1, 4, "127.0.0.1"
    )
    rendezvous.counts = counts
    rendezvous.state.participants = dict(enumerate(range(members)))
    monkeypatch.setattr(pytorch.DynamicRendezvousHandler, "num_nodes_waiting", lambda _: waiting)

    assert rendezvous.num_nodes_waiting() == counted


@pytest.mark.nightly(
    "rounds of a rendezvous take seconds each",
    by="tests/launch/test_meeting.py::test_nodes_that_wait_count_once_a_larger_number_can_work",
)
def test_a_surplus_node_waits_until_more_nodes_join():
    """Two or four nodes can work. Of three nodes, one waits. With the fourth, all work."""
    worlds = run_ranks(4, join_and_follow, free_port())
    assert {size for sizes in worlds for size in sizes} == {2, 4}
    assert all(sizes[-1] == 4 for sizes in worlds)
    assert [4] in worlds[:3], "one of the first three must have waited"


def test_without_a_global_batch_the_nodes_that_meet_first_decide_which_numbers_can_work(
    monkeypatch,
):
    """Later worlds keep the first one's batch size, which their ranks must divide. Surplus nodes wait."""
    shared = dist.HashStore()
    monkeypatch.setattr(Meeting, "_compare_clocks", lambda *_: None)
    for num_nodes, rank, size in [(4, 0, 4), (3, 1, 2), (2, 0, 2), (4, 3, 4)]:
        rendezvous = Meeting.from_backend(
            "run", shared, C10dRendezvousBackend(shared, "run"), 1, 4, "127.0.0.1"
        )
        rendezvous.counts = [1, 2, 3, 4]
        rendezvous.first_decides = True
        info = pytorch.RendezvousInfo(shared, rank, num_nodes, None)
        monkeypatch.setattr(
            pytorch.DynamicRendezvousHandler, "next_rendezvous", lambda _, info=info: info
        )
        assert rendezvous.next_rendezvous().world_size == size
        assert rendezvous.counts == [1, 2, 4]


def end_without_the_other(rank: int, port: int) -> bool:
    settings = {"keep_alive_interval": "1"}
    rendezvous = open_meeting(node(rank, port, rendezvous=settings), listener(rank, port))
    info = rendezvous.next_rendezvous()
    if info.rank == 1:
        rendezvous._stop_heartbeats()  # like a lost machine, except that it may still serve the store
        info.store.wait(["first has ended"])
        return True
    waits = not rendezvous.others_have_ended(info.store, 0)
    while not rendezvous.others_have_ended(info.store, 0):
        time.sleep(0.1)
    info.store.set("first has ended", "")
    time.sleep(1)
    return waits


def test_a_finished_node_waits_for_others_but_not_for_a_lost_one():
    assert run_ranks(2, end_without_the_other, free_port()) == [True, True]


def test_a_store_that_does_not_reply_ends_no_healthy_run(monkeypatch):
    rendezvous = Meeting.from_backend(
        "run", dist.HashStore(), C10dRendezvousBackend(dist.HashStore(), "run"), 2, 2, "127.0.0.1"
    )
    never = threading.Event()
    monkeypatch.setattr(
        pytorch.DynamicRendezvousHandler, "num_nodes_waiting", lambda _: never.wait()
    )
    monkeypatch.setattr(meeting, "LOST_SECONDS", 0.1)

    assert rendezvous.num_nodes_waiting() == 0

    never.set()


def test_a_store_that_does_not_reply_ends_nodes_that_meet(monkeypatch):
    """The call to the store of a suspended host never returns, and RDZV_TIMEOUT does not interrupt it."""
    rendezvous = Meeting.from_backend(
        "run", dist.HashStore(), C10dRendezvousBackend(dist.HashStore(), "run"), 2, 2, "127.0.0.1"
    )
    never = threading.Event()
    monkeypatch.setattr(pytorch.DynamicRendezvousHandler, "next_rendezvous", lambda _: never.wait())
    monkeypatch.setattr(meeting, "SILENT_SECONDS", 0.1)

    with pytest.raises(RendezvousConnectionError, match="does not reply"):
        rendezvous.next_rendezvous()

    never.set()


@pytest.mark.parametrize("error", [RendezvousConnectionError, dist.DistNetworkError])
def test_a_lost_store_is_not_called_again_and_the_agent_reports_the_cause(monkeypatch, error):
    """An error of the lost store must not end the agent before it names a rank and writes exit.json."""
    rendezvous = Meeting.from_backend(
        "run", dist.HashStore(), C10dRendezvousBackend(dist.HashStore(), "run"), 2, 2, "127.0.0.1"
    )
    calls = []

    def ask(_: Any) -> int:
        calls.append(1)
        raise error("Connection refused")

    monkeypatch.setattr(pytorch.DynamicRendezvousHandler, "num_nodes_waiting", ask)
    assert [rendezvous.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert len(calls) == 1


ONE = "of one run"
OTHER = "of another run"
NO_SECRET = ""
# number of nodes and secret of the first node, then of the second node -> error of the second node
COUNTS = {
    "equal": ((2, 2, NO_SECRET), (2, 2, NO_SECRET), ""),
    "equal and signed": ((1, 4, ONE), (1, 4, ONE), ""),
    "more": ((2, 2, NO_SECRET), (3, 3, NO_SECRET), '--nnodes="3" must be 2, as on the first node'),
    "elastic": ((2, 2, ONE), (1, 2, ONE), '--nnodes="1:2" must be 2, as on the first node'),
    "fixed": (
        (1, 2, NO_SECRET),
        (2, 2, NO_SECRET),
        '--nnodes="2" must be 1:2, as on the first node',
    ),
    "another secret": ((2, 2, ONE), (2, 2, OTHER), "is not signed with the secret of this node"),
    "a secret only here": (
        (2, 2, NO_SECRET),
        (2, 2, ONE),
        "is not signed with the secret of this node",
    ),
    "a secret only there": (
        (2, 2, ONE),
        (3, 3, NO_SECRET),
        "is signed with another secret, or was not written by a node",
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_nodes_that_were_started_with_different_numbers_of_nodes_are_refused(name):
    *options_of_nodes, expected = COUNTS[name]
    store = dist.HashStore()
    errors = []
    for least, most, secret in options_of_nodes:
        number = str(most) if least == most else f"{least}:{most}"
        this_node = dataclasses.replace(
            node(0, 1, least=least, most=most), reason=f"--nnodes={number}"
        )
        try:
            meeting._compare_node_counts(this_node, store, secret)
            errors.append("")
        except (ConfigError, RendezvousStateError) as error:
            errors.append(str(error))

    assert errors[0] == "" and expected in errors[1], errors
    assert bool(expected) == bool(errors[1]), errors


def test_a_signal_is_handled_while_the_rendezvous_does_not_answer(monkeypatch):
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    never = threading.Event()
    try:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            within(None, never.wait)
    finally:
        signal.signal(signal.SIGUSR1, before)
        never.set()


def test_a_missing_answer_times_out_and_errors_are_raised():
    never = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.1, never.wait)

    never.set()
    with pytest.raises(ZeroDivisionError):
        within(None, lambda: 1 // 0)
    assert within(None, lambda: 3) == 3
