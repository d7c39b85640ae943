"""If accounting, plots or logs fail anywhere, training continues with one warning."""

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
    "goodput is opened": "shardtrain.launch.goodput.ledger:Ledger._open",
    "goodput is summed up": "shardtrain.launch.goodput.ledger:account",
    "seconds are put into bins": "shardtrain.launch.goodput.ledger:bins",
    "a record of goodput is created": "shardtrain.launch.goodput.ledger:Ledger._point",
    "a record of goodput is written": "shardtrain.launch.goodput.events:append",
    "rows of sources are counted": "shardtrain.data.loader:DataLoader.rows_of_sources",
    "spikes are counted": "shardtrain.resilience.resilience:Resilience.measures",
    "a record of metrics is created": "shardtrain.metrics:Metrics._record",
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
    "a heartbeat is created": "shardtrain.resilience.watchdog.watchdog:Watchdog._sign",
    "the main thread is sampled": "shardtrain.resilience.watchdog.watchdog:Watchdog._sample",
    "slow ranks are detected": "shardtrain.resilience.watchdog.watchdog:common",
    "the data are hashed": "shardtrain.data.file_hashes:Contents._hash",
}
EVERYTHING = "all together"


def config_of(folder: Path) -> Config:
    """A small run that uses each operation of ``PLACES`` at least once."""
    data = folder.with_name("rows.txt")
    data.write_text("a token and another " * 2000)
    source = {"dataset": "text", "dataset_path": str(data)}
    sizes = {"num_layers": 1, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32}
    return shallow_config(
        job={"dump_folder": str(folder)},
        model={"overrides": sizes},
        training={
            "seq_len": 16,
            "local_batch_size": 1,
            "global_batch_size": 2,
            "steps": STEPS,
            **source,
        },
        data={"mode": "stream"},
        validation={"enable": True, **source, "freq": 2, "steps": 1},
        metrics={"log_freq": 1, "enable_tensorboard": True, "sample_prompt": "a", "sample_freq": 2},
        profiling={
            "enable_profiling": True,
            "profile_freq": 3,
            "profiler_active": 1,
            "profiler_warmup": 1,
        },
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
    """Train, with functions that raise an error in these places."""

    def raises(place: str) -> Callable[..., Any]:
        def raise_it(*_: object, **__: object) -> Any:
            raise RuntimeError(f"broken: {place}")

        return raise_it

    for place in places:
        owner, name = owner_of(place)
        is_property = isinstance(getattr(owner, name), property)
        assert is_property or callable(getattr(owner, name))
        setattr(owner, name, property(raises(place)) if is_property else raises(place))
    return trainer.main(loaded)


def saved(folder: Path) -> dict[str, str]:
    """Return the hashes of the files in the last checkpoint."""
    files = (folder / "checkpoint" / f"step-{STEPS}").glob("rank-*.bin")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("place", list(PLACES.values())[:5])
def test_goodput_accounting_fails_with_one_warning(
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

    assert caplog.text.count("goodput is no longer recorded") == 1


def test_failing_exit_report_does_not_change_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_it(_: Path) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr(failure, "last_step", raise_it)
    failure.write_exit(tmp_path, None, 0)

    assert (
        capsys.readouterr().err == f"cannot write {tmp_path / 'exit.json'}: RuntimeError: broken\n"
    )


@pytest.mark.parametrize("ranks", cases([2], nightly=[1]))
@pytest.mark.parametrize("failing", cases([EVERYTHING], nightly=list(PLACES)))
@pytest.mark.nightly(
    "complete runs",
    by="tests/resilience/test_errors_outside_the_step.py::test_goodput_accounting_fails_with_one_warning",
)
def test_error_outside_the_step_is_a_warning_and_training_continues(
    failing: str, ranks: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def undisturbed() -> tuple[dict[int, float], dict[str, str]]:
        config = config_of(tmp_path_factory.mktemp("undisturbed") / "run")
        code, output = storage_faults.run(config, ranks, None)
        assert code == 0, output
        return storage_faults.losses(config), saved(Path(config.job.dump_folder))

    expected, weights = made_once(tmp_path_factory, f"errors-{ranks}", undisturbed)

    assert sorted(expected) == list(range(1, STEPS + 1))
    assert weights

    # The same run, with operations that raise.
    config = config_of(tmp_path / "run")
    places = list(PLACES.values()) if failing == EVERYTHING else [PLACES[failing]]
    code, output = storage_faults.run(config, ranks, None, main=partial(broken, places))

    assert code == 0, output
    assert saved(tmp_path / "run") == weights
    for step, loss in storage_faults.losses(config).items():
        assert loss == expected[step], step

    # Each operation is reported once.
    warnings = [line for line in output.splitlines() if "broken: " in line and "WARNING" in line]
    assert len(set(warnings)) == len(warnings) <= len(PLACES), output
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == 0
