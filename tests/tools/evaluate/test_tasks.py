"""lm-eval tasks have the same results with our engine and with lm-eval's own engine, on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from tiny_tokenizers import bpe_folder

from shardtrain.data import open_tokenizer
from shardtrain.distributed.process_group import World
from shardtrain.tools.evaluate import tasks
from shardtrain.tools.evaluate.evaluate_request import EvaluateOptions, read
from shardtrain.tools.evaluate.tasks import check_known, measure
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.utils.errors import ConfigError

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

ROWS = [
    {
        "question": "the cat sat on the",
        "choices": [" mat", " dog", " fire, and the cat"],
        "answer": 0,
    },
    {"question": "Hello! How are", "choices": [" you", " we", " they today"], "answer": 0},
    {"question": "def main():\n    return", "choices": [" 42", " the", " naïve café"], "answer": 0},
    {
        "question": "the dog lay by the fire.",
        "choices": [" I", " am well", " thank you"],
        "answer": 2,
    },
]
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: {kind}
"""
CHOICES = """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
doc_to_text: ""
doc_to_target: "{{question}} {{choices | join(' and ')}} {{question}} {{question}} {{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
UNTIL = """
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["a", "."], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASKS = {
    "tiny_choices": ("multiple_choice", CHOICES),
    "tiny_rolling": ("loglikelihood_rolling", ROLLING),
    "tiny_until": ("generate_until", UNTIL),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with task files, and with a model whose context is shorter than their longest texts."""
    root = tmp_path_factory.mktemp("tasks")
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "include").mkdir()
    for name, (kind, text) in TASKS.items():
        head = COMMON.format(name=name, rows=root / "rows.jsonl", kind=kind)
        (root / "include" / f"{name}.yaml").write_text(head + text)
    folder = bpe_folder(root / "hf", bos_token="<s>", eos_token="</s>")
    vocab_size = open_tokenizer(str(folder)).vocab_size
    save(build("llama2", vocab_size=vocab_size, max_position_embeddings=32), root / "hf")
    return root


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets"
    )


def options_of(place: Path, batch_size: int = 3) -> EvaluateOptions:
    arguments = [
        "--from",
        str(place / "hf"),
        "--tasks",
        ",".join(TASKS),
        "--include_path",
        str(place / "include"),
    ]
    options = read([*arguments, "--batch_size", str(batch_size)])
    assert options is not None
    return options


def ours(rank: int, place: Path, size: int, batch_size: int = 3) -> Any:
    opened = open_model(place / "hf", world=World(rank, size, rank, torch.device("cpu")))
    return measure(opened, options_of(place, batch_size))


def theirs(place: Path) -> Any:
    import transformers
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "hf")
    engine = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=32, device="cpu")
    manager = TaskManager(include_path=str(place / "include"), include_defaults=False)
    return simple_evaluate(
        model=engine, tasks=list(TASKS), task_manager=manager, log_samples=False, bootstrap_iters=0
    )["results"]


def assert_equal(results: Any, expected: Any) -> None:
    assert results.keys() == expected.keys()
    compared = 0
    for task, values in expected.items():
        for key, value in values.items():
            if isinstance(value, float):
                # float32, different summation order
                assert results[task][key] == pytest.approx(value, rel=1e-5), (
                    task,
                    key,
                )
                compared += 1
    assert compared >= 6


@pytest.mark.nightly(
    "lm-eval's engine and ours on three ranks",
    by="tests/tools/evaluate/test_tasks.py::test_texts_equal_those_of_lm_eval_s_engine",
)
def test_results_equal_those_of_lm_eval_s_engine_on_any_number_of_ranks(place: Path) -> None:
    expected = theirs(place)
    results = ours(0, place, 1)
    assert_equal(results, expected)
    assert results["tiny_until"].keys() == expected["tiny_until"].keys()

    first, second = run_ranks(2, ours, place, 2, 2)
    assert_equal(first, expected)
    assert second == {}, "only the first rank of a node reports results"


def test_texts_equal_those_of_lm_eval_s_engine(place: Path) -> None:
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from shardtrain.tools.evaluate.harness import Engine

    options = {"until": ["a", "."], "max_gen_toks": 6, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (row["question"], options), i) for i, row in enumerate(ROWS)
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "hf")
    engine = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=32, device="cpu")
    expected = engine.generate_until(requests, disable_tqdm=True)
    results = Engine(open_model(place / "hf"), 3).generate_until(requests)

    assert results == expected
    assert len(set(results)) > 1


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("code_eval", True), ("author/metric", True), ("./code_eval", False), ("absent", False)],
)
def test_metric_in_the_current_directory_does_not_replace_one_of_the_library(
    name: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks such as humaneval load a metric by name. ``evaluate`` would run a local file with that name."""
    from evaluate import loading

    loaded: list[str] = []
    monkeypatch.setattr(loading, "evaluation_module_factory", lambda path, **_: loaded.append(path))
    monkeypatch.chdir(tmp_path)
    for planted in ("code_eval/code_eval.py", "author/metric/metric.py"):
        Path(planted).parent.mkdir(parents=True)
        Path(planted).write_text("raise SystemExit('planted')\n")
    with tasks._without_planted_metrics():
        if is_refused:
            with pytest.raises(ConfigError, match="a file in the current directory would replace"):
                loading.evaluation_module_factory(name)
        else:
            loading.evaluation_module_factory(name)

    assert loaded == ([] if is_refused else [name])


def test_an_unknown_task_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is not a task of lm-eval; did you mean tiny_choices?"):
        check_known(["tiny_choice"], list(TASKS))


def test_a_missing_library_names_its_extra(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r'pip install "shardtrain\[eval\]"'):
        measure(open_model(place / "hf"), options_of(place))
