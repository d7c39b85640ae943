"""Run the ranks of one machine: one rank in this process, or N processes that it starts and watches.

``torch.distributed.elastic.multiprocessing`` starts the processes. This module watches them, because PyTorch
would wait up to 30 s for a stuck rank and turn each exit status into 1. Ranks rendezvous in a private folder:
PyTorch's TCP store would listen on every address of the machine, open to every user.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from shardtrain.checkpoint import lease, snapshot_folder
from shardtrain.checkpoint.storage import Place, folder_of
from shardtrain.launch import environment, exit_report, failure, run_ends, signals
from shardtrain.launch.child_watch import FINE, NOTHING_TO_SAVE_SECONDS, ChildWatch
from shardtrain.launch.goodput import ledger
from shardtrain.launch.restart import CRASH_LOOP, Restarts
from shardtrain.utils import (
    atomic_io,
    bounded_reads,
    log,
    private_network,
    process,
    python_child,
    stop_signals,
    storage_errors,
    temporary,
    variables,
)
from shardtrain.utils.errors import ConfigError, Preempted, ShardtrainError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext

    from shardtrain.config import Loaded

STOPPED_TIMEOUTS = 2
"""A process stopped for this multiple of comm.hang_timeout_seconds is killed.

Watchdogs of other ranks act earlier.
"""
Main = Callable[["Loaded"], object]
OUTPUTS = "logs"
"""Name of the folder in the run folder for the output of ranks."""


def log_path(loaded: Loaded, rank: int | None) -> Path:
    """Return the log file of a rank. The traceback of a failure is appended to it."""
    config = loaded.config
    return Path(config.job.dump_folder) / config.metrics.save_log_file.replace("{rank}", str(rank))


def prepare(run_folder: Path, note_killed: bool) -> None:
    """Create the run's folders, and reserve disk space for ``exit.json``.

    Remove temporary files of a killed run and the ``exit.json`` of an earlier run. If the earlier run was
    killed, print a note: then the reserved space exists, but ``exit.json`` does not.

    Args:
        note_killed: False if a run may be active in the folder.

    Raises:
        StorageError: the folder cannot be created or written.
    """
    try:
        atomic_io.guard(run_folder)
        atomic_io.make_folder(run_folder / OUTPUTS)
        if (
            note_killed
            and (run_folder / failure.RESERVED).exists()
            and not (run_folder / "exit.json").exists()
        ):
            print(failure.killed_before(run_folder), file=sys.stderr, flush=True)
        (run_folder / "exit.json").unlink(missing_ok=True)
        atomic_io.sweep(run_folder)
        failure.reserve_exit(run_folder)
    except OSError as error:
        raise storage_errors.cannot(
            "write",
            run_folder,
            error,
            "set job.dump_folder to another folder",
        ) from error


@contextlib.contextmanager
def refusals_in_exit_json(loaded: Loaded, of_configuration: bool = False) -> Iterator[None]:
    """Write ``exit.json`` if data, a checkpoint, storage or a system limit prevents a run from starting.

    Args:
        of_configuration: True to write it for an invalid configuration, too. Otherwise an
            invalid configuration leaves the folder unchanged, because it may name the folder
            of another run by mistake.
    """
    try:
        yield
    except (ShardtrainError, OSError) as raised:
        if isinstance(raised, ConfigError) and not of_configuration:
            raise
        error = of_storage(raised, Path(loaded.config.job.dump_folder))
        write_exit_before_ranks(loaded, failure.describe(error, 0))
        raise error from raised.__cause__


@contextlib.contextmanager
def lost_peers_in_exit_json(loaded: Loaded) -> Iterator[None]:
    """Write ``exit.json`` if the rendezvous fails or a node cannot run, unless a
    node has written the cause already.
    """
    path = Path(loaded.config.job.dump_folder) / "exit.json"
    earlier = _version_of(path)
    try:
        yield
    except ShardtrainError as error:
        # An invalid configuration may name the folder of another run by mistake.
        if not isinstance(error, ConfigError) and _version_of(path) in (None, earlier):
            write_exit_before_ranks(loaded, failure.describe(error, 0))
        raise


def _version_of(path: Path) -> tuple[int, int] | None:
    """Return the inode and modification time of a file, which change if it is replaced.
    None without a file.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def write_exit_before_ranks(loaded: Loaded, report: failure.Failure) -> None:
    """Write ``exit.json`` without a rank, unless another run uses the folder.

    Under torchrun or srun, only rank 0 writes it.
    """
    folder = Path(loaded.config.job.dump_folder)
    if _reports_before_ranks() and not has_live_run(loaded):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        failure.write_exit(folder, dataclasses.replace(report, rank=None), report.exit_code)


def has_live_run(loaded: Loaded) -> bool:
    """True if a run that this host can see is alive and holds the checkpoint folder."""
    checkpoints = folder_of(loaded.config.job.dump_folder, loaded.config.checkpoint.folder)
    return isinstance(checkpoints, Path) and lease.is_held(checkpoints)


def _reports_before_ranks() -> bool:
    """True for rank 0 and for a process that is not a rank.

    A ``RANK`` without other variables may number a node.
    """
    return os.environ.get("RANK", "0") == "0" or not environment.is_rank(os.environ)


def end_at_request(loaded: Loaded, tell_others: Callable[[str, int], None] | None = None) -> None:
    """End this process at the first request to stop, until ranks run and handle requests themselves.

    ``early_stop`` handles requests before the configuration is read.

    Args:
        tell_others: Called with the name of the signal and the exit code, to tell nodes that wait for this one.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        stop_signals.handle_requests(signal.SIG_IGN)
        reason = signal.Signals(number).name
        report = failure.stopped(None, reason, run_end=run_ends.BEFORE_FIRST_STEP)
        # The agent of a node reports for a rank that it has started.
        if not process.is_left_to_parent():
            if _reports_before_ranks():
                print(*failure.lines(report, "", 1), sep="\n", file=sys.stderr, flush=True)
            write_exit_before_ranks(loaded, report)
        process.stop_agent()
        temporary.remove_all()
        if tell_others:
            tell_others(reason, report.exit_code)
        exit_report.end(failure.stop_status(loaded.config))

    stop_signals.handle_requests(end)


def run_rank(loaded: Loaded, main: Main, world_size: int = 1) -> int:
    """Run this process as one rank, report a failure, and return the exit status.

    If a shardtrain process started this rank, the rank writes a record for it. Otherwise (single rank,
    torchrun, srun) the rank prints its failure and writes ``exit.json`` itself, unless it only lost a peer,
    which then reports itself. ``world_size`` is the number of ranks of the entire run.
    """
    rank = variables.number(os.environ, "RANK", "0")
    run_folder = Path(loaded.config.job.dump_folder)

    def end_now(reason: str) -> None:
        report = stopped(loaded, rank, reason)
        request = signals.current()
        if request.was_starting and request.remaining_seconds() <= 0:
            report = failure.stopped(rank, request.reason, run_end=run_ends.BEFORE_FIRST_STEP)
            report = dataclasses.replace(report, kind=Preempted.__name__)
        exit_report.record(report, log_path(loaded, rank), run_folder, world_size, is_cause=True)
        exit_report.end(report.exit_code)

    parent = variables.number(os.environ, process.PARENT, "0")
    if "TORCHELASTIC_RUN_ID" in os.environ and not process.is_left_to_parent():
        # SIGUSR1, which Slurm sends, ends torchrun and not its processes
        stop_signals.die_with_parent(signal.SIGTERM)
    grace_seconds = loaded.config.checkpoint.grace_seconds
    stop = signals.listen(
        grace_seconds, _saves(loaded), end_now, parent, signals.end_time_of(os.environ)
    )
    try:
        main(loaded)
    except BaseException as error:
        # Signals must not interrupt the report.
        stop.end()
        stop_signals.handle_requests(signal.SIG_IGN)
        report = failure.describe(of_storage(error, run_folder), rank)
        # A rank that lost a peer is not the cause. The peer reports itself.
        is_cause = world_size == 1 or not report.is_peer
        # Write the record first, because the parent reads it and may be about to kill this rank.
        exit_report.record(report, log_path(loaded, rank), run_folder, world_size, is_cause)
        if not report.leaves_folder_alone:
            failure.append_trace(report, log_path(loaded, rank))
        return report.exit_code
    stop.end()
    stop_signals.handle_requests(signal.SIG_IGN)
    if process.is_left_to_parent():
        # Leave proof that the rank finished, because a library may have called os._exit(0). On a full disk
        # the file is created, but is empty.
        with contextlib.suppress(OSError):
            _done_path(Path(os.environ["TORCHELASTIC_ERROR_FILE"])).write_text(
                json.dumps(failure.own_end())
            )
    elif rank == 0:
        failure.write_exit(run_folder, None, 0, failure.own_end()["step"])
    return 0


def of_storage(error: BaseException, run_folder: Path) -> BaseException:
    """Convert an OSError below the run's folder to a StorageError. Return other errors unchanged."""
    if not isinstance(error, OSError) or error.errno is None:
        return error
    name = ""
    if isinstance(error.filename, str | bytes):
        name = os.path.abspath(os.fsdecode(error.filename))
    is_of_run = name.startswith(os.path.join(os.path.abspath(run_folder), ""))
    if not is_of_run and not storage_errors.is_of_system(error):
        return error
    storage_error = storage_errors.cannot("use", name or "a file", error)
    storage_error.__cause__ = error
    return storage_error.with_traceback(error.__traceback__)


def _saves(loaded: Loaded) -> bool:
    return loaded.config.checkpoint.enable and not loaded.config.checkpoint.load_only


def _newest_checkpoint(loaded: Loaded) -> Place | None:
    config = loaded.config
    return signals.newest_checkpoint(folder_of(config.job.dump_folder, config.checkpoint.folder))


def stopped(loaded: Loaded, rank: int, reason: str) -> failure.Failure:
    """Return the failure of a rank that was stopped before it could save. It
    includes the run's last checkpoint.
    """
    return failure.stopped(rank, reason, _newest_checkpoint(loaded))


def launch(
    loaded: Loaded,
    num_processes: int,
    main: Main | None = None,
    command: Sequence[str] = (),
    max_restarts: int = 0,
    check: Callable[[ChildWatch], failure.Failure | None] | None = None,
    ends_process: bool = False,
) -> int:
    """Start ``num_processes`` ranks on this machine, wait for them, and return the exit status of the run.

    With ``main``, the ranks are forks of this process, which should have imported all that they need. With
    ``command``, they are new processes, as CUDA requires. The first failing rank is reported in one line,
    ``exit.json`` is written, and no process is left running. A failed run is restarted from its last
    checkpoint, up to ``max_restarts`` times, see ``restart``.

    Args:
        check: Called before the first ranks start. Raises errors in the configuration or
            the data. Returns None, or the failure of the checking process, which is treated
            like the failure of a rank.
        ends_process: True if this process ends with the run. It then ignores later signals.
    """
    config = loaded.config
    grace_seconds = NOTHING_TO_SAVE_SECONDS
    if _saves(loaded):
        grace_seconds = config.checkpoint.grace_seconds
    watch = ChildWatch(
        grace_seconds, STOPPED_TIMEOUTS * config.comm.hang_timeout_seconds, ends_process
    )
    # All attempts belong to one job in the goodput account.
    job = ledger.new_job()
    folder = Path(loaded.config.job.dump_folder)
    with (
        snapshot_folder.created(config, max_restarts) as snapshots,
        watch.passing_signals_on(),
    ):

        def newest_step() -> int:
            saved_step = signals.step_of(_newest_checkpoint(loaded))
            return max(saved_step, snapshot_folder.newest_step(snapshots))

        restarts = Restarts(max_restarts, newest_step)
        while True:
            # A restart does not repeat a successful check.
            first = check(watch) if check else None
            if first:
                code = first.exit_code
                print(*failure.lines(first, "", 1), sep="\n", file=sys.stderr, flush=True)
                write_exit_before_ranks(loaded, first)
            else:
                check = None
                code, first = _attempt(
                    loaded, num_processes, main, command, watch, restarts.used, job, snapshots
                )
                if first and code != failure.PREEMPTED:
                    # Record the time of death for the goodput account, because a
                    # killed rank could not record it.
                    ledger.note_death(folder, job, first.time_seconds)
            # Do not restart after a request to stop.
            status: int | None = code
            if not watch.signal_number:
                status = restarts.after(code, first)
            if status is None:
                print(f"restart {restarts.used} of {max_restarts}", file=sys.stderr, flush=True)
                continue
            if status == CRASH_LOOP:
                report = failure.crash_loop(restarts.why, code, _newest_checkpoint(loaded), folder)
                exit_report.tell(report, log_path(loaded, 0), folder, 1)
            return status


def launch_verb(
    loaded: Loaded,
    num_processes: int,
    main: Main,
    arguments: Sequence[str],
    accelerators: int,
) -> int:
    """Start ranks of a verb and return the exit status, like ``launch``.

    On Linux CPUs the ranks are forks that run ``main`` and inherit the imported torch. Forks do not work
    after CUDA was used, or with macOS's libraries. In these cases the ranks are new processes that run the
    command line ``arguments``.
    """
    if accelerators == 0 and sys.platform == "linux":
        return launch(loaded, num_processes, main=main)
    return launch(loaded, num_processes, command=python_child.command("shardtrain", *arguments))


def _attempt(
    loaded: Loaded,
    count: int,
    main: Main | None,
    command: Sequence[str],
    watch: ChildWatch,
    restarts: int,
    job: str,
    snapshots: Mapping[str, str],
) -> tuple[int, failure.Failure | None]:
    """Start the ranks and wait for them, with a new store, because keys of an earlier attempt are invalid.

    ``snapshots`` is the variable of ``snapshot_folder.created``.
    """
    run_folder = Path(loaded.config.job.dump_folder)
    with refusals_in_exit_json(loaded):
        prepare(run_folder, not has_live_run(loaded))
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(temporary.temporary_folder())
        # Only forks use a private network. A new process does not inherit the descriptor, and has threads
        # before it could enter the network.
        network = {}
        if main and count > 1:
            network = stack.enter_context(private_network.create_network_namespace())
        with refusals_in_exit_json(loaded):
            processes = _start(
                loaded, count, main, command, records, {**network, **snapshots}, restarts, job
            )
        # multiprocessing reaps ended ranks before each fork, so read their exit statuses from it, too.
        watch.begin(processes.pids(), lambda rank: _reaped(processes, rank))
        try:
            statuses = watch.wait()
        finally:
            watch.send(signal.SIGKILL)
        processes.close(timeout=1)
        return _report(loaded, run_folder, statuses, watch, records)


def _start(
    loaded: Loaded,
    count: int,
    main: Main | None,
    command: Sequence[str],
    records: Path,
    variables_of_ranks: Mapping[str, str],
    restarts: int,
    job: str,
) -> PContext:
    from torch.distributed.elastic.multiprocessing import start_processes

    # Set the variables of each rank: torchrun's variables, and the path of its failure record.
    run_id = secrets.token_hex(8)
    meeting = records / "meeting"
    meeting.mkdir(mode=0o700)
    ranks = range(count)
    envs = {
        rank: environment.rank_environment(rank, count, meeting, run_id, restarts, job)
        for rank in ranks
    }
    for rank in ranks:
        record = str(_record_path(records, rank))
        envs[rank] |= {
            "TORCHELASTIC_ERROR_FILE": record,
            process.PARENT: str(os.getpid()),
            **variables_of_ranks,
        }
    # Forks run a function of this process, and new processes run the command.
    entrypoint: Any = _forked if main else command[0]
    arguments = {
        rank: (loaded, main, os.getpid()) if main else tuple(command[1:]) for rank in ranks
    }
    outputs = contextlib.ExitStack()
    specs = _logs_specs(loaded, count, outputs)
    if not main:
        # A new process receives only this environment, so add the variables of this process.
        envs = {rank: {**os.environ, **envs[rank]} for rank in ranks}
    # Prepare the state that ranks inherit by the fork.
    if main:
        _warn_of_threads()
    # Flush, because each fork would print buffered output again.
    sys.stdout.flush()
    sys.stderr.flush()
    # PContext.start replaces the handlers of four signals and does not restore them.
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    before |= {number: signal.getsignal(number) for number in stop_signals.GRACEFUL}
    # Ranks inherit the blocked signals and unblock them when they listen. So an early signal is
    # neither lost nor fatal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.GRACEFUL)
    # Exclude existing objects from the ranks' garbage collections, which would write to them and so
    # copy shared pages.
    gc.freeze()
    try:
        return start_processes(
            "shardtrain", entrypoint, arguments, envs, specs, start_method="fork"
        )
    finally:
        outputs.close()
        gc.unfreeze()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _logs_specs(loaded: Loaded, count: int, stack: contextlib.ExitStack) -> LogsSpecs:
    """Send the output of ranks in LOG_RANK to the terminal, and of other ranks
    to ``logs/rank-N.out`` and ``.err``.

    ``stack`` closes the files in this process after the ranks have opened them.
    """
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    folder = Path(loaded.config.job.dump_folder) / OUTPUTS
    hidden = [rank for rank in range(count) if rank not in log.console_ranks()]

    def output_paths(ending: str) -> dict[int, str]:
        # For an empty path, PyTorch uses this process's stream. It opens the
        # other files through our descriptors.
        paths = dict.fromkeys(range(count), "")
        for rank in hidden:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = atomic_io.open_file(folder / f"rank-{rank}{ending}", flags, fresh=True)
            stack.callback(os.close, descriptor)
            paths[rank] = f"/dev/fd/{descriptor}"
        return paths

    class Specs(LogsSpecs):
        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            error_files = {rank: envs[rank]["TORCHELASTIC_ERROR_FILE"] for rank in range(count)}
            return LogsDest(
                stdouts=output_paths(".out"),
                stderrs=output_paths(".err"),
                error_files=error_files,
            )

    return Specs()


def _reaped(processes: PContext, rank: int) -> int | None:
    """Return the exit status of a rank that multiprocessing has reaped. It does so before each fork."""
    started = getattr(getattr(processes, "_pc", None), "processes", None)
    status = started[rank].exitcode if started else None
    return int(status) if status is not None else None


def _warn_of_threads() -> None:
    """Warn of threads in a process that is about to fork, because their locks
    would never be released in the ranks.
    """
    names = [
        thread.name for thread in threading.enumerate() if thread is not threading.current_thread()
    ]
    try:
        unnamed = len(os.listdir("/proc/self/task")) - 1 - len(names)
    except OSError:
        unnamed = 0
    threads = [*names, *([f"{unnamed} of libraries"] if unnamed > 0 else [])]
    if threads:
        print(
            f"warning: this process has threads ({', '.join(threads)}) and forks its ranks: "
            "a rank may wait forever for a lock that such a thread held; start the threads later",
            file=sys.stderr,
        )


def _forked(loaded: Loaded, main: Main, parent: int) -> NoReturn:
    """Run ``main`` as one rank in a new fork, record a failure, and exit with its status."""
    private_network.enter_user_namespace()
    detach(parent)
    # Freeze inherited objects, because a garbage collection would write to the parent's shared pages.
    gc.freeze()
    leave(run_rank(loaded, main))


def leave_refused(error: ShardtrainError, loaded: Loaded) -> None:
    """After a failed check, exit this rank if the agent of its node reports
    the error and writes ``exit.json``.

    The agent does not touch the folder if another run is alive in it.
    """
    if process.AGENT in os.environ:
        report = failure.describe(error, variables.number(os.environ, "RANK", ""))
        if has_live_run(loaded):
            report = dataclasses.replace(report, leaves_folder_alone=True)
        failure.write_record(report, os.environ["TORCHELASTIC_ERROR_FILE"])
        leave(report.exit_code)


def leave(code: int) -> NoReturn:
    """Exit this rank with ``os._exit`` after flushing output and running exit handlers,
    as multiprocessing does.

    A normal exit of the interpreter would join threads of a process group without peers, and abort. In a
    fork, PyTorch's wrapper would wait until the parent collects a return value.
    """
    for stream in (sys.stdout, sys.stderr):
        # The buffer may contain a model's own prints, which a full disk rejects.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def become_rank() -> bool:
    """Prepare this process as one of several ranks. True if shardtrain started it,
    False for torchrun and srun.
    """
    parent = os.environ.get(process.PARENT)
    agent = os.environ.get(process.AGENT)
    if parent:
        detach(variables.number(os.environ, process.PARENT, ""))
    elif agent:
        # An agent handles every request to stop. If the agent no longer exists, it was killed,
        # and its node is lost.
        _die_with(variables.number(os.environ, process.AGENT, ""))
    environment.adopt_slurm(os.environ)
    environment.set_allocator_default(os.environ)
    local_ranks = variables.number(os.environ, "LOCAL_WORLD_SIZE", "1", least=1)
    environment.set_process_defaults(
        os.environ, local_ranks, environment.usable_cores(), alone=False
    )
    return bool(parent)


def detach(parent: int) -> None:
    """Leave the terminal's process group, so Ctrl-C arrives once, from the parent. End when the parent dies.

    Resets the parent's signal handlers. On Linux a child dies with its parent (``prctl``). Elsewhere a rank
    outlives a parent that was killed by SIGKILL until the rank's next collective fails.
    """
    for number in stop_signals.GRACEFUL:
        signal.signal(number, signal.SIG_DFL)
    if os.getsid(0) != os.getpid():
        os.setsid()
    _die_with(parent)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends. Exit if the parent has already ended."""
    stop_signals.die_with_parent(signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(failure.PEER)


def _done_path(record: Path) -> Path:
    """Return the path of the marker that a finished rank creates next to its failure record."""
    return record.with_suffix(".done")


def _read_end(done: Path) -> dict[str, Any]:
    """Return ``failure.own_end()`` of a finished rank, or {} if it could not be written."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(bounded_reads.read_all(done, 2**20)))
    return {}


def _record_path(records: Path, rank: int) -> Path:
    return records / f"rank-{rank}.json"


def failures_of(
    statuses: Mapping[int, int], watch: ChildWatch, record_of: Callable[[int], Path]
) -> tuple[list[failure.Failure], bool, int]:
    """Return the failures of ended ranks, True if all ranks finished or saved, and the last
    completed step of any rank.

    A failure comes from the record of the rank, or from its exit status if there is no record. A rank without
    a record that ``watch`` stopped has no failure.
    """
    failures = []
    last_step = 0
    all_done = True
    for rank, status in statuses.items():
        report = failure.read_record(record_of(rank))
        is_done = status in FINE and (status != 0 or _done_path(record_of(rank)).exists())
        all_done = all_done and is_done
        if report is None and not is_done and not watch.has_caused(rank, status):
            when = watch.ended_at[rank]
            report = (
                failure.killed(rank, -status, when)
                if status < 0
                else failure.ended(rank, status, when)
            )
        if report is not None:
            failures.append(report)
        end = dataclasses.asdict(report) if report else _read_end(_done_path(record_of(rank)))
        last_step = max(last_step, end.get("step", 0))
        if end.get("lost_lines") and rank not in log.console_ranks():
            print(f"warning: rank {rank}: {end['lost_lines']}", file=sys.stderr)
    return failures, all_done, last_step


def _report(
    loaded: Loaded, run_folder: Path, statuses: dict[int, int], watch: ChildWatch, records: Path
) -> tuple[int, failure.Failure | None]:
    """Find the first cause, print it in one line and write ``exit.json``.

    Return the exit status and the cause, or None.
    """
    failures, all_done, last_step = failures_of(
        statuses, watch, functools.partial(_record_path, records)
    )
    if failures:
        first = failure.culprit(failures)
    elif not all_done:
        # This process's signals ended the ranks before they had saved.
        first = stopped(loaded, 0, watch.reason or "SIGTERM")
    else:
        code = max(statuses.values())
        failure.write_exit(run_folder, None, code, last_step)
        return code, None
    exit_report.tell(first, log_path(loaded, first.rank), run_folder, len(statuses), last_step)
    return first.exit_code, first
