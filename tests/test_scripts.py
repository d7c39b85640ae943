"""run_train.sh, run_tests.sh and .ci/run, with a fake Python that records its calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import patience
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    "run_train.sh",
    "run_llama_train.sh",
    "run_tests.sh",
    ".ci/environment.sh",
    ".ci/run",
    "pyproject.toml",
]

STAND_IN = r"""#!/usr/bin/env bash
case "$*" in
    "-c import sys; sys.exit(sys.version_info"*) exit "${OLD_PYTHON:-0}" ;;
    "-c import importlib"*) exit "${PACKAGE_MISSING:-0}" ;;
    "-P -m venv "*)
        [[ -z "${NO_VENV:-}" ]] || exit 1
        mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-P -m pip --version") exit 0 ;;
    "-P -m pip install"*)
        echo "pip ${*:5}" >>"$CALLS"
        sleep "${PIP_SECONDS:-0}"
        [[ -z "${NO_CPU_WHEEL:-}" || "$*" != *torch==*+cpu* || "$*" == *--index-url* ]] || exit 1 ;;
    *) echo "${SHARDTRAIN_HANDED_OVER:-}" >"$CALLS.handed_over"
        echo "${SHARDTRAIN_ACTIVATE:-}" >>"$CALLS.activate"; echo "$$ $PWD" >>"$CALLS"; printf '%s\n' "$@" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    """A folder with copies of the scripts, next to a fake Python."""
    folder = tmp_path / "repository"
    for name in SCRIPTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "scripts/constraints", folder / "scripts/constraints")
    python = tmp_path / "fake-python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return folder


def run(repository, script, *arguments, cwd=None, **environment):
    """Run a script with a fake Python. Return its exit status, the calls of Python, stderr, and the process ID."""
    calls = repository.parent / "calls"
    calls.write_text("")
    unwanted = (
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "NGPU",
        "CONFIG_FILE",
        "COMM_MODE",
        "LOG_RANK",
        "TRAIN_FILE",
        "PYTHON",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    fake_python = str(repository.parent / "fake-python")
    process = subprocess.Popen(
        [str(repository / script), *arguments],
        env={**inherited, "CALLS": str(calls), "PYTHON": fake_python, **environment},
        cwd=cwd,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _, err = process.communicate(timeout=patience.seconds(60))
    return process.returncode, calls.read_text().splitlines(), err, process.pid


def started(calls):
    """Return the arguments that started the program."""
    return calls[calls.index("-m") :]


def place_of(calls: list[str]) -> list[str]:
    """Return the process id and the working directory of the program."""
    options = ["-P", "-m"] if "-P" in calls else ["-m"]
    return calls[calls.index(options[0]) - 1].split()


@pytest.mark.parametrize(
    "script", ["run_train.sh", "run_llama_train.sh", "run_tests.sh", ".ci/run"]
)
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("script", ["run_train.sh", "run_llama_train.sh"])
def test_a_fresh_machine_gets_an_environment_and_trains_the_default_configuration(
    repository, script, tmp_path
):
    code, calls, err, _ = run(repository, script, "--training.steps", "5", cwd=tmp_path)
    assert code == 0, err
    assert started(calls) == [
        "-m",
        "shardtrain",
        "train",
        f"{repository}/configs/debug.toml",
        "--training.steps",
        "5",
    ]
    assert (repository / ".venv/bin/python").exists()
    assert any("--editable" in call and "--constraint" in call for call in calls)


def test_time_of_a_run_starts_after_the_installation(repository):
    run(repository, "run_train.sh", PIP_SECONDS="0.6")
    marks = [path.stat().st_mtime for path in sorted((repository / ".venv").glob(".shardtrain-*"))]
    assert int((repository.parent / "calls.handed_over").read_text()) >= int(max(marks))


@pytest.mark.nightly(
    "it waits for twelve seconds, like pip",
    by="tests/test_scripts.py::test_a_fresh_machine_gets_an_environment_and_trains_the_default_configuration",
)
def test_an_installation_reports_its_phase_and_seconds_every_five_seconds(repository):
    """Each line names its phase, because the seconds start at 0 for each of the two calls of pip."""
    code, _, err, _ = run(repository, "run_train.sh", PIP_SECONDS="5.8")
    lines = re.findall(r"^  (.+): (\d+) s, \d+ MB in ", err, flags=re.M)
    # at least one line for each call; a busy machine prints later, and the shell counts integer seconds
    phases = {phase.partition("==")[0] for phase, _ in lines}

    assert code == 0, err
    assert phases == {"torch", "shardtrain and its other requirements"}, err
    assert all(int(seconds) >= 5 for _, seconds in lines), err


def test_a_second_call_installs_nothing(repository):
    run(repository, "run_train.sh")
    _, calls, err, _ = run(repository, "run_train.sh")
    assert not [call for call in calls if call.startswith("pip")]
    assert err == ""


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints/tested.txt"])
def test_changed_requirements_are_installed_again(repository, changed):
    run(repository, "run_train.sh")
    with (repository / changed).open("a") as file:
        file.write("# changed\n")
    _, calls, _, _ = run(repository, "run_train.sh")
    assert [call for call in calls if call.startswith("pip")]


def test_environment_of_tests_is_used_for_training(repository):
    _, calls, _, _ = run(repository, "run_tests.sh")
    assert any(call.endswith("[dev]") for call in calls)
    _, calls, _, _ = run(repository, "run_train.sh")
    assert not [call for call in calls if call.startswith("pip")]


def test_tests_run_in_parallel_and_arguments_of_the_caller_come_last(repository):
    _, calls, _, _ = run(
        repository, "run_tests.sh", "tests/test_cli.py", "-n", "0", "-k", "two words"
    )
    arguments = started(calls)
    assert arguments[:3] == ["-m", "pytest", "-n"]
    assert 1 <= int(arguments[3]) <= 16
    assert arguments[4:] == [
        "--dist",
        "worksteal",
        "tests/test_cli.py",
        "-n",
        "0",
        "-k",
        "two words",
    ]


@pytest.fixture
def landings(repository):
    """Return two functions: create commits, and return the share of tests that .ci/run selects."""
    names = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for name in (".ci/components.sh", "run_tests.sh", ".ci/environment.sh"):
        (repository / name).write_text('#!/bin/sh\npython=true\necho "$0 $*" >>"$CALLS"\n')
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)

    def commit(count=1):
        for _ in range(count):
            subprocess.run([*git, "add", "-A"], cwd=repository, check=True)
            command = [*git, "commit", "-q", "--allow-empty", "-m", "one"]
            subprocess.run(command, cwd=repository, env={**os.environ, **names}, check=True)

    def share():
        _, calls, err, _ = run(repository, ".ci/run")
        tests = [call for call in calls if call.startswith("./run_tests.sh")]
        assert len(tests) == 2, err
        assert "--share" not in tests[0], err
        return re.search(r"--share (\d)/5 ", tests[1])[1]

    return commit, share


def test_five_consecutive_landings_run_every_share(repository, landings):
    commit, share = landings
    shares = []
    for number in range(5):
        (repository / ".ci/turn").write_text(f"{number}\n")
        commit(3)  # a landing can have any number of commits
        shares.append(share())
        commit()
        assert share() == shares[-1], "one more commit must repeat a share, which may have failed"

    assert sorted(shares) == ["1", "2", "3", "4", "5"]


def test_forgotten_turn_advances_after_two_hundred_commits(repository, landings):
    commit, share = landings
    (repository / ".ci/turn").write_text("0\n")
    commit(200)

    assert share() == "1"

    commit()
    assert share() == "2"


@pytest.mark.skipif(
    bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="the machine has an NVIDIA device"
)
@pytest.mark.skipif(os.uname().sysname != "Linux", reason="macOS has one kind of wheel")
def test_machine_without_gpu_downloads_no_cuda_packages(repository):
    _, calls, _, _ = run(repository, "run_train.sh")
    torch = [call for call in calls if "torch==" in call]
    assert len(torch) == 1
    assert torch[0].endswith("+cpu")
    assert any("cpu.txt" in call for call in calls)


@pytest.mark.skipif(
    bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="the machine has an NVIDIA device"
)
@pytest.mark.skipif(os.uname().sysname != "Linux", reason="macOS has one kind of wheel")
def test_pytorchs_index_is_the_fallback_for_cpu_wheels(repository):
    code, calls, _, _ = run(repository, "run_train.sh", NO_CPU_WHEEL="1")
    torch = [call for call in calls if "torch==" in call]
    assert code == 0
    assert len(torch) == 2
    assert "--index-url https://download.pytorch.org/whl/cpu" in torch[1]


def test_variables_become_options(repository):
    variables = {"NGPU": "4", "CONFIG_FILE": "my run.toml", "COMM_MODE": "fake_backend"}
    _, calls, _, _ = run(repository, "run_train.sh", "--job.description", "two words", **variables)
    assert started(calls)[3:] == [
        "my run.toml",
        "--nproc",
        "4",
        "--comm.mode=fake_backend",
        "--job.description",
        "two words",
    ]


def test_ignored_variable_is_reported(repository):
    _, _, err, _ = run(repository, "run_train.sh", TRAIN_FILE="torchtitan.train")
    assert "TRAIN_FILE=torchtitan.train is ignored" in err


@pytest.mark.parametrize("script", ["run_train.sh", "run_llama_train.sh", "run_tests.sh"])
def test_script_replaces_its_shell_with_the_program_to_receive_signals(repository, script):
    _, calls, _, pid = run(repository, script)
    assert place_of(calls)[0] == str(pid)


def test_training_runs_in_the_callers_folder_for_relative_paths(repository, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    _, calls, _, _ = run(repository, "run_train.sh", cwd=tmp_path / "elsewhere")
    assert place_of(calls)[1] == str(tmp_path / "elsewhere")


def test_an_active_environment_that_has_the_package_is_used(repository, tmp_path):
    (tmp_path / "active/bin").mkdir(parents=True)
    shutil.copy(tmp_path / "fake-python", tmp_path / "active/bin/python")
    _, calls, _, _ = run(repository, "run_train.sh", VIRTUAL_ENV=str(tmp_path / "active"))

    assert not (repository / ".venv").exists()
    assert (tmp_path / "calls.activate").read_text() == "\n"
    assert started(calls)[:3] == ["-m", "shardtrain", "train"]

    run(repository, "run_train.sh", VIRTUAL_ENV=str(tmp_path / "active"), PACKAGE_MISSING="1")
    assert (repository / ".venv").exists()


def test_the_folder_of_the_environment_can_be_chosen(repository, tmp_path):
    run(repository, "run_train.sh", SHARDTRAIN_VENV=str(tmp_path / "chosen"))
    assert (tmp_path / "calls.activate").read_text() == f"source {tmp_path}/chosen/bin/activate\n"
    assert (tmp_path / "chosen/bin/python").exists()
    assert not (repository / ".venv").exists()


def test_number_of_parallel_tests_does_not_depend_on_omp_num_threads(repository):
    """nproc returns OMP_NUM_THREADS, which is 1 for each test."""
    run(repository, "run_tests.sh")
    parallel_tests = []
    for variables in ({}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "64"}):
        _, calls, _, _ = run(repository, "run_tests.sh", **variables)
        parallel_tests.append(int(calls[calls.index("-n") + 1]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    assert parallel_tests == [min(16, 3 * cores)] * 3


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OLD_PYTHON": "1"}, "no Python 3.11 or newer was found"),
        ({"NO_VENV": "1"}, "install python3-venv"),
    ],
)
def test_missing_requirement_is_reported_in_one_line(repository, variables, message):
    code, calls, err, _ = run(repository, "run_train.sh", **variables)
    assert (code, calls) == (2, [])
    assert err.count("\n") == 1
    assert message in err
