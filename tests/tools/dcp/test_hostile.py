"""Hostile DCP folders run no code and end in one error line. Changed bytes are reported."""

from __future__ import annotations

import io
import operator
import pickle
import pickletools
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import saved_one, words
from hostile_files import Bomb, bombs
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardtrain import cli
from shardtrain.checkpoint.pickled import parse
from shardtrain.tools.dcp.stored import DcpFolder
from shardtrain.utils.errors import CheckpointError

Change = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_one(tmp_path_factory.mktemp("good") / "step-3")


def metadata(change: Callable[[Any], Any]) -> Change:
    """Return a function that changes the metadata of a valid folder, and pickles it again."""

    def write(folder: Path, canary: Path) -> None:
        # Unpickling is safe here, because the fixture wrote the file.
        meta = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(meta) or meta))

    return write


def raw(data: Callable[[Path], bytes]) -> Change:
    return lambda folder, canary: (folder / ".metadata").write_bytes(data(canary)) and None


def item(make: Callable[[bytes, Path], bytes]) -> Change:
    """Replace the bytes of the embedding. Append them to the file, so that the other offsets stay valid."""

    def write(folder: Path, canary: Path) -> None:
        meta = pickle.loads((folder / ".metadata").read_bytes())
        (index,) = [i for i in meta.storage_data if i.fqn == "tok_embeddings.weight"]
        info = meta.storage_data[index]
        path = folder / info.relative_path
        data = path.read_bytes()
        original = data[info.offset : info.offset + info.length]
        changed = make(original, canary)
        # Append the changed tensor, because other offsets must stay valid, and point the metadata to it.
        path.write_bytes(data + changed)
        info.offset = len(data)
        info.length = len(changed)
        (folder / ".metadata").write_bytes(pickle.dumps(meta))

    return write


def rezipped(
    data: bytes, name: str, content: bytes, compression: int = zipfile.ZIP_STORED
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for member in old.namelist():
            new.writestr(member, content if member.endswith(name) else old.read(member))
    return out.getvalue()


def first_info(meta: Any) -> Any:
    return next(iter(meta.storage_data.values()))


def set_first(**values: Any) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        for name, value in values.items():
            setattr(first_info(meta), name, value)

    return change


def with_state(name: str, value: Any) -> Callable[[Any], None]:
    return lambda meta: meta.state_dict_metadata.update({name: value})


class Getter:
    """Object that calls ``getattr`` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.attrgetter, ("system",)


class Setter:
    def __reduce__(self) -> tuple[Any, ...]:
        return MetadataIndex, ("a",), {"__class__": Bomb}


def shape_of(meta: Any, *sizes: int) -> None:
    meta.state_dict_metadata["tok_embeddings.weight"].size = torch.Size(sizes)


def shared(kind: bytes, count: int) -> bytes:
    """Return a pickle of nested lists or tuples, each with two references to the previous one.

    The outermost one is left on the stack.
    """
    pair = b"](h%ch%ce\x94" if kind == b"]" else b"h%ch%c\x86\x94"
    return kind + b"\x94" + b"".join(pair % (n, n) for n in range(count))


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def described(pickled: bytes) -> Change:
    """Return a change that replaces the pickle of the embedding with ``pickled``, in protocol 4."""
    return item(lambda data, canary: rezipped(data, "data.pkl", b"\x80\x04" + pickled))


def encrypted(data: bytes) -> bytes:
    changed = bytearray(data)
    at = 0
    while (at := changed.find(b"PK\1\2", at)) >= 0:
        changed[at + 8] |= 1
        at += 4
    return bytes(changed)


def sparse(folder: Path, canary: Path) -> None:
    with open(folder / "__0_0.distcp", "r+b") as file:
        file.truncate(2**41)
    metadata(
        lambda w: (
            [setattr(info, "length", 2**40) for i, info in w.storage_data.items() if "tok" in i.fqn]
            and None
        )
    )(folder, canary)


def shared_file(meta: Any) -> None:
    name: Any = []
    for _ in range(40):
        name = [name, name]
    first_info(meta).relative_path = name


def shared_lists(canary: Path) -> bytes:
    """Sixty lists, each with two references to the previous one: 2^60 entries in a few hundred bytes."""
    return (
        b"\x80\x04]\x94"
        + b"".join(b"]" + b"(h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60))
        + b"."
    )


CASES: dict[str, Change] = {
    **{
        f"metadata {name}": raw(lambda canary, name=name: bombs(canary)[name])
        for name in bombs(Path("x"))
    },  # type: ignore[misc]
    "a bomb for a tensor": lambda folder, canary: metadata(with_state("x", Bomb(canary)))(
        folder, canary
    ),
    "a bomb for planner data": lambda folder, canary: metadata(
        lambda w: setattr(w, "planner_data", Bomb(canary))
    )(folder, canary),
    "a bomb in a table's key": lambda folder, canary: metadata(
        lambda w: w.state_dict_metadata.update({Bomb(canary): 1})
    )(folder, canary),
    "an attribute of a module": metadata(with_state("x", Getter())),
    "another state of a class": metadata(with_state("x", Setter())),
    "inst": raw(lambda canary: b"(S'touch %s'\nios\nsystem\n." % str(canary).encode()),
    "obj": raw(lambda canary: b"(cos\nsystem\nS'touch %s'\no." % str(canary).encode()),
    "newobj_ex": raw(lambda canary: b"\x80\x04cos\nsystem\n)}\x92."),
    "extension": raw(lambda canary: b"\x80\x02\x82\x01."),
    "persistent id": raw(lambda canary: b"Px\n."),
    "dotted name": raw(lambda canary: b"\x80\x04ctorch\nSize.__init__\n)R."),
    "state of plain data": raw(lambda canary: b"\x80\x04]}b."),
    "call of plain data": raw(lambda canary: b"\x80\x04])R."),
    "shared lists": raw(shared_lists),
    "itself": raw(lambda canary: b"\x80\x04]\x94h\x00a."),
    "long number": raw(lambda canary: b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"1."),
    "deep": raw(lambda canary: b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."),
    "empty": raw(lambda canary: b""),
    "cut": lambda folder, canary: (
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-40]) and None
    ),
    "no metadata": lambda folder, canary: (folder / ".metadata").unlink(),
    "a path outside": metadata(set_first(relative_path="../secret")),
    "an absolute path": metadata(set_first(relative_path="/etc/passwd")),
    "a parent": metadata(set_first(relative_path="..")),
    "beyond the file": metadata(set_first(offset=2**40)),
    "a negative place": metadata(set_first(offset=-1)),
    "a place that is a text": metadata(set_first(length="9")),
    "an endless tensor": metadata(lambda w: shape_of(w, 2**31, 2**31)),
    "a negative shape": metadata(lambda w: shape_of(w, 260, 32, 0)),
    "another shape": metadata(lambda w: shape_of(w, 32, 260)),
    "a missing file": lambda folder, canary: (folder / "__0_0.distcp").unlink(),
    "a cut file": lambda folder, canary: (folder / "__0_0.distcp").write_bytes(b"PK") and None,
    "a bomb for an item": item(lambda data, canary: bombs(canary)["pickle-2"]),
    "a bomb in an item": item(
        lambda data, canary: rezipped(data, "data.pkl", bombs(canary)["pickle-2"])
    ),
    "a compressed item": item(lambda data, canary: rezipped(data, "no", b"", zipfile.ZIP_DEFLATED)),
    "less than its tensor": item(lambda data, canary: rezipped(data, "data/0", b"1234")),
    "a big-endian item": item(lambda data, canary: rezipped(data, "byteorder", b"big")),
    "a key of shared tuples": raw(lambda canary: b"\x80\x04}" + shared(b")", 60) + b"Ns."),
    "a file name of shared lists": metadata(shared_file),
    "many lists": raw(lambda canary: b"\x80\x04" + b"]" * (4 << 20) + b"."),
    "a storage of shared lists": described(
        shared(b"]", 34)
        + b"0"
        + REBUILD
        + b"((h\x22X\7\0\0\0float32tK\0(M\x04\x01K\x20t(K\x20K\1ttR."
    ),
    "a tensor of one argument": described(REBUILD + b"(K\1tR."),
    "a storage that is none": described(REBUILD + b"((K\1K\1K\1tK\0(M\x04\x01K\x20t(K\x20K\1ttR."),
    "an encrypted item": item(lambda data, canary: encrypted(data)),
    "a hole of a terabyte": sparse,
    "an object for an item": item(
        lambda data, canary: rezipped(data, "data.pkl", pickle.dumps([1, 2], 2))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_runs_nothing_and_is_one_line(
    name: str, good_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    folder = tmp_path / "step-3"
    canary = tmp_path / "canary"
    shutil.copytree(good_folder, folder)
    CASES[name](folder, canary)
    assert cli.main(["checkpoint", "from-dcp", str(folder), str(tmp_path / "ours"), *words()]) == 5

    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert len(lines[0]) < 700, lines
    assert str(folder) in lines[0], lines
    assert not canary.exists()
    assert not (tmp_path / "ours").exists()


def test_there_are_thirty_hostile_metadata_files() -> None:
    assert len(CASES) >= 30


def test_every_changed_byte_of_a_tensor_is_reported(good_folder: Path, tmp_path: Path) -> None:
    """PyTorch accepts all of these changes, because ``torch.load`` ignores the checksums of its zip files."""
    folder = tmp_path / "step-3"
    shutil.copytree(good_folder, folder)
    place = DcpFolder(folder).tensors["output.weight"].chunks[0].place
    path = folder / place.file
    rng = random.Random(0)
    data = bytearray(path.read_bytes())
    archive = zipfile.ZipFile(io.BytesIO(data[place.begin : place.begin + place.length]))
    (content,) = [m for m in archive.infolist() if m.filename.endswith("/data/0")]
    # within its first numbers
    inside = place.begin + content.header_offset + 30 + len(content.filename) + 64
    for _ in range(25):
        at = rng.randrange(inside, inside + content.file_size - 64)
        bit = 1 << rng.randrange(8)
        data[at] ^= bit
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"output\.weight.* is damaged"):
            DcpFolder(folder).tensor("output.weight")
        data[at] ^= bit


def test_plain_values_of_any_pickle_protocol_are_read() -> None:
    value = {
        "a": [1, 2.5, (True, None, "é"), b"x", -(2**70)],
        "b": {},
        "c": [[], [[]]],
        "d": (1, 2, 3, 4),
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol < 3:
            value = {**value, "a": [1, 2.5, (True, None, "é"), -(2**70)]}
        assert parse(pickle.dumps(value, protocol), set(), "it") == value

        names = {
            name
            for name, _, _ in pickletools.genops(pickle.dumps(value, protocol))
            if name.name == "GLOBAL"
        }

        assert not names


def test_integer_of_many_bytes_is_refused() -> None:
    """A dict with 1,000 entries of this key would hash the integer of a million bytes 1,000 times."""
    number = b"\x8b" + (10**6).to_bytes(4, "little") + b"\x01" * 10**6 + b"q\x00" + b"0"
    table = b"}(" + b"h\x00N" * 1000 + b"u."
    with pytest.raises(
        CheckpointError, match="has the opcode LONG4, which plain data does not need"
    ):
        parse(b"\x80\x04" + number + table, set(), "a.pt")
    assert parse(pickle.dumps(-(2**2000)), set(), "a.pt") == -(2**2000)
