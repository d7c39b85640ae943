"""The local launcher, tested with real processes that run the small trainer in programs/ranks.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "ranks.py"
LINUX = sys.platform == "linux"
HOW = cases(["fork"], nightly=["fresh"]) if LINUX else ["fresh"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are POSIX")


def start(folder, mode, how="fork", count=2, **environment):
    names = {name: value for name, value in os.environ.items() if name not in ("LOG_RANK", "NGPU")}
    return forked.Popen(
        [sys.executable, str(PROGRAM), str(folder), str(count), mode, how],
        env={**names, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, mode, how="fork", count=2, **environment):
    process = start(folder, mode, how, count, **environment)
    out, err = process.communicate(timeout=patience.seconds(90))
    return process.returncode, out, err.splitlines(), json.loads((folder / "exit.json").read_text())


def wait_for(condition, seconds=60.0):
    patience.wait_for(condition, seconds)


def pids(folder):
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


def runs(pid):
    """True if the process runs. A zombie does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", HOW)
def test_a_successful_run_has_status_0_and_an_exit_file(tmp_path, how):
    code, out, err, record = run(tmp_path, "well", how)
    assert (code, record["code"], err) == (0, 0, [])
    assert out == "rank 0 says hello\n"
    assert (tmp_path / "logs/rank-1.out").read_text() == "rank 1 says hello\n"


@pytest.mark.parametrize("how", HOW)
def test_the_failing_rank_is_named_once_with_its_cause_and_place(tmp_path, how):
    code, _, err, record = run(tmp_path, "boom", how)
    assert code == record["code"] == 1
    assert len(err) == 1, err
    assert err[0].startswith("error[1]: rank 1 (host ")
    assert "failed: RuntimeError: boom (ranks.py:" in err[0]
    assert err[0].endswith(f"full trace: {tmp_path}/logs/rank-1.log")
    assert (record["class"], record["message"], record["rank"]) == ("RuntimeError", "boom", 1)
    assert record["retryable"] is False
    assert "RuntimeError: boom" in (tmp_path / "logs/rank-1.log").read_text()
    assert not any(runs(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize(
    ("mode", "status", "message"),
    cases(
        [
            # rank 1 fails while rank 0 still waits in the rendezvous
            ("early", 1, "rank 1 (host"),
            ("data", 3, "): the data ends at sample 7; see "),
            # neither success nor the fault of the other rank
            ("leave-0", 1, "exited with status 0 without an exception"),
            ("exit-0", 1, "sys.exit(0) was called before the end of the run"),
        ],
        nightly=[
            ("memory", 7, "MemoryError"),
            ("kill", 6, "rank 1 (host"),
            ("leave-9", 9, "exited with status 9 without an exception"),
            # the user's own 3 does not mean unusable data
            ("leave-3", 1, "exited with status 3 without an exception"),
        ],
    ),
)
def test_the_status_of_the_culprit_is_the_status_of_the_run(tmp_path, mode, status, message):
    code, _, err, record = run(tmp_path, mode)

    assert code == record["code"] == status
    assert record["rank"] == 1
    assert len(err) == 1, err
    assert message in err[0]
    assert not any(runs(pid) for pid in pids(tmp_path))


def test_a_rank_killed_by_a_signal_is_named_with_the_signal(tmp_path):
    _, _, err, record = run(tmp_path, "kill")
    assert "rank 1 (host" in err[0]
    assert "was killed by signal 9" in err[0]
    assert record["retryable"] is True


@pytest.mark.parametrize(
    ("first", "victim", "number"),
    cases(
        [("launcher", 0, signal.SIGKILL)],
        nightly=[
            ("launcher", 1, signal.SIGKILL),
            ("launcher", 1, signal.SIGSEGV),
            ("rank", 0, signal.SIGKILL),
            ("rank", 1, signal.SIGBUS),
        ],
    ),
)
def test_a_rank_killed_during_a_request_to_stop_is_named(tmp_path, first, victim, number):
    """The launcher has signalled the rank as well, but another signal killed it, which must be named."""
    process = start(tmp_path, "stubborn")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    requests = [(process.pid, signal.SIGTERM), (pids(tmp_path)[victim], number)]
    for pid, sent in requests if first == "launcher" else reversed(requests):
        os.kill(pid, sent)
    _, err = process.communicate(timeout=patience.seconds(30))
    assert process.returncode == 6
    (line,) = err.splitlines()
    assert f"rank {victim} (host" in line
    assert f"was killed by signal {number.value}" in line
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["rank"], record["retryable"]) == (6, victim, True)


def test_each_problem_of_a_configuration_has_its_own_line(tmp_path):
    code, _, err, _ = run(tmp_path, "config")
    assert code == 2
    assert err == ["error[2]: a.b=1 is wrong; use 2", "error[2]: c.d=3 is wrong; use 4"]


def test_ranks_in_log_rank_share_the_terminal(tmp_path):
    _, out, _, _ = run(tmp_path, "well", LOG_RANK="0,1")
    assert sorted(out.splitlines()) == ["rank 0 says hello", "rank 1 says hello"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", cases([signal.SIGTERM], nightly=[signal.SIGINT]))
def test_a_signal_to_the_parent_reaches_every_rank_and_their_status_passes_through(
    tmp_path, how, number
):
    process = start(tmp_path, "wait", how)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=patience.seconds(30))

    assert process.returncode == 75
    assert err.splitlines() == ["stopped[75]: saved at step 3"]
    assert json.loads((tmp_path / "exit.json").read_text())["retryable"] is True


def test_a_second_interrupt_kills_unresponsive_ranks(tmp_path):
    process = start(tmp_path, "stubborn")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)  # two signals within ONE_REQUEST_SECONDS count as one request

    assert process.poll() is None

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patience.seconds(30))
    assert process.returncode == 76
    assert err.splitlines() == ["stopped[76]: stopped by a second SIGINT without saving"]
    assert not any(runs(pid) for pid in pids(tmp_path))


def test_unresponsive_ranks_end_after_the_grace_period(tmp_path):
    process = start(tmp_path, "stubborn", GRACE="2")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=patience.seconds(30))

    assert process.returncode == 76
    assert err.splitlines() == [
        "stopped[76]: stopped by SIGTERM when the grace period was over without saving"
    ]
    assert not any(runs(pid) for pid in pids(tmp_path))


@pytest.mark.skipif(not LINUX, reason="only Linux terminates child processes with their parent")
@pytest.mark.parametrize("how", HOW)
def test_ranks_die_with_a_parent_that_is_killed(tmp_path, how):
    """``wait_for`` fails the test if a rank still runs after the time."""
    process = start(tmp_path, "stubborn", how)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.kill()
    process.communicate(timeout=patience.seconds(30))
    wait_for(lambda: not any(runs(pid) for pid in pids(tmp_path)), seconds=10)


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_nothing_listens_beyond_the_loopback_address(tmp_path):
    process = start(tmp_path, "listen")
    try:
        wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)

        # The parent does not listen, because its ranks meet in a folder.
        assert not list(listening(process.pid))

        # gloo listens only on 127.0.0.1, in the format of /proc/net/tcp.
        addresses = set()
        for pid in pids(tmp_path):
            addresses |= set(listening(pid))
        assert addresses == {"0100007F"}
    finally:
        process.terminate()
        process.communicate(timeout=patience.seconds(30))


def listening(pid):
    """Yield local addresses on which a process listens, in the hexadecimal format of /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                yield fields[1].partition(":")[0]


def test_a_run_of_one_process_has_the_exit_status_and_files_of_a_run_with_ranks(tmp_path):
    world_of_one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    code, _, err, record = run(tmp_path, "well", "alone", **world_of_one)

    assert (code, err, record["code"]) == (0, [], 0)


def test_a_failure_of_one_process_is_one_line_and_an_exit_file(tmp_path):
    code, _, err, record = run(tmp_path, "early", "alone", RANK="1", WORLD_SIZE="2")

    assert code == record["code"] == 1
    assert len(err) == 1, err
    assert err[0].startswith("error[1]: RuntimeError: boom (ranks.py:")
    assert "Traceback" in (tmp_path / "logs/rank-1.log").read_text()


def test_a_run_of_one_process_ended_by_user_code_is_a_failure(tmp_path):
    code, _, err, record = run(tmp_path, "exit-0", "alone", RANK="1", WORLD_SIZE="2")

    assert code == record["code"] == 1
    assert len(err) == 1, err
    assert "sys.exit(0) was called before the end of the run (ranks.py:" in err[0]


def test_a_signal_to_a_run_of_one_process_is_reported_and_recorded(tmp_path):
    world_of_one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    process = start(tmp_path, "listen", "alone", count=1, **world_of_one)
    wait_for(lambda: (tmp_path / "ready-0").exists())
    process.terminate()
    _, err = process.communicate(timeout=patience.seconds(30))

    assert process.returncode == 76
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 76
    last_line = err.splitlines()[-1]
    assert (
        last_line == "stopped[76]: stopped by SIGTERM (no checkpoints in this run) without saving"
    )


def test_a_folder_that_cannot_be_created_is_a_storage_error(tmp_path):
    from shardtrain.launch import local
    from shardtrain.utils.errors import StorageError

    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"^cannot write .*, or set job\.dump_folder to another folder"
    ):
        local.prepare(tmp_path / "file" / "outputs", note_killed=True)


def test_a_killed_run_is_noted_unless_a_run_may_be_in_progress(tmp_path, capfd):
    from shardtrain.launch import local

    local.prepare(tmp_path, note_killed=True)
    local.prepare(tmp_path, note_killed=False)
    assert not capfd.readouterr().err

    local.prepare(tmp_path, note_killed=True)
    assert "was killed after step 0" in capfd.readouterr().err


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_run_is_alive_if_its_lease_is_held(tmp_path, monkeypatch, is_alive):
    from shardtrain.checkpoint import lease
    from shardtrain.config import load
    from shardtrain.launch import local

    loaded = load(None, [f"--job.dump_folder={tmp_path}"], preset="debug")
    (tmp_path / "checkpoint").mkdir()
    assert not local.has_live_run(loaded)

    acquired = lease.Lease(tmp_path / "checkpoint")
    acquired.acquire()
    monkeypatch.setattr(lease, "why_free", lambda holder: "" if is_alive else lease.DEAD)

    assert local.has_live_run(loaded) == is_alive

    acquired.release()


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_refused_rank_does_not_change_the_folder_of_a_live_run(tmp_path, monkeypatch, is_alive):
    """The node's agent writes exit.json unless the report of the refused rank forbids it."""
    from shardtrain.config import load
    from shardtrain.launch import failure, local
    from shardtrain.utils.errors import OutOfMemoryError
    from shardtrain.utils.process import AGENT

    class Left(Exception):
        pass

    def leave(code):
        raise Left

    record = tmp_path / "record.json"
    monkeypatch.setenv(AGENT, "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(record))
    monkeypatch.setattr(local, "leave", leave)
    monkeypatch.setattr(local, "has_live_run", lambda loaded: is_alive)
    loaded = load(None, [f"--job.dump_folder={tmp_path}"], preset="debug")

    with pytest.raises(Left):
        local.leave_refused(OutOfMemoryError("ulimit -v"), loaded)

    report = failure.read_record(record)
    assert (report.rank, report.exit_code, report.leaves_folder_alone) == (3, 7, is_alive)


def test_an_exit_file_of_an_earlier_run_is_removed_at_the_start(tmp_path):
    from shardtrain.launch import local

    (tmp_path / "exit.json").write_text("{}")
    local.prepare(tmp_path, note_killed=True)
    assert not (tmp_path / "exit.json").exists()
