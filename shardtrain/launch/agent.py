"""Agent of one node of a multi-node run: PyTorch's elastic agent, in the process that the platform started.

torchrun exits with 1 after every failure and every request to stop. This agent exits with the status of the
ranks (75: stopped on request and saved), and does not retry a failure that would recur. It treats SIGUSR1,
which Slurm sends to every process of a step, as a request to stop.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardtrain import __version__
from shardtrain.checkpoint import snapshot_folder
from shardtrain.config.command_line import CommandLine, split
from shardtrain.config.schema import Config
from shardtrain.launch import addresses, environment, greeting, local
from shardtrain.launch.child_watch import POLL_SECONDS
from shardtrain.launch.failure import NOT_SAVED, PEER, PREEMPTED, SUPERVISED
from shardtrain.launch.job import NOTICE_SECONDS
from shardtrain.launch.nodes import Nodes, choose_processes_here, count_nodes
from shardtrain.launch.nodes import find as nodes_of_platform
from shardtrain.launch.run_ends import BEFORE_FIRST_STEP
from shardtrain.launch.seal import Seal
from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS
from shardtrain.utils import python_child, stop_signals
from shardtrain.utils.errors import ShardtrainError, print_error
from shardtrain.utils.process import AGENT, SECRET
from shardtrain.utils.temporary import temporary_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from shardtrain.config import Loaded
    from shardtrain.launch.meeting import Meeting


def train(
    loaded: Loaded, arguments: CommandLine, nodes: Nodes, require: Callable[[int | None, int], None]
) -> int:
    """Run this node's ranks of a training run and return the exit status.

    Args:
        require: Called with the total number of ranks (None if unknown) and the number of ranks of this node.
            Raises if the run cannot start with these numbers.

    Raises:
        ConfigError: the configuration does not work on these nodes, or another program uses the rendezvous port.
        PeerError: too few nodes joined in time, or the host of the rendezvous was lost.
        ShardtrainError: another node cannot run. The error has its code and message.
        SystemExit: this node cannot run. The error was printed.
    """
    environment.set_allocator_default(os.environ)
    _end_at_request(nodes, None, loaded)
    choice = choose_processes_here(loaded.config, arguments.nproc, nodes)
    # The number of nodes of an elastic run is not known at this point.
    world_size = choice.count * nodes.most if nodes.least == nodes.most else None
    # Set these before the checks import PyTorch, which reads them then.
    environment.set_process_defaults(
        os.environ, choice.count, environment.usable_cores(), alone=False
    )
    try:
        require(world_size, choice.count)
    except ShardtrainError as error:
        # exit.json is written. Telling the others may take minutes, so print the error first, and keep its
        # exit status if a request to stop arrives meanwhile.
        code = error.exit_code
        stop_signals.handle_requests(lambda *_: os._exit(code))
        print_error(error)
        _tell_others(nodes, error)
        sys.exit(code)
    number = "" if nodes.node_rank is None else f" {nodes.node_rank}"
    variable, _, num_nodes = nodes.reason.partition("=")
    print(
        f"shardtrain {__version__}: node{number} of {num_nodes} ({variable})"
        f" with {choice.count} processes ({choice.reason}), meeting at {nodes.endpoint}",
        file=sys.stderr,
        flush=True,
    )
    if nodes.least < nodes.most:
        nodes = count_nodes(nodes, loaded, choice.count)
    argv = ["train"]
    if arguments.path:
        argv.append(arguments.path)
    argv += arguments.overrides
    return run(nodes, choice.count, argv, loaded.config.checkpoint.grace_seconds, loaded)


def _tell_others(nodes: Nodes, error: ShardtrainError) -> None:
    """Report to the other nodes that this node cannot run, so they do not wait for it. An elastic run continues."""
    limit = f"at most {greeting.REFUSAL_SECONDS:g} s"
    print(f"telling the other nodes that this one cannot run, {limit}", file=sys.stderr, flush=True)
    reason = greeting.write_refusal(error)
    # If no node was chosen as the first, the one with the address of the rendezvous serves it.
    if nodes.hosts_meeting is not False and greeting.serve_refusal(
        nodes.endpoint, reason, nodes.most - 1
    ):
        return
    if nodes.least == nodes.most:
        sealed_reason = Seal(os.environ.get(SECRET, ""), nodes.run_id).close(reason.encode())
        greeting.send_refusal(nodes.endpoint, nodes.refusal_key, sealed_reason)


def _end_at_request(nodes: Nodes, listener: socket.socket | None, training: Loaded | None) -> None:
    """End this process at a request to stop before its ranks run, and notify the other nodes, which wait for it.

    There is nothing to save. ``listener`` is the socket of the rendezvous if this node serves it.
    """
    if training:
        grace_seconds = training.config.checkpoint.grace_seconds
        tell = partial(
            _tell_of_stop, nodes, listener, min(greeting.STOP_SECONDS, grace_seconds * 2 / 3)
        )
        local.end_at_request(training, tell)
        return

    def end(number: int, _frame: FrameType | None) -> None:
        _tell_of_stop(
            nodes, listener, greeting.STOP_SECONDS, signal.Signals(number).name, NOT_SAVED
        )
        os._exit(NOT_SAVED)

    stop_signals.handle_requests(end)


def _tell_of_stop(
    nodes: Nodes, listener: socket.socket | None, seconds: float, signal_name: str, code: int
) -> None:
    """Notify the other nodes of a request to stop this one, for at most ``seconds``. A second SIGINT ends it earlier.

    An elastic run continues without this node, unless it serves the rendezvous.
    """
    is_fixed = nodes.least == nodes.most
    if not is_fixed and not nodes.hosts_meeting and listener is None:
        return
    begun = time.monotonic()

    def end_at_second_interrupt(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and time.monotonic() - begun > ONE_REQUEST_SECONDS:
            os._exit(code)

    stop_signals.handle_requests(end_at_second_interrupt)
    print(
        f"telling the other nodes that this one stops, at most {seconds:g} s; Ctrl-C ends it now",
        file=sys.stderr,
        flush=True,
    )
    end = BEFORE_FIRST_STEP.line.format(reason=f"{signal_name} on host {socket.gethostname()}")
    reason = f"{code} {end}"
    # Until the store is open, reply to the other nodes instead of it. Afterwards use it like every other node.
    is_store_open = listener is not None and listener.fileno() < 0
    if (
        not is_store_open
        and nodes.hosts_meeting is not False
        and greeting.serve_refusal(nodes.endpoint, reason, nodes.most - 1, seconds, listener)
    ):
        return
    greeting.is_telling.set()
    sealed_reason = Seal(os.environ.get(SECRET, ""), nodes.run_id).close(reason.encode())
    hears_all = nodes.most if is_store_open else 0
    greeting.send_refusal(nodes.endpoint, nodes.refusal_key, sealed_reason, seconds, hears_all)


def run_verb(
    verb: str,
    argv: Sequence[str],
    config: Config,
    nproc: int | None,
    arguments: CommandLine | None = None,
) -> int | None:
    """Run this node's ranks of a verb other than ``train`` and return the exit status.

    Return None without starting ranks if this is the only node. Raises the errors of ``train``.
    """
    several = nodes_of_platform(arguments or split([]), os.environ)
    if several is None:
        return None
    choice = choose_processes_here(config, nproc, several)
    return run(several, choice.count, [verb, *argv], grace_seconds=0)


def run(
    nodes: Nodes,
    ranks: int,
    command: Sequence[str],
    grace_seconds: int,
    training: Loaded | None = None,
) -> int:
    """Start ``ranks`` ranks of ``command`` on this node when enough nodes have joined. Return this
    node's exit status.

    With ``training``, this process reports why the run ended. Ranks of other verbs report their failures themselves.
    """
    _end_at_request(nodes, None, training)
    heard = [
        number.name
        for number in stop_signals.GRACEFUL
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    # Check the port before importing PyTorch, which takes seconds, so an occupied port is reported early.
    listener = None
    if nodes.hosts_meeting:
        listener = greeting.claim(nodes.endpoint, nodes.join_seconds)
    elif nodes.hosts_meeting is None:
        listener = greeting.find_place(nodes.endpoint, nodes.join_seconds)
    if listener is not None:
        _end_at_request(nodes, listener, training)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from shardtrain.launch import meeting

    # Connect after the import, because the host of the rendezvous imports PyTorch at the same time.
    if listener is None:
        greeting.await_store(nodes.endpoint, nodes.join_seconds)
    nodes = _with_address(nodes)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    os.environ[SUPERVISED] = "1"
    if training:
        os.environ[AGENT] = str(os.getpid())
    # Let the ranks use the store of the rendezvous.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
    agent: Any = None
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(temporary_folder())
        if training:
            os.environ.update(
                stack.enter_context(snapshot_folder.created(training.config, nodes.max_restarts))
            )
        rendezvous = None
        try:
            rendezvous = greeting.within(
                nodes.join_seconds, lambda: meeting.open_meeting(nodes, listener)
            )
            agent = _agent(nodes, rendezvous, ranks, command, grace_seconds, str(records), training)
            result = agent.run()
            codes = [one.exitcode for one in result.failures.values()]
        except SignalException as error:
            codes = _left(agent)
            if training and agent:
                agent.explain_stop(error.sigval.name)
        except (RendezvousError, DistError, TimeoutError) as error:
            raise meeting.failed(error, nodes, rendezvous) from None
        finally:
            stop_signals.handle_requests(signal.SIG_IGN)
    return agent.cause.exit_code if training and agent.cause else status_of(codes)


def _with_address(nodes: Nodes) -> Nodes:
    """Set the address at which other nodes reach this node, and gloo's network interface with this address.

    By default, PyTorch and gloo use this node's host name, which other nodes may not be able to resolve.
    """
    address = nodes.local_address
    if address is not None:
        greeting.check_own(address, min(15, nodes.join_seconds))
    else:
        host = nodes.endpoint.rpartition(":")[0].strip("[]")
        address = addresses.toward(host)
        # Other machines may resolve a name to another address, but a loopback address always refers to this machine.
        if address is None or (addresses.is_loopback(address) and not addresses.is_loopback(host)):
            return nodes
    interface = addresses.interface_of(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return replace(nodes, local_address=address)


def status_of(codes: Sequence[int]) -> int:
    """Return a node's exit status from the statuses of its ranks.

    The failure of a rank takes precedence over a lost peer, which takes precedence over a stop.

    >>> status_of([75, 75]), status_of([1, 76]), status_of([-9, 75]), status_of([0, 0])
    (75, 1, 6, 0)
    """
    causes = [code for code in codes if code > 0 and code not in (PEER, PREEMPTED, NOT_SAVED)]
    if causes:
        return max(causes)
    return PEER if any(code < 0 or code == PEER for code in codes) else max(codes, default=0)


def _left(agent: LocalElasticAgent) -> list[int]:
    """Return the exit statuses of the agent's ranks.

    The status of a rank that was killed or never started is 76.
    """
    context: Any = getattr(agent, "_pcontext", None)
    handlers = getattr(context, "subprocess_handlers", {})
    codes = [handler.proc.poll() for handler in handlers.values()]
    return [NOT_SAVED if code is None or code < 0 else code for code in codes] or [NOT_SAVED]


def _agent(
    nodes: Nodes,
    rendezvous: Meeting,
    ranks: int,
    command: Sequence[str],
    grace_seconds: int,
    records: str,
    training: Loaded | None,
) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from shardtrain.launch.elastic_agent import NodeAgent, TrainingAgent

    # Each rank reports its own failure. PyTorch's loggers have separate levels.
    for name in [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    program, *arguments = python_child.command("shardtrain", *command)
    spec = WorkerSpec(
        role="shardtrain",
        local_world_size=ranks,
        entrypoint=program,
        # PyTorch replaces ${local_rank} in arguments, and "$$" with "$".
        args=tuple(argument.replace("$", "$$") for argument in arguments),
        rdzv_handler=rendezvous,
        max_restarts=nodes.max_restarts if training else 0,
        # The agent recognizes a stopped rank by a number of polls, which requires this interval.
        monitor_interval=POLL_SECONDS,
        local_addr=nodes.local_address,
    )
    logs = DefaultLogsSpecs(log_dir=records)
    more: dict[str, Any] = {}
    # Newer versions of PyTorch can give ranks more than 30 s for their last save.
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters:
        more["shutdown_timeout"] = grace_seconds + NOTICE_SECONDS
    if training is None:
        return NodeAgent(rendezvous, spec, logs, **more)
    # In a Slurm job, ranks may also stop by themselves at the end of the job's time.
    is_elastic = nodes.least < nodes.most and "SLURM_JOB_END_TIME" not in os.environ
    return TrainingAgent(training, nodes, is_elastic, rendezvous, spec, logs, **more)
