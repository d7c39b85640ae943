"""NEFTune: transformers' noise in distribution, equal on every mesh, and absent from validation."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_architectures import hf_folder
from hf_meshes import hf_tiny
from ranks import run_ranks
from tiers import cases
from tiny import Result, assert_same_numbers, run_tiny, text_file, tiny_config, train_whole
from torch import Tensor, nn

from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config
from shardtrain.distributed import embedding_noise
from shardtrain.distributed.embedding_noise import BLOCK_TOKENS, EmbeddingNoise
from shardtrain.layout import Layout
from shardtrain.utils.errors import ConfigError

ALPHA = 5.0
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp with accumulation": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 2}),
    "tp": (2, {"tensor_parallel_degree": 2}, {}),
    "pp": (2, {"pipeline_parallel_degree": 2}, {}),
    "pp with stages in a V": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        {},
    ),
    "cp": (2, {"context_parallel_degree": 2}, {}),
    "cp without balance": (
        2,
        {"context_parallel_degree": 2, "context_parallel_load_balancer": "none"},
        {},
    ),
    "cp tp": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
}
DEFAULT = ["tp", "pp", "cp"]


def noisy(
    parallelism: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **training: Any
) -> Config:
    layers = 4 if "pipeline_parallel_schedule" in (parallelism or {}) else 2
    return tiny_config(
        model={"overrides": {"num_layers": layers}},
        parallelism=parallelism or {},
        data=data or {},
        training={"local_batch_size": 8, "neftune_noise_alpha": ALPHA, **training},
    )


@functools.cache
def in_one_process(layers: int, alpha: float | None = ALPHA) -> Result:
    config = noisy(neftune_noise_alpha=alpha)
    model = dataclasses.replace(
        config.model, overrides={**config.model.overrides, "num_layers": layers}
    )
    return run_tiny(1, dataclasses.replace(config, model=model))[0]


@pytest.mark.parametrize(
    "mesh", cases(DEFAULT, nightly=[name for name in MESHES if name not in DEFAULT])
)
def test_meshes_change_no_number(mesh: str) -> None:
    ranks, parallelism, training = MESHES[mesh]
    config = noisy(parallelism, **training)
    num_layers = config.model.overrides["num_layers"]
    alone = in_one_process(num_layers)
    without_noise = in_one_process(num_layers, None)

    # The noise changes the loss.
    assert abs(alone.losses[0] - without_noise.losses[0]) > 1e-5

    for result in run_tiny(ranks, config):
        # A pipeline stage has only some of the weights.
        initial = {name: alone.initial[name] for name in result.initial}
        assert_same_numbers(result, dataclasses.replace(alone, initial=initial))


PACKED = {"format": "text", "packing": "first_fit"}


def documents(folder: Path) -> str:
    """Write rows of different lengths to a JSON lines file, and return its path."""
    path = folder / "rows.jsonl"
    text = Path(text_file()).read_text()
    lines = []
    for number in range(400):
        start = 40 * number
        lines.append(json.dumps({"text": text[start : start + 5 + number % 50]}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("mesh", cases(["cp"], nightly=["tp", "pp"]))
def test_packed_documents_have_equal_numbers_on_meshes(mesh: str, tmp_path: Path) -> None:
    ranks, parallelism, training = MESHES[mesh]
    files = {"dataset": "jsonl", "dataset_path": documents(tmp_path)}
    (alone,) = run_tiny(1, noisy(data=PACKED, **files))
    for result in run_tiny(ranks, noisy(parallelism, PACKED, **files, **training)):
        initial = {name: weight for name, weight in alone.initial.items() if name in result.initial}
        assert_same_numbers(result, dataclasses.replace(alone, initial=initial))


@pytest.mark.parametrize(
    ("name", "mesh"),
    cases(
        [("gemma2", "tp")],
        nightly=[("gemma2", "pp"), ("gemma2", "cp"), ("gpt2", "pp"), ("gpt2", "cp")],
    ),
)
def test_networks_of_transformers_have_equal_numbers_on_meshes(
    name: str, mesh: str, tmp_path: Path
) -> None:
    ranks, parallelism, _ = MESHES[mesh]
    path = hf_folder(name)
    alphas = {"neftune_noise_alpha": ALPHA}
    (without_noise,) = run_tiny(1, hf_tiny(path, tmp_path), 2)
    (alone,) = run_tiny(1, hf_tiny(path, tmp_path, training=alphas), 2)

    assert abs(alone.losses[0] - without_noise.losses[0]) > 1e-5

    config = hf_tiny(path, tmp_path, training=alphas, parallelism=parallelism)
    for result in run_tiny(ranks, config, 2):
        initial = {name: alone.initial[name] for name in result.initial if name in alone.initial}
        assert_same_numbers(result, dataclasses.replace(alone, initial=initial))


# The noise itself, of an embedding of zeros


class OneRank:
    """A mesh of one rank."""

    device = torch.device("cpu")

    def size(self, *axes: str) -> int:
        return 1

    def rank(self, *axes: str) -> int:
        return 0


def rows(samples: list[int], tokens: int, **fields: Any) -> Any:
    zeros_BT = torch.zeros(len(samples), tokens, dtype=torch.int64)
    batch = {"documents_BT": None, "lengths_B": None, **fields}
    return SimpleNamespace(tokens_BT=zeros_BT, sample_ids_B=torch.tensor(samples), **batch)


def noise_of(batch: Any, step: int = 0, seed: int = 42, features: int = 64) -> Tensor:
    config = tiny_config(training={"neftune_noise_alpha": ALPHA}, debug={"seed": seed})
    embedding = nn.Embedding(4, features)
    nn.init.zeros_(embedding.weight)
    noise = EmbeddingNoise(embedding, OneRank(), config)  # type: ignore[arg-type]
    assert not embedding(batch.tokens_BT).any()
    noise.begin_step(step, [batch])
    noise.use_rows(0, len(batch.sample_ids_B))
    added = embedding(batch.tokens_BT).detach()
    noise.end_step()
    assert not embedding(batch.tokens_BT).any()
    return added


def test_noise_is_uniform_with_the_magnitude_of_transformers() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    tokens = 700
    features = 64
    ours_BTD = noise_of(rows([3, 4], tokens), features=features)
    module = SimpleNamespace(training=True, neftune_noise_alpha=ALPHA)
    theirs_BTD = neftune_post_forward_hook(module, None, torch.zeros(2, tokens, features))
    magnitude = ALPHA / math.sqrt(tokens * features)
    num_values = ours_BTD.numel()
    for noise_BTD in (ours_BTD, theirs_BTD):
        assert float(noise_BTD.abs().max()) <= magnitude * (1 + 1e-6)
        # bounds of five standard errors: of the mean, and of the variance m^2 / 3
        assert abs(float(noise_BTD.mean())) < 5 * magnitude / math.sqrt(3 * num_values)
        error = 5 * magnitude**2 * math.sqrt(4 / 45 / num_values)
        assert abs(float(noise_BTD.var()) - magnitude**2 / 3) < error
        # the largest of n uniform numbers is below m (1 - 20 / n) with probability e^-20
        assert float(noise_BTD.abs().max()) > magnitude * (1 - 20 / num_values)


def test_noise_depends_on_seed_step_sample_and_column() -> None:
    tokens = BLOCK_TOKENS + 10
    noise = noise_of(rows([3, 4], tokens))
    assert torch.equal(noise, noise_of(rows([3, 4], tokens)))
    assert torch.equal(noise.flip(0), noise_of(rows([4, 3], tokens)))
    assert torch.equal(noise[1:], noise_of(rows([4], tokens)))
    for other in (
        noise_of(rows([3, 4], tokens), step=1),
        noise_of(rows([3, 4], tokens), seed=7),
        noise_of(rows([5, 6], tokens)),
    ):
        assert not torch.isclose(other, noise).any(dim=-1).all(dim=-1).any()
    # no two tokens of a row have the same noise, also in different blocks
    assert len(torch.unique(noise[0], dim=0)) == tokens


def test_magnitude_is_that_of_the_document_as_an_unpacked_row() -> None:
    """Documents of 3 and 5 tokens, then 2 of padding, with its own document id or that of the last document."""
    unpacked = noise_of(rows([7], 10))[0]
    for documents in ([0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]):
        batch = rows([7], 10, documents_BT=torch.tensor([documents]), lengths_B=torch.tensor([8]))
        packed = noise_of(batch)[0]
        # the same random numbers, in other magnitudes
        torch.testing.assert_close(packed[:3] * math.sqrt(3), unpacked[:3] * math.sqrt(10))
        torch.testing.assert_close(packed[3:8] * math.sqrt(5), unpacked[3:8] * math.sqrt(10))
        assert packed.isfinite().all()

    padded = noise_of(rows([7], 10, lengths_B=torch.tensor([8])))[0]
    torch.testing.assert_close(padded[:8] * math.sqrt(8), unpacked[:8] * math.sqrt(10))


def test_validation_has_no_noise(tmp_path: Path) -> None:
    """Before training, runs with and without noise have the same weights, hence the same validation loss."""
    losses = []
    for name, alpha in (("plain", None), ("noise", ALPHA)):
        config = tiny_config(
            job={"dump_folder": str(tmp_path / name)},
            # a learning rate near zero keeps the weights
            optimizer={"lr": 1e-30},
            training={"steps": 1, "neftune_noise_alpha": alpha},
            validation={"enable": True, "freq": 1, "dataset": "text", "dataset_path": text_file(), "seq_len": 32,
                        "steps": 2, "local_batch_size": 2},
        )  # fmt: skip
        (ended,) = run_ranks(1, train_whole, config, None)
        assert ended.error is None
        line = (tmp_path / name / "validation.jsonl").read_text().splitlines()[-1]
        losses.append((ended.losses[0], json.loads(line)["loss"]))
    (plain_training, plain_validation), (training, validation) = losses

    assert validation == plain_validation
    assert training != plain_training


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "zero": (
        {"training": {"neftune_noise_alpha": 0.0}},
        "training.neftune_noise_alpha=0.0 must be above 0",
    ),
    "negative": ({"training": {"neftune_noise_alpha": -5.0}}, "must be above 0"),
    "no number": (
        {"training": {"neftune_noise_alpha": float("nan")}},
        "training.neftune_noise_alpha=nan must be a finite number",
    ),
    "another task": (
        {"training": {"neftune_noise_alpha": 5.0}, "task": {"name": "orpo"}},
        'is not supported with task.name = "orpo"',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_one_line(name: str) -> None:
    sections, message = WRONG[name]
    problems = [str(problem) for problem in check(Loaded(tiny_config(**sections)))]
    assert any(message in problem and "\n" not in problem for problem in problems), problems


def test_model_with_two_embeddings_is_refused() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "places": nn.Embedding(8, 4)})
    layout = Layout(first=("words", "places"), layers="layers", last=("head",))
    with pytest.raises(ConfigError, match="and LAYOUT.first names words, places; remove"):
        embedding_noise.check(model, layout)
