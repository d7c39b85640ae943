"""Ranks that share a secret reject values of the store that none of them signed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist

from shardtrain.config.schema import Comm
from shardtrain.distributed import process_group
from shardtrain.distributed.rendezvous import attempt_store, private_store
from shardtrain.distributed.rendezvous.signed_store import ForgedError, SignedStore, signed
from shardtrain.resilience.watchdog.exchange import SPARE_PLACES, VERDICT, HeartbeatExchange
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.utils.errors import PeerError
from shardtrain.utils.process import SECRET

TIMEOUT = timedelta(seconds=60)
OURS = {SECRET: "of all", "TORCHELASTIC_RUN_ID": "run"}


def connection(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT)


def run_two(rank_main: Callable[[int], None]) -> None:
    """Run ranks 1 and 0 as threads of this process until they end."""
    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience.seconds(60))


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def test_ranks_with_the_same_secret_read_each_others_values(server: dist.TCPStore) -> None:
    first, second = (signed(connection(server), OURS, "1") for _ in range(2))
    first.set("text", "one\nline")
    first.set("bytes", bytes(range(256)))

    assert second.get("text") == b"one\nline"
    assert second.multi_get(["text", "bytes"]) == [b"one\nline", bytes(range(256))]
    # The first rank to set the verdict wins. It changes only for a rank that knows the current one.
    assert first.compare_set("verdict", "", "one") == b"one"
    assert second.compare_set("verdict", "", "two") == b"one"
    assert second.compare_set("verdict", "one", "two") == b"two"
    assert first.get("verdict") == b"two"

    assert (first.add("count", 2), second.add("count", 3)) == (2, 5)

    assert second.check(["text"])
    assert not second.check(["nothing"])
    assert second.delete_key("text")
    assert not first.check(["text"])

    # A PrefixStore calls the store from C++, as PyTorch does.
    below = dist.PrefixStore("below", first)
    below.set("text", "deep")
    assert dist.PrefixStore("below", second).get("text") == b"deep"
    assert first.clone().get("bytes") == bytes(range(256))


def test_store_outlives_the_pytorch_objects_built_on_it(server: dist.TCPStore) -> None:
    """PrefixStore and later process groups keep a reference only to the C++ part of the store."""
    first = dist.PrefixStore("below", signed(connection(server), OURS, "1"))
    second = dist.PrefixStore("below", signed(connection(server), OURS, "1").clone())
    gc.collect()
    first.set("text", "deep")

    assert (
        dist.PrefixStore("below", second.underlying_store.clone()).get("text")
        == second.get("text")
        == b"deep"
    )
    assert first.clone().get("text") == b"deep"


def test_store_is_unchanged_without_a_secret(server: dist.TCPStore) -> None:
    assert signed(server, {SECRET: ""}, "1") is server


@pytest.mark.parametrize(
    "changes",
    [{SECRET: "of another"}, {"TORCHELASTIC_RUN_ID": "another"}, {"attempt": "2"}, {SECRET: ""}],
)
def test_value_of_another_secret_run_or_attempt_is_rejected(
    changes: dict[str, str], server: dist.TCPStore
) -> None:
    ours = signed(connection(server), OURS, "1")
    foreign = signed(connection(server), {**OURS, **changes}, changes.get("attempt", "1"))
    foreign.set("address", "6.6.6.6")

    for read in (lambda: ours.get("address"), lambda: ours.multi_get(["address"])):
        with pytest.raises(
            ForgedError, match="'address'.* not signed with this node's SHARDTRAIN_SECRET"
        ):
            read()
    with pytest.raises(ForgedError):
        ours.compare_set("address", "", "7.7.7.7")

    dist.PrefixStore("a", foreign).set("b", "forged")
    with pytest.raises(ForgedError):
        dist.PrefixStore("a", ours).get("b")  # through C++ and back


def test_signed_value_is_invalid_under_another_key_or_when_truncated(server: dist.TCPStore) -> None:
    ours = signed(connection(server), OURS, "1")
    raw = connection(server)
    ours.set("rank/1", "10.0.0.1")
    signed_value = raw.get("rank/1")
    raw.set("rank/2", signed_value)
    for number, damaged in enumerate(
        (
            signed_value[:-1],
            signed_value + b"0",
            b"",
            signed_value[:80],
            signed_value.replace(b"10.", b"66."),
        )
    ):
        raw.set(f"damaged/{number}", damaged)

    for key in ("rank/2", *(f"damaged/{number}" for number in range(5))):
        with pytest.raises(ForgedError):
            ours.get(key)


def test_ranks_create_process_groups_through_the_signed_store(server: dist.TCPStore) -> None:
    """gloo exchanges addresses through the signed store, and collectives work."""
    sums: dict[int, float] = {}

    def rank_main(rank: int) -> None:
        store = signed(connection(server), OURS, "1")
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, TIMEOUT)
        tensor = torch.tensor([float(rank + 1)])
        group.allreduce([tensor]).wait()
        sums[rank] = tensor.item()

    run_two(rank_main)
    assert sums == {0: 3.0, 1: 3.0}


def launched(server: dist.TCPStore, rank: int, **more: str) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": str(rank)}
    return {**OURS, **address, "TORCHELASTIC_USE_AGENT_STORE": "True", **more}


def test_requests_and_answers_of_an_attacker_are_ignored(server: dist.TCPStore) -> None:
    stranger = connection(server)
    # forged request: rank 0 must ignore it and continue
    stranger.set(f"shardtrain/asked/{stranger.add('shardtrain/asked', 1)}", "a word")
    values: dict[int, bytes] = {}
    joined = threading.Barrier(2)

    def rank_main(rank: int) -> None:
        with attempt_store.store_of_attempt(launched(server, rank), TIMEOUT) as store:
            assert store is not None
            store.set(f"of/{rank}", str(rank))
            values[rank] = store.get(f"of/{1 - rank}")
            joined.wait(patience.seconds(60))

    run_two(rank_main)
    assert values == {0: b"1", 1: b"0"}
    assert not stranger.check(["shardtrain/asked/answer/a word"])


def test_forged_answer_stops_the_start_with_its_cause(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_store.secrets, "token_hex", lambda size: "word")
    connection(server).set("shardtrain/asked/answer/word", "a store of mine")
    with (
        pytest.raises(ForgedError, match="SHARDTRAIN_SECRET"),
        attempt_store.store_of_attempt(launched(server, 1), TIMEOUT),
    ):
        pass


def test_forged_address_stops_the_start_with_exit_code_6(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo reads the other rank's address in C++. The error must still have the package's exit code."""
    address = launched(
        server,
        1,
        WORLD_SIZE="2",
        LOCAL_RANK="1",
        TORCHELASTIC_RESTART_COUNT="0",
        SHARDTRAIN_JOB="j",
    )
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    stranger = connection(server)
    done = threading.Event()

    def forge() -> None:
        while not done.wait(0.02):  # rank 0's address, next to the one that rank 1 has just set
            for key in stranger.list_keys():  # type: ignore[attr-defined]
                if key.endswith("/0/1"):
                    stranger.set(key[:-1] + "0", "6.6.6.6")

    thread = threading.Thread(target=forge, daemon=True)
    thread.start()
    try:
        with (
            pytest.raises(PeerError, match="not signed"),
            process_group.join(Comm(init_timeout_seconds=20), "cpu"),
        ):
            pass
    finally:
        done.set()
        thread.join()


# --- the watchdog: an attacker can neither end a run nor hide a hang


def test_forged_verdict_is_ignored_and_a_signed_one_is_received(server: dist.TCPStore) -> None:
    stranger = connection(server)
    ranks = [
        HeartbeatExchange(signed(connection(server), OURS, "1"), rank, 2, 0.02) for rank in range(2)
    ]
    stranger.set(VERDICT, '{"text": "mine"}')

    assert [channel.verdict() for channel in ranks] == [None, None]
    assert ranks[0].declare("ours") == b"ours" == ranks[1].verdict()


def test_forged_and_replayed_heartbeats_are_ignored(server: dist.TCPStore) -> None:
    stranger = connection(server)
    ranks = []
    for rank in range(2):
        store = signed(connection(server), OURS, "1")
        ranks.append(HeartbeatExchange(store, rank, 2, 0.02))
        ranks[rank].say(Heartbeat(1, f"node{rank}"))
    first_heartbeat = stranger.get("place-2")
    ranks[1].say(Heartbeat(2, "node1"))

    received = ranks[0].receive()
    assert {rank: sign.beat for rank, sign in received.items()} == {0: 1, 1: 2}

    # A stranger without the secret claims that both ranks have left, and inflates the number of heartbeat keys.
    stranger.set("place-2", '{"1": {"beat": 9, "host": "mine", "has_left": true}}')
    stranger.set("place-3", '{"0": {"beat": 9, "host": "mine", "has_left": true}}')
    stranger.add("places", 10**9)
    received = ranks[0].receive()

    assert {rank: (sign.beat, sign.has_left) for rank, sign in received.items()} == {
        0: (1, False),
        1: (2, False),
    }

    stranger.set("place-2", first_heartbeat)
    assert ranks[0].receive()[1].beat == 2, "a replayed heartbeat must be ignored"
    assert len(ranks[0]._known) <= 2 + SPARE_PLACES


# --- tasks of srun on one node use a folder for rendezvous


def task(tmp_path: Path, rank: int = 0, **more: str) -> dict[str, str]:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    (tmp_path / "runtime").mkdir(exist_ok=True)
    return {**step, **names, "XDG_RUNTIME_DIR": str(tmp_path / "runtime"), **more}


def test_tasks_of_one_node_rendezvous_repeatedly_in_a_folder(tmp_path: Path) -> None:
    """A script started by srun may train twice. The second run reads nothing of the first."""
    for attempt in range(2):
        values: dict[int, bytes] = {}
        joined = threading.Barrier(2)

        def rank_main(
            rank: int,
            attempt: int = attempt,
            values: dict[int, bytes] = values,
            joined: threading.Barrier = joined,
        ) -> None:
            environment = task(tmp_path, rank)
            # nothing listens on that address
            with attempt_store.store_of_attempt(environment, TIMEOUT) as store:
                assert store is not None
                assert private_store.folder_of(environment)
                store.set(f"of/{rank}", str(attempt))
                values[rank] = store.get(f"of/{1 - rank}")
                joined.wait(patience.seconds(60))

        run_two(rank_main)
        assert values == dict.fromkeys(range(2), str(attempt).encode())
    (folder,) = (tmp_path / "runtime/shardtrain").iterdir()

    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_NODES": "2"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"WORLD_SIZE": "4"},  # set by a launcher within the step
        {"TORCHELASTIC_RUN_ID": "run"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"SHARDTRAIN_STORE": "address"},
    ],
)
def test_tasks_of_several_nodes_and_ranks_of_other_launchers_use_no_folder(
    change: dict[str, str], tmp_path: Path
) -> None:
    assert private_store.folder_of_step(task(tmp_path)) is not None

    environment = task(tmp_path, **change)
    assert private_store.folder_of_step(environment) is None
    assert private_store.folder_of({"SHARDTRAIN_STORE": "address"}) is None

    with attempt_store.store_of_attempt(environment, TIMEOUT) as store:
        assert store is None


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
)
def test_each_step_has_a_separate_folder(change: dict[str, str], tmp_path: Path) -> None:
    assert private_store.folder_of_step(task(tmp_path)) != private_store.folder_of_step(
        task(tmp_path, **change)
    )


def test_key_is_signed_with_its_length() -> None:
    """Key ``a`` with value ``b`` has a different signature than key ``ab`` without a value."""
    store = SignedStore(dist.HashStore(), b"key")
    assert store._seal("a", "\0b") != store._seal("a\0b", "")
