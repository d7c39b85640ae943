"""Work of a vision tower for the images of a row: its patches, image tokens and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardtrain.models import architecture


@dataclass(frozen=True)
class ImageWork:
    """Work for the images of one row.

    Attributes:
        sequences: number of images or tiles. Patches attend only to patches of the same image or tile.
        patches: number of patches in all sequences.
        tokens: number of tokens that represent the images in the text.
    """

    sequences: int = 0
    patches: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class VisionTower:
    """Sizes of a vision tower.

    Attributes:
        dim: features of a patch.
        heads: number of attention heads.
        patch_size: height and width of a patch in pixels.
    """

    dim: int
    heads: int
    patch_size: int

    @staticmethod
    def of(folder: str) -> VisionTower | None:
        """Return the sizes in a folder's config.json. None if it has no vision tower of known sizes."""
        config = getattr(architecture.read(folder), "vision_config", None)
        dim = _size(config, "hidden_size", "embed_dim")
        heads = _size(config, "num_attention_heads", "num_heads")
        patch_size = _size(config, "patch_size")
        if not dim or not heads or not patch_size:
            return None
        return VisionTower(dim, heads, patch_size)

    def count(self, pixels: Sequence[int], num_images: int, num_tokens: int) -> ImageWork:
        """Return the work for a row, from the shape of the pixels that a processor returns for its images."""
        # Qwen's processors return the patches of all images, (P, features).
        if len(pixels) == 2:
            return ImageWork(num_images, pixels[0], num_tokens)
        # Other processors return images or tiles, (..., channels, height, width).
        *leading, _, height, width = pixels
        sequences = math.prod(leading)
        patches = (height // self.patch_size) * (width // self.patch_size)
        return ImageWork(sequences, sequences * patches, num_tokens)


def _size(config: Any, *names: str) -> int:
    """Return the first of the fields ``names`` that a config has as an integer, or 0."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


@dataclass(frozen=True)
class ImageFlops:
    """FLOPs of forward and backward of the modules that process images.

    A trained weight needs 6 FLOPs per patch or token. A frozen weight needs 4, because it needs no gradient.
    If all weights are frozen, each needs 2, because there is no backward pass.

    Attributes:
        per_patch: FLOPs per patch in the vision tower, without attention.
        per_image_token: FLOPs per image token in the modules after the vision tower.
        per_patch_pair: FLOPs of attention per pair of patches of a sequence.
    """

    per_patch: int
    per_image_token: int
    per_patch_pair: int

    @staticmethod
    def of(model: Any, tower: VisionTower) -> ImageFlops:
        """Count the weights of an unsharded model of ``models/transformers.py``."""
        modules: Mapping[str, nn.Module] = model.image_modules
        parameters = [weight for module in modules.values() for weight in module.parameters()]
        is_trained = any(weight.requires_grad for weight in parameters)
        flops_of_frozen = 4 if is_trained else 2
        per_patch = 0
        per_image_token = 0
        blocks = model.tower_blocks
        for path, module in modules.items():
            for name, child in module.named_modules(prefix=path):
                # Looking up positions needs no FLOPs.
                if isinstance(child, nn.Embedding):
                    continue
                flops = 0
                for weight in child.parameters(recurse=False):
                    flops_per_weight = 6 if weight.requires_grad else flops_of_frozen
                    flops += weight.numel() * flops_per_weight
                # Blocks of the tower and the convolution before them process patches.
                is_in_block = any(f"{name}.".startswith(f"{block}.") for block in blocks)
                if is_in_block or isinstance(child, nn.Conv2d | nn.Conv3d):
                    per_patch += flops
                else:
                    per_image_token += flops
        per_patch_pair = (12 if is_trained else 4) * len(blocks) * tower.dim
        return ImageFlops(per_patch, per_image_token, per_patch_pair)

    def per_row(self, work: ImageWork) -> float:
        """Return the FLOPs of one row. Each patch attends to all patches of its sequence."""
        if not work.sequences:
            return 0.0
        patches_per_sequence = work.patches / work.sequences
        per_patch = self.per_patch + self.per_patch_pair * patches_per_sequence
        return work.patches * per_patch + work.tokens * self.per_image_token
