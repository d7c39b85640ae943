"""Run trials through the trainer, each on its own number of gloo ranks.

Every rank records its numbers, compares them with the reference's numbers, and writes only the errors. So
the parent process needs neither tensors nor a collective.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtrain.tools.verify import forked_workers
from shardtrain.tools.verify.certificate.trial import (
    REFERENCE,
    NumberError,
    Trial,
    TrialErrors,
    TrialFacts,
    errors_file,
)
from shardtrain.utils.errors import ConfigError

SECONDS_PER_TRIAL = 120


def run_all(trials: Sequence[Trial], folder: Path) -> dict[str, TrialErrors]:
    """Run all trials and return their errors by name. The reference is the first trial, or has run before.

    Trials with the same number of ranks share processes, because the first step of a process takes a second
    longer.

    Raises:
        ConfigError: the reference fails.
    """
    answers: dict[str, TrialErrors] = {}
    remaining = list(trials)
    while remaining:
        num_ranks = remaining[0].num_ranks
        batch = _next_batch(remaining, num_ranks, answers)
        finished = _run_until_failure(num_ranks, batch, folder)
        answers.update(finished)
        # Without a reference there is nothing to compare with. The mesh is not the cause, so it is a user
        # error.
        if REFERENCE in finished and finished[REFERENCE].failure:
            raise ConfigError(
                f"the configuration does not train on one process: {finished[REFERENCE].failure}"
            )
        # Trials after a failed one run again in new processes.
        remaining = [trial for trial in remaining if trial.name not in answers]
    return answers


def _next_batch(
    remaining: Sequence[Trial], num_ranks: int, answers: Mapping[str, TrialErrors]
) -> list[Trial]:
    """Return the trials with this number of ranks that can run now. A trial runs after the trial that it resumes."""
    batch: list[Trial] = []
    finished = set(answers)
    for trial in remaining:
        can_run = not trial.resumes or trial.resumes in finished
        if trial.num_ranks == num_ranks and can_run:
            batch.append(trial)
            # A batch runs in order, so a later trial of the same batch may resume this one.
            finished.add(trial.name)
    return batch


def _run_until_failure(
    num_ranks: int, trials: Sequence[Trial], folder: Path
) -> dict[str, TrialErrors]:
    """Run trials in one set of processes. If a trial fails, its answer is the failure, and later trials do not run."""
    from shardtrain.tools.verify.certificate.trial_rank import run_trials

    group = folder / f"group-{num_ranks}-{trials[0].name}"
    group.mkdir(parents=True)
    failed = None
    try:
        forked_workers.run(
            num_ranks,
            run_trials,
            list(trials),
            str(folder),
            folder=group,
            backend="gloo",
            limit_seconds=SECONDS_PER_TRIAL * len(trials),
            may_fork=True,
        )
    except forked_workers.RankFailed as error:
        failed = error
    # Trials before the failed trial have written their errors. The first trial without a file has failed.
    answers: dict[str, TrialErrors] = {}
    for trial in trials:
        ranks = [errors_file(folder, trial.name, rank) for rank in range(num_ranks)]
        if not all(path.exists() for path in ranks):
            assert failed is not None, f"{trial.name} wrote no errors"
            answers[trial.name] = TrialErrors(failure=str(failed), is_refused=failed.refused)
            break
        answers[trial.name] = TrialErrors(tuple(_errors_of(ranks)), facts=_facts_of(ranks))
    return answers


def _facts_of(paths: Sequence[Path]) -> TrialFacts:
    """Return the facts of a trial. Ranks add their shares of rows and outputs."""
    of_ranks = []
    for path in paths:
        answer = json.loads(path.read_text(encoding="utf-8"))
        of_ranks.append(answer["facts"])
    facts = of_ranks[0]
    for name in ("rows", "outputs"):
        total: dict[str, float] = {}
        for of_rank in of_ranks:
            for key, value in of_rank[name].items():
                total[key] = total.get(key, 0) + value
        facts[name] = total
    for of_rank in of_ranks[1:]:
        for step, scales in of_rank["scales"].items():
            known = facts["scales"].setdefault(step, [])
            known += [scale for scale in scales if scale not in known]
    # Pipeline ranks have only the gradients of their stages.
    facts["num_gradients"] = max(of_rank["num_gradients"] for of_rank in of_ranks)
    return TrialFacts(**facts)


def _errors_of(paths: Sequence[Path]) -> Iterator[NumberError]:
    """Yield the largest error of each number over the ranks, and an infinite one for a number that no rank has."""
    largest: dict[tuple[str, int, str], float] = {}
    factors: dict[tuple[str, int, str], float | None] = {}
    wanted: set[tuple[str, int, str]] = set()
    for path in paths:
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wanted.update((kind, step, tensor) for kind, step, tensor in answer["wanted"])
        for kind, step, tensor, error, factor in answer["errors"]:
            key = (kind, step, tensor)
            # Keep the factor of the rank with the largest error, which describes the same number.
            if error >= largest.get(key, 0.0):
                largest[key] = error
                factors[key] = factor
    for key in wanted - largest.keys():
        largest[key] = math.inf
    for (kind, step, tensor), error in largest.items():
        yield NumberError(kind, step, tensor, error, factors.get((kind, step, tensor)))
