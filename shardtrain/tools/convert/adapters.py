"""``shardtrain merge`` and ``shardtrain export --adapter``: merge adapters into weights, or export a PEFT folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint.choice import EMA_HELP, HELP, reject_step, reject_use_ema, step_name
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.tools.convert.checkpoint_path import KEEP_HELP
from shardtrain.utils import output_target
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError

if TYPE_CHECKING:
    from shardtrain.config import Config


def main(arguments: Sequence[str]) -> int:
    """Run ``shardtrain merge ADAPTERS --to CHECKPOINT`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain merge",
        "Merge adapters into the weights with which they were trained.",
        "shardtrain merge outputs --to outputs/merged",
    )
    parser.add_argument(
        "adapters",
        type=Path,
        metavar="ADAPTERS",
        help="a run, a step-N folder, or a PEFT folder",
    )
    parser.add_argument("--step", type=step_name, help=HELP)
    parser.add_argument("--use_ema", action="store_true", help=EMA_HELP)
    parser.add_argument(
        "--to",
        type=output_target.folder_argument,
        required=True,
        metavar="CHECKPOINT",
        help="a new folder",
    )
    parser.add_argument(
        "--base",
        type=Path,
        help="checkpoint or Hugging Face folder of the base weights (default: from the run)",
    )
    parser.add_argument("--keep_generation_config", action="store_true", help=KEEP_HELP)
    parser.add_argument(
        "--config",
        type=Path,
        help="the run's TOML (default: the one next to the checkpoint)",
    )
    dtype_help = "dtype of the merged weights (default: the dtype of the base weights)"
    parser.add_argument("--dtype", choices=COMPUTE_DTYPES, default="", help=dtype_help)
    options = parser.read(arguments)
    from shardtrain.hf.folder_config import is_hub_folder
    from shardtrain.lora import peft
    from shardtrain.tools.convert.checkpoint_path import step_of

    # Only a run has steps and averages. A PEFT folder has one set of adapters.
    if peft.is_folder(options.adapters):
        reject_step(options.step, options.adapters)
        reject_use_ema(options.use_ema, options.adapters)
        _merge_peft(options)
    elif is_hub_folder(options.adapters):
        raise ConfigError(
            f"{options.adapters} is a full model without adapters; use it without merging"
        )
    else:
        options.adapters = step_of(options.adapters, options.config, options.step)
        _merge_checkpoint(options)
    print(
        f"{options.to} contains the full model; shardtrain export {options.to} --to HF_DIR exports it"
    )
    return 0


def _merge_peft(options: Any) -> None:
    """Merge the adapters of a PEFT folder into ``--base``, whose path the folder does not record."""
    from shardtrain import models
    from shardtrain.hf import origin
    from shardtrain.hf.hub_model import recognise
    from shardtrain.lora import frozen, merging, peft
    from shardtrain.tools.generate.locate_checkpoint import load_config

    base = options.base
    if base is None:
        raise ConfigError(
            f"{options.adapters} does not contain the path of its base model; name it with --base",
        )
    if (base / "config.json").exists():
        hub = recognise(base)
        module = models.find(hub.name)
        shape = hub.config
        facts = {"name": hub.name, "flavor": hub.flavor, "overrides": dict(hub.overrides)}
    else:
        config = load_config(base, options.config).config
        module, shape = models.configured(config.model)
        facts = _model_facts(config)

    adapters = peft.PeftFolder(options.adapters, module, shape)
    with frozen.FrozenWeights(base, module, shape) as weights:
        # A PEFT folder may contain copies of weights that it did not train.
        copies = adapters.copies.keys() & weights.shapes.keys()
        adapters.check_copies({name: weights.read(name) for name in copies})
        source = None
        if weights.path is not None:
            source = origin.of_path(weights.path, module, shape)
        merging.merge(
            weights, adapters.spec, adapters.read, options.to, options.dtype, facts, source
        )


def _merge_checkpoint(options: Any) -> None:
    """Merge the adapters of a checkpoint into the base weights of its run, or ``--base``."""
    from shardtrain import models
    from shardtrain.hf import origin
    from shardtrain.hf.generation_config import with_tokens
    from shardtrain.lora import frozen, merging
    from shardtrain.tools.convert.checkpoint_path import tokens_of_run
    from shardtrain.tools.generate.locate_checkpoint import load_config

    path = options.adapters
    adapters = merging.Adapters(path, options.use_ema)
    config = load_config(path, options.config).config
    module, shape = models.configured(config.model)
    facts = _model_facts(config)
    labels = adapters.num_labels(module)
    base_weights = frozen.find(
        adapters.stored.facts, path, config, options.base, module, shape, labels
    )
    with base_weights as weights:
        source = None
        if weights.path is not None:
            source = origin.of_path(weights.path, module, shape)
        if source is not None and not options.keep_generation_config:
            # The exported model takes its end tokens from these files, so add the tokens of the run's
            # data now.
            tokens = tokens_of_run(config, options.config is not None)
            source, _ = with_tokens(source, tokens)
        merging.merge(
            weights, adapters.spec, adapters.read, options.to, options.dtype, facts, source
        )


def _model_facts(config: Config) -> dict[str, Any]:
    from shardtrain import tasks

    model = config.model
    return {
        "name": model.name,
        "flavor": model.flavor,
        "overrides": dict(model.overrides),
        "norm_type": model.norm_type,
        "labels": tasks.labels_of(config),
    }


def export_adapter(options: Any, checkpoint: Path, module: Any, shape: Any, base: str) -> None:
    """Write a PEFT folder. Print its files, and the changed fields of config.json that PEFT cannot store.

    Args:
        options: Arguments of ``export``.
        checkpoint: The checkpoint of the adapters.
        module: The model file.
        shape: Sizes of the model.
        base: Path of the base model, a checkpoint or a folder, or "" if unknown.
    """
    from shardtrain.hf import origin
    from shardtrain.hf.hub_model import changed_fields
    from shardtrain.lora import adapter_export

    base_model = options.base_model or base
    dtype = options.dtype or "float32"
    names = adapter_export.export(
        checkpoint, options.to, module, shape, base_model, dtype, options.use_ema
    )
    print(f"{options.to}: {', '.join(names)}; read back and equal to the checkpoint")

    # Loading the folder uses config.json of the base model, which may have other values than the run.
    source = None
    if base:
        source = origin.of_path(Path(base), module, shape)
    changed = changed_fields(getattr(module, "HUB", None), shape, source)
    if changed:
        fields = ", ".join(changed)
        print(
            f"PEFT files cannot store these options; set them in config.json of the base model: {fields}"
        )
