"""Verbs ``import`` and ``export``: convert between checkpoints and Hugging Face folders, in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.choice import EMA_HELP, HELP, reject_step, reject_use_ema, step_name
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.tools.convert.checkpoint_path import (
    KEEP_HELP,
    model_options,
    step_of,
    tokens_of_run,
)
from shardtrain.tools.hub_client import refuse_token
from shardtrain.utils import bounded_reads, output_target
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem, require_new

if TYPE_CHECKING:
    from shardtrain.hf.hf_export import Export

CHECKS = ("auto", "logits", "weights")


def import_main(arguments: Sequence[str]) -> int:
    """Run ``shardtrain import HF_DIR --to CHECKPOINT`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain import",
        "Write the weights of a Hugging Face folder as a checkpoint.",
        "shardtrain import HF_FOLDER --to outputs/model",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="HF_DIR",
        help="folder with config.json and safetensors files",
    )
    parser.add_argument(
        "--to",
        type=output_target.folder_argument,
        required=True,
        metavar="CHECKPOINT",
        help="a new folder",
    )
    parser.add_argument(
        "--dtype",
        choices=COMPUTE_DTYPES,
        default="",
        help="dtype of the weights (default: from the file)",
    )
    parser.add_argument(
        "--vocab_size", type=int, default=0, help="extend the vocabulary to this many rows"
    )
    parser.add_argument(
        "--legacy_bin",
        action="store_true",
        help="read pytorch_model.bin without unpickling code: see docs/hub.md",
    )
    parser.add_argument(
        "--keep_mtp",
        action="store_true",
        help="keep the layers of multi-token prediction: see docs/multi_token.md",
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="auto",
        help="compare logits with transformers: see docs/hub.md",
    )
    options = parser.read(arguments)
    from shardtrain import models
    from shardtrain.hf import importing
    from shardtrain.hf.hf_export import Export

    # Check what can be checked before the weights are written, which may take minutes.
    require_new(options.to)
    _check_tokenizer(options.folder, options.vocab_size)
    model = importing.to_checkpoint(
        options.folder,
        options.to,
        options.dtype,
        options.vocab_size,
        options.legacy_bin,
        options.keep_mtp,
    )
    # Comparing logits also finds wrong layouts of weights, which equal bytes do not exclude.
    if options.check != "weights":
        obstacle = ""
        if options.legacy_bin:
            obstacle = "transformers would unpickle the file"
        elif options.vocab_size:
            obstacle = "the vocabulary has grown"
        export = Export(options.to, options.folder, models.find(model.name), model.config)
        _check_logits(export, options.check == "logits", obstacle)
    print(
        f"{options.to} contains the weights of {options.folder}; train from them with\n\n{model.toml()}\n"
    )
    print(f'[checkpoint]\nenable = true\ninitial_load_path = "{options.to}"')
    return 0


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has IDs beyond the model's vocabulary."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    num_rows = vocab_size or read_json(folder / CONFIG).get("vocab_size")
    if not file.is_file() or not isinstance(num_rows, int):
        return
    # The library raises errors of various types for a broken file.
    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:
        raise ConfigError(
            f"{file} is not a readable tokenizer ({str(error)[:200]}); download it again",
        ) from None
    num_ids = max(vocabulary.values(), default=-1) + 1
    if num_ids > num_rows:
        source = f"vocab_size={num_rows} of {CONFIG}"
        if vocab_size:
            source = f"--vocab_size={vocab_size}"
        raise ConfigError(
            f"{file} has {num_ids} token IDs, but {source} has fewer rows; "
            f"import with --vocab_size {num_ids}, or replace the tokenizer by that of the model"
        )


def export_main(arguments: Sequence[str]) -> int:
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
    rarer.add_argument("--use_ema", action="store_true", help=EMA_HELP)
    parser.add_argument(
        "--to",
        type=output_target.folder_argument,
        metavar="HF_DIR",
        help="a new folder",
    )
    dtype_help = "dtype of all weights (default: the dtype of each weight in the initial model)"
    parser.add_argument("--dtype", choices=COMPUTE_DTYPES, default="", help=dtype_help)
    rarer.add_argument(
        "--shard_gigabytes",
        type=float,
        default=5.0,
        help="maximum size of a file, in 10^9 bytes",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder whose tokenizer files are copied (default: the run's)",
    )
    rarer.add_argument(
        "--config", type=Path, help=f"the run's TOML (default: {RESOLVED_CONFIG} of the run)"
    )
    rarer.add_argument("--keep_generation_config", action="store_true", help=KEEP_HELP)
    rarer.add_argument(
        "--drop_mtp", action="store_true", help="leave out the layers of multi-token prediction"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write only the adapters, as a PEFT folder"
    )
    base = "base model to name in adapter_config.json and the card (default: from the run)"
    rarer.add_argument("--base_model", default="", help=base)
    parser.add_argument("--check", choices=CHECKS, default="auto", help="see docs/hub.md")
    parser.add_argument(
        "--card", action="store_true", help="write README.md, a model card of the run"
    )
    hub = "upload the folder, with a card, to this repository of the Hugging Face Hub (token: HF_TOKEN)"
    parser.add_argument("--push", default="", metavar="ORG/NAME", help=hub)
    rarer.add_argument(
        "--private", action="store_true", help="with --push, create a private repository"
    )
    overwrite = "with --push, replace the repository's card even if somebody wrote or changed it"
    rarer.add_argument("--overwrite_card", action="store_true", help=overwrite)
    # A token on the command line would be visible to other users of the machine.
    refuse_token(arguments, "shardtrain export")
    options = parser.read(arguments)
    for name in ("private", "overwrite_card"):
        if getattr(options, name) and not options.push:
            raise ConfigError(
                Problem(
                    f"--{name}",
                    True,
                    rule="has no effect without --push",
                    fix="add --push ORG/NAME, or remove the option",
                )
            )
    # Push checks the repository and the token before anything is written.
    push = None
    if options.push:
        from shardtrain.tools.convert.pushing import Push

        push = Push(options.push, options.private, options.overwrite_card)
    status = _to_folder(options, push)
    if push is not None and status == 0:
        address = push.send(options.to or options.checkpoint)
        print(f"{address} contains the files; the hash of every file was verified")
    return status


def _to_folder(options: Any, push: Any) -> int:
    """Write the folder, unless FROM is a Hugging Face folder that is pushed unchanged.

    Return the exit status.
    """
    from shardtrain.hf.folder_config import is_hub_folder
    from shardtrain.tools.convert import card

    is_full_model = is_hub_folder(options.checkpoint)
    is_folder = is_full_model or bounded_reads.is_present(
        options.checkpoint / "adapter_config.json"
    )
    if is_folder:
        reject_use_ema(options.use_ema, options.checkpoint)
    if options.to is None:
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
    if not 0.001 <= options.shard_gigabytes <= 1000:
        raise ConfigError(
            f"--shard_gigabytes={options.shard_gigabytes} must be between 0.001 and 1000; use 5",
        )

    # An existing folder is an interrupted upload if its card identifies this checkpoint. Continue that
    # upload.
    if options.to.exists():
        identity = ""
        if not is_folder:
            identity = _identity(options, step_of(options.checkpoint, options.config, options.step))
        if push is not None and identity and card.exported(options.to) == identity:
            print(f"{options.to} already contains this checkpoint")
            return 0
        raise ConfigError(f"{options.to} already exists; name a new folder")
    if not is_full_model:
        return _export(options, options.checkpoint)

    # Convert one Hugging Face folder to another through a temporary checkpoint.
    from shardtrain.hf import importing

    reject_step(options.step, options.checkpoint)
    for name in ("config", "adapter", "base_model"):
        value = getattr(options, name)
        if value:
            rule = f"has no effect, because {options.checkpoint} is a Hugging Face folder with its own config.json"
            raise ConfigError(Problem(f"--{name}", str(value), rule=rule, fix="remove it"))
    # The checkpoint is as large as the model, so create it on the same disk and not in /tmp.
    options.to.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{options.to.name}.tmp-"
    with tempfile.TemporaryDirectory(dir=options.to.parent, prefix=prefix) as folder:
        checkpoint = Path(folder) / "step-0"
        importing.to_checkpoint(options.checkpoint, checkpoint)
        return _export(options, checkpoint)


def _identity(options: Any, checkpoint: Path) -> str:
    """Return a hash of the checkpoint and of the options that change the exported files."""
    from shardtrain.tools.convert import card

    tokenizer = str(options.tokenizer or "")
    choices = [options.dtype, options.shard_gigabytes, options.adapter, tokenizer]
    # Without averages, the hash is that of earlier versions, so their uploads can continue.
    if options.use_ema:
        choices.append("use_ema")
    if options.drop_mtp:
        choices.append("drop_mtp")
    return card.identity(checkpoint, *choices)


def _write_card(options: Any, checkpoint: Path, source: Any) -> None:
    """Write README.md to the new folder if requested, unless the folder already has one."""
    from shardtrain.checkpoint import files
    from shardtrain.tools.convert import card

    path = options.to / card.CARD
    is_wanted = options.card or options.push
    if not is_wanted or path.exists():
        return
    name = options.push.rpartition("/")[2] or os.path.basename(os.path.realpath(options.to))
    model_card = card.of_checkpoint(checkpoint, name, source, options.base_model, options.adapter)
    text = model_card.text(_identity(options, checkpoint))
    files.write_durable(path, text.encode())
    print(f"{path}: model card with the known facts; add the intended use")


def _export(options: Any, path: Path) -> int:
    """Export a checkpoint, or the selected checkpoint of a run, and return the exit status."""
    from shardtrain import models
    from shardtrain.hf import source
    from shardtrain.hf.hf_export import Export, export
    from shardtrain.lora import FACT

    checkpoint = step_of(path, options.config, options.step)
    model = model_options(checkpoint, options.config)
    module = models.find(model["name"])
    config = models.shape_of(
        module, model["flavor"], model["overrides"], model.get("norm_type", "rmsnorm")
    )
    if options.adapter:
        from shardtrain.tools.convert.adapters import export_adapter

        export_adapter(options, checkpoint, module, config, str(model.get("base") or ""))
        _write_card(options, checkpoint, None)
        return 0
    stored = manifest.read(checkpoint)
    if FACT in stored.facts:
        rule = "contains adapters, but no full model"
        raise ConfigError(
            f"{checkpoint} {rule}; add --adapter, or merge it first (shardtrain merge)"
        )

    # Find the folder of the initial weights, in the notes of an import or the run's configuration. It
    # provides the dtypes, config.json and the tokenizer.
    initial = source.of_checkpoint(checkpoint, stored)
    if initial is None and "loaded" in model:
        from shardtrain.hf import origin

        initial = origin.of_run(model["loaded"], module, config)
    if options.drop_mtp and not getattr(config, "num_nextn_predict_layers", 0):
        rule = f"has no effect, because {checkpoint} has no layers of multi-token prediction"
        raise ConfigError(Problem("--drop_mtp", True, rule=rule, fix="remove it"))
    tokens = {}
    if "loaded" in model and not options.keep_generation_config:
        tokens = tokens_of_run(model["loaded"], options.config is not None, options.tokenizer)
    request = Export(
        checkpoint,
        options.to,
        module,
        config,
        dtype=options.dtype,
        shard_bytes=int(options.shard_gigabytes * 1e9),
        source=initial,
        tokenizer=options.tokenizer or model.get("tokenizer"),
        max_tokens=model.get("seq_len", 0),
        tokens=tokens,
        labels=model.get("labels", ()),
        use_ema=options.use_ema,
        drop_mtp=options.drop_mtp,
    )
    files, notice = export(request)
    print(f"{options.to}: {', '.join(files)}; all weights were read back and are equal")
    if notice:
        print(notice)

    # A folder without a tokenizer cannot be used for text, so say where one was expected.
    if not any(folder.has_tokenizer for folder in request.sources()):
        reason = "the import recorded none"
        if request.tokenizer is not None:
            reason = f"{request.tokenizer} has no tokenizer files"
        elif "assets" in model:
            reason = f"the tokenizer of the run is {model['assets']!r}, not a folder"
        print(
            f"the folder has no tokenizer: {reason}; copy one there, or name a folder with --tokenizer"
        )
    if options.check != "weights":
        _check_logits(request, options.check == "logits")
    _write_card(options, checkpoint, initial)
    return 0


def _check_logits(export: Export, is_required: bool, obstacle: str = "") -> None:
    """Compare the logits of transformers and of this package.

    ``obstacle`` is why that is impossible, if known. Then print a line, or raise ConfigError if
    ``is_required``.
    """
    from shardtrain.hf import logits

    obstacle = obstacle or logits.why_not(export)
    if obstacle:
        if is_required:
            raise ConfigError(f"--check=logits is not possible: {obstacle}; use --check=weights")
        print(f"logits were not compared: {obstacle}")
        return
    error, scale = logits.largest_error(export)
    # A comparison with NaN is false, so NaN fails.
    if not error <= logits.TOLERANCE * max(scale, 1.0):
        raise CheckpointError(
            f"{export.output}: transformers' logits differ by {error:.2e}, "
            f"with logits up to {scale:.2g}; do not use this folder"
        )
    print(
        f"transformers returns the same logits: largest error {error:.2e}, with logits up to {scale:.2g}"
    )
