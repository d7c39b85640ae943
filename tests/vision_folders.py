"""Tiny random models that read images, with their processors and a tokenizer, and rows with images for them."""

from __future__ import annotations

import functools
import io
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_tokenizers import bpe_folder

NAMES = ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3")
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
_NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 376,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_TOKENS = {
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}
IMAGE = {
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    "llama4": "<|image|>",
}
"""Text that the chat template writes for an image."""


@functools.cache
def vision_folder(name: str) -> Path:
    """Return the folder of an architecture: weights, tokenizer, chat template and processor."""
    folder = Path(tempfile.mkdtemp(prefix="shardtrain-vision-")) / name
    config, tokens, files, options = globals()[f"_{name}"]()
    bpe_folder(
        folder,
        special=("<s>", "</s>", "<pad>", *tokens),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE.replace("IMAGE", IMAGE[name]),
        **options,
    )
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    save_model(folder, config)
    return folder


def save_model(folder: Path, config: Any) -> None:
    """Write random weights. Norms and biases are random too. Otherwise a missing one would not change the result."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.1
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise * 2)
    model.save_pretrained(folder)


def _llava() -> tuple[Any, Sequence[str], dict[str, Any], dict[str, Any]]:
    import transformers

    vision = transformers.CLIPVisionConfig(**{**_VISION, "num_hidden_layers": 3})
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=3,
        vision_feature_layer=-2,
    )
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "resample": 3,
        **_NORMAL,
        **_STEPS,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    return config, ("<image>",), files, {}


def _qwen(name: str, patch: int, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    import transformers

    cls = getattr(transformers, f"{name}Config")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = cls(
        text_config={**_TEXT, "rope_parameters": {**rope, **text}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": patch,
            **vision,
        },
        **_QWEN_TOKENS,
    )
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{name}Processor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": (2 * patch) ** 2,
        "max_pixels": 9 * (2 * patch) ** 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return config, tokens, {"preprocessor_config.json": images}, {}


def _qwen2_5_vl() -> Any:
    return _qwen("Qwen2_5_VL", 14, {}, {"window_size": 56, "fullatt_block_indexes": [1]})


def _qwen3_vl() -> Any:
    vision = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config, *rest = _qwen("Qwen3VL", 16, {"mrope_interleaved": True}, vision)
    config.text_config.head_dim = 8
    return config, *rest


def _smolvlm() -> Any:
    import transformers

    text = {name: value for name, value in _TEXT.items() if name != "bos_token_id"}
    config = transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=_VISION,
        scale_factor=2,
        image_token_id=3,
        pad_token_id=2,
    )
    images = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        **_NORMAL,
        **_STEPS,
    }
    processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    return config, tokens, files, {}


def _gemma3() -> Any:
    import transformers

    config = transformers.Gemma3Config(
        text_config={
            **_TEXT,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=4,
        boi_token_index=3,
        eoi_token_index=5,
    )
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 2,
        "do_pan_and_scan": None,
        **_NORMAL,
        **_STEPS,
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    tokens = {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    }
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    return config, tuple(tokens.values()), files, {**tokens, "extra_special_tokens": tokens}


def _llama4() -> Any:
    """Return a tiny Llama 4 with experts in every second layer. Its processor needs torchvision."""
    import transformers

    text = {**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8}
    text |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 64, "no_rope_layers": [1, 0]}
    vision = {
        **_VISION,
        "vision_output_dim": 32,
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    config = transformers.Llama4Config(
        text_config=text,
        vision_config=vision,
        image_token_index=3,
        boi_token_index=4,
        eoi_token_index=5,
    )
    images = {
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 32, "width": 32},
        "max_patches": 4,
        "resize_to_max_canvas": False,
        **_NORMAL,
        **_STEPS,
    }
    processor = {"processor_class": "Llama4Processor", "patch_size": 8}
    tokens = ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>")
    tokens += ("<|tile_x_separator|>", "<|tile_y_separator|>")
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    return config, tokens, files, {}


SIZES = ((64, 40), (30, 90), (28, 28), (77, 33))
"""Width and height of the images that ``rows_with_images`` writes."""


def pixels(number: int) -> np.ndarray:
    width, height = SIZES[number]
    return np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)


def png(number: int) -> bytes:
    """Return one of the images as a PNG file."""
    return encoded("PNG", number)


def encoded(kind: str, number: int = 0, **options: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, kind, **options)
    return file.getvalue()


def rows_with_images(folder: Path, counts: Sequence[int] = (1, 0, 2, 1, 0, 1, 0, 2)) -> Path:
    """Write images and a JSONL file of questions about them: ``counts`` has the number of images of each row."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(SIZES)):
        (folder / f"{number}.png").write_bytes(png(number))
    rows = []
    for row, count in enumerate(counts):
        parts: list[dict[str, str]] = [{"type": "image"}] * count
        parts = [*parts, {"type": "text", "text": f"the cat number {row}?"}]
        answer = "Hello! " * (1 + row % 3) + f"well, {row}"
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
        images = [f"{(row + number) % len(SIZES)}.png" for number in range(count)]
        rows.append({"messages": messages, "images": images})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
