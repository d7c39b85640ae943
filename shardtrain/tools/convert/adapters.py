"""``shardtrain merge`` and ``shardtrain export --adapter``: merge adapters into weights, or export a PEFT folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint.choice import HELP, reject_step, step_name
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.tools.convert.checkpoint_path import KEEP_HELP
from shardtrain.utils.arguments import StrictArgumentParser, output_path
from shardtrain.utils.errors import ConfigError

if TYPE_CHECKING:
    from shardtrain.config import Config


def main(words: Sequence[str]) -> int:
    """Run ``shardtrain merge ADAPTERS --to CHECKPOINT`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain merge",
        "Merge adapters into the weights with which they were trained.",
        "shardtrain merge outputs --to outputs/merged",
    )
    parser.add_argument("adapters", type=Path, metavar="ADAPTERS", help="a run, a step-N folder, or a PEFT folder")
    parser.add_argument("--step", type=step_name, help=HELP)
    parser.add_argument("--to", type=output_path, required=True, metavar="CHECKPOINT", help="a new folder")
    parser.add_argument(
        "--base", type=Path, help="checkpoint or Hugging Face folder of the base weights (default: from the run)"
    )
    parser.add_argument("--keep_generation_config", action="store_true", help=KEEP_HELP)
    parser.add_argument("--config", type=Path, help="the run's TOML (default: the one next to the checkpoint)")
    dtype_help = "dtype of the merged weights (default: the dtype of the base weights)"
    parser.add_argument("--dtype", choices=COMPUTE_DTYPES, default="", help=dtype_help)
    found = parser.read(words)
    from shardtrain.hf.folder_config import is_hub_folder
    from shardtrain.lora import peft
    from shardtrain.tools.convert.checkpoint_path import step_of

    is_peft = peft.is_folder(found.adapters)
    if is_peft:
        reject_step(found.step, found.adapters)
    elif is_hub_folder(found.adapters):
        raise ConfigError(f"{found.adapters} is a full model without adapters; use it without merging")
    else:
        found.adapters = step_of(found.adapters, found.config, found.step)
    _merge(found, is_peft)
    print(f"{found.to} contains the full model; shardtrain export {found.to} --to HF_DIR exports it")
    return 0


def _merge(found: Any, is_peft: bool) -> None:
    from shardtrain import models
    from shardtrain.hf import origin
    from shardtrain.hf.generation_config import with_tokens
    from shardtrain.hf.hub_model import recognise
    from shardtrain.lora import frozen, merging, peft
    from shardtrain.tools.convert.checkpoint_path import tokens_of_run
    from shardtrain.tools.generate.locate_checkpoint import load_config

    # A PEFT folder does not record the path of its base weights, so the user must pass --base.
    where = found.base if is_peft else found.adapters
    if where is None:
        raise ConfigError(f"{found.adapters} does not contain the path of its base model; name it with --base")
    adapters: peft.PeftFolder | merging.Adapters | None = None if is_peft else merging.Adapters(where)
    config = None
    if is_peft and (where / "config.json").exists():
        hub = recognise(where)
        module, shape = models.find(hub.name), hub.config
        model = {"name": hub.name, "flavor": hub.flavor, "overrides": dict(hub.overrides)}
    else:
        config = load_config(where, found.config).config
        module, shape = models.configured(config.model)
        model = _model_facts(config)

    if adapters is None:
        adapters, weights = peft.PeftFolder(found.adapters, module, shape), frozen.FrozenWeights(where, module, shape)
    else:
        assert config is not None and isinstance(adapters, merging.Adapters)
        labels = adapters.num_labels(module)
        weights = frozen.find(adapters.stored.facts, where, config, found.base, module, shape, labels)
    with weights:
        if isinstance(adapters, peft.PeftFolder):
            copies = adapters.copies.keys() & weights.shapes.keys()
            adapters.check_copies({name: weights.read(name) for name in copies})
        begun = origin.of_path(weights.path, module, shape) if weights.path is not None else None
        if begun is not None and config is not None and not is_peft and not found.keep_generation_config:
            # The exported model takes its end tokens from these files, so add the tokens of the run's data now.
            begun, _ = with_tokens(begun, tokens_of_run(config, found.config is not None))
        merging.merge(weights, adapters.spec, adapters.read, found.to, found.dtype, model, begun)


def _model_facts(config: Config) -> dict[str, Any]:
    from shardtrain import tasks

    model = config.model
    facts = {"name": model.name, "flavor": model.flavor, "overrides": dict(model.overrides)}
    return {**facts, "norm_type": model.norm_type, "labels": tasks.labels_of(config)}


def export_adapter(found: Any, checkpoint: Path, module: Any, shape: Any, begun: str) -> None:
    """Write a PEFT folder. Print its files, and the changed fields of config.json that PEFT cannot store.

    Args:
        found: Arguments of ``export``.
        checkpoint: The checkpoint of the adapters.
        module: The model file.
        shape: Sizes of the model.
        begun: Path of the base model, a checkpoint or a folder, or "" if unknown.
    """
    from shardtrain.hf import origin
    from shardtrain.hf.hub_model import changed_fields
    from shardtrain.lora import adapter_export

    names = adapter_export.export(
        checkpoint, found.to, module, shape, found.base_model or begun, found.dtype or "float32"
    )
    print(f"{found.to}: {', '.join(names)}; read back and equal to the checkpoint")
    source = origin.of_path(Path(begun), module, shape) if begun else None
    if changed := changed_fields(getattr(module, "HUB", None), shape, source):
        print(f"PEFT files cannot store these options; set them in config.json of the base model: {', '.join(changed)}")
