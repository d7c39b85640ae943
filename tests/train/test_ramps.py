"""Training with growing batches and sequences equals a plain loop, on any mesh and after a resume.

The plain loop has one process, PyTorch's AdamW, and no packing. It cuts each row where a sequence or a document ends,
and runs each piece on its own.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import Result, run_tiny, tiny_config, train_whole
from torch.nn import functional as F

from shardtrain import data, models
from shardtrain.config import derived
from shardtrain.config.schema import Config

STEPS = 5
SEQ_LEN = 64
BATCHES = [4, 4, 8, 8, 8]
LENGTHS = [16, 32, 32, 64, 64]
RAMPS: dict[str, Any] = {
    "batch_ramp": [[0, 4], [2, 8]],
    "sequence_ramp": [[0, 16], [1, 32], [3, 64]],
    "global_batch_size": -1,
}
SAME_LOSS = 1e-5
"""Losses are about 6 and float32 has 7 digits. See test_same_numbers.py for meshes."""

MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one process, accumulation": (1, 2, {}),
    "fsdp": (2, 2, {}),
    "tp": (2, 4, {"tensor_parallel_degree": 2}),
    "cp": (2, 2, {"context_parallel_degree": 2}),
    "pp": (2, 4, {"pipeline_parallel_degree": 2}),
    "pp, tp": (4, 4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "interleaved": (
        2,
        4,
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "Interleaved1F1B",
            "pipeline_parallel_layers_per_stage": 1,
        },
    ),
}
"""Number of ranks, local batch size, and options."""
PACKINGS: dict[str, dict[str, Any]] = {
    "concat": {},
    "first_fit": {"packing": "first_fit"},
    "best_fit": {"packing": "best_fit"},
    "masked concat": {"document_mask": "on"},
    "stream": {"mode": "stream", "readers": 4},
}


def texts(folder: Path) -> str:
    """Write documents of 5 to 90 bytes, some longer than a row."""
    generator = torch.Generator().manual_seed(0)
    with (folder / "texts.jsonl").open("w") as file:
        for length in torch.randint(5, 90, (200,), generator=generator).tolist():
            letters = torch.randint(97, 122, (length,), generator=generator)
            file.write(json.dumps({"text": bytes(letters.tolist()).decode()}) + "\n")
    return str(folder / "texts.jsonl")


def config(path: str, mesh: str, packing: str = "concat", **sections: Any) -> Config:
    _, rows, parallelism = MESHES[mesh]
    layers = 4 if mesh == "interleaved" else 2
    training = {
        "dataset": "jsonl",
        "dataset_path": path,
        "seq_len": SEQ_LEN,
        "local_batch_size": rows,
        "steps": STEPS,
        **RAMPS,
    }
    return tiny_config(
        **{
            "model": {"overrides": {"num_layers": layers}},
            "training": training,
            "parallelism": parallelism,
            "data": PACKINGS[packing],
            "checkpoint": {"enable": False},
            **sections,
        }
    )


def pieces_of(row: data.Batch, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens and targets of each piece of a row that attends only to itself."""
    documents = row.documents_BT
    documents = torch.zeros_like(row.tokens_BT) if documents is None else documents
    starts = [0]
    for column in range(1, SEQ_LEN):
        is_new_document = documents[0, column] != documents[0, column - 1]
        if column % length == 0 or is_new_document:
            starts.append(column)
    pieces = []
    for start, stop in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
        pieces.append((row.tokens_BT[:, start:stop], row.targets_BT[:, start:stop]))
    return pieces


def plain_losses(config: Config, results: list[Result]) -> list[float]:
    """Return the losses of a plain loop with the same initial weights and learning rates.

    ``results`` are those of all ranks, because a pipeline rank has only the weights of its stages.
    """
    one_row = dataclasses.replace(
        config.training,
        local_batch_size=1,
        global_batch_size=1,
        batch_ramp=[],
        sequence_ramp=[],
    )
    rows = data.open_dataloader(
        dataclasses.replace(config, training=one_row),
        batch_rank=0,
        num_batch_ranks=1,
        accumulation=1,
    )
    module, shape = models.configured(config.model)
    model = models.build(module, shape).to_empty(device="cpu")
    for result in results:
        model.load_state_dict(result.initial, strict=False)
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        num_targets = 0
        for _ in range(BATCHES[step]):
            for tokens, targets in pieces_of(next(rows), LENGTHS[step]):
                positions = torch.arange(tokens.size(1))[None]
                logits = model(tokens, positions)
                total = total + F.cross_entropy(logits[0], targets[0], reduction="sum")
                num_targets += int((targets != -100).sum())
        loss = total / num_targets
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = results[0].lrs[step]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "mesh",
    cases(
        ["one process, accumulation", "fsdp", "pp"], nightly=["tp", "cp", "pp, tp", "interleaved"]
    ),
)
def test_ramps_on_a_mesh_equal_a_plain_loop(tmp_path: Path, mesh: str) -> None:
    this = config(texts(tmp_path), mesh, "masked concat")
    results = run_tiny(MESHES[mesh][0], this, STEPS)
    assert results[0].losses == pytest.approx(plain_losses(this, results), abs=SAME_LOSS)
    assert results[0].state["samples_consumed"] == sum(BATCHES)


@pytest.mark.parametrize(
    "packing", cases(["concat", "best_fit"], nightly=["first_fit", "masked concat", "stream"])
)
def test_ramps_with_each_packing_equal_a_plain_loop(tmp_path: Path, packing: str) -> None:
    this = config(texts(tmp_path), "one process, accumulation", packing)
    results = run_tiny(1, this, STEPS)
    assert results[0].losses == pytest.approx(plain_losses(this, results), abs=SAME_LOSS)


def test_learning_rates_depend_on_the_step_and_not_on_its_size(tmp_path: Path) -> None:
    path = texts(tmp_path)
    with_ramps = run_tiny(1, config(path, "fsdp"), STEPS)[0]
    constant = {"dataset": "jsonl", "dataset_path": path, "steps": STEPS}
    without = run_tiny(1, tiny_config(training=constant), STEPS)[0]
    assert with_ramps.lrs == without.lrs


SAVED = 1
"""The checkpoint is before the second size of both ramps."""


@pytest.mark.parametrize(
    ("before", "after"),
    cases(
        [("fsdp", "one process, accumulation"), ("one process, accumulation", "pp")],
        nightly=[("pp", "fsdp"), ("fsdp", "tp"), ("fsdp", "fsdp")],
    ),
)
@pytest.mark.parametrize("packing", cases(["first_fit"], nightly=["stream"]))
def test_resume_in_a_ramp_continues_it(
    tmp_path: Path, before: str, after: str, packing: str
) -> None:
    path = texts(tmp_path)

    def run_config(mesh: str, folder: str) -> Config:
        return config(
            path,
            mesh,
            packing,
            job={"dump_folder": str(tmp_path / folder)},
            checkpoint={"enable": True, "interval": SAVED},
        )

    straight = run_ranks(MESHES[before][0], train_whole, run_config(before, "straight"))[0]
    run_ranks(MESHES[before][0], train_whole, run_config(before, "run"), 2)
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-2", ignore_errors=True)
    resumed = run_ranks(MESHES[after][0], train_whole, run_config(after, "run"))[0]

    assert resumed.error is None
    assert resumed.losses == pytest.approx(straight.losses[SAVED:], abs=SAME_LOSS)
    assert resumed.state["samples_consumed"] == sum(BATCHES)
    assert resumed.state["order_hash"] == straight.state["order_hash"]


def test_metrics_count_the_tokens_and_flops_of_each_step(tmp_path: Path) -> None:
    job = {"dump_folder": str(tmp_path)}
    run_config = config(texts(tmp_path), "one process, accumulation", job=job)
    assert run_ranks(1, train_whole, run_config)[0].error is None

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tokens_seen = [record["tokens_seen"] for record in records]
    assert tokens_seen == [SEQ_LEN * sum(BATCHES[: step + 1]) for step in range(STEPS)]

    # 12 layers * heads * head size * tokens per sequence, and 6 per parameter: longer sequences cost more per token
    flops = [record["tflops"] * 1e12 / record["tps"] for record in records]
    growth = [after - before for before, after in pairwise(flops)]
    per_token = 12 * 2 * 4 * 16
    expected_growth = [per_token * (after - before) for before, after in pairwise(LENGTHS)]

    # metrics.jsonl rounds numbers to four or more digits
    assert growth == pytest.approx(expected_growth, rel=1e-2, abs=per_token)


@pytest.mark.parametrize("mesh", cases(["pp"], nightly=["fsdp", "tp", "cp"]))
def test_validation_within_a_ramp_changes_no_number(tmp_path: Path, mesh: str) -> None:
    """Validation batches keep their shape while those of training grow."""
    path = texts(tmp_path)
    validation = {
        "enable": True,
        "dataset": "jsonl",
        "dataset_path": path,
        "freq": 2,
        "seq_len": SEQ_LEN,
    }

    def train_and_validate(mesh: str) -> tuple[Any, list[float]]:
        """Return the end of a run, and its validation losses."""
        folder = tmp_path / mesh
        run_config = config(path, mesh, job={"dump_folder": str(folder)}, validation=validation)
        ended = run_ranks(MESHES[mesh][0], train_whole, run_config)[0]
        assert ended.error is None
        lines = (folder / "validation.jsonl").read_text().splitlines()
        validation_losses = [json.loads(line)["loss"] for line in lines]
        # after steps 2 and 4, and after the last step
        assert len(validation_losses) == 3
        return ended, validation_losses

    expected, expected_validation = train_and_validate("one process, accumulation")
    ended, validation_losses = train_and_validate(mesh)
    without_validation = config(path, mesh, job={"dump_folder": str(tmp_path / "without")})
    unvalidated = run_ranks(MESHES[mesh][0], train_whole, without_validation)[0]

    assert ended.losses == unvalidated.losses
    assert ended.losses == pytest.approx(expected.losses, abs=SAME_LOSS)
    assert validation_losses == pytest.approx(expected_validation, abs=SAME_LOSS)


def test_epochs_end_after_the_steps_of_the_ramp(tmp_path: Path) -> None:
    job = {"dump_folder": str(tmp_path)}
    run_config = config(texts(tmp_path), "one process, accumulation", job=job)
    training = dataclasses.replace(run_config.training, epochs=1)
    run_config = dataclasses.replace(run_config, training=training)
    ended = run_ranks(1, train_whole, run_config)[0]
    assert ended.error is None

    rows = set()
    for step in ended.sample_ids:
        rows |= {sample for sample in step if sample >= 0}
    num_rows = ended.state["samples_consumed"]
    assert len(rows) == num_rows
    sizes = derived.step_sizes(run_config, 1)
    assert len(ended.losses) == sizes.num_steps(0, num_rows)
