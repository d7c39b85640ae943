"""Child process of ``image_decoder``: decode images within hard limits and return their pixels.

The child reads one request after another from standard input: a line of JSON, then the bytes of the image.
It answers with a line of JSON, then the pixels. The kernel limits its memory and its CPU time per image.
Only the decoders of ``FORMATS`` are used; others, such as EPS, start programs.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import Any

from shardtrain.data.sandbox_child import bound
from shardtrain.utils.limits import is_out_of_memory

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ROTATED = (5, 6, 7, 8)
"""Orientations in EXIF that exchange width and height."""
_ORIENTATION = 0x0112


class _Refused(Exception):
    """The image is not decoded. The message is a predicate."""


def _open(content: bytes, max_pixels: int) -> Any:
    """Return the opened image, whose pixels are not decoded yet.

    Raises:
        _Refused: the image has too many pixels, or none.
    """
    from PIL import Image

    # This module has its own limit, and PIL would only warn.
    Image.MAX_IMAGE_PIXELS = None
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise _Refused(f"has more pixels than data.max_image_pixels={max_pixels}")
    if not width * height:
        raise _Refused("has no pixels")
    return image


def _size(content: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height as displayed, from the header of the file."""
    image = _open(content, max_pixels)
    width, height = image.size
    # ``getexif`` of a PNG without EXIF would decode the entire file.
    orientation = 1
    if "exif" in image.info or image.format != "PNG":
        orientation = image.getexif().get(_ORIENTATION, 1)
    if orientation in _ROTATED:
        return height, width
    return width, height


def _decode(content: bytes, max_pixels: int) -> tuple[tuple[int, int], bytes]:
    """Return width and height as displayed, and the pixels (height, width, 3) of the first frame."""
    from PIL import ImageOps

    image = _open(content, max_pixels)
    image.load()
    image = ImageOps.exif_transpose(image).convert("RGB")
    return image.size, image.tobytes()


def _answer(request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the answer to a request, and its pixels."""
    try:
        if request["decodes"]:
            size, pixels = _decode(content, request["max_pixels"])
        else:
            size = _size(content, request["max_pixels"])
            pixels = b""
    except _Refused as error:
        return {"refused": _one_line(error)}, b""
    except Exception as error:  # a decoder may raise anything
        if is_out_of_memory(error):
            limit = f"data.artefact_memory_bytes={request['memory_bytes']}"
            return {"refused": f"needs more than {limit} to decode"}, b""
        return {"refused": f"cannot be decoded ({_one_line(error)})"}, b""
    return {"size": size}, pixels


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    # PIL's message has the address of the buffer, which differs between runs.
    return text.partition(" <_io.BytesIO")[0]


def main() -> None:
    """Answer requests until standard input ends."""
    import PIL.ImageOps  # noqa: F401 - before the limits, which leave no memory for imports
    from PIL import Image

    Image.preinit()
    Image.init()
    limited = False
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        if not limited:
            bound(request["memory_bytes"], request["seconds"])
            limited = True
        # The limit of CPU time is for each image.
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 1 + request["seconds"]
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        if most != resource.RLIM_INFINITY:
            seconds = min(seconds, most)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))

        content = sys.stdin.buffer.read(request["bytes"])
        answer, pixels = _answer(request, content)
        answer["bytes"] = len(pixels)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + pixels)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
