"""The Python API computes the same results as the verbs, and restores the state of the process."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import patience
import pytest
import torch
from tiny import text_file

import shardtrain
from shardtrain import cli
from shardtrain.utils.errors import CheckpointError, ConfigError, ShardtrainError

ROOT = Path(__file__).parents[1]
SHAPE = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 64,
}


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model.hf_assets_path": "bytes",
        "metrics.sample_freq": 0,
        "model.overrides": "{"
        + ", ".join(f"{name} = {value}" for name, value in SHAPE.items())
        + "}",
        "training.dataset": "text",
        "training.dataset_path": text_file(),
        "training.seq_len": 16,
        "training.local_batch_size": 2,
        "training.steps": 4,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "job.dump_folder": str(folder),
        **more,
    }


def flags(values: dict[str, Any]) -> list[str]:
    """Return options as flags of the command line."""
    texts = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in values.items()
    }
    return [f"--{name}={text}" for name, text in texts.items()]


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def process_state() -> tuple[Any, ...]:
    """Return the process-wide state that a trainer changes while it runs and must restore."""
    logger = logging.getLogger("shardtrain")
    cudnn = torch.backends.cudnn
    switches = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    log = list(logger.handlers), logger.level, logger.propagate
    return dict(os.environ), log, sys.excepthook, torch.get_default_dtype(), switches


def test_package_is_imported_without_torch_and_lists_its_names() -> None:
    code = "import sys, shardtrain; print('torch' in sys.modules, 'numpy' in sys.modules, sorted(shardtrain.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(
        "False False ['StepResult', 'Trainer', 'evaluate', 'generate', 'load_config'"
    ), done
    assert all(getattr(shardtrain, name).__doc__ for name in shardtrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trainer_'"):
        _ = shardtrain.trainer_  # type: ignore[attr-defined]


def test_single_steps_equal_the_command_line_and_restore_the_process(tmp_path: Path) -> None:
    options_of_command = flags(options(tmp_path / "cli"))
    command = [sys.executable, "-m", "shardtrain", "train", "debug", *options_of_command]
    done = forked.run([*command, "--nproc", "1"], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

    expected = losses(tmp_path / "cli")
    before = process_state()
    with shardtrain.Trainer("debug", options(tmp_path / "hand")) as trainer:
        results = []
        while (result := trainer.step()) is not None:
            results.append(result)
        assert trainer.state.step == 4

    assert {result.step: result.loss for result in results} == expected
    assert (tmp_path / "hand" / "checkpoint" / "step-4" / "manifest.json").exists()
    assert process_state() == before
    with pytest.raises(ShardtrainError, match="closed"):
        trainer.step()


def test_run_resumes_bitwise_in_the_same_process(tmp_path: Path) -> None:
    straight = shardtrain.Trainer("debug", options(tmp_path / "straight")).train()
    with shardtrain.Trainer("debug", options(tmp_path / "parts")) as trainer:
        first_steps = [trainer.step(), trainer.step()]
    state = shardtrain.Trainer("debug", options(tmp_path / "parts")).train()

    assert state == straight

    expected = losses(tmp_path / "straight")
    assert [result.loss for result in first_steps if result] == [expected[1], expected[2]]
    # The second trainer replaces metrics.jsonl, so it only has the later steps.
    assert losses(tmp_path / "parts") == {3: expected[3], 4: expected[4]}
    assert json.loads((tmp_path / "parts" / "exit.json").read_text())["code"] == 0


def test_generate_and_evaluate_equal_the_verbs(tmp_path: Path, capsys) -> None:
    shardtrain.Trainer("debug", options(tmp_path / "run")).train()
    model = shardtrain.load_model(tmp_path / "run")
    assert re.fullmatch(r"OpenedModel\(llama3, .*step-4, float32 on cpu\)", repr(model))

    texts = shardtrain.generate(model, ["mesh ", "loss"], max_new_tokens=5)
    capsys.readouterr()
    generate = ["generate", "--from", str(tmp_path / "run"), "--max_new_tokens", "5"]
    for prompt, text in zip(["mesh ", "loss"], texts, strict=True):
        assert cli.main([*generate, "--prompt", prompt]) == 0
        assert capsys.readouterr().out == text + "\n"

    data = tmp_path / "held_out.txt"
    data.write_text("mesh shard gather reduce\n" * 20)
    evaluation = shardtrain.evaluate(model, data, seq_len=16)
    evaluate = ["evaluate", "--from", str(tmp_path / "run"), "--data", f"held_out={data}"]

    assert cli.main([*evaluate, "--seq_len", "16"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["held_out"] == evaluation


def test_run_of_single_steps_opens_as_a_model(tmp_path: Path) -> None:
    with shardtrain.Trainer("debug", options(tmp_path / "run", **{"training.steps": 2})) as trainer:
        while trainer.step() is not None:
            pass
    (text,) = shardtrain.generate(
        shardtrain.load_model(tmp_path / "run"), "mesh ", max_new_tokens=3
    )

    assert isinstance(text, str)


def test_environment_changes_of_the_user_persist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGED_BY_THE_USER", "before")
    monkeypatch.delenv("SET_BY_THE_USER", raising=False)
    names = set(os.environ)
    with shardtrain.Trainer("debug", options(tmp_path)) as trainer:
        trainer.step()
        monkeypatch.setenv("CHANGED_BY_THE_USER", "after")
        monkeypatch.setenv("SET_BY_THE_USER", "1")

    assert (os.environ["CHANGED_BY_THE_USER"], os.environ["SET_BY_THE_USER"]) == ("after", "1")
    assert set(os.environ) - names == {"SET_BY_THE_USER"}


def test_type_checker_knows_the_names(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "import shardtrain\n"
        "reveal_type(shardtrain.Trainer('debug').step())\n"
        "reveal_type(shardtrain.generate(shardtrain.load_model('run'), 'x'))\n"
    )
    done = subprocess.run(
        # without the types of libraries, because reading those of PyTorch takes six times longer
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--no-site-packages",
         "--ignore-missing-imports", "user.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*?)"', done.stdout)
    old_style = ["Union[shardtrain.api.StepResult, None]", "builtins.list[builtins.str]"]

    assert revealed in (["shardtrain.api.StepResult | None", "list[str]"], old_style), done.stdout


@pytest.mark.nightly(
    "from Python",
    by="tests/tools/verify/test_verify.py::test_clean_runs_give_no_alarm",
)
def test_verify_returns_a_result_per_mesh(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    (result,) = shardtrain.verify(path, meshes=["tp=2"], steps=1)

    assert (result.mesh, result.verdict, result.initial) == ("tp=2", "same", 0)
    with pytest.raises(
        ConfigError, match=r"mesh tp=3: parallelism.tensor_parallel_degree=3 does not divide"
    ):
        shardtrain.verify(path, meshes=["tp=3"])


def test_wrong_input_is_a_one_line_error_and_does_not_change_the_process(tmp_path: Path) -> None:
    before = process_state()
    with pytest.raises(ConfigError, match=r"training.stepz.* did you mean training.steps\?"):
        shardtrain.load_config(None, {"training.stepz": 3})
    with pytest.raises(ConfigError, match=r"nope.toml.* does not exist"):
        shardtrain.Trainer(tmp_path / "nope.toml")
    with pytest.raises(ConfigError, match="training.seq_len=0 must be at least 1"):
        shardtrain.Trainer("debug", options(tmp_path, **{"training.seq_len": 0}))
    with pytest.raises(ConfigError, match="cannot be combined with"):
        shardtrain.Trainer(shardtrain.load_config(), {"training.steps": 3})
    with pytest.raises((ConfigError, CheckpointError), match='path=".*none" does not exist'):
        shardtrain.load_model(tmp_path / "none")
    assert process_state() == before


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)


@pytest.mark.nightly("runs all examples of a page")
def test_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    parts = blocks((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    assert len(parts) >= 4

    (tmp_path / "all.py").write_text("\n".join(parts))
    done = forked.run(
        [sys.executable, "all.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )

    assert done.returncode == 0, done.stderr[-2000:]
