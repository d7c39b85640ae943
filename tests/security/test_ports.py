"""The table of ports in SECURITY.md lists all that listens: each mode runs, and every listener is compared with it."""

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
"""Not the first address of the loopback interface, which gloo uses."""
OF_THE_NODE = "127.0.0.10"
"""``SHARDTRAIN_LOCAL_ADDR`` in the mode that sets it."""


@dataclass(frozen=True)
class Mode:
    """Commands that make one run, and the words of the table for what is seen of them.

    Attributes:
        commands: makes the commands from the port of the rendezvous.
        root: the word for a process that a command starts.
        gloo_address: the word for 127.0.0.1.
        variables: environment of each command.
        port: the word for the port that ``commands`` gets.
    """

    commands: Callable[[int], Sequence[list[str]]]
    root: str
    gloo_address: str
    variables: Callable[[int, int], dict[str, str]] = field(default=lambda number, port: {})
    port: str = "that of the rendezvous"


def train(*words: str) -> list[str]:
    return [*SHARDTRAIN, "train", *words]


def nodes(count: str) -> Callable[[int], Sequence[list[str]]]:
    return lambda port: [
        train(f"--nnodes={count}", f"--node_rank={number}", "--nproc=1", f"--rdzv_endpoint={RENDEZVOUS}:{port}")
        for number in (0, 1)
    ]


def task_of_srun(number: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": RENDEZVOUS, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", **place}


def prometheus(port: int) -> Sequence[list[str]]:
    return [train("--nproc=2", f"--metrics.prometheus_port={port}")]


def torchrun(port: int) -> Sequence[list[str]]:
    words = ["--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={RENDEZVOUS}:{port}", "--rdzv-id=run"]
    return [[sys.executable, "-m", "torch.distributed.run", *words, "-m", "shardtrain", "train"]]


WORKERS = "--training.dataloader.num_workers=1"
TRACKERS = [
    f"--metrics.enable_{name}=true" for name in ("tensorboard", "mlflow", "trackio") if importlib.util.find_spec(name)
]
ONE_MACHINE = "loopback"
OF_NODE = "the node's interface"
MODES = {
    "one process": Mode(lambda _: [train("--nproc=1")], "launcher", ONE_MACHINE),
    "one process, with trackers": Mode(lambda _: [train("--nproc=1", *TRACKERS)], "launcher", ONE_MACHINE),
    "ranks of one machine": Mode(lambda _: [train("--nproc=2")], "launcher", ONE_MACHINE),
    "ranks of one machine, with data workers": Mode(lambda _: [train("--nproc=2", WORKERS)], "launcher", ONE_MACHINE),
    "the same in the common network": Mode(lambda _: [train("--nproc=2")], "launcher", ONE_MACHINE),
    "`metrics.prometheus_port`": Mode(prometheus, "launcher", ONE_MACHINE, port="that of the option"),
    "`--nnodes`": Mode(nodes("2"), "agent", OF_NODE),
    "`--nnodes`, elastic": Mode(nodes("1:2"), "agent", OF_NODE),
    "`--nnodes`, with an address of the node": Mode(
        nodes("2"), "agent", OF_NODE, lambda number, port: {"SHARDTRAIN_LOCAL_ADDR": OF_THE_NODE}
    ),
    "`srun` on several nodes": Mode(lambda _: [train(), train()], "rank", OF_NODE, task_of_srun),
    "`torchrun`": Mode(torchrun, "torchrun", ONE_MACHINE),
}
"""Each name is the mode of a row of the table, with a variant after a comma."""
DEFAULT = ["one process", "ranks of one machine", "the same in the common network", "`--nnodes`"]
IN_A_NETWORK_OF_THEIR_OWN = [
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
    """The address of a line of ``/proc/net/tcp``, which has it as 32-bit words of the machine."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def seen(mode: Mode, folder: Path) -> set[tuple[str, str, str]]:
    """Run a mode; return process, address and port of each listener in the words of the table."""
    port = free_port()
    inherited = listeners({os.getpid()})
    result = set()
    names = {k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "NCCL_", "MASTER_"))}
    with contextlib.ExitStack() as stack:
        runs = []
        for number, command in enumerate(mode.commands(port)):
            variables = {**names, **mode.variables(number, port)}
            output = stack.enter_context((folder / f"output-{number}").open("w"))
            runs.append(
                forked.Popen([*command, *options(folder)], env=variables, stdout=output, stderr=subprocess.STDOUT)
            )
            stack.callback(runs[-1].kill)
        end = time.monotonic() + patience.seconds(120)
        while any(run.poll() is None for run in runs):
            assert time.monotonic() < end, "does not end"
            for run in runs:
                children = processes_of(run.pid) - {run.pid}
                for process, pids in ((mode.root, {run.pid}), ("rank", children)):
                    for digits, listens_on in listeners(pids) - inherited:
                        where = address_of(digits)
                        words = {
                            RENDEZVOUS: "that of the rendezvous",
                            OF_THE_NODE: "that of the node",
                            "127.0.0.1": mode.gloo_address,
                        }
                        address = words.get(where, "all" if where in ("0.0.0.0", "::") else where)
                        result.add((process, address, mode.port if listens_on == port else "random"))
            time.sleep(0.02)
    assert not any(run.returncode for run in runs), (folder / "output-0").read_text()
    return result


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def table() -> list[dict[str, str]]:
    """The rows of the table of ports."""
    text = (ROOT / "docs/SECURITY.md").read_text(encoding="utf-8")
    head, _, *rows = text[text.index("| Mode | Process |") :].partition("\n\n")[0].splitlines()
    return [dict(zip(cells(head), cells(row), strict=True)) for row in rows]


def mode_of(name: str) -> str:
    return name.partition(",")[0]


@pytest.mark.parametrize("name", cases(DEFAULT, nightly=[name for name in MODES if name not in DEFAULT]))
def test_each_mode_listens_where_the_table_says_and_nowhere_else(name, tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if name == "the same in the common network":
        monkeypatch.setattr(private_network, "_create", lambda: None)
    elif name in IN_A_NETWORK_OF_THEIR_OWN:
        if "prometheus" in name:
            pytest.importorskip("prometheus_client")
        with private_network.create_network_namespace() as names:
            if not names:
                pytest.skip("this system has no network namespaces for users: the common network is tested")
    rows = [row for row in table() if row["Mode"] == mode_of(name)]
    expected = {(row["Process"], row["Address"], row["Port"]): row["How long"] for row in rows}
    expected.pop(("none", "", ""), None)
    found = seen(MODES[name], tmp_path)
    assert found <= set(expected), "a listener that SECURITY.md does not name"
    assert {one for one in expected if not expected[one].startswith("an instant")} <= found


def test_each_row_of_the_table_has_a_mode_that_runs():
    assert {row["Mode"] for row in table()} == {*map(mode_of, MODES), *NOT_RUN}


def test_a_listener_of_each_kind_would_be_seen():
    """IPv4, IPv6 and all addresses, as the kernel lists them."""
    inherited = listeners({os.getpid()})
    families = {"127.0.0.9": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::1": socket.AF_INET6, "::": socket.AF_INET6}
    with contextlib.ExitStack() as stack:
        for address, family in families.items():
            stack.enter_context(socket.create_server((address, 0), family=family))
        found = {address_of(digits) for digits, _ in listeners({os.getpid()}) - inherited}
    assert found == set(families)
