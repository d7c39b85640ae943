"""Errors in a folder are reported before anything is written, with the file, key or tensor, and a fix."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from safetensors.torch import load_file, save_file
from tiny_tokenizers import bpe_folder

from shardtrain.cli import main
from shardtrain.hf import importing, weights
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import CheckpointError, ConfigError

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama3"), tmp_path_factory.mktemp("hub") / "hf")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "hf"
    copy.mkdir()
    for file in original.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def key(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        fields[name] = value
        (folder / "config.json").write_text(json.dumps(fields))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        loaded = load_file(folder / "model.safetensors")
        change(loaded)
        save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def header(text: bytes) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text) and None
    )  # type: ignore[return-value]


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def index(content: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def index_of_two_files(folder: Path) -> None:
    save_file({"other": torch.ones(1)}, folder / "b.safetensors")
    index({"weight_map": {"model.norm.weight": "model.safetensors", WQ: "b.safetensors"}})(folder)


def index_of_an_absent_tensor(folder: Path) -> None:
    tensors(lambda loaded: loaded.pop(WQ))(folder)
    index({"weight_map": {"model.norm.weight": "model.safetensors", WQ: "model.safetensors"}})(
        folder
    )


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


WQ = "model.layers.0.self_attn.q_proj.weight"
CASES: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "missing": (tensors(lambda t: t.pop(WQ)), CheckpointError, f"1 missing: {WQ}"),
    "surplus": (
        tensors(lambda t: t.update(extra=torch.ones(2))),
        CheckpointError,
        "1 not in this model: extra",
    ),
    "shape": (
        tensors(lambda t: t.update({WQ: torch.ones(32, 31)})),
        CheckpointError,
        rf"{WQ} \[32, 31\] instead of",
    ),
    "integers": (
        tensors(lambda t: t.update({WQ: torch.ones(32, 32, dtype=torch.int8)})),
        CheckpointError,
        "with an unsupported dtype",
    ),
    "all missing": (
        tensors(lambda t: [t.pop(n) for n in list(t)[3:]]),
        CheckpointError,
        "and [0-9]+ more",
    ),
    "cut": (cut, CheckpointError, "model.safetensors is truncated"),
    "garbage": (
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 100) and None,
        CheckpointError,
        "truncated",
    ),
    "empty": (
        lambda f: (f / "model.safetensors").write_bytes(b"") and None,
        CheckpointError,
        "truncated",
    ),
    "big header": (header(b"{" + b" " * 2**20), CheckpointError, "truncated"),
    "offsets": (
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,999]}}'),
        CheckpointError,
        "truncated",
    ),
    "pickle": (pickled, CheckpointError, "read it with import --legacy_bin"),
    "index outside": (
        index({"weight_map": {WQ: "../model.safetensors"}}),
        CheckpointError,
        "not a file name like model.safetensors",
    ),
    "index wrong": (
        index_of_two_files,
        CheckpointError,
        f"assigns {WQ} to b.safetensors, which does not contain it",
    ),
    "index without tensor": (index_of_an_absent_tensor, CheckpointError, f"1 missing: {WQ}"),
    "index gone": (
        index({"weight_map": {WQ: "model-2.safetensors"}}),
        CheckpointError,
        "2.safetensors does not exist",
    ),
    "index shape": (index([1]), CheckpointError, "is not an index"),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        CheckpointError,
        "config.json is missing",
    ),
    "no json": (
        lambda f: (f / "config.json").write_text("{") and None,
        CheckpointError,
        "is not JSON",
    ),  # type: ignore[dict-item]
    "bits": (
        key("quantization_config", {"bits": 4}),
        ConfigError,
        "quantized by MLX, which is not supported",
    ),
    "quantized": (
        key("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ConfigError,
        "quantized by bitsandbytes, which is not supported",
    ),
    "quantized otherwise": (
        key("quantization_config", {"quant_method": "fp8", "weight_block_size": None}),
        ConfigError,
        "quantized by fp8, which is not supported",
    ),
    "architecture": (
        key("model_type", "gpt9"),
        ConfigError,
        "is of model_type 'gpt9', which transformers",
    ),
    "only code": (
        lambda folder: [
            key(*field)(folder)
            for field in (("model_type", "gpt9"), ("auto_map", {"AutoModel": "a.B"}))
        ],
        ConfigError,
        r"whose own code \(auto_map\) is never run here",
    ),
    "task": (
        key("architectures", ["LlamaForTokenClassification"]),
        ConfigError,
        "which cannot be trained here",
    ),
    "bias": (
        key("attention_bias", True),
        CheckpointError,
        "missing: model.layers.0.self_attn.k_proj.bias",
    ),
    "type": (key("hidden_size", "32"), ConfigError, "hidden_size='32' must be a int"),
    "size": (key("num_hidden_layers", -1), ConfigError, "must be between"),
    "rope": (
        key("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}),
        ConfigError,
        "requires factor, which is",
    ),
    "rope unknown": (
        key("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}),
        ConfigError,
        "spiral",
    ),
    "vocabulary": (
        key("vocab_size", 261),
        CheckpointError,
        r"embed_tokens.weight \[260, 32\] instead of \[261, 32\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_does_not_fit_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    change, kind, text = CASES[case]
    change(folder)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(kind, match=text):
        importing.to_checkpoint(folder, tmp_path / "checkpoint")
    assert sorted(tmp_path.iterdir()) == before, "files were left behind"


def test_import_and_export_survive_a_round_trip(folder: Path, tmp_path: Path, capsys: Any) -> None:
    checkpoint = tmp_path / "checkpoint"
    back = tmp_path / "back"
    assert main(["import", str(folder), "--to", str(checkpoint)]) == 0
    assert 'name = "llama3"' in capsys.readouterr().out
    assert main(["export", str(checkpoint), "--to", str(back), "--shard_gigabytes", "0.001"]) == 0

    out = capsys.readouterr().out
    assert "all weights were read back and are equal" in out
    assert "same logits" in out

    original = load_file(folder / "model.safetensors")
    exported = load_file(back / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor)

    # An existing folder is not replaced.
    assert main(["export", str(checkpoint), "--to", str(back)]) == 2
    assert main(["import", str(folder), "--to", str(checkpoint)]) == 2

    assert main(["import", str(folder), "--to", str(tmp_path / "x"), "--vocab_size", "10"]) == 2


def more_ids(folder: Path) -> None:
    bpe_folder(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"zz{number}": 1000 + number for number in range(3)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            more_ids,
            "tokenizer.json has 1003 token IDs, but vocab_size=260 of config.json .* import with --vocab_size 1003",
        ),
        (
            lambda f: (f / "tokenizer.json").write_text("{"),
            "tokenizer.json is not a readable tokenizer",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "model-1.safetensors"),
            "index.json, the index of",
        ),
    ],
)
def test_files_next_to_the_weights_are_checked(
    change: Any, message: str, folder: Path, capsys: Any
) -> None:
    change(folder)
    assert main(["import", str(folder), "--to", str(folder.parent / "checkpoint")]) in (2, 5)

    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert not (folder.parent / "checkpoint").exists()


def test_a_vocabulary_grows_by_the_mean_of_its_rows(folder: Path, tmp_path: Path) -> None:
    from shardtrain.checkpoint import manifest
    from shardtrain.checkpoint.tensors import read_whole

    model = importing.to_checkpoint(folder, tmp_path / "checkpoint", vocab_size=276)
    assert model.overrides["vocab_size"] == 276

    stored = manifest.read(tmp_path / "checkpoint")
    old = load_file(folder / "model.safetensors")
    for ours, theirs in (
        ("model.embed.weight", "model.embed_tokens.weight"),
        ("model.head.weight", "lm_head.weight"),
    ):
        # Rows of the folder stay, and each new row is the mean of them.
        new = read_whole(stored, tmp_path / "checkpoint", ours)
        assert torch.equal(new[:260], old[theirs])
        assert torch.equal(new[260:], old[theirs].mean(0).expand(16, -1))


def test_index_checks_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network filesystem each check takes a request, and an index may have a million tensors."""
    files = [f"model-{number}.safetensors" for number in range(2)]
    for file in files:
        (tmp_path / file).touch()
    weight_map = {f"layers.{number}.weight": files[number % 2] for number in range(1000)}
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    checked: list[str] = []
    is_present = bounded_reads.is_present

    def recorded_is_present(path: Path) -> bool:
        checked.append(path.name)
        return is_present(path)

    monkeypatch.setattr(bounded_reads, "is_present", recorded_is_present)

    assert weights.read_index(tmp_path, weights.SINGLE, weights.INDEX) == weight_map
    assert sorted(set(checked) & set(files)) == files
    assert len(checked) < 10
