"""Secrets in the environment of a run appear in no file, output or command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
from canaries import CANARIES, CRASHES, assert_silent, options

from shardtrain.utils.redact import redact, redact_all
from shardtrain.utils.variables import drop_invalid

ROOT = Path(__file__).resolve().parents[2]
WANDB = """
import json, pathlib
def Settings(**options): return options
def init(**options):
    path = pathlib.Path(options["dir"]) / "wandb-stub.json"
    path.write_text(json.dumps(options, default=str))
    return __import__("types").SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None)
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, set[bytes]]:
    """Run a command. Return the status, its output, and every command line of the machine during the run, at 20 Hz."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    (folder / "wandb.py").write_text(WANDB)
    environment = {
        **os.environ,
        **CANARIES,
        "TMPDIR": str(temporary),
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "shardtrain", *arguments]
    lines: set[bytes] = set()
    with (folder / "printed").open("wb") as printed:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=printed, stderr=printed
        )
        try:
            deadline = time.monotonic() + patience.seconds(120)
            while process.poll() is None:
                assert time.monotonic() < deadline
                for entry in Path("/proc").glob("[0-9]*/cmdline"):
                    try:
                        lines.add(entry.read_bytes())
                    except OSError:
                        continue
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    return process.returncode, (folder / "printed").read_text(), lines


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_run_with_all_sinks_writes_no_secret(tmp_path: Path) -> None:
    flags = [
        "--job.print_config",
        "--metrics.enable_tensorboard",
        "--metrics.enable_wandb",
        "--checkpoint.enable",
    ]
    status, printed, lines = run(tmp_path, "train", "--nproc", "2", *options(tmp_path), *flags)

    assert status == 0, printed
    assert (tmp_path / "outputs/wandb-stub.json").exists()
    assert (tmp_path / "outputs/config.resolved.toml").exists()
    assert_silent(tmp_path, lines)


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_error_with_every_secret_is_masked(tmp_path: Path, verb: str) -> None:
    dataset = tmp_path / "mine.py"
    dataset.write_text(CRASHES.format(names=tuple(CANARIES)))
    if verb == "train":
        arguments = ["train", "--nproc", "2", *options(tmp_path, **{"training.dataset": dataset})]
    else:
        arguments = [
            "data",
            "prepare",
            "--output",
            str(tmp_path / "x"),
            "--training.dataset",
            str(dataset),
        ]
    status, printed, lines = run(tmp_path, *arguments)

    assert status != 0, printed
    assert "refused: ***" in printed, printed
    assert_silent(tmp_path, lines)


@pytest.mark.parametrize(
    "option", ["job.description", "training.dataset_path", "model.hf_assets_path"]
)
def test_option_with_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    from shardtrain import config

    monkeypatch.setenv("MY_SERVICE_PASSWORD", CANARIES["MY_SERVICE_PASSWORD"])
    loaded = config.load(None, [f"--{option}", f"x-{CANARIES['MY_SERVICE_PASSWORD']}"])
    problems = [problem for problem in config.check(loaded) if "holds a secret" in problem.rule]

    assert [problem.option for problem in problems] == [option]
    assert CANARIES["MY_SERVICE_PASSWORD"] not in str(problems[0])


@pytest.mark.parametrize(
    "value",
    [
        "https://host/x.jsonl?token=canary-word",
        "s3://me:canary-word@bucket/x",
        "https://hooks.slack.com/services/T0/B0/canary-word",
    ],
)
def test_address_with_a_secret_is_refused_and_never_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    from shardtrain import config
    from shardtrain.cli import main

    file = tmp_path / "run.toml"
    file.write_text(f'[training]\ndataset = "jsonl"\ndataset_path = "{value}"\n')
    problems = [item for item in config.check(config.load(file)) if "holds a secret" in item.rule]

    assert [problem.option for problem in problems] == ["training.dataset_path"]

    for verb in ("show", "check"):
        main(["config", verb, str(file)])
        printed = capsys.readouterr()
        assert "***" in printed.out
        assert "canary" not in printed.out + printed.err


def test_warning_about_a_variable_masks_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    # The warning shows 40 characters, which are too few to recognize this token.
    token = "ghp_" + "a1B2" * 9
    environment = {"OMP_NUM_THREADS": "x" * 23 + " " + token}
    drop_invalid(environment)
    printed = capsys.readouterr().err

    assert "***" in printed
    assert "ghp_" not in printed


def test_a_commit_is_not_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "89abcdef0123456789abcdef0123456789abcdef"
    monkeypatch.setenv("GIT_COMMIT", commit)
    assert redact(f"at {commit}") == f"at {commit}"
    names = "model.hf_assets_path and TOKENIZERS_PARALLELISM"
    assert redact(names) == names


def test_known_forms_are_masked_without_the_environment() -> None:
    for text in (
        "ghp_" + "a1B2" * 9,
        "hf_" + "a1B2" * 8,
        "AKIA" + "ABCD" * 4,
        "https://me:word@host/x",
    ):
        assert redact(f"say {text}") != f"say {text}"
    assert redact("wandb_api_key=" + "c0ffee" * 6 + "beef") == "wandb_api_key=***"
    assert redact_all({"a": ["ghp_" + "a1B2" * 9]}) == {"a": ["***"]}
