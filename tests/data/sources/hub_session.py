"""Open datasets of a fake hub in a separate process, because the library reads its settings on import.

Prints one JSON object with the result of each case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fake_hub import Hub

SECRET = "hf_thisIsTheSecretOfTheTest"


def main(home: str) -> None:
    hub = Hub()
    os.environ |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": home,
        "HF_TOKEN": SECRET,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.pop(name, None)
    from shardtrain.data.sources import (
        Request,
        Table,
        c4,
        c4_mini,
        c4_validation,
        every_row,
        huggingface,
        place_of,
    )

    def case(module: object, **options: object) -> dict[str, object]:
        try:
            source = module.open_source(Request(**options))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        rows = list(every_row(source))
        return {
            "table": isinstance(source, Table),
            "shards": getattr(source, "num_shards", None),
            "texts": [row["text"] for _, row in (rows[0], rows[-1])],
            "rows": len(rows),
            "files": dict(source.files()),
            "place": place_of(source, rows[-1][0]),
        }

    results = {
        "c4": case(c4),
        "c4 de": case(c4, subset="de", streaming=False),
        "c4 no subset": case(c4, subset="xx"),
        "c4 no split": case(c4, split="nope"),
        "c4 part": case(c4, split="validation[:3]", streaming=False),
        "c4 part streamed": case(c4, split="validation[:3]"),
        "c4_validation": case(c4_validation),
        "c4_mini": case(c4_mini),
        "c4_mini streamed": case(c4_mini, streaming=True),
        "c4_mini split": case(c4_mini, split="validation"),
        "c4_mini subset": case(c4_mini, subset="de"),
        "script": case(huggingface, path="org/script"),
    }
    for owner in ("none", "closed", "gated", "busy", "broken"):
        for streaming in (False, True):
            results[f"{owner} {streaming}"] = case(
                huggingface, path=f"{owner}/set", streaming=streaming
            )
    hub.gone = True
    results["gone"] = case(c4)
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    results["offline streamed"] = case(c4)
    results["tokens"] = sorted(hub.tokens)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
