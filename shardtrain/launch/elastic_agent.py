"""Subclasses of PyTorch's elastic agent: an exit barrier and, for training, the exit report and restart rules."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousError

from shardtrain.config import Loaded
from shardtrain.launch import exit_report, failure, greeting, local, run_ends
from shardtrain.launch.child_watch import ChildWatch
from shardtrain.launch.failure import NOT_SAVED, PREEMPTED, Failure
from shardtrain.launch.meeting import Meeting
from shardtrain.launch.node_reports import LOST_SECONDS, NodeReports
from shardtrain.launch.nodes import Nodes
from shardtrain.launch.restart import RESTARTABLE
from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS
from shardtrain.utils import stop_signals
from shardtrain.utils.errors import ConfigError

LOOK_SECONDS = 0.1


class NodeAgent(LocalElasticAgent):
    """Agent of one node, with an exit barrier that ends if the store is lost."""

    def __init__(self, rendezvous: Meeting, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._meeting = rendezvous

    def _exit_barrier(self) -> None:
        """Wait for the ranks of other nodes, because they may need the store that this process serves."""
        group: Any = self._worker_group

        def have_ended() -> bool:
            return self._meeting.others_have_ended(group.store, group.group_rank)

        # If the store is lost or silent, no other node needs this one.
        with contextlib.suppress(RendezvousError, DistError, TimeoutError):
            while not greeting.within(LOST_SECONDS, have_ended):
                time.sleep(LOOK_SECONDS)


class TrainingAgent(NodeAgent):
    """Agent of one node of a training run.

    All nodes determine the same cause of a failure, and so agree on whether to restart.

    In an elastic run, ranks also stop when another node leaves or joins. All ranks save together. Then each
    node that received no request to stop restarts its ranks with the remaining nodes.
    """

    def __init__(
        self, training: Loaded, nodes: Nodes, is_elastic: bool, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.cause: Failure | None = None
        """Failure of a rank, on any node, that ended the last attempt."""
        self._training = training
        self._folder = Path(training.config.job.dump_folder)
        self._nodes = nodes
        self._is_elastic = is_elastic
        stopped_seconds = local.STOPPED_TIMEOUTS * training.config.comm.hang_timeout_seconds
        self._watch = ChildWatch(stopped_seconds=stopped_seconds)
        self._first_rank = 0
        self._are_running = False
        self._are_done = False
        self._is_first_attempt = True
        self._is_second_interrupt = False
        self._is_grace_over = False
        self._reports: NodeReports

    def explain_stop(self, signal_name: str) -> None:
        """Report how the ranks ended, after PyTorch ended them because this process received a signal."""
        stop_signals.handle_requests(signal.SIG_IGN)
        if self._are_running:
            self._watch.look()
            for rank in self._watch.pids:
                self._watch.note_sent(rank, signal.Signals[signal_name])
                if self._is_grace_over:
                    self._watch.note_sent(rank, signal.SIGKILL)
            self._explain(signal_name)
        elif not self._are_done:
            # The previous attempt failed, and the ranks were about to restart.
            self._tell(failure.stopped(None, signal_name, run_end=run_ends.BEFORE_FIRST_STEP))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Remove what is left of ranks that have ended, before a restart or the end.

        PyTorch would call this class's ``_shutdown``. Its handler would then ignore requests to stop until the
        ranks have restarted, which may take as long as the rendezvous.
        """
        super()._shutdown()
        # Report that this node leaves the attempt. Otherwise other nodes would consider it lost while it
        # restarts its ranks.
        if self._are_running:
            self._reports.leave()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Pass a request to stop on to the ranks, and wait for them. Only a second SIGINT ends this wait early."""
        asked_at = time.monotonic()

        def handle(number: int, _frame: FrameType | None) -> None:
            if (
                number == death_sig == signal.SIGINT
                and time.monotonic() - asked_at > ONE_REQUEST_SECONDS
            ):
                self._is_second_interrupt = True
                self._watch.send(signal.SIGKILL)

        stop_signals.handle_requests(handle)
        super()._shutdown(death_sig, timeout)
        # PyTorch has then killed the ranks that still ran.
        self._is_grace_over = time.monotonic() - asked_at >= timeout

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        number, count = worker_group.group_rank, worker_group.group_world_size
        assert number is not None and count is not None
        if number == 0:
            with local.refusals_in_exit_json(self._training):
                # Ranks that restart because a node joined or left have not written exit.json.
                local.prepare(
                    self._folder, self._is_first_attempt and not local.has_live_run(self._training)
                )
        self._is_first_attempt = False
        self._first_rank = worker_group.workers[0].global_rank
        try:
            self._reports = NodeReports(
                self._store,
                self._nodes.run_id,
                number,
                count,
                self._first_rank,
                self._nodes.node_rank,
                self._meeting.missing_members,
            )
        except ConfigError as error:
            # The folder is prepared. Without an exit.json, the next start would assume that this run was killed.
            local.write_exit_before_ranks(self._training, failure.describe(error, 0))
            raise
        if number != 0:
            # This node may have a separate disk, which may contain the exit.json of an earlier run.
            with contextlib.suppress(OSError):
                (self._folder / "exit.json").unlink(missing_ok=True)
        self._watch.begin({})
        self._are_running = True
        # A SIGINT while Python starts would print a traceback. ``early_stop`` unblocks the stop signals.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.GRACEFUL)
        try:
            pids = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._watch.begin(
            {self._first_rank + local_rank: pid for local_rank, pid in pids.items()}, self._reaped
        )
        self.cause = None
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._watch.look(self._reports.others_have_failed()):
            return RunResult(state=WorkerState.HEALTHY)
        # All ranks have ended, and this call reaps them.
        result = super()._monitor_workers(worker_group)
        self._explain()
        self._are_done = self.cause is None
        self._are_running = False
        if self.cause is None:
            return result
        result.state = WorkerState.FAILED
        self._limit_restarts(self.cause.exit_code, worker_group.spec.max_restarts)
        if not self._remaining_restarts:
            # The run has ended, and exit.json is written.
            stop_signals.handle_requests(signal.SIG_IGN)
        return result

    def _limit_restarts(self, code: int, most: int) -> None:
        """Allow PyTorch to restart the ranks only if a restart may succeed, and print the restart."""
        if self._is_elastic and code in (PREEMPTED, NOT_SAVED):
            # PyTorch counts this restart, but nothing has failed.
            self._remaining_restarts += 1
        elif code not in RESTARTABLE:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            print(
                f"restart {most - self._remaining_restarts + 1} of {most}",
                file=sys.stderr,
                flush=True,
            )

    def _explain(self, signal_name: str = "") -> None:
        """Determine the failure that ended the attempt, print it in one line, and write ``exit.json``."""
        failures, all_done, last_step = local.failures_of(
            self._watch.statuses, self._watch, self._record_of
        )
        were_starting = False
        if signal_name and not failures:
            # A rank that saves leaves a record, so ranks with these statuses ended during their start.
            were_starting = {*self._watch.statuses.values()} <= {
                PREEMPTED,
                -signal.Signals[signal_name],
            }
            if were_starting:
                failures = [
                    failure.stopped(
                        self._first_rank, signal_name, run_end=run_ends.BEFORE_FIRST_STEP
                    )
                ]
            elif not all_done:
                reason = "a second SIGINT" if self._is_second_interrupt else signal_name
                failures = [local.stopped(self._training, self._first_rank, reason)]
        # Ranks of other nodes would wait for ranks that ended during their start, and not hear of the request.
        cause = self._reports.explain(
            failures, all_done and not were_starting, self._folder, were_starting
        )
        if cause is None:
            failure.write_exit(self._folder, None, 0, last_step)
        else:
            self._tell(cause)

    def _tell(self, cause: Failure) -> None:
        self.cause = cause
        log_path = local.log_path(self._training, cause.rank or 0)
        exit_report.tell(cause, log_path, self._folder, self._worker_group.workers[0].world_size)

    def _reaped(self, rank: int) -> int | None:
        """Return the exit status of a rank that PyTorch has reaped.

        It does so when this process receives a signal.
        """
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        handler = handlers.get(rank - self._first_rank)
        status: int | None = handler.proc.poll() if handler else None
        return status

    def _record_of(self, rank: int) -> Path:
        assert self._pcontext is not None
        return Path(self._pcontext.error_files[rank - self._first_rank])
