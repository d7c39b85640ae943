"""Random configurations, each refused before a rank starts, or equal to one process; and the search for others.

``SHARDTRAIN_SEARCH_SEED`` takes others, ``SHARDTRAIN_SEARCH`` so many a part in place of 20: see ``docs/trust.md``.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import search
import torch
import torch.distributed as dist
from search import MOST, TOLERANCES, Numbers, Searcher, Verdict, command, differences, parse, refusal, shrink, widened
from search_case import (
    CP,
    DDP,
    FAMILIES,
    FSDP,
    LOCAL,
    LOOPED,
    MICRO,
    NEWER,
    PP,
    SCHEDULE,
    SHAPES,
    SINGLE,
    TP,
    V_SHAPED,
    Case,
    M,
    P,
)
from search_more import FEATURES, NOT_DRAWN
from search_space import broken, draw, draw_any
from tiers import cases

from shardtrain.config import problems as config_problems
from shardtrain.config.options import Option, entry_name, options, options_of
from shardtrain.distributed import fsdp, pipeline_parallel
from shardtrain.utils.errors import ConfigError, Problem

SEED = int(os.environ.get("SHARDTRAIN_SEARCH_SEED", "0"))
COUNT = int(os.environ.get("SHARDTRAIN_SEARCH", "20"))
PARTS, NEWER_PARTS, MORE_PARTS = 11, 3, 11
"""Of 20 cases each: 500 together."""
OLDER, NEW, MORE = (FAMILIES, ()), (NEWER, ()), ((*FAMILIES, *NEWER), FEATURES)
"""Families to draw from, and features."""
CHEAP = (("llama3", "mixtral"), ("named_stages", "distillation", "chat", "mixture", "low_bits", "early_step"))
SMALL_COUNTS = ((COUNT * 7 // 10, OLDER), (COUNT - COUNT * 7 // 10, NEW), (COUNT // 7, CHEAP))
"""Of the default tier: the first of two ranks and few passes, of any part."""
SMALL, SMALL_PIPELINE = 2, 8
"""Passes of layers in a step of one rank, which time goes to."""

# Options of cases that a search found to be wrong, as small as they got, and what was wrong with them.
FOUND = {
    "weights' gradients left out": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4 "
    "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.fsdp_reshard_after_forward always "
    "--model.overrides.num_layers 6",
    "a second recomputation": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4 "
    "--parallelism.pipeline_parallel_schedule DualPipeV --activation_checkpoint.mode selective "
    "--activation_checkpoint.selective_ac_option op --model.overrides.num_layers 6",
    "experts dealt by a rank's own count": "--model.name qwen3_moe --parallelism.data_parallel_shard_degree 2 "
    "--debug.moe_force_load_balance true --training.local_batch_size 3 --training.seq_len 14",
}
COMPILED = {
    "process groups in a compiled graph, whose size the compiler asked": "--parallelism.tensor_parallel_degree 2 "
    "--activation_checkpoint.mode memory_budget --compile.enable true --compile.backend aot_eager",
}
"""Found too, and dearer."""
FEATURED = {
    "columns of one scale cut by split states": "--parallelism.data_parallel_replicate_degree 2 "
    "--parallelism.data_parallel_shard_degree 2 --parallelism.shard_optimizer_states true --optimizer.name AdamW8bit",
    "no rule for the biases of routers beside frozen weights in low bits": "--model.name mixtral "
    "--parallelism.data_parallel_shard_degree 2 --model.overrides.load_balance_coeff 1e-2 --lora.enable true "
    "--lora.random_base true --lora.rank 4 --lora.alpha 8 --lora.base_dtype int8",
    "more pipeline ranks than layers": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2 "
    "--model.overrides.num_layers 1 "
    """--parallelism.module_fqns_per_model_part '[["embed"], ["layers.0", "norm", "head"]]'""",
}
"""Found with features."""


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(search.ROOT)  # the data of cases are named from there


@pytest.fixture
def searcher(tmp_path: Path) -> Searcher:
    return Searcher(tmp_path)


def small_ones(how_many: int, families: Sequence[str], features: Sequence[str]) -> Iterator[int]:
    """The first cases of the seed that two ranks run in few passes."""

    def is_small(case: Case) -> bool:
        piped = case.number(PP) > 1
        passes = case.accumulation * (case.number(LOCAL) // case.number(MICRO) if piped else 1)
        passes *= case.number(f"{M}num_layers")
        return case.num_ranks == 2 and passes <= (SMALL_PIPELINE if piped else SMALL)

    return islice((number for number in count() if is_small(draw(SEED, number, families, features))), how_many)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("of", "numbers"),
    cases(
        [
            pytest.param(of, list(small_ones(how_many, *of)), id=f"{name}-small")
            for name, (how_many, of) in zip(("all", "newer", "cheap-features"), SMALL_COUNTS, strict=True)
        ],
        nightly=[
            pytest.param(of, range(part * COUNT, (part + 1) * COUNT), id=f"{name}-{part}")
            for name, of, parts in (("all", OLDER, PARTS), ("newer", NEW, NEWER_PARTS), ("features", MORE, MORE_PARTS))
            for part in range(parts)
        ],
    ),
)
def test_random_configurations_are_refused_or_equal_to_one_process(
    of: tuple[Sequence[str], Sequence[str]], numbers: Sequence[int]
) -> None:
    lines: list[str] = []
    counts, faults = search.search(SEED, numbers, lines.append, families=of[0], features=of[1])
    assert not faults, "\n".join(lines)
    assert sum(counts.values()) == len(numbers)
    assert counts["equal"] > counts["refused"]  # a search of refusals would prove little


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "found",
    cases(
        [pytest.param(FOUND, id="first")],
        nightly=[pytest.param(COMPILED, id="compiled"), pytest.param(FEATURED, id="featured")],
    ),
)
def test_what_a_search_has_found_stays_fixed(found: dict[str, str], searcher: Searcher) -> None:
    verdicts = searcher.judge([parse(shlex.split(options)) for options in found.values()])
    assert dict(zip(found, verdicts, strict=True)) == dict.fromkeys(found, Verdict("equal"))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "family",
    cases(["llama3", "deepseek_v2"], nightly=sorted({*SHAPES} - {"llama3", "deepseek_v2", "encoder"})),
)
def test_gradient_does_not_depend_on_the_size_of_micro_batches(family: str, lora: bool, tmp_path: Path) -> None:
    adapters = {"lora.enable": "true", "lora.random_base": "true", "lora.rank": "4"} if lora else {}
    jobs = []
    for size in (4, 2, 1):
        case = search.Case({"model.name": family, **adapters, LOCAL: str(size)}, accumulation=4 // size)
        jobs.append(search.Job(search.load(case, {"job.dump_folder": str(tmp_path / str(size))})))
    whole, *parts = [answer[0] for answer in search.run_jobs(1, jobs)]
    for numbers in parts:
        assert not differences(numbers, whole, TOLERANCES["float32"])


def test_a_case_is_the_same_in_every_search_and_its_command_gives_it_back() -> None:
    for number in range(300):
        case = draw(3, number)
        assert case == draw(3, number)
        again = parse(shlex.split(command(case).removeprefix("python tests/search.py --try ")))
        assert (dict(again.options), again.accumulation, again.then) == (
            dict(case.options),
            case.accumulation,
            case.then,
        )


def test_the_check_refuses_what_breaks_a_rule_and_nothing_else() -> None:
    counts: Counter[str] = Counter()
    for number in range(100):
        case = draw_any(5, number)
        verdict = refusal(case)
        assert verdict.kind in ("accepted", "refused"), f"{verdict.kind}: {verdict.text}\n{command(case)}"
        counts[verdict.kind] += 1
    assert min(counts.values()) > 15


def test_cases_reach_every_kind_of_option() -> None:
    cases = [draw(4, number) for number in range(1500)]
    seen: dict[str, Counter[str]] = {}
    for case in cases:
        for name, value in case.resolved().items():
            seen.setdefault(name, Counter())[value] += 1
    assert seen["model.name"].keys() == set(FAMILIES) == SHAPES.keys() - set(NEWER)
    assert {draw(4, number, NEWER).value("model.name") for number in range(20)} == set(NEWER)
    assert {*SINGLE, *LOOPED, *V_SHAPED} <= seen[SCHEDULE].keys()
    for degree in (PP, DDP, FSDP, CP, TP):
        assert {"2", "4"} <= seen[degree].keys(), degree
    assert seen[f"{P}fsdp_reshard_after_forward"].keys() == {"always", "never"}
    assert {case.num_ranks for case in cases} == {1, 2, 3, 4, 6, 8}
    assert sum(case.then is not None for case in cases) > 50
    legal = sum(not list(broken(case)) for case in cases)
    assert 0.8 * len(cases) < legal < len(cases)


def names_of(option: Option) -> list[str]:
    """Its own, or those of the keys of its entries."""
    return list(options_of(f"{option.name}.{entry_name(option)}", option.entry)) if option.entry else [option.name]


def placed(name: str) -> str:
    """The option of the schema that an option of a case sets: ``data.sources.NAME.weight`` for one source's weight."""
    table = next((option for option in options().values() if name.startswith(f"{option.name}.")), None)
    if table is None:
        return name
    _entry, _, key = name[len(table.name) + 1 :].partition(".")
    return f"{table.name}.{entry_name(table)}.{key.partition('.')[0]}" if table.entry else table.name


def test_every_option_is_drawn_or_said_to_change_no_number() -> None:
    every = {name for option in options().values() for name in names_of(option)}
    some = (((), 450), (FEATURES, 600), (("guards",), 60))  # a scale of losses is rare: few cases are of float16
    drawn_cases = [draw(4, number, features=features) for features, most in some for number in range(most)]
    drawn_cases += [case.moved() for case in drawn_cases if case.then is not None]
    drawn = {placed(name) for case in drawn_cases for name in case.resolved()}
    reasons = [name for names in NOT_DRAWN.values() for name in names]
    known = {option: [name for name in reasons if f"{option}.".startswith(f"{name.rstrip('.')}.")] for option in every}
    assert drawn <= every
    assert not [option for option in drawn if known[option]], "these are drawn: take them out of NOT_DRAWN"
    missing = [option for option in every - drawn if not known[option]]
    assert not missing, "draw these in tests/search_more.py, or say in NOT_DRAWN why they change no number"
    assert set(reasons) == {name for names in known.values() for name in names}  # none that is no option


SPLIT = Case(
    {
        PP: "2",
        SCHEDULE: "ZBVZeroBubble",
        f"{P}pipeline_parallel_first_stage_less_layers": "0",
        f"{P}pipeline_parallel_last_stage_less_layers": "0",
        f"{P}fsdp_reshard_after_forward": "always",
        f"{M}num_layers": "4",
        LOCAL: "4",
        "debug.seed": "7",
    }
)


def test_a_silent_difference_is_found(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "gather", lambda model: None)  # what the schedule needs of a resharded stage
    assert pipeline_parallel.fsdp is fsdp
    assert searcher.judge([SPLIT])[0].kind == "differs"


def test_a_tolerance_widens_by_what_one_process_says_of_itself_and_no_further() -> None:
    """A model that amplifies rounding says how far; a fault is no rounding, and one of its own size is still seen."""

    def numbers(loss: float, scale: float) -> Numbers:
        weight = {"w": torch.ones(4) * scale}
        return Numbers([1.0, loss], [1.0, scale], [], {}, weight, weight)

    usual, expected = TOLERANCES["float32"], numbers(1.0, 1.0)
    assert widened(usual, expected, expected, MOST) == usual  # nothing is amplified
    wider = widened(usual, numbers(1 + 1e-5, 1 + 4e-6), expected, MOST)
    assert wider.loss == pytest.approx(8e-5, rel=1e-3) and wider.norm == pytest.approx(3.2e-5, rel=0.05)
    assert not differences(numbers(1 + 5e-5, 1 + 2e-5), expected, wider)
    assert differences(numbers(1 + 1.2e-4, 1.0), expected, wider)
    assert widened(usual, numbers(2.0, 3.0), expected, MOST) == MOST


@pytest.mark.timeout(600)
@pytest.mark.nightly(
    "shrinking takes some thirty runs",
    by="tests/test_search.py::test_a_silent_difference_is_found",
)
def test_a_silent_difference_is_found_and_shrunk(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "gather", lambda model: None)
    small = shrink(SPLIT, lambda case: searcher.judge([case])[0].kind == "differs")
    assert set(small.options) <= {*SPLIT.options} - {"debug.seed"}
    assert {PP, SCHEDULE, f"{P}fsdp_reshard_after_forward"} <= set(small.options)
    assert small.num_ranks == 2


def test_a_crash_and_a_late_refusal_are_found_and_the_next_cases_are_judged(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = search.trainer.build

    def fail(config: Any, world: Any) -> Any:
        if world.rank == 1 and config.debug.seed == 1:
            raise RuntimeError("planted")
        if world.rank == 1 and config.debug.seed == 2:
            raise ConfigError(Problem("debug.seed", 2, "is refused", "late"))
        return build(config, world)

    monkeypatch.setattr(search.trainer, "build", fail)
    cases = [Case({FSDP: "2", "debug.seed": str(seed)}) for seed in (1, 2, 3)]
    crash, late, equal = searcher.judge(cases)
    assert crash.kind == "crashes" and "planted" in crash.text
    assert late.kind == "refused late" and "debug.seed=2 is refused" in late.text
    assert equal == Verdict("equal")


def test_a_rank_that_waits_for_ever_is_found(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    step = search.trainer.step

    def hang(run: Any) -> Any:
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            time.sleep(100)
        return step(run)

    monkeypatch.setattr(search.trainer, "step", hang)
    monkeypatch.setattr(search, "IDLE_SECONDS", 4)
    assert searcher.judge([Case({FSDP: "2"})])[0].kind == "hangs"


def test_a_refusal_is_held_against_the_rules(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Case({TP: "3"})
    assert searcher.judge([odd])[0].kind == "refused"

    def strict(loaded: Any) -> Any:
        yield Problem("optimizer.lr", 1, "is refused", "for nothing")

    monkeypatch.setattr(config_problems, "check", lambda loaded: list(strict(loaded)))
    needless, misnamed = searcher.judge([Case(), odd])
    assert needless.kind == misnamed.kind == "refused without need"
    assert "names optimizer.lr" in misnamed.text
