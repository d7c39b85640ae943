"""A run can change only positions and window of a loaded model, regardless of how it is loaded."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hub_folders import build, save
from lora_runs import adapter_config, train
from tiers import cases
from tiny import Ended

from shardtrain import cli
from shardtrain.config.schema import Config
from shardtrain.tools.convert.convert_command import export_main, import_main

pytest.importorskip("transformers")

WAYS: dict[str, dict[str, Any]] = {
    "in_hf": {"lora": {"enable": False}},
    "import": {"lora": {"enable": False}},
    "in_hf, adapters": {"lora": {"enable": True, "rank": 2}},
    "import, adapters": {"lora": {"enable": True, "rank": 2}},
    "in_hf, adapters on nf4": {"lora": {"enable": True, "rank": 2, "base_dtype": "nf4"}},
}
"""Ways of loading weights -> their options."""
ACCEPTED = {"rope_theta": 1e6, "sliding_window": 16}
REJECTED = {"norm_eps": 1e-3, "num_heads": 8}


@functools.cache
def folders(family: str) -> tuple[Path, Path]:
    """Return a Hugging Face folder and the checkpoint that ``import`` creates from it."""
    root = Path(tempfile.mkdtemp(prefix="shardtrain-tests-"))
    folder = save(build(family), root / "hf")
    assert import_main([str(folder), "--to", str(root / "imported"), "--check", "weights"]) == 0
    return folder, root / "imported"


def config_of(way: str, family: str, tmp_path: Path, overrides: dict[str, Any]) -> Config:
    folder, imported = folders(family)
    config = adapter_config(folder, tmp_path / "run", training={"steps": 1}, **WAYS[way])
    model = dataclasses.replace(config.model, overrides={**config.model.overrides, **overrides})
    in_hf = way.startswith("in_hf")
    path = str(folder if in_hf else imported)
    checkpoint = dataclasses.replace(
        config.checkpoint, initial_load_path=path, initial_load_in_hf=in_hf
    )
    return dataclasses.replace(config, model=model, checkpoint=checkpoint)


def run(config: Config) -> Ended:
    (ended,) = train(1, config)
    return ended


@pytest.mark.parametrize(
    ("way", "field"),
    cases(
        [*((way, "rope_theta") for way in WAYS), ("in_hf", "sliding_window")],
        nightly=[(way, "sliding_window") for way in WAYS],
    ),
)
def test_a_run_may_change_positions_and_window(way: str, field: str, tmp_path: Path) -> None:
    changed = run(config_of(way, "llama3", tmp_path / "changed", {field: ACCEPTED[field]}))
    assert changed.error is None, changed.error

    as_it_is = run(config_of(way, "llama3", tmp_path / "as_it_is", {}))
    assert changed.losses != as_it_is.losses

    log = (tmp_path / "changed/run/logs/rank-0.log").read_text()
    assert f"model.overrides.{field}={ACCEPTED[field]!r} is used" in log


@pytest.mark.parametrize(
    "way", cases(["in_hf", "import", "in_hf, adapters"], nightly=["import, adapters"])
)
def test_the_exported_folder_has_the_changed_value(way: str, tmp_path: Path, capsys: Any) -> None:
    assert run(config_of(way, "llama3", tmp_path, {"rope_theta": 1e6})).error is None

    trained = tmp_path / "run"
    if "adapters" in way:
        trained = tmp_path / "merged"
        assert cli.main(["merge", str(tmp_path / "run"), "--to", str(trained)]) == 0
    arguments = [str(trained), "--to", str(tmp_path / "out"), "--check", "logits"]

    assert export_main(arguments) == 0
    assert "transformers returns the same logits" in capsys.readouterr().out

    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written.get("rope_parameters") or written)["rope_theta"] == 1e6


@pytest.mark.parametrize("way", cases(["in_hf, adapters"], nightly=["import, adapters"]))
@pytest.mark.parametrize("overrides", [{"rope_theta": 1e6}, {}])
def test_a_peft_folder_cannot_hold_the_changed_value_and_export_prints_it(
    way: str, overrides: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(config_of(way, "llama3", tmp_path, overrides)).error is None

    capsys.readouterr()
    assert export_main([str(tmp_path / "run"), "--adapter", "--to", str(tmp_path / "peft")]) == 0

    # The output names the checkpoint and the folder in a line each, and a changed value in another
    # line.
    printed = capsys.readouterr().out
    line = "set them in config.json of the base model: rope_theta=1000000.0\n"
    assert printed.count(line) == len(overrides), printed
    assert printed.count("\n") == 2 + len(overrides)


@pytest.mark.parametrize(
    ("way", "field"),
    cases(
        [(way, "norm_eps") for way in WAYS] + [("in_hf", "num_heads")],
        nightly=[(way, "num_heads") for way in WAYS],
    ),
)
def test_another_field_is_rejected_in_one_line_whose_fix_works(
    way: str, field: str, tmp_path: Path
) -> None:
    config = config_of(way, "llama3", tmp_path / "wrong", {field: REJECTED[field]})
    message = str(run(config).error)
    assert f"{field}={REJECTED[field]!r} instead of " in message
    assert "\n" not in message
    assert "\\n" not in message
    assert 'set model.flavor = "from_folder"; model.overrides may only change rope_*' in message
    # Without overrides, from_folder takes all sizes from the folder, and the run starts.
    assert run(config_of(way, "llama3", tmp_path / "right", {})).error is None


def test_a_field_of_a_flavor_must_match_the_weights(tmp_path: Path) -> None:
    folder = shutil.copytree(folders("llama3")[0], tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    positions = fields.get("rope_parameters") or fields
    theta = positions["rope_theta"]
    positions["rope_theta"] = 2 * theta
    (folder / "config.json").write_text(json.dumps(fields))
    config = config_of("in_hf", "llama3", tmp_path, {})

    # A field whose value belongs to the flavor is not stored as an override ...
    assert "rope_theta" not in config.model.overrides

    # ... but a load compares it with the folder of the weights.
    checkpoint = dataclasses.replace(config.checkpoint, initial_load_path=str(folder))
    config = dataclasses.replace(config, checkpoint=checkpoint)
    message = str(run(config).error)
    assert f"rope_theta={float(theta)!r} instead of {2 * float(theta)!r}" in message
