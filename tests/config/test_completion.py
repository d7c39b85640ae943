"""A shell completes verbs, options and values as the command knows them."""

from __future__ import annotations

import shutil
import subprocess

import patience
import pytest

from shardtrain import cli
from shardtrain.config import completion
from shardtrain.config.options import options

VERBS = [name for name in cli.VERBS if not name.startswith("-")]


def completed(*words: str) -> set[str]:
    """What bash offers for the last word; it takes a word apart at "=", as readline does."""
    parts = [part for word in words for part in ((word,) if "=" not in word else _apart(word))]
    asked = f"COMP_WORDS=({' '.join(map(repr, parts))}); COMP_CWORD={len(parts) - 1}; _shardtrain"
    text = completion.script("bash", VERBS) + f'\n{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, timeout=patience.seconds(60)
    )
    assert not done.stderr
    return set(done.stdout.split())


def _apart(word: str) -> list[str]:
    name, _, value = word.partition("=")
    return [name, "=", value] if value else [name, "="]


def test_bash_offers_verbs_options_presets_and_values() -> None:
    assert completed("shardtrain", "tr") == {"train"}
    assert completed("shardtrain", "re") == {"report", "replay"}
    assert "llama3_8b" in completed("shardtrain", "train", "llama3")
    steps = completed("shardtrain", "train", "--training.ste")
    assert steps == {f"--{name}" for name in options() if name.startswith("training.ste")} != set()
    modes = {"selective", "full", "memory_budget", "none"}
    assert completed("shardtrain", "train", "--activation_checkpoint.mode", "") == modes
    assert completed("shardtrain", "train", "--activation_checkpoint.mode=") == modes
    assert completed("shardtrain", "train", "--activation_checkpoint.mode=f") == {"full"}
    assert completed("shardtrain", "train", "--checkpoint.enable", "t") == {"true"}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_script_is_one_that_its_shell_reads(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("completion", shell)) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in VERBS) and "training.steps" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here, so nobody reads its script")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=patience.seconds(60))


@pytest.mark.parametrize("words", [(), ("tcsh",), ("bash", "zsh")])
def test_another_shell_is_one_line_with_what_to_write(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(("completion", *words)) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and 'eval "$(shardtrain completion bash)"' in told
