"""Token metrics in a Python file of the user: equal on every mesh, and errors name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from tiers import cases
from tiny import text_file, tiny_config, train_whole

from shardtrain.cli import main

# a metric that equals the loss, to compare with the loss of the step, and two others
FILES = {
    "loss": "import torch\ndef measure(logits, targets):\n"
    "    return torch.nn.functional.cross_entropy(logits, targets, reduction='none')\n",
    "accuracy": "def measure(logits, targets):\n    return (logits.argmax(-1) == targets).float()\n",
    # changes its argument in place, which must not affect the loss or the next metric
    "mean": "def measure(logits, targets):\n    return logits.mul_(0).add_(logits.shape[1]).mean(-1)\n",
}
MESHES = {
    "one process": (1, {}),
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "tp 3": (3, {"tensor_parallel_degree": 3}),
    "whole logits": (2, {"tensor_parallel_degree": 2, "disable_loss_parallel": True}),
    "cp": (2, {"context_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "pp tp": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
}
SHAPE = {
    "vocab_size": 514,
    "dim": 48,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 8,
    "ffn_dim": 96,
    "num_layers": 2,
}
"""Sizes divisible by 2 and 3, except for the vocabulary, which is uneven on 3 ranks."""


def written(folder: Path) -> list[str]:
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return [str(folder / f"{name}.py") for name in FILES]


def trained(rank: int, folder: Path, paths: list[str], mesh: str, stop_after: int | None = None):
    degrees = MESHES[mesh][1]
    shares = 1 if degrees or mesh == "one process" else 2
    config = tiny_config(
        job={"dump_folder": str(folder)},
        model={"overrides": SHAPE},
        parallelism=degrees,
        training={"steps": 4, "local_batch_size": 8 // shares, "seq_len": 60},
        metrics={"log_freq": 1, "token_metrics": paths},
        validation={
            "enable": True,
            "dataset": "text",
            "dataset_path": text_file(),
            "freq": 1,
            "steps": 1,
            "local_batch_size": 8 // shares,
            "seq_len": 60,
        },
        checkpoint={"enable": True, "interval": 2},
    )
    return train_whole(rank, config, stop_after=stop_after)


def logged(folder: Path) -> list[tuple[int, float, dict[str, float]]]:
    steps = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(text)
        metrics = {key: value for key, value in record.items() if key.startswith("token_metrics/")}
        steps.append((record["step"], record["loss"], metrics))
    return steps


@pytest.mark.parametrize(
    "mesh",
    cases(["one process", "tp 3", "pp"], nightly=["fsdp", "tp", "whole logits", "cp", "pp tp"]),
)
def test_metric_is_the_mean_over_target_tokens_on_every_mesh(tmp_path: Path, mesh: str) -> None:
    paths = written(tmp_path)
    for ended in run_ranks(MESHES[mesh][0], trained, tmp_path / "run", paths, mesh):
        assert ended.error is None
    for ended in run_ranks(1, trained, tmp_path / "plain", [], "one process"):
        assert ended.error is None

    steps = logged(tmp_path / "run")
    steps_without_metrics = logged(tmp_path / "plain")
    assert [step for step, _, _ in steps] == [1, 2, 3, 4]

    for record, plain_record in zip(steps, steps_without_metrics, strict=True):
        _, loss, metrics = record
        _, plain_loss, plain_metrics = plain_record
        assert plain_metrics == {}
        assert set(metrics) == {f"token_metrics/{name}" for name in FILES}
        # float32 losses of single tokens, summed in a different order
        assert metrics["token_metrics/loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["token_metrics/mean"] == SHAPE["vocab_size"]
        assert 0 <= metrics["token_metrics/accuracy"] <= 1
        assert loss == pytest.approx(plain_loss, rel=1e-5)


def test_resumed_run_logs_the_same_metrics(tmp_path: Path) -> None:
    paths = written(tmp_path)
    run_ranks(1, trained, tmp_path / "straight", paths, "one process")
    run_ranks(1, trained, tmp_path / "killed", paths, "one process", 3)
    run_ranks(1, trained, tmp_path / "killed", paths, "one process")

    assert logged(tmp_path / "killed") == logged(tmp_path / "straight")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a file"),
        ("def accuracy(logits, targets): ...", "has no measure; define measure(logits, targets)"),
        (
            "def measure(logits, targets):\n    return logits.absent",
            "fails (line 2): 'Tensor' object has no attribute",
        ),
        ("def measure(logits, targets):\n    return logits", "returns (3, 8) for 3 tokens"),
        ("def measure(logits, targets):\n    return 0.5", "returns float for 3 tokens"),
        ("def measure(logits):\n    return logits[:, 0]", "takes fewer than two arguments"),
    ],
)
def test_invalid_metric_file_is_an_error_with_its_name(
    tmp_path: Path, capsys, text: str | None, message: str
) -> None:
    path = tmp_path / "my_metric.py"
    if text is not None:
        path.write_text(text)

    assert (
        main(
            ["config", "check", "debug", f"--metrics.token_metrics={path}", "--training.device=cpu"]
        )
        == 2
    )

    (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if "my_metric.py" in line]
    assert "metrics.token_metrics=" in line
    assert message in line


def test_metrics_require_the_language_model_task_and_distinct_names(tmp_path: Path, capsys) -> None:
    paths = written(tmp_path)
    (tmp_path / "more").mkdir()
    arguments = [
        "config",
        "check",
        "debug",
        "--training.device=cpu",
        f"--metrics.token_metrics={paths[0]}",
    ]

    assert main([*arguments, "--task.name=kto"]) == 2
    assert 'is not supported with task.name="kto"' in "".join(capsys.readouterr())

    again = written(tmp_path / "more")[0]
    assert main([*arguments[:-1], f"--metrics.token_metrics={paths[0]},{again}"]) == 2
    assert "files with the same name" in "".join(capsys.readouterr())
