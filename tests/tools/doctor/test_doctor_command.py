"""``shardtrain doctor`` with real processes: output, exit status, and removal of temporary files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forked
import patience
import pytest

from shardtrain import cli
from shardtrain.tools.doctor import doctor_command
from shardtrain.utils import temporary

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs/debug.toml")
SMALL = ["--training.device=cpu", "--model.overrides.num_layers=1"]
UNWANTED = ("NGPU", "LOG_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(tmp_path, *arguments, launcher=("-m", "shardtrain")):
    names = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    names |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    line = [sys.executable, *launcher, "doctor", *arguments, *SMALL]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    kind = forked.Popen if launcher == ("-m", "shardtrain") else subprocess.Popen
    return kind(line, cwd=tmp_path, env=names, text=True, start_new_session=True, **pipes)


def run(tmp_path, *arguments, **how):
    process = start(tmp_path, *arguments, **how)
    out, err = process.communicate(timeout=patience.seconds(120))
    return process.returncode, out, err


def leftovers(folder):
    """Return the files in a folder, except PyTorch's caches and its error files of killed ranks."""
    ignored = ("torchinductor", "pytorch-errorfile")
    files = []
    for path in folder.rglob("*"):
        if not any(name in str(path) for name in ignored):
            files.append(path)
    return files


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Return a function that runs ``doctor`` and returns status, stdout and stderr.

    It runs in this process, to avoid repeated imports.
    """
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)
    # The verb sets these variables if unset. Set them here, so monkeypatch restores them.
    defaults = {
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name, value in (
        defaults | {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments):
        code = cli.main(["doctor", *arguments, *SMALL])
        return code, *capfd.readouterr()

    return run_here


def test_the_doctor_examines_two_ranks_and_leaves_no_files(tmp_path, here):
    code, out, err = here(CONFIG, "--nproc", "2", "--json")
    assert out, err
    report = json.loads(out)
    assert report["ranks"] == 2
    assert len(report["hosts"]) == 1
    assert code == report["exit_code"]

    failed = {row["area"] for row in report["findings"] if row["verdict"] == "fail"}
    assert failed <= {"limits", "memory"}, "only areas that depend on this machine may fail"
    areas = {row["area"] for row in report["findings"]}
    assert areas >= {
        "versions",
        "hosts",
        "config",
        "limits",
        "memory",
        "clock",
        "storage",
        "devices",
        "network",
    }
    # The header is not part of the JSON report.
    assert err.startswith("shardtrain ")
    assert "doctor with 2 processes (from --nproc)" in err
    assert leftovers(tmp_path) == []
    assert doctor_command.FOLDER not in os.environ


def test_one_process_needs_no_network_and_the_table_names_the_fix(tmp_path, here):
    (tmp_path / "file").touch()
    code, out, _ = here("--nproc", "1", "--job.dump_folder", str(tmp_path / "file" / "run"))
    assert code == 8, out
    assert "fail  storage     job.dump_folder" in out
    assert "fix: make it writable, or choose another job.dump_folder" in out
    assert "all_reduce" not in out
    assert leftovers(tmp_path) == [tmp_path / "file"]


@pytest.mark.nightly(
    "without torchrun",
    by="tests/tools/doctor/test_doctor_command.py::test_the_doctor_examines_two_ranks_and_leaves_no_files",
)
def test_ranks_of_torchrun_make_one_report(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardtrain")
    code, out, err = run(tmp_path, CONFIG, launcher=launcher)
    # doctor fails if this machine has a low limit, and torchrun reports every failure as 1.
    assert code in (0, 1), err
    assert out.count("2 ranks on 1 host") == 1
    assert "all_gather dp_shard (all ranks)" in out
    assert "meeting port" not in out, "the port is in use by this job itself"


def test_ctrl_c_ends_all_ranks_immediately_and_leaves_no_files(tmp_path):
    process = start(tmp_path, "--nproc", "2")
    try:
        assert "doctor with 2 processes" in process.stderr.readline()
        end = time.monotonic() + patience.seconds(60)
        while not list(tmp_path.glob("shardtrain-doctor-*")):
            assert time.monotonic() < end
            time.sleep(0.01)
        interrupted_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=patience.seconds(60))
        # On a fast machine, doctor may finish before the signal arrives.
        assert process.returncode != 0 or "2 ranks on 1 host" in out
        assert time.monotonic() - interrupted_at < patience.seconds(30)
        # A signal while the folder is created leaves an empty marked folder, which the next start removes.
        assert [
            path for path in leftovers(tmp_path) if path.is_file() and path.name != temporary.MARK
        ] == []
        # Ranks run in separate sessions, so check that no rank is alive by its use of the folder.
        assert not any(
            str(tmp_path) in _folder_of(pid) for pid in os.listdir("/proc") if pid.isdecimal()
        )
    finally:
        process.kill()


def _folder_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.toml"], 'job.config_file="nothing.toml" does not exist'),
        (["--limit_seconds", "0"], '--limit_seconds="0" must be 1 to 3600 seconds'),
        (["--limit_seconds"], "has no value; write it like --limit_seconds 30"),
        (["--nproc", "0"], "must be a whole number of processes above 0"),
        (["--max_restarts", "3"], "the doctor runs once"),
        (["--comm.mode", "fake_backend"], "has no communication to measure"),
        (["--training.stps", "3"], "training.steps"),
    ],
)
def test_wrong_arguments_are_one_line_and_start_nothing(capsys, arguments, message):
    assert cli.main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1
    assert not out


def test_help_names_every_option_and_status(capsys):
    assert cli.main(["doctor", "--help"]) == 0
    out, _ = capsys.readouterr()
    for text in ("--nproc", "--json", "--strict", "--limit_seconds", "8 storage", "torchrun"):
        assert text in out


def test_parsing_the_arguments_imports_no_torch():
    line = "import sys; from shardtrain import cli; cli.main(['doctor', '--help']); sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", line],
        cwd=ROOT,
        capture_output=True,
        timeout=patience.seconds(60),
        check=False,
    )

    assert result.returncode == 0


def test_a_rank_without_a_rendezvous_address_is_reported(monkeypatch, capsys):
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["doctor"]) == 2
    assert "MASTER_PORT is not set" in capsys.readouterr().err


def test_the_ranks_per_host_are_read_from_slurm(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2),4")

    assert doctor_command._local_size() == 8

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert doctor_command._local_size() == 2
