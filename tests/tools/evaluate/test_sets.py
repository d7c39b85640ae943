"""``shardtrain evaluate``: losses equal those of transformers and of validation, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from tiers import cases
from tiny import shallow_config, text_file, train_whole

from shardtrain import cli, data
from shardtrain.config import Loaded
from shardtrain.config.schema import Validation
from shardtrain.data import IGNORE
from shardtrain.distributed.process_group import World
from shardtrain.tools.evaluate import evaluate_request, sets
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.train.run_folder import write_resolved_config

TEXTS = [
    "mesh and shard, in step",
    "the rank that gathers last, é 東京",
    "a loss of seven; a norm of eleven " * 4,
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def section(rows: Path) -> Validation:
    return Validation(
        dataset="jsonl", dataset_path=str(rows), split="train", local_batch_size=2, seq_len=32
    )


def test_loss_and_bits_equal_those_of_transformers_in_float64(rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reference = build("llama3").double()
    folder = save(reference.float(), tmp_path / "hf")
    reference = reference.double()
    opened = open_model(folder, tokenizer_path="bytes")
    result = sets.measure(opened, section(rows))
    stream = data.open_dataloader(
        opened.config,
        section=section(rows),
        batch_rank=0,
        num_batch_ranks=1,
        accumulation=1,
        shuffle=False,
        loop=False,
    )
    total = 0.0
    tokens = 0
    for batch in stream:
        with torch.no_grad():
            logits = reference(batch.tokens_BT).logits.flatten(0, 1)
        targets = batch.targets_BT.flatten()
        total += float(
            torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        )
        tokens += int((targets != IGNORE).sum())

    assert result["tokens"] == tokens
    # float32 compared with float64
    assert result["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)

    size = sum(len(text.encode()) for text in TEXTS)
    assert size - 1 <= result["bytes"] <= size, (
        "all bytes, or all but the first, which has no context"
    )
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / result["bytes"], rel=1e-6)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one file of each kind: plain text, rows of text, and rows of prompts and completions."""
    folder = tmp_path_factory.mktemp("held_out")
    text = Path(text_file()).read_text()[:3000]
    tokens = text.split()
    pairs = [
        {"prompt": first, "completion": f" {second}"}
        for first, second in itertools.pairwise(tokens)
    ]
    rows = {"jsonl": [{"text": text[i : i + 70]} for i in range(0, 3000, 70)], "pairs": pairs[:60]}
    (folder / "text").write_text(text)
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: folder / name for name in ("text", *rows)}


def run_of(folder: Path, dataset: str, path: Path, num_ranks: int, **sections: Any) -> float:
    """Train for two steps, and return the loss of the last validation."""
    validation = {
        "enable": True,
        "freq": 2,
        "dataset": dataset,
        "dataset_path": str(path),
        "seq_len": 64,
    }
    sections = {**sections, "validation": {**validation, **sections.get("validation", {})}}
    config = shallow_config(
        job={"dump_folder": str(folder)},
        **{
            "training": {"steps": 2, "local_batch_size": 4},
            "checkpoint": {"enable": True},
            **sections,
        },
    )
    assert run_ranks(num_ranks, train_whole, config)[0].error is None
    write_resolved_config(Loaded(config), folder, num_ranks)
    return float(json.loads((folder / "validation.jsonl").read_text().splitlines()[-1])["loss"])


def measured(rank: int, folder: Path, size: int) -> Any:
    opened = open_model(folder, world=World(rank, size, rank, torch.device("cpu")))
    return sets.measure(opened, sets.section_of_run(opened))


# Name: ranks of the run, data set, options, and number of validation sequences.
RUNS: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "the entire set": (1, "text", {}, 47),
    "steps": (1, "text", {"validation": {"steps": 3, "local_batch_size": 5}}, 15),
    "more steps than the set has": (1, "text", {"validation": {"steps": 99}}, 47),
    "another length": (1, "text", {"validation": {"steps": 2, "local_batch_size": 3, "seq_len": 40}}, 6),
    "data-parallel ranks": (2, "text", {"validation": {"steps": 2, "local_batch_size": 3}}, 12),
    "tensor-parallel ranks": (
        2, "text", {"validation": {"steps": 2, "local_batch_size": 3}, "parallelism": {"tensor_parallel_degree": 2}}, 6,
    ),
    "a pipeline": (
        2, "text", {"validation": {"steps": 2}, "parallelism": {"pipeline_parallel_degree": 2}}, 16,
    ),
    "rows": (1, "jsonl", {"validation": {"steps": 3, "local_batch_size": 2}}, 6),
    "a stream": (1, "jsonl", {"validation": {"steps": 3, "local_batch_size": 2}, "data": {"mode": "stream"}}, 6),
    "prompts and completions": (
        1, "pairs", {
            "validation": {"steps": 2, "local_batch_size": 2},
            "data": {"format": "prompt_completion"}, "training": {"dataset": "jsonl", "steps": 2},
        }, 4,
    ),
    "padded rows": (
        2, "jsonl", {"validation": {"steps": 1, "local_batch_size": 4}, "data": {"packing": "padded"}}, 8,
    ),
}  # fmt: skip


BY_DEFAULT = ("steps", "data-parallel ranks", "prompts and completions")


@pytest.mark.parametrize(
    "case", cases(BY_DEFAULT, nightly=[name for name in RUNS if name not in BY_DEFAULT])
)
def test_the_loss_equals_the_validation_loss_of_the_run(
    case: str, held_out: dict[str, Path], tmp_path: Path
) -> None:
    num_ranks, kind, sections, sequences = RUNS[case]
    if kind == "pairs":
        sections = {
            **sections,
            "training": {**sections["training"], "dataset_path": str(held_out[kind])},
        }
    expected = run_of(
        tmp_path, "text" if kind == "text" else "jsonl", held_out[kind], num_ranks, **sections
    )
    result = run_ranks(1, measured, tmp_path, 1)[0]

    # float32 sums in a different order
    assert result["loss"] == pytest.approx(expected, rel=1e-6)
    assert result["sequences"] == sequences


def test_the_loss_of_a_run_is_the_same_on_any_number_of_ranks(
    held_out: dict[str, Path], tmp_path: Path
) -> None:
    run_of(tmp_path, "text", held_out["text"], 1, validation={"steps": 3, "local_batch_size": 5})
    single = run_ranks(1, measured, tmp_path, 1)[0]
    for result in run_ranks(2, measured, tmp_path, 2):
        # ranks sum in a different order
        assert result["loss"] == pytest.approx(single["loss"], rel=1e-6)
        assert {**result, "loss": 0, "perplexity": 0, "bits_per_byte": 0} == {
            **single, "loss": 0, "perplexity": 0, "bits_per_byte": 0,
        }  # fmt: skip


def test_the_command_prints_the_evaluated_fraction_of_the_run_s_set(
    held_out: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    validation = {"steps": 3, "local_batch_size": 5}
    expected = run_of(tmp_path, "text", held_out["text"], 1, validation=validation)
    assert cli.main(["evaluate", "--from", str(tmp_path)]) == 0

    printed = capfd.readouterr()
    assert "validation: 15 of 47 sequences (validation.steps=3)" in printed.err
    loss = json.loads(printed.out)["sets"]["validation"]["loss"]
    assert loss == pytest.approx(expected, rel=1e-6)  # float32 rounding


def test_the_validation_loss_of_another_task_is_refused(
    held_out: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, "text", held_out["text"], 1)
    resolved = tmp_path / "config.resolved.toml"
    resolved.write_text(
        resolved.read_text().replace('name = "language_model"', 'name = "preference"')
    )
    assert cli.main(["evaluate", "--from", str(tmp_path)]) == 2
    assert (
        'task.name="preference" has its own loss on [validation]; run "shardtrain test"'
        in capfd.readouterr().err
    )


def test_the_command_prints_and_writes_json(
    rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    folder = save(build("llama3"), tmp_path / "hf")
    output = tmp_path / "found.json"
    arguments = ["evaluate", "--from", str(folder), "--tokenizer", "bytes", "--seq_len", "32"]
    assert (
        cli.main(
            [*arguments, "--data", f"one={rows}", "--data", f"two={rows}", "--output", str(output)]
        )
        == 0
    )

    printed = json.loads(capfd.readouterr().out)
    assert printed["sets"]["one"] == printed["sets"]["two"]
    assert printed == json.loads(output.read_text())
    assert cli.main([*arguments, "--data", f"one={rows}", "--output", str(output)]) == 2, (
        "an existing file must not be overwritten"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "x"], "is not NAME=FILE"),
        (["--data", "a=missing.jsonl"], "names a file that does not exist"),
        (["--data", f"a={__file__}"], "has an ending of no known format"),
        (["--limit", "3"], "--limit=3 has no effect without --tasks".replace("=3", "")),
        (["--seq_len", "30", "--nproc", "4"], "is not a multiple of --nproc=4"),
        (["--batch_size", "0"], "must be at least 1"),
    ],
)
def test_a_wrong_argument_is_rejected_with_a_fix(arguments: list[str], message: str) -> None:
    with pytest.raises(Exception) as error:
        evaluate_request.read(["--from", "x", *arguments])
    assert message in " ".join(map(str, getattr(error.value, "problems", [error.value]))).replace(
        '="3"', ""
    )
