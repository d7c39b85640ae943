from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain.config import (
    ConfigError,
    check,
    load,
    model_file,
    model_names,
    read_model_file,
    shape,
)

BASE = '''
"""A model."""
from dataclasses import dataclass
raise SystemExit("this file is read and never run")

@dataclass(frozen=True)
class Config:
    vocab_size: int = 10_000
    dim: int = 4 * 16
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    table: dict[str, int] = make_table()
    required: str

    def half(self) -> int:
        return self.dim // 2
'''


def write(tmp_path: Path, text: str, name: str = "my_model.py") -> str:
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_facts_are_read_from_the_text_and_the_file_is_never_run(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        BASE + 'FLAVORS = {"tiny": {"dim": 8}, "call": dict(num_layers=3), "own": Config(dim=9)}\n',
    )
    facts = read_model_file(name)

    assert facts.path == Path(name)
    assert facts.fields["vocab_size"] == ("int", 10000)
    assert facts.fields["dim"] == ("int", 64)
    assert facts.fields["num_kv_heads"] == ("int | None", None)
    assert facts.fields["table"] == ("dict[str, int]", None)
    assert facts.fields["required"] == ("str", None)
    assert facts.flavors == {"tiny": {"dim": 8}, "call": {"num_layers": 3}, "own": {"dim": 9}}


def test_overrides_beat_the_flavor_and_the_flavor_beats_the_defaults(tmp_path: Path) -> None:
    facts = read_model_file(
        write(tmp_path, BASE + 'FLAVORS: dict = {"tiny": {"dim": 8, "num_layers": 3}}\n')
    )
    sizes = shape(facts, "tiny", {"num_layers": 4})

    assert (sizes["dim"], sizes["num_layers"], sizes["num_heads"]) == (8, 4, 6)
    with pytest.raises(KeyError):
        shape(facts, "huge", {})


def test_config_may_come_from_another_model_file_or_extend_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "MODELS_FOLDER", tmp_path)
    write(tmp_path, BASE, "base.py")
    write(
        tmp_path, 'from shardtrain.models.base import Config\nFLAVORS = {"a": {}}\n', "imported.py"
    )
    text = "from shardtrain.models.base import Config as Base\nclass Config(Base):\n    extra: int = 1\nFLAVORS = {}\n"
    write(tmp_path, text, "extended.py")

    assert read_model_file("imported").fields["dim"] == ("int", 64)

    extended = read_model_file("extended").fields
    assert extended["dim"] == ("int", 64)
    assert extended["extra"] == ("int", 1)
    assert model_names() == ["extended", "imported"]


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("FLAVORS = {}\n", "must define a class Config"),
        (BASE, "must define FLAVORS"),
        (BASE + "FLAVORS = make()\n", "not a literal dict"),
        (BASE + "FLAVORS = {'a': make}\n", "not a literal dict"),
        ("def (:\n", "cannot be read as Python"),
    ],
)
def test_an_incomplete_model_file_is_a_config_error(
    tmp_path: Path, text: str, fragment: str
) -> None:
    name = write(tmp_path, text)
    with pytest.raises(ConfigError, match=fragment):
        read_model_file(name)

    problems = check(load(None, ["--model.name", name]))
    assert len(problems) == 1
    assert fragment in str(problems[0])


def test_a_user_defined_model_is_checked_like_those_of_the_package(tmp_path: Path) -> None:
    name = write(tmp_path, BASE + 'FLAVORS = {"tiny": {"dim": 8}}\n')
    arguments = [
        "--model.name",
        name,
        "--model.flavor",
        "tiny",
        "--parallelism.tensor_parallel_degree",
    ]

    assert check(load(None, [*arguments, "2"])) == []

    problems = check(load(None, [*arguments, "4"]))
    assert len(problems) == 1
    # 6 heads, 6 KV heads by default, vocabulary of 10000: the common divisors are 1 and 2.
    assert "does not divide the 6 attention heads nor the 6 KV heads" in str(problems[0])
    assert str(problems[0]).endswith("use 1 or 2")


def test_every_model_of_the_package_can_be_read_and_its_flavors_name_fields() -> None:
    assert {"llama2", "llama3"} <= set(model_names())

    for name in model_names():
        facts = read_model_file(name)
        for flavor, fields in facts.flavors.items():
            assert fields.keys() <= facts.fields.keys(), flavor
            assert None not in fields.values(), flavor
