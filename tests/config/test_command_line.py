"""Command lines that mix options of a verb with configuration overrides, which must stay unchanged."""

from __future__ import annotations

import pytest

from shardtrain.config.command_line import CommandLine, VerbOption, number_of, split, take
from shardtrain.utils.errors import ConfigError


def test_options_of_the_verb_are_extracted_from_the_arguments() -> None:
    arguments = take(
        ["run.toml", "--output=o", "--a.b", "1", "2", "--flag", "--n", "1_000"],
        {"--output": VerbOption(), "--n": VerbOption(number_of())},
        ["--flag"],
    )

    assert arguments.configuration() == ("run.toml", ("--a.b", "1", "2"))
    assert arguments.verb_options == {"--output": "o", "--n": 1000, "--flag": True}
    assert take(["--x.y", "1", "-h"], {}).help


def test_a_list_ends_at_the_next_option_and_may_be_repeated() -> None:
    mesh = VerbOption(is_list=True)
    arguments = take(
        ["--mesh", "tp=2", "pp=2", "--json", "--mesh=cp=2", "--a.b", "1"],
        {"--mesh": mesh},
        ["--json"],
    )

    assert arguments.verb_options == {"--mesh": ["tp=2", "pp=2", "cp=2"], "--json": True}
    assert arguments.rest == (
        "--a.b",
        "1",
    )
    with pytest.raises(ConfigError, match="--mesh has no value; write it like --mesh VALUE"):
        take(["--mesh", "-h2"], {"--mesh": mesh})


@pytest.mark.parametrize("wrong", ["0", "-1", "1.5", "x", "\u0663", "9" * 5000])
def test_a_number_is_whole_and_above_zero(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match="must be a whole number of files above 0; write it like --n 4"
    ):
        take([f"--n={wrong}"], {"--n": VerbOption(number_of("files"), "4")})


def test_an_option_without_a_value_or_given_twice_is_refused() -> None:
    number = VerbOption(number_of())
    for arguments in (["--n", "--other"], ["--n="], ["--n"]):
        with pytest.raises(ConfigError, match="--n has no value"):
            take(arguments, {"--n": number})
    assert take(["--n", "1", "--n", "2"], {"--n": number}).verb_options == {"--n": 2}
    with pytest.raises(ConfigError, match="--n is given twice"):
        take(["--n", "1", "--n", "2"], {"--n": VerbOption(number_of(), once=True)})


def test_launch_options_of_train_are_split_from_overrides() -> None:
    command_line = split(
        ["--nproc=3", "run.toml", "--nnodes", "1:4", "--a.b", "x", "--node_rank", "0"]
    )
    assert command_line == CommandLine("run.toml", 3, ("--a.b", "x"), nnodes="1:4", node_rank=0)
    assert split(["--a.b", "1", "--job.config_file", "run.toml"]) == CommandLine(
        "run.toml", None, ("--a.b", "1")
    )
    assert split(["run.toml", "--help", "--nproc", "none"]).help
    with pytest.raises(
        ConfigError, match="is a second configuration file, in addition to run.toml"
    ):
        split(["run.toml", "--job.config-file=other.toml"])
