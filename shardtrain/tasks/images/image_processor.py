"""Open the processor of a Hugging Face folder, which converts texts and images to inputs of its model.

Only classes of the installed ``transformers`` are used. Image processors run on PIL and NumPy. Only an
image processor without a PIL version requires torchvision. Videos are not supported, so processors are
opened without their video processor.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.image_decoder import INSTALL, Pixels
from shardtrain.hub_formats.config_json import read_json
from shardtrain.hub_formats.format import CODE
from shardtrain.models import architecture
from shardtrain.tasks.images.image_work import ImageWork, VisionTower
from shardtrain.utils import bounded_reads, libraries
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import without_torchao_warnings

FILES = ("preprocessor_config.json", "processor_config.json")
_TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.json"
_OPTION = "model.hf_assets_path"
_CACHED_SIZES = 4096


class Replacement(NamedTuple):
    """The text that replaces the placeholder of an image, at ``[start, stop)`` of the original text."""

    start: int
    stop: int
    text: str


class ImageProcessor:
    """The processor of a folder.

    Attributes:
        folder: the Hugging Face folder.
        placeholder: text that a chat template writes for an image.
        pad_id: token that fills the ends of rows. No other token attends to it.
        fingerprint: hash of the files that determine the inputs.
        row_inputs: names of image inputs whose first dim is the rows of a batch. The first dim of other
            image inputs is the images or patches of all rows.

    Raises:
        ConfigError: the folder has no processor for images, its files are invalid, or a library is missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._processor = _open(folder)
        self.placeholder: str = self._processor.image_token
        tokenizer = self._processor.tokenizer
        self.pad_id: int = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
        self.fingerprint = _fingerprint(folder)
        self.row_inputs = self._find_row_inputs()
        self._tower = VisionTower.of(folder)
        self._processed = lru_cache(_CACHED_SIZES)(self._process_black_images)

    def __reduce__(self) -> Any:
        # Pickle only the folder. A worker process opens it again.
        return ImageProcessor, (self.folder,)

    def _find_row_inputs(self) -> frozenset[str]:
        """Process two images, and return the names of the inputs that have one row for both."""
        images = [np.zeros((height, 64, 3), dtype=np.uint8) for height in (32, 64)]
        try:
            inputs = self.inputs(2 * self.placeholder, images)
        except Exception as error:  # a processor may raise anything for wrong values in its files
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            rule = (
                f"has a processor that fails on two images of 64 x 32 and 64 x 64 pixels ({reason})"
            )
            raise _refusal(self.folder, rule, "correct its files, or use another model") from error
        num_tokens = inputs["input_ids"].shape[1]
        names = set()
        for name, values in inputs.items():
            is_of_tokens = values.shape[1:2] == (num_tokens,) and values.ndim == 2
            if len(values) == 1 and not is_of_tokens:
                names.add(name)
        return frozenset(names)

    def chat_template(self) -> str | None:
        """Return the chat template of ``chat_template.json``, a file of older folders. None without this file."""
        path = Path(self.folder) / CHAT_TEMPLATE
        if not bounded_reads.is_present(path):
            return None
        template = read_json(path).get("chat_template")
        return template if isinstance(template, str) else None

    def replacements(self, text: str, sizes: Sequence[tuple[int, int]]) -> list[Replacement]:
        """Return the texts that replace the placeholders of a text, for images of these widths and heights.

        There must be one placeholder for each image.
        """
        places = []
        start = text.find(self.placeholder)
        while start >= 0:
            places.append(start)
            start = text.find(self.placeholder, start + len(self.placeholder))
        assert len(places) == len(sizes)
        if not places:
            return []
        replaced = []
        texts, _ = self._processed(tuple(sizes))
        for start, new in zip(places, texts, strict=True):
            replaced.append(Replacement(start, start + len(self.placeholder), new))
        return replaced

    def work(self, sizes: Sequence[tuple[int, int]]) -> ImageWork:
        """Return the work of the vision tower for a row with images of these widths and heights."""
        if not sizes:
            return ImageWork()
        _, work = self._processed(tuple(sizes))
        return work

    def _process_black_images(
        self, sizes: tuple[tuple[int, int], ...]
    ) -> tuple[list[str], ImageWork]:
        # The replacements and the number of patches depend only on the sizes of the row's images, so use
        # black images of these sizes.
        images = [np.zeros((height, width, 3), dtype=np.uint8) for width, height in sizes]
        text = self.placeholder * len(sizes)
        inputs = self._processor(
            text=[text],
            images=[images],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
        )
        texts = [str(place["replacement"]) for place in inputs["text_replacement_offsets"][0]]
        num_tokens = len(inputs["input_ids"][0])
        work = ImageWork(tokens=num_tokens)
        if self._tower is not None:
            work = self._tower.count(_shape(inputs["pixel_values"]), len(sizes), num_tokens)
        return texts, work

    def inputs(self, text: str, images: Sequence[Pixels]) -> dict[str, Any]:
        """Return the inputs of a row of a batch by their names, as tensors.

        Inputs of tokens have shape (1, T), such as ``input_ids`` and ``attention_mask``.

        Raises:
            ValueError: the processor rejects the images.
        """
        options: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "pt"}
        if images:
            options["images"] = [list(images)]
        return dict(self._processor(text=[text], **options))


def _open(folder: str) -> Any:
    """Return the processor object of transformers.

    Raises:
        ConfigError: see ``ImageProcessor``.
    """
    # Import the libraries first, so a missing one is reported by its name.
    with without_torchao_warnings():
        for name in ("transformers.models.auto.processing_auto", "transformers"):
            transformers = libraries.load(name, "task.name", "image_text", INSTALL)
    libraries.load("PIL.Image", "task.name", "image_text", INSTALL)

    # Check the files before transformers reads them.
    if not any(bounded_reads.is_present(Path(folder) / name) for name in FILES):
        rule = f"has neither {' nor '.join(FILES)}, so it has no processor for images"
        raise _refusal(folder, rule, "use the folder of a model that reads images")
    _check_files(folder)
    cls = _class_of(folder, transformers)
    if not hasattr(cls, "get_text_with_replacements"):
        rule = f"needs a newer version of transformers than {transformers.__version__}"
        raise ConfigError(Problem("task.name", "image_text", rule, f"pip install -U {INSTALL}"))

    # Open each part, and build the processor from them.
    options = {"local_files_only": True}
    try:
        parts = {
            "tokenizer": transformers.AutoTokenizer.from_pretrained(folder, **options),
            "image_processor": transformers.AutoImageProcessor.from_pretrained(
                folder, backend="pil", **options
            ),
        }
        values, _ = cls.get_processor_dict(folder, local_files_only=True)
        # Remove the audio tokenizer, because transformers would download it by its name.
        values.pop("audio_tokenizer", None)
        _omit_videos(cls)
        arguments = [parts.get(name) for name in cls.get_attributes()]
        processor = _ImagesOnly.of(cls).from_args_and_dict(arguments, values)
    except Exception as error:  # transformers may raise anything for a wrong file
        reason = " ".join(str(error).split())[:300]
        fix = "correct its files"
        if "torchvision" in reason.lower():
            fix = f"pip install torchvision, which {cls.__name__} requires"
        raise _refusal(folder, f"has a processor that cannot be opened ({reason})", fix) from error

    # The call may also return its unused arguments.
    if isinstance(processor, tuple):
        processor = processor[0]
    if not isinstance(getattr(processor, "image_token", None), str):
        rule = f"has a processor ({cls.__name__}) without a placeholder for images"
        raise _refusal(folder, rule, "use another model")
    return processor


def _check_files(folder: str) -> None:
    """Raise ConfigError if a file is not JSON, or names code that transformers might run."""
    for name in (*FILES, _TOKENIZER_CONFIG):
        path = Path(folder) / name
        if not bounded_reads.is_present(path):
            continue
        try:
            content = read_json(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        if any(CODE.search(key) for key in content):
            rule = f"has {name} that names its own code (auto_map), which is never run here"
            raise _refusal(folder, rule, "remove this key if transformers has the class")


def _class_of(folder: str, transformers: Any) -> Any:
    """Return the processor class that the folder's files name, or the class of its model_type."""
    for name in (*reversed(FILES), _TOKENIZER_CONFIG):
        path = Path(folder) / name
        wanted = None
        if bounded_reads.is_present(path):
            wanted = read_json(path).get("processor_class")
        if isinstance(wanted, str) and wanted.isidentifier():
            cls = getattr(transformers, wanted, None)
            if isinstance(cls, type) and issubclass(cls, transformers.ProcessorMixin):
                return cls
    mapping = transformers.models.auto.processing_auto.PROCESSOR_MAPPING
    config_class = type(architecture.read(folder))
    if config_class in mapping:
        return mapping[config_class]
    rule = f"has a model_type without a processor in transformers {transformers.__version__}"
    raise _refusal(folder, rule, "install a version with this processor, or use another model")


def _omit_videos(cls: Any) -> None:
    """Allow SmolVLM's processor without the library num2words, which it only needs for videos."""
    module = sys.modules[cls.__module__]
    if getattr(module, "num2words", "") is None:
        module.num2words = str  # type: ignore[attr-defined]


class _ImagesOnly:
    """Mixin for processor classes whose part for videos or sound is None."""

    def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
        """Accept a part of any class, including None."""
        return type(value)

    @staticmethod
    def of(cls: Any) -> Any:
        """Return a subclass of a processor class that accepts None for its parts."""
        return type(cls.__name__, (_ImagesOnly, cls), {"__module__": cls.__module__})


def _shape(values: Any) -> tuple[int, ...]:
    """Return the shape of an array, or of nested lists of arrays."""
    if hasattr(values, "shape"):
        return tuple(values.shape)
    return len(values), *_shape(values[0])


def _fingerprint(folder: str) -> str:
    """Return a hash of the processor's files."""
    contents: dict[str, Mapping[str, Any]] = {}
    for name in FILES:
        path = Path(folder) / name
        if bounded_reads.is_present(path):
            contents[name] = read_json(path)
    return hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()


def _refusal(folder: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(_OPTION, folder, rule, fix))
