"""Python's garbage collector runs every ``gc_freq`` steps, and not in between."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shardtrain.utils import garbage_collection
from shardtrain.utils.errors import ConfigError


@pytest.fixture
def collections(monkeypatch):
    calls = []
    monkeypatch.setattr(
        garbage_collection,
        "gc",
        SimpleNamespace(**{name: getattr(gc, name) for name in ("isenabled", "enable", "disable")}),
    )
    garbage_collection.gc.collect = lambda generation=2: calls.append(generation) or 0
    garbage_collection.gc.garbage = []
    yield calls
    gc.enable()


@pytest.mark.parametrize(("steps", "freq"), [(10, 3), (10, 1), (10, 50), (100, 50)])
def test_garbage_is_only_collected_every_gc_freq_steps(collections, steps, freq):
    with garbage_collection.GarbageCollection(freq) as collection:
        for step in range(1, steps + 1):
            assert not gc.isenabled()
            collection.step(step)
    assert collections == [1] * (steps // freq)
    assert gc.isenabled()


def test_gc_debug_collects_everything_every_step_and_reports_it(collections, caplog):
    with (
        caplog.at_level("INFO", logger="shardtrain"),
        garbage_collection.GarbageCollection(50, debug=True) as collection,
    ):
        for step in (1, 2):
            collection.step(step)

    assert collections == [2, 2]
    assert "gc: step 2: 0 objects in cycles, 0 not freed" in caplog.text


def test_a_gc_frequency_below_one_is_an_error():
    with pytest.raises(ConfigError, match=r"training\.gc_freq=0"):
        garbage_collection.GarbageCollection(0)
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_pause_restores_the_collector(enabled):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(KeyError), garbage_collection.paused():
            with garbage_collection.paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_imported_objects_are_never_collected():
    code = """
import gc, sys
from shardtrain.utils import garbage_collection
phases = []
gc.callbacks.append(lambda phase, _: phases.append(phase))
with garbage_collection.importing("json.tool"):
    import json.tool
    objects = [[] for _ in range(100_000)]
assert not phases and gc.isenabled() and gc.get_freeze_count() > 100_000
objects += [[] for _ in range(100_000)]
count = gc.get_freeze_count()
with garbage_collection.importing("json.tool"):  # it is imported already, so later objects stay collectable
    assert gc.isenabled()
assert phases and gc.get_freeze_count() == count
"""
    subprocess.run([sys.executable, "-c", code], check=True)
