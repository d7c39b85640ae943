"""``import`` and ``export`` do not import slow modules, which would double their startup time of one second."""

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
def test_import_and_export_do_not_import_pytorch_s_compiler_or_dtensor(
    verb: str, tmp_path: Path
) -> None:
    folder = hub_folders.save(hub_folders.build("llama3-tied"), tmp_path / "hf")
    checkpoint = tmp_path / "checkpoint"
    arguments = {
        "import": [str(folder), "--to", str(checkpoint)],
        "export": [str(checkpoint), "--to", str(tmp_path / "b")],
    }
    if verb == "export":
        importing.to_checkpoint(folder, checkpoint)
    code = f"""
import sys
from shardtrain import cli
status = cli.main([{verb!r}, *{arguments[verb]!r}, "--check", "weights"])
print(status, sorted(name for name in {HEAVY!r} if name in sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )

    assert result.stdout.splitlines()[-1] == "0 []", result.stdout + result.stderr
