"""Manifests are untrusted input: an invalid one is rejected with a one-line message, whatever it contains."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.checkpoint import manifest, retention
from shardtrain.checkpoint.grids import Axis, Grid
from shardtrain.checkpoint.manifest import Manifest, StoredTensor, TensorFile
from shardtrain.checkpoint.resharding import check_tiling, overlap
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import CheckpointError

HASH = "0" * 64
PATH = Path("step-3")
BODY: dict[str, Any] = {
    "format": manifest.FORMAT, "version": 1, "created_by": "x", "run": "r", "step": 3, "world_size": 1,
    "files": [["rank-00000.bin", 40, HASH]],
    "tensors": {"model.a": ["float32", [2, 4], [[[0, 0], [1, 4], 0, 0], [[1, 0], [1, 4], 0, 16]]],
                "model.b": ["int64", [], [[[], [], 0, 32]]]},
    "facts": {"state": {"step": 3}},
}  # fmt: skip


def signed(body: str | bytes) -> bytes:
    """Return a forged manifest with a correct hash."""
    signed_text = b"\n" + (body.encode() if isinstance(body, str) else body)[1:] + b"\n"
    return b'{"sha256": "%s",' % hashlib.sha256(signed_text).hexdigest().encode() + signed_text


def rejection(data: bytes) -> str:
    """Assert that ``data`` is rejected in one short line that names the file. Return the line."""
    with pytest.raises(CheckpointError) as caught:
        manifest.parse(data, PATH)
    text = str(caught.value)
    assert "manifest.json" in text
    assert "step-3" in text
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_unchanged_body_is_valid() -> None:
    parsed = manifest.parse(signed(json.dumps(BODY)), PATH)
    assert parsed.tensors["model.a"].grids[1] == Grid((1, 0), (1, 4), 0, 16)


def test_manifest_round_trips() -> None:
    grids = (Grid((0, 0), (2, 3), 0, 0), Grid((0, 3), (2, 1), 1, 0))
    tensors = {
        "model.ä": StoredTensor("bfloat16", (2, 4), grids),
        "model.s": StoredTensor("float32", (0, 3), ()),
    }
    files = (TensorFile("rank-00000.bin", 12, HASH), TensorFile("rank-00001.bin", 4, HASH))
    original = Manifest(
        7, 2, "run", "shardtrain", files, tensors, {"state": {"order_hash": 2**64 - 1}}
    )
    data = original.to_bytes()

    assert manifest.parse(data, PATH) == original
    assert json.loads(data)["step"] == 7, "any JSON parser can read it"


def changed(*path: str | int, value: Any) -> str:
    body = json.loads(json.dumps(BODY))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(body)


A = ("tensors", "model.a")
CHUNK = ("tensors", "model.a", 2, 1)
HOSTILE: dict[str, str | bytes] = {
    "a path upwards": changed("files", 0, 0, value="../../etc/passwd.bin"),
    "an absolute path": changed("files", 0, 0, value="/etc/passwd.bin"),
    "a folder": changed("files", 0, 0, value="a/b.bin"),
    "a hidden file": changed("files", 0, 0, value=".bin"),
    "a name with NUL": changed("files", 0, 0, value="a\0.bin"),
    "a name with a newline": changed("files", 0, 0, value="a.bin\n"),
    "a backslash": changed("files", 0, 0, value="..\\a.bin"),
    "an endless name": changed("files", 0, 0, value="a" * 10**6 + ".bin"),
    "a name that is a number": changed("files", 0, 0, value=3),
    "the name of the manifest": changed("files", 0, 0, value="manifest.json"),
    "one file twice": changed("files", value=[["a.bin", 40, HASH]] * 2),
    "negative size": changed("files", 0, 1, value=-1),
    "size true": changed("files", 0, 1, value=True),
    "size of a float": changed("files", 0, 1, value=40.0),
    "size of 10^400": changed("files", 0, 1, value=10**400),
    "hash in capitals": changed("files", 0, 2, value="A" * 64),
    "hash too short": changed("files", 0, 2, value="0" * 63),
    "files as a table": changed("files", value={}),
    "no files": changed("files", value=[]),
    "negative offset": changed(*CHUNK, 0, value=[-1, 0]),
    "negative shape": changed(*A, 1, value=[-2, -4]),
    "zero sizes": changed(*CHUNK, 1, value=[0, 4]),
    "outside the tensor": changed(*CHUNK, 0, value=[2, 0]),
    "outside the file": changed(*CHUNK, 3, value=10**12),
    "one byte outside": changed(*CHUNK, 3, value=25),
    "no such file": changed(*CHUNK, 2, value=1),
    "file -1": changed(*CHUNK, 2, value=-1),
    "begins before": changed(*CHUNK, 3, value=-16),
    "overlapping pieces": changed(*CHUNK, 0, value=[0, 0]),
    "shared bytes": changed(*CHUNK, 3, value=8),
    "a missing piece": changed(*A, 2, value=[[[0, 0], [1, 4], 0, 0]]),
    "another rank": changed(*A, 1, value=[8]),
    "a hundred dimensions": changed(*A, 1, value=[1] * 100),
    "petabytes": changed(*A, 1, value=[2**47, 2**47]),
    "unknown type": changed(*A, 0, value="object"),
    "a type that is code": changed(*A, 0, value="load"),
    "type as a list": changed(*A, 0, value=["float32"]),
    "tensor as text": changed(*A, value="float32"),
    "tensors as a list": changed("tensors", value=[1]),
    "a name with an escape": changed("tensors", "model.\x1b[31m", value=["float32", [0], []]),
    "an empty name": changed("tensors", "", value=["float32", [0], []]),
    "facts as a list": changed("facts", value=[]),
    "no counters": changed("facts", value={}),
    "counters as text": changed("facts", "state", value="3"),
    "a later version": changed("version", value=manifest.VERSION + 1),
    "version true": changed("version", value="1"),
    "another program": changed("format", value="pickle"),
    "step -1": changed("step", value=-1),
    "step 1e3": changed("step", value=1e3),
    "a run with escapes": changed("run", value="\x1b]0;x\x07"),
    "deep lists": b"{" + b'"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep tables": b"{" + b'"a":{' * 100_000 + b"}" * 100_001,
    "NaN": json.dumps(BODY).replace('"step": 3}', '"step": NaN}'),
    "Infinity": json.dumps(BODY).replace('"step": 3}', '"step": Infinity}'),
    "1e999": json.dumps(BODY).replace('"step": 3}', '"step": 1e999}'),
    "a key twice": json.dumps(BODY).replace('"version": 1', '"version": 1, "version": 1'),
    "a tensor twice": json.dumps(BODY).replace('"model.b"', '"model.a"'),
    "a second hash": json.dumps(BODY).replace('"version": 1', '"version": 1, "sha256": ""'),
    "number of 5000 digits": json.dumps(BODY).replace('"version": 1', '"version": ' + "9" * 5000),
    "text after it": json.dumps(BODY) + "{}",
    "bad UTF-8": json.dumps(BODY).encode().replace(b'"x"', b'"\xff\xfe"'),
    "a lone surrogate in a name": json.dumps(BODY).replace("model.b", "\\ud800"),
    "a list": b"[]",
    "nothing": b"{}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest_with_a_correct_hash_is_rejected(name: str) -> None:
    assert rejection(signed(HOSTILE[name]))


def test_hostile_manifests_run_no_code_and_open_no_files() -> None:
    events: list[str] = []
    watching = [True]
    thread = threading.get_ident()

    def hook(event: str, _: object) -> None:
        # Ignore other threads, such as the server of an earlier test.
        if (
            watching[0]
            and threading.get_ident() == thread
            and event not in ("object.__getattr__", "sys._getframe")
        ):
            events.append(event)

    sys.addaudithook(hook)  # audit hooks cannot be removed
    gc.disable()  # finalizers of objects from earlier tests would cause events
    try:
        for body in HOSTILE.values():
            with contextlib.suppress(CheckpointError):
                manifest.parse(signed(body), PATH)
    finally:
        watching[0] = False
        gc.enable()
    unsafe_kinds = ("exec", "compile", "import", "open", "os", "subprocess", "pickle")

    assert not [event for event in events if event.split(".")[0] in unsafe_kinds]


def test_too_many_pieces_to_compare_are_rejected_quickly() -> None:
    # The worst case of the sweep: all boxes overlap in one dimension and begin at different offsets.
    boxes = [((i, i), (20_000 - i, 1)) for i in range(20_000)]
    assert check_tiling((20_000, 20_000), boxes)


@given(st.binary(max_size=300))
def test_random_bytes_are_rejected(data: bytes) -> None:
    assert rejection(data)
    assert rejection(signed(b"{" + data))


@settings(max_examples=300)
@given(st.data())
def test_forged_value_in_any_field_is_rejected_or_safe(data: st.DataObject) -> None:
    """For any value in any field, a manifest that parses has file names without paths and pieces within their files."""
    leaves = [
        ("files", 0, 0),
        ("files", 0, 1),
        ("files", 0, 2),
        (*A, 0),
        (*A, 1, 0),
        (*A, 1, 1),
        (*A, 2, 0, 2),
        (*A, 2, 0, 3),
        (*CHUNK, 0, 0),
        (*CHUNK, 0, 1),
        (*CHUNK, 1, 0),
        (*CHUNK, 1, 1),
    ]
    leaf = data.draw(st.sampled_from(leaves))
    values = st.one_of(
        st.integers(),
        st.text(max_size=20),
        st.none(),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
    )
    value = data.draw(values)
    try:
        parsed = manifest.parse(signed(changed(*leaf, value=value)), PATH)
    except CheckpointError:
        return

    for file in parsed.files:
        assert "/" not in file.name
        assert file.name not in ("", ".", "..")

    for tensor in parsed.tensors.values():
        for chunk in tensor.chunks():
            size = chunk.numel * ITEM_BYTES[tensor.dtype]
            assert chunk.begin >= 0
            assert chunk.begin + size <= parsed.files[chunk.file].bytes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_boxes_of_a_grid_tile_the_tensor_and_a_missing_or_extra_one_does_not(
    cells: list[int], data: st.DataObject
) -> None:
    # Extend the boxes of the earlier dimensions by each interval of this dimension.
    edges = [data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)) for n in cells]
    boxes: list[Any] = [((), ())]
    for sizes in edges:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        extended_boxes = []
        for box_offsets, box_sizes in boxes:
            for start, size in zip(starts, sizes, strict=True):
                extended_boxes.append(((*box_offsets, start), (*box_sizes, size)))
        boxes = extended_boxes
    shape = tuple(map(sum, edges))

    assert check_tiling(shape, boxes) == ""
    assert check_tiling(shape, boxes[1:]) != ""
    assert check_tiling(shape, [*boxes, boxes[0]]) != ""

    # With the first box replaced by a copy of the second, the total size is right but boxes overlap.
    if len(boxes) > 1 and boxes[0][1] == boxes[1][1]:
        assert check_tiling(shape, [boxes[1], *boxes[1:]]) == "overlap"
    for first, second in itertools.permutations(boxes, 2):
        assert overlap(first, second) is None


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(manifest.MAX_BYTES + 1)  # sparse: uses no disk space
    with pytest.raises(CheckpointError, match="not a file of less than"):
        manifest.read(tmp_path)


def test_manifest_module_imports_only_the_standard_library() -> None:
    check: Callable[[str], bool] = sys.modules.__contains__
    assert check("shardtrain.checkpoint.manifest")

    source = Path(manifest.__file__).read_text()
    assert "import torch" not in source
    assert "numpy" not in source


def test_manifest_too_large_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = manifest.parse(signed(json.dumps(BODY)), PATH)
    assert 0 < manifest.least_bytes(parsed.tensors) <= len(parsed.to_bytes())

    monkeypatch.setattr(manifest, "MAX_BYTES", len(parsed.to_bytes()) - 1)
    with pytest.raises(
        CheckpointError,
        match="; split the tensors into fewer pieces, for example with a larger parallelism.data_par",
    ):
        parsed.to_bytes()


GRID: dict[str, Any] = {
    **BODY,
    "version": 2,
    "files": [[f"rank-{rank:05d}.bin", 40, HASH] for rank in range(6)],
    "tensors": {
        # model.a: 3 FSDP shards of 2 tensor-parallel halves. model.b: a shard on every second rank.
        "model.a": ["float32", [6, 4], [[[0, 0], [2, 2], 0, 0, [[2, 1, 1], [3, 0, 2]]]]],
        "model.b": ["int64", [3], [[[0], [1], 0, 16, [[3, 0, 2]]]]],
        "model.c": ["int64", [6], [[[0], [1], 5, 24, [[6, 0, -1]]]]],
    },
}


def grid_with(*path: str | int, value: Any) -> str:
    body = json.loads(json.dumps(GRID))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(body)


def test_grids_round_trip() -> None:
    parsed = manifest.parse(signed(json.dumps(GRID)), PATH)
    grid_of_a = Grid((0, 0), (2, 2), 0, 0, (Axis(2, 1, 1), Axis(3, 0, 2)))
    assert parsed.tensors["model.a"].grids == (grid_of_a,)
    assert [(c.offsets, c.file) for c in parsed.tensors["model.a"].chunks()] == [
        ((0, 0), 0), ((0, 2), 1), ((2, 0), 2), ((2, 2), 3), ((4, 0), 4), ((4, 2), 5),
    ]  # fmt: skip
    assert [c.file for c in parsed.tensors["model.c"].chunks()] == [5, 4, 3, 2, 1, 0]

    assert manifest.parse(parsed.to_bytes(), PATH) == parsed
    assert json.loads(parsed.to_bytes())["version"] == 2


def test_manifest_without_repeated_grids_keeps_version_1() -> None:
    assert json.loads(manifest.parse(signed(json.dumps(BODY)), PATH).to_bytes())["version"] == 1


A_AXES = ("tensors", "model.a", 2, 0, 4)
B_GRID = ("tensors", "model.b", 2, 0)


@pytest.mark.parametrize(
    ("body", "why"),
    {
        "in a file that is not there": (grid_with(*B_GRID, 2, value=2), "outside its file"),
        "before the first file": (grid_with("tensors", "model.c", 2, 0, 2, value=4), "outside its file"),
        "beyond a file's end": (grid_with(*B_GRID, 3, value=33), "outside its file"),
        "beyond the end of one file of many": (grid_with("files", 3, 1, value=31), "outside its file"),
        "over another in every file": (grid_with(*B_GRID, 3, value=8), "share bytes"),
        "over another in one file": (grid_with("tensors", "model.c", 2, 0, 3, value=16), "share bytes"),
        "over itself": (grid_with(*A_AXES, value=[[2, 1, 1], [3, 0, 1]]), "share bytes"),
        "in one file all": (grid_with(*A_AXES, 0, 2, value=0), "share bytes"),
        "too few": (grid_with(*A_AXES, 1, 0, value=2), "do not cover it"),
        "none": (grid_with(*A_AXES, 0, 0, value=0), "more pieces than files"),
        "more than files": (grid_with(*A_AXES, 1, 0, value=2**40), "more pieces than files"),
        "along no dimension": (grid_with(*A_AXES, 0, 1, value=2), "an invalid repetition"),
        "a step beyond all files": (grid_with(*A_AXES, 0, 2, value=7), "an invalid repetition"),
        "a step that is no number": (grid_with(*A_AXES, 0, 2, value=True), "an invalid repetition"),
        "in the first format": (grid_with("version", value=1), "right length"),
        "wrong number of dimensions": (grid_with(*B_GRID, 1, value=[1, 1]), "wrong number of dimensions"),
    }.values(),
)  # fmt: skip
def test_hostile_grid_is_rejected(body: str, why: str) -> None:
    assert why in rejection(signed(body))


@settings(max_examples=300)
@given(st.data())
def test_shared_bytes_are_detected_as_a_check_of_every_byte_does(data: st.DataObject) -> None:
    """The implementation groups identical files; the definition checks every byte of every file."""
    num_files = data.draw(st.integers(1, 8))
    grids = []
    for _ in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, num_files))
        step = data.draw(st.integers(-2, 2)) if count > 1 else 1
        first_file = data.draw(st.integers(0, num_files - 1))
        begin = data.draw(st.integers(0, 5))
        grids.append((count, step, first_file, begin))

    # By definition, grids are valid if no two pieces share a byte and all are within the 6-byte files.
    used: list[tuple[int, int]] = []
    for count, step, first_file, begin in grids:
        for number in range(count):
            file = first_file + number * step
            used += [(file, begin), (file, begin + 1)]
    is_valid = len(set(used)) == len(used)
    for file, byte in used:
        is_valid = is_valid and 0 <= file < num_files and byte < 6

    # Let the implementation parse the same grids from a manifest.
    tensors = {}
    for number, (count, step, first_file, begin) in enumerate(grids):
        grid = [[0], [2], first_file, begin, [[count, 0, step]]]
        tensors[f"t{number}"] = ["uint8", [2 * count], [grid]]
    files = [[f"rank-{number}.bin", 6, HASH] for number in range(num_files)]
    body = {**GRID, "tensors": tensors, "files": files}
    try:
        manifest.parse(signed(json.dumps(body)), PATH)
    except CheckpointError:
        assert not is_valid
    else:
        assert is_valid


def test_hugging_face_folder_is_rejected_with_the_option_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="Hugging Face folder.* checkpoint.initial_load_in_hf = true"
    ) as refused:
        manifest.read(tmp_path)

    message = str(retention.unusable(tmp_path, str(refused.value)))
    assert message.count("checkpoint.initial_load_in_hf") == 1
    assert "use another checkpoint" not in message
    assert "; use another checkpoint" in str(
        retention.unusable(tmp_path / "step-1", "it is damaged")
    )
