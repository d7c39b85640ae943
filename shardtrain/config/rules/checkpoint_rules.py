"""Rules about checkpoints: which are kept, when and where they are saved, and Hugging Face weights."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.assets import is_built_in
from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.values import any_of, problem
from shardtrain.config.task_file import read_task_file
from shardtrain.utils.errors import ConfigError, Problem


def _metrics(loaded: Loaded) -> list[str]:
    """Return the names of the validation's metrics that ``checkpoint.keep_best`` accepts."""
    try:
        names = read_task_file(loaded.config.task.name).metrics
    except ConfigError:
        # check_task reports the wrong task. Accept any name here
        return [loaded.config.checkpoint.keep_best]
    return [f"validation.{name}" for name in names]


def check_checkpoint(loaded: Loaded) -> Iterator[Problem]:
    """Yield options of checkpoints that contradict others or have no effect."""
    options = loaded.config.checkpoint
    yield from best_metric(loaded)
    yield from snapshots(loaded)
    if options.create_seed_checkpoint and options.load_only:
        yield problem(
            loaded,
            "checkpoint.create_seed_checkpoint",
            rule="saves, and checkpoint.load_only forbids it",
            fix="remove one of them",
        )
    if options.enable:
        yield from initial_hub_weights(loaded)
        yield from hub_exports(loaded)
    elif options.initial_load_path and not loaded.is_set("checkpoint.enable"):
        # Files that set checkpoint.enable = false, as torchtitan's do, get a note instead of an error.
        yield problem(
            loaded,
            "checkpoint.initial_load_path",
            rule="loads nothing while checkpoints are off",
            fix="set checkpoint.enable = true, or remove it",
        )


def snapshots(loaded: Loaded) -> Iterator[Problem]:
    """Snapshots complement checkpoints, and a restart must be free to choose the step."""
    options = loaded.config.checkpoint
    if options.snapshot_interval < 1:
        return
    option = "checkpoint.snapshot_interval"
    if not options.enable:
        yield problem(
            loaded,
            option,
            rule="requires checkpoints, which restart a run that has lost its snapshots",
            fix="set checkpoint.enable = true, or remove it",
        )
    if options.load_only:
        yield problem(
            loaded,
            option,
            rule="stores the training state, and checkpoint.load_only forbids it",
            fix="remove one of them",
        )
    if options.load_step >= 0:
        yield problem(
            loaded,
            option,
            rule="restarts from the newest step, and checkpoint.load_step names another one",
            fix="remove one of them",
        )


def best_metric(loaded: Loaded) -> Iterator[Problem]:
    """``keep_best`` names a metric of the validation."""
    options = loaded.config.checkpoint
    if not options.keep_best:
        return
    metrics = _metrics(loaded)
    if options.keep_best not in metrics:
        near = nearest(options.keep_best, metrics)
        yield problem(
            loaded,
            "checkpoint.keep_best",
            rule=f"must be {any_of(metrics)}, or empty",
            fix=f'did you mean "{near}"?' if near else f'use "{metrics[0]}"',
        )
    elif options.enable and not loaded.config.validation.enable:
        yield problem(
            loaded,
            "checkpoint.keep_best",
            rule="requires validation.enable = true",
            fix="set validation.enable = true, or remove it",
        )


def initial_hub_weights(loaded: Loaded) -> Iterator[Problem]:
    """Initial weights from a Hugging Face folder, and the options that only apply to them."""
    options = loaded.config.checkpoint
    model = loaded.config.model
    switch = "checkpoint.initial_load_in_hf"
    if options.initial_load_in_hf and not options.initial_load_model_only:
        yield problem(
            loaded,
            switch,
            rule="loads only weights, and checkpoint.initial_load_model_only=false requires more",
            fix="set checkpoint.initial_load_model_only = true",
        )
    if (
        options.initial_load_in_hf
        and options.initial_load_path is None
        and is_built_in(model.hf_assets_path)
    ):
        yield problem(
            loaded,
            switch,
            rule="needs a folder, and neither checkpoint.initial_load_path nor model.hf_assets_path names one",
            fix="set checkpoint.initial_load_path",
        )
    if options.initial_load_resize_embeddings:
        yield from resized_embeddings(loaded)

    # Formats of the weights
    if options.initial_load_legacy_bin and not options.initial_load_in_hf:
        yield problem(
            loaded,
            "checkpoint.initial_load_legacy_bin",
            rule="has no effect without checkpoint.initial_load_in_hf",
            fix=f"set {switch} = true, or remove it",
        )
    if options.initial_load_legacy_bin and options.initial_load_in_hf_quantized:
        yield problem(
            loaded,
            "checkpoint.initial_load_legacy_bin",
            rule="is not supported for quantized weights",
            fix="remove one of them",
        )
    if options.initial_load_in_hf_quantized and not options.initial_load_in_hf:
        yield problem(
            loaded,
            "checkpoint.initial_load_in_hf_quantized",
            rule="has no effect without checkpoint.initial_load_in_hf",
            fix=f"set {switch} = true, or remove it",
        )


def hub_exports(loaded: Loaded) -> Iterator[Problem]:
    """Exports to Hugging Face folders during the run, next to its checkpoints."""
    options = loaded.config.checkpoint
    # Both kinds of exports have the same requirements.
    exports = []
    if options.last_save_in_hf:
        exports.append("checkpoint.last_save_in_hf")
    if options.hf_interval > 0:
        exports.append("checkpoint.hf_interval")
    for option in exports:
        if options.load_only:
            yield problem(
                loaded,
                option,
                rule="saves, and checkpoint.load_only forbids it",
                fix="remove one of them",
            )
        if loaded.config.lora.enable:
            yield problem(
                loaded,
                option,
                rule="writes the weights of the full model, and a run with lora.enable only saves adapters",
                fix="remove it; shardtrain export --adapter and shardtrain merge create folders afterwards",
            )
        if "://" in options.folder:
            yield problem(
                loaded,
                option,
                rule=(
                    "renames a folder when it is complete, and checkpoint.folder is an object store, "
                    "which cannot rename"
                ),
                fix="remove it, and export afterwards",
            )


def check_pinned(loaded: Loaded, device: str | None) -> Iterator[Problem]:
    """Yield a problem if pinned memory, which is for copies from an accelerator, is requested on a CPU."""
    options = loaded.config.checkpoint
    if options.enable and options.async_mode == "async_with_pinned_mem" and device == "cpu":
        yield problem(
            loaded,
            "checkpoint.async_mode",
            rule="pins memory for copies from an accelerator, and training runs on the CPU",
            fix='use "async"',
        )


def checkpoint_notes(loaded: Loaded) -> list[str]:
    """Return notes about options that require another one. No errors, because files for other
    trainers set them.
    """
    options = loaded.config.checkpoint
    if not options.enable:
        return []
    required = {}
    if options.async_mode == "disabled":
        required["checkpoint.max_stall_seconds"] = "an async_mode"
    if options.interval_type != "automatic":
        required["checkpoint.mean_time_to_failure_hours"] = 'interval_type = "automatic"'
    if not options.keep_best and not loaded.config.validation.patience:
        required["checkpoint.best_mode"] = "keep_best or validation.patience"
    return [
        f"{name}: without effect unless {switch}"
        for name, switch in required.items()
        if loaded.is_set(name)
    ]


_EMBEDDINGS = {
    "embed", "embed_tokens", "embed_in", "word_embeddings", "token_embedding", "tok_embeddings", "wte", "shared",
    "head", "lm_head", "embed_out", "output",
}  # fmt: skip
"""Names of modules with a row per token: embeddings and output layers."""


def resized_embeddings(loaded: Loaded) -> Iterator[Problem]:
    """Additional embedding rows require a Hugging Face folder and a vocabulary size, and must be trained."""
    c = loaded.config
    option = "checkpoint.initial_load_resize_embeddings"
    if not c.checkpoint.initial_load_in_hf:
        yield problem(
            loaded,
            option,
            rule="requires the weights of a Hugging Face folder",
            fix="set checkpoint.initial_load_in_hf = true, or remove it",
        )
    if "vocab_size" not in c.model.overrides:
        yield problem(
            loaded,
            option,
            rule="requires the number of rows of the embedding",
            fix="set model.overrides.vocab_size to the tokenizer's number of ids",
        )
    # Without adapters, all weights are trained, including the new rows.
    trained_modules = {name.rpartition(".")[2] for name in c.lora.modules_to_save}
    if c.lora.enable and not trained_modules & _EMBEDDINGS:
        yield problem(
            loaded,
            option,
            rule="adds rows that nothing trains: adapters do not change the embedding",
            fix='set lora.modules_to_save = ["embed_tokens", "lm_head"], the names that PEFT uses',
        )


def check_storage(loaded: Loaded) -> Iterator[Problem]:
    """Yield wrong addresses of object stores, addresses with credentials, and conflicts of
    ``checkpoint.storage``.
    """
    for option in ("checkpoint.folder", "checkpoint.initial_load_path"):
        address = str(loaded.value(option) or "")
        if "://" in address:
            yield from store_address(loaded, option, address)
    checkpoint = loaded.config.checkpoint
    option = "checkpoint.storage"
    if checkpoint.storage == "first_node" and "://" in checkpoint.folder:
        yield problem(
            loaded,
            option,
            rule="is for a folder of one node, and checkpoint.folder is an object store",
            fix="remove it",
        )
    if checkpoint.storage == "first_node" and checkpoint.async_mode != "disabled":
        yield problem(
            loaded,
            option,
            rule="sends bytes over the process group, which training uses while checkpoint.async_mode saves",
            fix='set checkpoint.async_mode = "disabled", or use a shared folder',
        )


def store_address(loaded: Loaded, option: str, address: str) -> Iterator[Problem]:
    """An address names a bucket or folder of an object store, and contains no credentials."""
    # A credential precedes the bucket: s3://KEY:SECRET@bucket.
    scheme, _, rest = address.partition("://")
    if "@" in rest.partition("/")[0]:
        rule = "contains a credential, which logs and files would show"
        fix = "remove the credential, and set the store's own environment variables"
        # The value is not part of the message.
        yield Problem(option, None, rule, fix, loaded.where(option))
    elif scheme in ("file", "local"):
        yield problem(
            loaded,
            option,
            rule="addresses a local folder as an object store, which has weaker guarantees",
            fix="write the path without the scheme",
        )
    elif "::" in address or not rest.strip("/"):
        yield problem(
            loaded,
            option,
            rule="is not an address of a store",
            fix="use for example s3://bucket/run",
        )
