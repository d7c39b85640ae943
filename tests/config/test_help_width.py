"""Help fits the terminal without losing text."""

from __future__ import annotations

import pytest

from shardtrain import cli
from shardtrain.config.help_width import fitted

VERBS = [verb for verb in cli.VERBS if not verb.startswith("-")]


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_of_help_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    for verb in VERBS:
        monkeypatch.setenv("COLUMNS", str(columns))
        arguments = ["help"] if verb == "help" else [verb, "--help"]
        answers = []
        for is_terminal in (False, True):
            monkeypatch.setattr(
                cli.sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False
            )
            try:
                code = cli.main(arguments)
            except SystemExit as end:  # argparse exits after it prints help
                code = int(end.code or 0)
            assert code == 0
            answers.append(capsys.readouterr().out)
        piped, wrapped = answers
        assert wrapped.split() == piped.split(), verb  # wrapping changes only white space
        # A line without spaces, such as a list of choices, cannot be wrapped.
        assert not [
            line for line in wrapped.splitlines() if len(line) > columns and " " in line.strip()
        ], verb
        assert fitted(piped, 200) == piped
