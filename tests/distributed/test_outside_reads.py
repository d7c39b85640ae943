"""Weights read through a Python reference in a module that does not own them are unsharded there, or rejected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny import Result, make_run, tiny_config, train_steps

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.distributed import outside_reads
from shardtrain.utils.errors import ConfigError

SOUND = (Path(__file__).parents[1] / "tools/verify" / "sound_model.py").read_text()
HEAD = "        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)\n"
READING = """class Head(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.tied = [embed]  # not registered, so its weight has one name

    def forward(self, x):
        return F.linear(x, self.tied[0].weight)


class Model("""
STEPS = 2
FILES = {
    "in the head": SOUND.replace(HEAD, "        self.head = Head(self.embed)\n").replace(
        "class Model(", READING
    ),
    "in the model's forward": SOUND.replace(HEAD, "        self.head = nn.Identity()\n").replace(
        "return self.head(self.norm(x))",
        "return F.linear(self.head(self.norm(x)), self.embed.weight)",
    ),
    "as a parameter of both": SOUND.replace(
        HEAD, HEAD + "        self.head.weight = self.embed.weight\n"
    ),
}


def config(path: Path, text: str, **parallelism: int) -> Config:
    path.write_text(text.replace("dropout: float = 0.1", "dropout: float = 0.0"))
    config_of_file = tiny_config(
        parallelism={**parallelism, "fsdp_reshard_after_forward": "always"},
        training={"seq_len": 32},
    )
    model = dataclasses.replace(
        config_of_file.model, name=str(path), flavor="small", overrides={"vocab_size": 512}
    )
    return dataclasses.replace(config_of_file, model=model)


@pytest.mark.parametrize("where", FILES)
def test_weight_read_by_another_module_is_found(where: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILES[where])
    module = models.find(str(path))
    reads = outside_reads.read_elsewhere(models.build(module, module.Config()), module.LAYOUT)
    readers = {"in the head": "head", "in the model's forward": "the model's own forward"}

    assert reads == ({"embed.weight": readers[where]} if where in readers else {})


@pytest.mark.parametrize("where", FILES)
def test_fsdp_with_a_weight_read_by_another_module_changes_no_number(
    where: str, tmp_path: Path
) -> None:
    """Float32 sums in a different order change losses by up to 1e-5."""
    fsdp_config = config(tmp_path / "model.py", FILES[where])
    (alone,) = run_ranks(1, train_steps, fsdp_config, STEPS)
    together: list[Result] = run_ranks(2, train_steps, fsdp_config, STEPS)

    for rank in together:
        assert rank.losses == pytest.approx(alone.losses, abs=1e-5)
        assert rank.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)


def rejection(rank: int, bad_config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        make_run(rank, bad_config)
    return str(raised.value)


def test_tensor_parallelism_rejects_a_weight_read_by_another_module(tmp_path: Path) -> None:
    tp_config = config(tmp_path / "model.py", FILES["in the head"], tensor_parallel_degree=2)
    for message in run_ranks(2, rejection, tp_config):
        assert message.startswith(
            "parallelism.tensor_parallel_degree=2 does not support that head reads embed.weight"
        )
        assert "self.head.weight = self.embed.weight" in message
        assert "\n" not in message
