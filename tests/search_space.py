"""Random configurations, and which of them are legal by rules that are written here a second time.

The rules are the documentation's (``docs/parallelism.md``, ``docs/models.md``), stated without a look at the checks of
the package, so that a refusal can be held against them: one that breaks none of them is a refusal without need.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

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
    """Options as they come, of which one in five breaks a rule; another sequence than ``draw``."""
    return _draw(random.Random(f"any {seed}/{number}"))


def draw(seed: int, number: int, families: Sequence[str] = FAMILIES, features: Sequence[str] = ()) -> Case:
    """Case ``number`` of a seed: nearly always a legal one, now and then the first that comes."""
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
            if moved.moved().accumulation and not list(broken(moved.moved())) and not list(broken(case)):
                return moved
    return case


def _was_refused(case: Case) -> bool:
    """What broke a rule when the first seeds were searched, and is drawn as a feature since: cases stay the same."""
    task = case.value("task.name")
    return (task in NEW_HEAD and case.value("lora.enable") == "true") or (task == "reward_model" and TP in case.options)


def _draw_more(rng: random.Random, families: Sequence[str], features: Sequence[str]) -> Case:
    """A case with some of the features, and often with a second mesh where it is saved; nine in ten are legal."""
    any_will_do = rng.random() < 0.1
    for _ in range(300):
        case = _draw(rng, families)
        draft = search_more.Draft(dict(case.options), case.accumulation)
        search_more.add(rng, draft, features)
        case = Case(draft.options, draft.accumulation)
        if any_will_do:
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
        count = stages * rng.choice((1, 1, 2)) + (
            rng.choice((0, 1)) if options[SCHEDULE] in (*SINGLE, "LoopedBFS") else 0
        )
        accumulation = rng.choice((1, 2)) if count % 2 == 0 else 1
        local = count * size // accumulation
        if size > 1:
            options[MICRO] = str(size)
    if local > 1:
        options[LOCAL] = str(local)
    options |= _training(rng, family)
    if pp > 1 and options.get("lora.target_modules") == "head":
        options["lora.target_modules"] = "layers.*.attn.wo"  # each stage needs an adapter: refused when it is built
    options |= _data(rng, options)
    options |= _recompute(rng)
    options |= _task(rng, family, options)
    return Case(options, accumulation)


def _mesh(rng: random.Random, family: str, num_ranks: int) -> dict[str, str]:
    degrees = dict.fromkeys((PP, DDP, FSDP, CP, TP), 1)
    rest = num_ranks
    while rest > 1:
        prime = next(n for n in (2, 3, 5, 7) if rest % n == 0)
        axis = rng.choice((PP, PP, DDP, FSDP, FSDP, CP, TP)) if prime == 2 else rng.choice((PP, DDP, FSDP, FSDP))
        degrees[axis] *= prime
        rest //= prime
    options = {name: str(degree) for name, degree in degrees.items() if degree > 1}
    if degrees[PP] > 1:
        options |= dict.fromkeys(LESS, "0") if rng.random() < 0.8 else {}
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
    options: dict[str, str] = {}
    if family in ("qwen2", "qwen3", "llama3") and rng.random() < 0.3:
        options[f"{M}tied_embeddings"] = "true"
    if family in ("mistral", "llama3") and rng.random() < (0.7 if family == "mistral" else 0.15):
        options[f"{M}sliding_window"] = rng.choice(("1", "5", "11", "16", "40"))
    if family != "neox" and rng.random() < 0.25:
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
    """What these families alone have."""
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
    elif family == "gpt_oss":
        drawn = {
            "sliding_window": ("0", "1", "5", "40"),
            "router_bias": ("false",),
            "swiglu_limit": ("0.02",),
            "tied_embeddings": ("true",),
        }
    elif family == "deepseek_v2":
        drawn = {"num_groups": ("2", "4"), "num_shared_experts": ("0", "1"), "q_lora_rank": ("16",)}
    options = {f"{M}{name}": rng.choice(values) for name, values in drawn.items() if rng.random() < 0.35}
    if f"{M}num_groups" in options:
        options |= {f"{M}num_experts": "8", f"{M}top_groups": "2"}  # groups that are alike
    return options


def _training(rng: random.Random, family: str) -> dict[str, str]:
    options: dict[str, str] = {}
    if rng.random() < 0.3:
        drawn = ("Adam", "Muon", "Muon")
        # the default needs no option, and search_more draws AdamW8bit with its own options
        others = (name for name in OPTIMIZERS if name not in (*drawn, Optimizer().name, "AdamW8bit"))
        options["optimizer.name"] = rng.choice((*drawn, *others))
        if options["optimizer.name"] == "Muon":
            options["optimizer.lr"] = "1e-3"  # its update is as large as its matrix's noise where that has little else
    if rng.random() < 0.3:
        options["optimizer.implementation"] = rng.choice(("foreach", "for-loop"))
    if rng.random() < 0.15:
        options["optimizer.no_weight_decay"] = "*attn*"  # such names a model of any kind has: others are refused late
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
        options["compile.backend"] = "aot_eager"  # the graphs of inductor without its minutes of compiling
        if rng.random() < 0.5:
            options["compile.components"] = rng.choice(("model", "loss"))
    if rng.random() < 0.1 and family != "encoder":
        options["lora.enable"] = "true"
        options["lora.random_base"] = "true"
        options["lora.rank"] = "4"
        if rng.random() < 0.5:
            # names that every family has, for others are refused when the model is built
            options["lora.target_modules"] = rng.choice(("layers.*.attn.wo", "layers.*.attn.w[qkvo],head", "head"))
    if rng.random() < 0.5:
        options["debug.seed"] = str(rng.randrange(1000))
    if rng.random() < 0.05:
        options["debug.deterministic"] = "true"
    return options


def _data(rng: random.Random, so_far: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    cuts = int(so_far.get(TP, "1")) * int(so_far.get(CP, "1"))
    options[SEQ] = str(rng.choice((16, 24, 32, 34, 40, 48, cuts * 9, cuts * 2 * 7)))
    if rng.random() < 0.5:
        options["data.packing"] = rng.choice(("padded", "first_fit"))
        if rng.random() < 0.5:
            options["data.long_documents"] = rng.choice(("cut", "drop"))
    if rng.random() < 0.25:
        options["data.document_mask"] = rng.choice(("on", "off"))
    if rng.random() < 0.2:
        options["data.format"] = "prompt_completion"
    options["data.long_rows_max_fraction"] = "1"  # short sequences have no room for most prompts
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
    """A task of rows, now and then; the options of documents are then gone."""
    if family == "encoder":
        name = rng.choice(("masked_language_model", "classification"))
    elif family in ("llama3", "qwen3", "mixtral") and rng.random() < 0.06:
        name = rng.choice(("classification", "reward_model", *OF_ANSWERS))
    else:
        return {}
    for option in [option for option in so_far if option.startswith("data.")]:
        del so_far[option]
    options = {"task.name": name, SEQ: "32"}  # room for an answer, or for a text between its ends
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
    """The documented rules that a case breaks."""
    yield from _of_tensors(case)
    yield from _of_pipeline(case)
    yield from _of_experts(case)
    yield from _of_pairs(case)
    yield from search_more.broken(case)
    if case.value("task.teacher_path") == search_more.EXPERTS:
        mesh = {name: value for name, value in case.options.items() if name.startswith(P)}
        yield from _of_experts(Case({**mesh, "model.name": "mixtral"}))


def _of_tensors(case: Case) -> Iterator[Broken]:
    if case.value("model.name") == AS_IS:
        return
    tp, cp, seq_len = case.number(TP), case.number(CP), case.number(SEQ)
    sizes = {**{f"{M}{name}": value for name, value in SHAPES[case.value("model.name")].items()}, **case.resolved()}
    heads = int(sizes[f"{M}num_heads"])
    kv_heads = int(sizes.get(f"{M}num_kv_heads", heads))
    family = case.value("model.name")
    width = int(sizes.get(f"{M}ffn_dim", "0")) or tp
    shared = int(sizes.get(f"{M}num_shared_experts", "0")) * int(sizes.get(f"{M}moe_ffn_dim", "0"))
    counts = {"heads": heads, "num_kv_heads": kv_heads, "ffn_dim": width, "shared experts": shared or tp}
    counts["vocab_size"] = int(sizes.get(f"{M}vocab_size", "0")) or tp
    for name, count in counts.items():
        if count % tp:
            yield Broken(f"tensor parallelism {tp} divides {name} {count} of {family}", (TP,))
    ulysses = case.value(f"{P}context_parallel_method", "ring") == "ulysses"
    balanced = not ulysses and case.value(f"{P}context_parallel_load_balancer", "headtail") == "headtail"
    chunks = 2 * cp if cp > 1 and balanced else cp
    if seq_len % chunks or seq_len // cp % tp:
        yield Broken(f"{seq_len} tokens make {chunks} chunks, and {tp} parts of what a rank holds", (SEQ,))
    if cp > 1 and ulysses and kv_heads % (tp * cp):
        yield Broken(f"ulysses divides {kv_heads} KV heads by {tp * cp}", (CP,))


def _of_pipeline(case: Case) -> Iterator[Broken]:
    pp = case.number(PP)
    if pp == 1:
        return
    layers, schedule = case.number(f"{M}num_layers"), case.value(SCHEDULE, "1F1B")
    less = [case.number(option, 1) for option in LESS]
    per_stage = case.number(f"{P}pipeline_parallel_layers_per_stage", 0)
    weighted = layers + sum(less)
    stages = -(-weighted // per_stage) if per_stage else pp * (1 if schedule in SINGLE else 2)
    parts = case.value(search_more.PARTS)
    stages = parts.count("[") - 1 if parts else stages
    named = (PP, SCHEDULE, f"{P}pipeline_parallel_layers_per_stage", search_more.PARTS)
    fits = {
        **dict.fromkeys(SINGLE, stages == pp),
        **dict.fromkeys(V_SHAPED, stages == 2 * pp),
        **dict.fromkeys(LOOPED, stages % pp == 0 and stages >= 2 * pp),
        WRITTEN: stages % pp == 0,
    }[schedule]
    if not fits:
        yield Broken(f"{schedule} on {pp} ranks takes no {stages} stages", named)
    # as evenly as whole layers allow, the ends counting for layers, and a layer for each stage
    if not parts and (layers < stages or (weighted < stages + sum(less))):
        yield Broken(f"{layers} layers are enough for {stages} stages", named)
    size, local = case.number(MICRO), case.number(LOCAL)
    if local % size:
        yield Broken(f"micro-batches of {size} divide the local batch of {local}", (MICRO,))
        return
    batches = local * case.accumulation // size
    if batches < stages:
        yield Broken(f"{batches} micro-batches fill {stages} stages", (MICRO,))
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and batches % max(1, batches // pp):
        yield Broken(f"{batches} micro-batches make rounds of {pp}", (MICRO,))
    if schedule in SPLIT and case.value("compile.enable") == "true" and case.value("compile.components") != "loss":
        yield Broken("compiled layers have one backward", (SCHEDULE,))


def _of_experts(case: Case) -> Iterator[Broken]:
    ep, family = case.number(EP), case.value("model.name")
    if family not in MIXTURES:
        if ep > 1:
            yield Broken("experts are there to divide", (EP,))
        return
    sizes = case.resolved()
    experts = int(sizes[f"{M}num_experts"])
    ranks = case.number(FSDP) * case.number(CP) * case.number(TP)
    if experts % ep:
        yield Broken(f"{ep} expert-parallel ranks divide {experts} experts", (EP,))
    if ranks % ep:
        yield Broken(f"{ep} expert-parallel ranks divide {ranks} ranks", (EP,))
    layers = case.number(f"{M}num_layers", 2)
    dense = int(sizes.get(f"{M}num_dense_layers", "0")) >= layers
    dense = dense or int(sizes.get(f"{M}interleave_moe_layer_step", "1")) > layers
    if dense and ep > 1:
        yield Broken("a layer has experts to divide", (EP,))
    if int(sizes.get(f"{M}top_k", "2")) > experts:
        yield Broken("a token has no more experts than there are", (f"{M}top_k",))
    # beyond one expert for each rank, an expert's own sizes are split
    beyond = ranks // ep * ep > experts and not dense
    if beyond and not experts % ep and any(int(sizes[f"{M}{name}"]) % (ranks // ep) for name in ("moe_ffn_dim", "dim")):
        yield Broken(f"{ranks} ranks share {experts} experts", (EP,))


def _of_pairs(case: Case) -> Iterator[Broken]:
    offload = case.value(f"{T}enable_cpu_offload") == "true"
    if case.value(f"{P}shard_optimizer_states") == "true" and (case.number(DDP) == 1 or offload):
        yield Broken("split states need copies of the model on the device", (f"{P}shard_optimizer_states",))
    if case.number(PP) > 1 and case.value("lora.target_modules") == "head":
        yield Broken("every stage has adapters", ("lora.target_modules",))
    if case.value(f"{M}tied_embeddings") == "true" and "head" in case.value("lora.target_modules").split(","):
        yield Broken("an adapter of the head would change the embedding", ("lora.target_modules",))
    if case.value(f"{A}cpu_offload") == "true" and case.value(f"{A}mode") == "none":
        yield Broken("inputs of recomputed layers are moved", (f"{A}cpu_offload",))
    if case.value("data.packing", "concat") == "concat" and case.value("data.long_documents", "split") != "split":
        yield Broken("concat cuts long documents", ("data.long_documents",))
    task = case.value("task.name", "language_model")
    if task in ("language_model", "distillation"):
        return
    degrees = [PP, CP] if task in (*NEW_HEAD, *OF_ANSWERS) else [PP, CP, TP]
    for degree in degrees:
        if case.number(degree) > 1:
            yield Broken(f"{task} reads whole rows on whole models", (degree,))
    if case.number(TP) > 1 and case.value(f"{P}disable_loss_parallel") != "true":
        yield Broken("a task of rows needs its outputs whole", (f"{P}disable_loss_parallel",))
    if case.number(TP) > 1 and case.value("compile.enable") == "true" and case.value("compile.components") != "loss":
        yield Broken("rows of every length are not compiled for split layers", ("compile.enable",))
    if task == "classification" and 4 % case.number(TP):
        yield Broken("a head of four rows is divided", (TP,))
