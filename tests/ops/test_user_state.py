"""State that a model's code stores during a trial pass is removed, wherever the code keeps it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from shardtrain.ops.user_state import UserState, trial
from shardtrain.utils import own_file

TEXT = """
import functools

import torch
from torch import nn

TABLE = {}
LIST = []
masks = None


class Cache:
    def __init__(self):
        self.kept = None


CACHE = Cache()


@functools.lru_cache
def cached(n):
    return torch.ones(n)


def with_default(n, kept={}):
    return kept.setdefault(n, torch.ones(n))


def wrapped():
    kept = {}
    return lambda n: kept.setdefault(n, torch.ones(n))


in_closure = wrapped()


class Model(nn.Module):
    shared = None
    table = {}

    def forward(self, n):
        global masks
        PLACE
        return n
"""
PLACES = {
    "an attribute": ("self.mask = torch.ones(n)", "mask"),
    "a buffer": ("self.register_buffer('mask', torch.ones(n))", "_buffers"),
    "a class attribute": ("Model.shared = torch.ones(n)", "Model.shared"),
    "a new class attribute": ("Model.mask = torch.ones(n)", "Model.mask"),
    "a table of a class": ("self.table[n] = torch.ones(n)", "Model.table"),
    "a global": ("masks = torch.ones(n)", "masks"),
    "a table": ("TABLE[n] = torch.ones(n)", "TABLE"),
    "a list": ("LIST.append(torch.ones(n))", "LIST"),
    "an attribute of another object": ("CACHE.kept = torch.ones(n)", "CACHE.kept"),
    "lru_cache": ("cached(n)", "cached"),
    "a default argument": ("with_default(n)", "with_default"),
    "a closure": ("in_closure(n)", "<lambda>"),
}


@pytest.mark.parametrize("place", PLACES)
def test_state_of_a_trial_is_removed_and_named(place: str, tmp_path: Path) -> None:
    statement, name = PLACES[place]
    path = tmp_path / "kept.py"
    path.write_text(TEXT.replace("PLACE", statement))
    model = own_file.run(path, own_file.MODEL, "model.name").Model()
    before = UserState(model)
    with trial(model) as state:
        model(3)
        assert any(changed.endswith(name) for changed in state.changed()), state.changed()

    assert before.changed() == []


def test_state_from_before_a_trial_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.py"
    path.write_text(TEXT.replace("PLACE", "self.table[n] = self.mask = torch.ones(n)"))
    model = own_file.run(path, own_file.MODEL, "model.name").Model()
    model(2)
    with pytest.raises(RuntimeError), trial(model):
        model(3)
        raise RuntimeError

    assert list(model.table) == [2]
    assert torch.equal(model.mask, torch.ones(2))


LAZY = """


class Lazy(dict):
    def items(self):
        raise ValueError("imports every model")


LAZY = Lazy(one=1)
"""


def test_items_that_a_dictionary_computes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lazy.py"
    path.write_text(TEXT.replace("PLACE", "pass") + LAZY)
    model = own_file.run(path, own_file.MODEL, "model.name").Model()
    with trial(model) as state:
        model(4)
        assert state.changed() == []


def test_globals_of_transformers_outside_of_site_packages_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "transformers.py"
    library.write_text("import torch\nTABLE = {}\n\nclass Layer(torch.nn.Module): pass\n")
    path = tmp_path / "kept.py"
    path.write_text(TEXT.replace("PLACE", "pass"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    layer = importlib.import_module("transformers").Layer()
    model = own_file.run(path, own_file.MODEL, "model.name").Model()
    model.layer = layer
    before = UserState(model)
    sys.modules["transformers"].TABLE["mask"] = torch.ones(1)

    assert before.changed() == []
