"""Random configurations are refused before ranks start or equal one process, and the search finds planted faults.

``SHARDTRAIN_SEARCH_SEED`` sets the seed and ``SHARDTRAIN_SEARCH`` the number of cases per part: see ``docs/trust.md``.
"""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import search
import torch
import torch.distributed as dist
from search import (
    MOST,
    TOLERANCES,
    Numbers,
    Searcher,
    Verdict,
    command,
    differences,
    parse,
    refusal,
    shrink,
    widened,
)
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
from search_more import ARCHITECTURES, FEATURES, NOT_DRAWN
from search_space import broken, draw, draw_any
from tiers import cases

from shardtrain.config import problems as config_problems
from shardtrain.config.options import Option, entry_name, options, options_of
from shardtrain.distributed import fsdp, pipeline_parallel
from shardtrain.utils.errors import ConfigError, Problem

SEED = int(os.environ.get("SHARDTRAIN_SEARCH_SEED", "0"))
COUNT = int(os.environ.get("SHARDTRAIN_SEARCH", "20"))
PARTS = 11
NEWER_PARTS = 3
MORE_PARTS = 11
NETWORK_PARTS = 3
"""Parts of 20 cases: 560 cases in total."""
OLDER = (FAMILIES, ())
NEW = (NEWER, ())
MORE = ((*FAMILIES, *NEWER), FEATURES)
"""Pairs of the families and the features to draw from."""
NETWORKS = (("llama3",), (ARCHITECTURES,))
CHEAP = (
    ("llama3", "mixtral"),
    ("named_stages", "distillation", "chat", "mixture", "low_bits", "early_step"),
)
SMALL_COUNTS = (
    (COUNT * 7 // 10, OLDER),
    (COUNT - COUNT * 7 // 10, NEW),
    (COUNT // 7, CHEAP),
    (COUNT // 5, NETWORKS),
)
"""Number of cases in the default tier, by what they draw from. They have two ranks and few passes."""
SMALL = 2
SMALL_PIPELINE = 8
"""Maximum passes through a layer per rank and step. The time of a case is proportional to them."""

# Shrunk cases of earlier searches, by the fault that they had.
FOUND = {
    "missing weight gradients": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4 "
    "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.fsdp_reshard_after_forward always "
    "--model.overrides.num_layers 6",
    "a second recomputation": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4 "
    "--parallelism.pipeline_parallel_schedule DualPipeV --activation_checkpoint.mode selective "
    "--activation_checkpoint.selective_ac_option op --model.overrides.num_layers 6",
    "balanced routing counted per rank": "--model.name qwen3_moe --parallelism.data_parallel_shard_degree 2 "
    "--debug.moe_force_load_balance true --training.local_batch_size 3 --training.seq_len 14",
}
COMPILED = {
    "compiler read the size of a process group in the graph": "--parallelism.tensor_parallel_degree 2 "
    "--activation_checkpoint.mode memory_budget --compile.enable true --compile.backend aot_eager",
}
"""Slower cases of earlier searches."""
FEATURED = {
    "sharded states split a block that shares one scale": "--parallelism.data_parallel_replicate_degree 2 "
    "--parallelism.data_parallel_shard_degree 2 --parallelism.shard_optimizer_states true --optimizer.name AdamW8bit",
    "no rule for router biases next to packed frozen weights": "--model.name mixtral "
    "--parallelism.data_parallel_shard_degree 2 --model.overrides.load_balance_coeff 1e-2 --lora.enable true "
    "--lora.random_base true --lora.rank 4 --lora.alpha 8 --lora.base_dtype int8",
    "more pipeline ranks than layers": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2 "
    "--model.overrides.num_layers 1 "
    """--parallelism.module_fqns_per_model_part '[["embed"], ["layers.0", "norm", "head"]]'""",
}
"""Cases of earlier searches with features."""


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(search.ROOT)  # cases name data files relative to the root


@pytest.fixture
def searcher(tmp_path: Path) -> Searcher:
    return Searcher(tmp_path)


def small_cases(num_cases: int, families: Sequence[str], features: Sequence[str]) -> Iterator[int]:
    """Return the numbers of the seed's first cases with two ranks and few passes."""

    def is_small(case: Case) -> bool:
        has_pipeline = case.number(PP) > 1
        microbatches = case.number(LOCAL) // case.number(MICRO) if has_pipeline else 1
        passes = case.accumulation * microbatches * case.number(f"{M}num_layers")
        return case.num_ranks == 2 and passes <= (SMALL_PIPELINE if has_pipeline else SMALL)

    numbers = (number for number in count() if is_small(draw(SEED, number, families, features)))
    return islice(numbers, num_cases)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("source", "numbers"),
    cases(
        [
            pytest.param(source, list(small_cases(num_cases, *source)), id=f"{name}-small")
            for name, (num_cases, source) in zip(
                ("all", "newer", "cheap-features", "networks"), SMALL_COUNTS, strict=True
            )
        ],
        nightly=[
            pytest.param(source, range(part * COUNT, (part + 1) * COUNT), id=f"{name}-{part}")
            for name, source, parts in (
                ("all", OLDER, PARTS),
                ("newer", NEW, NEWER_PARTS),
                ("features", MORE, MORE_PARTS),
                ("networks", NETWORKS, NETWORK_PARTS),
            )
            for part in range(parts)
        ],
    ),
)
def test_random_configurations_are_refused_or_equal_to_one_process(
    source: tuple[Sequence[str], Sequence[str]], numbers: Sequence[int]
) -> None:
    lines: list[str] = []
    families, features = source
    if ARCHITECTURES in features:
        pytest.importorskip("transformers")
    counts, faults = search.search(
        SEED, numbers, lines.append, families=families, features=features
    )

    assert not faults, "\n".join(lines)
    assert sum(counts.values()) == len(numbers)
    assert counts["equal"] > counts["refused"]  # most cases must train: refusals prove little


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "earlier_faults",
    cases(
        [pytest.param(FOUND, id="first")],
        nightly=[pytest.param(COMPILED, id="compiled"), pytest.param(FEATURED, id="featured")],
    ),
)
def test_faults_of_earlier_searches_stay_fixed(
    earlier_faults: dict[str, str], searcher: Searcher
) -> None:
    verdicts = searcher.judge([parse(shlex.split(options)) for options in earlier_faults.values()])
    assert dict(zip(earlier_faults, verdicts, strict=True)) == dict.fromkeys(
        earlier_faults, Verdict("equal")
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "family",
    cases(
        ["llama3", "deepseek_v2"], nightly=sorted({*SHAPES} - {"llama3", "deepseek_v2", "encoder"})
    ),
)
def test_gradient_does_not_depend_on_micro_batch_size(
    family: str, lora: bool, tmp_path: Path
) -> None:
    adapters = {"lora.enable": "true", "lora.random_base": "true", "lora.rank": "4"} if lora else {}
    jobs = []
    for size in (4, 2, 1):
        case = search.Case(
            {"model.name": family, **adapters, LOCAL: str(size)}, accumulation=4 // size
        )
        jobs.append(search.Job(search.load(case, {"job.dump_folder": str(tmp_path / str(size))})))
    one_batch, *several_batches = [answer[0] for answer in search.run_jobs(1, jobs)]

    for numbers in several_batches:
        assert not differences(numbers, one_batch, TOLERANCES["float32"])


def test_cases_are_deterministic_and_their_commands_reproduce_them() -> None:
    for number in range(300):
        case = draw(3, number)
        assert case == draw(3, number)
        again = parse(shlex.split(command(case).removeprefix("python tests/search.py --try ")))
        assert (dict(again.options), again.accumulation, again.then) == (
            dict(case.options),
            case.accumulation,
            case.then,
        )


def test_check_refuses_exactly_the_cases_that_break_a_rule() -> None:
    counts: Counter[str] = Counter()
    for number in range(100):
        case = draw_any(5, number)
        verdict = refusal(case)
        assert verdict.kind in ("accepted", "refused"), (
            f"{verdict.kind}: {verdict.text}\n{command(case)}"
        )
        counts[verdict.kind] += 1

    assert min(counts.values()) > 15


def test_cases_reach_every_kind_of_option() -> None:
    cases = [draw(4, number) for number in range(1500)]
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        for name, value in case.resolved().items():
            seen[name][value] += 1

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
    """Return the name of an option, or the names of the keys of its entries if it is a table of entries."""
    if option.entry:
        return list(options_of(f"{option.name}.{entry_name(option)}", option.entry))
    return [option.name]


def schema_name(name: str) -> str:
    """Return the schema's name of a case's option: ``data.sources.NAME.weight`` for the weight of one source."""
    table = next(
        (option for option in options().values() if name.startswith(f"{option.name}.")), None
    )
    if table is None:
        return name
    if not table.entry:
        return table.name
    _entry, _, key = name[len(table.name) + 1 :].partition(".")
    return f"{table.name}.{entry_name(table)}.{key.partition('.')[0]}"


def test_every_option_is_drawn_or_has_a_reason_not_to_be() -> None:
    every_option: set[str] = set()
    for option in options().values():
        every_option |= set(names_of(option))
    not_drawn = list(itertools.chain.from_iterable(NOT_DRAWN.values()))

    # loss scales are rare without the extra cases of guards, because few cases use float16
    draws = (((), 450), (FEATURES, 600), (("guards",), 60))
    drawn: set[str] = set()
    for features, num_cases in draws:
        for number in range(num_cases):
            case = draw(4, number, features=features)
            drawn |= {schema_name(name) for name in case.resolved()}
            if case.then is not None:
                drawn |= {schema_name(name) for name in case.moved().resolved()}

    def entries_of(option: str) -> list[str]:
        """Return the entries of NOT_DRAWN that cover an option: itself or its section."""
        return [name for name in not_drawn if f"{option}.".startswith(f"{name.rstrip('.')}.")]

    assert drawn <= every_option
    assert not [option for option in drawn if entries_of(option)], (
        "remove these drawn options from NOT_DRAWN"
    )

    missing = [option for option in every_option - drawn if not entries_of(option)]
    assert not missing, (
        "draw these in tests/search_more.py, or add to NOT_DRAWN why they change no result"
    )

    covering: set[str] = set()
    for option in every_option:
        covering |= set(entries_of(option))
    assert set(not_drawn) == covering, "NOT_DRAWN has names that are not options"


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


def test_silent_difference_is_found(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    # the schedule needs it for a resharded stage
    monkeypatch.setattr(fsdp, "gather", lambda model: None)
    assert pipeline_parallel.fsdp is fsdp
    assert searcher.judge([SPLIT])[0].kind == "differs"


def test_tolerance_widens_by_the_rounding_errors_of_one_process() -> None:
    """The tolerance follows the model's own amplification of rounding errors, and larger errors remain faults."""

    def numbers(loss: float, scale: float) -> Numbers:
        weight = {"w": torch.ones(4) * scale}
        return Numbers([1.0, loss], [1.0, scale], [], {}, weight, weight)

    usual = TOLERANCES["float32"]
    expected = numbers(1.0, 1.0)

    assert widened(usual, expected, expected, MOST) == usual  # rounding moved nothing

    wider = widened(usual, numbers(1 + 1e-5, 1 + 4e-6), expected, MOST)
    assert wider.loss == pytest.approx(8e-5, rel=1e-3)
    assert wider.norm == pytest.approx(3.2e-5, rel=0.05)
    assert not differences(numbers(1 + 5e-5, 1 + 2e-5), expected, wider)
    assert differences(numbers(1 + 1.2e-4, 1.0), expected, wider)
    assert widened(usual, numbers(2.0, 3.0), expected, MOST) == MOST


@pytest.mark.timeout(600)
@pytest.mark.nightly(
    "shrinking takes about thirty runs",
    by="tests/test_search.py::test_silent_difference_is_found",
)
def test_silent_difference_is_found_and_shrunk(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "gather", lambda model: None)
    small = shrink(SPLIT, lambda case: searcher.judge([case])[0].kind == "differs")
    assert set(small.options) <= {*SPLIT.options} - {"debug.seed"}
    assert {PP, SCHEDULE, f"{P}fsdp_reshard_after_forward"} <= set(small.options)
    assert small.num_ranks == 2


def test_crash_and_late_refusal_are_found_and_do_not_stop_the_search(
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

    assert crash.kind == "crashes"
    assert "planted" in crash.text
    assert late.kind == "refused late"
    assert "debug.seed=2 is refused" in late.text
    assert equal == Verdict("equal")


def test_hanging_rank_is_found(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    step = search.trainer.step

    def hang(run: Any) -> Any:
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            time.sleep(100)
        return step(run)

    monkeypatch.setattr(search.trainer, "step", hang)
    monkeypatch.setattr(search, "IDLE_SECONDS", 4)

    assert searcher.judge([Case({FSDP: "2"})])[0].kind == "hangs"


def test_refusal_is_compared_with_the_rules(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Case({TP: "3"})
    assert searcher.judge([odd])[0].kind == "refused"

    def strict(loaded: Any) -> Any:
        yield Problem("optimizer.lr", 1, "is refused", "for nothing")

    monkeypatch.setattr(config_problems, "check", lambda loaded: list(strict(loaded)))
    needless, misnamed = searcher.judge([Case(), odd])

    assert needless.kind == misnamed.kind == "refused without need"
    assert "names optimizer.lr" in misnamed.text
