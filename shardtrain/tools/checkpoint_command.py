"""``shardtrain checkpoint``: list, verify, compare and export checkpoints in one process. Only ``diff`` needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.checkpoint import best, choice, files, interval, manifest, retention, weights_file
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.checkpoint.storage import Place, place
from shardtrain.hf import listing
from shardtrain.utils import storage_errors
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


def main(words: Sequence[str], others: Mapping[str, CommandVerb] | None = None) -> int:
    """Run one verb and return its exit status. ``others`` are additional verbs of other packages."""
    return Command(
        "shardtrain checkpoint", {**VERBS, **(others or {})}, column=28, notes=_NOTES
    ).run(words)


def _paths(verb: str, number: int, words: Sequence[str]) -> list[Place]:
    """Return the ``number`` paths that a verb requires. Raise ConfigError for another number of arguments."""
    if len(words) != number or any(word.startswith("-") for word in words):
        rule = f"requires exactly {number} path{'s' if number > 1 else ''}"
        example = "outputs" if verb in ("ls", "verify") else "outputs/checkpoint/step-100"
        fix = f"write it like: shardtrain checkpoint {verb} {example}"
        fix += {"diff": " outputs/checkpoint/step-200", "weights": " weights.safetensors"}.get(
            verb, ""
        )
        raise ConfigError(
            Problem(
                f"shardtrain checkpoint {verb}",
                " ".join(words) or None,
                rule=rule,
                fix=fix,
                where="command line",
            )
        )
    return [place(word) for word in words]


def _take_step(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Split ``--step NAME`` or ``--step=NAME`` off the arguments. Return the other arguments and NAME, or None."""
    step = None
    rest = []
    remaining = iter(words)
    for word in remaining:
        option, _, name = word.partition("=")
        if option == "--step":
            step = choice.step_name(name or next(remaining, ""))
        else:
            rest.append(word)
    return rest, step


def _list(words: Sequence[str]) -> int:
    (folder,) = _paths("ls", 1, words)
    if (folder / MANIFEST).exists():
        print(_line(folder, manifest.read(folder)))
        return 0
    if isinstance(folder, Path) and (folder / "config.json").is_file():
        print(listing.line(folder))
        return 0

    folder = _checkpoints_of(folder)
    pointer = best.read_pointer(folder)
    for step in retention.step_folders(folder):
        path = folder / f"step-{step}"
        try:
            line = _line(path, manifest.read(path))
            if pointer.get("step") == step:
                line += f"  best: {best.describe(pointer)}"
            print(line)
        except CheckpointError as error:
            print(f"step-{step}  cannot be used: {error}")
    return 0


def _line(path: Place, stored: Manifest) -> str:
    kind = "weights only" if stored.facts.get("weights_only") else "whole"
    ranks = f"{stored.world_size} rank{'s' if stored.world_size != 1 else ''}"
    line = f"{path.name}  {format_bytes(stored.total_bytes)}  {ranks}  {len(stored.tensors)} tensors  {kind}"
    sizes = {file.name: file.bytes for file in stored.files}
    wrong = [name for name, size in sizes.items() if _size(path / name) != size]
    return f"{line}  missing or cut: {', '.join(wrong)}" if wrong else line


def _interval(words: Sequence[str]) -> int:
    """Print the optimal save interval of Young and Daly, and the useful share of time for intervals around it."""
    times: dict[str, float] = {"restart": 0.0}
    names = ("stall", "mttf", "restart")
    for name, value in zip(words[::2], [*words[1::2], ""], strict=False):
        if name not in [f"--{known}" for known in names]:
            raise ConfigError(
                Problem(
                    "shardtrain checkpoint interval",
                    name,
                    rule="is not an option",
                    fix=f"options are {', '.join(f'--{known}' for known in names)}",
                    where="command line",
                )
            )
        try:
            times[name[2:]] = parse_seconds(value)
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
    for known in names:
        if not 0 < times.get(known, 0.0) < math.inf and known != "restart":
            raise ConfigError(
                Problem(
                    f"--{known}",
                    times.get(known),
                    rule="must be a time above 0",
                    fix=f"write it like --{known} {'1' if known == 'stall' else '7.9h'}",
                    where="command line",
                )
            )
    stall, mttf, restart = (times[known] for known in names)
    advised = interval.best_seconds(stall, mttf)
    print(f"save every {format_seconds(advised)} (sqrt(2 * stall * mttf) = {advised:.0f} s)")
    for factor in (0.25, 1, 4):
        share = interval.useful_share(factor * advised, stall, mttf, restart)
        print(
            f"every {format_seconds(factor * advised):>10}: {100 * share:.1f} % of the time is training"
        )
    return 0


def _size(path: Place) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _verify(words: Sequence[str]) -> int:
    (path,) = _paths("verify", 1, words)
    paths: list[Place] = [path]
    if not (path / MANIFEST).exists():
        folder = _checkpoints_of(path)
        paths = [folder / f"step-{step}" for step in retention.step_folders(folder)]
    bad = [damage for each in paths for damage in _damages(each)]
    if bad:
        raise CheckpointError("; ".join(bad))
    return 0


def _damages(path: Place) -> list[str]:
    """Return all damage of a checkpoint. Print a line if there is none."""
    try:
        stored = manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    bad = [
        f"checkpoint {path}: {damage}"
        for file in stored.files
        if (damage := files.find_damage(path, file))
    ]
    if retention.step_of(path) not in (None, stored.step):
        bad.append(f"checkpoint {path}: its manifest is of step {stored.step}")
    known = {MANIFEST, *(file.name for file in stored.files)}
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    if not bad:
        print(f"{path}: good, {len(stored.files)} files, {format_bytes(stored.total_bytes)}")
        for name in foreign:
            print(f"{path}: {name} is not part of the checkpoint and is ignored")
    return bad


def _checkpoints_of(path: Place) -> Place:
    """Return the folder with the ``step-N`` folders: ``path`` or ``path/checkpoint``.

    Raise CheckpointError if none.
    """
    folder = path if retention.step_folders(path) else path / "checkpoint"
    if not retention.step_folders(folder):
        rule = "has no checkpoint: neither it nor its folder checkpoint/ contains a step-N folder"
        raise CheckpointError(f"{path} {rule}; name a step-N folder, or a run that has saved one")
    return folder


def _one_checkpoint(path: Place, step: str | None) -> Place:
    """Return ``path`` if it is a checkpoint. If it is a run, select ``step``, print its path and return it."""
    if (path / MANIFEST).exists() or retention.step_of(path) is not None:
        choice.reject_step(step, path)
        return path
    from shardtrain.checkpoint.verification import verify

    chosen = choice.choose(_checkpoints_of(path), step, verify)
    print(f"using {chosen}")
    return chosen.path


def _diff(words: Sequence[str]) -> int:
    rest, step = _take_step(words)
    one, other = (_one_checkpoint(path, step) for path in _paths("diff", 2, rest))
    print(f"comparing {one} and {other}")
    # Verify both before comparing, because differences of a damaged checkpoint mean nothing.
    stored = []
    for path in (one, other):
        stored.append(manifest.read(path))
        damage = next((d for file in stored[-1].files if (d := files.find_damage(path, file))), "")
        if damage:
            raise CheckpointError(f"checkpoint {path}: {damage}")
    a = stored[0].tensors
    b = stored[1].tensors
    different = 0
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            text = f"only in {one if name in a else other}"
        elif (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape):
            text = (
                f"{a[name].dtype} {list(a[name].shape)} and {b[name].dtype} {list(b[name].shape)}"
            )
        else:
            text = _difference(name, stored[0], one, stored[1], other)
        different += text != "equal"
        print(f"{name}: {text}")
    facts_a = stored[0].facts
    facts_b = stored[1].facts
    facts = sorted(key for key in {*facts_a, *facts_b} if facts_a.get(key) != facts_b.get(key))
    for key in facts:
        print(f"{key}: differs")
    print(f"{different} of {len({*a, *b})} tensors differ")
    return 1 if different or facts else 0


def _difference(name: str, a: Manifest, one: Place, b: Manifest, other: Place) -> str:
    # Compare bytes first, so torch is only imported for tensors that differ.
    mine = weights_file.whole_bytes(a, one, a.tensors[name])
    theirs = weights_file.whole_bytes(b, other, b.tensors[name])
    if mine == theirs:
        return "equal"
    import torch

    dtype = getattr(torch, a.tensors[name].dtype)
    pair = [torch.frombuffer(data, dtype=dtype).double() for data in (mine, theirs)]
    gaps = (pair[0] - pair[1]).abs()
    count = int((gaps != 0).sum())
    if bool(gaps.isnan().any()):
        return f"{count} of {gaps.numel()} elements differ, some are not finite"
    return f"{count} of {gaps.numel()} elements differ, by at most {gaps.max().item():.3g}"


def _weights(words: Sequence[str]) -> int:
    rest, step = _take_step(words)
    path, output = _paths("weights", 2, rest)
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
