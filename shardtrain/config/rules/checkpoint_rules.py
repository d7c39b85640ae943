"""Rules about checkpoints: which are kept, when and where they are saved, and what can be pinned."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.assets import is_built_in
from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.values import any_of, problem
from shardtrain.config.task_file import read_task_file
from shardtrain.utils.errors import ConfigError, Problem


def _metrics(loaded: Loaded) -> list[str]:
    """What a validation measures, as ``checkpoint.keep_best`` names it; the task itself may be wrong, and says so."""
    try:
        names = read_task_file(loaded.config.task.name).metrics
    except ConfigError:
        return [loaded.config.checkpoint.keep_best]
    return [f"validation.{name}" for name in names]


def check_checkpoint(loaded: Loaded) -> Iterator[Problem]:
    """Options of checkpoints that contradict others, or that would have no effect."""
    options = loaded.config.checkpoint
    validation = loaded.config.validation
    metrics = _metrics(loaded) if options.keep_best else []
    if options.keep_best and options.keep_best not in metrics:
        near = nearest(options.keep_best, metrics)
        fix = f'did you mean "{near}"?' if near else f'use "{metrics[0]}"'
        yield problem(loaded, "checkpoint.keep_best", f"must be {any_of(metrics)}, or empty", fix)
    elif options.keep_best and options.enable and not validation.enable:
        rule = "needs a validation, and there is none"
        yield problem(loaded, "checkpoint.keep_best", rule, "set validation.enable = true, or remove it")
    if options.create_seed_checkpoint and options.load_only:
        rule = "saves, and checkpoint.load_only forbids it"
        yield problem(loaded, "checkpoint.create_seed_checkpoint", rule, "remove one of them")
    if options.enable:
        yield from _check_hub(loaded)
    elif options.initial_load_path and not loaded.is_set("checkpoint.enable"):
        # Whoever wrote down that checkpoints are off, as torchtitan's files do, gets a note and no error
        rule = "loads nothing while checkpoints are off"
        yield problem(loaded, "checkpoint.initial_load_path", rule, "set checkpoint.enable = true, or remove it")


def _check_hub(loaded: Loaded) -> Iterator[Problem]:
    """Hugging Face weights: in at the start, out beside the checkpoints."""
    options = loaded.config.checkpoint
    model = loaded.config.model
    begins = "checkpoint.initial_load_in_hf"
    if options.initial_load_in_hf and not options.initial_load_model_only:
        rule = "starts from weights, and checkpoint.initial_load_model_only=false asks for more than a folder has"
        yield problem(loaded, begins, rule, "set checkpoint.initial_load_model_only = true")
    if options.initial_load_in_hf and options.initial_load_path is None and is_built_in(model.hf_assets_path):
        rule = "needs a folder, and neither checkpoint.initial_load_path nor model.hf_assets_path names one"
        yield problem(loaded, begins, rule, "set checkpoint.initial_load_path")
    if options.initial_load_resize_embeddings:
        yield from _check_resized(loaded)
    if options.initial_load_legacy_bin and not options.initial_load_in_hf:
        rule = "has no effect without checkpoint.initial_load_in_hf"
        yield problem(loaded, "checkpoint.initial_load_legacy_bin", rule, f"set {begins} = true, or remove it")
    if options.initial_load_legacy_bin and options.initial_load_in_hf_quantized:
        rule = "is for weights that are not quantised"
        yield problem(loaded, "checkpoint.initial_load_legacy_bin", rule, "remove one of them")
    if options.initial_load_in_hf_quantized and not options.initial_load_in_hf:
        rule = "has no effect without checkpoint.initial_load_in_hf"
        yield problem(loaded, "checkpoint.initial_load_in_hf_quantized", rule, f"set {begins} = true, or remove it")
    for option, is_set in (("last_save_in_hf", options.last_save_in_hf), ("hf_interval", options.hf_interval > 0)):
        if is_set and options.load_only:
            rule = "saves, and checkpoint.load_only forbids it"
            yield problem(loaded, f"checkpoint.{option}", rule, "remove one of them")
        if is_set and loaded.config.lora.enable:
            rule = "writes whole weights, and a run of adapters (lora.enable) saves those alone"
            fix = "remove it; shardtrain export --adapter and shardtrain merge make folders afterwards"
            yield problem(loaded, f"checkpoint.{option}", rule, fix)
        if is_set and "://" in options.folder:
            rule = "writes a folder that is renamed into place, and checkpoint.folder is a store, which cannot rename"
            yield problem(loaded, f"checkpoint.{option}", rule, "remove it, and export afterwards")


def check_pinned(loaded: Loaded, device: str | None) -> Iterator[Problem]:
    """Pinned memory is for copies from an accelerator."""
    options = loaded.config.checkpoint
    if options.enable and options.async_mode == "async_with_pinned_mem" and device == "cpu":
        rule = "pins memory for copies from an accelerator, and training runs on the CPU"
        yield problem(loaded, "checkpoint.async_mode", rule, 'use "async"')


def checkpoint_notes(loaded: Loaded) -> list[str]:
    """Options of checkpoints that wait for others; no errors, since files for other trainers set them."""
    options = loaded.config.checkpoint
    waits = {
        "checkpoint.max_stall_seconds": (options.async_mode == "disabled", "an async_mode"),
        "checkpoint.mean_time_to_failure_hours": (options.interval_type != "automatic", 'interval_type = "automatic"'),
        "checkpoint.best_mode": (
            not options.keep_best and not loaded.config.validation.patience,
            "keep_best or validation.patience",
        ),
    }
    return [
        f"{name}: without effect, which needs {switch}"
        for name, (is_off, switch) in waits.items()
        if options.enable and is_off and loaded.is_set(name)
    ]


_EMBEDDINGS = {
    "embed", "embed_tokens", "embed_in", "word_embeddings", "token_embedding", "tok_embeddings", "wte", "shared",
    "head", "lm_head", "embed_out", "output",
}  # fmt: skip
"""What models call the modules that hold a row for each token."""


def _check_resized(loaded: Loaded) -> Iterator[Problem]:
    """New rows are said to be wanted, can be read, and are trained."""
    c = loaded.config
    option = "checkpoint.initial_load_resize_embeddings"
    if not c.checkpoint.initial_load_in_hf:
        rule = "is for the weights of a Hugging Face folder"
        yield problem(loaded, option, rule, "set checkpoint.initial_load_in_hf = true, or remove it")
    if "vocab_size" not in c.model.overrides:
        rule = "needs the number of rows that the model is to have"
        yield problem(loaded, option, rule, "set model.overrides.vocab_size to the tokenizer's number of ids")
    saved = {name.rpartition(".")[2] for name in c.lora.modules_to_save}
    if c.lora.enable and not saved & _EMBEDDINGS:
        rule = "adds rows that nothing would train: adapters leave the embedding as it is"
        fix = 'set lora.modules_to_save = ["embed_tokens", "lm_head"], as PEFT asks for them'
        yield problem(loaded, option, rule, fix)


def check_storage(loaded: Loaded) -> Iterator[Problem]:
    """Addresses that would weaken what is promised of a checkpoint, or show a secret."""
    for place in ("checkpoint.folder", "checkpoint.initial_load_path"):
        address = str(loaded.value(place) or "")
        scheme, mark, rest = address.partition("://")
        if not mark:
            continue
        if "@" in rest.partition("/")[0]:
            rule = "holds a credential, which logs and files would show"
            fix = "take it out, and give it as the store's own environment variables"
            yield Problem(place, None, rule, fix, loaded.where(place))
        elif scheme in ("file", "local"):
            rule = "names a local folder as if it were an object store, which has weaker promises"
            yield problem(loaded, place, rule, "write the path alone")
        elif "::" in address or not rest.strip("/"):
            yield problem(loaded, place, "is not an address of a store", "use for example s3://bucket/run")
    checkpoint = loaded.config.checkpoint
    option = "checkpoint.storage"
    if checkpoint.storage == "first_node" and "://" in checkpoint.folder:
        yield problem(loaded, option, "is for a folder of one node, and checkpoint.folder is a store", "remove it")
    if checkpoint.storage == "first_node" and checkpoint.async_mode != "disabled":
        rule = "sends bytes over the process group, which training needs while checkpoint.async_mode saves"
        yield problem(loaded, option, rule, 'set checkpoint.async_mode = "disabled", or use a shared folder')
