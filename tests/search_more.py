"""What a case has where it is asked for: features, each with the options that it draws, and the rules that they add.

Features came after seeds had been searched, so ``search_space.draw`` leaves cases without them as they were. As there,
the rules are those of the documentation, stated without a look at the checks of the package.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_case import (
    AS_IS,
    CONSTANT,
    CP,
    DDP,
    DOCUMENTS,
    EP,
    FSDP,
    LESS,
    LOCAL,
    LOOPED,
    MICRO,
    MIXTURES,
    NEW_HEAD,
    OF_ANSWERS,
    PP,
    SCHEDULE,
    SEQ,
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

from shardtrain.facts.lr_schedules import SCHEDULES as RATE_SCHEDULES
from shardtrain.facts.lr_schedules import options_of

FIXTURES = "tests/fixtures/search"
LLAMA, EXPERTS, ADAPTER = (f"{FIXTURES}/{name}" for name in ("llama", "mixtral", "adapter"))
CHAT = f"{FIXTURES}/chat.jinja"
TALKS, TABLE, FEW, SOME_BAD = (
    f"{FIXTURES}/{name}" for name in ("conversations.jsonl", "texts.tsv", "few.jsonl", "some_bad.jsonl")
)
FEW_ROWS = 22
CSV, PARTS = f"{P}pipeline_parallel_schedule_csv", f"{P}module_fqns_per_model_part"
LINEAR, GROUPED = "quantize.linear.float8", "quantize.grouped_mm.float8"
SCHEDULES = Path(tempfile.gettempdir()) / f"shardtrain-schedules-{os.getuid()}"
"""Where schedules lie that are written down: the name of a file says all that is in it, see ``write_schedule``."""


@dataclass
class Draft:
    """A case while it is drawn."""

    options: dict[str, str]
    accumulation: int
    moves: bool = False
    """Whether it is to be continued on another mesh."""

    def number(self, option: str, default: int = 1) -> int:
        return int(self.options.get(option, str(default)))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.number(degree) for degree in (PP, DDP, FSDP, CP, TP))

    @property
    def family(self) -> str:
        return self.options.get("model.name", "llama3")

    def drop(self, *starts: str) -> None:
        """Leave out the options that begin so."""
        for name in [name for name in self.options if name.startswith(starts)]:
            del self.options[name]

    def drop_pipeline(self) -> None:
        self.drop(f"{P}pipeline_", PARTS)


def some(rng: random.Random, chance: float, **values: Sequence[str]) -> dict[str, str]:
    """Each with this chance, and then one of its values."""
    return {name: rng.choice(found) for name, found in values.items() if rng.random() < chance}


def within(section: str, drawn: dict[str, str]) -> dict[str, str]:
    return {f"{section}.{name}": value for name, value in drawn.items()}


def adapters(rng: random.Random, draft: Draft) -> None:
    """Adapters of all kinds, beside frozen weights of 32, 8 and 4 bits."""
    draft.drop("lora.", "model.converters", "quantize.")
    drawn = {"enable": "true", "rank": rng.choice(("1", "4", "8"))}
    drawn |= {} if "checkpoint.initial_load_path" in draft.options else {"random_base": "true"}
    drawn["base_dtype"] = rng.choice(("training", "int8", "nf4", "nf4"))
    drawn |= some(rng, 0.3, use_dora=["true"], init=["gaussian"], rank_stabilized=["true"])
    drawn["alpha"] = rng.choice(("2", "4", "8"))  # that of 32 by rank 1 makes gradients whose rounding is seen
    drawn |= some(rng, 0.5, target_modules=["layers.*.attn.wo", "layers.*.attn.w[qkvo]", "all-linear"])
    drawn |= some(rng, 0.3, modules_to_save=["embed", "head", "norm", "embed\nhead"])
    if draft.family in MIXTURES and "use_dora" not in drawn:
        drawn |= some(rng, 0.6, target_parameters=["experts.gate_up_proj", "experts.gate_up_proj\nexperts.down_proj"])
    if "checkpoint.initial_load_resize_embeddings" in draft.options:
        drawn["modules_to_save"] = "embed\nhead"
    draft.options |= within("lora", drawn)
    if drawn["base_dtype"] != "training":
        draft.drop(f"{T}enable_cpu_offload", "compile.")


def distillation(rng: random.Random, draft: Draft) -> None:
    """A frozen teacher on the same mesh."""
    draft.drop_pipeline()
    draft.drop("task.")
    drawn = {
        "name": "distillation",
        "teacher_path": rng.choice((LLAMA, EXPERTS)),
        "divergence": rng.choice(("forward_kl", "reverse_kl", "jsd")),
    }
    drawn |= some(rng, 0.5, kd_ratio=["1", "0.25"], temperature=["2", "0.7"])
    if drawn["divergence"] == "jsd":
        drawn |= some(rng, 0.5, jsd_beta=["0.2"])
    draft.options |= within("task", drawn)


def mixture(rng: random.Random, draft: Draft) -> None:
    """Several sources, with weights that may change in the middle, and of which one may end."""
    draft.drop("data.format", "data.mode", "data.readers")
    draft.options |= {f"{T}dataset": UNSET, f"{T}dataset_path": UNSET}
    sources = {"web": ("jsonl", DOCUMENTS), "notes": ("tsv", TABLE), "few": ("jsonl", FEW)}
    names = rng.sample(list(sources), rng.choice((2, 2, 3, 1)))
    for name in names:
        kind, path = sources[name]
        drawn = {"dataset": kind, "dataset_path": path, **some(rng, 0.5, weight=["0.3", "3"])}
        if kind == "jsonl":
            drawn |= some(rng, 0.25, format=["prompt_completion"])
        if drawn.get("format") is None:
            drawn |= some(rng, 0.3, text_field=["note"] if kind == "tsv" else ["completion"])
            field = drawn.get("text_field", "text")
            if rng.random() < 0.2:
                drawn[f"template.{field}"] = "<{{ note }}> {{ text }}" if kind == "tsv" else "{{ prompt }}: {{ text }}"
        if rng.random() < 0.15:
            drawn["epochs"] = "9"
            draft.options[f"{T}on_data_end"] = "stop"
        draft.options |= within(f"data.sources.{name}", drawn)
    if len(names) > 1 and rng.random() < 0.5:
        draft.options["data.stages.0.until_tokens"] = rng.choice(("100", "300", "1000"))
        for stage in range(2):
            for name in names[stage:]:
                draft.options[f"data.stages.{stage}.weights.{name}"] = rng.choice(("0.5", "1", "2"))


def chat(rng: random.Random, draft: Draft) -> None:
    """Conversations, of messages in the rows or of templates over columns, through a chat template."""
    draft.drop("data.separator", "data.add_")
    shortest = int(draft.options.get(SEQ, "32"))
    draft.options[SEQ] = str(-(-48 // shortest) * shortest)  # room for a question and an answer
    drawn = {"format": "chat", "chat_template": CHAT, **some(rng, 0.4, long_documents=["cut", "drop", "split"])}
    drawn["packing"] = rng.choice(("auto", "concat", "first_fit", "padded"))
    if drawn["packing"] == "concat":
        drawn.pop("long_documents", None)
    if rng.random() < 0.5:
        draft.options |= {f"{T}dataset": "jsonl", f"{T}dataset_path": TALKS}
        drawn |= some(rng, 0.3, messages_field=["turns"], tools_field=["skills"])
    else:
        drawn |= {"template.user": "{{ prompt }}", "template.assistant": "{{ completion }}"}
        drawn |= some(rng, 0.3, **{"template.system": ["You know of {{ label }}."]})
    draft.drop("data.long_documents", "data.packing")
    draft.options |= within("data", drawn)


def columns(rng: random.Random, draft: Draft) -> None:
    """Other files, columns, templates, ends of documents, bad rows and another tokenizer."""
    kind, options = rng.choice(("tsv", "template", "fields", "bad", "plain")), draft.options
    draft.drop("data.format")
    if kind == "tsv":
        options |= {f"{T}dataset": "tsv", f"{T}dataset_path": TABLE, "data.text_field": "note"}
    elif kind == "template":
        options["data.template.text"] = "{{ prompt }} and {{ completion }}"
    elif kind == "fields":
        options |= {"data.format": "prompt_completion", "data.prompt_field": "text", "data.completion_field": "chosen"}
    elif kind == "bad":
        draft.drop("data.mode", "data.readers")
        options |= {f"{T}dataset_path": SOME_BAD, "data.bad_rows": "skip", "data.bad_rows_max_fraction": "0.9"}
        options |= within("data", some(rng, 0.5, max_row_bytes=["1024"]))
    options |= within("data", some(rng, 0.3, add_bos=["true", "false"], add_eos=["false"], separator=[" ; "]))
    if rng.random() < 0.2:
        named = rng.choice(("model.hf_assets_path", "model.tokenizer_path"))
        options |= {named: "python_bpe", f"{M}vocab_size": "2048"}


def validation(rng: random.Random, draft: Draft) -> None:
    """Losses of held-out data between the steps, which leave no trace, and texts that the model continues there."""
    drawn = {"enable": "true", "dataset": "jsonl", "dataset_path": FEW, "seq_len": draft.options.get(SEQ, "32")}
    if draft.options.get(f"{T}dataset_path") in (TABLE, TALKS):  # whose columns the rest of [data] names
        drawn["dataset"], drawn["dataset_path"] = draft.options[f"{T}dataset"], draft.options[f"{T}dataset_path"]
    drawn |= some(rng, 0.6, local_batch_size=["1", "2", "3"], seq_len=["16", "48", "96"])
    drawn |= some(rng, 0.25, steps=["1", "2"])
    drawn["freq"] = rng.choice(("1", "1", "2"))
    if rng.random() < 0.15:
        drawn["per_epoch"] = drawn.pop("freq")
    if draft.number(PP) > 1:
        drawn["seq_len"] = draft.options.get(SEQ, "32")
    if rng.random() < 0.2:
        drawn |= {"dataloader.num_workers": "1", **some(rng, 0.5, **{"dataloader.prefetch_factor": ["2"]})}
        drawn |= some(rng, 0.5, **{"dataloader.persistent_workers": ["true"]})
    if draft.options.get("checkpoint.enable") == "true":
        drawn |= {"patience": "1"}
        draft.options |= {
            "checkpoint.keep_best": "validation.loss",
            **within("checkpoint", some(rng, 0.5, best_mode=["max"])),
        }
    draft.options |= within("validation", drawn)
    if rng.random() < 0.3:
        draft.options |= {"metrics.sample_prompt": "the mesh", "metrics.sample_freq": "1"}
        draft.options |= {"checkpoint.enable": "true"} if draft.number(PP) > 1 or draft.number(CP) > 1 else {}


def pipeline(rng: random.Random, draft: Draft, per_rank: int) -> int:
    """Give a case a pipeline where it has none; gives its stages, of which there are so many on each rank."""
    degree = draft.number(PP)
    if degree == 1:
        degree = 2
        if draft.num_ranks > 4:
            kept = rng.choice([axis for axis in (DDP, FSDP, CP, TP) if draft.number(axis) > 1])
            draft.drop(*{DDP, FSDP, CP, TP} - {kept}, EP)
            draft.options[kept] = "2"
        draft.options[PP] = "2"
    draft.drop("task.", f"{P}pipeline_parallel_layers_per_stage", f"{P}shard_optimizer_states")
    draft.options |= dict.fromkeys(LESS, "0")
    return degree * per_rank


def fill(rng: random.Random, draft: Draft, stages: int, layers: int) -> None:
    """Micro-batches and layers enough."""
    draft.options[f"{M}num_layers"] = str(layers)
    size = rng.choice((1, 1, 2))
    draft.drop(MICRO)
    if size > 1:
        draft.options[MICRO] = str(size)
    draft.options[LOCAL], draft.accumulation = str(size * stages * rng.choice((1, 1, 2))), 1


def written_schedule(rng: random.Random, draft: Draft) -> None:
    """A pipeline that runs as a file says, drawn too: any order in which each action finds what it needs."""
    stages = pipeline(rng, draft, per_rank=2)
    fill(rng, draft, stages, stages + rng.choice((0, 0, 1)))
    microbatches = draft.number(LOCAL) // draft.number(MICRO)
    split = rng.choice(("whole", "split"))
    name = f"pp{draft.number(PP)}-stages{stages}-microbatches{microbatches}-{split}-{rng.randrange(10**6)}.csv"
    draft.options |= {SCHEDULE: WRITTEN, CSV: str(SCHEDULES / name)}
    if split == "split":
        draft.drop("compile.")
    if rng.random() < 0.3:
        named_parts(rng, draft, stages)


def write_schedule(path: Path) -> None:
    """Write the schedule that the name of its file describes, if it is one of ``written_schedule`` and not there yet.

    Ranks take turns; each does one of the actions for which all is there, at random. Micro-batches go forward in their
    order on the last stage, as PyTorch asks, which counts the losses.
    """
    if path.parent != SCHEDULES or path.is_file():
        return
    *_, split, seed = path.stem.split("-")
    degree, stages, microbatches = (int("".join(filter(str.isdigit, part))) for part in path.stem.split("-")[:3])
    rng, done = random.Random(f"schedule {seed}"), set[tuple[int, str, int]]()
    rows: list[list[str]] = [[] for _ in range(degree)]
    backward = "B" if split == "whole" else "I"

    def ready(rank: int) -> Iterator[tuple[int, str, int]]:
        for stage in range(rank, stages, degree):
            for n in range(microbatches):
                if (stage, "F", n) not in done:
                    first = n == 0 or stage < stages - 1 or (stage, "F", n - 1) in done
                    if first and (stage == 0 or (stage - 1, "F", n) in done):
                        yield stage, "F", n
                elif (stage, backward, n) not in done:
                    if stage == stages - 1 or (stage + 1, backward, n) in done:
                        yield stage, backward, n
                elif split == "split" and (stage, "W", n) not in done:
                    yield stage, "W", n

    while len(done) < stages * microbatches * (2 if split == "whole" else 3):
        found = [(rank, list(ready(rank))) for rank in range(degree)]
        for rank, actions in found:
            rows[rank].append("")
            if actions:
                action = rng.choice(actions)
                done.add(action)
                rows[rank][-1] = "".join(map(str, action))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text("".join(",".join(row) + "\n" for row in rows))
    draft.replace(path)


def named_parts(rng: random.Random, draft: Draft, stages: int) -> None:
    """Modules of each stage by name: any cut, with stages that have no layer at either end."""
    names = [f"layers.{n}" for n in range(draft.number(f"{M}num_layers", 2))]
    ends = ("embed", "head") if rng.random() < 0.7 else ("tok_embeddings", "output")
    names = [ends[0], *names, "norm", ends[1]]
    cuts = sorted(rng.sample(range(1, len(names)), stages - 1))
    parts = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    draft.drop(*LESS)
    draft.options[PARTS] = str(parts).replace("'", '"')


def named_stages(rng: random.Random, draft: Draft) -> None:
    """A named schedule whose stages are cut by hand, also where there are fewer layers than stages."""
    schedule = rng.choice((*SINGLE, *LOOPED, *V_SHAPED))
    stages = pipeline(rng, draft, per_rank=1 if schedule in SINGLE else 2)
    draft.drop(CSV)
    draft.options[SCHEDULE] = schedule
    fill(rng, draft, stages, max(1, stages + rng.choice((-2, -1, -1, 0, 1, 2))))
    named_parts(rng, draft, stages)


def early_step(rng: random.Random, draft: Draft) -> None:
    """Updates in backward."""
    draft.drop_pipeline()
    draft.accumulation = 1
    draft.drop(f"{P}shard_optimizer_states")
    draft.options |= {"optimizer.early_step_in_backward": "true", f"{T}max_norm": "inf"}
    if draft.options.get(f"{T}mixed_precision_param") == "float16":
        draft.drop(f"{T}mixed_precision_param", f"{T}initial_loss_scale")
    if draft.options.get("optimizer.name") == "Muon":
        draft.drop("optimizer.name", "optimizer.lr")


def low_bits(rng: random.Random, draft: Draft) -> None:
    """State of the optimizer in 16 and 8 bits, and stochastic rounding."""
    draft.drop("optimizer.name", "optimizer.lr", "optimizer.muon_")
    kind = rng.choice(("8 bits", "bfloat16", "by chance", "all by chance"))
    if kind == "8 bits":
        draft.options["optimizer.name"] = "AdamW8bit"
    else:
        draft.options |= within("optimizer", some(rng, 0.4, name=["Adam"]))
    if kind in ("bfloat16", "by chance"):
        draft.options["optimizer.state_dtype"] = "bfloat16"
    if "chance" in kind:
        draft.options["optimizer.bf16_stochastic_round"] = "true"
    if kind == "all by chance":
        draft.drop(f"{T}mixed_precision", f"{T}initial_loss_scale", f"{T}loss_scale")
        draft.options |= {f"{T}dtype": "bfloat16", f"{T}mixed_precision_param": UNSET}


def float8(rng: random.Random, draft: Draft) -> None:
    """Products in float8, emulated."""
    draft.drop("lora.")
    if draft.options.get(f"{T}mixed_precision_param") == "float16":
        draft.drop(f"{T}mixed_precision_param", f"{T}initial_loss_scale", f"{T}loss_scale")
    grouped = draft.family in MIXTURES and rng.random() < 0.5
    draft.options["model.converters"] = f"{LINEAR}\n{GROUPED}" if grouped else LINEAR
    drawn = {"emulate": "true", **some(rng, 0.7, recipe_name=["tensorwise", "rowwise", "rowwise_with_gw_hp"])}
    drawn |= some(rng, 0.4, filter_fqns=["output", "attn.wo", "attention", "layers.0"])
    if drawn.get("recipe_name", "tensorwise") == "tensorwise" and f"{T}enable_cpu_offload" not in draft.options:
        drawn |= some(rng, 0.5, enable_fsdp_float8_all_gather=["true"])
        if "enable_fsdp_float8_all_gather" in drawn:
            drawn |= some(rng, 0.5, precompute_float8_dynamic_scale_for_fsdp=["true"])
    draft.options |= within(LINEAR, drawn)
    if grouped:
        draft.options |= within(GROUPED, {"emulate": "true", "fqns": "experts"})
        if rng.random() < 0.9:
            draft.options[f"{M}moe_ffn_dim"] = "32"


def memory_budget(rng: random.Random, draft: Draft) -> None:
    """What the compiler chooses to keep."""
    draft.drop(A, "compile.", "lora.base_dtype")
    draft.options |= {f"{A}mode": "memory_budget", "compile.enable": "true"}
    draft.options |= {"compile.backend": rng.choice(("aot_eager", "aot_eager_decomp_partition"))}
    draft.options |= within(A[:-1], some(rng, 0.8, memory_budget=["0", "0.1", "0.9", "1"]))
    draft.options |= within("compile", some(rng, 0.3, components=["model", "model\nloss"]))


def chunks(rng: random.Random, draft: Draft) -> None:
    """Sizes from which on work is cut or done in another way, as small as these models: constants of files."""
    drawn = some(
        rng,
        0.6,
        **{
            "shardtrain.distributed.loss_at_head.WORTH_IT_BYTES": ["0"],
            "shardtrain.ops.cross_entropy.CPU_CHUNK_NUMEL": ["700", "2000"],
            "shardtrain.ops.cross_entropy.CHUNK_NUMEL": ["700", "2000"],
            "shardtrain.ops.distillation_loss.CHUNK_NUMEL": ["700", "2000"],
            "shardtrain.ops.cpu.rms_norm._CHUNK_NUMEL": ["100"],
            "shardtrain.ops.dtensor.NORM_CHUNK_NUMEL": ["1000"],
            "shardtrain.optim.low_bits._CHUNK": ["100", "3000"],
        },
    )
    draft.options |= {f"{CONSTANT}{name}": value for name, value in drawn.items()}


def saving(rng: random.Random, draft: Draft) -> None:
    """Checkpoints of all kinds between the steps; most of these runs end, and continue on another mesh."""
    draft.moves = rng.random() < 0.8
    drawn = {"enable": "true", "interval": "1", "async_mode": rng.choice(("async", "async", "disabled"))}
    drawn |= some(rng, 0.3, compare_replicas=["false"], storage=["first_node"], enable_first_step_checkpoint=["true"])
    drawn |= some(rng, 0.2, keep_latest_k=["2", "0"], last_save_model_only=["true"], on_save_error=["continue"])
    odd = {"model.norm_type", f"{M}sliding_window"} & draft.options.keys()
    if draft.family in ("llama3", "qwen2", "qwen3") and not odd:  # of others some have no place in the format
        drawn |= some(rng, 0.3, last_save_in_hf=["true"], hf_interval=["1"])
    drawn |= some(rng, 0.2, export_dtype=["bfloat16"])
    drawn |= some(rng, 0.15, keep_every_n_steps=["1"], exclude_from_loading=["lr_scheduler"])
    if drawn.get("storage") == "first_node":
        drawn["async_mode"] = "disabled"
    draft.options |= within("checkpoint", drawn)
    draft.options |= within("training", some(rng, 0.3, replica_check_interval=["1"]))


RATES: dict[str, Sequence[str]] = {
    "decay_ratio": ["0.5"],
    "decay_type": ["sqrt", "cosine"],
    "min_lr_factor": ["0.3"],
    "total_steps": ["5"],
    "warmup_proportion": ["0.5"],
    "warmup_type": ["linear"],
}


def rates(rng: random.Random, draft: Draft) -> None:
    """Every schedule of the learning rate, with the options that it reads, and the constants of the optimizers."""
    name = rng.choice(list(RATE_SCHEDULES))
    read = (*options_of(RATE_SCHEDULES[name]), "total_steps")
    drawn = {"name": name, **some(rng, 0.5, **{option: RATES[option] for option in read if option != "warmup_steps"})}
    drawn["warmup_steps"] = rng.choice(("0", "1", "2", "3"))
    if "warmup_proportion" in read:  # a number of steps would overrule the share, or has no effect
        drawn["warmup_steps"] = "0" if "warmup_steps" in read else UNSET
    draft.options |= within("lr_scheduler", drawn)
    constants = some(rng, 0.4, beta1=["0.5", "0"], beta2=["0.999"], weight_decay=["0", "0.5"], eps=["1e-2"])
    constants |= some(rng, 0.2, no_weight_decay=["*attn*", "*norm*\n*attn*"])
    low = ("optimizer.state_dtype", "optimizer.bf16_stochastic_round", "optimizer.early_step_in_backward")
    if rng.random() < 0.3 and not {"optimizer.name", *low} & draft.options.keys():
        draft.options |= {"optimizer.name": "Muon", "optimizer.lr": "1e-3"}
    if draft.options.get("optimizer.name") == "Muon":
        constants |= some(rng, 0.4, muon_momentum=["0.5"], muon_nesterov=["false"], muon_steps=["3"])
        constants |= some(rng, 0.4, muon_update_rms=["0.1"], muon_adamw_patterns=["embed*\nhead*\n*norm*\n*attn*"])
        constants |= some(rng, 0.3, muon_dtype=["float32"])
    draft.options |= within("optimizer", constants)


def rows(rng: random.Random, draft: Draft) -> None:
    """Tasks of rows with options of their own, on few rows that end."""
    draft.drop_pipeline()
    draft.drop("data.", "task.", CP, f"{P}context", f"{T}on_data_end")
    draft.options |= {f"{T}dataset": "jsonl", f"{T}dataset_path": rng.choice((DOCUMENTS, FEW, FEW)), SEQ: "32"}
    name = rng.choice(("classification", "reward_model", *OF_ANSWERS))
    drawn = {"name": name}
    if name == "classification":
        drawn |= rng.choice(({"num_labels": "4"}, {"labels": "0\n1\n2\n3"}, {"labels": "3\n1\n0\n2"}))
        drawn |= some(rng, 0.4, pair_field=["prompt", "completion"])
    elif name == "kto":
        drawn |= {"label_field": "is_good", **some(rng, 0.5, group_size=["2", "3"], beta=["0.5"])}
        drawn |= some(rng, 0.4, desirable_weight=["2"], undesirable_weight=["0.5"])
    else:
        drawn |= some(rng, 0.3, chosen_field=["rejected"])
        drawn |= {"rejected_field": "chosen"} if "chosen_field" in drawn else {}
        drawn |= some(rng, 0.5, beta=["0.5"]) if name != "reward_model" else {}
        drawn |= some(rng, 0.5, gamma=["1.5"]) if name == "simpo" else {}
    draft.options |= within("task", drawn)
    if draft.options[f"{T}dataset_path"] == FEW:
        draft.options |= (
            {f"{T}epochs": "1", f"{T}steps": UNSET} if rng.random() < 0.7 else {f"{T}on_data_end": "repeat"}
        )
        if name != "kto":
            draft.options |= within("training", some(rng, 0.6, last_batch=["keep", "discard"]))
    step = draft.number(LOCAL) * draft.number(DDP) * draft.number(FSDP) * draft.accumulation
    if draft.options.get(f"{T}last_batch") == "discard" and step > FEW_ROWS:
        draft.drop(f"{T}last_batch")  # there would be no step: known when the rows have been read
    if TP in draft.options:
        draft.options[f"{P}disable_loss_parallel"] = "true"


def given_weights(rng: random.Random, draft: Draft) -> None:
    """Weights of a Hugging Face folder, with rows that its tokenizer has not, and adapters that were there before."""
    draft.drop(M, "model.", "task.", "debug.moe", EP)
    drawn = {"enable": "true", "initial_load_path": LLAMA, "initial_load_in_hf": "true"}
    draft.options |= {f"{M}num_layers": "2", f"{M}vocab_size": "320"}
    if rng.random() < 0.3:
        drawn["initial_load_resize_embeddings"] = "true"
        draft.options[f"{M}vocab_size"] = "336"
    draft.drop("lora.")
    if rng.random() < 0.4:
        draft.drop("model.converters", "quantize.")
        draft.options |= within("lora", {"enable": "true", "rank": "4", **some(rng, 0.5, base_dtype=["nf4", "int8"])})
        if "initial_load_resize_embeddings" in drawn:
            draft.options["lora.modules_to_save"] = "embed_tokens\nlm_head"
        elif rng.random() < 0.5:
            draft.options |= {"lora.initial_load_path": ADAPTER, "lora.target_modules": "q_proj\nv_proj"}
            draft.options["lora.alpha"] = "8"
    draft.options |= within("checkpoint", drawn)


NETWORKS = {
    LLAMA: "language_model",
    f"{FIXTURES}/gpt2": "language_model",
    f"{FIXTURES}/bert": "masked_language_model",
    f"{FIXTURES}/t5": "sequence_to_sequence",
    f"{FIXTURES}/bart": "sequence_to_sequence",
}
"""Folders of networks that are taken as they are, each with its task."""


def as_is(rng: random.Random, draft: Draft) -> None:
    """A network of ``transformers`` by its config.json, of any kind; all but Llama have no plan to be split."""
    folder, task = rng.choice(list(NETWORKS.items()))
    draft.drop_pipeline()
    draft.drop(M, "model.", "task.", "debug.moe", "lora.", "optimizer.no_weight_decay", PP, CP, EP, f"{P}context")
    if draft.options.get("optimizer.name") == "Muon":
        draft.drop("optimizer.name", "optimizer.lr", "optimizer.muon_")
    if folder != LLAMA:
        draft.drop(TP, f"{P}disable_loss")
    elif TP in draft.options:
        draft.drop("compile.")
    draft.options |= {"model.name": AS_IS, f"{M}path": folder, f"{M}num_layers": UNSET, f"{M}vocab_size": UNSET}
    draft.options |= within(M[:-1], some(rng, 0.3, attention=["eager", "sdpa"]))
    draft.options[SEQ] = rng.choice(("16", "24", "40"))
    if folder == LLAMA and rng.random() < 0.5:
        draft.options |= within("checkpoint", {"enable": "true", "initial_load_path": LLAMA})
        draft.options["checkpoint.initial_load_in_hf"] = "true"
    if task != "language_model":
        draft.drop("data.")
        draft.options |= {"task.name": task, SEQ: "32"}
    if task == "masked_language_model":
        draft.options |= {"task.options.mask_token_id": "259", "task.options.mask_fraction": "0.3"}


def recomputation(rng: random.Random, draft: Draft) -> None:
    """The smaller options of recomputation."""
    draft.drop(A, "compile.")
    draft.options[f"{A}mode"] = rng.choice(("selective", "selective", "full"))
    drawn = some(rng, 0.5, early_stop=["true"], determinism_check=["none"], preserve_rng_state=["false"])
    if draft.options[f"{A}mode"] == "selective":
        drawn["selective_ac_option"] = rng.choice(("op", "op", "1", "3"))
        if drawn["selective_ac_option"] == "op":
            shapes = ["attn.wq", "ffn.w2\nmoe.router.gate", "head"]
            drawn |= some(rng, 0.6, per_op_sac_force_recompute_mm_shapes_by_fqns=shapes)
    drawn |= some(rng, 0.2, cpu_offload=["true"], debug=["true"])
    draft.options |= within(A[:-1], drawn)


def workers(rng: random.Random, draft: Draft) -> None:
    """Processes that prepare batches."""
    draft.options |= within(f"{T}dataloader", {"num_workers": rng.choice(("1", "2"))})
    draft.options |= within(f"{T}dataloader", some(rng, 0.5, persistent_workers=["true"], prefetch_factor=["1", "3"]))


def guards(rng: random.Random, draft: Draft) -> None:
    """What watches numbers, and what is said to have no effect."""
    drawn = some(rng, 0.4, nonfinite_policy=["skip"], spike_policy=["off", "skip"], replica_check_interval=["1"])
    drawn |= some(rng, 0.3, cpu_kernels=["pytorch"], gc_freq=["1"])
    if f"{T}on_data_end" not in draft.options and f"{T}epochs" not in draft.options:
        drawn |= some(rng, 0.3, on_data_end=["repeat"])
    draft.options |= within("training", drawn)
    if draft.options.get(f"{T}mixed_precision_param") == "float16":
        draft.options |= within("training", some(rng, 0.7, loss_scale_growth_interval=["1"]))
    draft.options |= {"debug.deterministic": "true"} if rng.random() < 0.3 else {}
    if "debug.deterministic" in draft.options:
        draft.options |= within("debug", some(rng, 0.5, deterministic_warn_only=["true"]))
    draft.options |= {f"{P}expert_tensor_parallel_degree": draft.options[TP]} if TP in draft.options else {}
    draft.options |= within(P[:-1], some(rng, 0.3, pipeline_parallel_expert_parallel_overlap=["false"]))


NOT_DRAWN: dict[str, tuple[str, ...]] = {
    "names and places of what a run writes": (
        "job.config_file", "job.dump_folder", "job.description", "job.print_config", "job.save_config_file",
        "checkpoint.folder", "checkpoint.allow_shared_writable", "comm.save_traces_folder",
        "comm.save_traces_file_prefix", "metrics.save_tb_folder", "metrics.save_log_file",
        "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder",
    ),
    "what is shown and written of numbers that are computed anyway": (
        "metrics.log_freq", "metrics.enable_tensorboard", "metrics.disable_color_printing",
        "metrics.save_for_all_ranks", "metrics.enable_wandb", "metrics.enable_mlflow", "metrics.enable_trackio",
        "metrics.prometheus_port", "metrics.prometheus_address", "metrics.sinks", "metrics.peak_flops",
        "metrics.token_metrics",
        "metrics.legacy_tags", "model.print_after_conversion", "training.gc_debug",
        "activation_checkpoint.visualize_memory_budget_pareto",
    ),
    "tokens that the next start takes: tests/data/documents/test_token_cache.py": ("data.cache_tokens",),
    "which tokens of a turn are learned, decided per row: tests/data/chat/test_conversations.py": (
        "data.learn_turn_separator", "data.turn_end",
    ),
    "a profiler beside the steps": (
        "profiling.enable_profiling", "profiling.profile_freq", "profiling.profiler_active",
        "profiling.profiler_warmup", "profiling.profile_memory", "profiling.enable_memory_snapshot",
    ),
    "not available: refused before a rank starts": (
        "job.custom_config_module", "parallelism.expert_parallel_comm_backend", "quantize.grouped_mm.mx.",
        "memory_estimation.", "experimental.", "fault_tolerance.",
    ),
    "blocks of 32, which the small sizes here do not divide: tests/distributed/test_float8_mx.py": (
        "quantize.linear.mx.",
    ),
    "the exit status of a command that was asked to stop: tests/launch": ("checkpoint.stop_exit_code",),
    "read by shardtrain launch alone": ("launch.",),
    "read by shardtrain test alone": ("task.test_dataset_path", "task.test_split"),
    "of accelerators, which are refused or without effect on a CPU": (
        "training.flash_attention", "parallelism.enable_async_tensor_parallel", "training.dataloader.pin_memory",
        "validation.dataloader.pin_memory",
    ),
    "says it has no effect, and reads nothing": ("checkpoint.enable_ft_dataloader_checkpoints",),
    "limits of time and memory, and what is kept to find out why a run has ended": (
        "comm.init_timeout_seconds", "comm.train_timeout_seconds", "comm.hang_timeout_seconds",
        "comm.straggler_window_steps", "comm.trace_buf_size", "checkpoint.grace_seconds",
        "checkpoint.max_stall_seconds", "data.artefact_memory_bytes", "data.artefact_seconds",
    ),
    "builds a mesh in one process, and trains nothing": ("comm.mode",),
    "when a save is due, by the clock: what a save does is drawn": (
        "checkpoint.interval_type", "checkpoint.mean_time_to_failure_hours",
    ),
    "from where a run continues: the same steps, from a save that is drawn": (
        "checkpoint.load_step", "checkpoint.load_only", "checkpoint.create_seed_checkpoint",
        "checkpoint.accept_changes", "checkpoint.initial_load_model_only",
    ),
    "formats of a file of weights: held to the same tensors in tests/hf": (
        "checkpoint.initial_load_in_hf_quantized", "checkpoint.initial_load_legacy_bin",
    ),
    "rows of the hub, of which none can be reached here": (
        "data.split", "data.subset", "data.streaming", "data.sources.NAME.split", "data.sources.NAME.subset",
        "validation.split",
    ),
    "draws by rank, so that other meshes drop other numbers by their rule: tests/test_dropout.py": ("lora.dropout",),
    "acts on numbers that are not finite, which these runs have not: tests/resilience/guards": (
        "training.nonfinite_max_skips", "training.nonfinite_max_skip_fraction",
    ),
    "acts on a loss far above those of 20 steps before, and these runs have 2: tests/resilience/guards": (
        "training.spike_window", "training.spike_sigmas", "training.spike_rewind_steps", "training.spike_skip_steps",
        "training.max_rewinds",
    ),
    "compares a model file of the user's before it runs: tests/train/preflight": ("model.check",),
}  # fmt: skip
"""Options that no case draws, and why they cannot change a number here; a name that ends in a dot is a section."""


Feature = Callable[[random.Random, Draft], None]
FIRST: dict[str, Feature] = {
    "written_schedule": written_schedule,
    "named_stages": named_stages,
    "rows": rows,
    "distillation": distillation,
    "given_weights": given_weights,
    "as_is": as_is,
}
"""Features that say what mesh or task there is, or which model; one of them at most, and drawn first."""
OTHERS: dict[str, Feature] = {
    "adapters": adapters,
    "mixture": mixture,
    "chat": chat,
    "columns": columns,
    "early_step": early_step,
    "low_bits": low_bits,
    "float8": float8,
    "memory_budget": memory_budget,
    "saving": saving,
    "rates": rates,
    "recomputation": recomputation,
    "workers": workers,
    "guards": guards,
    "validation": validation,
    "chunks": chunks,
}
FEATURES = (*FIRST, *OTHERS)
_OF_ROWS = ("mixture", "chat", "columns")
"""Features of documents, of which tasks of rows have none, and which exclude each other."""


def add(rng: random.Random, draft: Draft, features: Sequence[str]) -> None:
    """One to three of the features, or all that fit together where fewer are asked for."""
    chosen = rng.sample(features, min(len(features), rng.choice((1, 2, 2, 3))))
    first = [name for name in chosen if name in FIRST][:1]
    if draft.family == "encoder":  # what is left is what suits a model that sees all tokens
        first = [name for name in first if name in ("given_weights", "as_is")]
    for name in first:
        FIRST[name](rng, draft)
    keeps_task = first in (["rows"], ["as_is"]) or draft.family == "encoder"
    if not keeps_task and draft.options.get("task.name") != "distillation":
        draft.drop("task.")
    of_documents = draft.options.get("task.name") in (None, "distillation")
    of_rows = [name for name in chosen if name in _OF_ROWS][: 1 if of_documents else 0]
    if draft.family in ("encoder", AS_IS):
        chosen = [name for name in chosen if name not in ("adapters", "float8")]
    for name in OTHERS:
        if name in chosen and (name not in _OF_ROWS or name in of_rows):
            OTHERS[name](rng, draft)
    if not {f"{T}epochs", f"{T}on_data_end"} & draft.options.keys():  # few rows are left where long ones are dropped
        draft.options[f"{T}on_data_end"] = rng.choice(("repeat", "repeat", "repeat", "stop"))


def tolerance(case: Case) -> str:
    """The entry of ``search.TOLERANCES`` for a case."""
    if not case.is_exact:
        return "reduced"
    if case.value("model.converters"):
        # what is rounded the other way may send a token to another expert, and does so more often with each layer
        return "reduced" if case.value("model.name") in MIXTURES else "float8"
    if case.value("optimizer.name") == "AdamW8bit":
        return "8 bits"
    if case.value("optimizer.state_dtype") == "bfloat16":
        return "16 bits"
    if case.value("optimizer.name") == "Muon":
        return "Muon"
    return "steep" if case.value("task.name") in NEW_HEAD else "float32"


def broken(case: Case) -> Iterator[Broken]:
    """The documented rules of features that a case breaks."""
    yield from _of_stages(case)
    yield from _of_ranks(case)
    yield from _of_networks(case)
    yield from _of_learning(case)
    yield from _of_recomputation(case)
    yield from _of_teacher(case)
    yield from _of_data(case)
    yield from _of_validation(case)


def _of_stages(case: Case) -> Iterator[Broken]:
    if case.number(PP) == 1:
        return
    counted = f"{P}pipeline_parallel_layers_per_stage"
    if case.value(PARTS) and counted in case.options:
        yield Broken("stages are named, or counted", (counted,))
    compiled = case.value("compile.enable") == "true" and case.value("compile.components", "model") != "loss"
    if compiled and "-split-" in case.value(CSV):
        yield Broken("compiled layers have one backward", (CSV,))


def _of_learning(case: Case) -> Iterator[Broken]:
    compiled = case.value("compile.enable") == "true" and case.value("compile.components", "model") != "loss"
    if case.value("optimizer.early_step_in_backward") == "true":
        half = case.value(f"{T}mixed_precision_param") == "float16"
        late = case.number(PP) > 1 or case.value(f"{P}shard_optimizer_states") == "true" or half
        late = (
            late
            or case.accumulation > 1
            or case.value(f"{T}max_norm", "1") != "inf"
            or case.value("optimizer.name") == "Muon"
        )
        if late or "skip" in (case.value(f"{T}nonfinite_policy"), case.value(f"{T}spike_policy")):
            yield Broken("nothing may look at gradients that are gone", ("optimizer.early_step_in_backward",))
    frozen = case.value("lora.base_dtype", "training") != "training"
    first_node = case.value("checkpoint.storage") == "first_node"
    if frozen and (case.number(TP) > 1 or compiled or case.value(f"{T}enable_cpu_offload") == "true" or first_node):
        yield Broken("blocks of low bits stay whole, and on the device", ("lora.base_dtype",))
    if frozen and case.value("task.name") in ("preference", "kto"):
        yield Broken("the reference of these tasks is the model as it was, not rounded", ("lora.base_dtype",))
    for option in ("checkpoint.last_save_in_hf", "checkpoint.hf_interval"):
        if option in case.options and case.value("lora.enable") == "true":
            yield Broken("adapters are saved alone", (option,))
    if case.value("lora.enable") == "true" and case.value("model.converters"):
        yield Broken("float8 gains nothing beside frozen weights", ("model.converters",))
    if (
        case.value(f"{LINEAR}.enable_fsdp_float8_all_gather") == "true"
        and case.value(f"{T}enable_cpu_offload") == "true"
    ):
        yield Broken("weights are rounded on the device", (f"{LINEAR}.enable_fsdp_float8_all_gather",))
    only_head = case.value("model.name") == "gpt_oss" and case.value(f"{LINEAR}.filter_fqns") == "attention"
    if only_head and int(case.resolved()[f"{M}vocab_size"]) % 16:
        yield Broken("its linear layers are attention's and the head", (f"{LINEAR}.filter_fqns",))
    if GROUPED in case.value("model.converters").split("\n") and int(case.resolved()[f"{M}moe_ffn_dim"]) % 16:
        yield Broken("devices take multiples of 16 in experts", (f"{GROUPED}.fqns",))
    if GROUPED in case.value("model.converters").split("\n"):
        first = int(case.resolved().get(f"{M}interleave_moe_layer_step", "1"))
        first = max(first, int(case.resolved().get(f"{M}num_dense_layers", "0")) + 1)
        if first > case.number(f"{M}num_layers", 2):
            yield Broken("some layer has experts", (f"{GROUPED}.fqns",))
    if case.value(f"{A}mode") == "memory_budget" and not compiled:
        yield Broken("the compiler decides on the budget", (f"{A}mode",))
    if case.value(f"{A}mode") == "memory_budget" and case.value(f"{A}cpu_offload") == "true":
        yield Broken("the compiler moves no inputs", (f"{A}cpu_offload",))
    saved = case.value("lora.modules_to_save").split("\n")
    if "norm" in saved and case.value("model.norm_type") == "np_layernorm":
        yield Broken("what is saved has parameters", ("lora.modules_to_save",))
    wanted = case.value("lora.target_modules")
    saved += ["head"] if case.value("task.name") in NEW_HEAD else []
    if "head" in saved and "head" in wanted.split(","):
        yield Broken("what is trained whole has no adapter", ("lora.target_modules",))


def _of_recomputation(case: Case) -> Iterator[Broken]:
    split = case.number(PP) > 1 and (case.value(SCHEDULE) in SPLIT or bool(case.value(CSV)))
    kept = case.value(f"{A}mode") == "selective" and case.value(f"{A}selective_ac_option", "2") == "op"
    if case.value(f"{A}debug") == "true" and (split or kept):
        yield Broken("PyTorch follows one recomputation of whole layers", (f"{A}debug",))
    compiled = case.value("compile.enable") == "true" and case.value("compile.components", "model") != "loss"
    if case.value(f"{A}debug") == "true" and compiled and case.value(f"{A}mode") in ("full", "selective"):
        yield Broken("compiled layers run no operations to follow", (f"{A}debug",))


def _of_ranks(case: Case) -> Iterator[Broken]:
    """Of stages that are named any may have no layer, and adapters may be on layers alone."""
    if case.number(PP) == 1 or case.value("lora.enable") != "true" or not case.value(PARTS):
        return
    stages = [list(part) for part in json.loads(case.value(PARTS))]
    degree, schedule = case.number(PP), case.value(SCHEDULE, "1F1B")
    saved = set(case.value("lora.modules_to_save").split("\n"))
    saved |= {"head"} if "head" in case.value("lora.target_modules").split(",") else set()
    saved |= {{"embed": "tok_embeddings", "head": "output"}.get(name, name) for name in saved}
    for rank in range(degree):
        own = [2 * degree - 1 - rank, rank] if schedule in V_SHAPED else range(rank, len(stages), degree)
        held = {name for stage in own if stage < len(stages) for name in stages[stage]}
        if not held & saved and not any(name.startswith("layers.") for name in held):
            yield Broken("each rank has something to train", ("lora.target_modules",))
            return


def _of_networks(case: Case) -> Iterator[Broken]:
    """Networks of transformers are cut by their own plan alone."""
    if case.value("model.name") != AS_IS:
        return
    for option in (PP, CP, EP):
        if case.number(option) > 1:
            yield Broken("blocks that are taken as they are stay whole", (option,))
    tp = case.number(TP)
    if tp > 1 and (case.value(f"{M}path") != LLAMA or 2 % tp):
        yield Broken("the plan of a network divides its heads", (TP,))
    if tp > 1 and case.value("compile.enable") == "true" and case.value("compile.components", "model") != "loss":
        yield Broken("compiled blocks are not split", ("compile.enable",))
    if case.value("optimizer.name") == "Muon":
        yield Broken("patterns are those of its own names", ("optimizer.muon_adamw_patterns",))


def _of_teacher(case: Case) -> Iterator[Broken]:
    if case.value("task.name") != "distillation":
        return
    tp, cp = case.number(TP), case.number(CP)
    if case.number(PP) > 1:
        yield Broken("the loss of distillation is computed on a whole model", (PP,))
    if 2 % tp:
        yield Broken("tensor parallelism divides the 2 KV heads of the teacher", (TP,))
    if cp > 1 and case.value(f"{P}context_parallel_method") == "ulysses" and 2 % (tp * cp):
        yield Broken("ulysses divides the 2 KV heads of the teacher", (CP,))
    if tp > 1 and case.value(f"{P}disable_loss_parallel") != "true" and case.number(f"{M}vocab_size") != 320:
        yield Broken("ranks split both vocabularies alike", ("task.teacher_path",))


def _of_data(case: Case) -> Iterator[Broken]:
    if case.value("data.mode") == "stream" and any(name.endswith(".epochs") for name in case.options):
        yield Broken("a stream has no rows to count", tuple(name for name in case.options if name.endswith(".epochs")))
    for name, source in (("mixture", "data.sources."), ("epochs", f"{T}epochs")):
        if name == "epochs" and case.value(source) and case.value(f"{T}on_data_end"):
            yield Broken("epochs say when the data end", (f"{T}on_data_end",))


def _of_validation(case: Case) -> Iterator[Broken]:
    if case.value("validation.enable") != "true":
        return
    option, seq_len = "validation.seq_len", case.number("validation.seq_len", 2048)
    cp, tp = case.number(CP), case.number(TP)
    balanced = case.value(f"{P}context_parallel_method", "ring") == "ring"
    balanced = balanced and case.value(f"{P}context_parallel_load_balancer", "headtail") == "headtail"
    if seq_len % (2 * cp if cp > 1 and balanced else cp) or seq_len // cp % tp:
        yield Broken(f"{seq_len} tokens are cut as those of training are", (option,))
    if case.number(PP) > 1 and seq_len != case.number(SEQ):
        yield Broken("a pipeline is built for one length", (option,))
    if case.value("validation.per_epoch") and case.value("data.mode") == "stream":
        yield Broken("a stream has no rows to count", ("validation.per_epoch",))
    if case.value("validation.per_epoch") and any(name.startswith("data.sources") for name in case.options):
        yield Broken("a mixture has no epochs", ("validation.per_epoch",))
