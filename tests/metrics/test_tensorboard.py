import errno
import importlib.util
import itertools
import math
import os
import shutil
import threading
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardtrain.metrics import Metrics
from shardtrain.metrics.peak_memory import DeviceMemory
from shardtrain.metrics.sinks import tensorboard
from shardtrain.metrics.sinks.tensorboard import TensorBoardSink
from shardtrain.metrics.step_record import Record
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import ConfigError

TAGS = {
    "loss_metrics/global_avg_loss",
    "loss_metrics/global_max_loss",
    "grad_norm",
    "lr",
    "throughput(tps)",
    "targets_per_second",
    "target_share",
    "tflops",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(s)",
    "time_metrics/data_loading(%)",
    "n_tokens_seen",
}
CUDA_TAGS = {
    "memory/max_active(GiB)",
    "memory/max_active(%)",
    "memory/max_reserved(GiB)",
    "memory/max_reserved(%)",
    "memory/num_alloc_retries",
    "memory/num_ooms",
}
ON = {"enable_tensorboard": True}


@pytest.fixture(autouse=True)
def one_minute(monkeypatch):
    monkeypatch.setattr(
        time, "strftime", lambda form, *_: "20260131-1200" if form == "%Y%m%d-%H%M" else "x"
    )


def read(folder):
    """Return the value per step of each tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        scalars[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return scalars


def test_event_files_have_exactly_the_documented_tags_at_the_log_steps(tmp_path, kit):
    kit.run(tmp_path, 10, options=ON, total_steps=10)
    scalars = read(tmp_path / "tb/20260131-1200")

    assert set(scalars) == TAGS | {"memory/max_rss(GiB)"}
    for tag, points in scalars.items():
        assert set(points) == {1, 5, 10}, tag
        for value in points.values():
            assert math.isfinite(value), tag

    # float32 in the file: 1e-6 relative.
    assert scalars["time_metrics/data_loading(%)"][5] == pytest.approx(25.0, rel=1e-6)
    assert scalars["throughput(tps)"][5] == pytest.approx(200.0, rel=1e-6)
    assert scalars["n_tokens_seen"][10] == 1000
    assert scalars["memory/max_rss(GiB)"][1] > 0


def test_mfu_is_in_percent_if_the_peak_is_known(tmp_path, kit):
    kit.run(tmp_path, 1, options=ON | {"peak_flops": 4e12, "save_tb_folder": "curves"})
    scalars = read(tmp_path / "curves/20260131-1200")
    assert scalars["mfu(%)"][1] == pytest.approx(10.0, rel=1e-6)  # float32 in the file


def test_legacy_tag_of_the_speed_is_optional(tmp_path, kit):
    kit.run(tmp_path, 1, options=ON | {"legacy_tags": True})
    scalars = read(tmp_path / "tb/20260131-1200")
    assert scalars["wps"] == scalars["throughput(tps)"]


def test_cuda_memory_has_its_own_tags():
    memory = DeviceMemory(10.0, 20.0, 80.0, num_alloc_retries=3, num_ooms=1)
    record = Record(1, 1.0, 1.0, 1.0, 1.0, 1, 1.0, 1.0, 1.0, 0.5, 1.0, 0.5, memory, 0.0)
    tags = record.tags("cuda")

    assert set(tags) == TAGS | CUDA_TAGS | {"mfu(%)"}
    assert (tags["memory/max_active(%)"], tags["memory/max_reserved(%)"]) == (12.5, 25.0)
    assert (tags["memory/num_alloc_retries"], tags["memory/num_ooms"]) == (3, 1)


@pytest.mark.parametrize("minute", ["same", "later"])
def test_resumed_run_has_the_full_curve_in_its_own_folder(tmp_path, kit, monkeypatch, minute):
    kit.run(tmp_path, 12, options=ON, total_steps=20)
    with Metrics(kit.config(**ON), tmp_path, kit.facts(start_step=12), kit.OneRank()) as metrics:
        metrics.validation(10, {"loss": 3.0})
    if minute == "later":
        monkeypatch.setattr(time, "strftime", lambda form, *_: "20260131-1300")
    kit.run(tmp_path, 20, options=ON, start_step=10, total_steps=20)
    folder = sorted(path for path in (tmp_path / "tb").iterdir())[-1]
    scalars = read(folder)

    assert set(scalars) == TAGS | {"memory/max_rss(GiB)", "validation_metrics/loss"}

    validation = scalars.pop("validation_metrics/loss")
    assert validation == {10: 3.0}
    # Step 12 of the first process came after the checkpoint of step 10 and is not part of the history.
    assert all(set(points) == {1, 5, 10, 15, 20} for points in scalars.values())
    assert scalars["loss_metrics/global_avg_loss"][1] == 1.0
    assert scalars["n_tokens_seen"] == {1: 100, 5: 500, 10: 1000, 15: 1500, 20: 2000}


def test_every_rank_can_write_to_its_own_folder(tmp_path, kit):
    for rank in (0, 1):
        kit.run(
            tmp_path,
            1,
            options=ON | {"save_for_all_ranks": True},
            rank=rank,
            is_writer=rank == 0,
            world_size=2,
        )
    folders = sorted(
        path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("events.*")
    )

    assert folders == ["tb/20260131-1200/rank_0", "tb/20260131-1200/rank_1"]


def test_a_step_whose_loss_is_not_finite_is_marked(tmp_path, kit):
    with Metrics(kit.config(**ON), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        metrics.update(1, torch.tensor(float("nan")), 1, 1, 1.0, 1.0, 0.0)
    assert math.isnan(read(tmp_path / "tb/20260131-1200")["loss_metrics/global_avg_loss"][1])


def fail_with(number):
    def fault(folder, monkeypatch):
        def fail(path, *_, **__):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(atomic_io, "open_file", fail)

    return fault


def full_disk(folder, monkeypatch):
    """Opening succeeds, but writing fails."""
    monkeypatch.setattr(atomic_io, "open_file", lambda *_, **__: os.open("/dev/full", os.O_WRONLY))


def moved_folder(folder, _):
    folder.rename(folder.with_name("elsewhere"))


def removed_folder(folder, _):
    shutil.rmtree(folder)


def linked_folder(folder, _):
    (folder / "tb").rename(folder.with_name("elsewhere"))
    (folder / "tb").symlink_to(folder.with_name("elsewhere"))


FAULTS = {
    **{
        name: fail_with(getattr(errno, name))
        for name in ("ESTALE", "ENOSPC", "EIO", "EROFS", "EACCES")
    },
    "full disk": full_disk,
    "moved": moved_folder,
    "removed": removed_folder,
    "linked": linked_folder,
}


@pytest.mark.parametrize("late", [False, True], ids=["at a step", "at the end"])
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_write_is_one_warning_and_closes_the_sink(
    fault, late, tmp_path, monkeypatch, caplog, capfd
):
    monkeypatch.setattr(tensorboard, "FLUSH_SECONDS", 1000 if late else 0)
    atomic_io.guard(tmp_path / "run")
    sink = TensorBoardSink(tmp_path / "run/tb")
    FAULTS[fault](tmp_path / "run", monkeypatch)
    for step in (1, 2, 3):
        sink.scalars(step, {"a": 1.0, "b": 2.0})
    sink.close()
    atomic_io.guard()

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"cannot write TensorBoard files in {tmp_path}/run/tb" in caplog.text
    assert "training continues without them" in caplog.text
    assert "\n" not in caplog.messages[0]
    assert capfd.readouterr() == ("", ""), "a thread printed a traceback"


def test_points_are_written_on_close_without_a_thread(tmp_path):
    before = threading.active_count()
    sink = TensorBoardSink(tmp_path)
    for step in range(1, 100):
        sink.scalars(step, {"a": step})

    assert threading.active_count() == before

    sink.close()
    assert read(sink.folder)["a"] == {step: step for step in range(1, 100)}


def test_a_missing_package_is_an_error_and_not_an_empty_folder(tmp_path, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(
        ConfigError, match=r"metrics\.enable_tensorboard=true requires the package tensorboard"
    ):
        TensorBoardSink(tmp_path)


@pytest.mark.parametrize("count", [0, 1, tensorboard.REPLAYED, tensorboard.REPLAYED + 1, 123_457])
def test_a_long_history_is_thinned_evenly_and_keeps_its_ends(count):
    records = [{"step": step} for step in range(count)]
    steps = [record["step"] for record in tensorboard.thinned(records)]
    assert len(steps) == min(count, tensorboard.REPLAYED)
    assert steps == sorted(set(steps))

    if count:
        assert (steps[0], steps[-1]) == (0, count - 1)
        gaps = {after - before for before, after in itertools.pairwise(steps)}
        assert not gaps or max(gaps) - min(gaps) <= 1
