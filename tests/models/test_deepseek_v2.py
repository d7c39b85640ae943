"""DeepSeek-V2: published sizes and Hugging Face's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build as build_theirs
from hub_folders import save

from shardtrain.hf import importing
from shardtrain.hf.hub_model import recognise
from shardtrain.models import build, find, shape_of

SIZES = {"debugmodel": 33_014_016, "16B": 15_706_484_224, "236B": 235_741_434_880}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "236B": ("deepseek_v2", {"rope_parameters": YARN}),
    "Lite": ("deepseek_v2-greedy", {"rope_parameters": YARN}),
    "unscaled angles": ("deepseek_v2", {}),
    "a different epsilon, except in norms of latents": ("deepseek_v2", {"rms_norm_eps": 0.3}),
}


def test_every_flavor_has_its_published_size() -> None:
    module = find("deepseek_v2")
    for flavor in module.FLAVORS:
        model = build(module, shape_of(module, flavor, {}, "rmsnorm"))
        assert sum(p.numel() for p in model.parameters()) == SIZES[flavor], flavor


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_match_hugging_face(variant: str, tmp_path: Path) -> None:
    """Float32 logits of about 1 agree within 1e-5. A wrong formula would change them by at least 1e-2."""
    pytest.importorskip("transformers")
    family, changed = VARIANTS[variant]
    reference = build_theirs(family, **changed)
    folder = save(reference, tmp_path / "hf")
    description = recognise(folder)
    module = find(description.name)

    assert description.name == "deepseek_v2"

    model = module.Model(description.config).eval()
    parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    importing.fill(parameters, folder, module, description.config)
    tokens_BT = torch.randint(0, 260, (2, 24), generator=torch.Generator().manual_seed(1))
    logits_BTV = model(tokens_BT, torch.arange(24).expand(2, -1))
    expected_BTV = reference(tokens_BT).logits

    deviation = float(expected_BTV.std())
    assert deviation > 0.1, "the logits of a random model must differ"
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=1e-5 * deviation, rtol=1e-5)
