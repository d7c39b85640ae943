"""The agent of one node of several: PyTorch's elastic agent as a library, in the process that the platform started.

torchrun would do the same and answer every failure, and every request to stop, with 1. Here the status of the ranks is
that of the node (75: saved and asked to stop), a failure that would come again is not tried again, and SIGUSR1, which
Slurm sends to every process of a step, is a request to stop.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardtrain import __version__
from shardtrain.config.command_line import CommandLine, split
from shardtrain.config.schema import Config
from shardtrain.launch import addresses, environment
from shardtrain.launch.failure import NOT_SAVED, PEER, PREEMPTED, SUPERVISED
from shardtrain.launch.job import NOTICE_SECONDS
from shardtrain.launch.nodes import Nodes, choose_processes_here
from shardtrain.launch.nodes import find as nodes_of_platform
from shardtrain.launch.restart import RESTARTABLE
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import SECRET

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from shardtrain.config import Loaded

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
LOOK_SECONDS = 0.1


def train(loaded: Loaded, arguments: CommandLine, nodes: Nodes, require: Callable[[int | None, int], None]) -> int:
    """Run this node's share of a training; gives its exit status.

    ``require`` stops unless the run would begin here, with so many ranks in all and on this node.

    Raises:
        ConfigError: the configuration does not work on these nodes, or the port of the rendezvous is taken.
        PeerError: too few nodes came in time, or the one that hosts the rendezvous is gone.
    """
    environment.set_allocator_default(os.environ)
    choice = choose_processes_here(loaded.config, arguments.nproc, nodes)
    # of an elastic run nobody knows how many nodes will come
    world_size = choice.count * nodes.most if nodes.least == nodes.most else None
    require(world_size, choice.count)
    environment.set_process_defaults(os.environ, choice.count, environment.usable_cores(), alone=False)
    number = "" if nodes.node_rank is None else f" {nodes.node_rank}"
    print(
        f"shardtrain {__version__}: node{number} of {nodes.reason.partition('=')[2]} ({nodes.reason.partition('=')[0]})"
        f" with {choice.count} processes ({choice.reason}), meeting at {nodes.endpoint}",
        file=sys.stderr,
        flush=True,
    )
    words = ["train", *([arguments.path] if arguments.path else []), *arguments.overrides]
    return run(nodes, choice.count, words, loaded.config.checkpoint.grace_seconds)


def run_verb(
    verb: str, words: Sequence[str], config: Config, nproc: int | None, arguments: CommandLine | None = None
) -> int | None:
    """Run this node's share of a verb other than training; None where it is the only one. Raises as ``train``."""
    several = nodes_of_platform(arguments or split([]), os.environ)
    if several is None:
        return None
    choice = choose_processes_here(config, nproc, several)
    return run(several, choice.count, [verb, *words], grace_seconds=0)


def run(nodes: Nodes, ranks: int, command: Sequence[str], grace_seconds: int) -> int:
    """Start ``ranks`` ranks of ``command`` here, when enough nodes have come; gives the status of this node."""
    # until ranks run there is nothing to save, and PyTorch's wait for the rendezvous would hear no handler of Python's
    # (but the first process of a container dies of no signal that it does not handle)
    end = signal.SIG_DFL if os.getpid() != 1 else lambda *_: os._exit(NOT_SAVED)
    heard = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]  # nohup's
    before = {name: signal.signal(getattr(signal, name), end) for name in heard}
    # before the import of PyTorch, which takes seconds: a port that is taken is reported at once
    if nodes.hosts_meeting:
        _refuse_taken(nodes.endpoint)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStateError

    # after the import, which the host of the meeting does at the same time
    if nodes.hosts_meeting is False:
        _await_host(nodes)
    nodes = _with_address(nodes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # every failure is reported by its rank
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    os.environ[SUPERVISED] = "1"
    if nodes.least < nodes.most:
        # or the first round alone publishes where its store is, and a node that joins a later one waits for ever
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory(prefix="shardtrain-") as records:
        try:
            agent = _agent(nodes, ranks, command, grace_seconds, records)
            result = agent.run()
            return status_of([one.exitcode for one in result.failures.values()])
        except SignalException:
            return status_of(_left(agent))
        except RendezvousError as error:
            rule = f"of {nodes.least} nodes did not happen within {nodes.join_seconds} s, or its host is gone"
            reason = f"({type(error).__name__})"
            fix = "are all nodes up, and is the port open between them?"
            if isinstance(error, RendezvousStateError):
                rule = "was disturbed:"
                reason = str(error)
                fix = f"give all nodes the same {SECRET}, or look for who else reaches that port"
            raise PeerError(f"the meeting at {nodes.endpoint} {rule} {reason}; {fix}") from None
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)


def _with_address(nodes: Nodes) -> Nodes:
    """Say how the others reach this node, where nobody has: PyTorch would tell them a name, which they may not resolve.

    Ranks that talk by gloo get the interface of that address; it would look up the same name.
    """
    address = nodes.local_address
    if address is None:
        address = addresses.toward(nodes.endpoint.rpartition(":")[0])
        if address is None or addresses.is_loopback(address):
            return nodes  # the others may be elsewhere: only this node knows itself by that
    interface = addresses.interface_of(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return replace(nodes, local_address=address)


def _refuse_taken(endpoint: str) -> None:
    """Stop where another program listens on the port that this node should serve."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(endpoint.rpartition(":")[2])))
        except OSError as error:
            rule = f"cannot be served from this host: {error.strerror}"
            fix = "choose another port, or end the program that has it"
            raise ConfigError(Problem("rendezvous", endpoint, rule, fix)) from None


def _await_host(nodes: Nodes) -> None:
    """Wait until something listens where the nodes meet: PyTorch's own wait hears no signal, and is 60 s at most."""
    host, _, port = nodes.endpoint.rpartition(":")
    end = time.monotonic() + nodes.join_seconds
    why = ""
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, ValueError) as error:
            why = str(error)
        time.sleep(LOOK_SECONDS)
    rule = f"nothing answers there after {nodes.join_seconds} s ({why})"
    raise PeerError(f"the nodes cannot meet at {nodes.endpoint}: {rule}; is the first node up, and its port open?")


def status_of(codes: Sequence[int]) -> int:
    """The status of a node whose ranks left with ``codes``: a cause of their own before a lost peer before a request.

    >>> status_of([75, 75]), status_of([1, 76]), status_of([-9, 75]), status_of([0, 0])
    (75, 1, 6, 0)
    """
    causes = [code for code in codes if code > 0 and code not in (PEER, PREEMPTED, NOT_SAVED)]
    if causes:
        return max(causes)
    return PEER if any(code < 0 or code == PEER for code in codes) else max(codes, default=0)


def _left(agent: LocalElasticAgent) -> list[int]:
    """Statuses of the ranks that the agent has just ended; 76 for one that was killed or never began."""
    context: Any = getattr(agent, "_pcontext", None)
    handlers = getattr(context, "subprocess_handlers", {})
    codes = [handler.proc.poll() for handler in handlers.values()]
    return [NOT_SAVED if code is None or code < 0 else code for code in codes] or [NOT_SAVED]


def _agent(nodes: Nodes, ranks: int, command: Sequence[str], grace_seconds: int, records: str) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from shardtrain.launch import signed_meeting

    # in a job of Slurm the end of its time is one that ranks know of by themselves
    is_elastic = nodes.least < nodes.most and "SLURM_JOB_END_TIME" not in os.environ

    class Agent(LocalElasticAgent):
        """Gives up at once where a new attempt would end as the last, or where the ranks were asked to stop.

        In an elastic run ranks also stop because another node is asked to go, or has come: those of a node that was
        asked nothing itself (it would not be here then) have saved with the others, and continue with who is there.
        """

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            codes = [one.exitcode for one in result.failures.values()] if result.is_failed() else []
            if codes and is_elastic and set(codes) <= {PREEMPTED, NOT_SAVED}:
                self._remaining_restarts += 1  # spent by PyTorch for this: nothing has failed
            elif codes and status_of(codes) not in RESTARTABLE:
                self._remaining_restarts = 0
            return result

    # else PyTorch compares names of hosts, which may be other ones inside a container
    host = {} if nodes.hosts_meeting is None else {"is_host": str(nodes.hosts_meeting).lower()}
    settings: dict[str, Any] = {"join_timeout": nodes.join_seconds, **host, **nodes.rendezvous}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=nodes.endpoint,
        run_id=nodes.run_id,
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        local_addr=nodes.local_address,
        **settings,
    )
    spec = WorkerSpec(
        role="shardtrain",
        local_world_size=ranks,
        entrypoint=sys.executable,
        # PyTorch replaces ${local_rank} in arguments, and two dollars by one
        args=("-m", "shardtrain", *(word.replace("$", "$$") for word in command)),
        rdzv_handler=signed_meeting.handler(parameters),
        max_restarts=nodes.max_restarts,
        local_addr=nodes.local_address,
    )
    logs = DefaultLogsSpecs(log_dir=records)
    more: dict[str, Any] = {}
    # newer versions of PyTorch alone let ranks have more than 30 s for their last save
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters:
        more["shutdown_timeout"] = grace_seconds + NOTICE_SECONDS
    return Agent(spec, logs, **more)
