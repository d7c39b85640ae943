"""Six secrets, a dataset that raises an error with all of them, and a check that none was written anywhere."""

from __future__ import annotations

from pathlib import Path

from tiny import text_file

CANARIES = {
    "HF_TOKEN": "hf_" + "Canary0123456789" * 2,
    "WANDB_API_KEY": "c0ffee" * 6 + "beef",
    "AWS_SECRET_ACCESS_KEY": "canary/" + "Abcdefgh+1234567" * 2,
    "CI_CREDENTIAL": "ghp_" + "Canary012345" * 3,
    "SOMETHING_ELSE": "0123456789abcdef0123456789abcdef01234567",
    "MY_SERVICE_PASSWORD": "correct-horse-battery",
}
# a custom dataset that fails with every secret in its message
CRASHES = """
import os
NAMES = {names!r}
def open_source(request):
    raise RuntimeError("refused: " + " ".join(os.environ[name] for name in NAMES))
"""


def assert_silent(folder: Path, lines: set[bytes]) -> None:
    everything = [path for path in folder.rglob("*") if path.is_file()]
    for name, canary in CANARIES.items():
        leaks = [
            path
            for path in everything
            if canary.encode() in path.read_bytes() or canary in path.name
        ]
        assert not leaks, f"{name} is in {leaks}"
        assert not [line for line in lines if canary.encode() in line], (
            f"{name} is in a command line"
        )


def options(folder: Path, **more: object) -> list[str]:
    values = {
        "job.dump_folder": folder / "outputs", "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.local_batch_size": 1, "training.seq_len": 32, "training.steps": 2,
        "lr_scheduler.warmup_steps": 1, **more,
    }  # fmt: skip
    return [argument for name, value in values.items() for argument in (f"--{name}", str(value))]
