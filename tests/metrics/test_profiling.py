import json
import sys

import pytest
import torch

from shardtrain.config.schema import Config, Profiling
from shardtrain.metrics import profiling
from shardtrain.metrics.flight_recorder import flight_recorder_environment
from shardtrain.utils.errors import ConfigError


def config(**options):
    return Config(profiling=Profiling(**options))


def train(config, folder, steps, rank=0, start_step=0):
    with profiling.profiler(config, folder, rank, "cpu", start_step) as profiler:
        for _ in range(steps):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            if profiler:
                profiler.step()


def test_traces_are_written_every_profile_freq_steps_for_each_rank(tmp_path):
    options = config(enable_profiling=True, profile_freq=5)
    for rank in (0, 1):
        train(options, tmp_path, steps=12, rank=rank)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert sorted(path.relative_to(tmp_path).as_posix() for path in files) == [
        "profile_traces/iteration_10/rank0_trace.json",
        "profile_traces/iteration_10/rank1_trace.json",
        "profile_traces/iteration_5/rank0_trace.json",
        "profile_traces/iteration_5/rank1_trace.json",
    ]

    for path in files:
        events = json.loads(path.read_text())["traceEvents"]
        assert "aten::mm" in {event.get("name") for event in events}


def test_resumed_run_continues_the_iteration_count(tmp_path):
    train(config(enable_profiling=True, profile_freq=5), tmp_path, steps=6, start_step=7)
    assert [path.name for path in (tmp_path / "profile_traces").iterdir()] == ["iteration_10"]


def test_incomplete_recording_is_not_written(tmp_path):
    options = config(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    train(options, tmp_path, steps=3)
    assert not list(tmp_path.rglob("*.json"))


def test_a_run_without_profiling_writes_nothing(tmp_path):
    train(Config(), tmp_path, steps=12)
    assert not list(tmp_path.iterdir())


def test_profiling_without_effect_is_an_error(tmp_path):
    bad = config(enable_profiling=True, profile_freq=3, enable_memory_snapshot=True)
    problems = [str(problem) for problem in profiling.profiling_problems(bad, "cpu")]
    assert problems == [
        "profiling.profile_freq=3 must be at least profiler_warmup + profiler_active, which is 4; set it to at least 4",
        "profiling.enable_memory_snapshot=true requires the CUDA allocator, but this run uses cpu; set it to false",
    ]

    with (
        pytest.raises(ConfigError, match="profile_freq"),
        profiling.profiler(bad, tmp_path, 0, "cpu"),
    ):
        pass

    options = config(enable_profiling=True, profiler_active=0)
    (problem,) = profiling.profiling_problems(options, "cpu")
    assert problem.option == "profiling.profiler_active"
    assert not profiling.profiling_problems(config(enable_memory_snapshot=True), "cuda")
    assert not profiling.profiling_problems(config(profile_freq=1), "cpu")


class AllocatorStub:
    def __init__(self):
        self.calls = []

    def _record_memory_history(self, enabled="all", max_entries=None):
        self.calls.append(("record", enabled))

    def _dump_snapshot(self, path):
        with open(path, "wb") as file:
            file.write(b"history")


@pytest.fixture
def allocator(monkeypatch):
    stub = AllocatorStub()
    monkeypatch.setattr(torch.cuda, "memory", stub)
    return stub


def test_memory_snapshots_are_written_every_profile_freq_steps(tmp_path, allocator):
    with profiling.profiler(
        config(enable_memory_snapshot=True, profile_freq=2), tmp_path, 3, "cuda"
    ) as profiler:
        for _ in range(5):
            profiler.step()
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pickle"))

    assert files == [f"memory_snapshot/iteration_{k}/rank3_memory_snapshot.pickle" for k in (2, 4)]
    assert allocator.calls == [("record", "all"), ("record", None)]


@pytest.mark.parametrize("wrapped", [False, True])
def test_running_out_of_memory_writes_a_snapshot(tmp_path, allocator, wrapped):
    def fail():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as error:
            if wrapped:
                raise RuntimeError("step failed") from error
            raise

    options = config(enable_memory_snapshot=True, profile_freq=10)
    with (
        pytest.raises((torch.OutOfMemoryError, RuntimeError)),
        profiling.profiler(options, tmp_path, 0, "cuda") as profiler,
    ):
        profiler.step()
        fail()

    assert [path.parent.name for path in tmp_path.rglob("*.pickle")] == ["iteration_1_exit"]


def test_another_error_writes_no_snapshot(tmp_path, allocator):
    options = config(enable_memory_snapshot=True)
    with pytest.raises(KeyError), profiling.profiler(options, tmp_path, 0, "cuda"):
        raise KeyError("other")
    assert not list(tmp_path.rglob("*.pickle"))


def test_the_flight_recorder_dumps_below_the_run_folder(tmp_path):
    environment = flight_recorder_environment(Config(), tmp_path / "run")
    prefix = str(tmp_path / "run/comm_traces/rank_")
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
    }


def test_a_buffer_of_zero_turns_the_flight_recorder_off(tmp_path):
    off = Config(comm=type(Config().comm)(trace_buf_size=0))
    environment = flight_recorder_environment(off, tmp_path)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "0"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in environment


def test_the_module_imports_no_torch():
    import subprocess

    code = (
        "import sys, shardtrain.metrics.profiling, shardtrain.metrics, shardtrain.metrics.flight_recorder;"
        "print([m for m in ('torch', 'rich', 'tensorboard', 'wandb', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
