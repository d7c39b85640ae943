"""A run on one machine is unreachable from other machines: every listening socket has a loopback address."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import patience
import pytest
from hostile_files import Bomb
from listening import listeners, processes_of
from tiny import text_file
from torch.distributed import DistError, TCPStore

from shardtrain.utils import private_network

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LOOPBACK = {"0100007F", "0" * 24 + "01000000"}
IPV4_IN_6 = "0000000000000000FFFF00000100007F"


def is_loopback(address: str) -> bool:
    return address in (*LOOPBACK, IPV4_IN_6)


def watch(command: list[str], folder: Path, attack: bool = False) -> set[tuple[str, int]]:
    """Run a command. Return the addresses of all its listeners. ``attack`` sends a pickle to those of its parent."""
    seen: set[tuple[str, int]] = set()
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "NCCL_", "MASTER_"))
    }
    canary = folder / "canary"
    attacked = set()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + patience.seconds(120)
            while process.poll() is None:
                assert time.monotonic() < deadline
                seen |= listeners(processes_of(process.pid))
                # do not attack ranks: foreign bytes on a socket of gloo would only end the run
                for address, port in listeners({process.pid}) - attacked if attack else ():
                    attacked.add((address, port))
                    set_pickle(port, canary)
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, (folder / "output").read_text()
    assert not canary.exists()
    return seen


def set_pickle(port: int, canary: Path) -> None:
    """Set torchrun's rendezvous key to a pickle, which used to run code in its agent."""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
        for key in ("torch.rendezvous.none", "/torch.rendezvous.none"):
            store.set(key, pickle.dumps(Bomb(canary)))
    except (DistError, RuntimeError, OSError):
        pass  # a socket of gloo, not a store


def train_options(folder: Path, **more: object) -> list[str]:
    options = {
        "job.dump_folder": folder / "outputs", "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.local_batch_size": 1, "training.seq_len": 32, "training.steps": 10,
        "lr_scheduler.warmup_steps": 1, **more,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.mark.nightly(
    "without workers",
    by="tests/launch/test_local.py::test_nothing_listens_beyond_the_loopback_address",
)
def test_ranks_with_workers_only_listen_on_loopback(tmp_path: Path) -> None:
    more = {"training.dataloader.num_workers": 1}
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "--nproc",
        "2",
        *train_options(tmp_path, **more),
    ]
    seen = watch(command, tmp_path, attack=True)
    with private_network.create_network_namespace() as names:
        assert bool(seen) is not bool(names), (
            "gloo's listeners are visible exactly if there is no private network"
        )

    for address, _ in seen:
        assert is_loopback(address), seen


def test_preparing_data_listens_nowhere(tmp_path: Path) -> None:
    source = ["--training.dataset", "text", "--training.dataset_path", text_file()]
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "data",
        "prepare",
        "--output",
        str(tmp_path / "x"),
        *source,
    ]

    assert not watch([*command, "--processes", "2"], tmp_path)


def test_wildcard_listener_is_detected() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert ("00000000", server.getsockname()[1]) in listeners({os.getpid()})
        assert not is_loopback("00000000")
        assert not is_loopback("0" * 32)
