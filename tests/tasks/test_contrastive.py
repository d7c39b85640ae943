"""The example task of embedding models: sentence-transformers' loss on data-parallel meshes, and its exports."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import forked
import patience
import pytest
import torch
from against import WORDS, config_for, folder
from ranks import run_ranks
from tiers import cases
from tiny import make_run, train_whole
from torch import Tensor

from shardtrain.config.schema import Config
from shardtrain.hf import importing
from shardtrain.ops.dtensor import to_full
from shardtrain.tasks import open_task
from shardtrain.train import resume, trainer
from shardtrain.utils.errors import ConfigError, DataError

FILE = Path(__file__).parents[2] / "examples" / "tasks" / "contrastive.py"
ROWS = 8
SAME = 1e-5
"""Tolerance of losses and gradients in float32. Matrix products are added in another order."""
OURS = {
    "embed.weight": "embed_tokens.weight",
    "layers.0.ffn.w1.weight": "layers.0.mlp.gate_proj.weight",
    "layers.1.ffn.w2.weight": "layers.1.mlp.down_proj.weight",
    "layers.1.attn.wv.weight": "layers.1.self_attn.v_proj.weight",
    "norm.weight": "norm.weight",
}


def rows(negatives: int, count: int = ROWS) -> list[dict[str, Any]]:
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))

    result = []
    for _ in range(count):
        row: dict[str, Any] = {"anchor": text(), "positive": text()}
        if negatives == 1:
            row["negative"] = text()
        if negatives > 1:
            row["negative"] = [text() for _ in range(negatives)]
        result.append(row)
    return result


def contrastive(
    run: Path, data: list[dict[str, Any]], pooling: str = "mean", **sections: dict[str, Any]
) -> Config:
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    task = {"name": str(FILE), "options": {"pooling": pooling, "temperature": 0.1}}
    training = {"global_batch_size": ROWS, "max_norm": 1e9, **sections.pop("training", {})}
    return config_for(run, task=task, training=training, **sections)


def one_step(rank: int, config: Config) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the first step, from the weights of the folder."""
    run = make_run(rank, config)
    importing.fill_as_configured(resume.weights(run), folder(), config)
    gradients = {}
    update = run.runner.update

    def keep(optimizer: torch.optim.Optimizer) -> None:
        parameters = run.runner.parameters()
        for name in OURS:
            gradient = parameters[name].grad
            assert gradient is not None
            gradients[name] = to_full(gradient).clone()
        update(optimizer)

    run.runner.update = keep  # type: ignore[method-assign]
    outcome = trainer.step(run)
    assert outcome is not None
    loss = run.mesh.sum_of_all(outcome.loss_sum.double()).item() / outcome.global_tokens
    return loss, gradients


def needs_sentence_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("sentence_transformers")


def write_modules(path: Path, pooling: str) -> None:
    """Run the example's script, which adds the modules of sentence-transformers to a folder."""
    command = [sys.executable, str(FILE), str(path), "--pooling", pooling]
    forked.run(command, check=True, timeout=patience.seconds(100))


@functools.cache
def theirs(negatives: int, pooling: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of MultipleNegativesRankingLoss for the rows of the first step."""
    package = needs_sentence_transformers()
    from sentence_transformers.sentence_transformer import losses

    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "hf"
    shutil.copytree(folder(), path)
    write_modules(path, pooling)
    model = package.SentenceTransformer(str(path), device="cpu")
    data = rows(negatives)
    columns: list[list[str]] = [[], []]
    for row in data:
        columns[0].append(row["anchor"])
        columns[1].append(row["positive"])
    for number in range(negatives):
        column = []
        for row in data:
            texts = row["negative"]
            column.append(texts if isinstance(texts, str) else texts[number])
        columns.append(column)
    loss_function = losses.MultipleNegativesRankingLoss(model, scale=10.0)
    features = [model.preprocess(column) for column in columns]
    loss = loss_function(features, None)
    loss.backward()
    named = dict(model.named_parameters())
    gradients = {}
    for ours, name in OURS.items():
        (match,) = (key for key in named if key.endswith(f"model.{name}"))
        gradients[ours] = named[match].grad.clone()
    return loss.item(), gradients


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "fsdp 4": (4, {}),
    "dp": (2, {"data_parallel_replicate_degree": 2}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
    "zero1": (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
}
FIRST = [("one", 1, "mean"), ("fsdp", 2, "last")]
OTHERS = [("one", 0, "mean"), ("one", 1, "last")]
OTHERS += [(mesh, 1, "mean") for mesh in MESHES if mesh != "one"]


@pytest.mark.parametrize(("mesh", "negatives", "pooling"), cases(FIRST, nightly=OTHERS))
def test_loss_and_gradients_equal_sentence_transformers(
    tmp_path: Path, mesh: str, negatives: int, pooling: str
) -> None:
    expected_loss, expected = theirs(negatives, pooling)
    num_ranks, parallelism = MESHES[mesh]
    training = {"local_batch_size": ROWS // num_ranks}
    config = contrastive(
        tmp_path, rows(negatives), pooling, parallelism=parallelism, training=training
    )

    for loss, gradients in run_ranks(num_ranks, one_step, config):
        assert loss == pytest.approx(expected_loss, abs=SAME)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=SAME, msg=name)


def test_rows_that_fill_up_a_batch_are_no_negatives(tmp_path: Path) -> None:
    """Six rows on four ranks with two each: the last rank has no row."""
    losses = []
    for num_ranks in (1, 4):
        config = contrastive(
            tmp_path,
            rows(1, 6),
            training={"local_batch_size": ROWS // num_ranks, "epochs": 1, "steps": 1,
                      "on_data_end": "stop", "last_batch": "keep"},
        )  # fmt: skip
        losses.append(run_ranks(num_ranks, one_step, config)[0][0])

    assert losses[0] == pytest.approx(losses[1], abs=SAME)


@pytest.mark.parametrize("pooling", cases(["last"], nightly=["mean"]))
def test_export_opens_in_sentence_transformers(tmp_path: Path, pooling: str) -> None:
    """Embeddings of the exported folder are those that the run evaluates."""
    package = needs_sentence_transformers()
    data = rows(0)
    config = contrastive(
        tmp_path,
        data,
        pooling,
        training={"steps": 2, "local_batch_size": ROWS},
        checkpoint={"last_save_in_hf": True, "last_save_model_only": True},
    )
    (ended,) = run_ranks(1, train_whole, config)
    assert ended.error is None

    # Embeddings of sentence-transformers, from the exported folder.
    exported = next(path.parent for path in tmp_path.rglob("config.json"))
    write_modules(exported, pooling)
    model = package.SentenceTransformer(str(exported), device="cpu")
    embeddings = torch.from_numpy(model.encode([row["anchor"] for row in data]))

    # Embeddings of the task, with the weights at the end of the run.
    def embed(rank: int) -> Tensor:
        run = make_run(rank, config)
        names = run.runner.parameters()
        with torch.no_grad():
            for name, weight in ended.weights.items():
                names[name].copy_(weight)
        task = open_task(config)
        (model,) = run.runner.parts
        batch = task.collate(list(task.read_rows("train")))
        with torch.no_grad():
            return task.forward(model, batch)[:, 0]

    expected = run_ranks(1, embed)[0]

    torch.testing.assert_close(embeddings, expected, rtol=0, atol=SAME)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, 'task.options.pooling="max" is unknown; use "mean" or "last"'),
        ({"temperature": 0}, "task.options.temperature=0 must be a number above 0"),
        ({"scale": 20}, "task.options.scale=20 is unknown; use pooling, temperature"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    config = Config()
    task = dataclasses.replace(config.task, name=str(FILE), options=options)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        open_task(dataclasses.replace(config, task=task))


def test_accumulation_is_rejected(tmp_path: Path) -> None:
    config = contrastive(tmp_path, rows(1), training={"local_batch_size": 2})
    with pytest.raises(ConfigError, match="training.global_batch_size=8 requires 4 micro-batches"):
        open_task(config).open_dataloader(batch_rank=0, num_batch_ranks=1, accumulation=4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"anchor": "cat"}, "has no column 'positive'"),
        ({"anchor": "cat", "positive": "mat", "negative": 7}, "negative is not a text"),
        ({"anchor": "cat", "positive": "mat"}, "row 8 has 0 negatives, and row 0 has 1"),
    ],
)
def test_wrong_rows_are_rejected(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    config = contrastive(tmp_path, [*rows(1), row], training={"local_batch_size": ROWS})
    with pytest.raises(DataError, match=message):
        open_task(config).read_rows("train")
