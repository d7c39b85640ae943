"""[data], [data.sources.NAME] and [[data.stages]]: parsing, rejected values, and notes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import patience
import pytest

from shardtrain.config import (
    Config,
    ConfigError,
    Loaded,
    check,
    help_text,
    load,
    machine_notes,
    notes,
    resolved_toml,
    show,
)
from shardtrain.config.schema.data_options import Data, DataSource, DataStage
from shardtrain.config.toml_lines import key_lines

TEXT = """\
[data.sources.web]
dataset_path = "web.jsonl"
weight = 3
[data.sources.my-code]
dataset = "text"
dataset_path = "code"
epochs = 2
[[data.stages]]
until_tokens = 1e6
weights = { web = 1.0, my-code = 0.5 }
[[data.stages]]
[data.stages.weights]
web = 2
"""
SOURCES = {
    "web": DataSource(dataset_path="web.jsonl", weight=3.0),
    "my-code": DataSource("text", "code", epochs=2),
}
STAGES = [DataStage(1_000_000, {"web": 1.0, "my-code": 0.5}), DataStage(0, {"web": 2.0})]


def read(tmp_path: Path, text: str, arguments: list[str] | None = None) -> Loaded:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load(file, arguments or [])


def refused(tmp_path: Path, text: str, arguments: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, arguments)
    return [str(problem) for problem in caught.value.problems]


def test_tables_of_a_file_become_dataclasses_with_a_line_for_each_key(tmp_path: Path) -> None:
    loaded = read(tmp_path, TEXT)
    assert loaded.config.data == Data(sources=SOURCES, stages=STAGES)
    assert isinstance(loaded.config.data.sources["web"].weight, float)

    lines = {
        "data.sources": 1,
        "data.sources.web": 1,
        "data.sources.web.dataset_path": 2,
        "data.sources.web.weight": 3,
        "data.sources.my-code": 4,
        "data.sources.my-code.epochs": 7,
        "data.stages": 8,
        "data.stages.0": 8,
        "data.stages.0.until_tokens": 9,
        "data.stages.0.weights.my-code": 10,
        "data.stages.1": 11,
        "data.stages.1.weights": 12,
        "data.stages.1.weights.web": 13,
    }

    assert {name: loaded.origins[name] for name in lines} == {
        name: f"run.toml:{line}" for name, line in lines.items()
    }
    assert not loaded.is_set("data.sources.web.epochs")
    assert not loaded.is_set("data.format")
    assert loaded.value("data.sources.my-code.epochs") == 2
    assert loaded.value("data.stages.1.weights.web") == 2.0


@pytest.mark.parametrize(
    "text",
    [
        "[data]\nsources = { web = { dataset_path = 'web.jsonl', weight = 3 }, my-code = { dataset = 'text', "
        "dataset_path = 'code', epochs = 2 } }\nstages = [\n  { until_tokens = 1_000_000, weights = { web = 1, my-code "
        "= 0.5 } },\n  { weights = { web = 2 } },\n]\n",
        "[data]\nsources.web.dataset_path = 'web.jsonl'\nsources.web.weight = 3.0\n[data.sources.'my-code']\n"
        "dataset = 'text'\ndataset_path = 'code'\nepochs = 2.0\n[[data.stages]]\nuntil_tokens = 1000000\n"
        "weights.web = 1\nweights.my-code = 0.5\n[[data.stages]]\nweights.web = 2\n",
    ],
    ids=["inline", "dotted"],
)
def test_all_toml_notations_of_tables_are_equivalent(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).config.data == Data(sources=SOURCES, stages=STAGES)


def test_the_entries_of_an_array_of_tables_have_separate_lines() -> None:
    lines = key_lines(
        "[[a]]\nx = 1\n[a.b]\ny = 1\n[[a]]\nx = 2\n[[a.c]]\nz = 1\n[[a.c]]\nz = 2\n[d]\ne = [\n{f = 1},\n{f = 2}]\n"
    )

    assert lines[("a", "0", "x")] == 2
    assert lines[("a", "0", "b", "y")] == 4
    assert lines[("a", "1", "x")] == 6
    assert lines[("a", "1", "c", "0", "z")] == 8
    assert lines[("a", "1", "c", "1", "z")] == 10
    assert lines[("d", "e", "0", "f")] == 13
    assert lines[("d", "e", "1", "f")] == 14


def test_arguments_change_add_and_replace_entries(tmp_path: Path) -> None:
    arguments = ["--data.sources.web.weight", "0.3", "--data.sources.my-code.text-field=body"]
    loaded = read(
        tmp_path,
        TEXT,
        [*arguments, "--data.sources.new.dataset", "tsv", "--data.stages.1.until_tokens=2e6"],
    )
    sources = loaded.config.data.sources
    stages = loaded.config.data.stages

    assert sources["web"] == DataSource(dataset_path="web.jsonl", weight=0.3)
    assert sources["my-code"] == DataSource("text", "code", epochs=2, text_field="body")
    assert sources["new"] == DataSource("tsv")
    assert stages == [STAGES[0], DataStage(2_000_000, {"web": 2.0})]
    assert (
        loaded.origins["data.sources.web.weight"]
        == loaded.origins["data.sources.new"]
        == "command line"
    )
    assert loaded.origins["data.sources.web.dataset_path"] == "run.toml:2"


def test_a_table_argument_is_merged_and_a_list_replaces_the_old_one(tmp_path: Path) -> None:
    arguments = [
        "--data.sources",
        "{web = {weight = 5}, x = {}}",
        "--data.stages",
        "[{weights = {x = 1}}]",
    ]
    data = read(tmp_path, TEXT, arguments).config.data

    assert data.sources == {
        **SOURCES,
        "web": DataSource(dataset_path="web.jsonl", weight=5.0),
        "x": DataSource(),
    }
    assert data.stages == [DataStage(0, {"x": 1.0})]
    assert read(tmp_path, TEXT, ["--data.stages", "[]"]).config.data.stages == []
    assert (
        read(tmp_path, TEXT, ["--data.sources.web", "{weight = 5}"])
        .config.data.sources["web"]
        .weight
        == 5.0
    )
    assert (
        read(tmp_path, TEXT, ["--data.sources.my-code.epochs=none"])
        .config.data.sources["my-code"]
        .epochs
        is None
    )


def test_a_switch_that_may_be_unset_needs_no_value() -> None:
    assert load(None, ["--data.streaming"]).config.data.streaming is True
    assert load(None, ["--data.no_streaming"]).config.data.streaming is False
    assert load(None, ["--data.streaming", "none"]).config.data.streaming is None
    assert load(None, ["--data.streaming", "--training.steps", "3"]).config.training.steps == 3


@pytest.mark.parametrize(
    ("text", "arguments", "fragments"),
    [
        (
            "[data.sources.web]\nweigth = 1",
            [],
            ["run.toml:2: data.sources.web.weigth=1", "did you mean data.sources.web.weight?"],
        ),
        (
            "[data.sources.web]\nzzz = 1",
            [],
            ["data.sources.web.zzz", "keys are dataset, dataset_path, weight"],
        ),
        (
            "[data.sources.web]\nweight = 'x'",
            [],
            ["run.toml:2: data.sources.web.weight", "must be a number"],
        ),
        (
            "[data.sources.web]\nepochs = 1.5",
            [],
            ["data.sources.web.epochs=1.5", "must be an integer"],
        ),
        (
            "[data.sources.web]\nformat = 'chatt'",
            [],
            ["data.sources.web.format", 'did you mean "chat"?'],
        ),
        ("[data.sources]\nweb = 3", [], ["run.toml:2: data.sources.web=3 must be a table"]),
        (
            "[data]\nsources = 3",
            [],
            ["data.sources=3 must be a table of tables", "[data.sources.NAME]"],
        ),
        ("[data]\nsources = []", [], ["data.sources=[] must be a table of tables"]),
        ("[data]\nstages = 3", [], ["data.stages=3 must be a list of tables", "[[data.stages]]"]),
        ("[data]\nstages = [3]", [], ["data.stages=[3] must be a list of tables"]),
        ("[data.sources.'']\nweight = 1", [], ["has an entry without a name"]),
        (
            "[[data.stages]]\nuntil_tokens = 5\n[[data.stages]]\nwieghts = {}",
            [],
            ["run.toml:4: data.stages.1.wieghts", "did you mean data.stages.1.weights?"],
        ),
        (
            "[[data.stages]]\nweights = {web = true}",
            [],
            ["run.toml:2: data.stages.0.weights.web=true", "be a number"],
        ),
        (
            "[[data.stages]]\nuntil_tokens = 1.5",
            [],
            ["data.stages.0.until_tokens=1.5", "must be an integer"],
        ),
        (
            "[data.sorces.web]\nweight = 1",
            [],
            ["[data.sorces] is not a section", "did you mean [data.sources]?"],
        ),
        (
            "",
            ["--data.sources.web.weigth", "1"],
            ["command line: data.sources.web.weigth", "did you mean"],
        ),
        ("", ["--data.sources.web"], ["--data.sources.web has no value"]),
        (
            "",
            ["--data.sources", "{web = {"],
            ["command line: data.sources", "must be a table of tables"],
        ),
        ("", ["--data.source.web.weight", "1"], ["did you mean data.sources.web.weight?"]),
        (
            "",
            ["--data.stages.1.until_tokens", "1"],
            ["is not the number of an entry", "use 0 to 0"],
        ),
        ("", ["--data.stages.first.until_tokens", "1"], ["is not the number of an entry"]),
        (
            "",
            ["--data.sources.web.weight", "1", "--data.sources.web.weight", "2"],
            ["is given twice"],
        ),
    ],
)
def test_unreadable_values_are_named_with_a_fix(
    tmp_path: Path, text: str, arguments: list[str], fragments: list[str]
) -> None:
    lines = refused(tmp_path, text, arguments)
    matches = [line for line in lines if all(fragment in line for fragment in fragments)]
    assert matches and "\n" not in matches[0], lines


WEB = "[data.sources.web]\ndataset = 'python_stdlib'\n"
TWO = f"{WEB}[data.sources.code]\ndataset = 'python_stdlib'\n"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (
            "[training]\ndataset = 'jsonll'",
            ["run.toml:2: training.dataset", "is not a dataset", "did you mean jsonl?"],
        ),
        ("[training]\ndataset = 'my_data.py'", ["training.dataset", "does not exist"]),
        (
            "[training]\ndataset = 'jsonl'",
            ["training.dataset_path is not set", '"jsonl" requires a file or folder'],
        ),
        (
            "[data.sources.web]\ndataset = 'pyhton_stdlib'",
            ["run.toml:2: data.sources.web.dataset", "python_stdlib?"],
        ),
        (
            "[data.sources.web]\nweight = 1",
            ["run.toml:1: data.sources.web.dataset_path is not set", '"jsonl"'],
        ),
        (
            f"{WEB}weight = -1\n{TWO[len(WEB) :]}",
            ["run.toml:3: data.sources.web.weight=-1.0", "not negative"],
        ),
        (f"{WEB}weight = inf\n", ["data.sources.web.weight=inf", "finite"]),
        (f"{WEB}weight = 0\n", ["run.toml:1: data.sources has no weight above 0"]),
        (f"{WEB}epochs = 0\n", ["data.sources.web.epochs=0", "at least 1"]),
        (f"{WEB}text_field = ''\n", ["data.sources.web.text_field", "must not be empty"]),
        (
            "[data.sources.'a b']\ndataset = 'python_stdlib'",
            ["run.toml:1: data.sources.a b", "letters, digits"],
        ),
        (
            f"[training]\nepochs = 2\n{WEB}",
            ["training.epochs=2", "is not supported with [data.sources]"],
        ),
        (
            f"[training]\ndataset_path = 'x'\n{WEB}",
            ["training.dataset_path", "is not supported with [data.sources]"],
        ),
        (
            f"[training]\ndataset = 'text'\n{WEB}",
            ["training.dataset=", "is not supported with [data.sources]"],
        ),
        (
            f"[training]\non_data_end = 'repeat'\n{WEB}epochs = 2",
            ["on_data_end", "end with the epochs of data.sources.web"],
        ),
        (
            f"{WEB}[[data.stages]]\nweights.web = 1",
            ["run.toml:3: data.stages requires at least two sources, and there is one"],
        ),
        (
            "[[data.stages]]\nweights.web = 1",
            ["run.toml:1: data.stages requires at least two sources, and there is no source"],
        ),
        (
            f"{TWO}[[data.stages]]\nweights.wbe = 1",
            ["run.toml:6: data.stages.0.weights.wbe", "did you mean web?"],
        ),
        (
            f"{TWO}[[data.stages]]\nweights.web = 0",
            ["run.toml:6: data.stages.0.weights has no weight above 0"],
        ),
        (
            f"{TWO}[[data.stages]]\nuntil_tokens = 5",
            ["run.toml:5: data.stages.0.weights has no weight above 0"],
        ),
        (
            f"{TWO}[[data.stages]]\nweights = {{web = 2, code = -1}}",
            ["run.toml:6: data.stages.0.weights.code=-1.0", "not negative"],
        ),
        (
            f"{TWO}[[data.stages]]\nweights.web = 1\n[[data.stages]]\nweights.web = 1",
            ["run.toml:5: data.stages.0.until_tokens=0 must be above 0", "only the last"],
        ),
        (
            f"{TWO}[[data.stages]]\nuntil_tokens = 9\nweights.web = 1\n"
            "[[data.stages]]\nuntil_tokens = 9\nweights.web = 1",
            ["run.toml:9: data.stages.1.until_tokens=9", "exceed the end of the previous stage, 9"],
        ),
        (
            f"{TWO}[[data.stages]]\nuntil_tokens = -5\nweights.web = 1",
            ["until_tokens=-5 must be above 0"],
        ),
        ("[data]\nreaders = 0", ["data.readers=0", "between 1 and 65536"]),
        ("[data]\nreaders = 65537", ["data.readers=65537", "between 1 and 65536"]),
        ("[data]\nmax_row_bytes = 1023", ["max_row_bytes=1023", "at least 1024"]),
        (
            "[data]\nbad_rows = 'skip'\nbad_rows_max_fraction = 2",
            ["bad_rows_max_fraction=2.0", "between 0 and 1"],
        ),
        (
            "[data]\nbad_rows_max_fraction = 0.5",
            ["bad_rows_max_fraction=0.5 has no effect", '"skip"'],
        ),
        (
            "[data]\nlong_documents = 'drop'",
            ['long_documents="drop" has no effect on packing = concat'],
        ),
        (
            "[data]\nprompt_field = 'q'",
            ['prompt_field="q" has no effect on data.format text', '"prompt_completion"'],
        ),
        (
            "[data]\nformat = 'chat'\ntext_field = 'q'",
            ['text_field="q" has no effect on data.format chat'],
        ),
        ("[data]\nseparator = ''", ["data.separator", "must not be empty"]),
        (
            "[data]\nformat = 'chat'\nadd_bos = true",
            ["data.add_bos=true has no effect on data.format chat"],
        ),
        (
            "[data]\nformat = 'chat'\nseparator = 'x'",
            ["data.separator=", "has no effect on data.format chat"],
        ),
        ("[data]\ntext_field = ''", ["data.text_field", "must not be empty"]),
        (
            "[data]\nmode = 'memory'\nreaders = 8",
            ["data.readers=8 has no effect on data in memory"],
        ),
        (
            "[data]\nmode = 'stream'\n[training]\nepochs = 2",
            ["training.epochs=2", "shardtrain data prepare", '"stop"'],
        ),
        (
            "[data]\nmode = 'stream'\nbad_rows = 'skip'",
            ['bad_rows="skip"', "shardtrain data prepare"],
        ),
        (
            f"{TWO}epochs = 1\n[data]\nmode = 'stream'",
            ["data.sources.code.epochs=1", "requires the number of rows"],
        ),
        (
            "[training]\nepochs = 1\non_data_end = 'stop'",
            ["on_data_end", "has no effect with training.epochs"],
        ),
        ("[validation]\nenable = true", ["validation.dataset", "is not set", "name a dataset"]),
        ("[validation]\nenable = true\ndataset = 'jsonl'", ["validation.dataset_path is not set"]),
        (
            "[validation]\nenable = true\ndataset = 'python_stdlib'\nseq_len = 7\n"
            "[parallelism]\ncontext_parallel_degree = 2",
            ["run.toml:4: validation.seq_len=7", "is not a multiple of 4", "use 4 or 8"],
        ),
        (
            "[validation]\nenable = true\ndataset = 'python_stdlib'\nseq_len = 64\n[parallelism]\n"
            "pipeline_parallel_degree = 2",
            ["validation.seq_len=64 must be training.seq_len 2048", "use 2048"],
        ),
        (
            "[validation]\nenable = true\ndataset = 'python_stdlib'\nfreq = 0",
            ["validation.freq=0", "at least 1"],
        ),
        (
            "[validation]\nenable = true\ndataset = 'python_stdlib'\nsteps = 0",
            ["validation.steps=0", "or -1"],
        ),
        (
            "[validation]\nenable = true\ndataset = 'python_stdlib'\n[validation.dataloader]\nprefetch_factor = 2",
            ["validation.dataloader.prefetch_factor=2", "requires workers"],
        ),
    ],
)
def test_an_impossible_value_is_one_problem_with_a_fix(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    problems = [str(problem) for problem in check(read(tmp_path, text))]
    assert len(problems) == 1, problems
    assert "\n" not in problems[0]
    for fragment in fragments:
        assert fragment in problems[0], problems[0]


def test_a_weight_next_to_stages_is_noted_as_ineffective(tmp_path: Path) -> None:
    loaded = read(tmp_path, f"{TWO}weight = 0.2\n[[data.stages]]\nweights.code = 1")
    assert check(loaded) == []
    assert notes(loaded) == [
        "data.sources.code.weight: without effect with [[data.stages]], which have their own weights"
    ]


def test_all_problems_of_a_mixture_are_reported_together(tmp_path: Path) -> None:
    text = "[data.sources.a]\ndataset = 'x'\nweight = -1\n[data.sources.b]\nepochs = 0\n"
    text += "[[data.stages]]\nweights.c = 1\n"
    options = {problem.option for problem in check(read(tmp_path, text))}

    assert options == {
        "data.sources.a.dataset",
        "data.sources.b.dataset_path",
        "data.sources.a.weight",
        "data.sources.b.epochs",
        "data.stages.0.weights.c",
    }


@pytest.mark.parametrize(
    "text",
    [
        f"{TWO}epochs = 3\n[[data.stages]]\nuntil_tokens = 5\nweights.web = 1\n[[data.stages]]\nweights.code = 1",
        f"{TWO}format = 'chat'\n[data]\nmessages_field = 'm'\ntext_field = 't'",
        f"{TWO}[[data.stages]]\nuntil_tokens = 5\nweights.web = 1",
        "[data]\nreaders = 65536\nmax_row_bytes = 1024\npacking = 'padded'\nlong_documents = 'cut'",
        "[data]\nmode = 'stream'\n[training]\non_data_end = 'stop'",
        "[data]\nformat = 'text'\nprompt_field = 'prompt'\nbad_rows_max_fraction = 0.001",  # no effect, but defaults
        "[validation]\nenable = true\ndataset = 'text'\ndataset_path = 'held_out'\n"
        "[training.dataloader]\nnum_workers = 2",
    ],
)
def test_possible_data_options_have_no_problems_or_notes(tmp_path: Path, text: str) -> None:
    loaded = read(tmp_path, text)
    assert check(loaded) == []
    assert notes(loaded) == []


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[data]\nformat = 'chat'\ndocument_mask = 'off'", "attend to each other"),
        (
            "[training]\ndataset = 'tokens'\ndataset_path = 'x'\n[data]\nmode = 'stream'\ntext_field = 'body'",
            "data.mode, data.text_field: without effect on prepared shards",
        ),
        (
            "[data]\nsplit = 'test'\nstreaming = true",
            "data.split, data.streaming: without effect on python_stdlib",
        ),
        (f"{WEB}subset = 'en'", "data.sources.web.subset: without effect on python_stdlib"),
        ("[validation]\nenable = true\ndataset = 'python_stdlib'", "also the data of training"),
        (
            "[validation]\nenable = true\ndataset = 'text'\ndataset_path = 'x'\nlocal_batch_size = 2\n[parallelism]\n"
            "pipeline_parallel_degree = 2",
            "validation.local_batch_size: without effect, a pipeline",
        ),
    ],
)
def test_questionable_data_options_are_notes(tmp_path: Path, text: str, fragment: str) -> None:
    loaded = read(tmp_path, text)
    assert check(loaded) == []
    assert len(notes(loaded)) == 1 and fragment in notes(loaded)[0], notes(loaded)


def test_a_disabled_document_mask_is_not_noted_without_shared_sequences(tmp_path: Path) -> None:
    assert (
        notes(
            read(tmp_path, "[data]\ndocument_mask = 'off'\npacking = 'padded'\nformat = 'chat'\n")
        )
        == []
    )
    # Without document masks, texts are concatenated as in torchtitan. This is intended.
    assert notes(read(tmp_path, "[data]\ndocument_mask = 'off'\n")) == []


def test_paths_of_all_sources_must_exist_and_patterns_match(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    text = (
        f"[data.sources.a]\ndataset_path = '{tmp_path}/*.jsonl'\n[data.sources.b]\ndataset_path = '{tmp_path}/*.gz'\n"
        "[data.sources.c]\ndataset = 'huggingface'\ndataset_path = 'owner/name'\n"
        "[data.sources.d]\ndataset = 'huggingface'\ndataset_path = './no/where'\n"
        "[validation]\nenable = true\ndataset = 'text'\ndataset_path = 'no/where'\n[data]\nformat = 'chat'\n"
        "chat_template = 'no.jinja'\n"
    )
    problems = {problem.option: str(problem) for problem in machine_notes(read(tmp_path, text))}
    named = ("data.sources.b", "data.sources.d", "validation")

    assert list(problems) == [*(f"{name}.dataset_path" for name in named), "data.chat_template"]
    assert "matches no file" in problems["data.sources.b.dataset_path"]
    assert problems["validation.dataset_path"].startswith("run.toml:14: ")


def test_show_and_the_resolved_file_hold_every_field_of_every_entry(tmp_path: Path) -> None:
    loaded = read(tmp_path, TEXT, ["--data.sources.web.split", "test"])
    text = show(loaded)
    assert '[data.sources.web]\ndataset = "jsonl"  # default\n' in text
    assert 'split = "test"  # command line\n' in text
    assert "weight = 3.0  # run.toml:3\n" in text
    assert text.count("[[data.stages]]") == 2
    assert "until_tokens = 1000000  # run.toml:9" in text

    (tmp_path / "again.toml").write_text(resolved_toml(loaded.config))
    assert load(tmp_path / "again.toml").config == loaded.config
    assert "[data.sources]" in resolved_toml(Config())
    assert "stages = []" in resolved_toml(Config())


def test_help_explains_the_keys_of_an_entry() -> None:
    text = help_text("data.sources")
    assert text.startswith("--data.sources  (table of tables; default {})")
    assert "--data.sources.NAME.weight  (number; default 1.0)" in text
    assert help_text("data.sources.web.weight") == text
    assert "--data.stages.N.until_tokens  (integer; default 0)" in help_text("data.stages")
    assert "--data.packing" in help_text("data")


def test_torchtitan_s_names_for_validation_data_are_accepted(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[validation]\nenabled = true\ndataset = 'c4_validation'\n")
    assert (loaded.config.validation.enable, loaded.config.validation.dataset) == (
        True,
        "c4_validation",
    )
    assert check(loaded) == []
    assert loaded.config.validation.split == "validation"


def test_the_data_options_are_read_without_torch() -> None:
    program = (
        "import sys; from shardtrain.config import check, load; check(load(None, ['--data.sources.a.dataset=text']));"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=True,
    )

    assert result.stdout.strip() == "[]"
