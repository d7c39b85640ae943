import sys
import threading
from types import ModuleType, SimpleNamespace

import patience
import pytest

from shardtrain.metrics import Metrics
from shardtrain.metrics.sinks.tracker import TrackerSink
from shardtrain.metrics.sinks.wandb import run_options
from shardtrain.utils.errors import ConfigError

ON = {"enable_wandb": True}


class Stub(ModuleType):
    """A fake client that records every call."""

    def __init__(self):
        super().__init__("wandb")
        self.inits = []
        self.logs = []
        self.finished = False
        self.fail_init = self.fail_log = None
        self.gate = threading.Event()
        self.gate.set()

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.gate.wait(patience.seconds(20))
        self.inits.append(options)
        if self.fail_init:
            raise self.fail_init
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, values, step):
        if self.fail_log:
            raise self.fail_log
        self.logs.append((step, values))

    def _finish(self):
        self.finished = True


@pytest.fixture(autouse=True)
def client(monkeypatch):
    for name in list(__import__("os").environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    stub = Stub()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_records_arrive_in_order_with_the_documented_names(tmp_path, kit, client):
    kit.run(tmp_path, 10, options=ON, total_steps=10)
    assert [step for step, _ in client.logs] == [1, 5, 10]
    values = client.logs[0][1]
    assert {"loss", "lr", "step", "tokens_per_second", "step_time", "consumed_tokens"} <= set(
        values
    )
    assert {"loss_metrics/global_avg_loss", "throughput(tps)", "memory/max_rss(GiB)"} <= set(values)
    assert (values["loss"], values["step_time"], values["consumed_tokens"]) == (1.0, 0.5, 100)
    assert client.finished


def test_run_has_the_configuration_and_is_stored_below_the_run_folder(tmp_path, kit, client):
    kit.run(tmp_path, 1, options=ON)
    (options,) = client.inits
    assert options["dir"] == str(tmp_path)
    assert options["config"]["training"]["seq_len"] == 2048
    assert options["config"]["run.model"] == "llama3/debugmodel"
    assert options["settings"]["init_timeout"] == 60


def test_environment_variables_name_the_run(monkeypatch):
    assert run_options(None) == {"project": "shardtrain"}
    for name in ("PROJECT", "TEAM", "RUN_NAME", "RUN_ID", "RUN_NOTES", "RUN_GROUP", "RUN_JOB_TYPE"):
        monkeypatch.setenv(f"WANDB_{name}", name.lower())
    monkeypatch.setenv("WANDB_RUN_TAGS", "a, b")
    assert run_options(None) == {
        "project": "project",
        "entity": "team",
        "name": "run_name",
        "id": "run_id",
        "notes": "run_notes",
        "group": "run_group",
        "job_type": "run_job_type",
        "tags": ["a", "b"],
        "resume": "allow",
    }
    assert (run_options(3)["name"], run_options(3)["id"]) == ("run_name-rank3", "run_id-rank3")


def test_a_fork_is_not_also_a_resume(monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "x")
    monkeypatch.setenv("WANDB_FORK_FROM", "y?_step=5")
    assert run_options(None) == {"project": "shardtrain", "id": "x", "fork_from": "y?_step=5"}


@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1), TimeoutError("slow")])
def test_a_client_that_cannot_start_is_one_warning(tmp_path, kit, client, caplog, error):
    client.fail_init = error
    kit.run(tmp_path, 12, options=ON)
    assert caplog.text.count("W&B failed") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


def test_a_client_that_fails_later_is_one_warning_without_secrets(
    tmp_path, kit, client, caplog, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    client.fail_log = RuntimeError("key canary-0123456789 refused")
    kit.run(tmp_path, 12, options=ON)
    assert caplog.text.count("W&B failed") == 1
    assert "canary" not in caplog.text


def test_hanging_client_does_not_block_steps_or_the_end(tmp_path, client, caplog, monkeypatch):
    client.gate.clear()
    monkeypatch.setattr("shardtrain.metrics.sinks.tracker.QUEUE_RECORDS", 5)
    sink = TrackerSink("W&B", lambda: client.init(dir=str(tmp_path)), lambda record: {})
    for step in range(8):
        sink.scalars(step, {"loss": 1.0})
    sink.close(timeout_seconds=0.05)

    assert sink.num_dropped == 3
    assert "3 records did not reach W&B" in caplog.text

    client.gate.set()
    sink._thread.join(0.01)


def test_only_the_writer_logs_without_save_for_all_ranks(tmp_path, kit, client):
    kit.run(tmp_path, 1, options=ON, rank=1, is_writer=False, world_size=2)
    assert not client.inits
    kit.run(
        tmp_path,
        1,
        options=ON | {"save_for_all_ranks": True},
        rank=1,
        is_writer=False,
        world_size=2,
    )

    assert client.inits[0]["name"] == "rank1"


def test_a_missing_client_is_an_error_before_training(tmp_path, kit, monkeypatch):
    import importlib.util

    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="pip install wandb"):
        Metrics(kit.config(**ON), tmp_path, kit.facts(), kit.OneRank())
