"""No command writes a file named ``-``, with which other programs mean the standard output."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain.cli import main


@pytest.mark.parametrize("words", [
    "report run -o -", "report run --output=-", "plan debug --search --gpus 1 -o -", "plan debug --search --output -",
    "config migrate old.yaml -o -", "config migrate old.yaml --output=-", "generate run --prompt a --output -",
    "evaluate run --data a=b --output -", "data prepare debug --output -", "data tokenizer train x --output -",
    "data download --repo_id a/b --local_dir -", "import x --to -", "export x --to -", "merge x --to -",
    "test debug --output -", "replay 1 run --output -", "checkpoint to-dcp x -", "checkpoint from-fmengine x -",
    "checkpoint to-fmengine x -", "init -",
])  # fmt: skip
def test_output_named_dash_is_refused_in_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error[2]: ") and ("- is not an output" in line or "NEW.toml" in line), (
        line
    )
    assert not list(tmp_path.iterdir())
