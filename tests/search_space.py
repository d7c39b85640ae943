"""Draw random configurations, and decide independently of the package which of them are legal.

The rules restate the documentation (``docs/parallelism.md``, ``docs/models.md``) without using the package's checks. If
the package refuses a configuration that breaks no rule here, the refusal is a fault.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import search_architectures
import search_more
from search_case import (
    AS_IS,
    CP,
    DDP,
    EP,
    FAMILIES,
    FSDP,
    LESS,
    LOCAL,
    LOOPED,
    MICRO,
    MIXTURES,
    NEW_HEAD,
    NEWER,
    OF_ANSWERS,
    PP,
    SCHEDULE,
    SEQ,
    SHAPES,
    SINGLE,
    SPLIT,
    TP,
    UNSET,
    V_SHAPED,
    WRITTEN,
    A,
    Broken,
    Case,
    M,
    P,
    T,
)

from shardtrain.config.schema import Optimizer
from shardtrain.facts.optimizers import OPTIMIZERS


def draw_any(seed: int, number: int) -> Case:
    """Draw a case without rejecting illegal ones. One in five breaks a rule. The sequence differs from ``draw``."""
    return _draw(random.Random(f"any {seed}/{number}"))


def draw(
    seed: int, number: int, families: Sequence[str] = FAMILIES, features: Sequence[str] = ()
) -> Case:
    """Return case ``number`` of a seed: nine in ten are legal, the others are not checked."""
    if features:
        return _draw_more(random.Random(f"more {seed}/{number}"), families, features)
    rng = random.Random(f"{seed}/{number}")
    case = _draw(rng, families)
    if rng.random() < 0.9:
        for _ in range(200):
            if not list(broken(case)) and not _was_refused(case):
                break
            case = _draw(rng, families)
    if rng.random() < 0.15 and case.value("task.name", "language_model") == "language_model":
        for _ in range(50):
            options = _mesh(rng, case.value("model.name"), rng.choice((1, 2, 2, 4)))
            options[LOCAL] = str(rng.choice((1, 2, 4)))
            moved = dataclasses.replace(case, then=options)
            if (
                moved.moved().accumulation
                and not list(broken(moved.moved()))
                and not list(broken(case))
            ):
                return moved
    return case


def _was_refused(case: Case) -> bool:
    """True if the case was illegal when the first seeds were searched.

    Such cases are still not drawn, so that the cases of these seeds never change.
    """
    task = case.value("task.name")
    if task in NEW_HEAD and case.value("lora.enable") == "true":
        return True
    return task == "reward_model" and TP in case.options


def _draw_more(rng: random.Random, families: Sequence[str], features: Sequence[str]) -> Case:
    """Draw a case with some of the features, often with a second mesh if it saves. Nine in ten are legal."""
    accepts_any = rng.random() < 0.1
    for _ in range(300):
        case = _draw(rng, families)
        draft = search_more.Draft(dict(case.options), case.accumulation)
        search_more.add(rng, draft, features)
        case = Case(_with_adapters_in_every_layer(draft.options), draft.accumulation)
        if accepts_any:
            return case
        if list(broken(case)):
            continue
        if not draft.moves or "validation.steps" in case.options:
            return case
        options = _mesh(rng, case.value("model.name"), rng.choice((1, 2, 2, 4)))
        options[LOCAL] = str(rng.choice((1, 2, 4)))
        moved = dataclasses.replace(case, then=options)
        if moved.moved().accumulation and not list(broken(moved.moved())):
            return moved
    return case


def _draw(rng: random.Random, families: Sequence[str] = FAMILIES) -> Case:
    options: dict[str, str] = {}
    family = rng.choice(families)
    if rng.random() < 0.6 and family == "encoder":
        family = "llama3"
    if family != "llama3":
        options["model.name"] = family
    num_ranks = rng.choices((1, 2, 3, 4, 6, 8), (6, 40, 4, 34, 4, 12))[0]
    options |= _mesh(rng, family, num_ranks)
    options |= _model(rng, family)
    pp = int(options.get(PP, "1"))
    if pp > 1:
        stages = pp * (1 if options[SCHEDULE] in SINGLE else 2)
        options[f"{M}num_layers"] = str(rng.choice((stages, stages, stages + 1, stages + 2)))
    elif rng.random() < 0.5:
        options[f"{M}num_layers"] = str(rng.choice((1, 3, 4)))
    local = rng.choice((1, 1, 2, 3, 4))
    accumulation = rng.choice((1, 1, 2, 3))
    if pp > 1:
        size = rng.choice((1, 1, 2))
        microbatches = stages * rng.choice((1, 1, 2))
        if options[SCHEDULE] in (*SINGLE, "LoopedBFS"):
            microbatches += rng.choice((0, 1))
        accumulation = rng.choice((1, 2)) if microbatches % 2 == 0 else 1
        local = microbatches * size // accumulation
        if size > 1:
            options[MICRO] = str(size)
    if local > 1:
        options[LOCAL] = str(local)
    options |= _training(rng, family)
    if pp > 1 and options.get("lora.target_modules") == "head":
        # each stage needs an adapter, which is only checked when the model is built
        options["lora.target_modules"] = "layers.*.attn.wo"
    options |= _data(rng, options)
    options |= _recompute(rng)
    options |= _task(rng, family, options)
    return Case(_with_adapters_in_every_layer(options), accumulation)


def _with_adapters_in_every_layer(options: dict[str, str]) -> dict[str, str]:
    """Extend adapters of attention to recurrent layers, because a stage may have only recurrent layers."""
    targets = options.get("lora.target_modules", "")
    if options.get("model.name") == "qwen3_next" and "layers.*.attn." in targets:
        return {**options, "lora.target_modules": targets.replace("layers.*.attn.", "layers.*.*.")}
    return options


def _mesh(rng: random.Random, family: str, num_ranks: int) -> dict[str, str]:
    """Draw the degrees of all axes, whose product is the number of ranks, and options of these axes."""
    degrees = dict.fromkeys((PP, DDP, FSDP, CP, TP), 1)
    undivided = num_ranks
    while undivided > 1:
        prime = next(n for n in (2, 3, 5, 7) if undivided % n == 0)
        axes = (PP, PP, DDP, FSDP, FSDP, CP, TP) if prime == 2 else (PP, DDP, FSDP, FSDP)
        degrees[rng.choice(axes)] *= prime
        undivided //= prime
    options = {name: str(degree) for name, degree in degrees.items() if degree > 1}
    if degrees[PP] > 1:
        if rng.random() < 0.8:
            options |= dict.fromkeys(LESS, "0")
        options[SCHEDULE] = rng.choice((*SINGLE, *LOOPED, *LOOPED, *V_SHAPED, *V_SHAPED))
        if options[SCHEDULE] in LOOPED and rng.random() < 0.25:
            options[f"{P}pipeline_parallel_layers_per_stage"] = rng.choice(("1", "1", "2"))
    if degrees[CP] > 1:
        if rng.random() < 0.3:
            options[f"{P}context_parallel_method"] = "ulysses"
        elif rng.random() < 0.5:
            options[f"{P}context_parallel_rotate_method"] = "alltoall"
        if rng.random() < 0.3 and f"{P}context_parallel_method" not in options:
            options[f"{P}context_parallel_load_balancer"] = "none"
    if rng.random() < 0.4:
        options[f"{P}fsdp_reshard_after_forward"] = rng.choice(("always", "always", "never"))
    if degrees[DDP] > 1 and rng.random() < 0.4:
        options[f"{P}shard_optimizer_states"] = "true"
    if degrees[TP] > 1 and rng.random() < 0.25:
        options[f"{P}disable_loss_parallel"] = "true"
    if family in MIXTURES:
        ranks = degrees[FSDP] * degrees[CP] * degrees[TP]
        degree = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if ranks % n == 0])
        if degree > 1:
            options[EP] = str(degree)
    return options


def _model(rng: random.Random, family: str) -> dict[str, str]:
    """Draw sizes and mechanisms of the model, each rarely enough to leave most models simple."""
    options: dict[str, str] = {}
    if family in ("qwen2", "qwen3", "llama3") and rng.random() < 0.3:
        options[f"{M}tied_embeddings"] = "true"
    if family in ("mistral", "llama3") and rng.random() < (0.7 if family == "mistral" else 0.15):
        options[f"{M}sliding_window"] = rng.choice(("1", "5", "11", "16", "40"))
    if family not in ("neox", "qwen3_next") and rng.random() < 0.25:
        options["model.norm_type"] = rng.choice(("layernorm", "np_layernorm", "fused_rmsnorm"))
    if "num_kv_heads" in SHAPES[family] and rng.random() < 0.3:
        options[f"{M}num_kv_heads"] = rng.choice(("1", "4"))
    if rng.random() < 0.2:
        options[f"{M}vocab_size"] = rng.choice(("258", "264", "290"))
    if family == "neox" and rng.random() < 0.3:
        options[f"{M}use_parallel_residual"] = "false"
    if family in MIXTURES:
        if rng.random() < 0.3:
            options[f"{M}load_balance_coeff"] = "1e-2"
        if rng.random() < 0.3:
            options[f"{M}z_loss_coeff"] = "1e-2"
        if rng.random() < 0.3:
            options[f"{M}balance_loss_coeff"] = rng.choice(("0", "0.1"))
        if rng.random() < 0.25:
            options[f"{M}top_k"] = rng.choice(("1", "3"))
        if rng.random() < 0.2:
            options[f"{M}score_func"] = rng.choice(("sigmoid", "softmax"))
        if rng.random() < 0.2:
            options[f"{M}route_norm"] = "false"
        if family != "deepseek_v3" and rng.random() < 0.2:
            options[f"{M}num_experts"] = rng.choice(("3", "4", "6"))
        if family == "deepseek_v3":
            if rng.random() < 0.25:
                options[f"{M}num_shared_experts"] = rng.choice(("0", "2"))
            if rng.random() < 0.25:
                options[f"{M}q_lora_rank"] = "0"
        if rng.random() < 0.05:
            options["debug.moe_force_load_balance"] = "true"
    if family in NEWER:
        options |= _newer(rng, family)
    return options


def _newer(rng: random.Random, family: str) -> dict[str, str]:
    """Draw options that only these families have."""
    drawn: dict[str, tuple[str, ...]] = {}
    if family == "llama4":
        drawn = {
            "attention_chunk_size": ("0", "1", "5", "16", "40"),
            "no_rope_layer_interval": ("0", "1", "3"),
            "interleave_moe_layer_step": ("1", "3"),
            "num_shared_experts": ("0", "2"),
            "use_qk_norm": ("false",),
            "attn_temperature_tuning": ("false",),
        }
    elif family == "qwen3_next":
        drawn = {
            "full_attention_interval": ("1", "3"),
            "linear_conv_width": ("1", "2", "7"),
            "linear_key_heads": ("1", "4"),
            "rotary_pct": ("0.25", "1"),
        }
    elif family == "gpt_oss":
        drawn = {
            "sliding_window": ("0", "1", "5", "40"),
            "router_bias": ("false",),
            "swiglu_limit": ("0.02",),
            "tied_embeddings": ("true",),
        }
    elif family == "deepseek_v2":
        drawn = {"num_groups": ("2", "4"), "num_shared_experts": ("0", "1"), "q_lora_rank": ("16",)}
    options = {
        f"{M}{name}": rng.choice(values) for name, values in drawn.items() if rng.random() < 0.35
    }
    if f"{M}num_groups" in options:
        options |= {f"{M}num_experts": "8", f"{M}top_groups": "2"}  # groups must have equal sizes
    return options


def _training(rng: random.Random, family: str) -> dict[str, str]:
    options: dict[str, str] = {}
    if rng.random() < 0.3:
        drawn = ("Adam", "Muon", "Muon")
        # the default needs no option, and search_more draws AdamW8bit with its own options
        others = (
            name for name in OPTIMIZERS if name not in (*drawn, Optimizer().name, "AdamW8bit")
        )
        options["optimizer.name"] = rng.choice((*drawn, *others))
        if options["optimizer.name"] == "Muon":
            # Muon normalizes updates: a matrix with almost no gradient gets amplified noise. Keep the step small.
            options["optimizer.lr"] = "1e-3"
    if rng.random() < 0.3:
        options["optimizer.implementation"] = rng.choice(("foreach", "for-loop"))
    if rng.random() < 0.15:
        # every model has such names; a pattern without a match is only refused when the model is built
        options["optimizer.no_weight_decay"] = "*attn*"
    if rng.random() < 0.3:
        options[f"{T}max_norm"] = rng.choice(("inf", "0.1"))
    if rng.random() < 0.15:
        options[f"{T}enable_cpu_offload"] = "true"
    precision = rng.random()
    if precision < 0.08:
        options[f"{T}mixed_precision_param"] = "bfloat16"
        if rng.random() < 0.3:
            options[f"{T}mixed_precision_reduce"] = "bfloat16"
    elif precision < 0.12:
        options[f"{T}dtype"] = "bfloat16"
        options[f"{T}mixed_precision_param"] = UNSET
    elif precision < 0.16:
        options[f"{T}mixed_precision_param"] = "float16"
        options[f"{T}initial_loss_scale"] = "1024"
    if rng.random() < 0.06:
        options["compile.enable"] = "true"
        options["compile.backend"] = (
            "aot_eager"  # the graphs of inductor, without its minutes of compilation
        )
        if rng.random() < 0.5:
            options["compile.components"] = rng.choice(("model", "loss"))
    if rng.random() < 0.1 and family != "encoder":
        options["lora.enable"] = "true"
        options["lora.random_base"] = "true"
        options["lora.rank"] = "4"
        if rng.random() < 0.5:
            # every family has these names; others are only refused when the model is built
            options["lora.target_modules"] = rng.choice(
                ("layers.*.attn.wo", "layers.*.attn.w[qkvo],head", "head")
            )
    if rng.random() < 0.5:
        options["debug.seed"] = str(rng.randrange(1000))
    if rng.random() < 0.05:
        options["debug.deterministic"] = "true"
    return options


def _data(rng: random.Random, so_far: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    parts = int(so_far.get(TP, "1")) * int(so_far.get(CP, "1"))
    options[SEQ] = str(rng.choice((16, 24, 32, 34, 40, 48, parts * 9, parts * 2 * 7)))
    if rng.random() < 0.5:
        options["data.packing"] = rng.choice(("padded", "first_fit"))
        if rng.random() < 0.5:
            options["data.long_documents"] = rng.choice(("cut", "drop"))
    if rng.random() < 0.25:
        options["data.document_mask"] = rng.choice(("on", "off"))
    if rng.random() < 0.2:
        options["data.format"] = "prompt_completion"
    options["data.long_rows_max_fraction"] = "1"  # most prompts do not fit into short sequences
    if rng.random() < 0.1:
        options["data.mode"] = "stream"
        options["data.readers"] = rng.choice(("4", "16"))
    return options


def _recompute(rng: random.Random) -> dict[str, str]:
    if rng.random() < 0.45:
        return {}
    options = {f"{A}mode": rng.choice(("full", "selective", "selective", "selective"))}
    if options[f"{A}mode"] == "selective":
        options[f"{A}selective_ac_option"] = rng.choice(("op", "op", "1", "2"))
    for name in ("early_stop", "cpu_offload"):
        if rng.random() < 0.25:
            options[f"{A}{name}"] = "true"
    if rng.random() < 0.1:
        options[f"{A}preserve_rng_state"] = "false"
    return options


def _task(rng: random.Random, family: str, so_far: dict[str, str]) -> dict[str, str]:
    """Draw a row task for some cases, and remove the document options from ``so_far``."""
    if family == "encoder":
        name = rng.choice(("masked_language_model", "classification"))
    elif family in ("llama3", "qwen3", "mixtral") and rng.random() < 0.06:
        name = rng.choice(("classification", "reward_model", *OF_ANSWERS))
    else:
        return {}
    for option in [option for option in so_far if option.startswith("data.")]:
        del so_far[option]
    # Shorter rows may have no room for an answer, or for a text with its BOS and EOS.
    options = {
        "task.name": name,
        SEQ: "32",
    }
    if name == "classification":
        options["task.num_labels"] = "4"
    if name == "kto":
        options |= {"task.label_field": "is_good", "task.group_size": rng.choice(("2", "3", "8"))}
    if name == "masked_language_model":
        options["task.options.mask_token_id"] = "259"
        options[f"{M}vocab_size"] = "320"
    if TP in so_far:
        options[f"{P}disable_loss_parallel"] = "true"
    return options


def broken(case: Case) -> Iterator[Broken]:
    """Yield the documented rules that a case breaks."""
    yield from _of_tensors(case)
    yield from _of_pipeline(case)
    yield from _of_experts(case)
    yield from _of_pairs(case)
    yield from search_more.broken(case)
    if case.value("task.teacher_path") == search_more.EXPERTS:
        mesh = {name: value for name, value in case.options.items() if name.startswith(P)}
        yield from _of_experts(Case({**mesh, "model.name": "mixtral"}))


def _of_tensors(case: Case) -> Iterator[Broken]:
    """Rules of tensor and context parallelism: which sizes they must divide."""
    if case.value("model.name") == AS_IS:
        return
    tp = case.number(TP)
    cp = case.number(CP)
    seq_len = case.number(SEQ)
    family = case.value("model.name")
    options = case.resolved()

    def size(name: str) -> int:
        """Return a field of the model, 0 if the family does not have it."""
        return int(options.get(f"{M}{name}", "0"))

    heads = size("num_heads")
    kv_heads = size("num_kv_heads") or heads
    sizes = {
        "heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_dim": size("ffn_dim"),
        "shared experts": size("num_shared_experts") * size("moe_ffn_dim"),
        "shared_ffn_dim": size("shared_ffn_dim"),
        "linear_key_heads": size("linear_key_heads"),
        "vocab_size": size("vocab_size"),
    }
    for name, count in sizes.items():
        if count % tp:
            yield Broken(f"tensor parallelism {tp} must divide {name} {count} of {family}", (TP,))
    chunks = search_more.context_chunks(case)
    if seq_len % chunks or seq_len // cp % tp:
        yield Broken(
            f"{seq_len} tokens must be divisible into {chunks} chunks, and {tp} parts per rank",
            (SEQ,),
        )
    is_ulysses = case.value(f"{P}context_parallel_method", "ring") == "ulysses"
    if cp > 1 and is_ulysses and kv_heads % (tp * cp):
        yield Broken(f"ulysses must divide {kv_heads} KV heads by {tp * cp}", (CP,))


def _of_pipeline(case: Case) -> Iterator[Broken]:
    pp = case.number(PP)
    if pp == 1:
        return
    layers = case.number(f"{M}num_layers")
    schedule = case.value(SCHEDULE, "1F1B")
    if search_architectures.name_of(case):
        layers = int(case.value(f"{M}path").rpartition("-")[2])
    per_stage = case.number(f"{P}pipeline_parallel_layers_per_stage", 0)
    # the first and last stages have fewer layers, as if their embedding and head were layers
    extra_layers = sum(case.number(option, 1) for option in LESS)
    weighted_layers = layers + extra_layers
    parts = case.value(search_more.PARTS)
    if parts:
        stages = parts.count("[") - 1
    elif per_stage:
        stages = math.ceil(weighted_layers / per_stage)
    else:
        stages = pp if schedule in SINGLE else 2 * pp
    options = (PP, SCHEDULE, f"{P}pipeline_parallel_layers_per_stage", search_more.PARTS)
    fits_schedule = {
        **dict.fromkeys(SINGLE, stages == pp),
        **dict.fromkeys(V_SHAPED, stages == 2 * pp),
        **dict.fromkeys(LOOPED, stages % pp == 0 and stages >= 2 * pp),
        WRITTEN: stages % pp == 0,
    }[schedule]
    if not fits_schedule:
        yield Broken(f"{schedule} on {pp} ranks does not support {stages} stages", options)
    # layers are distributed evenly, and each stage needs at least one
    if not parts and (layers < stages or weighted_layers < stages + extra_layers):
        yield Broken(f"{layers} layers must be enough for {stages} stages", options)
    size = case.number(MICRO)
    local = case.number(LOCAL)
    if local % size:
        yield Broken(f"micro-batches of {size} must divide the local batch of {local}", (MICRO,))
        return
    batches = local * case.accumulation // size
    num_rounds = max(1, batches // pp)
    if batches < stages:
        yield Broken(f"{batches} micro-batches must be enough for {stages} stages", (MICRO,))
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and batches % num_rounds:
        yield Broken(f"{batches} micro-batches must be divisible into rounds of {pp}", (MICRO,))
    if schedule in SPLIT and search_more.has_compiled_layers(case):
        yield Broken("compiled layers do not support a split backward pass", (SCHEDULE,))


def _of_experts(case: Case) -> Iterator[Broken]:
    ep = case.number(EP)
    family = case.value("model.name")
    if search_architectures.name_of(case):
        return
    if family not in MIXTURES:
        if ep > 1:
            yield Broken("expert parallelism requires a family with experts", (EP,))
        return
    sizes = case.resolved()
    experts = int(sizes[f"{M}num_experts"])
    ranks = case.number(FSDP) * case.number(CP) * case.number(TP)
    if experts % ep:
        yield Broken(f"{ep} expert-parallel ranks must divide {experts} experts", (EP,))
    if ranks % ep:
        yield Broken(f"{ep} expert-parallel ranks must divide {ranks} ranks", (EP,))
    layers = case.number(f"{M}num_layers", 2)
    num_dense_layers = int(sizes.get(f"{M}num_dense_layers", "0"))
    interval = int(sizes.get(f"{M}interleave_moe_layer_step", "1"))
    is_dense = num_dense_layers >= layers or interval > layers
    if is_dense and ep > 1:
        yield Broken("expert parallelism requires a layer with experts", (EP,))
    if int(sizes.get(f"{M}top_k", "2")) > experts:
        yield Broken("top_k must not exceed the number of experts", (f"{M}top_k",))
    # with more ranks than experts, ranks shard the dimensions of an expert
    shards_within_experts = ranks // ep * ep > experts and not is_dense and experts % ep == 0
    widths = [int(sizes[f"{M}{name}"]) for name in ("moe_ffn_dim", "dim")]
    if shards_within_experts and any(width % (ranks // ep) for width in widths):
        yield Broken(f"the sizes of {experts} experts must be divisible among {ranks} ranks", (EP,))


def _of_pairs(case: Case) -> Iterator[Broken]:
    """Rules of two options, neither of which is invalid by itself."""
    is_on = search_more.is_on
    has_compiled_layers = search_more.has_compiled_layers
    lacks_replicas = case.number(DDP) == 1 or is_on(case, f"{T}enable_cpu_offload")
    if is_on(case, f"{P}shard_optimizer_states") and lacks_replicas:
        yield Broken(
            "sharded optimizer states require replicas on the device",
            (f"{P}shard_optimizer_states",),
        )
    if case.number(PP) > 1 and case.value("lora.target_modules") == "head":
        yield Broken("every stage must have adapters", ("lora.target_modules",))
    adapted_modules = case.value("lora.target_modules").split(",")
    if is_on(case, f"{M}tied_embeddings") and "head" in adapted_modules:
        yield Broken(
            "an adapter of a tied head would change the embedding", ("lora.target_modules",)
        )
    if is_on(case, f"{A}cpu_offload") and case.value(f"{A}mode") == "none":
        yield Broken("offloading moves the inputs of recomputed layers", (f"{A}cpu_offload",))
    packing = case.value("data.packing", "concat")
    if packing == "concat" and case.value("data.long_documents", "split") != "split":
        yield Broken("packing by concatenation splits long documents", ("data.long_documents",))
    task = case.value("task.name", "language_model")
    if task in ("language_model", "distillation"):
        return
    degrees = [PP, CP] if task in (*NEW_HEAD, *OF_ANSWERS) else [PP, CP, TP]
    for degree in degrees:
        if case.number(degree) > 1:
            yield Broken(f"{task} requires unsharded rows and models", (degree,))
    if case.number(TP) > 1 and not is_on(case, f"{P}disable_loss_parallel"):
        yield Broken("row tasks require unsharded outputs", (f"{P}disable_loss_parallel",))
    if case.number(TP) > 1 and has_compiled_layers(case):
        yield Broken(
            "tensor parallelism does not support compiling rows of varying length",
            ("compile.enable",),
        )
    if task == "classification" and 4 % case.number(TP):
        yield Broken("tensor parallelism must divide the 4 rows of the head", (TP,))
