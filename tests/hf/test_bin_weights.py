"""pytorch_model.bin in a load: the same tensors as safetensors give, nothing in it run, and asked for by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtrain import config
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.utils.errors import CheckpointError


def write(folder: Path, value: Any, name: str = "pytorch_model.bin") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / name)
    return folder


def test_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "a": whole,
        "b": whole[1:3].t(),
        "c": torch.tensor(3.0).bfloat16(),
        "d": torch.nn.Parameter(whole.half()),
    }
    with BinWeights(write(tmp_path / "one", tensors)) as weights:
        assert weights.names() == sorted(tensors)
        for name, tensor in tensors.items():
            assert (weights.shape(name), weights.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            torch.testing.assert_close(weights.read(name, ()), tensor.detach(), rtol=0, atol=0)
        assert torch.equal(weights.read("a", (slice(1, 3), slice(0, 2))), whole[1:3, :2])


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / "two", {f"w{number}": torch.full((2,), float(number))}, f"pytorch_model-{number}.bin")
    index = tmp_path / "two" / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"w1": "pytorch_model-1.bin", "w2": "pytorch_model-2.bin"}}')
    with BinWeights(tmp_path / "two") as weights:
        assert [float(weights.read(name, ())[0]) for name in weights.names()] == [1.0, 2.0]
    index.write_text('{"weight_map": {"w1": "../pytorch_model-1.bin"}}')
    with pytest.raises(CheckpointError, match=r"is not a \.bin file of this folder"):
        BinWeights(tmp_path / "two")


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_what_is_more_than_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    for value, said in (
        ({"a": Hostile(tmp_path / "ran")}, "nothing in it was run"),
        ({"a": torch.zeros(2), "note": "text"}, "note is not a tensor"),
        ([torch.zeros(2)], "holds no table of tensors"),
        ({}, "holds no table of tensors"),
    ):
        with pytest.raises(CheckpointError, match=said):
            BinWeights(write(tmp_path / "bad", value))
    assert not (tmp_path / "ran").exists()
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has safetensors"):
        BinWeights(tmp_path / "bad")
    with pytest.raises(CheckpointError, match="has neither"):
        BinWeights(tmp_path / "nowhere")


def test_it_is_asked_for_by_an_option_of_hugging_face_weights() -> None:
    wrong = config.check(config.load(None, ["--checkpoint.enable", "--checkpoint.initial_load_legacy_bin"]))
    assert [problem.option for problem in wrong] == ["checkpoint.initial_load_legacy_bin"]
