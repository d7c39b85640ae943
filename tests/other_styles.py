"""Model files in other people's styles, and what is not possible with them: for laws about files we did not write."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "models" / "others"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))

# file -> mesh -> why it is not possible there: reasons that tests/models/test_others.py finds true of the engine too
NOT_POSSIBLE = {
    "falcon": {"tp=2": "does not divide the 1 KV heads"},
    "rwkv": {"cp=2": "names no attention core"},
    "sinks": {"cp=2": "is given more than queries, keys, values"},
    "t5_bias": {"cp=2": "is given more than queries, keys, values"},
}
