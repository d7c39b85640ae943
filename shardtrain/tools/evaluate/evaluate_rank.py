"""Evaluate a model as one rank. Rank 0 prints the results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from shardtrain.checkpoint import files
from shardtrain.config.schema import Validation
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.tools.evaluate import sets
from shardtrain.tools.evaluate.evaluate_request import EvaluateOptions
from shardtrain.tools.generate.answer import join
from shardtrain.tools.generate.locate_checkpoint import load_config
from shardtrain.tools.generate.trained_model import OpenedModel, open_model
from shardtrain.train.build import use_fastest_kernels
from shardtrain.utils import storage_errors
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat


def run(asked: EvaluateOptions) -> None:
    """Run ``evaluate`` as one rank of the job that the environment describes.

    Raises:
        ShardtrainError: an error that the user can correct.
    """
    loaded = load_config(asked.source, asked.config, asked.tokenizer)
    with join(asked.device or loaded.config.training.device) as world:
        use_fastest_kernels(loaded.config, world.device)
        often = None if world.rank == 0 else 0
        with heartbeat(f"opening {asked.source}", often):
            opened = open_model(
                asked.source, asked.config, asked.dtype, world, tokenizer_path=asked.tokenizer, step=asked.step
            )
            opened = opened.with_data(**asked.data_options)
        if world.rank == 0:
            print(f"shardtrain evaluate: {opened.name}", file=sys.stderr, flush=True)
        wanted = _sections(asked, opened)
        found: dict[str, Any] = {"model": opened.name}
        if wanted:
            found["sets"] = {}
        for name, section in wanted.items():
            read = sets.RowsRead()
            with heartbeat(f"measuring {name}", often, far=read.far):
                of_set = sets.row_by_row(opened, section, asked.data_options) if asked.data else opened
                form = of_set.config.data.format
                if world.rank == 0 and form != opened.config.data.format:
                    print(f'shardtrain evaluate: {name}: data.format="{form}", by its columns', file=sys.stderr)
                found["sets"][name] = sets.measure(of_set, section, read)
            if world.rank == 0 and not asked.data:
                steps = opened.config.validation.steps
                print(f"shardtrain evaluate: {name}: {read.far()} (validation.steps={steps})", file=sys.stderr)
        if asked.tasks:
            from shardtrain.tools.evaluate import tasks

            found["tasks"] = tasks.measure(opened, asked, is_first=world.rank == 0)
        if world.rank > 0:
            return
        text = json.dumps(found, indent=2, allow_nan=False)
        print(text)
        if asked.output is not None:
            with storage_errors.writing(asked.output, "name another file"):
                files.write_durable(asked.output, (text + "\n").encode())


def _sections(asked: EvaluateOptions, opened: OpenedModel) -> dict[str, Validation]:
    """Return the datasets by name: those of ``--data``, or [validation] without ``--tasks``."""
    config = opened.config
    if asked.data:
        seq_len = sets.seq_len_of(opened, asked)
        return {name: sets.section_of(path, asked.batch_size, seq_len) for name, path in asked.data.items()}
    if asked.tasks:
        return {}
    if not config.validation.dataset:
        raise ConfigError(
            Problem(
                "--data",
                None,
                rule="is not set, the run has no [validation], and --tasks is not set",
                fix="write it like --data books=books.jsonl",
            )
        )
    if config.task.name not in OF_NEXT_TOKENS:
        raise ConfigError(
            Problem(
                "--data",
                None,
                rule=f'is not set, and task.name="{config.task.name}" has its own loss on [validation]',
                fix='run "shardtrain test" for that loss, or add a dataset like --data books=books.jsonl',
            )
        )
    return {"validation": sets.section_of_run(opened)}
