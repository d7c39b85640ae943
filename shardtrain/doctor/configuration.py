"""The configuration of the run against this machine: what ``train`` would refuse, and how large the model is."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain import config
from shardtrain.doctor.finding import Facts, Finding, Said, Verdict
from shardtrain.doctor.here import Here
from shardtrain.log import redact

AREA = "config"

_STATES = {"AdamW": 2, "Adam": 2, "Muon": 1}
"""Tensors of an optimizer for each weight, at least."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def collect(here: Here, facts: Facts) -> None:
    """Note problems and notes of the configuration here; the first rank also counts what the model needs."""
    from shardtrain.launch import environment

    loaded = here.loaded
    found = environment.count_accelerators(loaded.config.training.device)
    problems = [*config.check(loaded), *config.unavailable(loaded)]
    problems += config.machine_notes(loaded, here.size, here.device, found)
    facts["problems"] = [redact(str(problem)) for problem in problems]
    facts["notes"] = [redact(note) for note in (*loaded.notices, *config.notes(loaded))]
    facts["path"] = str(loaded.path or "")
    if here.rank == 0 and here.has_config and not problems:
        facts.update(needs(here))


def needs(here: Here) -> Facts:
    """Bytes of weights, gradients and optimizer states on a rank, and of a checkpoint; lower bounds of what is used.

    All axes but that of replicas divide the states; activations are not counted (see ``docs/dry_run.md``).
    """
    from shardtrain import models

    options = here.loaded.config
    module = models.find(options.model.name)
    shape = models.shape_of(module, options.model.flavor, options.model.overrides, options.model.norm_type)
    numbers = sum(parameter.numel() for parameter in models.build(module, shape).parameters())
    width, states = _BYTES.get(options.training.dtype, 4), _STATES.get(options.optimizer.name, 1)
    sharing = max(1, here.size // options.parallelism.data_parallel_replicate_degree)
    return {
        "parameters": numbers,
        "state_bytes_per_rank": numbers * width * (2 + states) // sharing,
        "checkpoint_bytes": numbers * width * (1 + states),
    }


def judge(said: Said) -> Iterator[Finding]:
    """A row for each problem and note, with the ranks that have it where not all do."""
    told = said.of(AREA)
    verdicts: tuple[tuple[str, Verdict], ...] = (("problems", "fail"), ("notes", "warn"))
    clean = True
    for kind, verdict in verdicts:
        texts = list(dict.fromkeys(text for facts in told.values() for text in facts[kind]))
        for text in texts:
            ranks = [rank for rank, facts in told.items() if text in facts[kind]]
            where = f" (on {said.who(ranks)})" if len(ranks) < said.size else ""
            what, _, fix = text.rpartition("; ")
            only = tuple(ranks) if where else ()
            yield Finding(AREA, kind.removesuffix("s"), verdict, (what or fix) + where, "", fix if what else "", only)
            clean = False
    if clean and told:
        path = next(iter(told.values()))["path"]
        yield Finding(AREA, "configuration", "pass", path or "defaults", "no problem here")
