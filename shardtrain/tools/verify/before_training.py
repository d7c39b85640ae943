"""What ``train`` has compared before its first step, in a process of its own: a small copy of a user's model file.

``python -m shardtrain.tools.verify.before_training CONFIG.toml`` reads the model and the mesh of a run from the file
and prints one JSON document of lists of sentences: refused, compared, noticed, left_out.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from shardtrain import config as configs
from shardtrain.config import Config, Loaded
from shardtrain.layout import TENSOR_STYLES
from shardtrain.tools import verify
from shardtrain.tools.verify import forked_workers, meshes, shrink
from shardtrain.tools.verify.meshes import MeshPlan
from shardtrain.tools.verify.verify_report import BLIND, MeshResult
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.temporary import temporary_folder

STEPS = 1
"""One update: what a second would show, a model that keeps state, is asked of the model alone."""


@dataclasses.dataclass
class VerifyVerdict:
    """``refused`` stops the run; ``compared``, ``noticed`` and ``left_out`` are lines of its log."""

    refused: list[str] = dataclasses.field(default_factory=list)
    compared: list[str] = dataclasses.field(default_factory=list)
    noticed: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)


def judge(config: Config) -> VerifyVerdict:
    """Compare a small copy of the configured model on the configured kinds of parallelism with one process."""
    loaded = _of_model_and_mesh(config)
    verdict = VerifyVerdict()

    # Meshes of up to eight ranks with the run's kinds of parallelism, and a small copy of the model for them. What a
    # small mesh or copy cannot do is left out: the run's own need not break that rule.
    plans: list[MeshPlan] = []
    for mesh in meshes.of_run(loaded):
        try:
            plans += meshes.requested(loaded, [mesh], ())
        except ConfigError as error:
            verdict.left_out.append(f"{mesh}: {error}")
    if not plans:
        return verdict
    small = verify.small_copy(plans, loaded)
    if small is not None and small["why"]:
        verdict.left_out.append(small["why"])
        return verdict
    task = shrink.prepare(plans, loaded, STEPS, full=False, own=small)
    verdict.left_out += [f"{one.name}: {one.problem}" for one in task.plans if one.problem]
    task = dataclasses.replace(task, plans=[one for one in task.plans if not one.problem])
    if not task.plans:
        return verdict

    # Probe the copy by itself, then compare each mesh with one process.
    from shardtrain.tools.verify import casts, probes
    from shardtrain.train import trainer

    kinds = {axis for one in task.plans for axis, degree in one.degrees.items() if degree > 1}
    if config.activation_checkpoint.mode != "none":
        kinds.add(probes.RECOMPUTE)
    # switched off in this process, casts are off in all that are forked from it
    with casts.off(), temporary_folder("verify") as folder:
        try:
            task, notes = verify.probe(task, Path(folder), kinds)
        except ConfigError as error:
            verdict.refused += str(error).splitlines()
            return verdict
        verdict.noticed += [note for note in notes if not note.startswith("dropout: off")]
        impossible = [one.problem for one in task.plans if one.problem]
        if impossible:
            verdict.refused += dict.fromkeys(line for problem in impossible for line in problem.splitlines())
            return verdict
        sizes = ", ".join(f"{name} {value}" for name, value in _changed(config, task.reference).items())
        copy = f"a copy with {sizes}" if sizes else "the model"
        try:
            for row in verify.verify(task, trainer, Path(folder)):
                _tell(row, copy, verdict)
        except ConfigError as error:  # the reference of one process fails
            verdict.refused += str(error).splitlines()
    return verdict


def _tell(row: MeshResult, copy: str, verdict: VerifyVerdict) -> None:
    if row.verdict == "same":
        verdict.compared.append(
            f"{copy} on {row.mesh} agrees with one process: loss {row.loss:.1e}, gradients {row.gradient:.1e}, "
            f"weights {row.weights:.1e} off" + (f"; {row.rounding}" if row.rounding else "")
        )
    elif row.cause.startswith(BLIND):
        verdict.left_out.append(f"{row.mesh}: {row.first}; {row.cause}")
    elif row.verdict == "differs":
        verdict.refused.append(f"on {row.mesh}, {row.first}; likely cause: {row.cause}; {_fix(row)}")
    elif any(word in row.cause for word in forked_workers.NO_ANSWER):
        verdict.left_out.append(f"{row.mesh}: {row.cause}")
    else:
        verdict.refused.append(f"on {row.mesh}: {row.cause}")


def _fix(row: MeshResult) -> str:
    """What to do about numbers that differ, as far as the module that is named tells."""
    word = re.search(r'which LAYOUT\.tensor calls "(\w+)"', row.cause)
    if word and word[1] in ("gather", "colwise"):
        return (
            "a colwise matrix is cut into equal stretches of rows, so order queries, keys and values by head "
            "(unflatten(-1, (-1, 3, head_dim))), or give each a linear of its own"
        )
    if word:
        return f'"{word[1]}" means {TENSOR_STYLES[word[1]]}: correct the word or the forward'
    return "correct the forward, or the words of LAYOUT, after docs/models.md"


def _changed(config: Config, small: Config) -> dict[str, object]:
    """Fields of the model that have another value in the small copy."""
    own = config.model.overrides
    return {name: value for name, value in small.model.overrides.items() if own.get(name) != value}


def _of_model_and_mesh(config: Config) -> Loaded:
    """The run's model, mesh and recomputation, under the default task, data and optimizer: these are not part of it."""
    plain = Config()
    recompute = config.activation_checkpoint
    if recompute.mode == "memory_budget":  # the compiler's
        recompute = dataclasses.replace(recompute, mode="full", visualize_memory_budget_pareto=False)
    training = dataclasses.replace(plain.training, seq_len=config.training.seq_len, device="cpu")
    model = dataclasses.replace(config.model, hf_assets_path=plain.model.hf_assets_path, tokenizer_path=None)
    config = dataclasses.replace(
        plain,
        model=dataclasses.replace(model, converters=[], print_after_conversion=False),
        training=training,
        parallelism=dataclasses.replace(config.parallelism, enable_async_tensor_parallel=False),
        activation_checkpoint=recompute,
        debug=dataclasses.replace(plain.debug, seed=config.debug.seed),
    )
    return dataclasses.replace(configs.load(None, []), config=config)


def main(words: Sequence[str]) -> int:
    """Print the verdict on the configuration file that is named."""
    print(json.dumps(dataclasses.asdict(judge(configs.load(words[0], []).config))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
