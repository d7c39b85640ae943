"""Cost of starting N ranks until they build their model: rendezvous, agreement and process groups.

    python benchmarks/startup.py [--ranks 64 256 512] [--per-node 8] [--out FILE]

Forks real ranks that execute the start of ``shardtrain train`` up to building the model, like ranks started
by torchrun on nodes of ``--per-node`` ranks. They rendezvous in the agents' TCPStore (a separate process
here), compare their configurations, join the gloo process group, open their logs, create the mesh (N / 8) x
8 with its groups, and run the collectives that agree on facts read by rank 0. Not included are the start of
interpreters, loading the configuration and weights, and the watchdog (see heartbeats.py). Forked ranks
share loaded memory, so 512 of them take about 7 GiB.
Pairs connect lazily at every N, as in runs with more than 128 ranks.

Each rank counts its requests to the store. Prints for each N: requests of the median rank, of all ranks but
the first, and of rank 0, which answers all others and sends at most about 700 requests per second while it
waits; CPU seconds of the store per request, and of the median rank and rank 0; and the maximum sockets and
private memory of a rank. The last lines show the best-fitting growth law,
and its prediction for 4,096 and 16,384 ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processor import processor_facts

from shardtrain import config as configs
from shardtrain import distributed
from shardtrain.checkpoint.collectives import first_rank, gather_distinct_json
from shardtrain.distributed import config_consistency, process_group
from shardtrain.distributed.rendezvous import attempt_store
from shardtrain.distributed.rendezvous.signed_store import SignedStore
from shardtrain.train import model_check, run_folder

ASKED = (4096, 16384)


def sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Counted(SignedStore):
    """Store that counts requests. A call with several keys counts as one request per key."""

    asked = 0


def _counting(name: str) -> Any:
    forward = getattr(SignedStore, name)

    def method(self: Counted, *arguments: Any) -> Any:
        first = arguments[0]
        Counted.asked += (
            len(first) if isinstance(first, list | tuple) and name != "multi_set" else 1
        )
        return forward(self, *arguments)

    return method


for _name in ("set", "get", "multi_get", "compare_set", "add", "check", "wait", "delete_key"):
    setattr(Counted, _name, _counting(_name))


def loaded_for(size: int, folder: str) -> Any:
    """Load and check the configuration once for all ranks: its cost per rank does not depend on N."""
    arguments = [
        f"--job.dump_folder={folder}", "--training.device=cpu", "--model.hf_assets_path=bytes",
        f"--parallelism.tensor_parallel_degree={min(8, size)}", "--metrics.enable_tensorboard=false",
        "--comm.init_timeout_seconds=900", "--training.local_batch_size=8",
    ]  # fmt: skip
    loaded = configs.load("debug", arguments)
    configs.require(loaded, size, "cpu", None)
    return loaded


def rank_main(
    rank: int, size: int, per_node: int, port: int, loaded: Any, sender: Any, release: Any
) -> None:
    """Run one rank up to the point at which it would build its model."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node), "GROUP_RANK": str(rank // per_node), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "startup",
        "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.set_num_threads(1)
    attempt_store.signed = lambda store, environment, attempt: Counted(store, b"benchmark")
    null = os.open(os.devnull, os.O_WRONLY)
    # With so many ranks on one machine, gloo logs warnings about full queues and retries.
    for stream in (1, 2):
        os.dup2(null, stream)
    began = time.process_time()

    def check_ranks(store: dist.Store, rank: int, size: int) -> None:
        config_consistency.check(loaded.config, store, rank, size)
        model_check.check(loaded.config, store, rank, size)

    with process_group.join(loaded.config.comm, "cpu", check_ranks) as world:
        run_folder.open_log(loaded, world, (), ())
        mesh = distributed.build(loaded.config, world)
        told = first_rank(lambda: {"kernels": "measured by the first rank"})
        gather_distinct_json("0123456789abcdef")  # stands for the fingerprint of the data
        assert told
        assert mesh.size("dp_shard", "tp") == size
        sender.send((Counted.asked, sockets(), time.process_time() - began, private_bytes()))
        release.wait()
        os._exit(0)


def serve(pipe: Any) -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=900)
    )
    pipe.send(store.port)
    pipe.recv()


def measure(size: int, per_node: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe()
    server = context.Process(target=serve, args=(child_end,), daemon=True)
    server.start()
    port = parent_end.recv()
    release = context.Event()
    pipes = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        loaded = loaded_for(size, folder)
        gc.collect()
        gc.freeze()  # keep the garbage collector from writing to, and so unsharing, inherited memory
        for rank in range(size):
            receiver, sender = context.Pipe(False)
            arguments = (rank, size, per_node, port, loaded, sender, release)
            context.Process(target=rank_main, args=arguments, daemon=True).start()
            sender.close()
            pipes.append(receiver)
        asked, counts, seconds, memory = zip(*(pipe.recv() for pipe in pipes), strict=True)
        store = cpu_seconds(server.pid or 0)
        release.set()
        for process in multiprocessing.active_children():
            if process is not server:
                process.join(60)
    parent_end.send(None)
    server.join(60)
    return {
        "ranks": size,
        "requests_of_a_rank_median": statistics.median(asked),
        "requests_of_the_first_rank": asked[0],
        "requests_of_all_others": sum(asked[1:]),
        "store_cpu_microseconds_a_request": round(1e6 * store / max(1, sum(asked)), 1),
        "rank_cpu_seconds_median": round(statistics.median(seconds), 3),
        "rank_cpu_seconds_first": round(seconds[0], 3),
        "sockets_of_a_rank_most": max(counts),
        "private_mib_of_a_rank_median": round(statistics.median(memory) / 2**20, 1),
        "seconds": round(time.monotonic() - begun, 1),
    }


def fitted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit each growth law through the smallest and largest N.

    Return the laws, sorted by their error at the values of N in between.
    """
    laws = {"N": lambda n: n, "N log N": lambda n: n * math.log2(n), "N^2": lambda n: n * n}
    first = rows[0]
    last = rows[-1]
    found = []
    for name, law in laws.items():
        slope = (last["requests_of_all_others"] - first["requests_of_all_others"]) / (
            law(last["ranks"]) - law(first["ranks"])
        )
        start = last["requests_of_all_others"] - slope * law(last["ranks"])
        errors = [
            abs(start + slope * law(row["ranks"]) - row["requests_of_all_others"]) for row in rows
        ]
        asked = {str(n): round(start + slope * law(n)) for n in ASKED}
        found.append(
            {"law": name, "misses_by_at_most": round(max(errors)), "requests_of_all_others": asked}
        )
    return sorted(found, key=lambda one: one["misses_by_at_most"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for size in arguments.ranks:
        rows.append(measure(size, arguments.per_node))
        print(json.dumps(rows[-1]), flush=True)
    laws = fitted(rows) if len(rows) > 2 else []
    for law in laws:
        print(json.dumps(law))
    if arguments.out:
        facts = {
            "processor": processor_facts(),
            "torch": torch.__version__,
        }
        arguments.out.write_text(json.dumps({**facts, "rows": rows, "laws": laws}, indent=1) + "\n")


if __name__ == "__main__":
    main()
