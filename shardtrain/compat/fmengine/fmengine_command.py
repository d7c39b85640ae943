"""``shardtrain checkpoint from-fmengine`` and ``to-fmengine``, and FMEngine's scripts for the same conversions."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardtrain.checkpoint import choice, manifest
from shardtrain.hf.folder_config import is_hub_folder
from shardtrain.utils import output_target
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem, require_new
from shardtrain.utils.variables import is_whole_number

_LOCAL_ONLY = "must be a local folder, because nothing is downloaded"


def from_fmengine(arguments: Sequence[str]) -> int:
    """Run ``from-fmengine`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain checkpoint from-fmengine",
        "Convert an FMEngine folder (latest, global_stepN with a file per layer and model-parallel rank) to a "
        "checkpoint. Code in the files is never run.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FMENGINE",
        help="folder that contains latest, or a global_stepN folder",
    )
    parser.add_argument(
        "output",
        type=output_target.folder_argument,
        metavar="DIR",
        help="new checkpoint folder",
    )
    base = "Hugging Face folder of the model (default: config.json and tokenizer next to latest)"
    parser.add_argument("--base-model", type=Path, help=base)
    parser.add_argument(
        "--step", default="latest", help="global_stepN (default: the step in the file named latest)"
    )
    adapter = "write only the adapters, as a folder for PEFT and lora.initial_load_path"
    parser.add_argument("--adapter", action="store_true", help=adapter)
    alpha = "with --adapter: lora_alpha of the training JSON, which the weight files do not contain"
    parser.add_argument("--lora_alpha", type=float, help=alpha)
    options = parser.read(arguments)
    output = options.output
    require_new(output)
    # Adapters do not need the model's weights.
    if options.adapter or options.lora_alpha is not None:
        return _adapters(
            options.folder,
            output,
            options.step,
            options.lora_alpha,
            options.adapter,
            options.base_model,
        )
    # These import torch, which parsing and help do not need.
    from shardtrain.compat.fmengine import folders
    from shardtrain.hf import importing

    with folders.staged(options.folder, options.base_model, options.step, output) as folder:
        model = importing.to_checkpoint(folder, output)
    print(
        f"{output} contains the weights of {options.folder}; to train from them, use\n\n{model.toml()}\n"
    )
    print(f'[checkpoint]\nenable = true\ninitial_load_path = "{output}"')
    return 0


def to_fmengine(argv: Sequence[str]) -> int:
    """Run ``to-fmengine`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain checkpoint to-fmengine",
        "Convert a checkpoint or a Hugging Face folder to a folder for FMEngine's --init_ckpt, "
        "with a file per layer and model-parallel rank.",
    )
    where = "a step-N folder, a run's folder, a Hugging Face folder or an FMEngine folder"
    parser.add_argument("checkpoint", type=Path, metavar="FROM", help=where)
    parser.add_argument(
        "output",
        type=output_target.folder_argument,
        metavar="FMENGINE",
        help="new folder",
    )
    parser.add_argument("--step", type=choice.step_name, help=choice.HELP)
    parser.add_argument(
        "--mp_world_size", type=int, default=1, help="model-parallel ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of the tokenizer files to copy (default: the run's)"
    )
    parser.add_argument(
        "--config", type=Path, help="the run's TOML (default: config.resolved.toml of the run)"
    )
    options = parser.read(argv)
    output = options.output
    require_new(output)
    from shardtrain.compat.fmengine import folders

    # Options of the export to a Hugging Face folder.
    folder_options = {"tokenizer": options.tokenizer, "config": options.config}
    given = {name: value for name, value in folder_options.items() if value}
    with contextlib.ExitStack() as stack:
        folder = options.checkpoint
        if not is_hub_folder(folder) or (folder / manifest.MANIFEST).is_file():
            from shardtrain.tools.convert.checkpoint_path import step_of
            from shardtrain.tools.convert.convert_command import export_main

            # First export the checkpoint to a temporary Hugging Face folder on the disk of the output.
            options.checkpoint = step_of(options.checkpoint, options.config, options.step)
            parent = output.absolute().parent
            parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.TemporaryDirectory(dir=parent, prefix=f"{output.name}.tmp-")
            folder = Path(stack.enter_context(temporary)) / "hf"
            arguments = [f"--{name}={value}" for name, value in given.items()]
            with contextlib.redirect_stdout(io.StringIO()):
                export_main(
                    [str(options.checkpoint), f"--to={folder}", "--check=weights", *arguments]
                )
        else:
            # A Hugging Face folder has no steps, and is copied without an export.
            choice.reject_step(options.step, folder)
            for name, value in given.items():
                raise ConfigError(
                    Problem(
                        f"--{name}",
                        str(value),
                        rule=f"has no effect, because {folder} is not a checkpoint of this package",
                        fix="remove it",
                    )
                )
        stack.enter_context(folders.errors_name(options.checkpoint, folder))
        count, layers = folders.write(folder, output, options.mp_world_size)
    parts = "in one part"
    if options.mp_world_size > 1:
        parts = f"for {options.mp_world_size} model-parallel ranks"
    print(f"{output}: wrote {count} tensors of {layers} layers {parts}, and verified each")
    return 0


def to_hf_format(arguments: Sequence[str]) -> int:
    """Run ``cli/to_hf_format.py`` with its own flags and return its exit status.

    The input may also be a shardtrain run.
    """
    parser = StrictArgumentParser(
        "to_hf_format.py",
        "Convert an FMEngine folder or a shardtrain run to a Hugging Face folder.",
    )
    parser.add_argument(
        "--in-model-path",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with latest and global_stepN",
    )
    parser.add_argument(
        "--out-model-path",
        type=output_target.folder_argument,
        required=True,
        metavar="HF_DIR",
        help="new folder",
    )
    parser.add_argument(
        "--base-model",
        default="",
        help="Hugging Face folder of the model: config.json and tokenizer",
    )
    parser.add_argument("--step", default="latest", help="all, latest or global_stepN")
    parser.add_argument(
        "--is-lora-tuned", nargs="?", const="true", default="false", help="write only the adapters"
    )
    parser.add_argument(
        "--lora_alpha",
        type=float,
        help="lora_alpha of the training JSON, for adapters from FMEngine",
    )
    options = parser.read([_dashed(argument) for argument in arguments])
    # FMEngine's script accepts several spellings of a boolean.
    switch = str(options.is_lora_tuned).lower()
    if switch not in ("true", "false", "yes", "no", "1", "0"):
        raise ConfigError(
            Problem(
                "--is-lora-tuned",
                options.is_lora_tuned,
                rule="must be true or false",
                fix="correct it",
                where="command line",
            )
        )
    only_adapters = switch in ("true", "yes", "1")
    # FMEngine's script would download the model.
    if options.base_model and not Path(options.base_model).is_dir():
        raise ConfigError(
            Problem(
                "--base-model",
                options.base_model,
                rule=_LOCAL_ONLY,
                fix=f"run shardtrain data download --repo_id {options.base_model} --all, and set it to that folder",
                where="command line",
            )
        )
    base = Path(options.base_model) if options.base_model else None
    from shardtrain.compat.fmengine import folders
    from shardtrain.lora import FACT

    # Select steps of a shardtrain run, by FMEngine's names, or of an FMEngine folder.
    source = options.in_model_path
    checkpoints = _steps_of_run(source)
    names = list(checkpoints) if checkpoints else folders.steps(source)
    chosen = [options.step]
    # "latest" and a step's name select one folder, and "all" writes a folder per step.
    if options.step == "all":
        chosen = names
    elif checkpoints and options.step == "latest":
        chosen = names[-1:]
    for name in chosen:
        output = options.out_model_path
        if options.step == "all":
            output /= name
        if checkpoints:
            if name not in checkpoints:
                raise CheckpointError(
                    f"{source} has no step {name!r}; it has {', '.join(names[-8:])}"
                )
            # Like FMEngine's script, export adapters if the checkpoint contains them.
            has_adapters = FACT in manifest.read(checkpoints[name]).facts
            status = _export(checkpoints[name], output, base, only_adapters or has_adapters)
        elif only_adapters:
            status = _adapters(source, output, name, options.lora_alpha, True, base)
        else:
            require_new(output)
            with folders.staged(source, base, name, output) as folder:
                status = _export(folder, output, None, False)
        if status:
            return status
    return 0


def from_hf(arguments: Sequence[str]) -> int:
    """Run ``scripts/conversions/llama/from_hf.py`` with its own flags and return its exit status."""
    parser = StrictArgumentParser(
        "from_hf.py", "Convert a Hugging Face folder to a folder for FMEngine's --init_ckpt."
    )
    parser.add_argument(
        "--model_name_or_path",
        required=True,
        metavar="HF_DIR",
        help="folder with config.json and safetensors",
    )
    parser.add_argument(
        "--output_dir",
        type=output_target.folder_argument,
        required=True,
        metavar="DIR",
        help="new folder",
    )
    parser.add_argument("--mp_world_size", default="1", metavar="N", help="model-parallel ranks")
    options = parser.read(arguments)
    folder = options.model_name_or_path
    # FMEngine's script would download the model.
    if not is_hub_folder(Path(folder)):
        raise ConfigError(
            Problem(
                "--model_name_or_path",
                folder,
                rule=_LOCAL_ONLY,
                fix=f"run shardtrain data download --repo_id {folder} --all, and set it to that folder",
                where="command line",
            )
        )
    return to_fmengine(
        [folder, str(options.output_dir), f"--mp_world_size={options.mp_world_size}"]
    )


def _adapters(
    folder: Path,
    output: Path,
    step: str,
    alpha: float | None,
    is_requested: bool,
    base: Path | None,
) -> int:
    """Write the adapters of a step for PEFT. ``is_requested`` is false if only --lora_alpha was given."""
    from shardtrain.compat.fmengine import folders

    if not is_requested:
        raise ConfigError(
            Problem(
                "--lora_alpha",
                alpha,
                rule="has no effect without --adapter",
                fix="add --adapter",
                where="command line",
            )
        )
    # The scale of an adapter is alpha / rank.
    if alpha is None:
        raise ConfigError(
            Problem(
                "--lora_alpha",
                None,
                rule="is required, because the weight files do not contain it",
                fix="use the value of lora.lora_alpha in the training JSON",
                where="command line",
            )
        )
    rank, count = folders.write_adapters(folder, output, step, alpha, str(base or ""))
    print(f"{output}: {count} adapters of rank {rank}, scaled by {alpha / rank:g}")
    return 0


def _export(checkpoint: Path, output: Path, base: Path | None, adapters: bool) -> int:
    """Export a checkpoint to a Hugging Face folder, or only its adapters.

    ``base`` becomes the base model of adapters. For a full model, its tokenizer is copied from there.
    """
    from shardtrain.tools.convert.convert_command import export_main

    # An adapter needs the name of its base model, and a full model a tokenizer.
    arguments = [str(checkpoint), f"--to={output}"]
    if adapters:
        arguments.append("--adapter")
    if base is not None:
        arguments.append(f"--base_model={base}" if adapters else f"--tokenizer={base}")
    return export_main(arguments)


def _steps_of_run(folder: Path) -> dict[str, Path]:
    """Return the checkpoints of a shardtrain run in order, by FMEngine's step names. {} if ``folder`` is no run."""
    # ``folder`` may be the run's folder, or its folder of checkpoints.
    if (folder / "checkpoint").is_dir():
        folder = folder / "checkpoint"
    checkpoints: list[tuple[int, Path]] = []
    try:
        for path in folder.iterdir():
            number = path.name.removeprefix("step-")
            is_step = number != path.name and is_whole_number(number)
            # Without a manifest the checkpoint is not complete.
            if is_step and (path / manifest.MANIFEST).is_file():
                checkpoints.append((int(number), path))
    except OSError:
        return {}
    return {f"global_step{number}": path for number, path in sorted(checkpoints)}


def _dashed(argument: str) -> str:
    """Replace underscores with dashes in the flags of FMEngine's script, which accepts both forms."""
    name, equals, value = argument.partition("=")
    if name not in ("--in_model_path", "--out_model_path", "--base_model", "--is_lora_tuned"):
        return argument
    return f"{name.replace('_', '-')}{equals}{value}"
