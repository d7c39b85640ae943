"""Learning-rate schedules in a Python file of the user: same numbers as a built-in one, and errors name the file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import Ended, tiny_config, train_whole

from shardtrain.cli import main
from shardtrain.config.schema import LRScheduler, Optimizer
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.train.preflight import own_files

LINEAR_LINEAR = """
def factor(step, total_steps, warmup_steps):
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1 - (step - warmup_steps) / (total_steps - warmup_steps)
"""

STEPS = 5
KILLED = 3
MESHES = {
    "one process": (1, {}),
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
}


def written(folder: Path, text: str = LINEAR_LINEAR) -> str:
    path = folder / "my_schedule.py"
    path.write_text(text)
    return str(path)


def built_in_and_own(rank: int, root: Path, path: str, mesh: str) -> tuple[Ended, Ended]:
    """Train with ``linear_linear`` without interruption, and with the file, killed and resumed."""

    def config(folder: str, schedule: str):
        return tiny_config(
            job={"dump_folder": str(root / folder)},
            parallelism=MESHES[mesh][1],
            training={"steps": STEPS, "local_batch_size": 8 // MESHES[mesh][0]},
            lr_scheduler={"name": schedule, "warmup_steps": 2},
            checkpoint={"enable": True, "interval": 2},
        )

    straight = train_whole(rank, config("straight", "linear_linear"))
    train_whole(rank, config("killed", path), stop_after=KILLED)
    return straight, train_whole(rank, config("killed", path))


@pytest.mark.parametrize(
    ("accepted", "message"),
    [([], "another lr_scheduler.name"), (["lr_scheduler.name"], None), (["all"], None)],
)
def test_schedule_file_changed_since_the_last_save_is_an_error(
    tmp_path: Path, accepted: list[str], message: str | None
) -> None:
    def config(steps: int):
        return tiny_config(
            job={"dump_folder": str(tmp_path / "run")},
            training={"steps": steps},
            lr_scheduler={"name": str(path), "total_steps": 8, "warmup_steps": 0},
            checkpoint={"enable": True, "interval": 2, "accept_changes": accepted},
        )

    path = tmp_path / "my_schedule.py"
    path.write_text("def factor(step, total_steps):\n    return 0.75\n")
    run_ranks(1, train_whole, config(2))
    path.write_text("def factor(step, total_steps):\n    return 0.25\n")
    (resumed,) = run_ranks(1, train_whole, config(4))

    assert (message is None) == (resumed.error is None)
    if message:
        assert message in str(resumed.error)
        assert f"{path} with the SHA-256" in str(resumed.error)
    else:
        assert resumed.lrs == pytest.approx([0.25e-2] * 2)


@pytest.mark.parametrize("mesh", cases(["one process"], nightly=["fsdp", "tp", "pp"]))
def test_resumed_run_with_a_schedule_file_equals_the_built_in_schedule(
    tmp_path: Path, mesh: str
) -> None:
    for straight, resumed in run_ranks(
        MESHES[mesh][0], built_in_and_own, tmp_path, written(tmp_path), mesh
    ):
        assert straight.error is None
        assert resumed.error is None
        assert resumed.lrs == straight.lrs[2:] == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
        assert resumed.losses == straight.losses[2:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a file"),
        ("x = (", "cannot be read as Python"),
        ("def rate(step, total_steps): ...", "has no factor; define factor(step, total_steps)"),
        (
            "def factor(step, total_steps, warmup): ...",
            "the parameter warmup, which is not an option",
        ),
        ("def factor(step): ...", "takes fewer than two arguments"),
        ("def factor(*given): ...", "the parameter given, which is not an option"),
        ("def factor(step, *, total_steps): ...", "takes fewer than two arguments"),
        (
            "def factor(step, total_steps, **given): ...",
            "the parameter given, which is not an option",
        ),
        (
            "x = {}\ndef factor(step, total_steps):\n    x[step] = 0.9 * x.get(step - 1, 1.0)\n    return x[step]",
            "a resumed run would differ",
        ),
        ("def factor(step, total_steps):\n    return step / 0", "fails (line 2): division by zero"),
        (
            "def factor(step, total_steps):\n    return step",
            "returns 2 at step 2 of 200; return the share of the peak",
        ),
        ("def factor(step, total_steps):\n    return float('nan')", "returns nan at step 0"),
        (
            "def factor(step, total_steps):\n    raise TimeoutError('of my own')",
            "fails (line 2): of my own",
        ),
        ("def factor(step, total_steps):\n    pass", "returns None at step 0"),
        ("def factor(step, total_steps):\n    return True", "returns True at step 0"),
        ("def factor(step, total_steps):\n    return '0.5'", "returns '0.5' at step 0"),
        ("def factor(step, total_steps):\n    return 0.5 + 0j", "returns (0.5+0j) at step 0"),
        (
            "import numpy\ndef factor(step, total_steps):\n    return numpy.bool_(1)",
            "at step 0 of 200; return the share",
        ),
        (
            "import torch\ndef factor(step, total_steps):\n    return torch.ones(3, 1)",
            "returns tensor([[1.], [1.], [1.]]) at step 0",
        ),
        (
            "import torch\ndef factor(step, total_steps):\n    return torch.tensor(float('nan'))",
            "returns tensor(nan) at",
        ),
        (
            "x = []\ndef factor(step, total_steps):\n    x.append(0)\n    return 1 / len(x)",
            "a resumed run would differ",
        ),
    ],
)
def test_invalid_schedule_file_is_an_error_with_its_name(
    tmp_path: Path, capsys, text: str | None, message: str
) -> None:
    path = str(tmp_path / "my_schedule.py") if text is None else written(tmp_path, text)
    arguments = ["config", "check", "debug", f"--lr_scheduler.name={path}", "--training.device=cpu"]
    assert main(arguments) == 2

    output = "".join(capsys.readouterr()).splitlines()
    lines = [line for line in output if not line.startswith("note:")]
    (line,) = [line for line in lines if "my_schedule.py" in line]
    assert "lr_scheduler.name=" in line
    assert message in line


@pytest.mark.parametrize(
    "number",
    [
        0.25, np.float32(0.25), np.float16(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor(0.25).bfloat16(),
        Fraction(1, 4), 1, 0, np.int64(1), torch.tensor(1),
    ],
    ids=repr,
)  # fmt: skip
def test_every_real_number_type_is_accepted(number: Any) -> None:
    rate = learning_rate(
        Optimizer(lr=0.5), LRScheduler(), 10, 3, schedule=lambda step, total_steps: number
    )
    assert type(rate) is float
    assert rate == 0.5 * float(number)


def test_option_that_a_schedule_file_does_not_read_is_an_error(tmp_path: Path, capsys) -> None:
    arguments = [
        "config",
        "check",
        "debug",
        f"--lr_scheduler.name={written(tmp_path)}",
        "--training.device=cpu",
    ]
    assert main(arguments) == 0
    assert main([*arguments, "--lr_scheduler.warmup_proportion=0.5"]) == 2
    assert "lr_scheduler.warmup_proportion=0.5 has no effect with lr_scheduler.name" in "".join(
        capsys.readouterr()
    )


# expression of a schedule with 20,000 steps and 4,321 steps of warmup -> message of the error
LATE = {
    "float('nan') if step == 3 else 1.0": "returns nan at step 3 of 20000",
    "1 / (total_steps - 1 - step) if step > 19_000 else 1.0": "fails (line 2): division by zero",
    "2.0 if step == warmup_steps else 1.0": "returns 2.0 at step 4321 of 20000",
}


@pytest.mark.parametrize("verb", [["config", "check"], ["train"]])
@pytest.mark.parametrize("share", LATE)
def test_invalid_value_at_an_edge_of_a_long_schedule_is_found_at_start(
    tmp_path: Path, capsys, share, verb
) -> None:
    path = written(tmp_path, f"def factor(step, total_steps, warmup_steps):\n    return {share}")
    options = {
        "job.dump_folder": tmp_path / "run", "lr_scheduler.name": path, "lr_scheduler.warmup_steps": 4321,
        "training.steps": 20_000, "training.on_data_end": "repeat", "training.device": "cpu",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert main([*verb, "debug", *arguments, *(["--nproc=1"] if verb == ["train"] else [])]) == 2

    (line,) = [
        line for line in "".join(capsys.readouterr()).splitlines() if line.startswith("error")
    ]
    assert LATE[share] in line


@pytest.mark.parametrize(
    "text",
    [
        "import time\ndef factor(step, total_steps):\n    time.sleep(60)",
        "import time\ntime.sleep(60)\ndef factor(step, total_steps):\n    return 1.0",
    ],
    ids=["when called", "when imported"],
)
def test_schedule_file_that_does_not_return_times_out(
    text: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(own_files, "SCHEDULE_SECONDS", 0.2)
    path = written(tmp_path, text)
    assert (
        main(["config", "check", "debug", f"--lr_scheduler.name={path}", "--training.device=cpu"])
        == 2
    )

    (line,) = [
        line for line in "".join(capsys.readouterr()).splitlines() if line.startswith("error")
    ]
    assert "does not return the factors of about 1,000 steps within 0.2 s; compute them" in line
