"""The data loader: batches depend on the seed and the samples consumed, never on ranks or accumulation."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch

from shardtrain.config.ramps import step_sizes
from shardtrain.config.schema import (
    Config,
    Data,
    DataLoaderOptions,
    DataSource,
    Debug,
    Model,
    Training,
    Validation,
)
from shardtrain.data import IGNORE, Batch, death_of_worker, open_dataloader
from shardtrain.data.order import sample_at
from shardtrain.utils.errors import ConfigError, DataError

SEQ_LEN = 4
GLOBAL_BATCH = 8
NUM_SAMPLES = 23


@pytest.fixture
def config(tmp_path):
    """23 rows of 4 tokens: 93 tokens including BOS and EOS."""
    (tmp_path / "a.txt").write_text("".join(chr(33 + i) for i in range(91)))
    training = Training(
        dataset="text", dataset_path=str(tmp_path), local_batch_size=GLOBAL_BATCH, seq_len=SEQ_LEN
    )
    return Config(training=replace(training, on_data_end="repeat"), debug=Debug(seed=7))


def with_training(config, **changes):
    return replace(config, training=replace(config.training, **changes))


def open_rank(config, rank=0, ranks=1, accumulation=1, **options):
    """Open the stream of one rank with a global batch of GLOBAL_BATCH."""
    config = with_training(config, local_batch_size=GLOBAL_BATCH // ranks // accumulation)
    return open_dataloader(
        config, batch_rank=rank, num_batch_ranks=ranks, accumulation=accumulation, **options
    )


def global_steps(config, ranks, accumulation, steps, samples_consumed=0):
    """Return sample ids and tokens of each step, in the order of ranks."""
    streams = []
    for rank in range(ranks):
        stream = open_rank(config, rank, ranks, accumulation, samples_consumed=samples_consumed)
        streams.append(stream)

    result = []
    for _ in range(steps):
        batches = [next(stream) for stream in streams for _ in range(accumulation)]
        ids = torch.cat([batch.sample_ids_B for batch in batches])
        tokens = torch.cat([batch.tokens_BT for batch in batches])
        result.append((ids.tolist(), tokens.tolist()))

    for stream in streams:
        assert stream.samples_consumed == samples_consumed + steps * GLOBAL_BATCH
    return result


@pytest.mark.parametrize(("ranks", "accumulation"), list(itertools.product((1, 2, 4), (1, 2))))
@pytest.mark.parametrize("resume_step", [0, 2, 5])
def test_ranks_accumulation_and_resumes_change_no_samples(config, ranks, accumulation, resume_step):
    expected = global_steps(config, 1, 1, steps=9)
    resumed = global_steps(config, ranks, accumulation, 9 - resume_step, resume_step * GLOBAL_BATCH)
    assert resumed == expected[resume_step:]


def test_ranks_are_disjoint_and_complete_over_an_epoch(config):
    # 23 steps of 8 samples are 8 epochs of 23.
    steps = global_steps(config, 4, 2, steps=NUM_SAMPLES)
    ids = [sample for step_ids, _ in steps for sample in step_ids]
    for epoch in range(GLOBAL_BATCH):
        start = epoch * NUM_SAMPLES
        ids_of_epoch = ids[start : start + NUM_SAMPLES]
        assert sorted(ids_of_epoch) == list(range(NUM_SAMPLES))
    assert ids == sample_at(range(len(ids)), NUM_SAMPLES, seed=7).tolist()


def test_stream_starts_at_any_number_of_samples(config):
    # The global batch size may change between runs, so any start must work.
    batch = next(open_rank(config, samples_consumed=13))
    expected = sample_at(range(13, 13 + GLOBAL_BATCH), NUM_SAMPLES, seed=7)
    assert batch.sample_ids_B.tolist() == expected.tolist()

    far_batch = next(open_rank(config, samples_consumed=10**15))
    assert far_batch.sample_ids_B.shape == (GLOBAL_BATCH,)


def test_batch_contains_the_rows_of_its_samples(config):
    stream = open_rank(config)
    batch = next(stream)
    line = [256, *range(33, 124), 257]

    for row, sample in enumerate(batch.sample_ids_B.tolist()):
        start = sample * SEQ_LEN
        stop = start + SEQ_LEN
        assert batch.tokens_BT[row].tolist() == line[start:stop]
        assert batch.targets_BT[row].tolist() == line[start + 1 : stop + 1]
        assert batch.positions_BT[row].tolist() == list(range(SEQ_LEN))

    for tensor in (batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.sample_ids_B):
        assert tensor.dtype == torch.int64
    assert batch.num_targets == GLOBAL_BATCH * SEQ_LEN

    assert stream.num_samples == NUM_SAMPLES
    assert stream.global_batch == GLOBAL_BATCH
    assert stream.vocab == 258


def test_ignored_targets_are_not_counted_and_a_batch_moves_all_its_tensors():
    two = torch.tensor([[1, 2]])
    batch = Batch(two, torch.tensor([[2, IGNORE]]), torch.tensor([[0, 1]]), torch.tensor([0]))
    assert batch.num_targets == 1
    assert batch.to("meta").targets_BT.device.type == "meta"
    assert batch.to("cpu").targets_BT.tolist() == [[2, IGNORE]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_without_loop_all_ranks_end_together_after_each_sample_once(config, ranks):
    per_rank = [list(open_rank(config, r, ranks, accumulation=2, loop=False)) for r in range(ranks)]
    # 23 samples in steps of 8: three steps, and one padding row
    assert {len(batches) for batches in per_rank} == {2 * 3}

    batches = list(itertools.chain(*per_rank))
    ids = torch.cat([batch.sample_ids_B for batch in batches]).tolist()
    assert sorted(ids) == [-1, *range(NUM_SAMPLES)]
    assert sum(batch.num_targets for batch in batches) == NUM_SAMPLES * SEQ_LEN


def test_without_shuffle_rows_are_in_order(config):
    stream = open_rank(config, shuffle=False)
    ids = torch.cat([next(stream).sample_ids_B for _ in range(6)]).tolist()
    assert ids == [i % NUM_SAMPLES for i in range(48)]


def test_epochs_are_logged_at_powers_of_two(config, caplog):
    """A line per epoch of a small dataset would fill the log every few steps."""
    with caplog.at_level(logging.WARNING):
        stream = open_rank(config, accumulation=2)
        while stream.samples_consumed < 10 * NUM_SAMPLES:
            next(stream)
    epochs = [2, 4, 8]

    assert [r.getMessage() for r in caplog.records] == [
        f"dataset text is being re-looped (epoch {n})" for n in epochs
    ]


def test_resume_within_an_epoch_does_not_log_it_again(config, caplog):
    next(open_rank(config, samples_consumed=24))
    assert not caplog.records


def test_fingerprint_changes_only_with_data_tokens_length_and_seed(config, tmp_path):
    first = open_rank(config).fingerprint
    assert open_rank(config, 1, 4, 2, samples_consumed=80).fingerprint == first
    assert (
        open_dataloader(
            with_training(config, seq_len=5), batch_rank=0, num_batch_ranks=1, accumulation=1
        ).fingerprint
        != first
    )
    assert open_rank(replace(config, debug=Debug(seed=8))).fingerprint != first
    assert open_rank(config, shuffle=False).fingerprint != first

    (tmp_path / "a.txt").write_text("x" * 91)
    assert open_rank(config).fingerprint != first


def test_validation_reads_its_own_section(config):
    validation = Validation(
        dataset="text", dataset_path=config.training.dataset_path, local_batch_size=3, seq_len=6
    )
    stream = open_dataloader(
        config, batch_rank=0, num_batch_ranks=1, accumulation=1, section=validation
    )

    assert next(stream).tokens_BT.shape == (3, 6)
    with pytest.raises(ConfigError, match=r"validation.dataset="):
        open_dataloader(
            config,
            batch_rank=0,
            num_batch_ranks=1,
            accumulation=1,
            section=replace(validation, dataset="nothing"),
        )


def test_options_without_effect_are_logged(config, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    open_rank(with_training(config, dataloader=DataLoaderOptions(pin_memory=True)))
    assert "pin_memory=true has no effect" in caplog.text


def test_data_ends_as_configured(config):
    ends = {"error": NUM_SAMPLES, "stop": NUM_SAMPLES, "repeat": None}
    for on_data_end, end in ends.items():
        assert open_rank(with_training(config, on_data_end=on_data_end)).end == end
    assert open_rank(with_training(config, epochs=3)).end == 3 * NUM_SAMPLES

    stream = open_rank(with_training(config, on_data_end="error"))
    assert len(list(stream)) == 3
    assert stream.samples_consumed == NUM_SAMPLES, "padding rows must not count as samples"


def test_dead_worker_is_a_one_line_error(config):
    stream = open_rank(with_training(config, dataloader=DataLoaderOptions(num_workers=1)))
    next(stream)
    for worker in stream._batches._workers:
        worker.kill()
        worker.join()

    with pytest.raises(DataError, match=r"^a data worker process died: [^\n]*$"):
        for _ in range(20):
            next(stream)


def test_invalid_input_is_reported_with_its_option(config):
    with pytest.raises(ConfigError, match=r"training.seq_len=0 must be at least 1"):
        open_rank(with_training(config, seq_len=0))
    with pytest.raises(ConfigError, match=r"model.tokenizer_path"):
        open_rank(replace(config, model=Model(tokenizer_path="/nowhere/tokenizer.json")))
    with pytest.raises(ValueError, match="batch_rank=2"):
        open_rank(config, rank=2, ranks=2)
    with pytest.raises(ValueError, match="samples_consumed=-1"):
        open_rank(config, samples_consumed=-1)


def test_row_longer_than_the_data_is_padded(config):
    batch = next(open_rank(with_training(config, seq_len=100, on_data_end="stop")))
    assert (batch.sample_ids_B.tolist(), batch.num_targets) == ([0] + [-1] * 7, 92)


def test_epochs_take_the_fewest_steps_that_cover_every_sample(config):
    # epochs join without a gap: 69 samples in steps of 8, and not three times three steps
    assert open_rank(with_training(config, epochs=3)).steps_left == 9
    assert open_rank(with_training(config, epochs=3), samples_consumed=13).steps_left == 7
    assert open_rank(with_training(config, epochs=1), samples_consumed=30).steps_left == 0
    assert open_rank(config).steps_left is None


def jsonl_config(config, tmp_path, count=40, **data):
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"text": "row {i:02} of all"}}\n' for i in range(count))
    )
    options = {"dataset": "jsonl", "dataset_path": str(tmp_path / "rows.jsonl")}
    return replace(with_training(config, **options), data=Data(mode="stream", **data))


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_logs_once_that_it_starts_over(config, tmp_path, caplog, workers):
    # 40 documents of 15 tokens are 150 rows of 4
    config = with_training(
        jsonl_config(config, tmp_path, readers=4), dataloader=DataLoaderOptions(num_workers=workers)
    )
    stream = open_rank(config)
    for _ in range(45):
        next(stream)
    messages = [record.getMessage() for record in caplog.records]

    assert messages == ["dataset jsonl is being re-looped (epoch 2)"]

    cursors = stream.cursors()
    stream.seek(stream.samples_consumed, cursors)
    for _ in range(5):
        next(stream)

    assert len(caplog.records) == 1


def mixture_of(config, tmp_path, **second):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_text("x" * 400)
    path = config.training.dataset_path
    sources = {
        "first": DataSource(dataset="text", dataset_path=f"{path}/a.txt"),
        "second": DataSource(dataset="text", dataset_path=str(tmp_path / "b" / "a.txt"), **second),
    }
    return replace(config, data=Data(sources=sources))


def test_source_that_starts_over_is_named_although_another_ends(config, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        stream = open_rank(mixture_of(config, tmp_path, epochs=1))
        assert len(list(stream)) == stream.end // GLOBAL_BATCH + 1

    assert {record.getMessage()[:34] for record in caplog.records} == {
        "dataset first is being re-looped ("
    }
    assert set(stream.files) == {"first: a.txt", "second: a.txt"}


def test_rows_of_each_source_are_counted_equally_on_all_ranks(config, tmp_path):
    assert open_rank(config).rows_of_sources == {}  # counts are only reported for mixtures

    mixed = mixture_of(config, tmp_path, weight=3.0)
    for rank in range(2):
        stream = open_rank(mixed, rank=rank, ranks=2)
        next(stream)
        rows = stream.rows_of_sources
        assert list(rows) == ["first", "second"]
        assert sum(rows.values()) == stream.samples_consumed
        assert rows["second"] == pytest.approx(3 * rows["first"], abs=3)


def test_weight_too_small_to_read_a_row_is_logged(config, tmp_path, caplog):
    open_rank(mixture_of(config, tmp_path, weight=1e-6))
    assert "dataset second is not read in stage 1" in caplog.text


@pytest.mark.parametrize(
    ("readers", "ranks", "workers", "warns"),
    [
        (16, 4, 0, False),
        (16, 1, 0, False),
        (12, 4, 0, True),
        (16, 2, 2, False),
        (24, 1, 2, True),
        (8, 1, 2, True),
    ],
)
def test_repeated_tokenization_by_several_processes_is_logged(
    config, tmp_path, caplog, readers, ranks, workers, warns
):
    config = with_training(
        jsonl_config(config, tmp_path, 300, readers=readers), dataloader=DataLoaderOptions(workers)
    )
    stream = open_rank(config, ranks=ranks)

    assert stream.num_readers == readers
    assert ("each document is tokenized by" in caplog.text) is warns


def test_death_of_a_worker_is_recognized_in_any_report():
    dead = death_of_worker(
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. \nmore")
    )

    assert isinstance(dead, DataError)
    assert dead.exit_code == 3
    assert "\n" not in str(dead)
    assert death_of_worker(RuntimeError("shapes differ")) is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 4, 8])
def test_ramp_reads_the_rows_of_each_step_on_any_number_of_ranks(tmp_path, workers, start):
    """Steps have 4, 4, 8, 8 and 8 rows. A run that starts later continues with the sizes of its position."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "document {i}, some text"}}\n' for i in range(60)))
    options = DataLoaderOptions(num_workers=workers)
    training = Training(
        dataset="jsonl",
        dataset_path=str(path),
        seq_len=8,
        local_batch_size=2,
        dataloader=options,
    )
    sizes = step_sizes(replace(training, batch_ramp=[[0, 4], [2, 8]]), global_batch_size=8)

    def rows_of_steps(num_ranks):
        steps = []
        for rank in range(num_ranks):
            stream = open_dataloader(
                Config(training=training),
                batch_rank=rank,
                num_batch_ranks=num_ranks,
                accumulation=8 // 2 // num_ranks,
                samples_consumed=start,
                sizes=sizes,
            )
            for step in range(4):
                ids = []
                for _ in range(stream.accumulation):
                    ids += next(stream).sample_ids_B.tolist()
                if rank == 0:
                    steps.append([])
                steps[step] += ids
        assert stream.samples_consumed == sizes.after(start, 4)
        return steps

    single_rows = open_dataloader(
        Config(training=replace(training, local_batch_size=1)),
        batch_rank=0,
        num_batch_ranks=1,
        accumulation=1,
        samples_consumed=start,
    )
    expected = []
    position = start
    for _ in range(4):
        size = 4 if position < 8 else 8
        expected.append([int(next(single_rows).sample_ids_B[0]) for _ in range(size)])
        position += size

    assert rows_of_steps(1) == expected
    assert rows_of_steps(2) == expected
