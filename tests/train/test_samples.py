"""Samples during training: equal text on every mesh and in ``generate``, and no effect on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import assert_bitwise, make_run, tiny_config, train_whole

from shardtrain import cli
from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.data import open_tokenizer
from shardtrain.layout import Layout
from shardtrain.models import llama
from shardtrain.tools.generate import generate_command
from shardtrain.tools.generate.engine import Generator
from shardtrain.train import samples
from shardtrain.train.samples import Samples

PROMPT = "mesh shard "


def config(parallelism: dict[str, Any] | None = None, freq: int = 2, **sections: Any) -> Config:
    metrics = {"sample_prompt": PROMPT, "sample_freq": freq}
    return tiny_config(parallelism=parallelism or {}, metrics=metrics, **sections)


def drawn(rank: int, run_config: Config) -> str:
    run = make_run(rank, run_config)
    samples = Samples(run_config, run.runner, run.mesh, None, 0)
    assert samples.every_steps == 2
    return samples.run(2)


MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {"data_parallel_shard_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "copies": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
}


@pytest.mark.parametrize("mesh", cases(["tp", "fsdp"], nightly=["copies"]))
def test_meshes_change_no_sample(mesh: str) -> None:
    (sample,) = run_ranks(1, drawn, config())
    assert sample
    assert run_ranks(2, drawn, config(MESHES[mesh])) == [sample, sample]


def sampled_and_generated(rank: int, run_config: Config) -> tuple[str, str]:
    run = make_run(rank, run_config)
    tokenizer = open_tokenizer("bytes")
    layout: Layout = llama.LAYOUT
    generator = Generator(run.runner.parts[0], layout, tokenizer.vocab_size)
    prompt = [*tokenizer.prefix_ids, *tokenizer.encode(PROMPT).tolist()]
    num_new = 64 - len(prompt)
    assert tokenizer.eos_id is not None
    stop_ids = frozenset([tokenizer.eos_id])
    (ids,) = generator.generate([prompt], num_new, samples.SAMPLING, seed=1, stop_ids=stop_ids)
    return drawn(rank, run_config), tokenizer.decode(ids)


def test_sample_equals_generate_with_the_same_weights() -> None:
    ((sample, generated),) = run_ranks(1, sampled_and_generated, config())
    assert sample == generated


def test_samples_do_not_affect_training_and_continue_after_a_resume(tmp_path: Path) -> None:
    def ended(name: str, freq: int, steps: int) -> Any:
        folder = {"dump_folder": str(tmp_path / name)}
        saves = {"enable": True, "interval": 100}
        run_config = config(freq=freq, job=folder, training={"steps": steps}, checkpoint=saves)
        return run_ranks(1, train_whole, run_config)[0]

    with_samples = ended("with", 1, 3)
    without = ended("without", 0, 3)

    assert with_samples.losses == without.losses
    assert_bitwise(with_samples.weights, without.weights)
    assert not (tmp_path / "without/samples.jsonl").exists()

    ended("with", 2, 4)  # continues after step 3
    lines = [
        json.loads(line) for line in (tmp_path / "with/samples.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["prompt"] == PROMPT and isinstance(line["text"], str) for line in lines)
    assert "sample after step 4: " in (tmp_path / "with/logs/rank-0.log").read_text()


def test_unsupported_sampling_is_logged_and_blocks_no_rank() -> None:
    loaded = Loaded(
        config({"pipeline_parallel_degree": 2}), origins={"metrics.sample_freq": "run.toml:3"}
    )
    assert any("metrics.sample_freq: without effect" in note for note in configs.notes(loaded))
    assert run_ranks(2, is_idle, loaded.config) == [True, True]


def is_idle(rank: int, run_config: Config) -> bool:
    run = make_run(rank, run_config)
    return not Samples(run_config, run.runner, run.mesh, None, 0).every_steps


def test_frequency_without_a_prompt_is_rejected() -> None:
    run_config = tiny_config(metrics={"sample_freq": 5})
    (problem,) = configs.check(Loaded(run_config, origins={"metrics.sample_freq": "run.toml:3"}))
    assert "metrics.sample_freq=5 requires metrics.sample_prompt" in str(problem)


def test_evaluation_mode_is_restored() -> None:
    assert run_ranks(1, modes, config()) == [True]


def modes(rank: int, run_config: Config) -> bool:
    run = make_run(rank, run_config)
    samples = Samples(run_config, run.runner, run.mesh, None, 0)
    before = torch.random.get_rng_state()
    samples.run(2)
    return all(part.training for part in run.runner.parts) and torch.equal(
        before, torch.random.get_rng_state()
    )


@pytest.mark.parametrize(("freq", "shown"), [(None, True), (0, False), (100, True)])
def test_frequency_of_0_disables_the_sample_after_the_last_step_too(
    freq: int | None, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[str]] = []
    monkeypatch.setattr(generate_command, "main", prompts.append)
    arguments = [] if freq is None else [f"--metrics.sample_freq={freq}"]
    cli._show_sample(
        configs.load(None, ["--metrics.sample_prompt=def", "--checkpoint.enable", *arguments])
    )

    assert bool(prompts) == shown
