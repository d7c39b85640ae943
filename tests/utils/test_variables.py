"""An environment variable that should hold a number and does not is refused or ignored, in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardtrain
from shardtrain.cli import main
from shardtrain.config.command_line import CommandLine
from shardtrain.launch import environment, nodes, signals
from shardtrain.utils import log, variables
from shardtrain.utils.errors import ConfigError

INVALID = [
    "abc",
    "nan",
    "inf",
    "1e400",
    "-1",
    "0x10",
    "1_0",
    "٣",
    "²",
    "9" * 5000,
    "1\n2",
    "\x1b[2J",
]
SOURCES = {path: path.read_text() for path in Path(shardtrain.__file__).parent.rglob("*.py")}
LAUNCHERS = sorted(
    {
        name
        for text in SOURCES.values()
        for name in re.findall(r'variables\.number\(\S+, "(\w+)"', text)
    }
)
"""Variables that the package reads as a number with ``variables.number``."""


def test_no_module_converts_a_variable_to_a_number_itself() -> None:
    """ledger.py is an exception: it stops accounting with a warning if its variables are invalid."""
    converting = []
    for path, text in SOURCES.items():
        if re.search(r"(int|float)\((os\.)?environ", text):
            converting.append(path.name)
    assert converting == ["ledger.py"]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_number_of_a_launcher_is_refused_in_one_line(text: str) -> None:
    assert {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_PORT",
        "SLURM_JOB_ID",
    } <= {*LAUNCHERS}
    for name in LAUNCHERS:
        with pytest.raises(
            ConfigError, match=f"^environment: {name}=.* must be an integer of at least"
        ) as caught:
            variables.number({name: text}, name, "0")
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", INVALID)
@pytest.mark.parametrize("name", [
    "LOG_RANK", "NGPU", "PET_NPROC_PER_NODE", "RUNAI_NUM_OF_GPUS", "PET_NNODES", "SHARDTRAIN_NNODES", "PET_NODE_RANK",
    "SHARDTRAIN_NODE_RANK",
])  # fmt: skip
def test_invalid_number_of_ranks_or_nodes_is_refused_in_one_line(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: text}
    if name.endswith("NODE_RANK"):
        values |= {name.replace("NODE_RANK", "NNODES"): "2", "PET_RDZV_ENDPOINT": "127.0.0.1:1"}
    monkeypatch.setenv(name, text)

    with pytest.raises(ConfigError, match=name) as caught:
        environment.requested_processes(None, values)
        nodes.find(CommandLine(None, None, ()), values)
        log.console_ranks()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", [text for text in INVALID if "\n" not in text])
@pytest.mark.parametrize("name", variables._CHECKED)
def test_invalid_number_with_a_default_is_ignored_with_a_warning(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    assert main(["--version"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {name}=")
    assert line.isprintable()
    assert line.isascii()
    assert main(["--version"]) == 0
    assert not capsys.readouterr().err, "the variable was not removed"


@pytest.mark.parametrize(("name", "text"), [
    ("OMP_NUM_THREADS", "4,2"), ("OMP_NUM_THREADS", "1"), ("RAYON_NUM_THREADS", "0"), ("SLURM_JOB_END_TIME", "0"),
    ("SHARDTRAIN_HEARTBEAT_SECONDS", "0.5"), ("SHARDTRAIN_HEARTBEAT_SECONDS", ""),
])  # fmt: skip
def test_valid_number_is_kept(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    assert main(["--version"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("text", INVALID)
def test_invalid_end_of_a_job_is_no_end(text: str) -> None:
    assert signals.end_time_of({"SLURM_JOB_END_TIME": text}) is None
