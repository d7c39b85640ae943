"""Images of rows: common formats are decoded, and hostile files end in a one-line error."""

from __future__ import annotations

import base64
import gc
import io
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PillowImage
from tiers import cases
from vision_folders import SIZES, encoded, pixels, png

from shardtrain.data import sandbox
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.image_decoder import BadImage, ImageDecoder
from shardtrain.data.images import Image, ImageReader
from shardtrain.data.sources import BadRow
from shardtrain.utils import stop_signals

MAX_PIXELS = 1_000_000
MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(MAX_PIXELS)
    yield decoder
    decoder.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(len(SIZES)):
        (folder / f"{number}.png").write_bytes(png(number))
    return folder


def read(folder: Path, row: dict[str, Any], images_field: str = "") -> Any:
    return ImageReader(str(folder), "messages", images_field, MAX_BYTES).read(row)


def question(*parts: Any) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "A cat."}
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, answer]


BASE64 = base64.b64encode(png(0)).decode()
URI = f"data:image/png;base64,{BASE64}"
PLACE = {"type": "image"}
FORMATS: dict[str, dict[str, Any]] = {
    "list of paths": {"messages": question(PLACE), "images": ["0.png"]},
    "one path": {"messages": question(PLACE), "image": "0.png"},
    "base64 in a column": {"messages": question(PLACE), "image": BASE64},
    "URI in a column": {"messages": question(PLACE), "image": URI},
    "bytes in a column": {"messages": question(PLACE), "image": {"bytes": png(0), "path": "x.png"}},
    "path in an object": {"messages": question(PLACE), "image": {"bytes": None, "path": "0.png"}},
    "part with a path": {"messages": question({"type": "image", "image": "0.png"})},
    "part with a file URL": {"messages": question({"type": "image", "image": "file://0.png"})},
    "part with nulls": {
        "messages": question({"type": "image", "text": None, "image": {"bytes": png(0)}})
    },
    "part with base64": {"messages": question({"type": "image", "base64": BASE64})},
    "OpenAI": {"messages": question({"type": "image_url", "image_url": {"url": URI}})},
    "LLaVA": {
        "conversations": [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": "A cat."},
        ],
        "image": "0.png",
    },
    "no place": {
        "messages": [
            {"role": "user", "content": "What?"},
            {"role": "assistant", "content": "A cat."},
        ],
        "images": ["0.png"],
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_rows(name: str, folder: Path, decoder: ImageDecoder) -> None:
    messages, (image,) = read(folder, FORMATS[name])
    assert messages == question(PLACE)
    np.testing.assert_array_equal(image.decode(decoder, MAX_BYTES), pixels(0))
    assert image.size(decoder, MAX_BYTES) == SIZES[0]


def test_images_are_in_the_order_of_their_places(folder: Path, decoder: ImageDecoder) -> None:
    second = [
        {"role": "user", "content": [{"type": "image", "image": "2.png"}, PLACE]},
        {"role": "assistant", "content": "Two."},
    ]
    row = {"messages": [*question(PLACE), *second], "images": ["0.png", "3.png"]}
    messages, images = read(folder, row)

    assert [image.name for image in images] == ["0.png", "2.png", "3.png"]
    assert messages[2]["content"] == [PLACE, PLACE]


def test_a_place_within_a_text(folder: Path) -> None:
    text = "Compare <image> with\n<image>\nand say why."
    conversation = [{"from": "human", "value": text}, {"from": "gpt", "value": "No."}]
    messages, _ = read(folder, {"conversations": conversation, "image": ["0.png", "1.png"]})

    assert messages[0] == {
        "role": "user",
        "content": [
            {"type": "text", "text": "Compare "},
            PLACE,
            {"type": "text", "text": " with"},
            PLACE,
            {"type": "text", "text": "and say why."},
        ],
    }


def test_a_row_of_text_may_contain_the_mark_of_a_place(folder: Path) -> None:
    conversation = [
        {"role": "user", "content": "What is <image>?"},
        {"role": "assistant", "content": "A mark."},
    ]

    assert read(folder, {"messages": conversation, "images": []}) == (conversation, [])


def test_a_named_column(folder: Path) -> None:
    row = {"messages": question(PLACE), "photo": "1.png", "image": "0.png"}
    _, (image,) = read(folder, row, images_field="photo")
    assert image.name == "1.png"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "URL": (
        {"messages": question(PLACE), "image": "https://example.com/cat.png"},
        "names an image by URL, and images are never downloaded; download it and name its path",
    ),
    "URL in a part": (
        {"messages": question({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}})},
        "names an image by URL",
    ),
    "outside": ({"messages": question(PLACE), "image": "../secret.png"}, "names an image outside"),
    "absolute": ({"messages": question(PLACE), "image": "/etc/passwd"}, "names an image outside"),
    "too few": (
        {"messages": question(PLACE, PLACE), "images": ["0.png"]},
        "must have as many images in its column as image parts in the conversation (1 images, 2 parts)",
    ),
    "too many": (
        {"messages": question(PLACE), "images": ["0.png", "1.png"]},
        "must have as many images in its column as image parts in the conversation (2 images, 1 parts)",
    ),
    "no user": (
        {"messages": [{"role": "assistant", "content": "Hm."}], "image": "0.png"},
        "must have as many images in its column as image parts in the conversation (1 images, 0 parts)",
    ),
    "number": (
        {"messages": question(PLACE), "image": 7},
        "has an image that is a number, not a path, base64 text or bytes",
    ),
    "empty object": (
        {"messages": question(PLACE), "image": {"bytes": None, "path": None}},
        "has an image without bytes and path",
    ),
    "empty bytes": ({"messages": question(PLACE), "image": b""}, "has an image without content"),
    "wrong base64": (
        {"messages": question(PLACE), "image": "data:image/png;base64,###"},
        "has an image whose base64 text is invalid",
    ),
    "large bytes": (
        {"messages": question(PLACE), "image": b"x" * (MAX_BYTES + 1)},
        f"has an image that is larger than data.max_image_bytes={MAX_BYTES}",
    ),
    "no path": ({"messages": question(PLACE), "image": ""}, "path is empty or invalid"),
    "no messages": ({"image": "0.png"}, "has no column 'messages'; its columns are image"),
    "messages are a text": (
        {"messages": "What?", "image": "0.png"},
        "column 'messages' holds a text, not a list of messages",
    ),
    "video": (
        {"messages": question({"type": "video"})},
        "message 1 of column 'messages' has a part of type 'video'; only text can be trained",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows(name: str, folder: Path) -> None:
    row, reason = REFUSED[name]
    try:
        answer = read(folder, row)
    except Unusable as error:
        answer = error.reason

    assert isinstance(answer, str | BadRow)
    assert reason in str(answer)
    assert "\n" not in str(answer)


def test_a_wrong_column_is_named(folder: Path) -> None:
    with pytest.raises(Unusable, match="has no column 'photo'; its columns are messages, image"):
        read(folder, {"messages": question(PLACE), "image": "0.png"}, images_field="photo")


def test_a_path_needs_a_folder() -> None:
    reader = ImageReader("", "messages", "", MAX_BYTES)
    with pytest.raises(Unusable, match=r"set data\.image_folder"):
        reader.read({"messages": question(PLACE), "image": "0.png"})


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG file of a few bytes that claims any size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels_of_image = zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", pixels_of_image)
        + chunk(b"IEND", b"")
    )


def with_text_bomb() -> bytes:
    """Return a PNG file with compressed text that expands to 500 MB."""
    content = b"Comment\0\0" + zlib.compress(b"\0" * 500_000_000, 9)
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + content))
    normal = png(0)
    return normal[:33] + chunk + normal[33:]


def wide_gif() -> bytes:
    """Return a GIF file whose first frame claims 65,535 x 65,535 pixels."""
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
        + b"\x02\x02L\x01\x00;"
    )


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be decoded (cannot identify image file"),
    "text": (b"hello", "cannot be decoded (cannot identify image file"),
    "HTML": (b"<!DOCTYPE html><html>404</html>", "cannot be decoded (cannot identify image file"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded (cannot identify"),
    "EPS, which starts a program": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
        "cannot be decoded (cannot identify image file",
    ),
    "pickle": (b"\x80\x04cos\nsystem\n", "cannot be decoded (cannot identify image file"),
    "PNG cut": (png(0)[:-100], "cannot be decoded ("),
    "PNG header only": (png(0)[:40], "cannot be decoded ("),
    "JPEG cut": (encoded("JPEG")[:-100], "cannot be decoded (image file is truncated"),
    "WebP cut": (encoded("WEBP")[:-100], "cannot be decoded ("),
    "GIF cut": (encoded("GIF")[:-100], "cannot be decoded ("),
    "PNG with a wrong byte": (
        png(0)[:60] + bytes([png(0)[60] ^ 255]) + png(0)[61:],
        "cannot be decoded (",
    ),
    "PNG of 100,000 x 100,000 pixels": (
        png_of_size(100_000, 100_000),
        f"has more pixels than data.max_image_pixels={MAX_PIXELS}",
    ),
    "GIF of 65,535 x 65,535 pixels": (
        wide_gif(),
        f"has more pixels than data.max_image_pixels={MAX_PIXELS}",
    ),
    "PNG with fewer pixels than it claims": (png_of_size(900, 900), "cannot be decoded ("),
    "PNG without pixels": (png_of_size(0, 10), "cannot be decoded ("),
    "PNG with a bomb of text": (with_text_bomb(), "cannot be decoded ("),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images(name: str, decoder: ImageDecoder) -> None:
    content, reason = HOSTILE[name]
    with pytest.raises(BadImage) as refused:
        decoder.decode(content)
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)
    # The decoder answers the next request.
    np.testing.assert_array_equal(decoder.decode(png(1)), pixels(1))


def test_decoding_within_limits_of_memory_and_time() -> None:
    """A large image exceeds the memory limit of the child process. A new child decodes the next image."""
    sandbox.set_limits(sandbox.Limits(memory_bytes=2**26, seconds=5))
    decoder = ImageDecoder(10**10)
    try:
        with pytest.raises(BadImage, match="needs more than data.artefact_memory_bytes=67108864"):
            decoder.decode(png_of_size(20_000, 20_000))
        np.testing.assert_array_equal(decoder.decode(png(1)), pixels(1))
    finally:
        decoder.close()
        sandbox.set_limits(sandbox.Limits())


def test_requests_to_stop_do_not_end_the_decoder(decoder: ImageDecoder) -> None:
    """A terminal and a scheduler signal all processes of a run. The image must not count as damaged."""
    content = png(0)
    expected = decoder.decode(content).shape
    child = decoder._child

    assert child is not None

    for number in stop_signals.FROM_OUTSIDE:
        os.kill(child.pid, number)
        assert decoder.decode(content).shape == expected

    assert decoder._child is child


def test_the_child_ends_with_its_decoder_but_not_with_a_fork_of_it() -> None:
    """A program that opens datasets one after another must not accumulate child processes."""
    decoder = ImageDecoder(MAX_PIXELS)
    decoder.decode(png(0))
    child = decoder._child
    assert child is not None

    # A forked data worker drops its copy of the decoder. The parent's child must survive.
    fork = os.fork()
    if fork == 0:
        del decoder
        os._exit(0)
    os.waitpid(fork, 0)
    np.testing.assert_array_equal(decoder.decode(png(1)), pixels(1))
    assert child.poll() is None

    del decoder
    gc.collect()
    assert child.poll() == -signal.SIGKILL


def test_a_decoder_that_takes_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel ends the child after the CPU time of one image. A stand-in for a decoder loops without end."""
    import sys

    from shardtrain.data import image_decoder

    sandbox.set_limits(sandbox.Limits(seconds=1))
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
sys.stdin.buffer.readline()
while True:
    pass
"""
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(image_decoder.python_child, "command", lambda *_: command)
    decoder = ImageDecoder(MAX_PIXELS)
    try:
        with pytest.raises(BadImage, match="takes more than data.artefact_seconds=1 to decode"):
            decoder.decode(png(0))
    finally:
        decoder.close()
        sandbox.set_limits(sandbox.Limits())


KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@pytest.mark.parametrize("kind", cases(KINDS[:2], nightly=list(KINDS)))
def test_kinds_of_files(kind: str, decoder: ImageDecoder) -> None:
    content = encoded(kind)
    assert decoder.size(content) == SIZES[0]
    expected = np.asarray(PillowImage.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(decoder.decode(content), expected)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_modes_of_pixels(mode: str, decoder: ImageDecoder) -> None:
    image = PillowImage.fromarray(pixels(0))
    image = PillowImage.new(mode, SIZES[0]) if mode == "I;16" else image.convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    file = io.BytesIO()
    image.save(file, kind)

    assert decoder.decode(file.getvalue()).shape == (SIZES[0][1], SIZES[0][0], 3)


def test_the_orientation_in_exif_is_applied(decoder: ImageDecoder) -> None:
    """``datasets`` and ``transformers`` also rotate an image by its EXIF orientation."""
    exif = PillowImage.Exif()
    exif[0x0112] = 6
    content = encoded("JPEG", exif=exif.tobytes())
    width, height = SIZES[0]

    assert decoder.size(content) == (height, width)
    assert decoder.decode(content).shape == (width, height, 3)


def test_a_missing_file_and_others_that_are_no_image(folder: Path, decoder: ImageDecoder) -> None:
    (folder / "large.png").write_bytes(b"x" * (MAX_BYTES + 1))
    os.mkfifo(folder / "pipe.png")
    (folder / "dir.png").mkdir()
    reasons = {}
    for name in ("none.png", "large.png", "pipe.png", "dir.png"):
        with pytest.raises(BadImage) as refused:
            Image(name, str(folder / name)).decode(decoder, MAX_BYTES)
        reasons[name] = str(refused.value)

    assert reasons["none.png"] == "does not exist"
    assert reasons["large.png"] == f"is larger than data.max_image_bytes={MAX_BYTES}"
    assert reasons["pipe.png"].startswith("cannot be read (")
    assert reasons["dir.png"].startswith("cannot be read (")


def test_the_size_of_a_large_file_is_read_from_its_beginning(folder: Path) -> None:
    """Only the header is read, so a run with many images starts fast."""
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    path = folder / "noise.png"
    PillowImage.fromarray(noise).save(path)

    assert path.stat().st_size > 2 * 64 * 1024

    decoder = ImageDecoder(MAX_PIXELS)
    try:
        assert Image("noise.png", str(path)).size(decoder, max_bytes=1) == (300, 300)
    finally:
        decoder.close()
