"""The files of docs/extend.md are complete: they train together, and the platform prints its submission."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import forked
import patience

ROOT = Path(__file__).parents[1]


def test_files_of_the_page_train_together_and_launch(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```(?:python|toml)\n# (\S+)\n(.*?)^```",
        (ROOT / "docs/extend.md").read_text(),
        re.M | re.S,
    )

    assert len(blocks) == 10

    for name, text in blocks:
        (tmp_path / name).write_text(text)

    def run(*arguments: str) -> str:
        done = forked.run(
            [sys.executable, "-m", "shardtrain", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=patience.seconds(100),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return str(done.stdout)

    run("train", "run.toml", "--nproc", "2", "--job.dump_folder", "out")
    assert [
        line.split(",")[0] for line in (tmp_path / "out/losses.csv").read_text().splitlines()
    ] == ["1", "2", "3"]
    assert (tmp_path / "out/checkpoint/best.json").exists()

    run("generate", "out", "--config", "run.toml", "--prompt", "a row", "--max_new_tokens", "2")
    assert "train run.toml" in run("launch", "my_platform.py", "run.toml", "--dry-run")
