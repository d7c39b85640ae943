"""``shardtrain merge`` and ``shardtrain export --adapter``: adapters into their weights, or into a folder of PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint.choice import HELP, reject_step, step_name
from shardtrain.tools.convert.checkpoint import KEEP_HELP
from shardtrain.utils.arguments import Arguments
from shardtrain.utils.errors import ConfigError

if TYPE_CHECKING:
    from shardtrain.config import Config

DTYPES = ("float32", "float16", "bfloat16")


def main(words: Sequence[str]) -> int:
    """``shardtrain merge ADAPTERS --to CHECKPOINT``; gives the exit status."""
    parser = Arguments(
        "shardtrain merge",
        "Add adapters to the weights beside which they were trained.",
        "shardtrain merge outputs --to outputs/merged",
    )
    parser.add_argument("adapters", type=Path, metavar="ADAPTERS", help="a run, a step-N folder, or a PEFT folder")
    parser.add_argument("--step", type=step_name, help=HELP)
    parser.add_argument("--to", type=Path, required=True, metavar="CHECKPOINT", help="a new folder")
    parser.add_argument("--base", type=Path, help="checkpoint or Hugging Face folder of the weights (the run's own)")
    parser.add_argument("--keep_generation_config", action="store_true", help=KEEP_HELP)
    parser.add_argument("--config", type=Path, help="the run's TOML; found beside the checkpoint unless given")
    parser.add_argument("--dtype", choices=DTYPES, default="", help="type of the sum (default: that of the weights)")
    found = parser.read(list(words))
    if found is None:
        return 0
    from shardtrain.lora import peft

    if peft.is_folder(found.adapters):
        reject_step(found.step, found.adapters)
        _merge_peft(found)
    else:
        from shardtrain.hf.opening import is_hub_folder
        from shardtrain.tools.convert.checkpoint import step_of

        if is_hub_folder(found.adapters):
            raise ConfigError(f"{found.adapters} is a whole model and no adapters; use it as it is")
        found.adapters = step_of(found.adapters, found.config, found.step)
        _merge(found)
    print(f"{found.to} holds the whole model; shardtrain export {found.to} --to HF_DIR writes it for other programs")
    return 0


def _merge(found: Any) -> None:
    from shardtrain import models
    from shardtrain.hf import origin
    from shardtrain.hf.generation_config import with_tokens
    from shardtrain.lora import frozen, merging
    from shardtrain.tools.convert.checkpoint import tokens_of_run
    from shardtrain.tools.generate.locate_checkpoint import load_config

    adapters = merging.Adapters(found.adapters)
    config = load_config(found.adapters, found.config).config
    module = models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    labels = adapters.num_labels(module)
    with frozen.find(adapters.stored.facts, found.adapters, config, found.base, module, shape, labels) as weights:
        model = _model_facts(config)
        begun = origin.of_path(weights.path, module, shape) if weights.path is not None else None
        if begun is not None and not found.keep_generation_config:
            # Nothing but these files remembers the run's data, so they get its end tokens now
            begun, _ = with_tokens(begun, tokens_of_run(config, found.config is not None))
        merging.merge(weights, adapters.spec, adapters, found.to, found.dtype, model, begun)


def _merge_peft(found: Any) -> None:
    """A folder of PEFT does not say which bytes it was trained beside: the user does, with --base."""
    from shardtrain import models
    from shardtrain.hf import origin
    from shardtrain.hf.model import recognise
    from shardtrain.lora import merging
    from shardtrain.lora.frozen import Frozen
    from shardtrain.lora.peft import PeftFolder
    from shardtrain.tools.generate.locate_checkpoint import load_config

    if found.base is None:
        raise ConfigError(f"{found.adapters} does not say where its weights are; name them with --base")
    if (found.base / "config.json").exists():
        hub = recognise(found.base)
        module = models.find(hub.name)
        shape = hub.config
        model = {"name": hub.name, "flavor": hub.flavor, "overrides": dict(hub.overrides)}
    else:
        config = load_config(found.base, found.config).config
        module = models.find(config.model.name)
        shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
        model = _model_facts(config)
    adapters = PeftFolder(found.adapters, module, shape)
    with Frozen(found.base, module, shape) as weights:
        adapters.check_copies({name: weights.read(name) for name in adapters.copies.keys() & weights.shapes.keys()})
        factors = {name: adapters.read(name) for name in adapters.names.tensors}
        begun = origin.of_path(found.base, module, shape)
        merging.merge(weights, adapters.spec, factors, found.to, found.dtype, model, begun)


def _model_facts(config: Config) -> dict[str, Any]:
    from shardtrain import tasks

    model = config.model
    facts = {"name": model.name, "flavor": model.flavor, "overrides": dict(model.overrides)}
    return {**facts, "norm_type": model.norm_type, "labels": tasks.labels_of(config)}


def export_adapter(checkpoint: Path, output: Path, module: Any, shape: Any, base: str, dtype: str) -> int:
    """Write a folder of PEFT, and say so; gives the exit status."""
    from shardtrain.lora import exporting

    names = exporting.export(checkpoint, output, module, shape, base, dtype)
    print(f"{output}: {', '.join(names)}; every number was read back and is equal")
    return 0
