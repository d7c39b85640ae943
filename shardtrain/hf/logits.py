"""Compare the logits of an exported folder in transformers with the logits of the checkpoint."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shardtrain import models
from shardtrain.checkpoint import manifest, tensors
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.hf import as_is
from shardtrain.hf.hf_export import Export, Writer
from shardtrain.hf.hub_model import hub_of
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.models import architecture as architectures
from shardtrain.utils.errors import ConfigError, ShardtrainError
from shardtrain.utils.units import format_bytes

TOLERANCE = 1e-4
"""Maximum error relative to the largest logit, in float32. The two models compute in different orders."""
_TOKENS = 64
_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1905, four papers changed physics; "
    "def f(x): return x + 1 is code."
)


def why_not(wanted: Export) -> str:
    """Return the reason why logits cannot be compared, or "" if they can be."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if "quantization_config" in read_json(wanted.output / CONFIG):
        return "transformers would keep the quantized weights"
    stored = manifest.read(wanted.checkpoint)
    weights = [tensor for name, tensor in stored.tensors.items() if name.startswith(WEIGHTS_PREFIX)]
    needed = 3 * sum(torch.Size(tensor.shape).numel() * 4 for tensor in weights)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= free:
        return ""
    return f"two float32 copies require {format_bytes(needed)} of memory, and {format_bytes(free)} are free"


@torch.no_grad()
def largest_error(wanted: Export) -> tuple[float, float]:
    """Return the largest difference of logits over a short text, and the largest absolute logit.

    Both models run in float32. The input is random if the folder has no usable ``tokenizer.json``.

    Raises:
        ConfigError: transformers fails to load or run the model.
    """
    tokens_BT = _tokens(wanted.output, wanted.config.vocab_size)
    # Transformers takes the scores of a row at its last token that is not padding, so the input must not
    # contain padding.
    if wanted.labels:
        pad = read_json(wanted.output / CONFIG).get("pad_token_id")
        tokens_BT = tokens_BT[:1]
        if pad is not None:
            tokens_BT = tokens_BT.masked_fill(tokens_BT == pad, 0 if pad else 1)
    if as_is.is_as_is(wanted.module):
        model = wanted.module.Model(wanted.config)
        read = _reader(wanted)
        tensors = {}
        for name, _ in (*model.named_parameters(), *model.named_buffers()):
            tensors[name] = read(name)
        with _named(wanted.output):
            ours, theirs = as_is.both_logits(model, tensors, wanted.output, tokens_BT)
    else:
        positions_BT = torch.arange(tokens_BT.size(1)).expand_as(tokens_BT)
        ours = own_model(wanted)(tokens_BT, positions_BT)
        if wanted.labels:
            ours = ours[:, -1]
        hub = hub_of(wanted.module, str(wanted.checkpoint), len(wanted.labels))
        with _named(wanted.output):
            theirs = _theirs(wanted.output, hub.architecture, tokens_BT)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


@torch.no_grad()
def own_model(wanted: Export) -> nn.Module:
    """Return the checkpoint's model in float32 on the CPU, with weights rounded to the exported dtype."""
    read = _reader(wanted)
    # Layers of multi-token prediction do not affect the logits.
    model: nn.Module = wanted.module.Model(models.without_mtp(wanted.config))
    if wanted.labels:
        models.replace_head(model, wanted.module.LAYOUT, len(wanted.labels), "cpu")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(read(name))
    return model.float().eval()


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Convert exceptions of transformers to a ConfigError that suggests a workaround."""
    try:
        yield
    except ShardtrainError:
        raise
    except Exception as error:
        cause = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{folder}: transformers cannot compute logits: {type(error).__name__}: {cause}; "
            f"check its {CONFIG} for unusual values, or use --check=weights"
        ) from error


def _reader(wanted: Export) -> Callable[[str], Tensor]:
    writer = Writer(wanted)

    def read(name: str) -> Tensor:
        tensor = tensors.read_whole(writer.stored, wanted.checkpoint, WEIGHTS_PREFIX + name)
        return tensor.to(writer.dtype_of(name))

    return read


def _tokens(folder: Path, vocab_size: int) -> Tensor:
    file = folder / "tokenizer.json"
    if file.is_file() and importlib.util.find_spec("tokenizers") is not None:
        from tokenizers import Tokenizer

        try:
            ids = Tokenizer.from_file(str(file)).encode(_TEXT).ids[:_TOKENS]
        except Exception:
            # If the tokenizer is broken, use random tokens. Other commands report the error.
            ids = []
        if len(ids) > 1 and max(ids) < vocab_size:
            return torch.tensor([ids])
    return torch.randint(0, vocab_size, (2, _TOKENS), generator=torch.Generator().manual_seed(0))


def _theirs(folder: Path, architecture: str, tokens_BT: Tensor) -> Tensor:
    import transformers

    # Code in the folder is not run: the class is part of transformers, and ``architectures.read`` removes
    # references to code from config.json. ``local_files_only`` prevents requests to the hub.
    config = architectures.read(str(folder))
    with as_is.without_progress_bar():
        model = getattr(transformers, architecture).from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    logits: Tensor = model.eval()(tokens_BT).logits
    return logits
