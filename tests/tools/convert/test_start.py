"""What ``import`` and ``export`` do not import: of two seconds that a start would take, half."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hub_folders
import patience
import pytest

from shardtrain.hf import importing

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers", "sympy")


@pytest.mark.parametrize("verb", ["import", "export"])
def test_neither_pytorch_s_compiler_nor_its_distributed_tensors_are_imported(verb: str, tmp_path: Path) -> None:
    folder, checkpoint = hub_folders.save(hub_folders.build("llama3-tied"), tmp_path / "hf"), tmp_path / "checkpoint"
    words = {"import": [str(folder), "--to", str(checkpoint)], "export": [str(checkpoint), "--to", str(tmp_path / "b")]}
    if verb == "export":
        importing.to_checkpoint(folder, checkpoint)
    code = f"""
import sys
from shardtrain import cli
status = cli.main([{verb!r}, *{words[verb]!r}, "--check", "weights"])
print(status, sorted(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.seconds(60), check=False
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
