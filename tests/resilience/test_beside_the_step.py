"""Accounting, plots and logs may fail anywhere: training continues, with one warning."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import storage_faults
from once import made_once
from tiers import cases
from tiny import shallow_config

from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.launch import failure
from shardtrain.launch.goodput.ledger import Ledger
from shardtrain.train import trainer

STEPS = 6
PLACES = {
    "the account of the time is opened": "shardtrain.launch.goodput.ledger:Ledger._open",
    "the account of the time is added up": "shardtrain.launch.goodput.ledger:account",
    "seconds are put into bins": "shardtrain.launch.goodput.ledger:bins",
    "a line of the account is composed": "shardtrain.launch.goodput.ledger:Ledger._point",
    "a line of the account is written": "shardtrain.launch.goodput.events:append",
    "rows of sources are counted": "shardtrain.data.loader:DataLoader.rows_of_sources",
    "spikes are counted": "shardtrain.resilience.resilience:Resilience.measures",
    "a record is composed": "shardtrain.metrics:Metrics._record",
    "memory is read": "shardtrain.metrics:read_peak",
    "a step is printed": "shardtrain.metrics.sinks.console:Console.write",
    "a line of metrics.jsonl is written": "shardtrain.metrics.sinks.metrics_jsonl:JsonlFiles.write",
    "a result of validation is printed": "shardtrain.metrics.sinks.console:Console.validation",
    "a result of validation is written": "shardtrain.metrics.sinks.metrics_jsonl:JsonlFiles.validation",
    "a point of a curve is written": "shardtrain.metrics.sinks.tensorboard:TensorBoardSink.write",
    "files of metrics are closed": "shardtrain.metrics.sinks.metrics_jsonl:JsonlFiles.close",
    "the header is printed": "shardtrain.metrics.summary:log_header",
    "the summary is printed": "shardtrain.metrics:Metrics._log_summary",
    "the text of a sample is logged": "shardtrain.train.samples:Samples._tell",
    "a step is profiled": "shardtrain.metrics.profiling:_Trace.step",
    "a profile ends": "shardtrain.metrics.profiling:_Trace.close",
    "a heartbeat is composed": "shardtrain.resilience.watchdog.watchdog:Watchdog._sign",
    "the main thread is sampled": "shardtrain.resilience.watchdog.watchdog:Watchdog._sample",
    "slow ranks are looked for": "shardtrain.resilience.watchdog.watchdog:common",
    "the data are hashed": "shardtrain.data.file_hashes:Contents._hash",
}
EVERYTHING = "everything together"


def config_of(folder: Path) -> Config:
    data = folder.with_name("rows.txt")
    data.write_text("a word and another " * 2000)
    source = {"dataset": "text", "dataset_path": str(data)}
    return shallow_config(
        job={"dump_folder": str(folder)},
        model={"overrides": {"num_layers": 1, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32}},
        training={"seq_len": 16, "local_batch_size": 1, "global_batch_size": 2, "steps": STEPS, **source},
        data={"mode": "stream"},
        validation={"enable": True, **source, "freq": 2, "steps": 1},
        metrics={"log_freq": 1, "enable_tensorboard": True, "sample_prompt": "a", "sample_freq": 2},
        profiling={"enable_profiling": True, "profile_freq": 3, "profiler_active": 1, "profiler_warmup": 1},
        checkpoint={"enable": True, "interval": 2},
        comm={"straggler_window_steps": 1},
    )


def owner_of(place: str) -> tuple[Any, str]:
    module, _, names = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = names.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def broken(places: list[str], loaded: Loaded) -> object:
    """Train, and let the functions of these places raise."""

    def raises(place: str) -> Callable[..., Any]:
        def raise_it(*_: object, **__: object) -> Any:
            raise RuntimeError(f"broken: {place}")

        return raise_it

    for place in places:
        owner, name = owner_of(place)
        read = isinstance(getattr(owner, name), property)
        assert read or callable(getattr(owner, name))
        setattr(owner, name, property(raises(place)) if read else raises(place))
    return trainer.main(loaded)


def saved(folder: Path) -> dict[str, str]:
    """What the last checkpoint holds."""
    files = (folder / "checkpoint" / f"step-{STEPS}").glob("rank-*.bin")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("place", list(PLACES.values())[:5])
def test_the_account_of_the_time_fails_with_one_warning(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_it(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    owner, name = owner_of(place)
    monkeypatch.setattr(owner, name, raise_it)
    with Ledger(tmp_path, world_size=2) as ledger:
        ledger.measures()
        ledger.saved(2)
        ledger.rollback(1)
        assert ledger.measures() == {}
    assert caplog.text.count("goodput is not recorded from here on") == 1


def test_an_exit_report_that_cannot_be_made_changes_no_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_it(_: Path) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr(failure, "last_step", raise_it)
    failure.write_exit(tmp_path, None, 0)
    assert capsys.readouterr().err == f"cannot write {tmp_path / 'exit.json'}: RuntimeError: broken\n"


@pytest.mark.parametrize("ranks", cases([2], nightly=[1]))
@pytest.mark.parametrize("what", cases([EVERYTHING], nightly=list(PLACES)))
@pytest.mark.nightly(
    "whole runs", by="tests/resilience/test_beside_the_step.py::test_the_account_of_the_time_fails_with_one_warning"
)
def test_an_error_beside_the_step_is_a_warning_and_the_run_trains_on(
    what: str, ranks: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def undisturbed() -> tuple[dict[int, float], dict[str, str]]:
        config = config_of(tmp_path_factory.mktemp("undisturbed") / "run")
        code, told = storage_faults.run(config, ranks, None)
        assert code == 0, told
        return storage_faults.losses(config), saved(Path(config.job.dump_folder))

    expected, weights = made_once(tmp_path_factory, f"beside-{ranks}", undisturbed)
    assert sorted(expected) == list(range(1, STEPS + 1)) and weights
    config = config_of(tmp_path / "run")
    places = list(PLACES.values()) if what == EVERYTHING else [PLACES[what]]
    code, told = storage_faults.run(config, ranks, None, main=partial(broken, places))
    assert code == 0, told
    found = storage_faults.losses(config)
    assert saved(tmp_path / "run") == weights and all(expected[step] == loss for step, loss in found.items())
    warned = [line for line in told.splitlines() if "broken: " in line and "WARNING" in line]
    assert len(set(warned)) == len(warned) <= len(PLACES), told
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == 0
