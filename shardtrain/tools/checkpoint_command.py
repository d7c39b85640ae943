"""``shardtrain checkpoint``: list, verify, compare and export checkpoints in one process. Only ``diff`` needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.checkpoint import best, choice, files, interval, manifest, retention, weights_file
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.checkpoint.storage import Place, place
from shardtrain.hf import listing
from shardtrain.utils import bounded_reads, output_target, storage_errors
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.units import format_bytes, format_seconds, parse_seconds
from shardtrain.utils.verbs import Command, CommandVerb

_NOTES = """\
TIME is 90, "90s", "2min" or "7.9h".
FOLDER is a run folder, its checkpoint folder, one step-N folder, or a Hugging Face folder. DIR, A and B are step-N
folders. diff and weights also accept a run folder; --step selects its checkpoint (default: best with
checkpoint.keep_best, else latest). Paths can be URLs of an object store, such as s3://bucket/run/step-500, except FILE.

  shardtrain checkpoint ls outputs
  shardtrain checkpoint verify outputs
  shardtrain checkpoint diff outputs/checkpoint/step-500 other/checkpoint/step-500
"""


def main(arguments: Sequence[str], others: Mapping[str, CommandVerb] | None = None) -> int:
    """Run one verb and return its exit status. ``others`` are additional verbs of other packages."""
    verbs = {**VERBS, **(others or {})}
    command = Command("shardtrain checkpoint", verbs, column=28, notes=_NOTES)
    return command.run(arguments)


def _paths(verb: str, number: int, arguments: Sequence[str]) -> list[Place]:
    """Return the ``number`` paths that a verb requires. Raise ConfigError for another number of arguments."""
    # An option that the verb does not have would otherwise be read as a path.
    has_option = any(argument.startswith("-") for argument in arguments)
    if len(arguments) == number and not has_option:
        return [place(argument) for argument in arguments]
    plural = "s" if number > 1 else ""
    rule = f"requires exactly {number} path{plural}"
    example = "outputs" if verb in ("ls", "verify") else "outputs/checkpoint/step-100"
    if verb == "diff":
        example += " outputs/checkpoint/step-200"
    elif verb == "weights":
        example += " weights.safetensors"
    raise ConfigError(
        Problem(
            f"shardtrain checkpoint {verb}",
            " ".join(arguments) or None,
            rule=rule,
            fix=f"write it like: shardtrain checkpoint {verb} {example}",
            where="command line",
        )
    )


def _take_step(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Split ``--step NAME`` or ``--step=NAME`` off the arguments. Return the other arguments and NAME, or None."""
    step = None
    rest = []
    remaining = iter(arguments)
    for argument in remaining:
        option, _, name = argument.partition("=")
        if option == "--step":
            # ``step_name`` rejects an empty name.
            if not name:
                name = next(remaining, "")
            step = choice.step_name(name)
        else:
            rest.append(argument)
    return rest, step


def _list(arguments: Sequence[str]) -> int:
    # The folder may be one checkpoint, a Hugging Face folder, or a folder of checkpoints.
    (folder,) = _paths("ls", 1, arguments)
    if (folder / MANIFEST).exists():
        print(_line(folder, manifest.read(folder)))
        return 0
    if isinstance(folder, Path) and bounded_reads.is_present(folder / "config.json"):
        print(listing.line(folder))
        return 0

    folder = _checkpoints_of(folder)
    pointer, best_damage = best.pointer_and_damage(folder)
    for step in retention.step_folders(folder):
        path = folder / f"step-{step}"
        try:
            line = _line(path, manifest.read(path))
            if pointer.get("step") == step:
                line += f"  best: {best.describe(pointer)}"
            print(line)
        except CheckpointError as error:
            print(f"step-{step}  cannot be used: {error}")
    if best_damage:
        print(best_damage)
    return 0


def _line(path: Place, stored: Manifest) -> str:
    """Describe a checkpoint in one line, with the files whose size is wrong."""
    kind = "weights only" if stored.facts.get("weights_only") else "whole"
    plural = "" if stored.world_size == 1 else "s"
    ranks = f"{stored.world_size} rank{plural}"
    size = format_bytes(stored.total_bytes)
    line = f"{path.name}  {size}  {ranks}  {len(stored.tensors)} tensors  {kind}"
    # Sizes are compared instead of hashes, because ``ls`` must not read all bytes. ``verify`` does.
    wrong = []
    for file in stored.files:
        if _size(path / file.name) != file.bytes:
            wrong.append(file.name)
    if wrong:
        line += f"  missing or cut: {', '.join(wrong)}"
    return line


def _interval(arguments: Sequence[str]) -> int:
    """Print the optimal save interval of Young and Daly, and the useful share of time for intervals around it."""
    times: dict[str, float] = {"restart": 0.0}
    names = ("stall", "mttf", "restart")
    options = [f"--{known}" for known in names]
    # Options and values alternate. The value of a last option without one is "", which is not a time.
    values = [*arguments[1::2], ""]
    for name, value in zip(arguments[::2], values, strict=False):
        if name not in options:
            raise ConfigError(
                Problem(
                    "shardtrain checkpoint interval",
                    name,
                    rule="is not an option",
                    fix=f"options are {', '.join(options)}",
                    where="command line",
                )
            )
        try:
            times[name.removeprefix("--")] = parse_seconds(value)
        except ValueError:
            raise ConfigError(
                Problem(
                    name,
                    value,
                    rule="is not a time",
                    fix=f"write it like {name} 90s, 2min or 7.9h",
                    where="command line",
                )
            ) from None
    for required, example in (("stall", "1"), ("mttf", "7.9h")):
        seconds = times.get(required)
        if seconds is None or not 0 < seconds < math.inf:
            raise ConfigError(
                Problem(
                    f"--{required}",
                    seconds,
                    rule="must be a time above 0",
                    fix=f"write it like --{required} {example}",
                    where="command line",
                )
            )
    stall = times["stall"]
    mttf = times["mttf"]
    restart = times["restart"]
    advised = interval.best_seconds(stall, mttf)
    print(f"save every {format_seconds(advised)} (sqrt(2 * stall * mttf) = {advised:.0f} s)")
    # Show how much a shorter or longer interval costs.
    for factor in (0.25, 1, 4):
        seconds = factor * advised
        share = interval.useful_share(seconds, stall, mttf, restart)
        print(f"every {format_seconds(seconds):>10}: {100 * share:.1f} % of the time is training")
    return 0


def _size(path: Place) -> int:
    """Return the size of a file in bytes, or -1 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _verify(arguments: Sequence[str]) -> int:
    (path,) = _paths("verify", 1, arguments)
    paths: list[Place] = [path]
    if not (path / MANIFEST).exists():
        folder = _checkpoints_of(path)
        paths = [folder / f"step-{step}" for step in retention.step_folders(folder)]
    # Verify all checkpoints before reporting, so one message lists all damage.
    damages = []
    for checkpoint in paths:
        damages += _damages(checkpoint)
    if damages:
        raise CheckpointError("; ".join(damages))
    return 0


def _damages(path: Place) -> list[str]:
    """Return all damage of a checkpoint. Print a line if there is none."""
    try:
        stored = manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    damages = []
    for file in stored.files:
        damage = files.find_damage(path, file)
        if damage:
            damages.append(f"checkpoint {path}: {damage}")
    # A folder that was renamed or copied over another has good files of the wrong step.
    if retention.step_of(path) not in (None, stored.step):
        damages.append(f"checkpoint {path}: its manifest is of step {stored.step}")
    if damages:
        return damages
    print(f"{path}: good, {len(stored.files)} files, {format_bytes(stored.total_bytes)}")
    known = {MANIFEST, *(file.name for file in stored.files)}
    foreign = [entry.name for entry in path.iterdir() if entry.name not in known]
    for name in sorted(foreign):
        print(f"{path}: {name} is not part of the checkpoint and is ignored")
    return []


def _checkpoints_of(path: Place) -> Place:
    """Return the folder with the ``step-N`` folders: ``path`` or ``path/checkpoint``.

    Raises:
        CheckpointError: neither has one.
    """
    for folder in (path, path / "checkpoint"):
        if retention.step_folders(folder):
            return folder
    rule = "has no checkpoint: neither it nor its folder checkpoint/ contains a step-N folder"
    raise CheckpointError(f"{path} {rule}; name a step-N folder, or a run that has saved one")


def _one_checkpoint(path: Place, step: str | None) -> Place:
    """Return ``path`` if it is a checkpoint. If it is a run, select ``step``, print its path and return it."""
    if (path / MANIFEST).exists() or retention.step_of(path) is not None:
        choice.reject_step(step, path)
        return path
    from shardtrain.checkpoint.verification import verify

    chosen = choice.choose(_checkpoints_of(path), step, verify)
    print(f"using {chosen}")
    return chosen.path


def _diff(arguments: Sequence[str]) -> int:
    rest, step = _take_step(arguments)
    path_a, path_b = (_one_checkpoint(path, step) for path in _paths("diff", 2, rest))
    print(f"comparing {path_a} and {path_b}")
    # Verify both before comparing, because differences of a damaged checkpoint mean nothing.
    a = _undamaged(path_a)
    b = _undamaged(path_b)
    names = sorted({*a.tensors, *b.tensors})
    num_different = 0
    for name in names:
        text = _difference(name, a, path_a, b, path_b)
        if text != "equal":
            num_different += 1
        print(f"{name}: {text}")

    keys = {*a.facts, *b.facts}
    different_facts = sorted(key for key in keys if a.facts.get(key) != b.facts.get(key))
    for key in different_facts:
        print(f"{key}: differs")
    print(f"{num_different} of {len(names)} tensors differ")
    return 1 if num_different or different_facts else 0


def _undamaged(path: Place) -> Manifest:
    """Verify a checkpoint up to the first damage, and return its manifest. Raises CheckpointError."""
    stored = manifest.read(path)
    for file in stored.files:
        damage = files.find_damage(path, file)
        if damage:
            raise CheckpointError(f"checkpoint {path}: {damage}")
    return stored


def _difference(name: str, a: Manifest, path_a: Place, b: Manifest, path_b: Place) -> str:
    """Describe how a tensor differs between two checkpoints, or return "equal"."""
    if name not in b.tensors:
        return f"only in {path_a}"
    if name not in a.tensors:
        return f"only in {path_b}"
    mine = a.tensors[name]
    theirs = b.tensors[name]
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return f"{mine.dtype} {list(mine.shape)} and {theirs.dtype} {list(theirs.shape)}"
    # Compare bytes first, so torch is only imported for tensors that differ.
    bytes_a = weights_file.whole_bytes(a, path_a, mine)
    bytes_b = weights_file.whole_bytes(b, path_b, theirs)
    if bytes_a == bytes_b:
        return "equal"
    import torch

    dtype = getattr(torch, mine.dtype)
    values_a = torch.frombuffer(bytes_a, dtype=dtype).double()
    values_b = torch.frombuffer(bytes_b, dtype=dtype).double()
    gaps = (values_a - values_b).abs()
    count = int((gaps != 0).sum())
    # NaN has no distance, and would hide the distances of the other elements.
    if bool(gaps.isnan().any()):
        return f"{count} of {gaps.numel()} elements differ, some are not finite"
    return f"{count} of {gaps.numel()} elements differ, by at most {gaps.max().item():.3g}"


def _weights(arguments: Sequence[str]) -> int:
    rest, step = _take_step(arguments)
    path, output = _paths("weights", 2, rest)
    if isinstance(output, Path):
        output_target.require("FILE", output, "file")
    path = _one_checkpoint(path, step)
    if not isinstance(output, Path):
        raise ConfigError(
            Problem(
                "FILE",
                str(output),
                rule="is not a local file",
                fix="write it to a disk first",
                where="command line",
            )
        )
    try:
        number = weights_file.write(path, output)
    except FileExistsError:
        raise ConfigError(
            Problem(
                "FILE",
                str(output),
                rule="exists",
                fix="name another file",
                where="command line",
            )
        ) from None
    except OSError as error:
        raise storage_errors.cannot("write", output, error, "choose another folder") from error
    print(f"{output}: {number} tensors")
    return 0


VERBS = {
    "ls": CommandVerb(
        _list,
        (("ls      FOLDER",
          "list the checkpoints of a run: step, size, ranks, tensors, missing or truncated files. For\n"
          "a Hugging Face folder: architecture, size, tensors and dtypes"),),
        has_help=False,
    ),
    "verify": CommandVerb(
        _verify,
        (("verify  DIR", (
            "verify every byte of step-N, or of all steps of a folder; "
            "exit 5 lists damaged files"
        )),),
        has_help=False,
    ),
    "diff": CommandVerb(
        _diff,
        (("diff    A B [--step latest|best|N]", (
            "compare two checkpoints tensor by tensor; exit 1 if they differ"
        )),),
        needs_torch=True,
        has_help=False,
    ),
    "weights": CommandVerb(
        _weights,
        (("weights DIR FILE [--step latest|best|N]", "write the weights as one safetensors file"),),
        has_help=False,
    ),
    "from-dcp": CommandVerb(
        "tools.dcp.dcp_command:from_dcp",
        (("from-dcp DCP DIR [OPTIONS]",
          "convert a torch.distributed.checkpoint folder, such as torchtitan's step-N;\n"
          "OPTIONS select its model: CONFIG.toml, --model.name ..., --model.flavor ..."),),
        needs_torch=True,
    ),
    "to-dcp": CommandVerb(
        "tools.dcp.dcp_command:to_dcp",
        (("to-dcp  DIR DCP [OPTIONS]",
          "convert to a folder that torchtitan, dcp_to_torch and DCP can load; see --help"),),
        needs_torch=True,
    ),
    "interval": CommandVerb(
        _interval,
        (("interval --stall TIME --mttf TIME [--restart TIME]",
          "best save interval if a save blocks training for stall, and a job fails every mttf"),),
        has_help=False,
    ),
}  # fmt: skip
