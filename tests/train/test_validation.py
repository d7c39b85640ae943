"""Validation: each row once at any number of ranks and on any mesh, at exact steps, and without a trace in training."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import Ended, assert_bitwise, make_run, text_file, tiny_config, train_whole
from torch.nn import functional as F

from shardtrain.config.schema import Config, Validation
from shardtrain.data.batch import IGNORE, Batch
from shardtrain.distributed import BATCH_AXES
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer
from shardtrain.train import validation as evaluate
from shardtrain.train.validation import Evaluation
from shardtrain.utils.errors import DataError

SAME = 1e-6
"""Of a loss of 6, in float32: the rounding of sums in another order."""
LENGTH = 16
SIZES = (872, 7)


@functools.cache
def held_out(rows: int, last: int = LENGTH) -> str:
    """A file of bytes that make so many sequences of LENGTH tokens, the last of which has ``last`` targets.

    The byte tokenizer adds one token before and one after; each sequence shares a token with the next.
    """
    letters = random.Random(rows).choices(b"abcdefgh \n", k=(rows - 1) * LENGTH + last - 1)
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / f"{rows}.txt"
    path.write_bytes(bytes(letters))
    return str(path)


def validation(rows: int = 7, last: int = LENGTH, **keys: Any) -> dict[str, Any]:
    path = held_out(rows, last)
    common = {"enable": True, "dataset": "text", "dataset_path": path, "seq_len": LENGTH, "local_batch_size": 5}
    return {**common, **keys}


def config(parallelism: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **keys: Any) -> Config:
    sizes = {"seq_len": LENGTH, "local_batch_size": 4, "global_batch_size": -1, **(training or {})}
    return tiny_config(training=sizes, parallelism=parallelism or {}, validation=validation(**keys))


def recorded(stream: Any, kept: list[list[int]]) -> Any:
    """The stream, noting the sample ids of each batch."""

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Batch:
            batch = next(stream)
            kept.append(batch.sample_ids_B.tolist())
            return batch

    return Recorded()


def evaluated(rank: int, configs: list[Config]) -> list[tuple[Evaluation, int, list[list[int]]]]:
    """For each config: what a new model scores on its validation set, this rank's place, and the ids of its rows."""
    found, run = [], make_run(rank, configs[0])
    for one in configs:
        ids: list[list[int]] = []
        stream = recorded(evaluate.open_dataloader(one, run.mesh), ids)
        result = evaluate.evaluate(run.runner, stream, run.mesh, one.validation.steps)
        found.append((result, run.mesh.rank(*BATCH_AXES), ids))
    return found


@functools.cache
def expected(rows: int, last: int = LENGTH) -> Evaluation:
    return run_ranks(1, evaluated, [config(rows=rows, last=last)])[0][0][0]


def plain_loss(rank: int, one: Config) -> float:
    """The same number without any of this program's data, runner or loss."""
    run = make_run(rank, one)
    text = Path(str(one.validation.dataset_path)).read_bytes()
    tokens = torch.tensor([256, *text, 257])  # begin and end of a document
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, LENGTH):
        piece = tokens[start : start + LENGTH + 1]
        with torch.no_grad():
            logits = run.runner.parts[0](piece[None, :-1], torch.arange(len(piece) - 1)[None])
        total += F.cross_entropy(logits[0].double(), piece[1:], reduction="sum").item()
        count += len(piece) - 1
    return total / count


@pytest.mark.parametrize("last", [LENGTH, 3], ids=["whole last row", "short last row"])
def test_the_loss_is_the_mean_over_all_tokens_of_the_set(last: int) -> None:
    found = expected(7, last)
    assert found.loss == pytest.approx(run_ranks(1, plain_loss, config(last=last))[0], abs=SAME)
    assert (found.rows, found.tokens) == (7, 6 * LENGTH + last)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_row_is_read_once_in_one_order_at_any_number_of_ranks(ranks: int) -> None:
    # batches of 5 rows per rank divide neither set; of the 7 rows some ranks get none
    results = run_ranks(ranks, evaluated, [config(rows=rows) for rows in SIZES])
    for number, rows in enumerate(SIZES):
        by_rank = [ids for _, _, ids in sorted((r[number] for r in results), key=lambda found: found[1])]
        assert len({len(ids) for ids in by_rank}) == 1, "ranks made different numbers of batches"
        in_order = [sample for step in zip(*by_rank, strict=True) for batch in step for sample in batch]
        assert in_order == [*range(rows), *[-1] * (len(in_order) - rows)]
        for result in results:
            found = result[number][0]
            assert found.loss == pytest.approx(expected(rows).loss, abs=SAME)
            assert (found.rows, found.tokens) == (rows, rows * LENGTH)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "ddp 2": (2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "pp 2, interleaved": (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}),
    "pp 2 x fsdp 2": (4, {"pipeline_parallel_degree": 2}),
}


FIRST = ("tp 2", "cp 2", "pp 2, interleaved")


@pytest.mark.parametrize("mesh", cases(FIRST, nightly=[mesh for mesh in MESHES if mesh not in FIRST]))
def test_meshes_change_no_loss(mesh: str) -> None:
    ranks, parallelism = MESHES[mesh]
    configs = [config(parallelism, rows=rows, last=3) for rows in (61, 7)]
    for result in run_ranks(ranks, evaluated, configs):
        for found, rows in zip(result, (61, 7), strict=True):
            assert found[0].loss == pytest.approx(expected(rows, 3).loss, abs=SAME)
            assert found[0].rows == rows


def test_a_pipeline_takes_as_many_rows_as_in_a_training_step() -> None:
    training = {"local_batch_size": 4, "global_batch_size": 16}
    one = config({"pipeline_parallel_degree": 2}, training)
    assert evaluate.section(one, 4).local_batch_size == 8  # 2 data-parallel ranks, 2 passes of 4 rows each
    assert evaluate.section(config(None, training), 4) == config().validation
    for result in run_ranks(2, evaluated, [one]):
        assert result[0][0].loss == pytest.approx(expected(7).loss, abs=SAME)


def test_a_number_of_batches_ends_it_early_and_more_than_there_are_end_with_the_set() -> None:
    configs = [config(steps=steps) for steps in (1, 2, 9)]
    rows = [[found[0].rows for found in result] for result in run_ranks(1, evaluated, configs)]
    assert rows == [[5, 7, 7]]


def nothing_to_predict(rank: int, one: Config) -> str:
    run = make_run(rank, one)
    stream = evaluate.open_dataloader(one, run.mesh)
    take = stream.__next__

    class Empty:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Batch:
            batch = take()
            return dataclasses.replace(batch, targets_BT=torch.full_like(batch.targets_BT, IGNORE))

    with pytest.raises(DataError) as caught:
        evaluate.evaluate(run.runner, Empty(), run.mesh)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_set_without_a_token_to_predict_is_an_error_on_all_ranks() -> None:
    for message in run_ranks(2, nothing_to_predict, config()):
        assert "none of the 7 sequences has a target token" in message


def traces(rank: int, one: Config) -> tuple[bool, bool, bool, bool]:
    """Whether evaluation leaves weights, gradients, random numbers and the stream of training as they were."""
    run = make_run(rank, one)
    trainer.step(run)
    weights = {name: local_tensor(p.detach()).clone() for name, p in run.runner.parameters().items()}
    random_state, consumed = torch.get_rng_state(), run.dataloader.samples_consumed
    stream = evaluate.open_dataloader(one, run.mesh)
    for _ in range(2):
        evaluate.evaluate(run.runner, stream, run.mesh)
    after = run.runner.parameters()
    return (
        all(torch.equal(local_tensor(after[name].detach()), weight) for name, weight in weights.items()),
        all(p.grad is None for p in after.values()),
        torch.equal(torch.get_rng_state(), random_state),
        run.dataloader.samples_consumed == consumed,
    )


@pytest.mark.parametrize("parallelism", [{}, {"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}])
def test_evaluation_leaves_weights_gradients_random_numbers_and_data_alone(parallelism: dict[str, Any]) -> None:
    assert run_ranks(2, traces, config(parallelism)) == [(True,) * 4] * 2


def whole_run(ranks: int, folder: Path, one: Config) -> Ended:
    job = dataclasses.replace(one.job, dump_folder=str(folder))
    ended = run_ranks(ranks, train_whole, dataclasses.replace(one, job=job))[0]
    assert ended.error is None, ended.error
    return ended


def with_steps(one: Config, steps: int, **keys: Any) -> Config:
    """The config with a number of steps, two sequences per rank, and keys of its validation changed."""
    training = dataclasses.replace(one.training, steps=steps, local_batch_size=2, on_data_end="repeat")
    return dataclasses.replace(one, training=training, validation=dataclasses.replace(one.validation, **keys))


MOE = {
    "vocab_size": 512,
    "dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "moe_ffn_dim": 48,
    "num_experts": 4,
    "z_loss_coeff": 1e-2,
    "load_balance_coeff": 1e-2,
}


def mixture_of_experts() -> Config:
    one = config({"expert_parallel_degree": 2})
    return dataclasses.replace(one, model=dataclasses.replace(one.model, name="mixtral", overrides=MOE))


@pytest.mark.parametrize("kind", cases(["fsdp", "experts"], nightly=["pipeline", "bfloat16"]))
def test_training_is_bitwise_the_same_with_and_without_validation(tmp_path: Path, kind: str) -> None:
    one = {
        "fsdp": lambda: config(),
        "pipeline": lambda: config({"pipeline_parallel_degree": 2}),
        "bfloat16": lambda: config(training={"mixed_precision_param": "bfloat16"}),
        "experts": mixture_of_experts,
    }[kind]()
    with_it = whole_run(2, tmp_path / "with", with_steps(one, 5, freq=2))
    without = whole_run(2, tmp_path / "without", with_steps(one, 5, enable=False))
    assert with_it.losses == without.losses and with_it.grad_norms == without.grad_norms
    assert with_it.state == without.state
    assert_bitwise(with_it.weights, without.weights)
    assert_bitwise(with_it.optimizer, without.optimizer)


def counts(rank: int, one: Config) -> bool:
    """Whether evaluation leaves what blocks of experts counted, and the biases of their routers, as they were."""
    run = make_run(rank, one)
    trainer.step(run)
    blocks = [m for part in run.runner.parts for m in part.modules() if hasattr(m, "count_E")]
    before = [block.count_E.clone() for block in blocks]
    biases = {name: buffer.clone() for name, buffer in run.runner.buffers().items()}
    evaluate.evaluate(run.runner, evaluate.open_dataloader(one, run.mesh), run.mesh)
    same = all(torch.equal(block.count_E, count) for block, count in zip(blocks, before, strict=True))
    return bool(blocks and biases) and same and all(torch.equal(run.runner.buffers()[n], b) for n, b in biases.items())


def test_evaluation_does_not_count_towards_the_balance_of_experts() -> None:
    assert run_ranks(2, counts, mixture_of_experts()) == [True, True]


def test_validation_comes_every_freq_steps_and_at_the_last_and_goes_to_all_sinks(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one = with_steps(config(), 5, freq=2)
    one = dataclasses.replace(one, metrics=dataclasses.replace(one.metrics, enable_tensorboard=True))
    whole_run(1, tmp_path, one)
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line in lines:
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert lines[-1]["loss"] < lines[0]["loss"] < math.log(512) + 1
    (folder,) = [file.parent for file in (tmp_path / "tb").rglob("events.*")]
    events = EventAccumulator(str(folder))
    events.Reload()
    points = events.Scalars("validation_metrics/loss")
    assert [(point.step, point.value) for point in points] == [(x["step"], pytest.approx(x["loss"])) for x in lines]
    assert [point.step for point in events.Scalars("validation_metrics/perplexity")] == [2, 4, 5]
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert log.count("validation step:") == 3 and "7 sequences of 16 tokens, every 2 steps and after the last" in log


@pytest.mark.parametrize(("freq", "steps"), [(2, [2, 3]), (3, [3])])
def test_a_run_whose_data_end_early_is_validated_where_it_ends(tmp_path: Path, freq: int, steps: list[int]) -> None:
    one = with_steps(config(), 9, freq=freq)  # 6 rows: three steps of two
    training = {"dataset_path": held_out(6), "on_data_end": "stop", "local_batch_size": 2}
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, **training))
    assert whole_run(1, tmp_path, one).state["step"] == 3
    lines = (tmp_path / "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps


def test_without_validation_no_set_is_opened(tmp_path: Path) -> None:
    one = with_steps(config(), 1)
    one = dataclasses.replace(one, validation=Validation(enable=False, dataset_path="no/where"))
    assert whole_run(1, tmp_path, one).state["step"] == 1


@pytest.mark.parametrize(("loss", "perplexity"), [(0.0, 1.0), (800.0, math.inf), (math.inf, math.inf)])
def test_perplexity_is_the_exponential_of_the_loss_as_far_as_floats_go(loss: float, perplexity: float) -> None:
    assert Evaluation(loss, 1, 1).perplexity == perplexity
    assert math.isnan(Evaluation(math.nan, 1, 1).perplexity)


def test_a_held_out_file_has_the_rows_that_these_tests_say() -> None:
    assert len(Path(held_out(7)).read_bytes()) == 7 * LENGTH - 1 and Path(text_file()).exists()
