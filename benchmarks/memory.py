"""Measured and planned memory of a training step: memory.py [--output FILE.json].

Counts the bytes of live tensor storages on each rank, in the second of two steps on a CPU. It is the
measurement that tests/tools/plan/test_measured_memory.py compares with the plan. The model is a Llama of 4
layers of width 128, with sequences of 512 tokens and 8 rows over all ranks,
in bfloat16 unless stated otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ranks import run_ranks
from tiny import tiny_config

from shardtrain.config.schema import Model

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location(
        "measured", ROOT / "tests/tools/plan/test_measured_memory.py"
    )
    assert spec is not None
    assert spec.loader is not None
    law = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(law)
    rows = []
    for name, size, sections in (
        ("one process, float32", 1, {"training": {"mixed_precision_param": "float32"}}),
        ("one process", 1, {}),
        ("... recompute selective, by operation", 1, law.PER_OPERATION),
        ("... recompute full", 1, law.FULL),
        ("DDP 2", 2, law.mesh(data_parallel_replicate_degree=2, data_parallel_shard_degree=1)),
        ("FSDP 2", 2, {}),
        ("FSDP 4", 4, {}),
        ("FSDP 4, recompute full", 4, law.FULL),
        ("TP 2", 2, law.mesh(tensor_parallel_degree=2)),
        ("CP 2", 2, law.mesh(context_parallel_degree=2)),
        ("PP 2, 1F1B", 2, law.piped("1F1B")),
        ("PP 2, GPipe", 2, law.piped("GPipe")),
    ):
        degrees = sections.get("parallelism", {})
        # Number of ranks that read the same rows. Every mesh trains eight rows per step.
        ranks_per_batch = degrees.get("tensor_parallel_degree", 1)
        ranks_per_batch *= degrees.get("context_parallel_degree", 1)
        ranks_per_batch *= degrees.get("pipeline_parallel_degree", 1)
        training = {"seq_len": 512, "mixed_precision_param": "bfloat16", "global_batch_size": -1}
        training["local_batch_size"] = 8 * ranks_per_batch // size
        training |= sections.get("training", {})
        config = tiny_config(**{**sections, "training": training})
        config = dataclasses.replace(config, model=Model(**law.LLAMA))
        measured = run_ranks(size, law.measured_bytes, config)
        planned = law.planned_bytes(config, size)
        # A plan has one entry per pipeline stage, a measurement one per rank.
        ranks_per_stage = size // len(planned)
        for stage, planned_bytes in enumerate(planned):
            first = stage * ranks_per_stage
            measured_bytes = max(measured[first : first + ranks_per_stage])
            suffix = f", rank {stage}" if len(planned) > 1 else ""
            rows.append(
                {
                    "name": name + suffix,
                    "ranks": size,
                    "measured_bytes": measured_bytes,
                    "planned_bytes": planned_bytes,
                }
            )
            print(rows[-1], flush=True)
    if options.output:
        results = {"torch": torch.__version__, "rows": rows}
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
