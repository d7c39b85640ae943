"""One ``.bin`` file as safetensors, in a process of its own that ``legacy.py`` starts and bounds.

A ``.bin`` is a pickle. PyTorch reads it here with ``weights_only``: an unpickler that knows the few names that tensors
are made of, and refuses every other. Whatever goes wrong is one line on standard error and exit status 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def main(source: str, target: str) -> int:
    """Convert one file; gives the exit status."""
    import torch

    try:
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        _write(found, Path(target))
    except MemoryError:
        return _refuse("it asks for more memory than such a file can need")
    except Exception as error:  # a hostile file may raise anything
        return _refuse(" ".join(str(error).split())[:300] or type(error).__name__)
    return 0


def _write(found: Any, target: Path) -> None:
    import torch

    from shardtrain.checkpoint import files
    from shardtrain.checkpoint.safetensors_header import TYPES, header

    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"it holds a {type(found).__name__}, and no table of tensors")
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in found.items():
        dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        if not isinstance(name, str) or type(tensor) is not torch.Tensor or dtype not in TYPES:
            raise ValueError(f"its entry {str(name)[:100]!r} is not a tensor of a type that weights have")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"its tensor {name[:100]!r} is not a dense one on the CPU")
        kinds[name] = dtype, tuple(tensor.shape)
    # A few bytes may pretend to be a tensor of any size: strides of 0 repeat them. Tied weights share a storage, which
    # counts once, and may be written twice
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    storages = [tensor.untyped_storage() for tensor in found.values()]
    stored = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if claimed > 2 * stored + 2**20:
        raise ValueError(f"its tensors would be {claimed} bytes, and it holds {stored}")

    def blocks() -> Iterator[memoryview]:
        yield header(kinds)
        for tensor in found.values():
            yield memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    files.write_hashed(target, blocks())


def _refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2])
    sys.stderr.flush()
    os._exit(status)  # nothing that was loaded gets another turn
