"""The table of ports in SECURITY.md lists every listener of every launch mode."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import forked
import patience
import pytest
from listening import listeners, processes_of
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain.utils import private_network

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SHARDTRAIN = [sys.executable, "-m", "shardtrain"]
RENDEZVOUS = "127.0.0.9"
"""A loopback address other than 127.0.0.1, which gloo uses."""
OF_THE_NODE = "127.0.0.10"
"""``SHARDTRAIN_LOCAL_ADDR`` in the mode that sets it."""


@dataclass(frozen=True)
class Mode:
    """The commands of one run, and the terms that the table uses for their processes and addresses.

    Attributes:
        commands: Function from the port of the rendezvous to the commands.
        root: Term for the process that a command starts.
        gloo_address: Term for 127.0.0.1.
        variables: Function from the number of a command and the port to additional environment variables.
        port: Term for the port that ``commands`` receives.
    """

    commands: Callable[[int], Sequence[list[str]]]
    root: str
    gloo_address: str
    variables: Callable[[int, int], dict[str, str]] = field(default=lambda number, port: {})
    port: str = "that of the rendezvous"


def train(*arguments: str) -> list[str]:
    return [*SHARDTRAIN, "train", *arguments]


def nodes(count: str) -> Callable[[int], Sequence[list[str]]]:
    def commands(port: int) -> list[list[str]]:
        options = [f"--nnodes={count}", "--nproc=1", f"--rdzv_endpoint={RENDEZVOUS}:{port}"]
        return [train(*options, f"--node_rank={number}") for number in (0, 1)]

    return commands


def task_of_srun(number: int, port: int) -> dict[str, str]:
    rendezvous = {"MASTER_ADDR": RENDEZVOUS, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", **rendezvous}


def prometheus(port: int) -> Sequence[list[str]]:
    return [train("--nproc=2", f"--metrics.prometheus_port={port}")]


def torchrun(port: int) -> Sequence[list[str]]:
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={RENDEZVOUS}:{port}", "--rdzv-id=run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *rendezvous]
    return [[*command, "-m", "shardtrain", "train"]]


WORKERS = "--training.dataloader.num_workers=1"
TRACKERS = [
    f"--metrics.enable_{name}=true"
    for name in ("tensorboard", "mlflow", "trackio")
    if importlib.util.find_spec(name)
]
ONE_MACHINE = "loopback"
OF_NODE = "the node's interface"
MODES = {
    "one process": Mode(lambda _: [train("--nproc=1")], "launcher", ONE_MACHINE),
    "one process, with trackers": Mode(
        lambda _: [train("--nproc=1", *TRACKERS)], "launcher", ONE_MACHINE
    ),
    "ranks of one machine": Mode(lambda _: [train("--nproc=2")], "launcher", ONE_MACHINE),
    "ranks of one machine, with data workers": Mode(
        lambda _: [train("--nproc=2", WORKERS)], "launcher", ONE_MACHINE
    ),
    "the same in the common network": Mode(lambda _: [train("--nproc=2")], "launcher", ONE_MACHINE),
    "`metrics.prometheus_port`": Mode(
        prometheus, "launcher", ONE_MACHINE, port="that of the option"
    ),
    "`--nnodes`": Mode(nodes("2"), "agent", OF_NODE),
    "`--nnodes`, elastic": Mode(nodes("1:2"), "agent", OF_NODE),
    "`--nnodes`, with an address of the node": Mode(
        nodes("2"), "agent", OF_NODE, lambda number, port: {"SHARDTRAIN_LOCAL_ADDR": OF_THE_NODE}
    ),
    "`srun` on several nodes": Mode(lambda _: [train(), train()], "rank", OF_NODE, task_of_srun),
    "`torchrun`": Mode(torchrun, "torchrun", ONE_MACHINE),
}
"""Names are modes of the table, with an optional variant after a comma."""
DEFAULT = ["one process", "ranks of one machine", "the same in the common network", "`--nnodes`"]
IN_A_PRIVATE_NETWORK = [
    name for name in MODES if name.startswith(("ranks of one machine", "`metrics.prometheus_port`"))
]
NOT_RUN = {"GPUs (NCCL)": "no GPU here; from NCCL's documentation"}


def options(folder: Path) -> list[str]:
    values = {
        "job.dump_folder": folder / "outputs", "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.local_batch_size": 1, "training.seq_len": 32, "training.steps": 10,
        "lr_scheduler.warmup_steps": 1, "model.overrides.num_layers": 1,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


def address_of(digits: str) -> str:
    """Return the address of a line of ``/proc/net/tcp``, where it is a sequence of 32-bit words in host byte order."""
    groups = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(groups))
    return str(getattr(address, "ipv4_mapped", None) or address)


def seen(mode: Mode, folder: Path) -> set[tuple[str, str, str]]:
    """Run a mode. Return the process, address and port of each listener in the terms of the table."""
    port = free_port()
    inherited = listeners({os.getpid()})
    terms = {
        RENDEZVOUS: "that of the rendezvous",
        OF_THE_NODE: "that of the node",
        "127.0.0.1": mode.gloo_address,
        "0.0.0.0": "all",
        "::": "all",
    }
    result = set()

    def add_listeners(process: str, pids: set[int]) -> None:
        for digits, listening_port in listeners(pids) - inherited:
            address = address_of(digits)
            result.add(
                (
                    process,
                    terms.get(address, address),
                    mode.port if listening_port == port else "random",
                )
            )

    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "NCCL_", "MASTER_"))
    }
    with contextlib.ExitStack() as stack:
        runs = []
        for number, command in enumerate(mode.commands(port)):
            variables = {**environment, **mode.variables(number, port)}
            output = stack.enter_context((folder / f"output-{number}").open("w"))
            arguments = [*command, *options(folder)]
            runs.append(
                forked.Popen(arguments, env=variables, stdout=output, stderr=subprocess.STDOUT)
            )
            stack.callback(runs[-1].kill)
        end = time.monotonic() + patience.seconds(120)
        while any(run.poll() is None for run in runs):
            assert time.monotonic() < end, "the run does not end"
            for run in runs:
                add_listeners(mode.root, {run.pid})
                add_listeners("rank", processes_of(run.pid) - {run.pid})
            time.sleep(0.02)
    assert not any(run.returncode for run in runs), (folder / "output-0").read_text()
    return result


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def table() -> list[dict[str, str]]:
    """Return the rows of the table of ports in SECURITY.md."""
    text = (ROOT / "docs/SECURITY.md").read_text(encoding="utf-8")
    head, _, *rows = text[text.index("| Mode | Process |") :].partition("\n\n")[0].splitlines()
    return [dict(zip(cells(head), cells(row), strict=True)) for row in rows]


def mode_of(name: str) -> str:
    return name.partition(",")[0]


@pytest.mark.parametrize(
    "name", cases(DEFAULT, nightly=[name for name in MODES if name not in DEFAULT])
)
def test_each_mode_has_exactly_the_listeners_of_the_table(name, tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if name == "the same in the common network":
        monkeypatch.setattr(private_network, "_create", lambda: None)
    elif name in IN_A_PRIVATE_NETWORK:
        if "prometheus" in name:
            pytest.importorskip("prometheus_client")
        with private_network.create_network_namespace() as names:
            if not names:
                pytest.skip(
                    "this system has no network namespaces for users; another mode tests the common network"
                )
    rows = [row for row in table() if row["Mode"] == mode_of(name)]
    expected = {(row["Process"], row["Address"], row["Port"]): row["How long"] for row in rows}
    expected.pop(("none", "", ""), None)
    actual = seen(MODES[name], tmp_path)

    assert actual <= set(expected), "SECURITY.md does not list a listener"

    # A listener that exists for an instant may be missed.
    for listener, how_long in expected.items():
        if not how_long.startswith("an instant"):
            assert listener in actual


def test_each_row_of_the_table_has_a_mode_that_runs():
    assert {row["Mode"] for row in table()} == {*map(mode_of, MODES), *NOT_RUN}


def test_listeners_of_every_kind_are_detected():
    """IPv4, IPv6 and wildcard addresses."""
    inherited = listeners({os.getpid()})
    families = {
        "127.0.0.9": socket.AF_INET,
        "0.0.0.0": socket.AF_INET,
        "::1": socket.AF_INET6,
        "::": socket.AF_INET6,
    }
    with contextlib.ExitStack() as stack:
        for address, family in families.items():
            stack.enter_context(socket.create_server((address, 0), family=family))
        addresses = {address_of(digits) for digits, _ in listeners({os.getpid()}) - inherited}

    assert addresses == set(families)
