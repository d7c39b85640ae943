"""Random cases of ``transformers`` architectures: their folders, the axes that each supports, and the rules."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_architectures import (
    ARCHITECTURES,
    EXPERTS,
    WHOLE_SEQUENCES,
    WITHOUT_PLAN,
    hf_config,
    layered,
    layers_of,
)
from search_case import (
    AS_IS,
    CP,
    EP,
    FSDP,
    LESS,
    PP,
    SCHEDULE,
    SEQ,
    SINGLE,
    TP,
    UNSET,
    Broken,
    Case,
    M,
    P,
    T,
)

if TYPE_CHECKING:
    from search_more import Draft

FOLDERS = Path(tempfile.gettempdir()) / "shardtrain-architectures"
"""Folders of the cases. A fixed place, so that the command of a case can be run again."""
WITHOUT_DOCUMENTS = (*WHOLE_SEQUENCES, "gpt2", "opt")
"""Architectures whose rows are single documents, because they do not isolate packed documents."""
HEADS = 2
"""Smallest number of key-value heads of an architecture."""


def name_of(case: Case) -> str:
    """Return the architecture of a case, or "" if it has another model."""
    path = Path(case.value(f"{M}path"))
    return path.name.rpartition("-")[0] if path.parent == FOLDERS else ""


def write_folder(path: Path) -> None:
    """Write the config.json of ``FOLDERS/NAME-LAYERS``. The weights of these cases are initial ones."""
    name, _, num_layers = path.name.rpartition("-")
    config = hf_config(name, **layered(name, int(num_layers)))
    config.architectures = [ARCHITECTURES[name][0]]
    config.save_pretrained(path)


def add(rng: random.Random, draft: Draft) -> None:
    """Replace the model by an architecture, and drop options and axes that it does not support."""
    name = rng.choice(list(ARCHITECTURES))
    draft.drop(
        M, "model.", "task.", "debug.moe", "lora.", "compile.", "optimizer.no_weight_decay", EP
    )
    # Experts are chosen by rounded scores, so reduced precision may choose others
    draft.drop(f"{T}mixed_precision", f"{T}dtype", f"{T}initial_loss_scale")
    if draft.options.get("optimizer.name") == "Muon":
        draft.drop("optimizer.name", "optimizer.lr", "optimizer.muon_")
    if name in WITHOUT_DOCUMENTS:
        draft.drop(
            "data.mode", "data.readers", "data.document_mask", "data.packing", "data.long_documents"
        )
        draft.options["data.packing"] = "padded"
    num_layers = layers_of(name)
    if PP in draft.options:
        draft.drop(*LESS, f"{P}pipeline_parallel_layers_per_stage")
        draft.options |= dict.fromkeys(LESS, "0")
        num_layers = 4
        stages = draft.number(PP) * (1 if draft.options[SCHEDULE] in SINGLE else 2)
        if stages > num_layers:
            draft.drop_pipeline()
    if name in WITHOUT_PLAN or draft.number(TP) > HEADS:
        draft.drop(TP, f"{P}disable_loss")
    elif TP in draft.options and name == "nemotron_h":
        draft.options[f"{P}disable_loss_parallel"] = "true"
    if name in WHOLE_SEQUENCES:
        draft.drop(CP, f"{P}context")
    ranks = draft.number(FSDP) * draft.number(CP) * draft.number(TP)
    degrees = [degree for degree in (2, 4) if ranks % degree == 0]
    if name in EXPERTS and degrees and rng.random() < 0.8:
        draft.options[EP] = str(rng.choice(degrees))
    path = str(FOLDERS / f"{name}-{num_layers}")
    draft.options |= {
        "model.name": AS_IS,
        f"{M}path": path,
        f"{M}num_layers": UNSET,
        f"{M}vocab_size": UNSET,
    }


def broken(case: Case) -> Iterator[Broken]:
    """Yield the documented rules that the mesh of an architecture breaks, except those of pipelines and sequences."""
    name = name_of(case)
    tp = case.number(TP)
    ep = case.number(EP)
    if tp > 1 and (name in WITHOUT_PLAN or HEADS % tp):
        yield Broken("tensor parallelism requires a plan, and must divide the heads", (TP,))
    if tp > 1 and name == "nemotron_h" and case.value(f"{P}disable_loss_parallel") != "true":
        yield Broken("the plan does not split the head", (f"{P}disable_loss_parallel",))
    if case.number(CP) > 1 and name in WHOLE_SEQUENCES:
        yield Broken("tokens are mixed outside of the attention function", (CP,))
    if ep > 1 and name not in EXPERTS:
        yield Broken("expert parallelism requires a network with experts", (EP,))
    ranks = case.number(FSDP) * case.number(CP) * tp
    if ranks % ep or 4 % ep:
        yield Broken(f"{ep} expert-parallel ranks must divide 4 experts and {ranks} ranks", (EP,))
    if ranks // ep * ep > 4 and ep > 1:
        yield Broken("ranks within an expert must divide its width", (EP,))
    if case.value("data.packing", "concat") != "padded" and name in WITHOUT_DOCUMENTS:
        yield Broken("the network does not isolate packed documents", ("data.packing", SEQ))
