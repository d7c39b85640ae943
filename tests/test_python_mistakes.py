"""A mistake in a call of the Python API raises a one-line error that names the parameter, the rule and the fix."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_folders import build, save
from once import made_once
from tiny_tokenizers import bpe_folder

import shardtrain
from shardtrain import api, cli
from shardtrain.tools.generate import cache
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError

TINY = {
    "model.flavor": "debugmodel", "model.overrides.num_layers": 1, "model.hf_assets_path": "bytes",
    "training.steps": 2, "training.seq_len": 32, "training.local_batch_size": 1, "training.device": "cpu",
    "lr_scheduler.warmup_steps": 1, "metrics.sample_prompt": "", "metrics.sample_freq": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a finished run of two steps."""
    return str(
        made_once(
            tmp_path_factory, "python-mistakes", lambda: _train(tmp_path_factory.mktemp("run"))
        )
    )


def _train(folder: Path) -> str:
    shardtrain.Trainer("debug", {**TINY, "job.dump_folder": str(folder / "run")}).train()
    return str(folder / "run")


@pytest.fixture(scope="module")
def model(run: str) -> Any:
    return shardtrain.load_model(run)


# each mistake: the call as a function of (run folder, model, temporary folder), and a part of the message
Call = Callable[[str, Any, Path], Any]
MISTAKES: dict[str, tuple[Call, str]] = {
    "a dict as the path": (
        lambda r, m, t: api.load_config({"a": 1}),
        "path={'a': 1} must be a str, a Path or None",
    ),
    "a number as the path": (lambda r, m, t: api.load_config(3), "path=3 must be a str"),
    "a list of options": (lambda r, m, t: api.load_config("debug", ["training.steps"]), "options="),
    "an unknown option": (
        lambda r, m, t: api.load_config("debug", {"training.stepz": 1}),
        "did you mean training.steps?",
    ),
    "text for a number": (
        lambda r, m, t: api.load_config("debug", {"training.steps": "ten"}),
        "training.steps=",
    ),
    "an unknown section": (
        lambda r, m, t: api.load_config("debug", {"trainning.steps": 1}),
        "trainning",
    ),
    "a missing file": (lambda r, m, t: api.load_config("missing.toml"), "missing.toml"),
    "a misspelt option with dashes": (
        lambda r, m, t: api.load_config("debug", {"--training.stepz": 5}),
        'training.stepz="5" is not an option; did you mean training.steps?',
    ),
    "a misspelt preset": (lambda r, m, t: api.load_config("debgu"), "did you mean debug?"),
    "zero steps": (
        lambda r, m, t: api.Trainer("debug", {"training.steps": 0}),
        "training.steps=0 must be at least 1",
    ),
    "a trainer of a number": (lambda r, m, t: api.Trainer(3), "config=3 must be"),
    "options twice": (
        lambda r, m, t: api.Trainer(shardtrain.load_config(), {"training.steps": 1}),
        "options=",
    ),
    "a trainer of a list": (lambda r, m, t: api.Trainer(["debug"]), "config=['debug'] must be"),
    "a mesh for one process": (
        lambda r, m, t: api.Trainer(
            "debug", {**TINY, "parallelism.tensor_parallel_degree": 2, "job.dump_folder": str(t)}
        ),
        "parallelism",
    ),
    "no such model folder": (lambda r, m, t: api.load_model(t / "none"), "does not exist"),
    "an empty model folder": (lambda r, m, t: api.load_model(t), "path="),
    "a model of a number": (lambda r, m, t: api.load_model(3), "path=3 must be a str or a Path"),
    "an unknown dtype": (
        lambda r, m, t: api.load_model(r, dtype="fp16"),
        'dtype="fp16" must be one of bfloat16, float16, float32',
    ),
    "a torch dtype": (lambda r, m, t: api.load_model(r, dtype=float), "dtype="),
    "a tokenizer for a run": (
        lambda r, m, t: api.load_model(r, tokenizer="bytes"),
        'tokenizer="bytes" is only for Hugging Face folders',
    ),
    "a missing configuration": (lambda r, m, t: api.load_model(r, config="no.toml"), "no.toml"),
    "a configuration of a number": (
        lambda r, m, t: api.load_model(r, config=3),
        "config=3 must be",
    ),
    "a prompt of a number": (
        lambda r, m, t: api.generate(m, 3),
        "prompts=3 must be a str or a list of str",
    ),
    "prompts of numbers": (lambda r, m, t: api.generate(m, [1, 2]), "prompts=[1, 2] must be"),
    "no prompt": (lambda r, m, t: api.generate(m, None), "prompts"),
    "the model's path": (lambda r, m, t: api.generate(r, "def"), "model="),
    "a negative temperature": (
        lambda r, m, t: api.generate(m, "def", temperature=-1),
        "temperature=-1 must be 0 or above",
    ),
    "text for a temperature": (
        lambda r, m, t: api.generate(m, "def", temperature="hot"),
        'temperature="hot" must be a float',
    ),
    "no new tokens": (
        lambda r, m, t: api.generate(m, "def", max_new_tokens=0),
        "max_new_tokens=0 must be at least 1",
    ),
    "half a token": (
        lambda r, m, t: api.generate(m, "def", max_new_tokens=1.5),
        "max_new_tokens=1.5 must be an int",
    ),
    "a boolean count": (
        lambda r, m, t: api.generate(m, "def", max_new_tokens=True),
        "max_new_tokens=true must be an int",
    ),
    "top_p of zero": (
        lambda r, m, t: api.generate(m, "def", top_p=0.0),
        "top_p=0.0 must be above 0",
    ),
    "top_p above one": (lambda r, m, t: api.generate(m, "def", top_p=2.0), "top_p=2.0 must be"),
    "a negative top_k": (
        lambda r, m, t: api.generate(m, "def", top_k=-1),
        "top_k=-1 must be 0 or above",
    ),
    "top_k without temperature": (lambda r, m, t: api.generate(m, "def", top_k=5), "temperature"),
    "no repetition penalty": (
        lambda r, m, t: api.generate(m, "def", repetition_penalty=0.0),
        "repetition_penalty=0.0 must be above 0",
    ),
    "a negative seed": (
        lambda r, m, t: api.generate(m, "def", seed=-1),
        "seed=-1 must be 0 or above",
    ),
    "an empty stop": (lambda r, m, t: api.generate(m, "def", stop=[""]), "stop"),
    "a stop of a number": (lambda r, m, t: api.generate(m, "def", stop=3), "stop=3 must be"),
    "no batch": (
        lambda r, m, t: api.generate(m, "def", batch_size=0),
        "batch_size=0 must be at least 1",
    ),
    "text for chat": (
        lambda r, m, t: api.generate(m, "def", chat="yes"),
        'chat="yes" must be a bool',
    ),
    "chat without a template": (lambda r, m, t: api.generate(m, "def", chat=True), "template"),
    "texts as a dataset": (
        lambda r, m, t: api.evaluate(m, ["text"]),
        "dataset=['text'] must be a str, a Path or a dict",
    ),
    "a missing dataset": (lambda r, m, t: api.evaluate(m, t / "none.txt"), "does not exist"),
    "an ending that nothing reads": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.xyz", "a")),
        "ending",
    ),
    "an empty dataset": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.txt", ""), seq_len=16),
        "x.txt",
    ),
    "an unknown option of a dataset": (
        lambda r, m, t: api.evaluate(m, {"datasett": "text"}),
        "did you mean validation.dataset?",
    ),
    "a dataset for a path": (lambda r, m, t: api.evaluate(r, t / "none.txt"), "model="),
    "a sequence of nothing": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.txt", "abc"), seq_len="16"),
        'seq_len="16" must be an int',
    ),
    "a missing column": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.jsonl", '{"a": "b"}\n'), seq_len=16),
        "text",
    ),
    "a report of nothing": (lambda r, m, t: api.report(t / "none"), "none"),
    "a report of a number": (lambda r, m, t: api.report(3), "runs=3 must be"),
    "a report of an empty folder": (lambda r, m, t: api.report(t, t / "a.html"), "metrics.jsonl"),
    "a report in no folder": (
        lambda r, m, t: api.report(r, t / "missing/x.html"),
        "is in a folder that does not exist",
    ),
    "a report of a stepped run": (
        lambda r, m, t: api.report(_stepped(t), t / "x.html"),
        "only train() writes metrics",
    ),
    "a report on a folder": (lambda r, m, t: api.report(r, t), "output="),
    "text for the number of GPUs": (
        lambda r, m, t: api.plan("debug", gpus="64"),
        'gpus="64" must be an int or None',
    ),
    "no GPU": (lambda r, m, t: api.plan("debug", gpus=0), "gpus=0 must be"),
    "an unknown device": (lambda r, m, t: api.plan("debug", device="h101"), "h101"),
    "a device of a number": (
        lambda r, m, t: api.plan("debug", device=100),
        "device=100 must be a str",
    ),
    "a plan of a mesh that does not fit": (
        lambda r, m, t: api.plan("debug", {"parallelism.tensor_parallel_degree": 3}, gpus=4),
        "parallelism",
    ),
    "meshes of numbers": (lambda r, m, t: api.verify("debug", meshes=[2]), "meshes=[2] must be"),
    "text for the number of steps": (
        lambda r, m, t: api.verify("debug", steps="3"),
        'steps="3" must be an int',
    ),
    "a number for the path of a dataset": (
        lambda r, m, t: api.evaluate(m, {"dataset": "jsonl", "dataset_path": 5}),
        'validation.dataset_path="5" does not exist',
    ),
    "text for the batch size of a dataset": (
        lambda r, m, t: api.evaluate(
            m, {"dataset": "text", "dataset_path": str(t), "local_batch_size": "x"}
        ),
        'validation.local_batch_size="x" must be an integer',
    ),
    "text for the sequence length of a dataset": (
        lambda r, m, t: api.evaluate(
            m, {"dataset": "text", "dataset_path": str(t), "seq_len": "x"}
        ),
        'validation.seq_len="x" must be an integer',
    ),
    "a number as the name of an option of a dataset": (
        lambda r, m, t: api.evaluate(m, {3: 4}),
        "validation.3",
    ),
    "a sequence longer than memory": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.txt", "abc"), seq_len=10**9),
        "seq_len=1000000000 with 8 rows per batch exceeds 67,108,864 tokens",
    ),
    "a batch of no rows": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.txt", "abc"), batch_size=0),
        "batch_size=0 must be at least 1",
    ),
    "a batch of no rows in the options of a dataset": (
        lambda r, m, t: api.evaluate(
            m, {"dataset": "text", "dataset_path": _file(t / "x.txt", "abc"), "local_batch_size": 0}
        ),
        "validation.local_batch_size=0 must be at least 1",
    ),
    "a sequence of no tokens": (
        lambda r, m, t: api.evaluate(m, _file(t / "x.txt", "abc"), seq_len=0),
        "seq_len=0 must be at least 1",
    ),
    "half of a character": (
        lambda r, m, t: api.generate(m, ["def", "\ud800"]),
        "prompts[1]: column 'prompt' has a lone surrogate",
    ),
    "a missing tokenizer": (
        lambda r, m, t: api.load_model(_hub(t), tokenizer="nope"),
        'tokenizer="nope" does not',
    ),
    "a folder as the configuration": (lambda r, m, t: api.load_config(t), 'path="'),
    "a folder to train": (lambda r, m, t: api.Trainer(t), 'config="'),
    "a missing file to plan": (
        lambda r, m, t: api.plan("none.toml"),
        'config="none.toml" does not exist',
    ),
    "a missing file to verify": (
        lambda r, m, t: api.verify("none.toml"),
        'path="none.toml" does not exist',
    ),
    "a report of no run": (lambda r, m, t: api.report([]), "runs=[] must have at least one folder"),
    "a verified number": (lambda r, m, t: api.verify(3), "path=3 must be"),
}


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _hub(folder: Path) -> Path:
    pytest.importorskip("transformers")
    return save(build("llama3"), folder / "hf")


def _stepped(folder: Path) -> Path:
    """Return the folder of a trainer that only took one ``step``, so it has no final checkpoint."""
    with shardtrain.Trainer(
        "debug", {**TINY, "job.dump_folder": str(folder / "stepped")}
    ) as trainer:
        trainer.step()
    return folder / "stepped"


@pytest.mark.parametrize(("call", "answer"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_reported_in_one_line_that_names_the_parameter(
    call: Call, answer: str, run: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ShardtrainError) as caught:
        call(run, model, tmp_path)
    message = str(caught.value)
    assert answer in message

    lines = len(getattr(caught.value, "problems", [message]))
    assert not any(f"{message}".startswith(option) for option in ("job.", "model.hf_assets_path"))
    assert message.count("\n") < lines
    assert "command line" not in message
    assert not re.search(r"(?<![\w-])--[a-z]", message), f"{message!r} names a flag"


def test_value_that_looks_like_a_flag_is_shown_unchanged(tmp_path: Path) -> None:
    broken = tmp_path / "a --config b" / "step-1"
    (broken / "--json").mkdir(parents=True)
    (broken / "manifest.json").write_text("{")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: api.verify("--help"), 'path="--help" does not exist'),
        (lambda: api.plan("--help"), 'config="--help" does not exist'),
        (lambda: api.plan("debug", device="--json"), 'device="--json" is not a known device'),
        (lambda: api.report("--output"), 'runs="--output" has no metrics.jsonl'),
        (
            lambda: api.load_model(tmp_path / "x --config y"),
            f'path="{tmp_path}/x --config y" does not exist',
        ),
        (lambda: api.load_model(broken), f"{broken}: "),
    ]

    for call, answer in calls:
        with pytest.raises(ShardtrainError) as caught:
            call()
        assert answer in str(caught.value)


def test_there_are_seventy_mistakes() -> None:
    assert len(MISTAKES) >= 70


def test_a_plain_str_is_one_item(model: Any) -> None:
    """A str is not a sequence of letters: ``stop="self"`` must not stop at the first s, e, l or f."""
    expected = shardtrain.generate(model, ["def main"], max_new_tokens=6, stop=["self"])
    assert shardtrain.generate(model, "def main", max_new_tokens=6, stop="self") == expected
    assert shardtrain.generate(model, []) == []
    with pytest.raises(ShardtrainError, match="mesh tp=3: parallelism"):
        shardtrain.verify("debug", {"model.flavor": "debugmodel"}, meshes="tp=3", steps=1)


def test_run_with_a_custom_model_file_opens_if_its_configuration_is_named(tmp_path: Path) -> None:
    """A folder from another source may name a code file, so loading a folder must not execute it by default."""
    source = Path(shardtrain.__file__).parent / "models/llama3.py"
    (tmp_path / "my_model.py").write_text(source.read_text())
    folder = tmp_path / "run"
    with shardtrain.Trainer(
        "debug",
        {**TINY, "model.name": str(tmp_path / "my_model.py"), "job.dump_folder": str(folder)},
    ) as trainer:
        assert next(trainer.model.parameters()).requires_grad
        trainer.train()

    with pytest.raises(
        ShardtrainError, match=r'if you trust it, add config="[^"]*config.resolved.toml"'
    ):
        shardtrain.load_model(folder)

    model = shardtrain.load_model(folder, config=folder / "config.resolved.toml")
    assert len(shardtrain.generate(model, "def", max_new_tokens=2)) == 1


def _folder_without_tokenizer(kind: str, folder: Path) -> Path:
    """Create a model of the given kind with weights but without a usable tokenizer."""
    if kind == "a run":
        shutil.copytree(bpe_folder(folder / "original"), folder / "tokenizer")
        options = {
            **TINY,
            "model.hf_assets_path": str(folder / "tokenizer"),
            "job.dump_folder": str(folder / "run"),
        }
        shardtrain.Trainer("debug", options).train()
        shutil.rmtree(folder / "tokenizer")
        return folder / "run"
    hub = save(build("llama3"), folder / "hf")
    if kind == "a Hugging Face folder":
        return hub
    assert cli.main(["import", str(hub), "--to", str(folder / "imported")]) == 0
    return folder / "imported"


@pytest.mark.parametrize("kind", ["a run", "a Hugging Face folder", "an imported checkpoint"])
def test_weights_open_without_a_tokenizer_which_only_text_requires(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = _folder_without_tokenizer(kind, tmp_path)
    model = shardtrain.load_model(folder)

    assert all(parameter.isfinite().all() for parameter in model.model.parameters())

    message = 'has no tokenizer .*; add tokenizer with a path or "bytes"'
    if kind == "a run":
        message = "hf_assets_path"
    (tmp_path / "held_out.txt").write_text("mesh shard gather\n" * 20)
    calls = {
        "generate": lambda: shardtrain.generate(model, "mesh"),
        "evaluate": lambda: shardtrain.evaluate(model, tmp_path / "held_out.txt", seq_len=16),
        "tokenizer": lambda: model.tokenizer,
    }

    # Errors of the Python API name parameters, not flags.
    for name, call in calls.items():
        with pytest.raises(ShardtrainError, match=message) as error:
            call()
        assert "--" not in str(error.value), name

    if kind != "a run":
        with_text = shardtrain.load_model(folder, tokenizer="bytes")
        assert len(shardtrain.generate(with_text, "mesh", max_new_tokens=2)) == 1


def test_custom_attention_core_needs_no_cache_and_the_message_starts_with_it(
    model: Any, run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: str, core: Any) -> None:
        rule = "doubles its scores, so its keys and values cannot be cached"
        raise ConfigError(Problem("LAYOUT.context", path, rule, "add --no_cache, or correct it"))

    monkeypatch.setattr(cache, "_check_core", broken)

    with pytest.raises(
        ShardtrainError, match=r'^LAYOUT\.context="layers\.0\.attn\.core": add no_cache, or correct'
    ):
        shardtrain.generate(model, "def")
    assert len(shardtrain.generate(model, "def", max_new_tokens=2, no_cache=True)) == 1
    assert cli.main(["generate", run, "--prompt", "def"]) == 2
    assert (
        'LAYOUT.context="layers.0.attn.core": add --no_cache, or correct it; reason: '
        in capsys.readouterr().err
    )
