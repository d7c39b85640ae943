"""Watchdog of a rank: two threads that detect hangs without the process group.

One thread uses the store. It writes this rank's heartbeat, reads the verdict and, on a few ranks, reads all
heartbeats. The other thread never uses the store, because the store may hang. It samples the main thread, and
detects a store that does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardtrain.config.machine_rules import BEATS_PER_HANG_TIMEOUT, NODES_PER_SECOND
from shardtrain.config.schema import Config
from shardtrain.distributed import process_group
from shardtrain.distributed.process_group import World
from shardtrain.distributed.rendezvous import private_store
from shardtrain.distributed.rendezvous.private_store import FolderStore
from shardtrain.launch import exit_report, failure, signals
from shardtrain.resilience.watchdog import stack
from shardtrain.resilience.watchdog.exchange import HeartbeatExchange
from shardtrain.resilience.watchdog.hang_detector import (
    HangDetector,
    HangReport,
    from_json,
    to_json,
)
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.resilience.watchdog.stragglers import Stragglers, common, find_odd
from shardtrain.utils import activity, atomic_io, process_identity, variables
from shardtrain.utils.activity import Phases
from shardtrain.utils.log import logger

STEPS_LONG = 5.0
"""Maximum duration of a step or save, as a multiple of the 99th percentile of steps or the 95th of saves."""
FIRST_STEPS_LONG = 2.0
"""Maximum duration of the second step, as a multiple of the first."""
LONGEST_BEAT_SECONDS = 2.0
SHORTEST_BEAT_SECONDS = 0.1
SAMPLE_SECONDS = 0.02
MUTE_LIMITS = 1.7
"""Multiple of the limit after which a silent store counts as dead, if this rank makes no progress either."""
MUTE_LIMITS_AT_WORK = 1.4
"""The same multiple for a rank that does not wait for others.

It blames itself before waiting ranks blame another rank.
"""
# Phases that may be slow, and phases whose duration reveals stragglers.
COLD = ("start", "compile", "end")
WORK = ("data", "step")


def beat_seconds(hang_timeout_seconds: float, num_nodes: int = 1) -> float:
    """Return the seconds between heartbeats: a tenth of the limit, between 0.1 and 2.

    With many nodes the interval is longer, to limit the store's load to ``NODES_PER_SECOND`` messages per second.
    """
    desired = (hang_timeout_seconds or float("inf")) / BEATS_PER_HANG_TIMEOUT
    longest = max(LONGEST_BEAT_SECONDS, num_nodes / NODES_PER_SECOND)
    return min(max(desired, SHORTEST_BEAT_SECONDS), longest)


def monitors(world_size: int) -> set[int]:
    """Return the ranks that read all heartbeats: a few, on different nodes if there are several."""
    return {0, min(1, world_size - 1), world_size // 2, world_size - 1}


@contextmanager
def beating(config: Config, world: World, phases: Phases) -> Iterator[None]:
    """Run this rank's watchdog for the duration of the block.

    A detected hang ends the process, which ends the run.
    """
    is_needed = config.comm.hang_timeout_seconds or config.comm.straggler_window_steps
    if world.store is None or not is_needed:
        yield
        return
    process_group_store: Any = world.store
    folder = private_store.folder_of(os.environ)
    if folder:
        store: Any = FolderStore(folder / "heartbeat")
    else:
        # Use a separate connection, because a blocking wait of the process group would also block the heartbeat.
        connection = process_group_store.clone()
        store = dist.PrefixStore("heartbeat", connection)
    rank_watchdog = Watchdog(store, world.rank, world.size, config, phases, world.device.type)
    exit_report.elect_with(rank_watchdog.is_first_to_report)
    rank_watchdog.start()
    try:
        yield
    finally:
        rank_watchdog.close()


class Watchdog:
    """Heartbeat and hang detection of one rank.

    ``store`` must be a separate connection that no other code uses.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, config: Config, phases: Phases, device: str
    ) -> None:
        comm = config.comm
        self._rank = rank
        self._size = world_size
        self._comm = comm
        self._phases = phases
        self._device = device
        self._folder = Path(config.job.dump_folder)
        self._log = self._folder / config.metrics.save_log_file.replace("{rank}", str(rank))
        # The store receives one message per node and interval, and supports a limited number per second.
        num_nodes = math.ceil(
            world_size / variables.number(os.environ, "LOCAL_WORLD_SIZE", "1", least=1)
        )
        self._beat = beat_seconds(comm.hang_timeout_seconds, num_nodes)
        self._meets_in_folder = isinstance(store, FolderStore)
        self._others = HeartbeatExchange(store, rank, world_size, self._beat)
        self._host = socket.gethostname()
        self._moving = activity.restart(comm.straggler_window_steps)
        self._stop = signals.current()
        self._judge = HangDetector(
            world_size, self._beat, comm.init_timeout_seconds, comm.train_timeout_seconds
        )
        self._stragglers = Stragglers(world_size, config.parallelism.pipeline_parallel_degree)
        self._named: set[int] = set()
        self._compared = 0
        self._exchanged_at = time.monotonic()
        self._exchanges = True
        """True while the exchange with other ranks works.

        Once it has failed, silence of the store has no meaning.
        """
        self._closed = threading.Event()
        self._dying = threading.Lock()
        self._threads = [
            threading.Thread(target=self._exchange, name="heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads, and report to the other ranks that this rank has left."""
        self._closed.set()
        for thread in self._threads:
            # the first thread may be blocked by a dead store, but is a daemon
            thread.join(2 * self._beat)

    def is_first_to_report(self) -> bool:
        """Return True in the first rank of the run that calls this."""
        return self._others.is_first_to_report()

    # --- this rank's heartbeat

    def _sign(self, beat: int) -> Heartbeat:
        """Return the current heartbeat."""
        place = stack.main_thread(self._device)
        phase = self._phases.name
        now = self._moving
        limit, is_cold = self._limit(phase, place)
        return Heartbeat(
            beat=beat,
            host=self._host,
            step=now.step,
            phase=phase,
            entered=self._phases.entered,
            ticks=now.ticks + process_group.collectives_begun(),
            collective=place.collective,
            at=place.at,
            limit_seconds=limit,
            is_cold=is_cold,
            has_left=self._closed.is_set(),
            marks=dict(now.marks),
        )

    def _limit(self, phase: str, place: stack.StackPosition) -> tuple[float, bool]:
        """Return the maximum seconds without progress (0 for no limit), and True if the current phase may be slow."""
        hang = float(self._comm.hang_timeout_seconds)
        # In a debugger, a rank may stand still as long as the user likes.
        if not hang or place.debugging:
            return 0.0, False
        if phase in COLD or place.compiling or self._moving.may_be_slow or self._moving.begun < 2:
            return max(hang, float(self._comm.init_timeout_seconds)), True
        if phase == "checkpoint":
            save_seconds = self._stop.saves.quantile()
            if save_seconds is None:
                save_seconds = self._stop.assumed_save_seconds
            return max(hang, STEPS_LONG * save_seconds), False
        step_seconds = self._stop.steps.quantile(0.99)
        if step_seconds is None:
            # During the second step, only the duration of the first step is known, which includes
            # compilation and warm-up.
            return max(hang, FIRST_STEPS_LONG * self._stop.first_step_seconds), False
        return max(hang, STEPS_LONG * step_seconds), False

    # --- the thread that talks to the store

    def _exchange(self) -> None:
        beat = 0
        try:
            self._others.meet(os.environ)
            while True:
                beat += 1
                heartbeat = self._sign(beat)
                self._others.say(heartbeat)
                if heartbeat.has_left:
                    return
                # The verdict of any rank ends every rank.
                verdict = self._others.verdict()
                if verdict:
                    self._die(from_json(verdict))
                if self._rank in monitors(self._size):
                    self._judge_all()
                self._exchanged_at = time.monotonic()
                self._closed.wait(self._beat)
        except dist.DistError as error:
            # The store has ended with its host. The other thread ends this rank if the run hangs.
            if not self._closed.is_set():
                logger.warning(f"the heartbeat has lost the store: {str(error).splitlines()[0]}")
        except Exception:
            self._exchanges = False
            logger.exception("the heartbeat of this rank has failed; training continues without it")

    def _judge_all(self) -> None:
        signs = self._others.receive()
        verdict = self._judge.observe(time.monotonic(), signs)
        marks = common(signs, self._size, self._compared)
        if marks:
            # Compare each mark (the start of a step on all ranks) only once.
            self._compared = marks[0].begun
            verdict = verdict or find_odd(marks, signs)
            if self._rank == 0:
                self._name_stragglers(marks, signs)
        if verdict:
            text = to_json(HangReport(**{**vars(verdict), "declared_by": self._rank}))
            self._die(from_json(self._others.declare(text)))

    def _name_stragglers(
        self, marks: dict[int, activity.Mark], signs: dict[int, Heartbeat]
    ) -> None:
        stragglers = self._stragglers.add(marks, signs)
        if stragglers is None:
            return
        for straggler in stragglers:
            if straggler.rank not in self._named:
                logger.warning(str(straggler))
        for rank in sorted(self._named - {straggler.rank for straggler in stragglers}):
            logger.info(f"rank {rank} is as fast as its peers again")
        if stragglers or self._named:
            self._moving.measures = {"stragglers": float(len(stragglers))}
        self._named = {straggler.rank for straggler in stragglers}

    # --- the thread that never blocks

    def _watch(self) -> None:
        try:
            self._watch_main_thread()
        except Exception:
            logger.exception("the watchdog of this rank has failed; training continues without it")

    def _watch_main_thread(self) -> None:
        """Sample the main thread until the watchdog is closed. Never wait for the store or for other ranks.

        End this rank if neither its main thread nor its exchanges of heartbeats make progress.
        """
        is_sampling = bool(self._comm.straggler_window_steps) and self._size > 1
        interval = SAMPLE_SECONDS if is_sampling else self._beat
        last = time.monotonic()
        moved_at = last
        progress = (0, 0, 0)
        patience = float(self._comm.init_timeout_seconds)
        warning_seconds = patience
        while not self._closed.wait(interval):
            now = time.monotonic()
            # The main thread makes progress if any of these numbers changes.
            position = (
                self._moving.step,
                self._phases.entered,
                self._moving.ticks + process_group.collectives_begun(),
            )
            # A suspended machine or process makes no progress, and that is no hang.
            was_suspended = now - last > 3 * self._beat
            if position != progress or was_suspended:
                progress = position
                moved_at = now
                warning_seconds = patience

            # Fifty samples per second measure the fractions of a step in which this rank works or waits.
            if is_sampling and self._phases.name in WORK:
                self._sample(now - last)
            last = now

            # Warn less and less often.
            if now - moved_at > warning_seconds:
                warning_seconds *= 2
                self._warn_of_long_phase(now - moved_at)

            # If the store does not answer either, no verdict of another rank can arrive.
            silent_seconds = now - max(self._exchanged_at, moved_at)
            if self._exchanges and silent_seconds > self._beat * BEATS_PER_HANG_TIMEOUT:
                self._end_if_silent(silent_seconds)

    def _end_if_silent(self, silent_seconds: float) -> None:
        """End this rank if it has been without progress and without heartbeats of others for too long."""
        place = stack.main_thread(self._device)
        limit, is_cold = self._limit(self._phases.name, place)
        # Wait much longer than a verdict takes, because ranks that can reach the store know
        # more than this rank.
        limit *= MUTE_LIMITS if place.collective else MUTE_LIMITS_AT_WORK
        if not limit or silent_seconds <= limit:
            return
        # A phase that runs for the first time may take long, for example to compile.
        if place.collective or not is_cold:
            self._die(self._without_answer(place, silent_seconds))

    def _warn_of_long_phase(self, seconds: float) -> None:
        """Log the position of this rank in a phase without a limit.

        All ranks may be compiling, or waiting for the same lock.
        """
        place = stack.main_thread(self._device)
        limit, is_cold = self._limit(self._phases.name, place)
        if limit and is_cold and not place.collective:
            phase = f"phase {self._phases.name} of step {self._moving.step}"
            logger.warning(f"{phase} has taken {seconds:.0f} s so far, now at {place.at}")

    def _without_answer(self, place: stack.StackPosition, seconds: float) -> HangReport:
        """Return this rank's own verdict if neither it nor the store makes progress. Also send it to the node."""
        where = f"in phase {self._phases.name} of step {self._moving.step}"
        waits = f"waits in {place.collective} ({place.at}), {where}"
        rank = self._rank
        host = self._host
        if not place.collective:
            # This rank does not wait for others, so it is to blame even if the store is dead.
            last_seen = f"last seen {where} at {place.at}, {seconds:.0f} s ago"
            message = f"has not arrived: {last_seen}; the store does not answer either"
        elif self._meets_in_folder:
            problem = f"has received no heartbeat for {seconds:.0f} s: the run's heartbeat folder does not answer"
            message = f"{waits}, and {problem}"
        else:
            # Blame the host of the store, which is the host of rank 0 or of the launcher.
            rank = 0
            host = os.environ.get("MASTER_ADDR", self._host)
            problem = (
                f"or its launcher, which serves the store, has not answered for {seconds:.0f} s"
            )
            message = f"{problem}; rank {self._rank} {waits}"
        num_silent = int(rank != self._rank)
        report = HangReport(
            rank, host, self._phases.name, message, declared_by=self._rank, num_silent=num_silent
        )
        self._others.send_to_node(to_json(report).encode())
        return report

    def _sample(self, seconds: float) -> None:
        """Record one sample of the main thread, and the time since the previous sample."""
        now = self._moving
        now.samples += 1
        now.seconds += seconds
        if not stack.main_thread(self._device).collective:
            if self._phases.name == "data":
                now.busy_data += 1
            else:
                now.busy_step += 1

    # --- the end

    def _die(self, verdict: HangReport) -> None:
        """Record the verdict, write the stacks, wait until the other live ranks have written theirs, and exit."""
        # The first thread that gets here keeps the lock and ends the process. Another thread waits here until then.
        # Only if the watchdog was closed in the meantime does the process continue, and the lock is released.
        self._dying.acquire()
        if self._closed.is_set():
            return self._dying.release()
        reported = failure.Failure(
            rank=verdict.rank,
            host=verdict.host,
            kind=verdict.kind,
            message=verdict.message,
            where="",
            time_seconds=time.time(),
            exit_code=failure.PEER,
            phase=verdict.phase,
        )
        with contextlib.suppress(Exception):
            exit_report.record(
                reported, self._log, self._folder, self._size, verdict.declared_by == self._rank
            )
        with contextlib.suppress(Exception):
            self._write_stacks(verdict)
        with contextlib.suppress(Exception):
            # Wait briefly, because after the exit of one rank the launcher may kill other ranks before they
            # have written their stacks.
            self._others.wait_for_others(self._size - verdict.num_silent, 3 * self._beat)
        exit_report.end(failure.PEER)

    def _write_stacks(self, verdict: HangReport) -> None:
        """Log the verdict, and write the stacks of all threads to this rank's log."""
        logger.error(f"rank {verdict.rank} (host {verdict.host}) {verdict.message}")
        if self._rank in monitors(self._size):
            for line in verdict.table:
                logger.error(line)
        # Data are often late because a worker is stopped or waits for a disk.
        for child in multiprocessing.active_children():
            stat = process_identity.read_stat(child.pid or 0)
            state = stat.state if stat is not None else "Z"
            logger.error(f"data worker {child.pid}: {_STATES.get(state, state)}")
        logger.error("stacks of all threads of this rank:")
        with open(self._log, "a", encoding="utf-8", opener=atomic_io.open_file) as file:
            faulthandler.dump_traceback(file, all_threads=True)


_STATES = {"T": "stopped", "S": "waiting", "D": "waiting for a disk", "R": "running", "Z": "ended"}
