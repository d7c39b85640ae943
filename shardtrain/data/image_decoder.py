"""Decode untrusted images in a child process with hard limits on memory and time (``image_child``).

Image libraries are written in C and read files of unknown origin. The trainer itself therefore never parses
an image. Each process that reads images has one child, which is started with the first image and again
after it died.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data import sandbox
from shardtrain.utils import libraries, python_child, stop_signals

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3), red, green and blue."""
INSTALL = '"shardtrain[vision]"'
_MAX_LINE_BYTES = 16 * 1024
_PIECE_BYTES = 2**20


class BadImage(Exception):
    """An image cannot be used. The message is a predicate, such as "cannot be decoded"."""


class ImageDecoder:
    """Decodes images in a child process. Not for threads; a forked process starts its own child.

    Args:
        max_pixels: images with more pixels are refused before they are decoded.
    """

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end_child: Callable[[], object] | None = None
        libraries.load("PIL.Image", "task.name", "image_text", INSTALL)

    def __getstate__(self) -> dict[str, Any]:
        return {"_max_pixels": self._max_pixels, "_child": None, "_owner": 0, "_end_child": None}

    def size(self, content: bytes) -> tuple[int, int]:
        """Return width and height of an image as displayed. The beginning of the file suffices for most formats.

        Raises:
            BadImage: the content is not an image, or the image has too many pixels.
        """
        answer, _ = self._ask(content, decodes=False)
        return answer

    def decode(self, content: bytes) -> Pixels:
        """Return the pixels of an image: the first frame, rotated as its EXIF data specify.

        Raises:
            BadImage: the image is damaged or truncated, or exceeds the limits of pixels, memory or time.
        """
        (width, height), pixels = self._ask(content, decodes=True)
        return np.frombuffer(pixels, dtype=np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        """End the child."""
        if self._end_child is not None:
            self._end_child()
        self._child = None

    def _ask(self, content: bytes, decodes: bool) -> tuple[tuple[int, int], bytes]:
        limits = sandbox.limits()
        child = self._running_child()
        request = {
            "decodes": decodes,
            "bytes": len(content),
            "max_pixels": self._max_pixels,
            "memory_bytes": limits.memory_bytes,
            "seconds": limits.seconds,
        }
        deadline = time.monotonic() + sandbox.wall_seconds()
        try:
            _write(child, json.dumps(request).encode() + b"\n" + content, deadline)
            answer, rest = _read_line(child, deadline)
            if "refused" in answer:
                raise BadImage(str(answer["refused"])[:300])
            width, height = answer["size"]
            num_bytes = 3 * width * height if decodes else 0
            if answer["bytes"] != num_bytes or width * height > self._max_pixels:
                raise ValueError("its answer is invalid")
            return (width, height), _read(child, rest, num_bytes, deadline)
        except BadImage:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            # The kernel ended the child, or the time is over.
            child.kill()
            status = child.wait()
            self.close()
            raise BadImage(_verdict(status, limits)) from None

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._owner == os.getpid():
            return self._child
        environment = {name: os.environ[name] for name in sandbox.PASSED_ON if name in os.environ}
        environment["OMP_NUM_THREADS"] = "1"
        # Ctrl-C reaches all processes of a run. If the child died of it, an image would count as damaged.
        with stop_signals.children_ignore_requests():
            self._child = subprocess.Popen(
                python_child.command("shardtrain.data.image_child"),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        assert self._child.stdin is not None
        # A child that does not read must not block this process.
        os.set_blocking(self._child.stdin.fileno(), False)
        self._owner = os.getpid()
        # The child ends with this object, at the latest when the process exits.
        self._end_child = weakref.finalize(self, _end, self._child, self._owner)
        return self._child


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """End a child and close its pipes, in the process that started it. A fork of this process must not."""
    if os.getpid() != owner:
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()


def _verdict(status: int, limits: sandbox.Limits) -> str:
    """Return the reason for the death of the child."""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than data.artefact_seconds={limits.seconds} to decode"
    return f"needs more than data.artefact_memory_bytes={limits.memory_bytes} to decode, or its library fails on it"


def _write(child: subprocess.Popen[bytes], content: bytes, deadline: float) -> None:
    """Write to the child. Raises OSError if it died, and ValueError after the deadline."""
    assert child.stdin is not None
    descriptor = child.stdin.fileno()
    view = memoryview(content)
    while view:
        try:
            view = view[os.write(descriptor, view[:_PIECE_BYTES]) :]
        except BlockingIOError:
            _wait(descriptor, selectors.EVENT_WRITE, deadline)


def _read_line(child: subprocess.Popen[bytes], deadline: float) -> tuple[Mapping[str, Any], bytes]:
    """Return the answer of the child, and the bytes that were read after it. Raises ValueError."""
    received = b""
    while b"\n" not in received:
        part = _read_some(child, _MAX_LINE_BYTES, deadline)
        received += part
        if not part or len(received) > 2 * _MAX_LINE_BYTES:
            raise ValueError("it ended without an answer")
    line, _, rest = received.partition(b"\n")
    answer = json.loads(line)
    if not isinstance(answer, dict):
        raise ValueError("its answer is not an object")
    return answer, rest


def _read(child: subprocess.Popen[bytes], start: bytes, num_bytes: int, deadline: float) -> bytes:
    """Return ``num_bytes`` bytes, of which ``start`` has been read. Raises ValueError."""
    content = bytearray(start)
    while len(content) < num_bytes:
        part = _read_some(child, _PIECE_BYTES, deadline)
        if not part:
            raise ValueError("it ended within the pixels")
        content += part
    if len(content) > num_bytes:
        raise ValueError("it wrote more than the pixels")
    return bytes(content)


def _read_some(child: subprocess.Popen[bytes], most: int, deadline: float) -> bytes:
    assert child.stdout is not None
    _wait(child.stdout.fileno(), selectors.EVENT_READ, deadline)
    return os.read(child.stdout.fileno(), most)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a pipe is ready. Raises ValueError after the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise ValueError("the time is over")
