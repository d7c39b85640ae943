"""Shell completion offers the verbs, options and values of the command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import patience
import pytest

from shardtrain import cli
from shardtrain.config import completion
from shardtrain.config.options import options

VERBS = [name for name in cli.VERBS if not name.startswith("-")]


def completed(*arguments: str, folder: Path = Path()) -> set[str]:
    """Return bash's completions of the last argument in a folder. Split arguments at "=" like readline."""
    parts = []
    for argument in arguments:
        parts += _split(argument) if "=" in argument else [argument]
    setup = f"COMP_WORDS=({' '.join(map(repr, parts))}); COMP_CWORD={len(parts) - 1}; _shardtrain"
    text = completion.script("bash", VERBS) + f'\n{setup}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    result = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=patience.seconds(60),
    )
    assert not result.stderr
    return set(result.stdout.splitlines())


def _split(argument: str) -> list[str]:
    name, _, value = argument.partition("=")
    return [name, "=", value] if value else [name, "="]


def test_bash_offers_verbs_options_presets_and_values() -> None:
    assert completed("shardtrain", "tr") == {"train"}
    assert completed("shardtrain", "re") == {"report", "replay"}
    assert "llama3_8b" in completed("shardtrain", "train", "llama3")

    steps = completed("shardtrain", "train", "--training.ste")
    assert steps
    assert steps == {f"--{name}" for name in options() if name.startswith("training.ste")}

    modes = {"selective", "full", "memory_budget", "none"}
    assert completed("shardtrain", "train", "--activation_checkpoint.mode", "") == modes
    assert completed("shardtrain", "train", "--activation_checkpoint.mode=") == modes
    assert completed("shardtrain", "train", "--activation_checkpoint.mode=f") == {"full"}
    assert completed("shardtrain", "train", "--checkpoint.enable", "t") == {"true"}


def test_bash_offers_unusual_file_names_unchanged(tmp_path: Path) -> None:
    names = {"my run.toml", "my * run.toml", "my$(touch run).toml", "my`touch run`.toml", "myrun"}
    for name in names:
        (tmp_path / name).touch()

    assert completed("shardtrain", "plan", "my", folder=tmp_path) == names

    with_space = {"my run.toml", "my * run.toml"}
    assert completed("shardtrain", "config", "check", r"my\ ", folder=tmp_path) == with_space
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_accepts_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("completion", shell)) == 0

    script = capsys.readouterr().out
    assert all(verb in script for verb in VERBS)
    assert "training.steps" in script

    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=patience.seconds(60))


@pytest.mark.parametrize("arguments", [(), ("tcsh",), ("bash", "zsh")])
def test_an_unsupported_shell_is_one_line_with_a_fix(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(("completion", *arguments)) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert 'eval "$(shardtrain completion bash)"' in message
