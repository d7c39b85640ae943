"""Parse the arguments of ``shardtrain verify``. Does not import torch, so errors appear immediately."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.config.command_line import VerbOption, number_of, take
from shardtrain.utils import output_target
from shardtrain.utils.errors import ConfigError, Problem

USAGE = """\
usage: shardtrain verify [CONFIG.toml | model.py] [--mesh "tp=2,pp=2" ...] [--schedule NAME ...] [--steps 3]
                         [--precision own] [--full] [--json] [--allow-impossible] [--section.key VALUE ...]
       shardtrain verify --certificate FILE [CONFIG.toml] [--quick] [--dimension NAME ...] [--mesh ...] [--json]
       shardtrain verify --check FILE [CONFIG.toml] [--json] [--section.key VALUE ...]
       shardtrain verify --real [CONFIG.toml | model.py] [--memory GIB] [--json] [--section.key VALUE ...]
       shardtrain verify --compare RUN_A RUN_B [--rounding RUN_C] [--json]

Train the same batches on one process and on each mesh, in float32, and compare initial weights, loss, every gradient,
the gradient norm and the updated weights. Status 0: all the same. Status 4: a mesh differs, fails, proves nothing
because of rounding, or was requested and is not possible; the reason is printed.

  --mesh      axes: dp_replicate, dp_shard, tp, pp, cp, ep; without it, a list of meshes of up to 8 ranks
  --schedule  pipeline schedules to try on each mesh with pp
  --steps     optimizer steps to compare
  --precision float32 (default), or own: the meshes, and one process, compute in the dtypes of the configuration, with
              float8 and MX, and are compared with one process in float32. The tolerance of each tensor is the
              effect of rounding on it. Modules, updates and norms are also compared with float64 on their own inputs
  --full      the model, depth and sequence length of the configuration, not a small version of them
  --json      one JSON document
  --allow-impossible
              status 0 also if a mesh of --mesh is not possible for this model
  --certificate
              check every dimension that must not change a number, through the trainer with the run's own data and
              task, and write the result to this JSON file; status 0 only if all requested ones were checked and hold
  --quick     fewer variants of each dimension of a certificate
  --dimension dimensions to check; the default is all that apply
  --check     does this certificate still apply to the configuration and code? Status 0, or 4 with the changes
  --real      compare sizes that a small model hides with float64: norm and loss sums on 1, 2 and 4 ranks, tensors of
              more than 2^31 numbers, one layer and the vocabulary of the configured model at their real width
  --memory    GiB of memory for --real; the default is three quarters of the free memory. A check that does not fit
              is skipped, and its row has the reason
  --compare   two recordings of the same training (shardtrain.record): name the first step and tensor that differ
  --rounding  a third recording, in which only rounding differs from RUN_A; its difference sets the tolerance

  shardtrain verify
  shardtrain verify my_model.py --mesh tp=2 --mesh "pp=2,dp_shard=2"
  shardtrain verify run.toml --certificate certificate.json
  shardtrain verify run.toml --check certificate.json
"""


@dataclass(frozen=True)
class VerifyOptions:
    """Arguments of ``shardtrain verify``. ``path`` is a TOML file, a model file ending in .py, or None."""

    path: str | None = None
    meshes: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    steps: int = 3
    precision: str = "float32"
    full: bool = False
    json: bool = False
    allow_impossible: bool = False
    real: bool = False
    compare: tuple[str, ...] = ()
    rounding: str | None = None
    memory_gib: float = 0.0
    certificate: str | None = None
    check: str | None = None
    quick: bool = False
    dimensions: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def read(arguments: Sequence[str]) -> VerifyOptions:
    """Parse command-line arguments. Unknown options are overrides of the configuration.

    Raises:
        ConfigError: an option lacks its value or has no effect, or ``--steps`` is not a positive integer.
    """
    flags = ("--full", "--json", "--real", "--allow-impossible", "--quick")
    taken = take(arguments, OPTIONS, flags, USAGE)
    given = taken.verb_options
    # Each mode ignores some options. An option without effect is an error.
    if "--compare" in given or "--rounding" in given:
        return _comparison(given, taken.rest)
    _require_certificate(given)
    if "--memory" in given and "--real" not in given:
        raise ConfigError(
            Problem(
                "--memory",
                None,
                rule="has no effect without --real",
                fix="remove it",
                where="command line",
            )
        )
    if "--real" in given:
        useless = {"--mesh", "--schedule", "--steps", "--precision", "--full", "--allow-impossible"}
        for option in sorted(useless & given.keys()):
            raise ConfigError(
                Problem(
                    option,
                    None,
                    rule="has no effect with --real, whose meshes and sizes are fixed",
                    fix="remove it",
                    where="command line",
                )
            )
    elif "--allow-impossible" in given and "--mesh" not in given:
        raise ConfigError(
            Problem(
                "--allow-impossible",
                None,
                rule="has no effect without --mesh: meshes of the default list may be impossible",
                fix="remove it",
                where="command line",
            )
        )
    path, overrides = taken.configuration()
    return VerifyOptions(
        path,
        tuple(given.get("--mesh", ())),
        tuple(given.get("--schedule", ())),
        given.get("--steps", 3),
        precision=given.get("--precision", "float32"),
        full="--full" in given,
        json="--json" in given,
        allow_impossible="--allow-impossible" in given,
        real="--real" in given,
        memory_gib=given.get("--memory", 0.0),
        certificate=given.get("--certificate"),
        check=given.get("--check"),
        quick="--quick" in given,
        dimensions=tuple(given.get("--dimension", ())),
        overrides=overrides,
    )


def _require_certificate(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that has no effect with, or without, a certificate."""
    if "--check" in given:
        rule = "has no effect with --check, which trains nothing"
        without_effect = given.keys() - {"--check", "--json"}
    elif "--certificate" in given:
        rule = "has no effect with --certificate, which has its own steps and sizes"
        useless = {"--steps", "--full", "--precision", "--real", "--memory", "--schedule"}
        without_effect = given.keys() & useless
    else:
        rule = "has no effect without --certificate"
        without_effect = given.keys() & {"--quick", "--dimension"}
    for option in sorted(without_effect):
        raise ConfigError(Problem(option, None, rule, "remove it", "command line"))


def _comparison(given: Mapping[str, Any], rest: Sequence[str]) -> VerifyOptions:
    """Return the options of a comparison of two recordings, which has no configuration."""
    folders = tuple(given.get("--compare", ()))
    if len(folders) != 2:
        rule = f"takes the folders of two recordings, and {len(folders)} were given"
        raise ConfigError(
            Problem("--compare", " ".join(folders) or None, rule, "name two", "command line")
        )
    others = [*sorted(given.keys() - {"--compare", "--rounding", "--json"}), *rest]
    if others:
        rule = "has no effect with --compare, which trains nothing"
        raise ConfigError(Problem(others[0], None, rule, "remove it", "command line"))
    return VerifyOptions(compare=folders, rounding=given.get("--rounding"), json="--json" in given)


def _precision(text: str) -> str:
    if text not in ("float32", "own"):
        raise ValueError("must be float32 or own")
    return text


def _gib(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise ValueError("must be a number of GiB above 0")
    return float(text)


OPTIONS = {
    "--mesh": VerbOption(example='"tp=2,pp=2"', is_list=True),
    "--schedule": VerbOption(example="1F1B", is_list=True),
    "--steps": VerbOption(number_of("steps"), "3"),
    "--precision": VerbOption(_precision, "own"),
    "--memory": VerbOption(_gib, "8"),
    "--compare": VerbOption(example="recordings/a recordings/b", is_list=True),
    "--rounding": VerbOption(example="recordings/c"),
    "--certificate": VerbOption(output_target.file_value, "certificate.json", once=True),
    "--check": VerbOption(example="certificate.json", once=True),
    "--dimension": VerbOption(example="resume", is_list=True),
}
