from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardtrain.config import (
    ConfigError,
    Loaded,
    load,
    machine_notes,
    machine_rules,
    require,
    unavailable,
    without_effect_on_a_cpu,
)
from shardtrain.config.availability import UNAVAILABLE
from shardtrain.config.machine_rules import (
    MAX_RANKS,
    NODES_PER_SECOND,
    mesh_notes,
    watching_problem,
)
from shardtrain.config.options import options
from shardtrain.resilience.watchdog.watchdog import beat_seconds


def read(tmp_path: Path, text: str) -> Loaded:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load(file)


def assert_one(problems: list[Any], *fragments: str) -> None:
    assert len(problems) == 1, [str(problem) for problem in problems]
    for fragment in fragments:
        assert fragment in str(problems[0])


def test_the_default_config_runs_on_any_number_of_ranks() -> None:
    for world_size in (1, 2, 3, 7, 64):
        assert machine_notes(load(None), world_size, "cpu", 0) == []
        require(load(None), world_size, "cpu", 0)


@pytest.mark.parametrize(
    ("text", "world_size", "fragments"),
    [
        (
            "tensor_parallel_degree = 4",
            6,
            ["tensor_parallel_degree=4 cannot divide 6 ranks", "use 1, 2, 3 or 6"],
        ),
        (
            "tensor_parallel_degree = 2",
            1,
            ["cannot divide 1 rank;", "use 1, or a multiple of 2 ranks"],
        ),
        (
            "tensor_parallel_degree = 4\ndata_parallel_replicate_degree = 2",
            4,
            [
                "tensor_parallel_degree=4",
                "together with the other degrees (2)",
                "use 1 or 2, or a multiple of 8 ranks",
            ],
        ),
        (
            "data_parallel_shard_degree = 3",
            4,
            ["shard_degree=3", "makes 3 ranks, and there are 4", "use -1 or 4"],
        ),
        (
            "data_parallel_shard_degree = 2\ntensor_parallel_degree = 4",
            6,
            ["(4) makes 8 ranks, and there are 6", "start 8 ranks"],
        ),
    ],
)
def test_degrees_multiply_to_the_number_of_ranks(
    tmp_path: Path, text: str, world_size: int, fragments: list[str]
) -> None:
    loaded = read(tmp_path, f"[parallelism]\n{text}\n")
    assert_one(machine_notes(loaded, world_size), *fragments)
    assert machine_notes(loaded, None) == []


def test_the_global_batch_divides_over_the_ranks_there_are(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[training]\nglobal_batch_size = 24\n")
    assert machine_notes(loaded, 3) == []
    assert_one(
        machine_notes(loaded, 2),
        "global_batch_size=24",
        "local_batch_size 8 times 2",
        "use 16 or 32, or -1",
    )


def test_a_missing_device_is_named(tmp_path: Path) -> None:
    loaded = read(tmp_path, '[training]\ndevice = "cuda"\n')
    assert_one(machine_notes(loaded, 1, "cpu", 0), 'training.device="cuda" finds no such device')
    assert machine_notes(loaded, 1, "cuda", 8) == [] == machine_notes(loaded, 1, None, None)


def test_async_tensor_parallelism_falls_back_on_a_cpu_with_a_notice(tmp_path: Path) -> None:
    text = "[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true\n[compile]\nenable = true\n"
    loaded = read(tmp_path, text)
    for device, devices in (("cpu", 0), ("cuda", 2)):
        assert machine_notes(loaded, 2, device, devices) == []

    (note,) = without_effect_on_a_cpu(loaded.config)
    assert note.startswith("parallelism.enable_async_tensor_parallel=true has no effect on a CPU")


def test_compiling_on_cpu_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = read(tmp_path, "[compile]\nenable = true\n")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert_one(machine_notes(loaded, 1, "cpu", 0), "compile.enable=true needs a C++ compiler")
    assert machine_notes(loaded, 1, "cuda", 1) == []

    monkeypatch.setattr(shutil, "which", lambda name: "/bin/clang++" if name == "clang++" else None)
    assert machine_notes(loaded, 1, "cpu", 0) == []


def test_paths_that_do_not_exist_are_named(tmp_path: Path) -> None:
    text = '[training]\ndataset_path = "no/where"\n[checkpoint]\nenable = true\ninitial_load_path = "no/checkpoint"\n'
    problems = machine_notes(read(tmp_path, text))
    assert [p.option for p in problems] == ["training.dataset_path", "checkpoint.initial_load_path"]
    assert all(p.rule == "does not exist" for p in problems)
    assert machine_notes(read(tmp_path, f'[training]\ndataset_path = "{tmp_path}"\n')) == []


def test_a_missing_folder_of_a_pretrained_model_requires_the_model(tmp_path: Path) -> None:
    """If the missing folder also holds initial weights, downloading only a tokenizer is no fix."""
    folder = f'[model]\nhf_assets_path = "{tmp_path}/none"\n'
    assert_one(
        machine_notes(read(tmp_path, folder)),
        "does not exist",
        "correct the path, download the tokenizer",
    )

    weights = f'[checkpoint]\nenable = true\ninitial_load_in_hf = true\ninitial_load_path = "{tmp_path}/none"\n'
    problems = machine_notes(read(tmp_path, folder + weights))
    assert {p.option for p in problems} == {"model.hf_assets_path", "checkpoint.initial_load_path"}
    assert all(
        "download the model (shardtrain data download --repo_id OWNER/NAME --all)" in p.fix
        for p in problems
    )
    assert not any("tokenizer" in p.fix for p in problems)


def write_tokenizer(folder: Path, num_ids: int) -> None:
    vocab = {f"t{i}": i for i in range(num_ids - 1)}
    content = {"model": {"vocab": vocab}, "added_tokens": [{"id": num_ids - 1, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_a_tokenizer_must_exist_be_readable_and_fit_the_model(tmp_path: Path) -> None:
    assets = f'[model]\nhf_assets_path = "{tmp_path}"\noverrides = {{vocab_size = 16}}\n'
    assert_one(
        machine_notes(read(tmp_path, assets)),
        "holds no tokenizer.json or tokenizer.model",
        '"bytes"',
    )

    write_tokenizer(tmp_path, 16)
    assert machine_notes(read(tmp_path, assets)) == []

    write_tokenizer(tmp_path, 17)
    assert_one(
        machine_notes(read(tmp_path, assets)), "has 17 ids", "vocab_size of 16", "to 17 or more"
    )

    (tmp_path / "tokenizer.json").write_text("{")
    assert_one(machine_notes(read(tmp_path, assets)), "cannot be read")
    assert_one(
        machine_notes(read(tmp_path, '[model]\ntokenizer_path = "no/where"\n')),
        "tokenizer_path",
        "does not exist",
    )

    (tmp_path / "tokenizer.model").write_bytes(b"")
    old = f'[model]\ntokenizer_path = "{tmp_path / "tokenizer.model"}"\n'
    # Its content is not checked, because that requires the tokenizer's library.
    assert machine_notes(read(tmp_path, old)) == []

    (tmp_path / "vocab.txt").write_text("a")
    odd = f'[model]\ntokenizer_path = "{tmp_path / "vocab.txt"}"\n'
    assert_one(machine_notes(read(tmp_path, odd)), "is not a .json or .model file", "download")


def test_the_byte_tokenizer_needs_258_rows(tmp_path: Path) -> None:
    assert_one(
        machine_notes(read(tmp_path, "[model.overrides]\nvocab_size = 256\n")),
        "has 258 ids",
        "to 258 or more",
    )
    assert machine_notes(read(tmp_path, "[model.overrides]\nvocab_size = 258\n")) == []


def test_packages_that_are_not_installed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sinks = {f"enable_{name}": "true" for name in ("wandb", "tensorboard", "mlflow", "trackio")} | {
        "prometheus_port": "9000"
    }
    problems = machine_notes(
        read(tmp_path, "[metrics]\n" + "".join(f"{k} = {v}\n" for k, v in sinks.items()))
    )

    assert [p.option for p in problems] == [f"metrics.{name}" for name in sinks]
    assert "pip install wandb" in problems[0].fix


def test_the_table_of_unavailable_options_names_options_whose_defaults_are_available() -> None:
    for name, is_requested, _, _ in UNAVAILABLE:
        assert not is_requested(options()[name].default), name
    assert unavailable(load(None)) == []


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("[parallelism]\npipeline_parallel_degree = 2", "parallelism.pipeline_parallel_degree"),
        ("[parallelism]\ncontext_parallel_degree = 2", "parallelism.context_parallel_degree"),
        ("[parallelism]\nexpert_parallel_degree = 2", "parallelism.expert_parallel_degree"),
        ('[model]\nconverters = ["quantize.moe.mx"]', "model.converters"),
        ("[fault_tolerance]\nenable = true", "fault_tolerance.enable"),
        ('[comm]\nmode = "local_tensor"', "comm.mode"),
        ('[experimental]\ncustom_import = "x"', "experimental.custom_import"),
        ("[lr_scheduler]\nwarmup_min_lr = 1e-6", "lr_scheduler.warmup_min_lr"),
    ],
)
def test_an_unavailable_option_stops_a_run_with_a_message(
    tmp_path: Path, text: str, option: str
) -> None:
    if not any(name == option for name, *_ in UNAVAILABLE):
        pytest.skip(f"{option} is available now")
    loaded = read(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        require(loaded)

    lines = [str(problem) for problem in caught.value.problems]
    lines = [line for line in lines if option in line and "not available yet" in line]
    assert any(line.startswith("run.toml:2") for line in lines)


def test_a_run_is_refused_with_all_its_problems_at_once(tmp_path: Path) -> None:
    text = "[training]\nsteps = 0\n[parallelism]\ntensor_parallel_degree = 4\n[validation]\nenable = true\n"
    with pytest.raises(ConfigError) as caught:
        require(read(tmp_path, text), 6, "cpu", 0)

    options_named = {p.option for p in caught.value.problems}
    assert options_named >= {"training.steps", "parallelism.tensor_parallel_degree"}
    assert len(caught.value.problems) >= 2


def test_a_run_reports_renamed_and_ineffective_options(tmp_path: Path) -> None:
    lines = require(
        read(tmp_path, "[training]\nbatch_size = 2\n[validation]\nfreq = 3\n"), 2, "cpu", 0
    )

    assert len(lines) == 2
    assert "batch_size" in lines[0]
    assert "validation.freq" in lines[1]


def test_too_many_ranks_are_rejected_with_the_limit() -> None:
    loaded = load("llama3_8b", [])
    assert not list(mesh_notes(loaded, MAX_RANKS))

    (problem,) = mesh_notes(loaded, MAX_RANKS + 8)
    assert problem.option == "--nproc"
    assert f"more than {MAX_RANKS:,} ranks" in problem.rule


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "least"),
    [(16384, 8, None), (16384, 4, 59), (65536, 8, 118), (16384, 1, 235), (65536, 65536, None)],
)
def test_too_many_nodes_for_the_hang_timeout_are_rejected_with_a_fix(
    ranks: int, local_ranks: int, least: int | None
) -> None:
    problem = watching_problem(load("debug", []), ranks, local_ranks)
    assert (problem is None) == (least is None)

    # The proposed timeout is accepted, and heartbeats at its interval do not overload the store.
    nodes = ranks // local_ranks
    if problem is not None:
        assert problem.option == "comm.hang_timeout_seconds"
        assert problem.fix == f"set it to {least} or more"
        loaded = load("debug", [f"--comm.hang_timeout_seconds={least}"])
        assert watching_problem(loaded, ranks, local_ranks) is None
        assert nodes / beat_seconds(least, nodes) <= NODES_PER_SECOND

    # A timeout of 0 disables the watchdog.
    unwatched = load("debug", ["--comm.hang_timeout_seconds=0"])
    assert watching_problem(unwatched, ranks, local_ranks) is None


def test_only_a_folder_that_was_never_written_is_refused_on_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a used folder becomes read-only, its first write reports a storage error, which is retried."""
    used = tmp_path / "used"
    empty = tmp_path / "empty"
    for folder in (used, empty):
        folder.mkdir()
    (used / "step-4").mkdir()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))

    assert machine_rules._why_not_writable(used) == ""
    for folder in (empty, empty / "new"):
        assert "not writable" in machine_rules._why_not_writable(folder)
