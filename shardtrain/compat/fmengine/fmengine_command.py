"""``shardtrain checkpoint from-fmengine`` and ``to-fmengine``, and the flags of FMEngine's own scripts for both."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardtrain.checkpoint import choice, manifest
from shardtrain.hf.folder_config import is_hub_folder
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem, require_new


def from_fmengine(words: Sequence[str]) -> int:
    """Run ``from-fmengine`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain checkpoint from-fmengine",
        "Write a folder of FMEngine (latest, global_stepN with a file per layer and model-parallel rank) as a "
        "checkpoint. Nothing in its files is run.",
    )
    parser.add_argument("folder", type=Path, metavar="FMENGINE", help="the folder that has latest, or a global_stepN")
    parser.add_argument("output", type=Path, metavar="DIR", help="a new folder, what a run starts from")
    base = "Hugging Face folder of the model (default: config.json and tokenizer beside latest)"
    parser.add_argument("--base-model", type=Path, help=base)
    parser.add_argument("--step", default="latest", help="global_stepN (default: what latest names)")
    adapter = "write the adapters alone, as a folder that PEFT and lora.initial_load_path open"
    parser.add_argument("--adapter", action="store_true", help=adapter)
    parser.add_argument("--lora_alpha", type=float, help="with --adapter: lora_alpha of the JSON, which is in no file")
    found = parser.read(words)
    require_new(found.output)
    if found.adapter or found.lora_alpha is not None:
        return _adapters(found.folder, found.output, found.step, found.lora_alpha, found.adapter, found.base_model)
    from shardtrain.compat.fmengine import folders
    from shardtrain.hf import importing

    with folders.staged(found.folder, found.base_model, found.step, found.output) as folder:
        model = importing.to_checkpoint(folder, found.output)
    print(f"{found.output} holds the weights of {found.folder}; train from them with\n\n{model.toml()}\n")
    print(f'[checkpoint]\nenable = true\ninitial_load_path = "{found.output}"')
    return 0


def to_fmengine(words: Sequence[str]) -> int:
    """Run ``to-fmengine`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain checkpoint to-fmengine",
        "Write a checkpoint, or a Hugging Face folder, with a file per layer and model-parallel rank, as FMEngine's "
        "--init_ckpt takes it.",
    )
    where = "a step-N folder, a run's folder, a Hugging Face folder, or one of FMEngine"
    parser.add_argument("checkpoint", type=Path, metavar="FROM", help=where)
    parser.add_argument("output", type=Path, metavar="FMENGINE", help="a new folder")
    parser.add_argument("--step", type=choice.step_name, help=choice.HELP)
    parser.add_argument("--mp_world_size", type=int, default=1, help="model-parallel ranks (default: %(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files are copied (default: the run's)")
    parser.add_argument("--config", type=Path, help="the run's TOML (default: config.resolved.toml of the run)")
    found = parser.read(words)
    require_new(found.output)
    from shardtrain.compat.fmengine import folders

    # First export the checkpoint to a temporary folder.
    with contextlib.ExitStack() as stack:
        folder = found.checkpoint
        if not is_hub_folder(folder) or (folder / manifest.MANIFEST).is_file():
            from shardtrain.tools.convert.checkpoint_path import step_of
            from shardtrain.tools.convert.convert_command import export_main

            found.checkpoint = step_of(found.checkpoint, found.config, found.step)
            found.output.absolute().parent.mkdir(parents=True, exist_ok=True)
            beside = {"dir": found.output.absolute().parent, "prefix": f"{found.output.name}.tmp-"}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(**beside))) / "hf"
            named = [f"--{name}={getattr(found, name)}" for name in ("tokenizer", "config") if getattr(found, name)]
            with contextlib.redirect_stdout(io.StringIO()):
                export_main([str(found.checkpoint), f"--to={folder}", "--check=weights", *named])
        else:
            choice.reject_step(found.step, folder)
            for name in ("tokenizer", "config"):
                if getattr(found, name):
                    rule = f"has no effect: {folder} says what it is"
                    raise ConfigError(Problem(f"--{name}", str(getattr(found, name)), rule, "leave it out"))
        stack.enter_context(folders.errors_name(found.checkpoint, folder))
        count, layers = folders.write(folder, found.output, found.mp_world_size)
    each = f"for {found.mp_world_size} model-parallel ranks" if found.mp_world_size > 1 else "in one part"
    print(f"{found.output}: {count} tensors of {layers} layers {each}, each read back and equal")
    return 0


def to_hf_format(words: Sequence[str]) -> int:
    """Run ``cli/to_hf_format.py`` with its own flags and return its exit status.

    The input may also be a shardtrain run.
    """
    parser = StrictArgumentParser(
        "to_hf_format.py", "Write a folder of FMEngine, or a shardtrain run, as a Hugging Face folder."
    )
    parser.add_argument("--in-model-path", type=Path, required=True, metavar="DIR", help="latest and global_stepN")
    parser.add_argument("--out-model-path", type=Path, required=True, metavar="HF_DIR", help="a new folder")
    parser.add_argument("--base-model", default="", help="Hugging Face folder of the model: config.json and tokenizer")
    parser.add_argument("--step", default="latest", help="all, latest or global_stepN")
    parser.add_argument("--is-lora-tuned", nargs="?", const="true", default="false", help="write the adapters alone")
    parser.add_argument("--lora_alpha", type=float, help="lora_alpha of the JSON, for adapters that FMEngine trained")
    found = parser.read([_dashed(word) for word in words])
    adapters = str(found.is_lora_tuned).lower()
    if adapters not in ("true", "false", "yes", "no", "1", "0"):
        raise ConfigError(
            Problem("--is-lora-tuned", found.is_lora_tuned, "must be true or false", "correct it", "command line")
        )
    adapters_alone = adapters in ("true", "yes", "1")
    if found.base_model and not Path(found.base_model).is_dir():
        rule = "is not a folder here; nothing is fetched"
        fix = f"shardtrain data download --repo_id {found.base_model}, and name the folder"
        raise ConfigError(Problem("--base-model", found.base_model, rule, fix, "command line"))
    base = Path(found.base_model) if found.base_model else None
    from shardtrain.compat.fmengine import folders
    from shardtrain.lora import FACT

    # Find the requested steps of a shardtrain run, by FMEngine's names, or of an FMEngine folder.
    ours = _steps_of_run(found.in_model_path)
    names = list(ours) if ours else folders.steps(found.in_model_path)
    chosen = names if found.step == "all" else [found.step]
    if ours and found.step == "latest":
        chosen = names[-1:]
    for name in chosen:
        if ours and name not in ours:
            raise CheckpointError(f"{found.in_model_path} has no step {name!r}; there is {', '.join(names[-8:])}")
        output = found.out_model_path / name if found.step == "all" else found.out_model_path
        if ours:
            holds = FACT in manifest.read(ours[name]).facts  # FMEngine's looked for adapters by itself, too
            status = _export(ours[name], output, base, adapters_alone or holds)
        elif adapters_alone:
            status = _adapters(found.in_model_path, output, name, found.lora_alpha, True, base)
        else:
            require_new(output)
            with folders.staged(found.in_model_path, base, name, output) as folder:
                status = _export(folder, output, None, False)
        if status:
            return status
    return 0


def from_hf(words: Sequence[str]) -> int:
    """Run ``scripts/conversions/llama/from_hf.py`` with its own flags and return its exit status."""
    parser = StrictArgumentParser("from_hf.py", "Write a Hugging Face folder as FMEngine's --init_ckpt takes it.")
    parser.add_argument("--model_name_or_path", required=True, metavar="HF_DIR", help="config.json and safetensors")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--mp_world_size", default="1", metavar="N", help="model-parallel ranks")
    found = parser.read(words)
    folder = found.model_name_or_path
    if not is_hub_folder(Path(folder)):
        rule = "is not a Hugging Face folder here; nothing is fetched"
        fix = f"shardtrain data download --repo_id {folder}, and name the folder"
        raise ConfigError(Problem("--model_name_or_path", folder, rule, fix, "command line"))
    return to_fmengine([folder, found.output_dir, f"--mp_world_size={found.mp_world_size}"])


def _adapters(folder: Path, output: Path, step: str, alpha: float | None, asked: bool, base: Path | None) -> int:
    from shardtrain.compat.fmengine import folders

    if not asked:
        raise ConfigError(Problem("--lora_alpha", alpha, "has no effect without --adapter", "add it", "command line"))
    if alpha is None:
        rule = "is needed: the files do not hold it"
        raise ConfigError(Problem("--lora_alpha", None, rule, "give lora.lora_alpha of the JSON", "command line"))
    rank, count = folders.write_adapters(folder, output, step, alpha, str(base or ""))
    print(f"{output}: {count} adapters of rank {rank}, scaled by {alpha / rank:g}")
    return 0


def _export(checkpoint: Path, output: Path, base: Path | None, adapters: bool) -> int:
    """Export a checkpoint.

    ``base`` is the model that adapters name, or the folder of an entire model's tokenizer.
    """
    from shardtrain.tools.convert.convert_command import export_main

    words = [str(checkpoint), f"--to={output}"]
    if adapters:
        words.append("--adapter")
    if base is not None:
        words.append(f"--base_model={base}" if adapters else f"--tokenizer={base}")
    return export_main(words)


def _steps_of_run(folder: Path) -> dict[str, Path]:
    """Return the checkpoints of a shardtrain run in order, by FMEngine's names."""
    inside = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    try:
        found = [p for p in inside.iterdir() if p.name.startswith("step-") and (p / manifest.MANIFEST).is_file()]
    except OSError:
        return {}
    numbered = sorted((int(p.name[5:]), p) for p in found if p.name[5:].isdecimal())
    return {f"global_step{number}": path for number, path in numbered}


def _dashed(word: str) -> str:
    """Accept underscores in flags that FMEngine's scripts write with dashes, as in its other flags."""
    name, equals, value = word.partition("=")
    plain = {"--in_model_path", "--out_model_path", "--base_model", "--is_lora_tuned"}
    return f"{name.replace('_', '-')}{equals}{value}" if name in plain else word
