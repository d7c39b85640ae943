"""Each second of a run is in exactly one bin, across kills, restarts, repeated commands and other rank counts."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.launch.goodput import events, ledger
from shardtrain.launch.goodput.account import BINS, account, attempts_of
from shardtrain.launch.goodput.events import AttemptProgress, Death, Start
from shardtrain.launch.goodput.ledger import Ledger, note_death
from shardtrain.tools.runs import goodput
from shardtrain.utils.activity import Phases
from shardtrain.utils.errors import ConfigError, DataError


class Life:
    """A run on a simulated clock: attempts that train, save and die, and the true number of seconds in each bin."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.job, self.command = folder, 1e9, "", 0
        self.truth = dict.fromkeys((*BINS, "idle"), 0.0)
        self.saved = self.attempts = 0

    def spend(self, seconds: float, *names: str) -> None:
        self.now += seconds
        for name in names:
            self.truth[name] += seconds

    def new_command(self) -> None:
        self.command += 1
        self.job, self.attempts = f"job{self.command}:{self.now}", 0

    def attempt(
        self, steps: int, interval: int, step_seconds: float, dies: bool, unknown: float = 0.0
    ) -> None:
        """Train ``steps`` from the last save, saving every ``interval``; 5 s to start, 3 s more in the first step."""
        started = self.now
        first = self.saved
        if self.attempts == 0:
            started = float(self.job.partition(":")[2])
            self.spend(2.0, "start")  # the launcher's imports
        self.attempts += 1
        phases = Phases(lambda: self.now)
        self.spend(3.0, "start")
        environment = {"SHARDTRAIN_JOB": self.job, "SHARDTRAIN_STARTED": str(started)}
        ledger = Ledger(self.folder, phases, self.saved, 2, environment, lambda: self.now)
        phases.begin("compile")

        # Time of steps since the last save: productive once it is saved, and lost if the attempt dies.
        pending = 0.0
        for number in range(1, steps + 1):
            with phases.within("data"):
                self.spend(0.5)
            self.spend(step_seconds)
            pending += step_seconds + 0.5
            if number == 1:
                self.spend(3.0, "compile")
            if number % 4 == 0:
                with phases.within("validation"):
                    self.spend(2.0, "validation")
            ledger.step = first + number
            ledger.measures()
            if number % interval == 0:
                with phases.within("checkpoint"):
                    self.spend(1.0, "checkpoint")
                self.saved = first + number
                ledger.saved(self.saved)
                self.truth["data"] += 0.5 * interval
                self.truth["productive"] += pending - 0.5 * interval
                pending = 0.0
            if number == 1:
                phases.begin("step")

        if dies:
            self.spend(unknown)
            self.truth["lost"] += pending + unknown
            note_death(self.folder, self.job, self.now)
            return

        phases.begin("end")
        self.spend(0.25, "start")
        assert not pending, "the test ends attempts with a save"
        ledger.__exit__(None, None, None)

    def account(self):
        return account(attempts_of(events.read(self.folder)[0]))


def test_every_second_of_a_run_with_restarts_is_in_its_bin(tmp_path):
    life = Life(tmp_path)
    life.new_command()
    life.attempt(12, 5, 4.0, dies=True, unknown=1.5)
    life.spend(7.0, "restart")
    life.attempt(5, 5, 4.0, dies=False)
    life.spend(100.0, "idle")
    life.new_command()
    life.attempt(10, 5, 2.0, dies=False)
    accounted = life.account()

    assert {**accounted.seconds, "idle": accounted.idle_seconds} == pytest.approx(
        life.truth, abs=1e-3
    )
    assert accounted.running_seconds + accounted.idle_seconds == pytest.approx(life.now - 1e9)
    assert (accounted.attempts, accounted.failures, accounted.saves) == (3, 1, 5)
    assert accounted.goodput == pytest.approx(life.truth["productive"] / (life.now - 1e9 - 100))


@pytest.mark.parametrize("seed", range(20))
def test_the_bins_of_any_life_add_up_to_its_wall_time(tmp_path, seed):
    dice = random.Random(seed)
    life = Life(tmp_path)
    life.new_command()
    for _ in range(dice.randrange(1, 8)):
        interval = dice.randrange(1, 6)
        dies = dice.random() < 0.6
        steps = interval * dice.randrange(1, 5) + (dice.randrange(interval) if dies else 0)
        # With only one step, the duration of a usual step is unknown.
        life.attempt(
            max(2 * interval, steps), interval, dice.uniform(0.1, 9.0), dies, dice.random()
        )
        if dies:
            life.spend(dice.uniform(0.1, 60.0), "restart")
        else:
            life.spend(dice.uniform(0.1, 900.0), "idle")
            life.new_command()
    life.attempt(4, 2, 1.0, dies=False)
    accounted = life.account()

    assert accounted.running_seconds + accounted.idle_seconds == pytest.approx(
        life.now - 1e9, rel=1e-6
    )
    assert {**accounted.seconds, "idle": accounted.idle_seconds} == pytest.approx(
        life.truth, abs=1e-2
    )


def test_live_goodput_equals_the_goodput_from_the_file(tmp_path):
    life = Life(tmp_path)
    life.new_command()
    life.attempt(7, 5, 4.0, dies=True)
    life.spend(3.0, "restart")
    phases = Phases(lambda: life.now)
    ledger = Ledger(
        tmp_path,
        phases,
        5,
        2,
        {"SHARDTRAIN_JOB": life.job, "SHARDTRAIN_STARTED": str(life.now)},
        lambda: life.now,
    )
    phases.begin("compile")
    life.spend(9.0)
    phases.begin("step")
    life.spend(20.0)
    ledger.step = 8
    live = ledger.measures()
    accounted = life.account()

    assert live == pytest.approx(
        {
            "goodput": accounted.goodput,
            **{f"goodput_{k}_seconds": v for k, v in accounted.seconds.items()},
        }
    )
    assert live["goodput_lost_seconds"] == pytest.approx(9.0)
    assert live["goodput_restart_seconds"] == pytest.approx(3.0)


def a_ledger(life: Life, phases: Phases, step: int = 0) -> Ledger:
    environment = {"SHARDTRAIN_JOB": life.job, "SHARDTRAIN_STARTED": str(life.now)}
    return Ledger(life.folder, phases, step, 1, environment, lambda: life.now)


def train(life: Life, ledger: Ledger, first: int, last: int) -> None:
    """Run steps ``first`` to ``last`` of 2 s each."""
    for step in range(first, last + 1):
        life.spend(2.0)
        ledger.step = step
        ledger.measures()


def test_a_save_reported_late_counts_exactly_the_saved_steps(tmp_path):
    """An asynchronous save of step 4 completes at step 7. After a failure, steps 5 to 10 are lost."""
    life = Life(tmp_path)
    life.new_command()
    phases = Phases(lambda: life.now)
    ledger = a_ledger(life, phases)
    phases.begin("step")
    train(life, ledger, 1, 7)
    ledger.saved(4)

    assert ledger.account().seconds["productive"] == pytest.approx(14.0)

    train(life, ledger, 8, 10)
    note_death(tmp_path, life.job, life.now)
    accounted = life.account()

    # There is no next attempt yet, so the steps after step 4 count as lost.
    assert accounted.seconds["productive"] == pytest.approx(8.0)
    assert accounted.seconds["lost"] == pytest.approx(12.0)

    a_ledger(life, Phases(lambda: life.now), 4)
    assert life.account().seconds == pytest.approx(accounted.seconds)


def test_steps_undone_by_a_rewind_are_lost_and_every_second_is_in_a_bin(tmp_path):
    life = Life(tmp_path)
    life.new_command()
    phases = Phases(lambda: life.now)
    with a_ledger(life, phases) as ledger:
        phases.begin("step")
        train(life, ledger, 1, 5)
        ledger.saved(5)
        train(life, ledger, 6, 8)
        ledger.rollback(5)
        train(life, ledger, 6, 9)
        live = ledger.account()
    accounted = life.account()

    assert accounted.seconds == pytest.approx(live.seconds)
    assert accounted.seconds["productive"] == pytest.approx(18.0)
    assert accounted.seconds["lost"] == pytest.approx(6.0)
    assert accounted.running_seconds == pytest.approx(24.0)
    assert accounted.saves == 1


def test_a_rank_that_keeps_no_account_writes_nothing(tmp_path):
    ledger = Ledger(None, Phases(), 0, 2)
    with ledger:
        ledger.saved(1)
        ledger.step = 1
        assert ledger.measures() == {}


def test_a_torn_line_loses_only_that_line(tmp_path):
    life = Life(tmp_path)
    life.new_command()
    life.attempt(6, 3, 1.0, dies=True)
    undamaged = life.account()
    path = tmp_path / events.FILE
    content = path.read_bytes()
    path.write_bytes(content + content.splitlines()[-2][:40])
    # The run goes on after the torn line.
    life.spend(5.0, "restart")
    life.attempt(6, 3, 1.0, dies=False)
    intact, bad = events.read(tmp_path)

    assert bad == 1
    assert len(attempts_of(intact)) == 2
    assert account(attempts_of(intact)[:1]).seconds["checkpoint"] == undamaged.seconds["checkpoint"]

    # A file that is cut at any place is accounted without an error.
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        account(attempts_of(events.read(tmp_path)[0]))


def test_another_command_that_starts_at_step_0_is_another_run(tmp_path):
    life = Life(tmp_path)
    life.new_command()
    life.attempt(4, 2, 1.0, dies=False)
    life.spend(9.0)
    life.saved = 0
    life.new_command()
    life.attempt(4, 2, 1.0, dies=False)

    assert life.account().attempts == 1
    assert len(list(tmp_path.glob("goodput-*.jsonl"))) == 1


# launcher -> variables of the ranks, start time of the second command, and the expected gaps. The first start ends at
# 110, and the ranks of the second one begin at 140.
SECOND_STARTS = {
    "torchrun, pods started again by hand": ({"TORCHELASTIC_RUN_ID": "run"}, 130.0, {"idle": 20.0, "start": 10.0}),
    "torchrun, agents that meet again": ({"TORCHELASTIC_RUN_ID": "run"}, 90.0, {"restart": 30.0}),
    "torchrun, a failed rank": (
        {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1"}, 130.0, {"restart": 30.0}
    ),
    "torchrun without an id": ({"TORCHELASTIC_RUN_ID": "none"}, 130.0, {"idle": 20.0, "start": 10.0}),
    "srun": ({}, 130.0, {"idle": 30.0}),
    "ours, the same command": ({"SHARDTRAIN_JOB": "a:90", "SHARDTRAIN_STARTED": "140"}, 90.0, {"restart": 30.0}),
    "ours, another command": (
        {"SHARDTRAIN_JOB": "b:130", "SHARDTRAIN_STARTED": "140"}, 130.0, {"idle": 20.0, "start": 10.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("launcher", SECOND_STARTS)
def test_the_time_between_two_commands_is_idle_with_every_launcher(tmp_path, monkeypatch, launcher):
    environment, parent_started, expected = SECOND_STARTS[launcher]
    first_environment = {**environment, "TORCHELASTIC_RESTART_COUNT": "0"}
    if "SHARDTRAIN_JOB" in environment:
        first_environment |= {"SHARDTRAIN_JOB": "a:90", "SHARDTRAIN_STARTED": "90"}

    # Each attempt spends all of its time in a step.
    attempts = (
        (first_environment, 90.0, 90.0, 110.0),
        (environment, parent_started, 140.0, 150.0),
    )
    for variables, launcher_start, rank_start, end in attempts:
        start_times = {"self": rank_start, "parent": launcher_start}

        def process_started(now, otherwise, pid="self", start_times=start_times):
            return start_times["self" if pid == "self" else "parent"]

        monkeypatch.setattr(ledger, "process_started", process_started)
        clock = [rank_start]
        phases = Phases(lambda clock=clock: clock[0])
        with Ledger(tmp_path, phases, int(rank_start), 1, variables, lambda clock=clock: clock[0]):
            phases.begin("step")
            clock[0] = end

    accounted = account(attempts_of(events.read(tmp_path)[0]))
    gaps = {}
    if accounted.idle_seconds:
        gaps["idle"] = accounted.idle_seconds
    for name in ("restart", "start"):
        if accounted.seconds[name]:
            gaps[name] = accounted.seconds[name]

    assert gaps == expected
    assert accounted.failures == ("restart" in expected)


def test_a_process_replaced_by_exec_starts_at_the_exec(monkeypatch):
    now = time.time()
    started_at = ledger.process_started(now, now)
    monkeypatch.setenv(ledger.HANDED_OVER, str(int(now - 1)))

    # The time before the exec, in which a script ran, is excluded.
    assert ledger.process_started(now, now) == max(started_at, int(now - 1))

    # A time of an earlier process, or a text that is no time, is ignored.
    for text in (
        str(int(started_at - 100)),
        "yesterday",
        "",
    ):
        monkeypatch.setenv(ledger.HANDED_OVER, text)
        assert ledger.process_started(now, now) == pytest.approx(started_at, abs=0.1)
    monkeypatch.setenv(ledger.HANDED_OVER, str(int(now + 100)))

    assert ledger.process_started(now, now) <= now


def test_a_file_that_cannot_be_written_does_not_stop_a_run(tmp_path):
    (tmp_path / events.FILE).mkdir()
    with Ledger(tmp_path, Phases(), 3, 1) as ledger:
        ledger.step = 4
        assert ledger.measures() == {}


GOOD = [
    Start("a", "j", 1.0, 2.0, 0, 1, 0),
    AttemptProgress("a", 3.0, 1, 0, {"step": 1.0}, False),
    Death("j", 4.0),
]
DEATH = events.line(GOOD[2])
START = events.line(GOOD[0])
PROGRESS = events.line(GOOD[1])
BAD = [
    *[
        b"",
        b"x",
        b"[]",
        b"{}",
        b"null",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"kind": "start"}',
        b'{"kind": []}',
    ],
    *[
        DEATH.replace(b"4.0", value)
        for value in (b"NaN", b"1e400", b"-1", b"true", b'"4"', b"null", b'4.0, "more": 1')
    ],
    DEATH.replace(b'"j"', b"1"),
    START.replace(b'"step": 0', b'"step": 1.5'),
    PROGRESS.replace(b'"step": 1.0', b'"walk": 1.0'),
    PROGRESS.replace(b'{"step": 1.0}', b"[1]"),
    PROGRESS.replace(b'"saves": 0', b'"saves": ' + b"9" * 5000),
]


@pytest.mark.parametrize("event", GOOD)
def test_events_survive_a_round_trip(event):
    assert events.parse(events.line(event)) == event


@pytest.mark.parametrize("text", BAD)
def test_a_line_that_is_not_an_event_is_refused(text):
    with pytest.raises(ValueError):
        events.parse(text)


def test_the_verb_prints_the_bins_and_reports_damaged_lines(tmp_path, capsys):
    life = Life(tmp_path)
    life.new_command()
    life.attempt(12, 5, 4.0, dies=True)
    life.spend(7.0, "restart")
    life.attempt(5, 5, 4.0, dies=False)
    with (tmp_path / events.FILE).open("a") as file:
        file.write(json.dumps({"kind": "start"}) + "\n")

    assert cli.main(["goodput", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "ignored 1 incomplete or damaged line of " in text
    assert "2 attempts on 2 ranks, 1 failure, 3 saves" in text
    assert all(f"\n{name} " in text for name in (*BINS, "running", "idle", "goodput"))
    assert "predicted" in text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([1], "1 attempt on 1 rank, "),
        ([2, 2], "2 attempts on 2 ranks, "),
        ([2, 1], "2 attempts on 2, then 1 rank, "),
        ([8, 8, 4, 8], "4 attempts on 8, then 4, then 8 ranks, "),
        ([*range(1, 31)], ", then 20, ..., then 30 ranks, "),
    ],
)
def test_the_verb_prints_the_numbers_of_ranks_in_order(sizes, text):
    starts = [Start(str(i), "job", float(i), i + 1.0, 0, size, i) for i, size in enumerate(sizes)]
    attempts = attempts_of(starts)
    assert text in goodput.table(attempts, account(attempts))[0]


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_of_the_table_is_wider_than_a_terminal(tmp_path, capsys, monkeypatch, columns):
    life = Life(tmp_path)
    life.new_command()
    life.attempt(10, 5, 4.0, dies=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(goodput.sys.stdout, "isatty", lambda: True, raising=False)

    assert cli.main(["goodput", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("1 attempt on 2 ranks, 0 failures, ")
    # wrapped explanations stay in their column
    assert [line for line in lines if line.startswith(" " * 37)]


def test_the_verb_rejects_other_folders(tmp_path, capsys):
    assert cli.main(["goodput", str(tmp_path)]) == 3
    assert "goodput.jsonl cannot be read" in capsys.readouterr().err
    for arguments in ([], ["a", "b"], ["--nproc"]):
        with pytest.raises(ConfigError, match="requires the folder of one run"):
            goodput.main(arguments)
    with pytest.raises(DataError):
        events.read(tmp_path / "none")


def test_the_predicted_ettr_equals_the_measured_one_under_the_model_s_assumptions(tmp_path):
    """A failure in the middle of each interval loses half an interval, as the model assumes."""
    life = Life(tmp_path)
    life.new_command()
    for _ in range(10):
        life.attempt(525, 50, 1.0, dies=True)
        life.spend(20.0, "restart")
    life.attempt(50, 50, 1.0, dies=False)
    accounted = life.account()

    assert accounted.predicted_ettr() == pytest.approx(accounted.ettr, abs=0.03)


def test_a_rewind_past_an_empty_attempt_is_accounted(tmp_path):
    """Repeating a finished run adds an empty attempt. Then ``checkpoint.load_step`` rewinds past it."""
    life = Life(tmp_path)
    life.new_command()
    life.attempt(6, 2, 4.0, dies=False)
    life.new_command()
    ledger = a_ledger(life, Phases(lambda: life.now), step=6)
    life.spend(3.0)
    ledger.__exit__(None, None, None)
    life.new_command()
    phases = Phases(lambda: life.now)
    ledger = a_ledger(life, phases, step=2)
    phases.begin("step")
    train(life, ledger, 3, 4)
    accounted = ledger.account()

    assert accounted.seconds["productive"] == pytest.approx(2 * 4.0 + 2 * 2.0)
    # Steps 3 to 6 of the first attempt are lost, including the time of their data.
    assert accounted.seconds["lost"] == pytest.approx(4 * 4.5)
