"""Model files in the styles of other projects, and the meshes that they do not support."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "models" / "others"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))

NEWER = (
    *(
        "phi",
        "falcon40b",
        "gemma3",
        "minicpm",
        "ngpt",
        "differential",
        "temperature",
        "olmo2_grouped",
        "dense_moe",
    ),
    *("lfm", "kerple", "dynamic_tanh", "nemotron", "stablelm2", "layer_scale"),
    *("mamba", "retnet", "xlstm", "hyena", "deltanet", "griffin", "depths", "gated_attention"),
)
"""Files for nightly cases on fewer meshes, in addition to NO_CHAIN."""
NO_CHAIN = ("unet", "value_residual", "per_layer_embeddings", "looped")

AMPLIFYING = ("mamba", "retnet", "xlstm", "deltanet")
"""Files that amplify rounding errors. verify widens its tolerance by the effect of one unit in the last place."""
NO_ATTENTION = ("lfm", "rwkv", "mamba", "retnet", "xlstm", "hyena", "deltanet")

# For each file, unsupported meshes and a part of the reason that verify gives.
# tests/models/test_others.py proves that each restriction is necessary.
NOT_POSSIBLE = {
    **{name: {"pp=2": "forward is a chain"} for name in NO_CHAIN},
    **{name: {"cp=2": "names no attention core"} for name in NO_ATTENTION},
    "griffin": {"cp=2": "outside of the attention core"},
    "kerple": {"cp=2": "receives other arguments than queries, keys, values"},
    "falcon": {"tp=2": "does not divide the 1 KV heads"},
    "sinks": {"cp=2": "receives other arguments than queries, keys, values"},
    "t5_bias": {"cp=2": "receives other arguments than queries, keys, values"},
}
