"""A complete run on two ranks: its files, its metrics, and the functions that it calls."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
import torch
from ranks import run_ranks
from tiny import Ended, shallow_config, text_file, train_whole

from shardtrain import config as configs
from shardtrain import data
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed import process_group
from shardtrain.launch.goodput.account import BINS
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.utils import garbage_collection
from shardtrain.utils.checked_json import record_of
from shardtrain.utils.errors import ConfigError

BINS_OF_GOODPUT = ["goodput", *(f"goodput_{name}_seconds" for name in BINS)]
KEYS = [
    "step", "loss", "max_loss", "grad_norm", "lr", "tokens_seen", "tps", "tokens_per_second", "targets_per_second",
    "target_share", "tflops", "mfu",
    "memory_gib", "step_seconds", "data_seconds", "skipped_updates", "spikes", "rewinds",
    *BINS_OF_GOODPUT, "order_hash",
]  # fmt: skip


def full_config(folder: Path) -> Config:
    return shallow_config(
        job={
            "dump_folder": str(folder),
            "save_config_file": "asked/for.toml",
            "description": 'a "quoted" run é',
        },
        training={"steps": 10, "local_batch_size": 4, "gc_freq": 3},
        metrics={"log_freq": 4, "enable_tensorboard": True},
        checkpoint={"enable": True, "interval": 4, "enable_first_step_checkpoint": True},
        profiling={"enable_profiling": True, "profile_freq": 5, "profiler_warmup": 1},
        comm={"train_timeout_seconds": 55},
    )


def full_run(rank: int, folder: Path) -> tuple[Ended, list[int], list[tuple[int, int]]]:
    """Train as one rank, and record garbage collections and changes of the collective timeout.

    Return the run, the collected generations, and (number of checkpoints, new timeout) for each change.
    """
    collected: list[int] = []
    limits: list[tuple[int, int]] = []
    garbage_collection.gc = SimpleNamespace(  # type: ignore[assignment]
        isenabled=lambda: True, enable=lambda: None, disable=lambda: None, collect=collected.append
    )
    set_timeout = process_group.set_timeout

    def limit(seconds: int) -> None:
        limits.append((len(list((folder / "checkpoint").glob("step-*"))), seconds))
        set_timeout(seconds)

    process_group.set_timeout = limit
    return train_whole(rank, full_config(folder)), collected, limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "outputs"


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[tuple[Ended, list[int], list[tuple[int, int]]]]:
    return run_ranks(2, full_run, folder)


def test_configuration_of_these_tests_is_valid(folder: Path) -> None:
    loaded = Loaded(full_config(folder))
    assert [
        *configs.check(loaded),
        *configs.unavailable(loaded),
        *configs.machine_notes(loaded, 2, "cpu"),
    ] == []


def test_run_writes_exactly_these_files(folder: Path, runs: list[Any]) -> None:
    assert all(ended.error is None for ended, _, _ in runs)

    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {
        "config.resolved.toml",
        "shardtrain.schema.json",
        "asked/for.toml",
        "asked/shardtrain.schema.json",
        "metrics.jsonl",
        "goodput.jsonl",
        "logs/rank-0.log",
        "logs/rank-1.log",
    }
    for step in (1, 4, 8, 10):
        for name in ("manifest.json", "rank-00000.bin", "rank-00001.bin"):
            expected.add(f"checkpoint/step-{step}/{name}")
    for step in (5, 10):
        for rank in (0, 1):
            expected.add(f"profile_traces/iteration_{step}/rank{rank}_trace.json")

    # The name of the file for TensorBoard contains the host and the time.
    (event_file,) = [name for name in files if name.startswith("tb/")]
    assert "events.out.tfevents" in event_file
    assert files == expected | {event_file}


def test_resolved_configuration_loads_to_the_same(folder: Path, runs: list[Any]) -> None:
    for name in ("config.resolved.toml", "asked/for.toml"):
        assert configs.load(folder / name).config == full_config(folder)
        first = (folder / name).read_text().splitlines()[1]
        assert re.fullmatch(
            r"# shardtrain \S+( \(\w+\))?, torch \S+, Python \S+, 2 ranks, started from the defaults",
            first,
        )


def test_metrics_are_written_at_step_1_every_log_freq_and_the_last(
    folder: Path, runs: list[Any]
) -> None:
    records = [record_of(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [record["step"] for record in records] == [1, 4, 8, 10]
    assert all(list(record) == KEYS for record in records)

    losses = runs[0][0].losses
    start = 0
    for record in records:
        stop = record["step"]
        # The record has the mean loss since the previous record.
        mean_loss = sum(losses[start:stop]) / (stop - start)
        assert record["loss"] == pytest.approx(mean_loss, abs=1e-9)
        assert record["max_loss"] >= record["loss"]
        assert record["grad_norm"] == runs[0][0].grad_norms[stop - 1]
        assert record["tokens_seen"] == stop * 8 * 64
        assert record["mfu"] is None  # the peak of this CPU is not configured
        start = stop


def test_the_learning_rate_is_that_of_the_schedule(folder: Path, runs: list[Any]) -> None:
    config = full_config(folder)
    expected = [
        learning_rate(config.optimizer, config.lr_scheduler, 10, step) for step in range(10)
    ]

    assert runs[0][0].lrs == runs[1][0].lrs == expected


def test_tensorboard_has_the_steps_and_tags_of_the_history(folder: Path, runs: list[Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (path for path in (folder / "tb").rglob("*") if path.is_file())
    events = EventAccumulator(str(file))
    events.Reload()
    tags = events.Tags()["scalars"]

    expected_tags = {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "lr",
        "throughput(tps)",
        "targets_per_second",
        "target_share",
    }
    assert expected_tags <= set(tags)
    assert [event.step for event in events.Scalars("loss_metrics/global_avg_loss")] == [1, 4, 8, 10]


def test_each_rank_has_its_own_log(folder: Path, runs: list[Any]) -> None:
    for rank in (0, 1):
        log = (folder / f"logs/rank-{rank}.log").read_text()
        assert len(re.findall(r"INFO .*step: +\d+ .*loss:", log)) == 4, log
        assert (
            "batch: 4 sequences x 1 accumulation x 2 data ranks = 8 sequences x 64 = 512 tokens per step"
            in log
        )
        assert "\x1b" not in log
        assert f"iteration_5/rank{rank}_trace.json" in log
        assert f"rank{1 - rank}_trace.json" not in log
        assert "saved checkpoint" in log
        assert "step-10" in log


def test_traces_are_valid_and_contain_operations_and_collectives(
    folder: Path, runs: list[Any]
) -> None:
    for path in (folder / "profile_traces").rglob("*.json"):
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert "aten::mm" in names and any("gloo" in str(name) for name in names), path


def test_checkpoint_records_its_progress_and_data(folder: Path, runs: list[Any]) -> None:
    facts = json.loads((folder / "checkpoint/step-4/manifest.json").read_text())["facts"]
    counts = {
        "step": 4,
        "updates": 4,
        "samples_consumed": 32,
        "tokens_seen": 32 * 64,
        "nonfinite_skips": 0,
    }
    order_hash = facts["state"].pop("order_hash")

    assert facts["state"] == counts
    assert facts["weights_only"] is False

    # The order of the data is the same in the checkpoint and in the line of its step.
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    hash_by_step = {record["step"]: record["order_hash"] for record in records}
    assert hash_by_step[4] == f"{order_hash:016x}"
    assert re.fullmatch(r"[0-9a-f]{64}", facts["data_fingerprint"])


def test_garbage_collection_runs_at_the_same_steps_on_every_rank(runs: list[Any]) -> None:
    assert [collected for _, collected, _ in runs] == [[1] * 3] * 2


def test_timeout_of_collectives_shrinks_once_after_the_first_step(runs: list[Any]) -> None:
    # The timeout is reduced once, when only the checkpoint of step 1 exists.
    assert [limits for _, _, limits in runs] == [[(1, 55)]] * 2


# -- length of a run, and ranks that do not agree ----------------------------------------------------------------------


def other_runs(rank: int, root: Path) -> dict[str, Ended]:
    # 1343 bytes between BOS and EOS are 1344 targets or 21 rows of 64 tokens; 3 epochs are 63 rows
    short = root / f"short-{rank}.txt"
    short.write_text(Path(text_file()).read_text()[:1343])
    different = root / f"different-{rank}.txt"
    different.write_text(short.read_text() + "x" * rank)
    training = {"dataset_path": str(short), "local_batch_size": 2, "global_batch_size": 4}

    def run(name: str, **changes: Any) -> Ended:
        job = {"dump_folder": str(root / name)}
        return train_whole(rank, shallow_config(job=job, training={**training, **changes}))

    return {
        "epochs": run("epochs", epochs=3, steps=7),
        "steps": run("steps", steps=3),
        "one step": run("one-step", epochs=1, global_batch_size=40, local_batch_size=20),
        "different": run("different", dataset_path=str(different)),
    }


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    return run_ranks(2, other_runs, tmp_path_factory.mktemp("others"))


def test_epochs_set_the_exact_number_of_steps_and_each_epoch_sees_every_sample(
    others: list[dict[str, Ended]],
) -> None:
    runs_of_ranks = [rank["epochs"] for rank in others]
    for run in runs_of_ranks:
        assert run.error is None
        assert run.state["step"] == 16

    # Sample ids in the order of the steps, then of the ranks. The last step is not full.
    ids = []
    for step in range(len(runs_of_ranks[0].losses)):
        for run in runs_of_ranks:
            ids += run.sample_ids[step]
    assert runs_of_ranks[0].state["samples_consumed"] == 63
    assert ids[63:] == [-1]

    epochs = [ids[:21], ids[21:42], ids[42:63]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(21))
    assert epochs[0] != epochs[1]

    # the schedule uses the number of steps, so the learning rate ends at its minimum
    assert runs_of_ranks[0].lrs[-1] == pytest.approx(min(runs_of_ranks[0].lrs))


def test_steps_limit_a_run_without_epochs(others: list[dict[str, Ended]]) -> None:
    assert [rank["steps"].state["step"] for rank in others] == [3, 3]


def test_an_epoch_smaller_than_a_step_is_one_step(others: list[dict[str, Ended]]) -> None:
    ids = [sample for rank in others for sample in rank["one step"].sample_ids[0]]
    assert sorted(ids) == [-1] * 19 + list(range(21))
    assert others[0]["one step"].state["tokens_seen"] == 21 * 64
    assert len(others[0]["one step"].losses) == 1


def test_ranks_with_different_data_stop_before_the_first_step(
    others: list[dict[str, Ended]],
) -> None:
    for rank in others:
        error = rank["different"].error
        assert isinstance(error, ConfigError)
        assert error.exit_code == 2
        host = socket.gethostname()
        where = f"is not the same as on rank 0 (host {host})"
        assert f"rank 1 on {host}: the training data differ between ranks" in str(error)
        assert where in str(error)
        assert "different-" in str(error), "the message does not name the file"
        assert rank["different"].losses == []


# -- a late rank -------------------------------------------------------------------------------------------------------


def late(rank: int, folder: Path, limit: int) -> tuple[str, int, str, float]:
    """Run as one rank, with rank 1 late to step 3.

    Returns the type, exit code and text of the error, and the seconds since the start of the step.
    """
    config = shallow_config(
        job={"dump_folder": str(folder)},
        training={"local_batch_size": 4},
        comm={"train_timeout_seconds": limit},
    )
    original = data.DataLoader.__next__
    pulled = []

    def pull(stream: data.DataLoader) -> data.Batch:
        pulled.append(time.monotonic())
        if len(pulled) == 3 and rank == 1:
            time.sleep(2 * limit)
        return original(stream)

    data.DataLoader.__next__ = pull  # type: ignore[method-assign]
    ended = train_whole(rank, config)
    seconds = time.monotonic() - pulled[-1]
    torch.distributed.destroy_process_group()
    # run_ranks destroys the process group at the end, so one must exist
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    error = ended.error
    return type(error).__name__, getattr(error, "exit_code", 0), str(error), seconds


def test_late_rank_ends_the_others_in_bounded_time(tmp_path: Path) -> None:
    limit = round(patience.seconds(1))
    punctual, late_rank = run_ranks(2, late, tmp_path, limit)
    kind, code, text, seconds = punctual

    assert (kind, code) == ("PeerError", 6)
    assert text.startswith(
        f"step 3: all_reduce did not complete: Timed out waiting {limit}000ms"
    ), text
    assert "comm.train_timeout_seconds" in text
    assert "\n" not in text
    assert seconds >= limit  # the limit of later steps, not the 300 s of the first step

    # The late rank finds that its peer has exited.
    kind, code, text, _ = late_rank
    assert (kind, code) == ("PeerError", 6) and text.startswith(
        "step 3: all_reduce did not complete: "
    ), text
