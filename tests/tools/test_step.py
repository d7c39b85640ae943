"""``--step latest|best|N`` selects the same checkpoint in every command and in Python, and its name is printed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiers import cases
from tiny import shallow_config, text_file, train_whole

import shardtrain
from shardtrain import cli
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.train.run_folder import write_resolved_config
from shardtrain.train.validation import Evaluation, Validator
from shardtrain.utils.errors import ConfigError

LOSSES = [3.0, 1.0, 2.0]
"""Validation losses after steps 1, 2 and 3: the best step is 2, the latest 3."""
NAMED = {None: 2, "best": 2, "latest": 3, "1": 1}
"""Value of ``--step`` -> selected step."""
COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "RUN", "--prompt", "mesh", "--max_new_tokens", "1"],
    "evaluate": ["evaluate", "RUN", "--data", "words=FILE", "--seq_len", "64"],
    "export": ["export", "RUN", "--to", "NEW", "--check", "weights"],
    "to-dcp": ["checkpoint", "to-dcp", "RUN", "NEW"],
    "to-fmengine": ["checkpoint", "to-fmengine", "RUN", "NEW"],
    "diff": ["checkpoint", "diff", "RUN", "RUN"],
    "weights": ["checkpoint", "weights", "RUN", "NEW"],
    "test": ["test", "RUN/config.resolved.toml", "--output", "NEW", "--nproc", "1"],
    "merge": ["merge", "ADAPTERS", "--to", "NEW"],
}
FIRST = [
    *((command, None) for command in COMMANDS),
    ("export", "latest"),
    ("generate", "1"),
    ("merge", "best"),
]
REST = [(command, step) for command in COMMANDS for step in ("best", "latest", "1")]


def train_with_losses(rank: int, config: Config) -> None:
    """Train with ``LOSSES`` as the validation losses."""

    def scripted(self: Validator, step: int) -> Evaluation:
        self._last_step = step
        return Evaluation(LOSSES[step - 1], 1, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validator, "run", scripted)
        ended = train_whole(rank, config)
    assert ended.error is None, ended.error


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a full run and a LoRA run of three steps each. The best step is 2."""
    root = tmp_path_factory.mktemp("step")
    paths = {"RUN": root / "run", "ADAPTERS": root / "adapters", "FILE": root / "words.txt"}
    paths["FILE"].write_text(
        "mesh shard gather reduce loss token layer rank step seed weight norm " * 4
    )
    for name, lora in (("RUN", {}), ("ADAPTERS", {"enable": True, "random_base": True})):
        config = shallow_config(
            job={"dump_folder": str(paths[name])},
            model={"hf_assets_path": "bytes"},
            training={"steps": len(LOSSES), "local_batch_size": 4},
            checkpoint={"enable": True, "interval": 1, "keep_best": "validation.loss"},
            validation={
                "enable": True,
                "dataset": "text",
                "dataset_path": text_file(),
                "freq": 1,
                "seq_len": 64,
            },
            lora=lora,
        )
        run_ranks(1, train_with_losses, config)
        write_resolved_config(Loaded(config), paths[name], 1)
    return paths


def run(
    command: list[str], folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> tuple[int, str]:
    paths = {**folders, "NEW": tmp_path / "new"}
    replaced = []
    for argument in command:
        for name, path in paths.items():
            argument = argument.replace(name, str(path))
        replaced.append(argument)
    code = cli.main(replaced)
    out, err = capfd.readouterr()
    return code, out + err


@pytest.mark.parametrize(
    ("command", "step"),
    cases(FIRST, nightly=[case for case in REST if case not in FIRST]),
)
def test_every_command_opens_the_named_step_and_prints_it(
    command: str, step: str | None, folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    arguments = [*COMMANDS[command], *(["--step", step] if step else [])]
    code, text = run(arguments, folders, tmp_path, capfd)
    assert code == 0, text

    reasons = {
        2: "best validation.loss 1; the latest is step 3: --step=latest",
        1: "the best is step 2: --step=best",
    }
    assert f"step-{NAMED[step]} ({reasons.get(NAMED[step], reasons[1])})" in text


def test_checkpoint_is_an_alias_of_step_in_test(
    folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    for name in ("latest", str(folders["RUN"] / "checkpoint/step-3")):
        code, text = run([*COMMANDS["test"], "--checkpoint", name], folders, tmp_path, capfd)
        assert code == 0
        assert "step-3" in text
    code, text = run(
        [*COMMANDS["test"], "--checkpoint", "1", "--step", "1"], folders, tmp_path, capfd
    )

    assert code == 2
    assert '--checkpoint="1" is another name of --step; use one of them' in text


@pytest.mark.parametrize("step", [None, "latest", 1])
def test_python_opens_the_named_step(step: str | int | None, folders: dict[str, Path]) -> None:
    expected = NAMED.get(step, step)  # type: ignore[call-overload]
    model = shardtrain.load_model(folders["RUN"], step=step)
    assert f"step-{expected}" in repr(model)

    same = shardtrain.load_model(folders["RUN"] / f"checkpoint/step-{expected}")
    for name, weight in model.model.state_dict().items():
        assert weight.equal(same.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("nine", '--step="nine" must be latest, best or a number; write it like --step=best'),
        ("9", "--step=9 does not exist in RUN/checkpoint; it has the steps 1, 2, 3"),
    ],
)
def test_a_step_that_does_not_exist_is_rejected(
    step: str, message: str, folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    for command in COMMANDS.values():
        code, text = run([*command, "--step", step], folders, tmp_path, capfd)
        run_folder = folders["ADAPTERS" if "ADAPTERS" in command else "RUN"]
        assert code in (2, 5), text
        assert message.replace("RUN", str(run_folder)) in text, text


def test_step_requires_the_folder_of_a_run(
    folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    for verb in ("generate", "evaluate", "export", "to-dcp", "to-fmengine", "diff", "weights"):
        command = [
            argument.replace("RUN", str(folders["RUN"] / "checkpoint/step-3"))
            for argument in COMMANDS[verb]
        ]
        code, text = run([*command, "--step", "best"], folders, tmp_path, capfd)
        assert code == 2
        assert '--step="best" requires the folder of a run' in text

    with pytest.raises(
        ConfigError,
        match='^step="nine" must be latest, best or a number; write it like step="best"',
    ):
        shardtrain.load_model(folders["RUN"], step="nine")


def test_without_a_best_checkpoint_the_latest_is_used(
    folders: dict[str, Path], tmp_path: Path, capfd: Any
) -> None:
    copy = shutil.copytree(folders["RUN"], tmp_path / "copy")
    (copy / "checkpoint/best.json").unlink()
    assert "step-3," in repr(shardtrain.load_model(copy))

    code, text = run(
        ["export", str(copy), "--to", "NEW", "--step", "best"], folders, tmp_path, capfd
    )
    assert code == 5
    assert "--step=best does not exist" in text
    assert "checkpoint.keep_best" in text


def test_a_damaged_best_step_is_skipped_unless_it_was_named(
    folders: dict[str, Path], tmp_path: Path, capfd: Any, caplog: Any
) -> None:
    copy = shutil.copytree(folders["RUN"], tmp_path / "copy")
    (file,) = (copy / "checkpoint/step-2").glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    assert "step-3 (the best is step 2" in repr(shardtrain.load_model(copy))
    assert "skipped, using step-3" in caplog.text

    code, text = run(
        ["export", str(copy), "--to", "NEW", "--step", "best"], folders, tmp_path, capfd
    )
    assert code == 5
    assert "no checkpoint" in text
    assert "--step=best" in text
    assert "damaged" in text


def test_the_last_lines_of_the_log_name_the_best_step_and_the_commands(
    folders: dict[str, Path],
) -> None:
    lines = (folders["RUN"] / "logs/rank-0.log").read_text().splitlines()[-2:]
    (line,) = [line for line in lines if "best step" in line]
    assert "best step: 2 (validation.loss 1), last step: 3" in line
    assert (
        "generate, export, merge, test, evaluate and checkpoint (diff, weights, to-dcp, to-fmengine) use"
        in line
    )
