"""MLflow, trackio and Prometheus, with their real clients, return the metrics that a run reports."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sqlite3
import sys
import urllib.error
import urllib.request
from pathlib import Path

import patience
import pytest
import torch

from shardtrain.metrics import Metrics
from shardtrain.metrics.sinks.prometheus import PrometheusSink
from shardtrain.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove settings of this machine that would send the metrics of a test to a real service."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    # the sinks set these, and monkeypatch restores them
    for name in (
        "TRACKIO_DIR",
        "MLFLOW_ALLOW_FILE_STORE",
    ):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def test_mlflow_receives_metrics_and_options_and_a_resumed_run_continues(
    tmp_path, kit, monkeypatch
) -> None:
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct-horse-battery")
    options = {"enable_mlflow": True}
    kit.run(tmp_path, 5, options=options, total_steps=10)
    kit.run(tmp_path, 10, start_step=5, options=options, total_steps=10)
    store = client(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = store.get_experiment_by_name("shardtrain")
    (run,) = store.search_runs([experiment.experiment_id])

    assert run.info.status == "FINISHED"
    assert run.data.params["training.seq_len"] == "2048"
    assert run.data.params["run.model"] == "llama3/debugmodel"

    # The resumed run continues the curve of the first one.
    losses = store.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in losses] == [1, 5, 10]
    assert losses[0].value == 1.0

    # A secret of the environment is stored nowhere.
    for path in (tmp_path / "mlruns").rglob("*"):
        if path.is_file():
            assert b"correct-horse" not in path.read_bytes()


def test_trackio_stores_metrics_in_files_of_the_run(tmp_path, kit) -> None:
    # trackio chooses the location of its files at import, so do not import it before the run does.
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    run = tmp_path / "my_run"
    run.mkdir()
    kit.run(run, 10, options={"enable_trackio": True}, total_steps=10)
    files = [path for path in (run / "trackio").rglob("*.db")]

    assert len(files) == 1, list((run / "trackio").rglob("*"))

    with sqlite3.connect(files[0]) as data:
        rows = data.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [row[1] for row in rows] == [1, 5, 10]
    assert {row[0] for row in rows} == {"my_run"}
    assert b'"loss":1.0' in bytes(rows[0][2]).replace(b" ", b"")


def test_unreachable_mlflow_server_is_one_warning_and_training_continues(
    tmp_path, kit, caplog, monkeypatch
) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    kit.run(tmp_path, 5, options={"enable_mlflow": True})

    assert caplog.text.count("MLflow failed") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=patience.seconds(10)
    ) as answer:
        lines = answer.read().decode().splitlines()
    values = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, _ = line.partition("{")
            _, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


def test_prometheus_serves_the_last_logged_step_until_the_run_ends(tmp_path, kit) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with Metrics(kit.config(prometheus_port=port), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        metrics.update(1, torch.tensor(3.0), 2, 2, 0.5, 1e-3, 0.0)
        metrics.validation(1, {"loss": 2.5})
        values = scraped(port)

        assert (
            values["shardtrain_loss"],
            values["shardtrain_grad_norm"],
            values["shardtrain_step"],
        ) == (1.5, 0.5, 1)
        assert values["shardtrain_validation_loss"] == 2.5
        assert not [name for name in values if "python" in name]

    with pytest.raises(urllib.error.URLError):
        scraped(port)


def test_prometheus_listens_on_loopback_by_default_and_a_port_in_use_does_not_stop_training(
    tmp_path, kit, caplog
) -> None:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(0, kit.config().metrics.prometheus_address, {})
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
        kit.run(tmp_path, 5, options={"prometheus_port": sink.port})
    finally:
        sink.close()

    assert "cannot serve Prometheus metrics" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(
    "option", [{"enable_mlflow": True}, {"enable_trackio": True}, {"prometheus_port": 9000}]
)
def test_a_missing_package_is_an_error(option, kit, monkeypatch, tmp_path) -> None:
    for name in list(sys.modules):
        if name.startswith(("mlflow", "trackio", "prometheus_client")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    (name,) = option
    message = rf"metrics\.{name}=.* requires the package .*pip install"
    with pytest.raises(ConfigError, match=message):
        Metrics(kit.config(**option), tmp_path, kit.facts(), kit.OneRank())


def test_dashboard_uses_metrics_that_a_run_exports(kit, tmp_path) -> None:
    pytest.importorskip("prometheus_client")
    docs = Path(__file__).parents[2] / "docs"
    used = set()
    dashboard = json.loads((docs / "grafana_dashboard.json").read_text())
    for panel in dashboard["panels"]:
        used |= {target["expr"].partition("{")[0] for target in panel["targets"]}
    alert_rules = (docs / "monitoring.md").read_text()
    for expression in re.findall("expr: (.*)", alert_rules):
        used |= set(re.findall(r"shardtrain_\w+(?=[\[) ])", expression + "\n"))

    port = free_port()
    with Metrics(kit.config(prometheus_port=port), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        metrics.update(1, torch.tensor(3.0), 2, 2, 0.5, 1e-3, 0.0, {"goodput": 0.5, "spikes": 0.0})
        metrics.validation(1, {"loss": 2.5})
        assert used <= scraped(port).keys()
