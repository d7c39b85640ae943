"""Verify a small copy of a user's model file before ``train`` starts. ``train`` runs this in a separate process.

``python -m shardtrain.tools.verify.before_training CONFIG.toml`` reads the model and the mesh of a run from the
file, and prints a JSON document with the fields of ``VerifyVerdict``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
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
from shardtrain.utils import stop_signals
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.temporary import temporary_folder

STEPS = 1
"""One update is sufficient, because the probes already find models that keep state between steps."""


@dataclasses.dataclass
class VerifyVerdict:
    """Messages of a verification.

    Attributes:
        refused: Faults. Any of them stops the run.
        compared: Meshes that agree with one process.
        noticed: Notes about the model.
        left_out: Meshes or sizes that could not be compared.
    """

    refused: list[str] = dataclasses.field(default_factory=list)
    compared: list[str] = dataclasses.field(default_factory=list)
    noticed: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)


def judge(config: Config) -> VerifyVerdict:
    """Compare a small copy of the configured model, on the configured kinds of parallelism, with
    one process.
    """
    loaded = _model_and_mesh_only(config)
    verdict = VerifyVerdict()
    task = _plan(loaded, verdict)
    if task is None:
        return verdict

    # Import PyTorch only when there is something to compare.
    from shardtrain.tools.verify import casts, probes
    from shardtrain.train import trainer

    # A broken promise that affects only other kinds of parallelism must not stop this run.
    kinds: set[str] = set()
    for plan in task.plans:
        kinds |= {axis for axis, degree in plan.degrees.items() if degree > 1}
    if config.activation_checkpoint.mode != "none":
        kinds.add(probes.RECOMPUTE)
    # Casts are disabled in this process, and therefore in all of its forks.
    with casts.off(), temporary_folder("verify") as folder:
        try:
            task, notes = verify.probe(task, Path(folder), kinds)
        except ConfigError as error:
            verdict.refused += str(error).splitlines()
            return verdict
        verdict.noticed += [note for note in notes if not note.startswith("dropout: off")]
        impossible = []
        for plan in task.plans:
            impossible += plan.problem.splitlines()
        if impossible:
            verdict.refused += dict.fromkeys(impossible)
            return verdict
        # Messages name the sizes in which the compared model is smaller.
        configured = config.model.overrides
        changed_sizes = []
        for name, value in task.reference.model.overrides.items():
            if configured.get(name) != value:
                changed_sizes.append(f"{name} {value}")
        copy = "the model"
        if changed_sizes:
            copy = f"a copy with {', '.join(changed_sizes)}"
        try:
            for row in verify.verify(task, trainer, Path(folder)):
                _add_result(row, copy, verdict)
        except ConfigError as error:  # training on one process fails
            verdict.refused += str(error).splitlines()
    return verdict


def _plan(loaded: Loaded, verdict: VerifyVerdict) -> shrink.VerifyTask | None:
    """Choose meshes of up to eight ranks with the run's kinds of parallelism, and a small copy of the model.

    A mesh or copy that is impossible at this size is added to ``verdict.left_out``, because the run's mesh
    may still be possible. Return None if nothing is left to compare.
    """
    plans: list[MeshPlan] = []
    for mesh in meshes.of_run(loaded):
        try:
            plans += meshes.requested(loaded, [mesh], ())
        except ConfigError as error:
            verdict.left_out.append(f"{mesh}: {error}")
    if not plans:
        return None
    small = verify.small_copy(plans, loaded)
    if small is not None and small["why"]:
        verdict.left_out.append(small["why"])
        return None
    task = shrink.prepare(plans, loaded, STEPS, full=False, small_copy=small)
    possible_plans = []
    for plan in task.plans:
        if plan.problem:
            verdict.left_out.append(f"{plan.name}: {plan.problem}")
        else:
            possible_plans.append(plan)
    if not possible_plans:
        return None
    return dataclasses.replace(task, plans=possible_plans)


def _add_result(row: MeshResult, copy: str, verdict: VerifyVerdict) -> None:
    """Add the message of one mesh to the verdict. ``copy`` describes the compared model."""
    if row.verdict == "same":
        text = (
            f"{copy} on {row.mesh} agrees with one process: loss {row.loss:.1e}, "
            f"gradients {row.gradient:.1e}, weights {row.weights:.1e} off"
        )
        if row.rounding:
            text = f"{text}; {row.rounding}"
        verdict.compared.append(text)
    elif row.cause.startswith(BLIND):
        verdict.left_out.append(f"{row.mesh}: {row.first}; {row.cause}")
    elif row.verdict == "differs":
        verdict.refused.append(
            f"on {row.mesh}, {row.first}; likely cause: {row.cause}; {_fix(row)}"
        )
    elif any(phrase in row.cause for phrase in forked_workers.NO_ANSWER):
        # A rank that was killed or did not answer in time is no evidence about the model.
        verdict.left_out.append(f"{row.mesh}: {row.cause}")
    else:
        verdict.refused.append(f"on {row.mesh}: {row.cause}")


def _fix(row: MeshResult) -> str:
    """Return the fix for a difference, depending on the style of the module that the cause names."""
    match = re.search(r'which LAYOUT\.tensor calls "(\w+)"', row.cause)
    if match is None:
        return "correct the forward, or the styles in LAYOUT, after docs/own_model.md"
    style = match[1]
    if style in ("gather", "colwise"):
        return (
            "a colwise matrix is cut into equal stretches of rows, so order queries, "
            "keys and values by head (unflatten(-1, (-1, 3, head_dim))), "
            "or use a separate linear for each"
        )
    return f'"{style}" means {TENSOR_STYLES[style]}: correct the style or the forward'


def _model_and_mesh_only(config: Config) -> Loaded:
    """Return a configuration with the run's model, mesh and recomputation, and default task, data
    and optimizer.
    """
    default = Config()
    recompute = config.activation_checkpoint
    if recompute.mode == "memory_budget":  # needs torch.compile
        recompute = dataclasses.replace(
            recompute, mode="full", visualize_memory_budget_pareto=False
        )
    training = dataclasses.replace(default.training, seq_len=config.training.seq_len, device="cpu")
    model = dataclasses.replace(
        config.model,
        hf_assets_path=default.model.hf_assets_path,
        tokenizer_path=None,
        converters=[],
        print_after_conversion=False,
    )
    config = dataclasses.replace(
        default,
        model=model,
        training=training,
        parallelism=dataclasses.replace(config.parallelism, enable_async_tensor_parallel=False),
        activation_checkpoint=recompute,
        debug=dataclasses.replace(default.debug, seed=config.debug.seed),
    )
    return dataclasses.replace(configs.load(None, []), config=config)


def main(arguments: Sequence[str]) -> int:
    """Print the verdict for the configuration file ``arguments[0]`` as JSON. Return 0.

    The rank that started this process may exit without waiting for it. The kernel then kills this process.
    """
    stop_signals.die_with_parent(signal.SIGKILL)
    verdict = judge(configs.load(arguments[0], []).config)
    print(json.dumps(dataclasses.asdict(verdict)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
