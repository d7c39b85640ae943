"""Options of older configuration files: a table of renamed options, and rules that combine several options.

Covers torchtrain of February 2024, torchtitan from then to v0.2.2 including unreleased states, and the
command line of v0.3.0. Each use of an old name produces one notice. Options that torchtitan silently ignored
are reported and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardtrain.config.coerce import Unfit, coerce, from_texts
from shardtrain.config.model_file import read_model_file, shape
from shardtrain.config.schema import Model
from shardtrain.config.settings import Setting, Value
from shardtrain.facts.quantization import LINEAR
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class Alias:
    """Current name of an older option.

    Attributes:
        new: the current option, or None if there is no counterpart.
        kind: type of the old value.
        translate: converts the old value to the current one. None keeps the value.
        why: explanation that the notice adds.
    """

    new: str | None
    kind: Any = str
    translate: Callable[[Any], Any] | None = None
    why: str = ""


def _inverted(value: bool) -> bool:
    return not value


def _converter_list(value: bool | str) -> list[str]:
    """Convert "dynamic" or true, the old switch for float8 linear layers, to a list of converters."""
    if value not in ("", "dynamic", True, False):
        raise Unfit('was "" or "dynamic"', 'use model.converters = ["quantize.linear.float8"]')
    return [LINEAR] if value else []


def _names(value: str | list[str]) -> list[str]:
    """Split comma-separated text, the old form of lists."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


class _Cuts(list[str]):
    """First layers of the second and later pipeline stages, which ``_cuts`` converts to lists of modules."""


def _without_path(value: str) -> str | None:
    """Return None for an empty custom_model_path, which meant the model in model.name."""
    return value or None


def _mask(value: str) -> str:
    masks = {"causal": "off", "block_causal": "on"}
    if value not in masks:
        raise Unfit('was "causal" or "block_causal"', 'set data.document_mask = "on" or "off"')
    return masks[value]


def _dynamic(value: str) -> None:
    if value != "dynamic":
        raise Unfit("selects scales that torchao has removed", 'remove it: scales are "dynamic"')


def _recompute(value: bool) -> str:
    """Return the recomputation mode of torchtrain in February 2024, which always recomputed."""
    return "selective" if value else "full"


def _only_fsdp(value: str) -> None:
    if value == "ddp":
        raise Unfit(
            "selects full replicas",
            "set parallelism.data_parallel_replicate_degree and a shard degree of 1",
        )
    if value != "fsdp":
        raise Unfit('was "fsdp" or "ddp"', "remove it")


def _rejected(accepted: Any, rule: str, fix: str) -> Callable[[Any], None]:
    """Return a translation that drops the value ``accepted`` and rejects all others."""

    def translate(value: Any) -> None:
        if value != accepted:
            raise Unfit(rule, fix)

    return translate


def _config_file(folder: str) -> str:
    return f"{folder}/job_config.json"


def _same(prefix: str, new_prefix: str, kinds: Mapping[str, Any]) -> dict[str, Alias]:
    """Return aliases for keys that moved to another section and kept their name."""
    return {f"{prefix}.{key}": Alias(f"{new_prefix}.{key}", kind) for key, kind in kinds.items()}


# Degrees of parallelism, which torchtitan first had in [training] or [experimental].
_DEGREES = {
    "tensor_parallel_degree": int,
    "pipeline_parallel_degree": int,
    "context_parallel_degree": int,
}
_MOVED = {
    **_DEGREES,
    "data_parallel_replicate_degree": int,
    "data_parallel_shard_degree": int,
    "fsdp_reshard_after_forward": str,
    "disable_loss_parallel": bool,
    "enable_async_tensor_parallel": bool,
    "context_parallel_rotate_method": str,
    "pipeline_parallel_schedule": str,
    "pipeline_parallel_schedule_csv": str,
    "pipeline_parallel_microbatch_size": int,
}
# Keys of [float8], [mx] and [profiler]. These sections have other names now.
_FLOAT8 = {
    "enable_fsdp_float8_all_gather": bool,
    "precompute_float8_dynamic_scale_for_fsdp": bool,
    "recipe_name": str,
    "emulate": bool,
}
_GONE_AUTOGRAD = Alias(
    None,
    bool,
    why="compiled autograd was an experiment that is not needed for any of this",
)
_CUTS = Alias(
    "parallelism.module_fqns_per_model_part",
    list[str],
    _Cuts,
    why="each cut begins a stage, whose modules are listed",
)
_DROPPED = "torchtitan had no such option and ignored it silently"
_PROFILER = {
    **dict.fromkeys(("enable_profiling", "enable_memory_snapshot"), bool),
    **dict.fromkeys(("save_traces_folder", "save_memory_snapshot_folder"), str),
    **dict.fromkeys(("profile_freq", "profiler_active", "profiler_warmup"), int),
}
_MX = {"recipe_name": str, "mxfp8_dim1_cast_kernel_choice": str, "filter_fqns": list[str]}

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        # [job], [metrics] and [profiling].
        "global.dump_folder": Alias("job.dump_folder", str),
        "job.print_args": Alias("job.print_config", bool),
        "job.use_for_integration_test": Alias(
            None,
            bool,
            why="it marked the files of torchtitan's own tests",
        ),
        "metrics.use_for_integration_test": Alias(
            None,
            bool,
            why="it marked the files of torchtitan's own tests",
        ),
        "profiling.run_profiler": Alias("profiling.enable_profiling", bool),
        "profiling.profile_every_x_iter": Alias("profiling.profile_freq", int),
        "metrics.enable_color_printing": Alias("metrics.disable_color_printing", bool, _inverted),
        "metrics.rank_0_only": Alias("metrics.save_for_all_ranks", bool, _inverted),
        # [optimizer] and [lr_scheduler].
        "optimizer.fused": Alias(
            "optimizer.implementation", bool, {True: "fused", False: "foreach"}.get
        ),
        "optimizer.foreach": Alias(
            "optimizer.implementation",
            bool,
            {True: "foreach", False: "for-loop"}.get,
        ),
        "lr_scheduler.lr_min": Alias("lr_scheduler.min_lr_factor", float),
        # [training] in torchtitan's versions of 2024.
        "training.batch_size": Alias("training.local_batch_size", int),
        "training.warmup_steps": Alias("lr_scheduler.warmup_steps", int),
        "training.warmup_pct": Alias(
            "lr_scheduler.warmup_steps",
            float,
            why="it becomes max(int(steps * warmup_pct), 2) steps",
        ),
        "training.compile": Alias("compile.enable", bool),
        "training.seed": Alias("debug.seed", int),
        "training.deterministic": Alias("debug.deterministic", bool),
        # Switches for float8, each of which becomes a converter.
        "training.fp8_linear": Alias("model.converters", bool | str, _converter_list),
        "training.enable_fp8_linear": Alias("model.converters", bool, _converter_list),
        "training.enable_float8_linear": Alias("model.converters", bool, _converter_list),
        "float8.enable_float8_linear": Alias("model.converters", bool, _converter_list),
        **{
            f"training.{old}": Alias(f"quantize.linear.float8.{new}", bool)
            for old, new in (
                ("enable_fsdp_fp8_all_gather", "enable_fsdp_float8_all_gather"),
                ("enable_fsdp_float8_all_gather", "enable_fsdp_float8_all_gather"),
                (
                    "precompute_float8_dynamic_scale_for_fsdp",
                    "precompute_float8_dynamic_scale_for_fsdp",
                ),
            )
        },
        **{
            f"{start}scaling_type_{part}": Alias(None, str, _dynamic, why="scales are dynamic")
            for start in ("float8.", "training.float8_")
            for part in ("input", "weight", "grad_output")
        },
        # Recomputation, masks and debugging.
        "training.enable_selective_ac": Alias(
            "activation_checkpoint.mode",
            bool,
            _recompute,
            why="every layer was recomputed, or all but its matmuls",
        ),
        "training.debug_moe_force_load_balance": Alias("debug.moe_force_load_balance", bool),
        "model.use_flex_attn": Alias(None, bool, why="the mask determines the attention kernel"),
        "model.attn_mask_type": Alias("data.document_mask", str, _mask),
        # The mesh.
        "training.data_parallel_degree": Alias("parallelism.data_parallel_shard_degree", int),
        "training.data_parallel_type": Alias(
            None,
            str,
            _only_fsdp,
            why="data parallel ranks shard the parameters",
        ),
        "training.sequence_parallel_degree": Alias("parallelism.tensor_parallel_degree", int),
        "training.enable_loss_parallel": Alias(
            "parallelism.disable_loss_parallel", bool, _inverted
        ),
        # [checkpoint], [comm] and others.
        "training.checkpoint_interval": Alias("checkpoint.interval", int),
        "training.checkpoint_interval_type": Alias("checkpoint.interval_type", str),
        "training.checkpoint_folder": Alias("checkpoint.folder", str),
        "comm.timeout_seconds": Alias("comm.train_timeout_seconds", int),
        "estimate.memory": Alias("memory_estimation.enable", bool),
        "estimate.mode": Alias(
            "memory_estimation.disable_fake_mode", str, {"fake": False, "real": True}.get
        ),
        "job.save_config_folder": Alias(
            "job.save_config_file", str, _config_file, "the file was job_config.json in it"
        ),
        "metrics.disable_logging_from_checkpoint": Alias(
            None, bool, why="metrics of earlier steps are not sent again when a run continues"
        ),
        "experimental.pipeline_parallel_split_mode": Alias(
            None,
            str,
            _rejected(
                "manual",
                "selects stages split by a tracer",
                'remove it: only "manual" is supported',
            ),
            "stages are cut by the model's LAYOUT",
        ),
        # The command line of v0.3.0.
        "hf_assets_path": Alias("model.hf_assets_path", str),
        "dump_folder": Alias("job.dump_folder", str),
        "debug.print_config": Alias("job.print_config", bool),
        "debug.save_config_file": Alias("job.save_config_file", str),
        "compile.enable_async_tensor_parallel": Alias(
            "parallelism.enable_async_tensor_parallel", bool
        ),
        **_same("profiler", "profiling", _PROFILER),
        "training.disable_cuda_graphs": Alias(None, bool, why="no CUDA graphs are recorded here"),
        "parallelism.enable_sequence_parallel": Alias(
            None,
            bool,
            _rejected(
                True,
                "selects tensor parallelism without split sequences",
                "remove it: sequences are split",
            ),
            "tensor parallelism splits sequences between layers",
        ),
        "parallelism.enable_fsdp_symm_mem": Alias(
            None, bool, why="FSDP uses PyTorch's own buffers"
        ),
        "parallelism.spmd_backend": Alias(
            None, str, why="DTensors are sharded by the model's LAYOUT"
        ),
        "debug.spmd_typechecking": Alias(
            None, bool, why="DTensors are sharded by the model's LAYOUT"
        ),
        # Debugging options without a counterpart.
        "debug.detect_anomaly": Alias(
            None,
            bool,
            why="a failed step always names the module of the first non-finite number",
        ),
        "debug.enable_structured_logging": Alias(None, bool, why="metrics.jsonl is always written"),
        "experimental.torch_spmd": Alias(
            None, bool, why="DTensors are sharded by the model's LAYOUT"
        ),
        # Keys that moved to [parallelism].
        **_same("training", "parallelism", _MOVED),
        **_same("experimental", "parallelism", _MOVED),
        "experimental.enable_loss_parallel": Alias(
            "parallelism.disable_loss_parallel", bool, _inverted
        ),
        "experimental.custom_model_path": Alias(
            "model.name", str, _without_path, why="a path in model.name is a model file of yours"
        ),
        **{
            f"{s}.enable_compiled_autograd": _GONE_AUTOGRAD
            for s in ("experimental", "parallelism", "training")
        },
        **{f"{s}.pipeline_parallel_split_points": _CUTS for s in ("experimental", "parallelism")},
        **{
            f"{s}.pipeline_parallel_microbatches": Alias(
                "parallelism.pipeline_parallel_microbatch_size",
                int,
                why="it becomes local_batch_size / microbatches",
            )
            for s in ("experimental", "parallelism")
        },
        # [checkpoint], and switches that ended in "enabled".
        "checkpoint.enable_checkpoint": Alias("checkpoint.enable", bool),
        "checkpoint.model_weights_only": Alias("checkpoint.last_save_model_only", bool),
        "checkpoint.last_save_model_weights_only": Alias("checkpoint.last_save_model_only", bool),
        "checkpoint.initial_load_model_weights_only": Alias(
            "checkpoint.initial_load_model_only", bool
        ),
        "checkpoint.last_save_in_safetensors_format": Alias("checkpoint.last_save_in_hf", bool),
        "memory_estimation.enabled": Alias("memory_estimation.enable", bool),
        "validation.enabled": Alias("validation.enable", bool),
        # Quantization.
        **_same("float8", "quantize.linear.float8", _FLOAT8),
        "float8.filter_fqns": Alias("quantize.linear.float8.filter_fqns", list[str]),
        "hf_transformers.model": Alias(
            None,
            str,
            why='model.name = "transformers" runs from a folder, named in model.hf_assets_path',
        ),
        "float8.moe_fqns_prototype": Alias("quantize.grouped_mm.float8.fqns", list[str]),
        "float8.moe_fqns": Alias(
            None,
            list[str],
            why=f"{_DROPPED}; experts compute in float8 with quantize.grouped_mm.float8.fqns",
        ),
        "float8.force_recompute_fp8_weight_in_bwd": Alias(
            None, bool, why="weights are always rounded again"
        ),
        **_same("mx", "quantize.linear.mx", _MX),
        "mx.use_fp8_dim1_cast_triton_kernel": Alias(
            None, bool, why="casts are PyTorch's operations here"
        ),
        **_same(
            "quantize.dense.float8", "quantize.linear.float8", {**_FLOAT8, "filter_fqns": list[str]}
        ),
        **_same("quantize.dense.mx", "quantize.linear.mx", _MX),
        **_same("quantize.moe.float8", "quantize.grouped_mm.float8", {"fqns": list[str]}),
        **_same(
            "quantize.moe.mx", "quantize.grouped_mm.mx", {"recipe_name": str, "fqns": list[str]}
        ),
        "mx.moe_fqns_prototype": Alias("quantize.grouped_mm.mx.fqns", list[str]),
    }
)

# Renamed values of options that keep their name.
_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("model.name", "llama"): "llama2",
        ("model.name", "transformers_backend"): "transformers",
        ("model.name", "transformers_modeling_backend"): "transformers",
        ("model.norm_type", "compiled_rmsnorm"): "rmsnorm",
        ("quantize.linear.mx.recipe_name", "mxfp8"): "mxfp8_cublas",
        **{
            (f"{section}.pipeline_parallel_schedule", old): "Interleaved1F1B"
            for section in ("experimental", "parallelism")
            for old in (
                "interleaved_1f1b",
                "flexible_interleaved_1f1b",
                "FlexibleInterleaved1F1B",
                "flexibleinterleaved1f1b",
            )
        },
    }
)
# Renamed entries of model.converters.
_CONVERTERS: Mapping[str, str] = MappingProxyType(
    {
        "float8": LINEAR,
        "mx": "quantize.linear.mx",
        "quantize.dense.float8": LINEAR,
        "quantize.dense.mx": "quantize.linear.mx",
        "quantize.moe.float8": "quantize.grouped_mm.float8",
        "quantize.moe.mx": "quantize.grouped_mm.mx",
    }
)
# Endings of torchtitan's flavors that selected a kernel for document masks. Without the ending, the flavor
# names the same model.
_MASKED_FLAVORS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
_IROPE = "here this flavor has layers without positions, and chunks in the others, as the published model"
# Renamed flavors: (model, old flavor) -> (current flavor, reason).
_FLAVORS: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("llama2", "40B"): ("26B", 'torchtrain called these 26 billion parameters "40B"'),
        ("deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite"): (
            "16B",
            "flavors are named by their parameters",
        ),
        **{
            ("llama4", f"{name}_irope"): (name, _IROPE)
            for name in ("debugmodel", "17bx16e", "17bx128e")
        },
    }
)
TORCHTITAN_DATASETS = ("c4", "c4_mini", "c4_test")
# Flavors of torchtitan's qwen3 that have experts. Their model file is qwen3_moe.
_QWEN3_MOE = ("debugmodel_moe", "30B-A3B", "235B-A22B")
# Lists that used to be comma-separated text.
_LISTS = frozenset(
    {"model.converters", "quantize.linear.float8.filter_fqns", "quantize.linear.mx.filter_fqns"},
)
_LISTS_OLD = frozenset({"checkpoint.exclude_from_loading"}) | _LISTS


def old_kinds() -> dict[str, Any]:
    """Return the type of every older option. The command line parser needs it."""
    return {name: alias.kind for name, alias in ALIASES.items()}


@dataclass
class Rewritten:
    """Settings under current names, with notices and problems of the translation.

    ``changes`` contains the notices of settings whose results differ from the older program's.
    """

    settings: list[Setting]
    notices: list[str]
    problems: list[Problem]
    changes: list[str] = field(default_factory=list)

    def of(self, option: str) -> list[Setting]:
        """Return the settings of one option, in their order."""
        return [setting for setting in self.settings if setting.option == option]


def rewrite(settings: list[Setting]) -> Rewritten:
    """Convert every setting to its current name and value. Current settings stay unchanged."""
    done = Rewritten([], [], [])
    converters: list[Setting] = []
    for setting in settings:
        alias = ALIASES.get(setting.option)
        if alias is None:
            # An option with a current name may still have an old value.
            done.settings.append(_respell(setting, done))
            continue
        new = _rename(setting, alias, done)
        if new is None:
            continue
        # Old switches add one converter each to the list, instead of replacing it.
        if new.option == "model.converters":
            converters.append(new)
        else:
            done.settings.append(_respell(new, done))

    # Rules that need all settings.
    _merge_converters(done, converters)
    _superseded(done, settings)
    _finish(done, settings)
    return done


def _rename(setting: Setting, alias: Alias, done: Rewritten) -> Setting | None:
    """Return the setting under its current name, or None if it has no counterpart or cannot be translated."""
    old = setting.option
    # File and line of the old option, for the notices.
    where = setting.where
    # Convert the value to its old type, then to the current one.
    try:
        kind = alias.kind
        value: Any
        if kind == list[str] and isinstance(setting.value, str):
            value = _names(setting.value)
        elif setting.is_text:
            value = from_texts(setting.value, kind)
        else:
            value = coerce(setting.value, kind)
        if alias.translate is not None:
            value = alias.translate(value)
    except Unfit as unfit:
        done.problems.append(Problem(old, setting.shown, unfit.rule, unfit.fix, where))
        return None
    # The option has no counterpart. ``why`` is the reason.
    if alias.new is None:
        done.notices.append(f"{where}: {old} is ignored: {alias.why}")
        return None
    if value is None:
        done.notices.append(f"{where}: {old} is ignored: it is empty")
        return None

    # A document mask of torchtitan did not restart positions, so its results change.
    masks_documents = alias.translate is _mask and value == "on"
    why = ""
    if masks_documents:
        why = ": here positions restart in each document, too"
    elif alias.why:
        why = f": {alias.why}"
    elif alias.translate is _inverted:
        why = " (its opposite)"
    done.notices.append(f"{where}: {old} is called {alias.new} now{why}")
    if masks_documents:
        done.changes.append(done.notices[-1])
    return Setting(alias.new, value, where)


def _respell(setting: Setting, done: Rewritten) -> Setting:
    """Replace the outdated spelling of a setting's value by the current one.

    The option's name must already be current. If the value is current too, return the setting unchanged.
    """
    option = setting.option
    value = setting.value
    where = setting.where
    # On the command line a value is a list of texts.
    text = value
    if setting.is_text and len(value) == 1:
        text = value[0]
    if isinstance(text, str) and (option, text) in _VALUES:
        new = _VALUES[option, text]
        done.notices.append(f'{where}: {option} = "{text}" is "{new}" now')
        return Setting(option, new, where)
    if option in _LISTS_OLD and isinstance(value, str):
        value = _names(value)
        done.notices.append(f"{where}: {option} is a list now: {value}")
    if option == "model.converters" and isinstance(value, list | tuple):
        names = value
        if setting.is_text:
            names = _names(",".join(value))
        old = [name for name in names if name in _CONVERTERS]
        for name in old:
            done.notices.append(f'{where}: the converter "{name}" is "{_CONVERTERS[name]}" now')
        if old:
            return Setting(option, [_CONVERTERS.get(name, name) for name in names], where)
    if value is setting.value:
        return setting
    return Setting(option, value, where)


def _merge_converters(done: Rewritten, added: list[Setting]) -> None:
    """Append the converters of older switches to model.converters. A switch that is off adds nothing."""
    added = [setting for setting in added if setting.value]
    if not added:
        return
    # The last list counts. A list of the command line has replaced the list of the file.
    lists = done.of("model.converters")
    given = []
    if lists and not lists[-1].is_text:
        given = lists[-1].value
    names = list(given)
    for setting in added:
        names += [name for name in setting.value if name not in names]
    # Keep the list unchanged if the switches only repeat its converters.
    if len(names) > len(given):
        done.settings = [
            setting for setting in done.settings if setting.option != "model.converters"
        ]
        done.settings.append(Setting("model.converters", names, added[-1].where))


def _superseded(done: Rewritten, given: list[Setting]) -> None:
    """Drop training.compile if compile.enable is also set, as newer versions of torchtitan do."""
    from_file = [setting for setting in given if not setting.is_text]
    old = next((s for s in from_file if s.option == "training.compile"), None)
    new = next((s for s in from_file if s.option == "compile.enable"), None)
    if old and new:
        # The translated training.compile has the origin of the old setting.
        done.settings = [
            s for s in done.settings if s.option != "compile.enable" or s.where != old.where
        ]
        done.notices.append(
            f"{old.where}: training.compile is ignored: compile.enable at {new.where} decides",
        )


def _finish(done: Rewritten, old: list[Setting]) -> None:
    """Apply the rules of older files that involve several options."""
    given = {setting.option: setting for setting in old}
    new = {setting.option: setting for setting in done.settings}
    # _flavor must run before _cuts, which needs the number of layers of the flavor.
    _warmup(done, given, new)
    _folder(done, given, new)
    _microbatches(done, given, new)
    _one_implementation(done, given)
    _flavor(done, new)
    _experts_of_qwen3(done, new)
    _cuts(done)
    _dataset_of_path(done, new)
    _validation_set(done, given, new)
    _tags_of_2024(done, given, new)


def _add(done: Rewritten, option: str, value: Value, where: str, why: str) -> None:
    done.settings.append(Setting(option, value, where))
    # The notice shows values as TOML writes them.
    shown = value
    if isinstance(value, bool):
        shown = str(value).lower()
    done.notices.append(f"{where}: {option} = {shown}: {why}")


def _warmup(done: Rewritten, given: Mapping[str, Setting], new: Mapping[str, Setting]) -> None:
    """Set the schedule of files with training.warmup_*, and AdamW's old constants for warmup_pct."""
    used = given.get("training.warmup_steps") or given.get("training.warmup_pct")
    if used is None:
        return
    # A file of that time has no [lr_scheduler], whose default schedule differs.
    has_schedule = any(name.startswith("lr_scheduler.") for name in given)
    if not has_schedule:
        why = "files with training.warmup_* warm up by (i + 1) / (warmup + 1) and decay linearly"
        _add(done, "lr_scheduler.name", "linear_linear", used.where, why)
    if "training.warmup_pct" not in given:
        return
    used = given["training.warmup_pct"]
    steps = new.get("training.steps")
    # The translated warmup_pct is a share of the steps, which is not a valid number of steps.
    shares = [
        setting
        for setting in done.of("lr_scheduler.warmup_steps")
        if isinstance(setting.value, float)
    ]
    for share in shares:
        done.settings.remove(share)
        total = 10000
        if steps:
            try:
                total = _integer(steps)
            except Unfit:
                # An invalid training.steps is reported as its own problem. Do not add warmup steps.
                continue
        num_warmup_steps = max(int(total * share.value), 2)
        _add(done, "lr_scheduler.warmup_steps", num_warmup_steps, used.where, "from warmup_pct")
    for option, value in (("optimizer.beta2", 0.999), ("optimizer.weight_decay", 0.01)):
        if option not in new:
            _add(done, option, value, used.where, "files with warmup_pct ran with this constant")


def _integer(setting: Setting) -> int:
    if setting.is_text:
        return from_texts(setting.value, int)
    return coerce(setting.value, int)


def _folder(done: Rewritten, given: Mapping[str, Setting], new: Mapping[str, Setting]) -> None:
    """Turn checkpoints off for an empty folder. In files of early 2024, any other folder turns them on."""
    folder = new.get("checkpoint.folder")
    if folder is None:
        return
    is_explicit = "checkpoint.enable" in new
    # An empty folder meant no checkpoints, unless the file has a switch for them.
    if folder.value in ("", ("",)):
        done.settings.remove(folder)
        if is_explicit:
            done.notices.append(
                f"{folder.where}: an empty checkpoint.folder is ignored: the default is used"
            )
        else:
            _add(
                done,
                "checkpoint.enable",
                False,
                folder.where,
                "an empty checkpoint folder turned checkpoints off",
            )
        return
    # These options existed only in early 2024.
    of_2024 = {
        "training.data_parallel_degree",
        "training.fp8_linear",
        "profiling.run_profiler",
    } & given.keys()
    if not is_explicit and ("training.checkpoint_folder" in given or of_2024):
        _add(
            done,
            "checkpoint.enable",
            True,
            folder.where,
            "in files of early 2024 a checkpoint folder turned them on",
        )


def _tags_of_2024(
    done: Rewritten, given: Mapping[str, Setting], new: Mapping[str, Setting]
) -> None:
    """Add the metric tags that dashboards of early 2024 read to the current tags."""
    names = ("training.data_parallel_degree", "training.warmup_pct", "profiling.run_profiler")
    first = next((given[name] for name in names if name in given), None)
    tensorboard = new.get("metrics.enable_tensorboard")
    is_enabled = tensorboard is not None and tensorboard.shown in (True, "true", "True")
    if first and is_enabled and "metrics.legacy_tags" not in new:
        _add(done, "metrics.legacy_tags", True, first.where, "TensorBoard gets the tag wps, too")


def _microbatches(
    done: Rewritten, given: Mapping[str, Setting], new: Mapping[str, Setting]
) -> None:
    """Convert the number of micro-batches to a micro-batch size."""
    used = [s for name, s in given.items() if name.endswith(".pipeline_parallel_microbatches")]
    if not used:
        return
    # The translated count has the name of the size, and the origin of the old setting.
    count = None
    for setting in done.of("parallelism.pipeline_parallel_microbatch_size"):
        if setting.where == used[0].where and isinstance(setting.value, int):
            count = setting
            break
    if count is None:
        return
    done.settings.remove(count)
    batch = new.get("training.local_batch_size")
    size = 8
    try:
        if batch:
            size = _integer(batch)
    except Unfit:
        return  # the batch size is reported with its own problem
    if count.value < 1 or size % count.value:
        done.problems.append(
            Problem(
                used[0].option,
                count.value,
                rule=f"does not divide the local batch of {size}",
                fix="choose a divisor",
                where=used[0].where,
            )
        )
        return
    done.settings.append(Setting(count.option, size // count.value, count.where))


def _one_implementation(done: Rewritten, given: Mapping[str, Setting]) -> None:
    """Keep one of optimizer.fused and optimizer.foreach: fused if it is true, else foreach."""
    if not {"optimizer.fused", "optimizer.foreach"} <= given.keys():
        return
    # Both options were translated to settings of optimizer.implementation.
    both = done.of("optimizer.implementation")
    # torchtitan used the fused kernel if both were true.
    keep = next((s for s in both if s.value == "fused"), None)
    if keep is None:
        of_fused = given["optimizer.fused"].where
        keep = next((s for s in both if s.where != of_fused), both[-1])
    done.settings = [s for s in done.settings if s not in both or s is keep]


def _experts_of_qwen3(done: Rewritten, new: Mapping[str, Setting]) -> None:
    """Replace qwen3 by qwen3_moe for torchtitan's flavors that have experts."""
    name = new.get("model.name")
    flavor = new.get("model.flavor")
    if name and flavor and name.shown == "qwen3" and flavor.shown in _QWEN3_MOE:
        done.settings.remove(name)
        _add(done, "model.name", "qwen3_moe", name.where, f"the flavor {flavor.shown} has experts")


def _flavor(done: Rewritten, new: Mapping[str, Setting]) -> None:
    """Replace renamed flavors, and torchtitan's flavors that selected an attention kernel."""
    name = new.get("model.name")
    flavor = new.get("model.flavor")
    if flavor is None or not isinstance(flavor.shown, str):
        return
    # Without a name, the default model has the flavor.
    model = Model.name
    if name:
        model = str(name.shown)
    old_flavor = flavor.shown
    if (model, old_flavor) in _FLAVORS:
        done.settings.remove(flavor)
        today, why = _FLAVORS[model, old_flavor]
        _add(done, "model.flavor", today, flavor.where, why)

    # The kernel of a masked flavor is chosen here by the document mask.
    plain = next(
        (old_flavor.removesuffix(end) for end in _MASKED_FLAVORS if old_flavor.endswith(end)), None
    )
    flavors = _flavors(model)
    if plain is None or old_flavor in flavors or plain not in flavors:
        return
    done.settings.remove(flavor)
    _add(
        done,
        "model.flavor",
        plain,
        flavor.where,
        f'"{old_flavor}" is this flavor with a mask between documents',
    )
    if "data.document_mask" not in new:
        why = (
            f'"{old_flavor}" masks attention between documents; here positions restart in each, too'
        )
        _add(done, "data.document_mask", "on", flavor.where, why)
        done.changes.append(done.notices[-1])


def _flavors(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the flavors of a model. Empty if its file is unreadable, which another check reports."""
    try:
        return read_model_file(model).flavors
    except ConfigError:
        return {}


def _cuts(done: Rewritten) -> None:
    """Convert the first layers of stages to lists of the modules in each stage."""
    option = "parallelism.module_fqns_per_model_part"
    for setting in done.of(option):
        if not isinstance(setting.value, _Cuts):
            continue
        points = list(setting.value)
        done.settings.remove(setting)
        # A list without split points is a single stage.
        if not points:
            done.notices.append(f"{setting.where}: it contains no split points and is ignored")
            continue
        # Each point is the first layer of a stage. -1 marks text that names no layer.
        layers = _num_layers({s.option: s for s in done.settings})
        begins = []
        for point in points:
            number = point[7:]
            is_layer = point.startswith("layers.") and number.isdecimal()
            begins.append(int(number) if is_layer else -1)
        is_rising = begins == sorted(set(begins))
        if layers is None or not is_rising or not 0 < begins[0] <= begins[-1] < layers:
            rule = "must name layers of the model in order"
            if layers:
                rule += f", layers.1 to layers.{layers - 1}"
            done.problems.append(
                Problem(
                    "pipeline_parallel_split_points",
                    points,
                    rule=rule,
                    fix=f"list the modules of each stage in {option}",
                    where=setting.where,
                )
            )
            continue

        # The first stage also has the embedding, and the last stage has the norm and the output.
        parts = []
        for first, last in zip([0, *begins], [*begins, layers], strict=True):
            parts.append([f"layers.{layer}" for layer in range(first, last)])
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output"]
        done.settings.append(Setting(option, parts, setting.where))


def _num_layers(new: Mapping[str, Setting]) -> int | None:
    """Return the number of layers of the configured model, or None if it is unknown."""
    given = new.get("model.overrides.num_layers")
    name = Model.name
    if "model.name" in new:
        name = str(new["model.name"].shown)
    flavor = Model.flavor
    if "model.flavor" in new:
        flavor = str(new["model.flavor"].shown)
    try:
        overrides = {} if given is None else {"num_layers": _integer(given)}
        layers = shape(read_model_file(name), flavor, overrides).get("num_layers")
    except (ConfigError, KeyError, Unfit):
        return None
    return layers if isinstance(layers, int) and layers > 0 else None


def _dataset_of_path(done: Rewritten, new: Mapping[str, Setting]) -> None:
    """Read an empty dataset with a path as a folder saved by ``datasets``, as torchtitan did in 2024."""
    dataset = new.get("training.dataset")
    path = new.get("training.dataset_path")
    if dataset is None or path is None or dataset.shown != "" or not path.shown:
        return
    done.settings.remove(dataset)
    _add(
        done,
        "training.dataset",
        "huggingface",
        dataset.where,
        "only training.dataset_path determined the data",
    )


def _validation_set(
    done: Rewritten, given: Mapping[str, Setting], new: Mapping[str, Setting]
) -> None:
    """Set torchtitan's validation set if a torchtitan file enables validation without naming a set."""
    switch = new.get("validation.enable")
    training = new.get("training.dataset")
    if switch is None or {"validation.dataset", "validation.dataset_path"} & new.keys():
        return
    if switch.shown not in (True, "true", "True"):
        return
    trains_on_c4 = training is not None and training.shown in TORCHTITAN_DATASETS
    if "validation.enabled" in given or trains_on_c4:
        _add(
            done,
            "validation.dataset",
            "c4_validation",
            switch.where,
            "torchtitan validated on this set",
        )
