"""Verbs ``import`` and ``export``: convert between checkpoints and Hugging Face folders, in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.choice import HELP, reject_step, step_name
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.tools.convert.checkpoint_path import KEEP_HELP, model_options, step_of, tokens_of_run
from shardtrain.tools.hub_client import refuse_token
from shardtrain.utils.arguments import StrictArgumentParser, output_path
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem, require_new

if TYPE_CHECKING:
    from shardtrain.hf.hf_export import Export

CHECKS = ("auto", "logits", "weights")


def import_main(words: Sequence[str]) -> int:
    """Run ``shardtrain import HF_DIR --to CHECKPOINT`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain import",
        "Write the weights of a Hugging Face folder as a checkpoint.",
        "shardtrain import HF_FOLDER --to outputs/model",
    )
    parser.add_argument("folder", type=Path, metavar="HF_DIR", help="folder with config.json and safetensors files")
    parser.add_argument("--to", type=output_path, required=True, metavar="CHECKPOINT", help="a new folder")
    parser.add_argument(
        "--dtype", choices=COMPUTE_DTYPES, default="", help="dtype of the weights (default: from the file)"
    )
    parser.add_argument("--vocab_size", type=int, default=0, help="extend the vocabulary to this many rows")
    parser.add_argument(
        "--legacy_bin", action="store_true", help="read pytorch_model.bin without unpickling code: see docs/hub.md"
    )
    parser.add_argument(
        "--check", choices=CHECKS, default="auto", help="compare logits with transformers: see docs/hub.md"
    )
    found = parser.read(words)
    from shardtrain import models
    from shardtrain.hf import importing
    from shardtrain.hf.hf_export import Export

    require_new(found.to)
    _check_tokenizer(found.folder, found.vocab_size)
    model = importing.to_checkpoint(found.folder, found.to, found.dtype, found.vocab_size, found.legacy_bin)
    if found.check != "weights":
        reason = "the vocabulary has grown" if found.vocab_size else ""
        reason = "transformers would unpickle the file" if found.legacy_bin else reason
        wanted = Export(found.to, found.folder, models.find(model.name), model.config)
        _check_logits(wanted, found.check == "logits", reason)
    print(f"{found.to} contains the weights of {found.folder}; train from them with\n\n{model.toml()}\n")
    print(f'[checkpoint]\nenable = true\ninitial_load_path = "{found.to}"')
    return 0


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has IDs beyond the model's vocabulary."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    rows = vocab_size or read_json(folder / CONFIG).get("vocab_size")
    if not file.is_file() or not isinstance(rows, int):
        return
    try:
        ids = max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values(), default=-1) + 1
    except Exception as error:  # any error that the library raises for a broken file
        raise ConfigError(f"{file} is not a readable tokenizer ({str(error)[:200]}); download it again") from None
    if ids > rows:
        said = f"--vocab_size={vocab_size}" if vocab_size else f"vocab_size={rows} of {CONFIG}"
        raise ConfigError(
            f"{file} has {ids} token IDs, but {said} has fewer rows; "
            f"import with --vocab_size {ids}, or replace the tokenizer by that of the model"
        )


def export_main(words: Sequence[str]) -> int:
    """Run ``shardtrain export FROM --to HF_DIR [--push ORG/NAME]`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain export",
        "Write the weights of a checkpoint as a Hugging Face folder, and check it.",
        "shardtrain export outputs --to hf_model",
    )
    parser.usage = "shardtrain export FROM (--to HF_DIR | --push ORG/NAME) [OPTION ...]"
    rarer = parser.rarer()
    where = "a run's folder, a step-N folder, or a Hugging Face folder"
    parser.add_argument("checkpoint", type=Path, metavar="FROM", help=where)
    parser.add_argument("--step", type=step_name, help=HELP)
    parser.add_argument("--to", type=output_path, metavar="HF_DIR", help="a new folder")
    dtype_help = "dtype of all weights (default: the dtype of each weight in the initial model)"
    parser.add_argument("--dtype", choices=COMPUTE_DTYPES, default="", help=dtype_help)
    rarer.add_argument("--shard_gigabytes", type=float, default=5.0, help="maximum size of a file, in 10^9 bytes")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files are copied (default: the run's)")
    rarer.add_argument("--config", type=Path, help=f"the run's TOML (default: {RESOLVED_CONFIG} of the run)")
    rarer.add_argument("--keep_generation_config", action="store_true", help=KEEP_HELP)
    parser.add_argument("--adapter", action="store_true", help="write only the adapters, as a PEFT folder")
    base = "base model to name in adapter_config.json and the card (default: from the run)"
    rarer.add_argument("--base_model", default="", help=base)
    parser.add_argument("--check", choices=CHECKS, default="auto", help="see docs/hub.md")
    parser.add_argument("--card", action="store_true", help="write README.md, a model card of the run")
    hub = "upload the folder, with a card, to this repository of the Hugging Face Hub (token: HF_TOKEN)"
    parser.add_argument("--push", default="", metavar="ORG/NAME", help=hub)
    rarer.add_argument("--private", action="store_true", help="with --push, create a private repository")
    overwrite = "with --push, replace the repository's card even if somebody wrote or changed it"
    rarer.add_argument("--overwrite_card", action="store_true", help=overwrite)
    refuse_token(words, "shardtrain export")
    found = parser.read(words)
    for option in ("private", "overwrite_card"):
        if getattr(found, option) and not found.push:
            raise ConfigError(
                Problem(
                    f"--{option}",
                    True,
                    rule="has no effect without --push",
                    fix="add --push ORG/NAME, or remove the option",
                )
            )
    push = None
    if found.push:
        from shardtrain.tools.convert.pushing import Push

        push = Push(found.push, found.private, found.overwrite_card)

    # Push has checked the repository and the token before anything is written.
    status = _to_folder(found, push)
    if push is not None and status == 0:
        address = push.send(found.to or found.checkpoint)
        print(f"{address} contains the files; the hash of every file was verified")
    return status


def _to_folder(found: Any, push: Any) -> int:
    """Write the folder, unless FROM is a Hugging Face folder that is pushed unchanged. Return the exit status."""
    from shardtrain.hf.folder_config import is_hub_folder
    from shardtrain.tools.convert import card

    is_folder = is_hub_folder(found.checkpoint) or (found.checkpoint / "adapter_config.json").is_file()
    if found.to is None:
        if push is None or not is_folder:
            raise ConfigError(
                Problem(
                    "--to",
                    None,
                    rule="is required: the folder to write",
                    fix="name a new folder",
                )
            )
        return 0
    if not 0.001 <= found.shard_gigabytes <= 1000:
        raise ConfigError(f"--shard_gigabytes={found.shard_gigabytes} must be between 0.001 and 1000; use 5")
    # An existing folder is an interrupted upload if its card identifies this checkpoint. Continue that upload.
    if found.to.exists():
        of = "" if is_folder else _identity(found, step_of(found.checkpoint, found.config, found.step))
        if push is not None and of and card.exported(found.to) == of:
            print(f"{found.to} already contains this checkpoint")
            return 0
        raise ConfigError(f"{found.to} already exists; name a new folder")
    if not is_hub_folder(found.checkpoint):
        return _export(found, found.checkpoint)

    # Convert one Hugging Face folder to another through a temporary checkpoint.
    from shardtrain.hf import importing

    reject_step(found.step, found.checkpoint)
    for option in ("config", "adapter", "base_model"):
        if getattr(found, option):
            raise ConfigError(
                Problem(
                    f"--{option}",
                    str(getattr(found, option)),
                    rule=(
                        f"has no effect, because {found.checkpoint} is a Hugging Face folder with its own config.json"
                    ),
                    fix="remove it",
                )
            )
    found.to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.to.parent, prefix=f"{found.to.name}.tmp-") as folder:
        importing.to_checkpoint(found.checkpoint, Path(folder) / "step-0")
        return _export(found, Path(folder) / "step-0")


def _identity(found: Any, checkpoint: Path) -> str:
    from shardtrain.tools.convert import card

    return card.identity(checkpoint, found.dtype, found.shard_gigabytes, found.adapter, str(found.tokenizer or ""))


def _write_card(found: Any, checkpoint: Path, source: Any) -> None:
    """Write README.md to the new folder if requested, unless the folder already has one."""
    from shardtrain.checkpoint import files
    from shardtrain.tools.convert import card

    if not (found.card or found.push) or (found.to / card.CARD).exists():
        return
    name = found.push.rpartition("/")[2] or os.path.basename(os.path.realpath(found.to))
    made = card.of_checkpoint(checkpoint, name, source, found.base_model, found.adapter)
    files.write_durable(found.to / card.CARD, made.text(_identity(found, checkpoint)).encode())
    print(f"{found.to / card.CARD}: model card with the known facts; add the intended use")


def _export(found: Any, path: Path) -> int:
    """Export a checkpoint, or the selected checkpoint of a run, and return the exit status."""
    from shardtrain import models
    from shardtrain.hf import source
    from shardtrain.hf.hf_export import Export, export
    from shardtrain.lora import FACT

    checkpoint = step_of(path, found.config, found.step)
    options = model_options(checkpoint, found.config)
    module = models.find(options["name"])
    config = models.shape_of(module, options["flavor"], options["overrides"], options.get("norm_type", "rmsnorm"))
    if found.adapter:
        from shardtrain.tools.convert.adapters import export_adapter

        export_adapter(found, checkpoint, module, config, str(options.get("base") or ""))
        _write_card(found, checkpoint, None)
        return 0
    if FACT in manifest.read(checkpoint).facts:
        rule = "contains adapters, but no full model"
        raise ConfigError(f"{checkpoint} {rule}; add --adapter, or merge it first (shardtrain merge)")

    # Find the folder of the initial weights, in the notes of an import or the run's configuration. It
    # provides the dtypes, config.json and the tokenizer.
    begun = source.of_checkpoint(checkpoint, manifest.read(checkpoint))
    if begun is None and "loaded" in options:
        from shardtrain.hf import origin

        begun = origin.of_run(options["loaded"], module, config)
    tokens = {}
    if "loaded" in options and not found.keep_generation_config:
        tokens = tokens_of_run(options["loaded"], found.config is not None, found.tokenizer)
    wanted = Export(
        checkpoint,
        found.to,
        module,
        config,
        dtype=found.dtype,
        shard_bytes=int(found.shard_gigabytes * 1e9),
        source=begun,
        tokenizer=found.tokenizer or options.get("tokenizer"),
        max_tokens=options.get("seq_len", 0),
        tokens=tokens,
        labels=options.get("labels", ()),
    )
    files, notice = export(wanted)
    print(f"{found.to}: {', '.join(files)}; all weights were read back and are equal")
    if notice:
        print(notice)
    if not any(one.has_tokenizer for one in wanted.sources()):
        why = "the import recorded none"
        if wanted.tokenizer is not None:
            why = f"{wanted.tokenizer} has no tokenizer files"
        elif "assets" in options:
            why = f"the tokenizer of the run is {options['assets']!r}, not a folder"
        print(f"the folder has no tokenizer: {why}; copy one there, or name a folder with --tokenizer")
    if found.check != "weights":
        _check_logits(wanted, found.check == "logits")
    _write_card(found, checkpoint, begun)
    return 0


def _check_logits(wanted: Export, must: bool, reason: str = "") -> None:
    from shardtrain.hf import logits

    reason = reason or logits.why_not(wanted)
    if reason:
        if must:
            raise ConfigError(f"--check=logits is not possible: {reason}; use --check=weights")
        print(f"logits were not compared: {reason}")
        return
    error, scale = logits.largest_error(wanted)
    if not error <= logits.TOLERANCE * max(scale, 1.0):
        raise CheckpointError(
            f"{wanted.output}: transformers' logits differ by {error:.2e}, "
            f"with logits up to {scale:.2g}; do not use this folder"
        )
    print(f"transformers returns the same logits: largest error {error:.2e}, with logits up to {scale:.2g}")
