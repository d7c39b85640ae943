"""The pages for users of torchtrain, torchtitan and Run:ai name existing variables, flags and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ("torchtrain", "torchtitan", "runai")
PAGES = {name: (ROOT / "docs/migrate" / f"{name}.md").read_text() for name in NAMES}
SOURCE = "\n".join(
    path.read_text()
    for path in (
        *(ROOT / "shardtrain").rglob("*.py"),
        *ROOT.glob("*.sh"),
        ROOT / "multinode_trainer.slurm",
    )
)

# every command in the documentation of the three systems
ORIGINAL = {
    "torchtrain": (
        "pip install -r requirements.txt", "pip install -r dev-requirements.txt", "./run_llama_train.sh",
        "tensorboard --logdir=./torchtrain/outputs/tb", "ssh -L 6006:127.0.0.1:6006", "sbatch multinode_trainer.slurm",
        "train.py --job.config_file",
    ),
    "torchtitan": (
        "./run_train.sh", "COMM_MODE=fake_backend", "--checkpoint.create_seed_checkpoint", "dcp_to_torch",
        "tensorboard --logdir=./outputs/tb", "sbatch multinode_trainer.slurm", "torchtitan.config.manager",
        "scripts/download_hf_assets.py", "run_memory_estimation.sh", "convert_from_hf.py", "run_llama_generate.sh",
        "loss_compare.py", "train.py --job.config_file",
    ),
    "runai": (
        "docker build -t nvcr.io/<ORG ID>/torchtitan-dist", "docker push", "download_tokenizer.py",
        "runai submit-dist pytorch --name distributed-training-pytorch --workers=1 -g 8 -i", "runai submit --name",
        "--existing-pvc \"claimname=", "CONFIG_FILE=", "MAX_RESTARTS=10",
    ),
}  # fmt: skip

# flags of `runai` from the published references of its two versions -> True if a value follows
V1 = {
    "--name": 1,
    "--workers": 1,
    "-g": 1,
    "-i": 1,
    "-e": 1,
    "--existing-pvc": 1,
    "-p": 1,
    "--large-shm": 0,
}
V2 = {
    "-p": 1, "-i": 1, "--workers": 1, "--gpu-devices-request": 1, "--master-gpu-devices-request": 1, "-e": 1,
    "--env-secret": 1, "--existing-pvc": 1, "--large-shm": 0, "--termination-grace-period": 1,
}  # fmt: skip
VERBS = {
    ("submit-dist", "pytorch"): (V1, 0),
    ("submit",): (V1, 0),
    ("training", "pytorch", "submit"): (V2, 1),
    ("training", "standard", "submit"): (V2, 1),
    ("training", "pytorch", "exec"): ({}, 1),
    ("training", "pytorch", "port-forward"): ({"--port": 1}, 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_original_command_is_documented(name):
    missing = [command for command in ORIGINAL[name] if command not in PAGES[name]]
    assert not missing


@pytest.mark.parametrize("name", ["torchtitan", "runai"])
def test_every_documented_variable_is_in_the_source(name):
    table = PAGES[name].partition("## Variables")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 4

    for variables, answer in rows:
        for variable in re.findall(r"`([A-Z_]+)`", variables):
            of_others = re.search(
                r"(PyTorch|NCCL|library) reads|torchtitan's own script|without effect", answer
            )
            assert of_others or re.search(rf"\b{variable}\b", SOURCE) or (variable[6:] in SOURCE), (
                variable
            )


def test_commands_for_run_ai_use_published_flags():
    """There is no cluster in the tests, so the command lines are checked against the flags of ``runai``."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGES["runai"], flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 6

    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "runai"
        verb = next(verb for verb in VERBS if tuple(arguments[: len(verb)]) == verb)
        flags, names = VERBS[verb]
        rest = arguments[len(verb) : arguments.index("--") if "--" in arguments else None]

        # Count positional names. Skip flags together with their values.
        while rest:
            flag, equals, _ = rest.pop(0).partition("=")
            if not flag.startswith("-"):
                names -= 1
                continue
            assert flag in flags, line
            if flags[flag] and not equals:
                value = rest.pop(0)
                assert flag not in ("-e", "--env-secret") or re.match(r"[A-Z_]+=", value)
        assert names == 0, line
        # A token is a secret of the cluster, never an argument.
        assert not re.search(r"TOKEN=(?!hub)", line)


def test_the_image_reads_the_variable_that_the_tutorial_sets():
    text = (ROOT / "scripts/containers/Dockerfile").read_text()
    assert 'ENTRYPOINT ["shardtrain"]' in text
    assert 'CMD ["train"]' in text
    assert "CONFIG_FILE=" in text
