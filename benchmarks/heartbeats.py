"""Cost of heartbeats for the host of the store and for the judging ranks, by number of ranks.

    python benchmarks/heartbeats.py [--ranks 512 4096 16384] [--per-node 8] [--beats 5]

The store is a separate process, like with torchrun. One process sends the heartbeats of every node
(``HeartbeatExchange.say`` and ``verdict``). The work of one judging rank is measured once and counted four
times. Prints requests per second and the share of a core of the store at the interval for that number of
nodes, and CPU seconds of a judging rank per beat (receive and judge). Nodes share connections, so the real
cost of the store is higher.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardtrain.resilience.watchdog import rank_heartbeat
from shardtrain.resilience.watchdog.exchange import HeartbeatExchange
from shardtrain.resilience.watchdog.hang_detector import HangDetector
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.resilience.watchdog.stragglers import common
from shardtrain.resilience.watchdog.watchdog import beat_seconds, monitors
from shardtrain.utils.activity import Mark

CONNECTIONS = 64


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Counted:
    """Connection that counts requests."""

    requests = 0

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        Counted.requests += 1
        return getattr(self._store, name)


def measure(ranks: int, per_node: int, beats: int) -> str:
    """Simulate the heartbeats of all nodes and one judging rank. Return the load of the store and of the rank."""
    parent_end, child_end = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(child_end,), daemon=True
    )
    server.start()
    port = parent_end.recv()
    stores = []
    for _ in range(CONNECTIONS):
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
        stores.append(Counted(store))
    nodes = math.ceil(ranks / per_node)
    assumed = beat_seconds(30, math.ceil(ranks / per_node))
    speakers = [
        HeartbeatExchange(stores[node % CONNECTIONS], node * per_node, ranks, assumed)
        for node in range(nodes)
    ]
    judging = HeartbeatExchange(stores[0], 0, ranks, assumed)
    judge = HangDetector(ranks, assumed, 300, 100)
    facts = "step 1234, 5046272 samples, order 9f8e7d6c5b4a3928"

    def sign(rank: int, beat: int) -> str:
        mark = Mark(100 * beat, facts, 1.5 * beat, 7, 4000 * beat + rank, 5000 * beat)
        marks = {100: mark, 1: mark}
        return rank_heartbeat.write(
            Heartbeat(beat, f"node{rank // per_node:04d}.cluster", 1234, "step", 40, 7, "all_reduce",
                      "train/trainer.py:123 in step", 30.0, marks=marks)
        )  # fmt: skip

    store_seconds = judge_seconds = 0.0
    Counted.requests = num_requests = 0
    for beat in range(beats + 1):  # skip the first beat, in which every rank registers
        texts = []
        for node in range(nodes):
            ranks_of_node = range(node * per_node, (node + 1) * per_node)
            signs_of_node = ",".join(f'"{rank}":{sign(rank, beat)}' for rank in ranks_of_node)
            texts.append(f"{{{signs_of_node}}}")

        # All nodes send.
        before = cpu_seconds(server.pid or 0)
        requests = Counted.requests
        for speaker, text in zip(speakers, texts, strict=True):
            speaker._post(text)
            speaker.verdict()
        send_seconds = cpu_seconds(server.pid or 0) - before
        send_requests = Counted.requests - requests

        # One rank receives and judges. Several do in a real run.
        before = cpu_seconds(server.pid or 0)
        requests = Counted.requests
        begun = time.process_time()
        signs = judging.receive()
        judge.observe(time.monotonic(), signs)
        common(signs, ranks, 0)
        if beat:
            judge_seconds += time.process_time() - begun
            count = len(monitors(ranks))
            store_seconds += send_seconds + count * (cpu_seconds(server.pid or 0) - before)
            num_requests += send_requests + count * (Counted.requests - requests)
    parent_end.send(None)

    total_seconds = beats * assumed
    return (
        f"{ranks} ranks, {nodes} nodes, a beat of {assumed:.1f} s: {num_requests / total_seconds:.0f} requests/s, "
        f"store {100 * store_seconds / total_seconds:.1f} % of a core; the judging rank uses "
        f"{judge_seconds / beats:.2f} CPU s per beat ({100 * judge_seconds / total_seconds:.0f} % of a core)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--beats", type=int, default=5)
    options = parser.parse_args()
    for ranks in options.ranks:
        print(measure(ranks, options.per_node, options.beats), flush=True)


if __name__ == "__main__":
    main()
