"""A manifest is data that strangers may write: whatever it says, it is refused in one line or it is right."""

from __future__ import annotations

import contextlib
import gc
import hashlib
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
    """A manifest as somebody who knows the format would forge it: the hash is right."""
    rest = b"\n" + (body.encode() if isinstance(body, str) else body)[1:] + b"\n"
    return b'{"sha256": "%s",' % hashlib.sha256(rest).hexdigest().encode() + rest


def refusal(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        manifest.parse(data, PATH)
    text = str(caught.value)
    assert "manifest.json" in text and "step-3" in text and "\n" not in text and len(text) < 400
    return text


def test_the_body_of_these_tests_is_good() -> None:
    found = manifest.parse(signed(json.dumps(BODY)), PATH)
    assert found.tensors["model.a"].grids[1] == Grid((1, 0), (1, 4), 0, 16)


def test_what_is_written_is_read() -> None:
    grids = (Grid((0, 0), (2, 3), 0, 0), Grid((0, 3), (2, 1), 1, 0))
    tensors = {"model.ä": StoredTensor("bfloat16", (2, 4), grids), "model.s": StoredTensor("float32", (0, 3), ())}
    files = (TensorFile("rank-00000.bin", 12, HASH), TensorFile("rank-00001.bin", 4, HASH))
    whole = Manifest(7, 2, "run", "shardtrain", files, tensors, {"state": {"order_hash": 2**64 - 1}})
    data = whole.to_bytes()
    assert manifest.parse(data, PATH) == whole
    assert json.loads(data)["step"] == 7, "it is JSON for everybody"


def changed(*path: str | int, value: Any) -> str:
    body = json.loads(json.dumps(BODY))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(body)


A, CHUNK = ("tensors", "model.a"), ("tensors", "model.a", 2, 1)
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
    "the manifest itself": changed("files", 0, 0, value="manifest.json"),
    "one file twice": changed("files", value=[["a.bin", 40, HASH]] * 2),
    "negative size": changed("files", 0, 1, value=-1),
    "size true": changed("files", 0, 1, value=True),
    "size of a float": changed("files", 0, 1, value=40.0),
    "size of 10^400": changed("files", 0, 1, value=10**400),
    "hash in capitals": changed("files", 0, 2, value="A" * 64),
    "hash too short": changed("files", 0, 2, value="0" * 63),
    "files of a table": changed("files", value={}),
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
def test_a_hostile_manifest_with_a_right_hash_is_refused(name: str) -> None:
    refusal(signed(HOSTILE[name]))


def test_hostile_manifests_run_nothing_and_touch_nothing() -> None:
    events: list[str] = []
    watching, thread = [True], threading.get_ident()

    def hook(event: str, _: object) -> None:
        # this thread alone: what others do meanwhile (a server that a test before this one has begun) is theirs
        if watching[0] and threading.get_ident() == thread and event not in ("object.__getattr__", "sys._getframe"):
            events.append(event)

    sys.addaudithook(hook)  # there is no way to take a hook away
    gc.disable()  # nor does it count what tests before this one have left to be finalized
    try:
        for body in HOSTILE.values():
            with contextlib.suppress(CheckpointError):
                manifest.parse(signed(body), PATH)
    finally:
        watching[0] = False
        gc.enable()
    assert not [
        e for e in events if e.split(".")[0] in ("exec", "compile", "import", "open", "os", "subprocess", "pickle")
    ]


def test_pieces_too_many_to_compare_are_refused_soon() -> None:
    # all begin in different places along both dimensions and stay open: the worst case of the sweep
    boxes = [((i, i), (20_000 - i, 1)) for i in range(20_000)]
    assert check_tiling((20_000, 20_000), boxes)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    refusal(data)
    refusal(signed(b"{" + data))


@settings(max_examples=300)
@given(st.data())
def test_a_forged_value_anywhere_is_refused_or_makes_no_difference_to_safety(data: st.DataObject) -> None:
    """Whatever is put wherever: a parsed manifest has files without paths and pieces inside them."""
    leaves = [("files", 0, i) for i in range(3)] + [(*A, 0), (*A, 1, 0), (*A, 1, 1), (*A, 2, 0, 2), (*A, 2, 0, 3)]
    leaves += [(*CHUNK, i, j) for i in range(2) for j in range(2)]
    leaf = data.draw(st.sampled_from(leaves))
    value = data.draw(
        st.one_of(
            st.integers(),
            st.text(max_size=20),
            st.none(),
            st.booleans(),
            st.floats(allow_nan=False, allow_infinity=False),
        )
    )
    try:
        found = manifest.parse(signed(changed(*leaf, value=value)), PATH)
    except CheckpointError:
        return
    for file in found.files:
        assert "/" not in file.name and file.name not in ("", ".", "..")
    for tensor in found.tensors.values():
        for chunk in tensor.chunks():
            size = chunk.numel * ITEM_BYTES[tensor.dtype]
            assert chunk.begin >= 0 and chunk.begin + size <= found.files[chunk.file].bytes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_grid_covers_exactly_and_any_change_of_it_does_not(cells: list[int], data: st.DataObject) -> None:
    edges = [data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)) for n in cells]
    boxes: list[Any] = [((), ())]
    for sizes in edges:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        boxes = [((*o, start), (*s, size)) for o, s in boxes for start, size in zip(starts, sizes, strict=True)]
    shape = tuple(map(sum, edges))
    assert check_tiling(shape, boxes) == ""
    assert check_tiling(shape, boxes[1:]) != ""
    assert check_tiling(shape, [*boxes, boxes[0]]) != ""
    if len(boxes) > 1 and boxes[0][1] == boxes[1][1]:
        assert check_tiling(shape, [boxes[1], *boxes[1:]]) == "overlap"
    assert all(overlap(one, other) is None for one in boxes for other in boxes if one != other)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(manifest.MAX_BYTES + 1)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match="not a file of less than"):
        manifest.read(tmp_path)


def test_reading_a_manifest_needs_no_more_than_the_standard_library() -> None:
    check: Callable[[str], bool] = sys.modules.__contains__
    assert check("shardtrain.checkpoint.manifest")
    source = Path(manifest.__file__).read_text()
    assert "import torch" not in source and "numpy" not in source


def test_a_manifest_that_no_start_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    found = manifest.parse(signed(json.dumps(BODY)), PATH)
    assert 0 < manifest.least_bytes(found.tensors) <= len(found.to_bytes())
    monkeypatch.setattr(manifest, "MAX_BYTES", len(found.to_bytes()) - 1)
    with pytest.raises(
        CheckpointError,
        match="GiB; split the tensors into fewer pieces, for example with a larger parallelism.data_par",
    ):
        found.to_bytes()


GRID: dict[str, Any] = {
    **BODY,
    "version": 2,
    "files": [[f"rank-{rank:05d}.bin", 40, HASH] for rank in range(6)],
    "tensors": {
        # FSDP over three of what tensor parallelism cut in two, and what every second rank has
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


def test_grids_are_read_and_written_as_they_are() -> None:
    found = manifest.parse(signed(json.dumps(GRID)), PATH)
    assert found.tensors["model.a"].grids == (Grid((0, 0), (2, 2), 0, 0, (Axis(2, 1, 1), Axis(3, 0, 2))),)
    assert [(c.offsets, c.file) for c in found.tensors["model.a"].chunks()] == [
        ((0, 0), 0), ((0, 2), 1), ((2, 0), 2), ((2, 2), 3), ((4, 0), 4), ((4, 2), 5),
    ]  # fmt: skip
    assert [c.file for c in found.tensors["model.c"].chunks()] == [5, 4, 3, 2, 1, 0]
    assert manifest.parse(found.to_bytes(), PATH) == found and json.loads(found.to_bytes())["version"] == 2


def test_what_has_no_grids_is_read_by_earlier_programs() -> None:
    assert json.loads(manifest.parse(signed(json.dumps(BODY)), PATH).to_bytes())["version"] == 1


A_AXES, B_GRID = ("tensors", "model.a", 2, 0, 4), ("tensors", "model.b", 2, 0)


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
def test_a_hostile_grid_is_refused(body: str, why: str) -> None:
    assert why in refusal(signed(body))


@settings(max_examples=300)
@given(st.data())
def test_pieces_share_bytes_exactly_where_a_look_at_each_says_so(data: st.DataObject) -> None:
    """Files are looked at by kinds; the definition looks at every piece of every file."""
    files, tensors = data.draw(st.integers(1, 8)), {}
    for number in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, files))
        step = data.draw(st.integers(-2, 2)) if count > 1 else 1
        first, begin = data.draw(st.integers(0, files - 1)), data.draw(st.integers(0, 5))
        tensors[f"t{number}"] = ["uint8", [2 * count], [[[0], [2], first, begin, [[count, 0, step]]]]]
    body = {**GRID, "tensors": tensors, "files": [[f"rank-{n}.bin", 6, HASH] for n in range(files)]}
    used: list[tuple[int, int]] = []
    for _, _, [[_, _, first, begin, [[count, _, step]]]] in tensors.values():
        used += [(first + i * step, begin + byte) for i in range(count) for byte in range(2)]
    good = len(set(used)) == len(used) and all(0 <= file < files and byte < 6 for file, byte in used)
    try:
        manifest.parse(signed(json.dumps(body)), PATH)
    except CheckpointError:
        assert not good
    else:
        assert good


def test_a_folder_of_hugging_face_names_the_option_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Hugging Face folder.* checkpoint.initial_load_in_hf = true") as refused:
        manifest.read(tmp_path)
    told = str(retention.unusable(tmp_path, str(refused.value)))
    assert told.count("checkpoint.initial_load_in_hf") == 1 and "use another one" not in told
    assert "; use another one" in str(retention.unusable(tmp_path / "step-1", "it is damaged"))
