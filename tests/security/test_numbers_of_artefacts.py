"""Invalid numbers in each file format exit with code 2, 3 or 5 and one line, and NaN is never accepted.

The tests replace each number of a valid file by each of ``VALUES``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foreign_configs
import numpy as np
import pytest
import transformers
from tiers import cases

from shardtrain import config
from shardtrain.checkpoint import best
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.compat import migrate
from shardtrain.config.options import options
from shardtrain.data.prepared import shard_index
from shardtrain.data.prepared.shard_writer import ShardWriter
from shardtrain.data.tokenizers import tokenizer_config
from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer
from shardtrain.hf import generation_config, hub_model, listing, source, weights
from shardtrain.lora import peft
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile
from shardtrain.metrics.sinks.tensorboard import TensorBoardSink
from shardtrain.metrics.step_record import tags_of
from shardtrain.resilience.guards.loss_spikes import Guard
from shardtrain.tools.runs import run_files
from shardtrain.utils import checked_json
from shardtrain.utils.errors import CheckpointError, ConfigError, ShardtrainError

NOT_FINITE = {"NaN", "Infinity", "-Infinity", "1e999"}
VALUES = [
    *sorted(NOT_FINITE),
    *("-0.0", "-1", "0.5", "1e30", str(10**30), str(2**63), "true", '"123"', "9" * 5000),
    "9" * 400,  # a valid int in Python, but too large for a float
]
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2, "rope_scaling": LLAMA3}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2}),
    "llama4_text": ("Llama4ForCausalLM", {"num_local_experts": 2, "num_key_value_heads": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2},
    ),
}


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each number, except booleans."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield above
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*above, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*above, index))


def variants(valid: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the name of a number, its new value, and the text with this value."""
    for place in places(valid):
        changed = copy.deepcopy(valid)
        table = changed
        for key in place[:-1]:
            table = table[key]
        table[place[-1]] = "@number@"
        text = json.dumps(changed)
        for value in VALUES:
            yield ".".join(map(str, place)), value, text.replace('"@number@"', value)


def wrong(valid: Any, read: Callable[[str], object], takes_infinity: bool = False) -> list[str]:
    """Return the violations of a reader, which must accept the valid text."""
    read(json.dumps(valid))
    violations = []
    for name, value, text in variants(valid):
        case = f"{name}={value[:20]}"
        try:
            read(text)
        except ShardtrainError as error:
            lines = [str(line) for line in getattr(error, "problems", [error])]
            if error.exit_code not in (2, 3, 5) or any(
                "\n" in line or len(line) > 1000 for line in lines
            ):
                violations.append(f"{case}: code {error.exit_code}: {str(error)[:200]}")
        except Exception as error:
            violations.append(f"{case}: {type(error).__name__}: {str(error)[:100]}")
        else:
            if value in NOT_FINITE and not takes_infinity:
                violations.append(f"{case}: is accepted")
    return violations


@pytest.mark.parametrize("name", cases(["llama", "deepseek_v3"], nightly=list(ARCHITECTURES)))
def test_config_json(name: str, tmp_path: Path) -> None:
    architecture, more = ARCHITECTURES[name]
    kind = getattr(transformers, architecture).config_class
    fields = kind(**{**SMALL, **more}, architectures=[architecture]).to_dict()

    def read(text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        hub_model.recognise(tmp_path)

    assert not wrong(json.loads(json.dumps(fields)), read)


def test_infinite_time_step_limit_of_mamba_is_accepted() -> None:
    assert checked_json.parse('{"time_step_limit": [0.0, Infinity]}')["time_step_limit"][
        1
    ] == float("inf")
    with pytest.raises(ValueError, match=r"^rms_norm_eps=nan has a number that is not finite$"):
        checked_json.parse('{"rms_norm_eps": NaN}')


def test_generation_config(tmp_path: Path) -> None:
    file = tmp_path / generation_config.GENERATION
    (tmp_path / "config.json").write_text("{}")

    def read(text: str) -> None:
        file.write_text(text)
        settings = generation_config.read_settings(
            source.FolderSource(tmp_path, {}, {file.name: (file, 0, len(text))})
        )
        generation_config.end_ids(settings)
        generation_config.unused_settings(settings)

    assert not wrong(
        {"eos_token_id": [1, 2], "temperature": 0.7, "top_p": 0.9, "max_length": 20}, read
    )


def test_tokenizer_config(tmp_path: Path) -> None:
    added = {"3": {"content": "<s>", "special": True, "count": 1}}
    valid = {
        "model_max_length": 10**30,
        "bos_token_id": 3,
        "added_tokens_decoder": added,
        "bos_token": "<s>",
    }

    def read(text: str) -> None:
        (tmp_path / "tokenizer_config.json").write_text(text)
        tokenizer_config.read_beside(tmp_path, "model.tokenizer_path").special_id(
            "bos_token", {"<s>": 3}.get, {}, 9, "x"
        )

    assert not wrong(valid, read)


def test_adapter_config(tmp_path: Path) -> None:
    def read(text: str) -> None:
        (tmp_path / peft.CONFIG).write_text(text)
        peft._read_config(peft.read_json(tmp_path / peft.CONFIG), tmp_path / peft.CONFIG)

    assert not wrong({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1}, read)


def test_index_of_a_dataset(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shards", ByteTokenizer().vocab_size, 10_000)
    writer.add_documents(np.array([9]))
    writer.add_tokens(np.arange(9))
    writer.finish(tokenizer=ByteTokenizer.fingerprint, tokenizer_name="bytes")
    file = tmp_path / "shards" / shard_index.INDEX
    valid = json.loads(file.read_text())

    def read(text: str) -> None:
        file.write_text(text)
        shard_index.read_index(file.parent)

    assert not wrong(valid, read)


def test_header_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    valid = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}

    def read(text: str) -> None:
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
        listing._types_of(path)
        with weights.HubWeights(tmp_path) as opened:
            opened.read("a", [slice(0, 2)])

    assert not wrong(valid, read)


def test_state_of_a_checkpoint() -> None:
    def read(text: str) -> None:
        try:
            facts = checked_json.parse(text)  # as the reader of manifests does
        except ValueError as error:
            raise CheckpointError(str(error)[:100]) from None
        TrainState().load(facts["state"])
        Guard().load(facts["guard"])

    guard = Guard()
    guard.add(2.5, 1.5, 8)
    valid = {"state": TrainState(step=1, samples_consumed=2).to_dict(), "guard": guard.to_dict()}

    assert not wrong(json.loads(json.dumps(valid)), read)
    with pytest.raises(CheckpointError, match="samples_consumed=10"):
        TrainState().load({**TrainState().to_dict(), "samples_consumed": 10**30})


FILES_OF_RUNS: dict[str, dict[str, Any]] = {
    "metrics.jsonl": {
        "step": 1, "loss": 2.5, "grad_norm": 1.0, "mfu": 0.5, "memory_gib": 1.0, "step_seconds": 2.0,
        "data_seconds": 1.0, "tps": 10.0,
    },
    "validation.jsonl": {"step": 1, "loss": 2.5},
    "samples.jsonl": {"step": 1, "prompt": "a", "text": "b"},
    "planned.json": {"memory_gib": [1.5, 2.5]},
    "exit.json": {"code": 5, "rank": 0, "last_step": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES_OF_RUNS)
def test_files_of_a_run(name: str, tmp_path: Path) -> None:
    """Reports and a resumed run skip an invalid line or value. NaN is never a value of a curve."""
    for file, fields in FILES_OF_RUNS.items():
        (tmp_path / file).write_text(json.dumps(fields) + "\n")
    sink = TensorBoardSink(tmp_path / "tb")

    def read(text: str) -> None:
        (tmp_path / name).write_text(text + "\n")
        record = run_files.read(tmp_path)
        for series in (*record.metrics.values(), *record.validation.values()):
            assert np.isfinite(series.values).all()
        assert len(run_files.RunFolder(tmp_path).status().state) < 400
        for history in ("metrics.jsonl", "validation.jsonl"):
            for fields in JsonlFile(tmp_path / history, start_step=9).history:
                sink.scalars(fields["step"], tags_of(fields, "cpu"))

    assert not wrong(FILES_OF_RUNS[name], read, takes_infinity=True)


def test_best_checkpoint(tmp_path: Path) -> None:
    def read(text: str) -> None:
        (tmp_path / best.POINTER).write_text(text)
        pointer = best.read_pointer(tmp_path)
        assert not pointer or len(best.describe(pointer)) < 200

    valid = {"step": 4, "metric": "validation.loss", "mode": "min", "value": 7.5}

    assert not wrong(valid, read, takes_infinity=True)


@pytest.mark.parametrize("name", ["llama.json"])
def test_configurations_of_other_programs(name: str, tmp_path: Path) -> None:
    def read(text: str) -> None:
        (tmp_path / name).write_text(text)
        migrate.load(tmp_path / name)

    assert not wrong(json.loads(foreign_configs.FILES[name]), read)


TOML = [
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-0.0",
    "1e30",
    str(10**30),
    str(2**63),
    "true",
    '"123"',
    "9" * 5000,
    "9" * 400,
]
NUMBERS = [
    name
    for name, option in options().items()
    if "int" in str(option.kind) or "float" in str(option.kind)
]


@pytest.mark.parametrize(
    "value", [".nan", ".inf", "-.inf", "1.0e+999", "9" * 9000, "9" * 400, "0x" + "f" * 400]
)
def test_yaml_of_other_programs(value: str, tmp_path: Path) -> None:
    text = foreign_configs.FILES["parameters.yml"]
    assert "learning_rate: 2e-05" in text
    (tmp_path / "parameters.yml").write_text(
        text.replace("learning_rate: 2e-05", f"learning_rate: {value}")
    )
    with pytest.raises(ConfigError) as caught:
        migrate.load(tmp_path / "parameters.yml")
    for line in caught.value.problems:
        assert "\n" not in str(line)
        assert len(str(line)) < 1000


SHARES = [NUMBERS[number::12] for number in range(12)]


@pytest.mark.parametrize("names", cases(SHARES[:1], nightly=SHARES[1:]))
def test_options_in_toml(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    violations = []
    for name in names:
        section, _, key = name.rpartition(".")
        for value in [*TOML, "0x" + "f" * 900_000]:
            path.write_text(f"[{section}]\n{key} = {value}\n")
            case = f"{name}={value[:20]}"
            try:
                loaded = config.load(str(path), [])
                problems = config.check(loaded)
            except ConfigError as error:
                problems = list(error.problems)
            except Exception as error:
                violations.append(f"{case}: {type(error).__name__}: {str(error)[:100]}")
                continue
            for problem in problems:
                if "\n" in str(problem) or len(str(problem)) > 1000:
                    violations.append(f"{case}: {str(problem)[:200]}")
            if value == "nan" and not problems:
                violations.append(f"{case}: is accepted")

    assert not violations, "\n".join(violations)


def test_number_of_900_kb_on_the_command_line_is_refused() -> None:
    for value in ("0x" + "f" * 900_000, "9" * 900_000):
        with pytest.raises(ConfigError) as caught:
            config.load(None, [f"--training.steps={value}"])
        (line,) = caught.value.problems
        assert len(str(line)) < 1000
