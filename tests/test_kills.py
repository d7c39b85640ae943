"""A run that is killed repeatedly sees every sample of an epoch exactly once."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
from tiers import cases
from tiny import shallow_config

from shardtrain import data
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.train import trainer

STEPS = 60
TEXT = "".join(random.Random(1).choices("abcdefghij \n", k=STEPS * 4 * 16 - 9))


def config_of(folder: Path, kind: str) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"text": TEXT[start : start + 50]} for start in range(0, len(TEXT), 50)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={
            "dataset": "jsonl",
            "dataset_path": str(folder / "data.jsonl"),
            "seq_len": 16,
            "local_batch_size": 4,
            "steps": 1000,
            "on_data_end": "stop",
        },
        data={"mode": kind, "readers": 4},
        checkpoint={"enable": True, "interval": 3, "keep_latest_k": 2},
    )


def live(config: Config) -> None:
    """Run until the end or a kill. Record each step with its samples in steps.jsonl."""
    folder = Path(config.job.dump_folder)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / f"store-{os.getpid()}"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    pulled: list[int] = []
    pull = data.DataLoader.__next__
    step = trainer.step

    def recorded_pull(stream: data.DataLoader) -> data.Batch:
        batch = pull(stream)
        pulled.extend(batch.sample_ids_B.tolist())
        return batch

    def recorded_step(run: trainer.Run) -> Any:
        pulled.clear()
        outcome = step(run)
        if outcome is not None:
            line = json.dumps({"step": run.state.step, "ids": pulled, "hash": run.state.order_hash})
            with (folder / "steps.jsonl").open("a") as file:
                file.write(line + "\n")
        return outcome

    data.DataLoader.__next__, trainer.step = recorded_pull, recorded_step  # type: ignore[method-assign]
    trainer.train(Loaded(config), World(0, 1, 0, torch.device("cpu")))


def steps_taken(folder: Path) -> list[dict[str, Any]]:
    file = folder / "steps.jsonl"
    if not file.exists():
        return []
    # a kill may truncate the last line
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def run_with_kills(folder: Path, kind: str, kills: int) -> list[dict[str, Any]]:
    config = config_of(folder, kind)
    dice = random.Random(5)
    for life in range(kills + 1):
        process = multiprocessing.get_context("fork").Process(
            target=live, args=(config,), daemon=True
        )
        process.start()
        if life < kills:
            # Kill the run at a random moment of one of its next five steps or their saves.
            wanted = len(steps_taken(folder)) + dice.randrange(1, 6)
            deadline = time.monotonic() + patience.seconds(120)
            while (
                len(steps_taken(folder)) < wanted
                and process.is_alive()
                and time.monotonic() < deadline
            ):
                time.sleep(0.002)
            time.sleep(dice.random() * 0.03)
            process.kill()
        process.join(patience.seconds(120))
        assert not process.is_alive()
    assert process.exitcode == 0
    return steps_taken(folder)


@pytest.mark.parametrize("kills", cases([6], nightly=[20]))
@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_kills_neither_repeat_nor_lose_a_sample(kind: str, kills: int, tmp_path: Path) -> None:
    undisturbed = run_with_kills(tmp_path / "undisturbed", kind, kills=0)
    killed = run_with_kills(tmp_path / "killed", kind, kills=kills)
    assert len(killed) > len(undisturbed), "no kill cost a step: the test kills too late"

    final = {entry["step"]: entry for entry in killed}  # a repeated step replaces the lost one
    assert [final[step] for step in sorted(final)] == undisturbed
    for entry in killed:
        assert entry == final[entry["step"]], "a repeated step read other samples"

    counts: Counter[int] = Counter()
    for entry in final.values():
        counts.update(sample for sample in entry["ids"] if sample >= 0)
    assert set(counts.values()) == {1}
    if kind == "memory":
        assert sorted(counts) == list(range(len(counts)))
