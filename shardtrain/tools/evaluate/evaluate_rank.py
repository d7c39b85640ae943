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
from shardtrain.utils.redact import visible


def run(options: EvaluateOptions) -> None:
    """Run ``evaluate`` as one rank of the job that the environment describes.

    Raises:
        ShardtrainError: an error that the user can correct.
    """
    loaded = load_config(options.source, options.config, options.tokenizer)
    with join(options.device or loaded.config.training.device) as world:
        use_fastest_kernels(loaded.config, world.device)
        is_first = world.rank == 0
        # Only rank 0 reports progress.
        heartbeat_seconds = None if is_first else 0
        with heartbeat(f"opening {options.source}", heartbeat_seconds):
            opened = open_model(
                options.source,
                options.config,
                options.dtype,
                world,
                tokenizer_path=options.tokenizer,
                step=options.step,
                use_ema=options.use_ema,
            )
            opened = opened.with_data(**options.data_options)
        if is_first:
            _say(opened.name)

        results: dict[str, Any] = {"model": opened.name}
        sections = _sections(options, opened)
        if sections:
            results["sets"] = {}
        for name, section in sections.items():
            progress = sets.RowsRead()
            with heartbeat(f"measuring {name}", heartbeat_seconds, progress=progress.text):
                # The run's validation set has the run's [data] options. Another dataset may have other columns.
                opened_for_set = opened
                if options.data:
                    opened_for_set = sets.row_by_row(opened, section, options.data_options)
                row_format = opened_for_set.config.data.format
                if is_first and row_format != opened.config.data.format:
                    _say(f'{name}: data.format="{row_format}", by its columns')
                results["sets"][name] = sets.measure(opened_for_set, section, progress)
            if is_first and not options.data:
                steps = opened.config.validation.steps
                _say(f"{name}: {progress.text()} (validation.steps={steps})")
        if options.tasks:
            from shardtrain.tools.evaluate import tasks

            results["tasks"] = tasks.measure(opened, options, is_first=is_first)
        if not is_first:
            return

        text = json.dumps(results, indent=2, allow_nan=False)
        print(text)
        if options.output is not None:
            with storage_errors.writing(options.output, "name another file"):
                files.write_durable(options.output, (text + "\n").encode())


def _say(text: str) -> None:
    line = visible(f"shardtrain evaluate: {text}", lines=False)
    print(line, file=sys.stderr, flush=True)


def _sections(options: EvaluateOptions, opened: OpenedModel) -> dict[str, Validation]:
    """Return the datasets by name: those of ``--data``, or [validation] without ``--tasks``."""
    config = opened.config
    if options.data:
        seq_len = sets.seq_len_of(opened, options)
        sections = {}
        for name, path in options.data.items():
            sections[name] = sets.section_of(path, options.batch_size, seq_len)
        return sections
    if options.tasks:
        return {}
    # Only the validation set of the run remains.
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
