"""Read the images of rows: find them in columns and messages, and load them from files or from the row.

A row is a conversation with images, in one of the formats that people have:

- ``{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}, ...],
  "images": ["cat.png"]}`` (TRL)
- a part that contains its image: ``{"type": "image", "image": "cat.png"}`` (Qwen), or OpenAI's
  ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``
- ``{"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, ...], "image": "cat.png"}``
  (LLaVA)
- messages without places for images: all images precede the text of the first user message (TRL)

An image is a path relative to a folder, base64 text, bytes, or ``{"bytes": ..., "path": ...}`` (Parquet).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardtrain.data.chat.messages import SPEAKERS, Message, messages_column, messages_of
from shardtrain.data.documents.columns import Unusable, column, find, kind
from shardtrain.data.image_decoder import BadImage, ImageDecoder, Pixels
from shardtrain.data.sources import BadRow
from shardtrain.utils import bounded_reads

COLUMNS = ("images", "image")
"""Columns of images, if ``data.images_field`` is empty."""
_PARTS = ("image", "image_url")
"""Types of a part of a content that is an image."""
_EMBEDDED = ("image", "image_url", "path", "url", "base64", "bytes")
"""Keys under which such a part may contain its image."""
_PLACE = "<image>"
"""Marks the place of an image in a text of LLaVA's format."""
_LINE_AT_PLACE = re.compile(r"\n?<image>\n?")
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_DATA_URI = re.compile(r"data:[\w/+.-]*;base64,")
_BASE64 = re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-3])[A-Za-z0-9+/\s]{60,}={0,2}\s*")
"""Base64 text of a JPEG, PNG, GIF, WebP or BMP file, without the prefix of a URI."""
_HEADER_BYTES = 64 * 1024
"""Number of bytes that are read first, usually enough to find the width and height of an image."""


@dataclass(frozen=True)
class Image:
    """An image that is not loaded.

    Attributes:
        name: the path in the row; empty if the row contains the image.
        path: path of the file.
        content: content of a file, if the row contains the image.
    """

    name: str = ""
    path: str = ""
    content: bytes = b""

    def load(self, max_bytes: int) -> bytes:
        """Return the content of the file.

        Raises:
            BadImage: the file cannot be read, is not a regular file, or is larger than ``max_bytes``.
        """
        if self.content:
            return self.content
        try:
            return bounded_reads.read_all(self.path, max_bytes)
        except OSError as error:
            raise _unreadable(self.path, error, max_bytes) from error

    def identity(self) -> str | bytes:
        """Return the content, or the name and size of the file, for a fingerprint. Raises BadImage."""
        if self.content:
            return self.content
        try:
            return f"{self.name} {os.stat(self.path).st_size}"
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def size(self, decoder: ImageDecoder, max_bytes: int) -> tuple[int, int]:
        """Return width and height. If possible, read only the beginning of the file.

        Raises:
            BadImage: the file cannot be read (see ``load``), is not an image, or has too many pixels.
        """
        if not self.content:
            try:
                return decoder.size(bounded_reads.start(self.path, _HEADER_BYTES))
            except OSError as error:
                raise _unreadable(self.path, error) from error
            except BadImage:
                # A TIFF file may have its header at the end, so the complete file is read below.
                pass
        return decoder.size(self.load(max_bytes))

    def decode(self, decoder: ImageDecoder, max_bytes: int) -> Pixels:
        """Return the pixels (height, width, 3). Raises BadImage."""
        return decoder.decode(self.load(max_bytes))

    @property
    def place(self) -> str:
        """Location of the image, for messages."""
        return self.path or "in the row"


@dataclass(frozen=True)
class ImageReader:
    """Finds the images of rows.

    Attributes:
        folder: folder to which paths of images are relative. Empty to reject relative paths.
        messages_field: column of the conversation.
        images_field: column of the images. If empty, the first of ``COLUMNS`` that a row has.
        max_bytes: size limit of an image.
    """

    folder: str
    messages_field: str
    images_field: str
    max_bytes: int

    def read(self, row: Mapping[str, Any]) -> tuple[list[Message], list[Image]] | BadRow:
        """Return messages for the chat template, and the images in the order of their places.

        The messages have a part ``{"type": "image"}`` at the place of each image.

        Raises:
            Unusable: the conversation or an image is invalid.
        """
        name = messages_column(row, self.messages_field)
        conversation = column(row, name)
        in_column = self._in_column(row)
        if not isinstance(conversation, list | tuple):
            raise Unusable(f"column {name!r} holds {kind(conversation)}, not a list of messages")
        marked = [_with_places(message, bool(in_column)) for message in conversation]
        places = list(_image_parts(marked))
        if in_column and not places:
            _insert_first(marked, len(in_column))
            places = list(_image_parts(marked))

        # A part may contain its image. All other parts take the next image of the column.
        next_images = iter(in_column)
        images = []
        num_from_column = 0
        for part in places:
            value = _embedded(part)
            if value is None:
                num_from_column += 1
                value = next(next_images, None)
            if value is not None:
                images.append(self._image(value))
        if num_from_column != len(in_column):
            reason = "must have as many images in its column as image parts in the conversation"
            return BadRow(reason, detail=f"{len(in_column)} images, {num_from_column} parts")

        # A chat template only needs the type of an image part.
        for part in places:
            part.clear()
            part["type"] = "image"
        return messages_of(marked, name, has_images=True), images

    def _in_column(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the images in the row's column of images. Empty if the column does not exist or is null."""
        value = None
        if self.images_field:
            value = column(row, self.images_field)
        else:
            names = [name for name in COLUMNS if find(row, name) is not None]
            if names:
                value = find(row, names[0])
        if value is None:
            return []
        # LLaVA's column has a single image instead of a list.
        if isinstance(value, list | tuple):
            return list(value)
        return [value]

    def _image(self, value: Any) -> Image:
        """Return the image that a value describes. Raises Unusable."""
        if isinstance(value, Mapping):
            inner = _embedded(value)
            if inner is None or isinstance(inner, Mapping):
                raise Unusable("has an image without bytes and path")
            return self._image(inner)
        if isinstance(value, bytes):
            return self._content(value)
        if not isinstance(value, str):
            raise Unusable(f"has an image that is {kind(value)}, not a path, base64 text or bytes")
        prefix = _DATA_URI.match(value)
        if prefix:
            return self._base64(value[prefix.end() :])
        # Text that begins like an image file and is long enough is not a path.
        if _BASE64.fullmatch(value):
            return self._base64(value)
        name = value.removeprefix("file://")
        return Image(name, self._path(name))

    def _base64(self, text: str) -> Image:
        # Some encoders insert line breaks, which ``b64decode`` would reject.
        without_spaces = "".join(text.split())
        try:
            content = base64.b64decode(without_spaces, validate=True)
        except (binascii.Error, ValueError):
            raise Unusable("has an image whose base64 text is invalid") from None
        return self._content(content)

    def _content(self, content: bytes) -> Image:
        if not content:
            raise Unusable("has an image without content")
        if len(content) > self.max_bytes:
            raise Unusable(
                f"has an image that is larger than data.max_image_bytes={self.max_bytes}"
            )
        return Image(content=content)

    def _path(self, value: str) -> str:
        """Return the path of an image file, which must be in the folder of images."""
        if _URL.match(value) or value.startswith("data:"):
            raise Unusable(
                "names an image by URL, and images are never downloaded; download it and name its path"
            )
        if not value or "\0" in value:
            raise Unusable("has an image whose path is empty or invalid")
        if not self.folder:
            raise Unusable("names an image by path; set data.image_folder to the folder of images")
        # The data could name any file of this machine, so the path must stay within the folder.
        path = os.path.normpath(os.path.join(self.folder, value))
        folder = os.path.normpath(self.folder)
        absolute_folder = os.path.abspath(folder)
        common = os.path.commonpath([absolute_folder, os.path.abspath(path)])
        if common != absolute_folder:
            raise Unusable(
                f"names an image outside of {folder}; set data.image_folder to a folder with all images"
            )
        return path


def user_message(text: str, num_images: int) -> Message:
    """Return a user's message with images, in the places of ``<image>`` or before the text.

    >>> user_message("What is it?", 1)
    {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}
    """
    messages = [_with_places({"role": "user", "content": text}, has_column=True)]
    if not list(_image_parts(messages)):
        _insert_first(messages, num_images)
    return messages_of(messages, "prompt", has_images=True)[0]


def _with_places(message: Any, has_column: bool) -> Any:
    """Return a copy of a message, with a part for each image of its content.

    ``<image>`` in a text is such a place if the row has a column of images. A line break next to it is
    removed, because chat templates write their own.
    """
    if not isinstance(message, Mapping):
        return message
    # LLaVA's messages have the keys "from" and "value" instead of "role" and "content".
    is_llava = "role" not in message and "from" in message
    key = "value" if is_llava else "content"
    content = message.get(key)
    parts: list[Any]
    if isinstance(content, list | tuple):
        parts = []
        for part in content:
            known = part
            if isinstance(part, Mapping):
                # Arrow tables have every key in every part
                known = {name: value for name, value in part.items() if value is not None}
            parts.append(known)
    elif isinstance(content, str) and has_column and _PLACE in content:
        parts = []
        # The split removes the placeholders, so there is an image between each two texts.
        texts = _LINE_AT_PLACE.split(content)
        for number, text in enumerate(texts):
            if number:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
    else:
        return message
    changed = {name: value for name, value in message.items() if name != key}
    if key == "value":
        speaker = changed.pop("from")
        changed["role"] = SPEAKERS.get(speaker, speaker)
    return {**changed, "content": parts}


def _image_parts(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts that are images, in order."""
    for message in messages:
        # ``messages_of`` reports invalid messages later.
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, dict) and part.get("type") in _PARTS:
                yield part


def _insert_first(messages: list[Any], count: int) -> None:
    """Insert places for images at the beginning of the first user message, as TRL does."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        role = message.get("role", SPEAKERS.get(message.get("from", "")))
        content = message.get("content", message.get("value"))
        if role != "user" or not isinstance(content, str | list):
            continue
        parts = content
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        other_keys = {}
        for name, value in message.items():
            if name not in ("from", "value", "role", "content"):
                other_keys[name] = value
        places = [{"type": "image"} for _ in range(count)]
        messages[number] = {"role": "user", **other_keys, "content": [*places, *parts]}
        return


def _embedded(part: Mapping[str, Any]) -> Any:
    """Return the image that a part or an object contains, or None."""
    for name in ("bytes", *_EMBEDDED):
        value = part.get(name)
        if value is None:
            continue
        if name in ("image", "image_url") and isinstance(value, Mapping):
            return _embedded(value)
        # The key identifies the text as base64. Without this prefix, a short text would be read as a path.
        if name == "base64" and isinstance(value, str) and not value.startswith("data:"):
            return f"data:;base64,{value}"
        if name == "bytes" and isinstance(value, str):
            return f"data:;base64,{value}"
        return value
    return None


def _unreadable(path: str, error: OSError, max_bytes: int = 0) -> BadImage:
    """Return the reason why an image file cannot be read. Raises StorageError if storage does not answer."""
    trouble = bounded_reads.trouble(path, error)
    if trouble is not None:
        raise trouble from error
    if isinstance(error, FileNotFoundError):
        return BadImage("does not exist")
    if max_bytes and "larger than" in str(error):
        return BadImage(f"is larger than data.max_image_bytes={max_bytes}")
    return BadImage(f"cannot be read ({error.strerror or error})")
