"""Configuration: problems that ``train`` would report on this machine, and the size of the model."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain import config
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict
from shardtrain.utils.log import redact

AREA = "config"


def collect(context: RankContext, facts: Facts) -> None:
    """Record problems and notes of the configuration. Rank 0 also computes the memory needs of the model."""
    from shardtrain.launch import environment

    loaded = context.loaded
    found = environment.count_accelerators(loaded.config.training.device)
    problems = config.problems_of(loaded, context.size, context.device, found)
    problems = [one for one in problems if one.option != "job.dump_folder"]  # reported by storage
    facts["problems"] = [redact(str(problem)) for problem in problems]
    facts["notes"] = [redact(note) for note in (*loaded.notices, *config.notes(loaded))]
    facts["path"] = str(loaded.path or "")
    if context.rank == 0 and context.has_config and not problems:
        facts.update(needs(context))


def needs(context: RankContext) -> Facts:
    """Return minimum bytes of a rank's weights, gradients and optimizer states, and of a checkpoint.

    Activations are not counted (see ``docs/plan.md``).
    """
    from shardtrain.train.preflight import memory_fit, meta_model

    options = context.loaded.config
    errors, parameters = meta_model.build(options, context.size)
    if parameters is None:
        return {"problems": [redact(str(line)) for error in errors for line in getattr(error, "problems", [error])]}
    numbers = sum(one.num_elements for one in parameters)
    return {
        "parameters": numbers,
        "state_bytes_per_rank": memory_fit.state_bytes(options, context.size, parameters),
        "checkpoint_bytes": memory_fit.checkpoint_bytes(options, parameters),
    }


def judge(reports: Reports) -> Iterator[Finding]:
    """Yield a finding per problem and note. It names the affected ranks unless all are affected."""
    by_rank = reports.of(AREA)
    verdicts: tuple[tuple[str, Verdict], ...] = (("problems", "fail"), ("notes", "warn"))
    # The text of a problem ends with its fix, after the last semicolon.
    clean = True
    for kind, verdict in verdicts:
        texts = list(dict.fromkeys(text for facts in by_rank.values() for text in facts[kind]))
        for text in texts:
            ranks = [rank for rank, facts in by_rank.items() if text in facts[kind]]
            where = f" (on {reports.who(ranks)})" if len(ranks) < reports.size else ""
            what, _, fix = text.rpartition("; ")
            only = tuple(ranks) if where else ()
            yield Finding(AREA, kind.removesuffix("s"), verdict, (what or fix) + where, "", fix if what else "", only)
            clean = False
    if clean and by_rank:
        path = next(iter(by_rank.values()))["path"]
        yield Finding(AREA, "configuration", "pass", path or "defaults", "no problem here")
