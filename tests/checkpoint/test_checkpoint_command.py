"""``shardtrain checkpoint``: output and exit status of each verb; ``ls`` and ``verify`` do not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import checkpoints, facts, save, world_of_one

from shardtrain import cli
from shardtrain.checkpoint.grids import Grid
from shardtrain.checkpoint.manifest import StoredTensor
from shardtrain.checkpoint.tensors import read_whole
from shardtrain.checkpoint.weights_file import whole_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with world_of_one():
        manager = checkpoints(tmp_path)
        save(manager, 2)
        save(manager, 4)
        manager.save(6, {"model.a": torch.zeros(24)}, {}, facts(6), last=False)
        manager.close()
    yield tmp_path / "checkpoint"


def run(*arguments: object) -> int:
    return cli.main(["checkpoint", *map(str, arguments)])


def test_ls_lists_each_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-4/rank-00000.bin").unlink()
    (folder / "step-5").mkdir()
    assert run("ls", folder) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-2", "step-4", "step-5", "step-6"]
    assert "1 rank  4 tensors  whole" in lines[0]
    assert "missing or cut: rank-00000.bin" in lines[1]
    assert "cannot be used" in lines[2]


def test_ls_accepts_a_run_a_step_and_a_hugging_face_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", folder) == 0
    listed = capsys.readouterr().out

    # The folder of the run lists the same steps.
    assert run("ls", folder.parent) == 0
    assert capsys.readouterr().out == listed

    assert run("ls", folder / "step-2") == 0
    assert capsys.readouterr().out == listed.splitlines()[0] + "\n"

    hub = folder.parent / "hf"
    hub.mkdir()
    assert run("ls", hub) == 5
    assert "contains a step-N folder; name a step-N folder" in capsys.readouterr().err

    (hub / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})

    assert run("ls", hub) == 0
    line = capsys.readouterr().out
    assert "GPT2LMHeadModel  2 tensors  1 bfloat16, 1 float32" in line
    assert "missing" not in line

    # The index lists a file that does not exist, and the existing file is truncated.
    (hub / "model.safetensors.index.json").write_text(
        '{"weight_map": {"c": "model-2.safetensors"}}'
    )
    content = (hub / "model.safetensors").read_bytes()
    (hub / "model.safetensors").write_bytes(content[:-1])

    assert run("ls", hub) == 0
    assert "missing or cut: model-2.safetensors, model.safetensors" in capsys.readouterr().out


def test_ls_prints_one_line_for_a_folder_with_missing_or_oversized_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {str(number): f"{number}.safetensors" for number in range(1000)}})
    )

    assert run("ls", tmp_path) == 0

    line = capsys.readouterr().out
    assert "  no architecture  0 tensors" in line
    assert "and 980 more" in line
    assert "None" not in line

    # Values of a million characters are shortened.
    for key in ({"architectures": ["A" * 10**6]}, {"model_type": "A" * 10**6}):
        config.write_text(json.dumps(key))
        assert run("ls", tmp_path) == 0
        line = capsys.readouterr().out
        assert "AAA... (1000000 characters)" in line
        assert len(line) < 1000
        assert line.count("\n") == 1


def test_verify_reads_every_byte_and_names_each_bad_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A file that is not in the manifest is reported, but the checkpoint still counts as undamaged.
    (folder / "step-6/notes.txt").touch()
    assert run("verify", folder / "step-2") == 0
    assert run("verify", folder) == 0
    assert "notes.txt is not part of the checkpoint" in capsys.readouterr().out

    # One flipped bit leaves the size of a file unchanged, so only its hash can show it.
    for step in (2, 4):
        file = folder / f"step-{step}/rank-00000.bin"
        content = bytearray(file.read_bytes())
        content[3] ^= 16
        file.write_bytes(content)

    assert run("verify", folder) == 5

    output = capsys.readouterr()
    assert "step-2: rank-00000.bin is damaged" in output.err
    assert "step-4: rank-00000.bin is damaged" in output.err
    assert "step-6: good" in output.out
    assert output.err.startswith("error[5]: ")
    assert output.err.count("\n") == 1
    assert run("verify", folder / "step-9") == 5


def test_diff_reports_equality_and_the_largest_difference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", folder / "step-2", folder / "step-2") == 0
    assert "0 of 4 tensors differ" in capsys.readouterr().out
    assert run("diff", folder / "step-2", folder / "step-4") == 1

    out = capsys.readouterr().out
    assert "model.a: 24 of 24 elements differ, by at most 2\n" in out
    assert "state: differs" in out
    assert run("diff", folder / "step-2", folder / "step-6") == 1

    out = capsys.readouterr().out
    assert f"model.b: only in {folder / 'step-2'}" in out
    assert "data_cursors: differs" in out


def test_diff_and_weights_accept_a_run_folder_and_print_the_checkpoint_used(
    folder, tmp_path, capsys
) -> None:
    for path in (folder, folder.parent):
        assert run("diff", path, folder / "step-6") == 0
        assert f"comparing {folder / 'step-6'} and {folder / 'step-6'}" in capsys.readouterr().out
    assert run("weights", folder.parent, tmp_path / "newest.safetensors") == 0
    assert sorted(load_file(tmp_path / "newest.safetensors")) == ["a"]

    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert run("diff", tmp_path / "empty", folder) == 5
    assert "has no checkpoint: neither it nor" in capsys.readouterr().err


@pytest.mark.parametrize("plant", ["file", "link", "dangling link"])
def test_weights_neither_replaces_a_file_nor_leaves_a_partial_one(
    plant: str, folder: Path, tmp_path: Path
) -> None:
    """A file with a likely temporary name is not touched either."""
    elsewhere = tmp_path / "elsewhere"
    place = tmp_path / "place"
    place.mkdir()
    elsewhere.write_text("precious")
    (place / "free.st.tmp").write_text("precious")
    output = place / "taken.st"
    # The output, if it exists, is a file, a link to a file, or a link that leads nowhere.
    if plant == "file":
        output.write_text("precious")
    else:
        output.symlink_to(elsewhere if plant == "link" else tmp_path / "absent")
    before = sorted(path.name for path in place.iterdir())

    assert run("weights", folder / "step-4", output) == 2
    assert sorted(path.name for path in place.iterdir()) == before
    assert not (tmp_path / "absent").exists()

    assert run("weights", folder / "step-4", place / "free.st") == 0
    assert sorted(path.name for path in place.iterdir()) == sorted([*before, "free.st"])
    assert elsewhere.read_text() == "precious"
    assert (place / "free.st.tmp").read_text() == "precious"


def test_weights_are_written_once_and_completely(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "weights.safetensors"
    assert run("weights", folder / "step-4", output) == 0

    opened = load_file(output)
    assert sorted(opened) == ["a", "b"]
    assert opened["b"] == 4
    assert torch.equal(opened["a"], torch.arange(24.0) + 4)
    # An existing output is never overwritten: the file keeps the weights of step 4.
    assert run("weights", folder / "step-2", output) == 2
    assert "exists" in capsys.readouterr().err
    assert load_file(output)["b"] == 4

    assert run("weights", folder / "step-2", tmp_path / "no/such/folder") == 8

    # A truncated checkpoint leaves no partial output.
    (folder / "step-2/rank-00000.bin").write_bytes(b"")
    assert run("weights", folder / "step-2", tmp_path / "other.safetensors") == 5
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 4), (3, 1, 4)])
def test_shards_of_any_split_are_assembled(tmp_path: Path, shape: tuple[int, ...]) -> None:
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)

    # Split every dimension into two halves; the second half of a dimension of size 1 is empty.
    boxes = [((), ())]
    for size in shape:
        half = (size + 1) // 2
        split_boxes = []
        for offsets, sizes in boxes:
            split_boxes.append(((*offsets, 0), (*sizes, half)))
            if size > half:
                split_boxes.append(((*offsets, half), (*sizes, size - half)))
        boxes = split_boxes

    # Write all boxes to one file.
    data = b""
    grids = []
    for offsets, sizes in boxes:
        part = full
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, start, length)
        grids.append(Grid(offsets, sizes, 0, len(data)))
        data += part.contiguous().numpy().tobytes()
    (tmp_path / "rank-00000.bin").write_bytes(data)
    from shardtrain.checkpoint.manifest import Manifest, TensorFile

    tensor = StoredTensor("int32", shape, tuple(grids))
    file = TensorFile("rank-00000.bin", len(data), "")
    stored = Manifest(1, 1, "r", "x", (file,), {"a": tensor}, {})

    assert bytes(whole_bytes(stored, tmp_path, tensor)) == full.numpy().tobytes()
    assert torch.equal(read_whole(stored, tmp_path, "a"), full)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["verfy", "x"], "did you mean verify?"),
        (["verify"], "requires exactly 1 path"),
        (["diff", "a"], "requires exactly 2 paths"),
        (["ls", "--all"], "requires exactly 1 path"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert text in capsys.readouterr().err
    assert run() == 2
    assert "shardtrain checkpoint needs a verb" in capsys.readouterr().err
    assert run("--help") == 0
    assert "usage: shardtrain checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["ls", "verify", "weights"])
def test_inspecting_a_folder_does_not_import_torch(folder: Path, tmp_path: Path, verb: str) -> None:
    arguments = ["checkpoint", verb, str(folder / "step-2" if verb == "weights" else folder)]
    arguments += [str(tmp_path / "w")] if verb == "weights" else []
    program = f"import sys; from shardtrain import cli; assert cli.main({arguments!r}) == 0; "
    program += "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
    )

    assert done.returncode == 0, done.stderr or "torch was imported"
