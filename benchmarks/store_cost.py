"""Cost of a private rendezvous for training steps, compared with a rendezvous that every local user can reach.

    python benchmarks/store_cost.py [--rounds 40] [--out benchmarks/results/store_cost_cpu.json]

Two pairs of ranks train the same small Llama with FSDP and a watchdog with a beat of two seconds. One pair
uses a private folder and gloo sockets in a separate network namespace, like ``shardtrain train``. The other
uses a TCPStore and gloo on the loopback interface. Blocks of steps alternate between the pairs in changing
order, so other load affects both. The result is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")

import torch
from processor import measurement_facts

from shardtrain.config.schema import Config
from shardtrain.distributed import process_group
from shardtrain.launch import environment
from shardtrain.metrics import Metrics
from shardtrain.resilience.watchdog.watchdog import beating
from shardtrain.train import trainer
from shardtrain.train.run import ReduceOverMesh, run_facts
from shardtrain.utils import private_network
from shardtrain.utils.activity import Phases

RANKS = 2
STEPS = 5
SHAPE = {
    "vocab_size": 2048,
    "dim": 256,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "ffn_dim": 768,
    "rope_theta": 500000.0,
}


def make_config(folder: str) -> Config:
    """Return the configuration of the benchmark."""
    config = Config()
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=folder),
        model=dataclasses.replace(config.model, overrides=SHAPE),
        training=dataclasses.replace(
            config.training,
            local_batch_size=2,
            seq_len=256,
            steps=10_000,
            mixed_precision_param="float32",
            device="cpu",
        ),
        parallelism=dataclasses.replace(config.parallelism, data_parallel_shard_degree=RANKS),
        metrics=dataclasses.replace(config.metrics, log_freq=10),
    )


def rank_main(rank: int, meeting: Path | int, names: dict[str, str], requests: Connection) -> None:
    """Run one rank. For each request of the parent, train a block of steps and send its seconds."""
    os.environ.update({**environment.rank_environment(rank, RANKS, meeting, "benchmark"), **names})
    # A port instead of a folder selects the plain pair, which uses PyTorch's TCPStore.
    if isinstance(meeting, int):
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        del os.environ["LOCAL_WORLD_SIZE"]
    private_network.enter_user_namespace()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder)
        phases = Phases()
        with process_group.join(config.comm, "cpu") as here, beating(config, here, phases):
            run = trainer.build(config, here)
            metrics = Metrics(config, Path(folder), run_facts(run, here), ReduceOverMesh(run.mesh))
            phases.begin("step")
            while requests.recv():
                begun = time.perf_counter()
                for _ in range(STEPS):
                    outcome = trainer.step(run)
                    assert outcome, "the data have ended"
                    trainer.update_metrics(run, metrics, outcome)
                    phases.begin("step")
                requests.send(time.perf_counter() - begun)
    os._exit(0)


def free_port() -> int:
    """Return an unused port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Print the ratio and store the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    pairs: dict[str, list[Connection]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        private_network.create_network_namespace() as network,
    ):
        if not network:
            raise SystemExit(
                "this system does not allow network namespaces, so the rendezvous would not be private"
            )
        places: dict[str, tuple[Path | int, dict[str, str]]] = {
            "private": (Path(folder), network),
            "plain": (free_port(), {}),
        }
        for name, (meeting, names) in places.items():
            pairs[name] = []
            for rank in range(RANKS):
                parent_end, rank_end = context.Pipe()
                arguments = (rank, meeting, names, rank_end)
                context.Process(target=rank_main, args=arguments, daemon=True).start()
                pairs[name].append(parent_end)
        seconds: dict[str, list[float]] = {name: [] for name in pairs}
        for number in range(options.rounds + 1):
            # Change the order of the pairs in each round, so drifting load affects both.
            order = list(pairs)
            if number % 2:
                order.reverse()
            for name in order:
                for rank_connection in pairs[name]:
                    rank_connection.send(True)
                # The slowest rank determines the time of a block.
                slowest = max(rank_connection.recv() for rank_connection in pairs[name])
                # Skip the first block, which allocates memory.
                if number:
                    seconds[name].append(slowest / STEPS)
        for pair in pairs.values():
            for rank_connection in pair:
                rank_connection.send(False)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["private"] / median["plain"]
    print(
        f"plain {median['plain'] * 1e3:.2f} ms  private {median['private'] * 1e3:.2f} ms a step  ratio {ratio:.3f}"
    )
    if options.out:
        result = {
            **measurement_facts(),
            "median_seconds_per_step": median,
            "ratio": ratio,
            "seconds_per_step": seconds,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
