"""A module in the current directory is not imported, however the program is started and whatever it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from tiers import cases

ROOT = Path(__file__).parents[2]
MODULES = (
    "torch", "json", "tomllib", "typing", "numpy", "logging", "subprocess", "dataclasses", "tokenizers", "yaml",
    "socket",
)  # fmt: skip
BIN = Path(sys.executable).parent
TRAIN = "debug --training.steps 1 --training.seq_len 32 --job.dump_folder out"
MODEL = (
    f"{TRAIN} --model.name model.py --model.flavor small --model.overrides.vocab_size 2048 "
    "--nproc 2 --parallelism.tensor_parallel_degree 2"
)
WAYS = {
    "command": [str(BIN / "shardtrain")],
    "module": [sys.executable, "-m", "shardtrain"],
    "torchtitan's module": [sys.executable, "-m", "shardtrain.train"],
    "script": [str(ROOT / "run_train.sh")],
    "torchrun": [
        str(BIN / "torchrun"),
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "-m",
    ],
}
COMMANDS = {
    "help": ("command", "--help"),
    "check": ("module", "config check debug"),
    "plan": ("module", "plan debug"),
    "launch": ("module", "launch local debug --dry-run"),
    "verbs that open data": ("command", "data check debug"),
    "one process": ("torchtitan's module", f"{TRAIN} --nproc 1"),
    "forked ranks": ("module", f"train {TRAIN} --nproc 2"),
    "a model file's check in a child": ("command", f"train {MODEL}"),
    "the two commands' script": ("script", f"{TRAIN.removeprefix('debug ')} --nproc 1"),
    "ranks of torchrun": ("torchrun", f"shardtrain.train {TRAIN}"),
    "verify": ("module", "verify model.py --mesh tp=2 --steps 1"),
}


BY_DEFAULT = ["help", "check", "launch", "forked ranks"]


@pytest.mark.parametrize("name", cases(BY_DEFAULT, nightly=[name for name in COMMANDS if name not in BY_DEFAULT]))
def test_no_module_of_the_current_directory_is_imported(name: str, tmp_path: Path) -> None:
    way, words = COMMANDS[name]
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(f"open('imported', 'a').write('{module} ')\nraise SystemExit(99)\n")
    (tmp_path / "model.py").write_text((ROOT / "tests/tools/verify/sound_model.py").read_text())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [*WAYS[way], *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience.seconds(240),
        check=False,
    )
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert done.returncode == 0, done.stderr[-2000:]
