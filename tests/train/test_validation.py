"""Validation: each row once on any number of ranks and mesh, at exact steps, and without effect on training."""

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
"""Tolerance of a loss of about 6, for float32 sums in a different order."""
LENGTH = 16
SIZES = (872, 7)


@functools.cache
def held_out(rows: int, last: int = LENGTH) -> str:
    """Write a file that yields ``rows`` sequences of LENGTH tokens. The last one has ``last`` targets.

    The byte tokenizer adds one token before and one after. Each sequence shares a token with the next.
    """
    letters = random.Random(rows).choices(b"abcdefgh \n", k=(rows - 1) * LENGTH + last - 1)
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / f"{rows}.txt"
    path.write_bytes(bytes(letters))
    return str(path)


def validation(rows: int = 7, last: int = LENGTH, **keys: Any) -> dict[str, Any]:
    path = held_out(rows, last)
    common = {
        "enable": True,
        "dataset": "text",
        "dataset_path": path,
        "seq_len": LENGTH,
        "local_batch_size": 5,
    }
    return {**common, **keys}


def config(
    parallelism: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **keys: Any
) -> Config:
    sizes = {"seq_len": LENGTH, "local_batch_size": 4, "global_batch_size": -1, **(training or {})}
    return tiny_config(training=sizes, parallelism=parallelism or {}, validation=validation(**keys))


def recorded(stream: Any, sample_ids: list[list[int]]) -> Any:
    """Wrap a stream to record the sample ids of each batch."""

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Batch:
            batch = next(stream)
            sample_ids.append(batch.sample_ids_B.tolist())
            return batch

    return Recorded()


def evaluated(rank: int, configs: list[Config]) -> list[tuple[Evaluation, int, list[list[int]]]]:
    """For each config, return the evaluation of a new model, the data-parallel rank, and the ids of its rows."""
    results = []
    run = make_run(rank, configs[0])
    for run_config in configs:
        ids: list[list[int]] = []
        stream = recorded(evaluate.open_dataloader(run_config, run.mesh), ids)
        result = evaluate.evaluate(run.runner, stream, run.mesh, run_config.validation.steps)
        results.append((result, run.mesh.rank(*BATCH_AXES), ids))
    return results


@functools.cache
def expected(rows: int, last: int = LENGTH) -> Evaluation:
    return run_ranks(1, evaluated, [config(rows=rows, last=last)])[0][0][0]


def plain_loss(rank: int, run_config: Config) -> float:
    """Return the same loss without the package's data, runner and loss code."""
    run = make_run(rank, run_config)
    text = Path(str(run_config.validation.dataset_path)).read_bytes()
    tokens = torch.tensor([256, *text, 257])  # BOS and EOS
    total = 0.0
    count = 0
    for start in range(0, len(tokens) - 1, LENGTH):
        piece = tokens[start : start + LENGTH + 1]
        with torch.no_grad():
            logits = run.runner.parts[0](piece[None, :-1], torch.arange(len(piece) - 1)[None])
        total += F.cross_entropy(logits[0].double(), piece[1:], reduction="sum").item()
        count += len(piece) - 1
    return total / count


@pytest.mark.parametrize("last", [LENGTH, 3], ids=["full last row", "short last row"])
def test_loss_is_the_mean_over_all_tokens_of_the_set(last: int) -> None:
    evaluation = expected(7, last)
    assert evaluation.loss == pytest.approx(
        run_ranks(1, plain_loss, config(last=last))[0], abs=SAME
    )
    assert (evaluation.rows, evaluation.tokens) == (7, 6 * LENGTH + last)
    assert evaluation.perplexity == pytest.approx(math.exp(evaluation.loss))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_row_is_read_once_in_the_same_order_on_any_number_of_ranks(ranks: int) -> None:
    # neither set is divisible by batches of 5 rows per rank; some ranks get none of the 7 rows
    results = run_ranks(ranks, evaluated, [config(rows=rows) for rows in SIZES])
    for number, rows in enumerate(SIZES):
        evaluations = [result[number] for result in results]
        evaluations.sort(key=lambda evaluation: evaluation[1])  # by rank
        batches_of_ranks = [ids for _, _, ids in evaluations]
        num_batches = {len(batches) for batches in batches_of_ranks}
        assert len(num_batches) == 1, "ranks have different numbers of batches"

        # A step reads one batch per rank, in the order of ranks. Padding rows have the number -1.
        in_order = []
        for batches_of_step in zip(*batches_of_ranks, strict=True):
            for batch in batches_of_step:
                in_order += batch
        num_padding = len(in_order) - rows
        assert in_order == [*range(rows), *[-1] * num_padding]

        for result in results:
            evaluation = result[number][0]
            assert evaluation.loss == pytest.approx(expected(rows).loss, abs=SAME)
            assert (evaluation.rows, evaluation.tokens) == (rows, rows * LENGTH)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "ddp 2": (2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "pp 2, interleaved": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
    "pp 2 x fsdp 2": (4, {"pipeline_parallel_degree": 2}),
}


FIRST = ("tp 2", "cp 2", "pp 2, interleaved")


@pytest.mark.parametrize(
    "mesh", cases(FIRST, nightly=[mesh for mesh in MESHES if mesh not in FIRST])
)
def test_meshes_change_no_loss(mesh: str) -> None:
    ranks, parallelism = MESHES[mesh]
    configs = [config(parallelism, rows=rows, last=3) for rows in (61, 7)]
    for result in run_ranks(ranks, evaluated, configs):
        for evaluation, rows in zip(result, (61, 7), strict=True):
            assert evaluation[0].loss == pytest.approx(expected(rows, 3).loss, abs=SAME)
            assert evaluation[0].rows == rows


def test_pipeline_processes_the_rows_of_a_training_step() -> None:
    training = {"local_batch_size": 4, "global_batch_size": 16}
    run_config = config({"pipeline_parallel_degree": 2}, training)
    # 2 data-parallel ranks, 2 passes of 4 rows each
    assert evaluate.section(run_config, 4).local_batch_size == 8
    assert evaluate.section(config(None, training), 4) == config().validation
    for result in run_ranks(2, evaluated, [run_config]):
        assert result[0][0].loss == pytest.approx(expected(7).loss, abs=SAME)


def test_steps_limit_the_batches_of_a_validation() -> None:
    configs = [config(steps=steps) for steps in (1, 2, 9)]
    (result,) = run_ranks(1, evaluated, configs)
    rows = [evaluation.rows for evaluation, *_ in result]
    assert rows == [5, 7, 7]


def nothing_to_predict(rank: int, run_config: Config) -> str:
    run = make_run(rank, run_config)
    stream = evaluate.open_dataloader(run_config, run.mesh)
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


def test_validation_set_without_targets_is_an_error_on_all_ranks() -> None:
    for message in run_ranks(2, nothing_to_predict, config()):
        assert "none of the 7 sequences has a target token" in message


def traces(rank: int, run_config: Config) -> tuple[bool, bool, bool, bool]:
    """Check that evaluation does not change weights, gradients, random state and the training stream."""
    run = make_run(rank, run_config)
    trainer.step(run)
    weights = {
        name: local_tensor(p.detach()).clone() for name, p in run.runner.parameters().items()
    }
    random_state = torch.get_rng_state()
    consumed = run.dataloader.samples_consumed
    stream = evaluate.open_dataloader(run_config, run.mesh)
    for _ in range(2):
        evaluate.evaluate(run.runner, stream, run.mesh)
    after = run.runner.parameters()
    keeps_weights = True
    for name, weight in weights.items():
        unchanged = torch.equal(local_tensor(after[name].detach()), weight)
        keeps_weights = keeps_weights and unchanged
    return (
        keeps_weights,
        all(parameter.grad is None for parameter in after.values()),
        torch.equal(torch.get_rng_state(), random_state),
        run.dataloader.samples_consumed == consumed,
    )


@pytest.mark.parametrize(
    "parallelism", [{}, {"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}]
)
def test_evaluation_does_not_change_weights_gradients_random_state_and_data(
    parallelism: dict[str, Any],
) -> None:
    assert run_ranks(2, traces, config(parallelism)) == [(True,) * 4] * 2


def whole_run(ranks: int, folder: Path, run_config: Config) -> Ended:
    job = dataclasses.replace(run_config.job, dump_folder=str(folder))
    ended = run_ranks(ranks, train_whole, dataclasses.replace(run_config, job=job))[0]
    assert ended.error is None, ended.error
    return ended


def with_steps(run_config: Config, steps: int, **keys: Any) -> Config:
    """Return the config with a number of steps, two sequences per rank, and changed validation options."""
    training = dataclasses.replace(
        run_config.training, steps=steps, local_batch_size=2, on_data_end="repeat"
    )
    return dataclasses.replace(
        run_config, training=training, validation=dataclasses.replace(run_config.validation, **keys)
    )


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
    run_config = config({"expert_parallel_degree": 2})
    return dataclasses.replace(
        run_config, model=dataclasses.replace(run_config.model, name="mixtral", overrides=MOE)
    )


@pytest.mark.parametrize("kind", cases(["fsdp", "experts"], nightly=["pipeline", "bfloat16"]))
def test_training_is_bitwise_equal_with_and_without_validation(tmp_path: Path, kind: str) -> None:
    run_config = {
        "fsdp": lambda: config(),
        "pipeline": lambda: config({"pipeline_parallel_degree": 2}),
        "bfloat16": lambda: config(training={"mixed_precision_param": "bfloat16"}),
        "experts": mixture_of_experts,
    }[kind]()
    with_it = whole_run(2, tmp_path / "with", with_steps(run_config, 5, freq=2))
    without = whole_run(2, tmp_path / "without", with_steps(run_config, 5, enable=False))

    assert with_it.losses == without.losses
    assert with_it.grad_norms == without.grad_norms
    assert with_it.state == without.state
    assert_bitwise(with_it.weights, without.weights)
    assert_bitwise(with_it.optimizer, without.optimizer)


def counts(rank: int, run_config: Config) -> bool:
    """True if evaluation does not change token counts and router biases of experts."""
    run = make_run(rank, run_config)
    trainer.step(run)
    blocks = []
    for part in run.runner.parts:
        blocks += [module for module in part.modules() if hasattr(module, "count_E")]
    counts_before = [block.count_E.clone() for block in blocks]
    biases_before = {name: buffer.clone() for name, buffer in run.runner.buffers().items()}
    if not blocks or not biases_before:
        return False

    evaluate.evaluate(run.runner, evaluate.open_dataloader(run_config, run.mesh), run.mesh)

    for block, count in zip(blocks, counts_before, strict=True):
        if not torch.equal(block.count_E, count):
            return False
    biases = run.runner.buffers()
    return all(torch.equal(biases[name], bias) for name, bias in biases_before.items())


def test_evaluation_does_not_count_towards_the_balance_of_experts() -> None:
    assert run_ranks(2, counts, mixture_of_experts()) == [True, True]


def test_validation_runs_every_freq_steps_and_after_the_last_and_logs_to_all_sinks(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_config = with_steps(config(), 5, freq=2)
    metrics = dataclasses.replace(run_config.metrics, enable_tensorboard=True)
    whole_run(1, tmp_path, dataclasses.replace(run_config, metrics=metrics))

    # validation.jsonl
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line in lines:
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert lines[-1]["loss"] < lines[0]["loss"] < math.log(512) + 1

    # TensorBoard
    (folder,) = [file.parent for file in (tmp_path / "tb").rglob("events.*")]
    events = EventAccumulator(str(folder))
    events.Reload()
    for point, line in zip(events.Scalars("validation_metrics/loss"), lines, strict=True):
        assert point.step == line["step"]
        assert point.value == pytest.approx(line["loss"])
    assert [point.step for point in events.Scalars("validation_metrics/perplexity")] == [2, 4, 5]

    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert log.count("validation step:") == 3
    assert "7 sequences of 16 tokens, every 2 steps and after the last" in log


@pytest.mark.parametrize(("freq", "steps"), [(2, [2, 3]), (3, [3])])
def test_run_whose_data_ends_early_is_validated_at_its_end(
    tmp_path: Path, freq: int, steps: list[int]
) -> None:
    run_config = with_steps(config(), 9, freq=freq)  # 6 rows: three steps of two rows
    training = {"dataset_path": held_out(6), "on_data_end": "stop", "local_batch_size": 2}
    run_config = dataclasses.replace(
        run_config, training=dataclasses.replace(run_config.training, **training)
    )

    assert whole_run(1, tmp_path, run_config).state["step"] == 3

    lines = (tmp_path / "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps


def test_disabled_validation_opens_no_set(tmp_path: Path) -> None:
    run_config = with_steps(config(), 1)
    run_config = dataclasses.replace(
        run_config, validation=Validation(enable=False, dataset_path="no/where")
    )
    assert whole_run(1, tmp_path, run_config).state["step"] == 1


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(0.0, 1.0), (800.0, math.inf), (math.inf, math.inf)]
)
def test_perplexity_is_the_exponential_of_the_loss_and_may_overflow_to_infinity(
    loss: float, perplexity: float
) -> None:
    assert Evaluation(loss, 1, 1).perplexity == perplexity
    assert math.isnan(Evaluation(math.nan, 1, 1).perplexity)


def test_held_out_file_has_the_expected_rows() -> None:
    assert len(Path(held_out(7)).read_bytes()) == 7 * LENGTH - 1
    assert Path(text_file()).exists()
