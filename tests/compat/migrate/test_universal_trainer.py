"""parameters.yml of pytorch_universal_trainer: the same numbers as the original, and its users' files."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import numpy as np
import patience
import pytest
import torch
import universal_trainer_folder as folders
from ports import free_port
from ranks import run_ranks
from tiers import cases
from tiny import make_run
from torch.nn import functional as F

from shardtrain import config as configs
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.compat import migrate
from shardtrain.compat.migrate import ThisMachine
from shardtrain.config.schema import Config
from shardtrain.distributed import LOSS_AXES
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.ops.dtensor import to_full
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.train import trainer
from shardtrain.train.resume import resume
from shardtrain.utils.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")

STEPS = 20


def write_folder(folder: Path, **values: Any) -> Path:
    """Write a folder with absolute paths, because the test's ranks have another working directory."""
    places = {
        "data_dir": folder / "data",
        "pretrained_model_dir": folder / "bart",
        "model_dir": folder / "models",
    }
    file = folders.make(folder, **{"dropout": 0.0, "with_head": True, "train": 67, **values})
    return folders.write_parameters(folder, **{**places, **values}) if file else file


def configured(file: Path, nproc: int, verb: str = "train") -> Config:
    return migrate.open_file(file, machine=ThisMachine(nproc=nproc), verb=verb)[0].config


def body(rank: int, config: Config, steps: int) -> dict[str, Any]:
    """Run steps of the trainer. Return losses, rates, the rows of each step on this rank, and the final weights."""
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    first = run.state.step
    rows = []
    losses = []
    rates = []
    pull = run.dataloader.__next__

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> Any:
            batch = pull()
            rows[-1].extend(row for row in batch.sample_ids_B.tolist() if row >= 0)
            return batch

    stream, run.dataloader = run.dataloader, Noted()  # type: ignore[assignment]
    for _ in range(steps):
        rows.append([])
        outcome = trainer.step(run)
        assert outcome is not None
        loss = run.mesh.sum(outcome.loss_sum.double(), over=LOSS_AXES).item()
        losses.append(loss / outcome.global_tokens)
        rates.append(outcome.lr)

    weights = {}
    moments = {}
    for name, parameter in run.runner.parameters().items():
        weights[name] = to_full(parameter).clone()
        state = run.optimizer.state[parameter]
        if "exp_avg" in state:
            moments[name] = to_full(state["exp_avg"]).clone()
    return {
        "first": first,
        "rows": rows,
        "losses": losses,
        "rates": rates,
        "weights": weights,
        "moments": moments,
        "total": run.state.step + (run.dataloader.steps_left or 0),
        "scale": run.scaler.state() if run.scaler else None,
    }


class Original:
    """The original rules in a plain loop: one process, full batches, transformers' network, torch's AdamW."""

    def __init__(self, folder: Path, lr: float, steps: int, warmup: float = 0.01) -> None:
        config = transformers.BartConfig.from_pretrained(folder / "bart", num_labels=2)
        self.model = transformers.BartForSequenceClassification(config)
        with BinWeights(folder / "bart") as weights:
            self.model.load_state_dict({name: weights.read(name, ()) for name in weights.names()})
        self.model.train()
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "bart" / "tokenizer.json")
        )
        lines = (folder / "data" / "sentiment-train").read_text().splitlines()
        self.rows = [line.rsplit("\t", 1) for line in lines]

        # Biases and norms do not decay.
        decaying = []
        constant = []
        for name, parameter in self.model.named_parameters():
            if "bias" in name or "LayerNorm.weight" in name:
                constant.append(parameter)
            else:
                decaying.append(parameter)
        groups = [
            {"params": decaying, "weight_decay": 0.01},
            {"params": constant, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, eps=1e-8)
        warmup_steps = int(steps * warmup)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return step / max(1, warmup_steps)
            return max(0.0, (steps - step) / max(1, steps - warmup_steps))

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.steps = steps
        self.step = 0

    def take(self, numbers: list[int]) -> tuple[float, float]:
        """Train on the given rows. Return the loss and the learning rate."""
        texts = [self.tokenizer(self.rows[number][0])["input_ids"] for number in numbers]
        width = max(map(len, texts))
        ids = torch.ones(len(texts), width, dtype=torch.int64)  # 1 is the padding token
        mask = torch.zeros(len(texts), width, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        labels = torch.tensor([int(self.rows[number][1]) for number in numbers])
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item(), rate

    def save(self, file: Path, prefix: str = "", **more: Any) -> Path:
        """Write checkpoint-N in the format of the original: eleven keys, some with NumPy numbers."""
        torch.save(
            {
                "model_state_dict": collections.OrderedDict(
                    (prefix + name, tensor) for name, tensor in self.model.state_dict().items()
                ),
                "optimizer_state_dict": self.optimizer.state_dict(),
                "scheduler_state_dict": self.scheduler.state_dict(),
                "scaler_state_dict": torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict(),
                "global_step": self.step,
                "num_train_optimization_steps": self.steps,
                "tr_loss": np.float64(1.5),
                "logging_loss": 0.5,
                "epoch_loss": np.float32(0.25),
                "best_eval_metric": np.float64(0.75),
                "best_step": self.step,
                **more,
            },
            file,
        )
        return file


def joined(results: list[dict[str, Any]]) -> list[list[int]]:
    """Return the rows of each step from all ranks."""
    rows_of_steps = []
    for rows_of_ranks in zip(*(result["rows"] for result in results), strict=True):
        rows_of_steps.append([row for rows in rows_of_ranks for row in rows])
    return rows_of_steps


def assert_weights(original: Original, weights: dict[str, torch.Tensor], tolerance: float) -> None:
    expected = dict(original.model.named_parameters())
    assert {name.removeprefix("hf.") for name in weights} == set(expected)
    for name, tensor in weights.items():
        if name.endswith("k_proj.bias"):
            continue  # softmax ignores this bias; Adam with eps 1e-8 turns its rounding noise into steps
        torch.testing.assert_close(
            tensor, expected[name.removeprefix("hf.")].detach(), atol=tolerance, rtol=0
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_match_a_plain_loop(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "folder"
    file = write_folder(folder, gpus=ranks, batch_size=8 // ranks)
    results = run_ranks(ranks, body, configured(file, ranks), STEPS)
    original = Original(folder, 2e-3, 3 * 9)

    assert [len(rows) for rows in joined(results)[:9]] == [8] * 8 + [3]

    for rows, loss, rate in zip(
        joined(results), results[0]["losses"], results[0]["rates"], strict=True
    ):
        expected_loss, their_rate = original.take(rows)
        # 20 steps of Adam amplify float32 rounding, which depends on the processor: 1.5e-6 with AVX2.
        assert loss == pytest.approx(expected_loss, abs=5e-6)
        assert rate == pytest.approx(their_rate, rel=1e-12)

    assert_weights(original, results[0]["weights"], 5e-6)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"train": 67}, 27), ({"train": 64}, 24), ({"train": 67, "num_epochs": 2}, 18)],
)
def test_rates_match_the_closed_form(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    """Linear from 0 over int(1 % of the steps), then linear to 0. A warmup requires at least 100 steps."""
    config = configured(write_folder(tmp_path / "folder", gpus=1, **options), 1)
    rates = [learning_rate(config.optimizer, config.lr_scheduler, 300, step) for step in range(300)]

    warmup = [2e-3 * step / 3 for step in range(3)]
    decay = [2e-3 * (300 - step) / 297 for step in range(3, 300)]
    assert rates == pytest.approx([*warmup, *decay], rel=1e-12, abs=0)
    assert run_ranks(1, body, config, 0)[0]["total"] == steps


SHARDING = {
    "optimizer": {"optimizer_sharding": True},
    "model": {"model_sharding": True, "autowrap": True},
    "model, resharded": {"model_sharding": True, "autowrap": True, "reshard_forward": True},
}


@pytest.mark.parametrize("name", SHARDING)
@pytest.mark.nightly(
    "each flag",
    by="tests/compat/migrate/test_universal_trainer.py::test_an_original_folder_trains_and_tests_unchanged",
)
def test_sharding_flags_change_no_loss(tmp_path: Path, name: str) -> None:
    plain = run_ranks(2, body, configured(write_folder(tmp_path / "plain"), 2), 4)[0]
    sharded = run_ranks(
        2, body, configured(write_folder(tmp_path / "sharded", **SHARDING[name]), 2), 4
    )[0]

    assert sharded["losses"] == pytest.approx(plain["losses"], abs=1e-6)


@pytest.mark.nightly(
    "on other numbers of devices",
    by="tests/compat/migrate/test_universal_trainer.py::test_an_original_folder_trains_and_tests_unchanged",
)
def test_a_global_batch_is_split_over_as_many_devices_as_divide_it(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "folder", is_distributed=False, batch_size=9)
    # A batch of 9 rows only divides among 1, 3 or 9 devices. Other devices stay unused.
    for devices, used in ((1, 1), (2, 1), (3, 3), (4, 3), (8, 3), (9, 9)):
        loaded, launch = migrate.open_file(file, machine=ThisMachine(devices=devices))
        assert launch == {"nproc": used}
        assert loaded.config.training.local_batch_size == 9 // used
        assert loaded.config.training.global_batch_size == 9

        texts = ("of 9 rows", "9 rows are dealt")
        notices = [notice for notice in loaded.notices if any(text in notice for text in texts)]
        assert len(notices) == (devices > 1)

    # Three ranks sum in another order, which changes float32 rounding.
    (single, *_) = run_ranks(1, body, configured(file, 1), 4)
    (shared, *_) = run_ranks(3, body, configured(file, 3), 4)
    assert shared["losses"] == pytest.approx(single["losses"], abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "prefix", "sharding"), [(1, "", {}), (2, "module.", SHARDING["optimizer"])]
)
def test_a_run_resumes_from_an_original_checkpoint(
    tmp_path: Path, ranks: int, prefix: str, sharding: dict[str, Any]
) -> None:
    """Weights, Adam's state, step, rate and loss scale are restored, and the next steps equal those of the original."""
    folder = tmp_path / "folder"
    values = {"gpus": ranks, "batch_size": 8 // ranks, **sharding}
    write_folder(folder, **values)
    original = Original(folder, 2e-3, 27)
    for step in range(10):
        original.take([*range(step * 6, step * 6 + 6)])
    saved = original.save(folder / "checkpoint-10", prefix)
    file = rewrite_parameters(
        folder, continue_training=True, continue_training_path=saved, **values
    )
    results = run_ranks(ranks, body, configured(file, ranks), 6)
    rows_of_steps = joined(results)

    assert (results[0]["first"], results[0]["total"]) == (10, 27)

    steps = zip(rows_of_steps, results[0]["losses"], results[0]["rates"], strict=True)
    for rows, loss, rate in steps:
        expected_loss, their_rate = original.take(rows)
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        assert rate == pytest.approx(their_rate, rel=1e-12)

    assert_weights(original, results[0]["weights"], 1e-6)
    assert [len(rows) for rows in rows_of_steps] == [8] * 6  # steps 11 to 16, with 9 per epoch

    half_file = rewrite_parameters(
        folder, continue_training=True, continue_training_path=saved, use_native_fp16=True
    )
    result = run_ranks(1, body, configured(half_file, 1), 0)[0]

    assert result["scale"] == {"scale": 1024.0, "finite_steps": 0}


def rewrite_parameters(folder: Path, **values: Any) -> Path:
    """Rewrite parameters.yml of an existing folder with other values."""
    places = {
        "data_dir": folder / "data",
        "pretrained_model_dir": folder / "bart",
        "model_dir": folder / "models",
    }
    return folders.write_parameters(folder, **{**places, **values})


def damaged(original: Original, file: Path, kind: str) -> str:
    """Write a checkpoint that differs from the model, and return a pattern of the message that refuses it."""
    state = original.model.state_dict()
    if kind == "missing":
        del state["classification_head.out_proj.bias"]
        original.save(file, model_state_dict=state)
        return r"1 missing: .*classification_head\.out_proj\.bias"
    if kind == "surplus":
        original.save(file, model_state_dict={**state, "extra.weight": torch.zeros(2)})
        return r"1 not in this model: extra\.weight"
    if kind == "shape":
        original.save(
            file, model_state_dict={**state, "classification_head.out_proj.bias": torch.zeros(3)}
        )
        return r"1 with another shape: classification_head\.out_proj\.bias \[3\] instead of \[2\]"
    if kind == "optimizer":
        optimizer_state = original.optimizer.state_dict()
        optimizer_state["param_groups"][0]["params"] = optimizer_state["param_groups"][0]["params"][
            :-1
        ]
        original.save(file, optimizer_state_dict=optimizer_state)
        return "the optimizer's groups have"
    if kind == "no step":
        original.save(file, global_step="ten")
        return "global_step is not a count"
    if kind == "hostile":
        torch.save({"model_state_dict": state, "hook": Hostile(str(file) + ".ran")}, file)
        return "names posix.mkdir, which is not part of a checkpoint; nothing in it was run"
    original.save(file)
    data = bytearray(file.read_bytes())
    if kind == "cut":
        file.write_bytes(data[: len(data) // 2])
        return "is damaged"
    assert kind == "flipped"
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    return "is damaged"


class Hostile:
    """Creates a folder when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "kind", ["missing", "surplus", "shape", "optimizer", "no step", "hostile", "cut", "flipped"]
)
def test_a_mismatched_file_is_named_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    write_folder(folder, gpus=1)
    original = Original(folder, 2e-3, 27)
    original.take([0, 1, 2])
    message = damaged(original, folder / "checkpoint-1", kind)
    file = rewrite_parameters(
        folder, gpus=1, continue_training=True, continue_training_path=folder / "checkpoint-1"
    )

    assert run_ranks(1, refused, configured(file, 1), message) == [True]
    assert not (folder / "checkpoint-1.ran").exists()
    assert not list((folder / "models").rglob("step-*"))


def refused(rank: int, config: Config, message: str) -> bool:
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    before = {name: tensor.detach().clone() for name, tensor in run.runner.parameters().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        resume(run, checkpoints)
    assert "\n" not in str(caught.value)
    same = all(
        torch.equal(tensor, before[name]) for name, tensor in run.runner.parameters().items()
    )
    # A flipped bit is detected when its tensor is read. Earlier tensors were read, but the run ends here.
    assert same or "damaged" in str(caught.value)
    return run.state.step == 0


WRONG = {
    "unknown key": (
        {"own": "    batch_sizes: 3\n"},
        r"yml:29: transformers-params\.batch_sizes=3 .*did you mean",
    ),
    "own key without hooks": (
        {"own": "    margin: 0.3\n"},
        r"yml:29: .*margin=0\.3 is not supported: only hooks",
    ),
    "own table": (
        {"own": "    hooks_file: '{hooks}'\n    pairs: [1, 2]\n"},
        "pairs must be a number, text",
    ),
    "no number": (
        {"batch_size": "'many'"},
        r"yml:19: transformers-params\.batch_size=.many. must be a number",
    ),
    "no truth": (
        {"is_distributed": "maybe"},
        r"yml:12: .*is_distributed=.maybe. must be true or false",
    ),
    "no mode": ({"mode": "predict"}, r"yml:7: .*mode=.predict. must be train or test"),
    "node of one": (
        {"current_node": 1},
        r"yml:33: .*current_node=1 must be less than nodes=1; .*set nodes to their number",
    ),
    "node": (
        {"nodes": 2, "current_node": 2},
        r"yml:33: .*current_node=2 must be less than nodes=2",
    ),
    "address": ({"nodes": 2, "master_addr": ""}, "master_addr is required"),
    "port": ({"master_port": "99999"}, r"yml:35: .*master_port=99999 must be a port"),
    "hooks": (
        {"own": "    hooks_file: 'missing.py'\n"},
        r"yml:29: .*hooks_file=.missing\.py. cannot be read",
    ),
    "no hooks": (
        {"own": "    hooks_file: '{empty}'\n"},
        "must define a class Task or a class Model",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_in_parameters_yml_are_named_with_their_line(tmp_path: Path, name: str) -> None:
    values, message = WRONG[name]
    (tmp_path / "hooks.py").write_text("class Task: pass\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    extra = values.get("own", "").format(hooks=tmp_path / "hooks.py", empty=tmp_path / "empty.py")
    file = folders.write_parameters(tmp_path, **{**values, "own": extra.removesuffix("\n")})

    with pytest.raises(ConfigError, match=message):
        migrate.open_file(file)


def test_a_tilde_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    places = dict.fromkeys(("data_dir", "pretrained_model_dir", "model_dir"), "~/a folder/x")
    (tmp_path / "hooks.py").write_text("class Task: pass\nMETRICS = {'f1': 'max'}\n")
    extra = "    continue_training: True\n    hooks_file: '~/hooks.py'\n    margin: 0.3\n    note: 'a b'"
    text = folders.write_parameters(tmp_path, own=extra, **places).read_text()
    text = text.replace("    continue_training: False\n", "").replace(
        'path: ""', "path: '~/checkpoint-3'"
    )
    (tmp_path / "parameters.yml").write_text(text)
    migration = migrate.migrate([tmp_path / "parameters.yml"])
    # the model folder does not exist
    c = configs.load_settings(migration.settings, follow=False).config
    base = str(tmp_path / "a folder" / "x")

    assert (c.job.dump_folder, c.model.hf_assets_path) == (base, base)
    assert (c.training.dataset_path, c.task.name) == (
        f"{base}/sentiment-train",
        str(tmp_path / "hooks.py"),
    )
    assert c.checkpoint.initial_load_path == str(tmp_path / "checkpoint-3")
    assert (c.task.options, c.checkpoint.keep_best) == (
        {"margin": 0.3, "note": "a b"},
        "validation.f1",
    )


MAIN = Path(__file__).parents[3] / "main.py"


def command(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """Run ``python main.py ...`` in a folder, in a fork of this process."""
    names = {
        **{k: v for k, v in os.environ.items() if k not in ("NGPU", "LOG_RANK")},
        **(env or {}),
    }
    limit = patience.seconds(100)
    line = [sys.executable, str(MAIN), *arguments]
    return forked.run(line, cwd=folder, env=names, capture_output=True, text=True, timeout=limit)


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoint/step-*"))


def losses_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "step" in line and "loss" in line}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("epochs", cases([2], nightly=[3]))
def test_an_original_folder_trains_and_tests_unchanged(tmp_path: Path, epochs: int) -> None:
    """Two commands in a folder of original files: checkpoints per epoch, logs per rank, best step, results."""
    folder = tmp_path / "a user's folder"
    folders.make(folder, train=104, num_epochs=epochs, max_length=16)
    result = command(folder, "--params=parameters.yml")

    assert result.returncode == 0, result.stderr[-3000:]

    models = folder / "models" / "baseline"
    # 104 rows, 2 x 8 per step
    assert steps_of(models) == [7 * epoch for epoch in range(1, epochs + 1)]

    logs = [models / "logger_logs" / f"training_{rank}.log" for rank in (0, 1)]
    assert all(log.read_text() for log in logs)
    assert list((models / "tensorboard_logs").rglob("events*"))

    # The best step is the first with the highest accuracy.
    accuracies = {}
    for line in (models / "validation.jsonl").read_text().splitlines():
        record = json.loads(line)
        accuracies[record["step"]] = record["accuracy"]
    best = max(accuracies, key=lambda step: accuracies[step])
    assert json.loads((models / "checkpoint" / "best.json").read_text())["step"] == best

    # The run is complete, so repeating the command takes no steps. It appends to the log.
    log_before = logs[0].read_text()
    second_result = command(folder, "--params=parameters.yml")
    assert second_result.returncode == 0
    assert steps_of(models)[-1] == 7 * epochs
    assert logs[0].read_text().startswith(log_before)
    assert len(logs[0].read_text()) > len(log_before)

    # The mode "test" writes predictions and their accuracy.
    folders.write_parameters(folder, mode="test", max_length=16)
    tested = command(folder, "--params", "parameters.yml")
    assert tested.returncode == 0, tested.stderr[-3000:]
    assert f"step-{best}" in tested.stderr
    for name, count in (("dev", 50), ("test", 70)):
        results = json.loads((models / f"{name}_results.json").read_text())
        predictions = (models / f"{name}_prediction.txt").read_text().splitlines()
        rows = (folder / "data" / f"sentiment-{name}").read_text().splitlines()
        labels = [row.rsplit("\t", 1)[1] for row in rows]
        correct = sum(a == b for a, b in zip(predictions, labels, strict=True))
        assert set(results) == {"Accuracy"}
        assert len(predictions) == count
        assert set(predictions) <= {"0", "1"}
        assert results["Accuracy"] == correct / count
    assert json.loads((models / "dev_results.json").read_text())["Accuracy"] == accuracies[best]

    # The best checkpoint exports to a folder that transformers opens.
    checkpoint = str(models / "checkpoint" / f"step-{best}")
    arguments = ["-m", "shardtrain", "export", checkpoint, "--to", "exported"]
    exported = forked.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert exported.returncode == 0, exported.stderr[-3000:]
    model = transformers.BartForSequenceClassification.from_pretrained(folder / "exported")
    assert model.config.num_labels == 2


@pytest.mark.timeout(300)
@pytest.mark.nightly(
    "by name",
    by="tests/compat/migrate/test_universal_trainer.py::test_an_original_folder_trains_and_tests_unchanged",
)
def test_an_original_checkpoint_is_tested_by_its_name(tmp_path: Path) -> None:
    """A set without labels only gets predictions, equal to those of the original network."""
    folder = tmp_path / "folder"
    folders.make(folder, mode="test", dropout=0.0, with_head=True)
    original = Original(folder, 5e-3, 50)
    for step in range(50):
        first_row = step * 16 % 192
        original.take([*range(first_row, first_row + 16)])
    original.save(folder / "checkpoint-50", "module.")

    # Remove the labels of a set.
    test_set = folder / "data" / "sentiment-test"
    texts = [row.rsplit("\t", 1)[0] for row in test_set.read_text().splitlines()]
    test_set.write_text("".join(f"{text}\n" for text in texts))
    result = command(folder, "--params=parameters.yml", "--checkpoint", "checkpoint-50")

    assert result.returncode == 0, result.stderr[-3000:]

    models = folder / "models" / "baseline"
    assert not (models / "test_results.json").exists()
    assert (models / "dev_results.json").exists()

    original.model.eval()
    expected = []
    for text in texts:
        ids = torch.tensor([original.tokenizer(text)["input_ids"]])
        expected.append(str(int(original.model(ids).logits.argmax())))
    predictions = (models / "test_prediction.txt").read_text().split()
    assert predictions == expected
    assert len(set(predictions)) == 2


@pytest.mark.timeout(300)
@pytest.mark.nightly("each node starts its ranks as new interpreters, which takes half a minute")
def test_two_nodes_meet_with_current_node(tmp_path: Path) -> None:
    """Start the same command on both nodes, five seconds apart. fairscale's flags change no loss."""
    folder = tmp_path / "folder"
    values = {
        "train": 104,
        "nodes": 2,
        "gpus": 1,
        "num_epochs": 1,
        "master_port": free_port(),
        "dropout": 0.0,
    }
    folders.make(folder, **values)
    text = (folder / "parameters.yml").read_text()
    (folder / "second.yml").write_text(text.replace("current_node: 0", "current_node: 1"))
    line = [sys.executable, str(MAIN)]
    quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = forked.Popen([*line, "--params=parameters.yml"], **quiet)
    time.sleep(5)
    second = forked.Popen([*line, "--params=second.yml"], **quiet)

    for process in (first, second):
        assert process.wait(patience.seconds(120)) == 0

    models = folder / "models" / "baseline"
    log_names = {log.name for log in (models / "logger_logs").iterdir()}
    assert log_names == {"training_0.log", "training_1.log"}
    assert steps_of(models) == [7]

    # fairscale's flags change no loss.
    expected = losses_of(models)
    for name, flags in SHARDING.items():
        model_dir = f"models/{name.split(',')[-1].strip()}"
        folders.write_parameters(folder, num_epochs=1, model_dir=model_dir, **flags)
        assert command(folder, "--params=parameters.yml").returncode == 0
        assert losses_of(folder / model_dir) == pytest.approx(expected, abs=1e-5)


def test_wrong_files_are_reported_in_one_line(tmp_path: Path) -> None:
    folders.write_parameters(tmp_path, mode="test")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    messages = {
        (): "--params requires the parameters file",
        ("--params=no.yml",): "cannot be read",
        ("--params=ds.json",): "is a file of DeepSpeed; run `shardtrain train ds.json`",
        ("--params=parameters.yml", "--nproc", "0"): "must be a whole number of processes above 0",
    }
    for arguments, message in messages.items():
        result = command(tmp_path, *arguments)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1
    trained = forked.run(
        [sys.executable, "-m", "shardtrain", "train", "parameters.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert trained.returncode == 2
    assert "is for testing, but this command trains" in trained.stderr


HOOKS = {
    "tokenizer": (
        "    @property\n    def tokenizer(self):\n        seen.append('tokenizer'); return super().tokenizer\n"
    ),
    "read_rows": "    def read_rows(self, split):\n        seen.append(split); return super().read_rows(split)\n",
    "collate": "    def collate(self, rows):\n        seen.append(len(rows)); return super().collate(rows)\n",
    "forward": "    def forward(self, model, batch):\n        seen.append('f'); return super().forward(model, batch)\n",
    "loss_sum": (
        "    def loss_sum(self, outputs, batch, weight):\n"
        "        seen.append(self.config.task.options['margin'])\n"
        "        return super().loss_sum(outputs, batch, weight)\n"
    ),
}


def hooked(rank: int, config: Config) -> tuple[list[Any], float]:
    run = make_run(rank, config)
    outcome = trainer.step(run)
    assert outcome is not None
    module = sys.modules["shardtrain_task_file_hooks"] if config.task.name.endswith(".py") else None
    return list(getattr(module, "seen", [])), float(outcome.loss_sum)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_overridden_one_at_a_time(tmp_path: Path, name: str) -> None:
    folders.make(tmp_path / "folder", train=16, pretrained_model_dir="")
    places = {
        "data_dir": tmp_path / "folder" / "data",
        "model_dir": tmp_path / "models",
        "pretrained_model_dir": "",
    }
    plain = configured(folders.write_parameters(tmp_path, gpus=1, **places), 1)
    hooks = tmp_path / "hooks.py"
    head = "from shardtrain.tasks.classification import Classification\nseen = []\nclass Task(Classification):\n"
    hooks.write_text(head + HOOKS[name])
    extra = f"    hooks_file: '{hooks}'\n    margin: 0.3"
    config = configured(folders.write_parameters(tmp_path, gpus=1, own=extra, **places), 1)

    assert not configs.check(configs.Loaded(config))

    # Each hook calls the original one, so the loss does not change.
    seen, loss = run_ranks(1, hooked, config)[0]
    assert seen
    assert loss == run_ranks(1, hooked, plain)[0][1]
    if name == "loss_sum":
        assert seen == [0.3], "the hook must receive the option of the parameters"


EXAMPLE = Path(__file__).parents[3] / "examples" / "universal_trainer"


@pytest.mark.nightly(
    "one more model",
    by="tests/compat/migrate/test_universal_trainer.py::test_an_original_folder_trains_and_tests_unchanged",
)
def test_the_template_trains_a_custom_model(tmp_path: Path) -> None:
    text = (EXAMPLE / "parameters.yml").read_text()
    text = text.replace(
        "'examples/universal_trainer/hooks.py'", f"'{EXAMPLE / 'hooks.py'}'"
    ).replace("2000 ", "400 ")
    (tmp_path / "parameters.yml").write_text(text.replace("batch_size: 16", "batch_size: 8"))
    result = command(tmp_path, "--params=parameters.yml")

    assert result.returncode == 0, result.stderr[-3000:]

    (tmp_path / "parameters.yml").write_text(
        (tmp_path / "parameters.yml").read_text().replace("'train'", "'test'")
    )

    assert command(tmp_path, "--params=parameters.yml").returncode == 0

    models = tmp_path / "outputs" / "universal_trainer"
    for part in ("dev", "test"):
        assert json.loads((models / f"{part}_results.json").read_text())["Accuracy"] > 0.9
        assert len((models / f"{part}_prediction.txt").read_text().splitlines()) == 400

    marks = re.findall(r"# -----> ([\w ]+):", (EXAMPLE / "hooks.py").read_text())
    assert {
        "tokenizer",
        "read_files",
        "collate",
        "model",
        "optimizer",
        "loss",
        "metrics",
        "writer",
    } <= set(marks)


def test_the_steps_of_the_shipped_file_are_counted(tmp_path: Path) -> None:
    """67,349 rows in steps of 2 x 256 are 132 steps per epoch. The original main.py hardcodes the total, 396."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sentiment-train").write_text("good\t1\n" * 67_348 + "bad\t0")
    file = folders.write_parameters(tmp_path, data_dir=tmp_path / "data", batch_size=256)
    c = configs.load_settings(migrate.migrate([file]).settings, follow=False).config

    assert (
        c.checkpoint.interval,
        c.metrics.log_freq,
        c.training.epochs,
        c.training.last_batch,
    ) == (132, 13, 3, "keep")
