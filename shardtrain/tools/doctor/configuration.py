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
    accelerators = environment.count_accelerators(loaded.config.training.device)
    facts["problems"] = []
    for problem in config.problems_of(loaded, context.size, context.device, accelerators):
        # The storage check reports the dump folder.
        if problem.option != "job.dump_folder":
            facts["problems"].append(redact(str(problem)))
    facts["notes"] = [redact(note) for note in (*loaded.notices, *config.notes(loaded))]
    facts["path"] = str(loaded.path or "")
    if context.rank == 0 and context.has_config and not facts["problems"]:
        facts.update(needs(context))


def needs(context: RankContext) -> Facts:
    """Return minimum bytes of a rank's weights, gradients and optimizer states, and of a checkpoint.

    Activations are not counted (see ``docs/plan.md``).
    """
    from shardtrain.train.preflight import memory_fit, meta_model

    options = context.loaded.config
    errors, parameters = meta_model.build(options, context.size)
    if parameters is None:
        problems = []
        for error in errors:
            problems += [redact(str(line)) for line in getattr(error, "problems", [error])]
        return {"problems": problems}
    return {
        "parameters": sum(parameter.num_elements for parameter in parameters),
        "state_bytes_per_rank": memory_fit.state_bytes(options, context.size, parameters),
        "checkpoint_bytes": memory_fit.checkpoint_bytes(options, parameters),
    }


def judge(reports: Reports) -> Iterator[Finding]:
    """Yield a finding per problem and note. It names the affected ranks unless all are affected."""
    by_rank = reports.of(AREA)
    if not by_rank:
        return
    problems = _ranks_by_text(by_rank, "problems")
    notes = _ranks_by_text(by_rank, "notes")
    for text, ranks in problems.items():
        yield _finding(reports, "problem", "fail", text, ranks)
    for text, ranks in notes.items():
        yield _finding(reports, "note", "warn", text, ranks)
    if not problems and not notes:
        path = next(iter(by_rank.values()))["path"]
        yield Finding(AREA, "configuration", "pass", path or "defaults", "no problem here")


def _ranks_by_text(by_rank: dict[int, Facts], kind: str) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, facts in by_rank.items():
        for text in dict.fromkeys(facts[kind]):
            ranks.setdefault(text, []).append(rank)
    return ranks


def _finding(
    reports: Reports, subject: str, verdict: Verdict, text: str, ranks: list[int]
) -> Finding:
    # The text of a problem ends with its fix, after the last semicolon.
    measured, _, fix = text.rpartition("; ")
    if not measured:
        measured, fix = fix, ""
    named: list[int] = []
    if len(ranks) < reports.size:
        named = ranks
        measured += f" (on {reports.who(ranks)})"
    return Finding(AREA, subject, verdict, measured, "", fix, tuple(named))
