"""Shell completion scripts for verbs, presets, options and their values."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Literal, get_args, get_origin

from shardtrain.config import presets
from shardtrain.config.options import options


def _values(kind: object) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    inner = next((arg for arg in get_args(kind) if get_origin(arg) is Literal), kind)
    if get_origin(inner) is Literal:
        return [str(value) for value in get_args(inner)]
    return []


def _bash(verbs: Sequence[str]) -> str:
    cases = []
    for name, option in options().items():
        values = _values(option.kind)
        if values:
            cases.append(f"        --{name}) choices={shlex.quote(' '.join(values))} ;;")
    # Quote everything that becomes an argument of compgen, because a shell evaluates the script.
    flags = shlex.quote(" ".join(f"--{name}" for name in options()))
    quoted_verbs = shlex.quote(" ".join(verbs))
    quoted_presets = shlex.quote(" ".join(presets.names()))
    return "\n".join(
        [
            "_shardtrain() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" choices=""',
            "    COMPREPLY=()",
            "    if ((COMP_CWORD == 1)); then",
            f'        COMPREPLY=($(compgen -W {quoted_verbs} -- "$current"))',
            "        return",
            "    fi",
            # bash splits --a.b=c at "=".
            '    [[ "$before" == "=" ]] && before="${COMP_WORDS[COMP_CWORD - 2]}"',
            '    [[ "$current" == "=" ]] && before="${COMP_WORDS[COMP_CWORD - 1]}" current=""',
            '    case "$before" in',
            *cases,
            "    esac",
            '    if [[ -n "$choices" ]]; then',
            '        COMPREPLY=($(compgen -W "$choices" -- "$current"))',
            '    elif [[ "$current" == -* ]]; then',
            f'        COMPREPLY=($(compgen -W {flags} -- "$current"))',
            "    else",
            # Do not split a name at spaces, and do not expand an asterisk in it. A typed space has a backslash.
            "        local name",
            "        while IFS= read -r name; do",
            '            COMPREPLY+=("$name")',
            '        done < <(compgen -f -- "${current//\\\\/}")',
            "        if ((COMP_CWORD == 2)); then",
            f'            COMPREPLY+=($(compgen -W {quoted_presets} -- "$current"))',
            "        fi",
            "    fi",
            "}",
            "complete -o filenames -F _shardtrain shardtrain",
        ]
    )


def _zsh(verbs: Sequence[str]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(verbs)


def _fish(verbs: Sequence[str]) -> str:
    lines = [
        f"complete -c shardtrain -f -n __fish_use_subcommand -a {shlex.quote(' '.join(verbs))}"
    ]
    for name, option in options().items():
        values = _values(option.kind)
        taken = f"-x -a {shlex.quote(' '.join(values))}" if values else "-r"
        text = option.help.partition(".")[0].replace("\\", "").replace("'", "")
        lines.append(
            f"complete -c shardtrain -n 'not __fish_use_subcommand' -l {name} {taken} -d '{text}'"
        )
    return "\n".join(lines)


SHELLS: dict[str, Callable[[Sequence[str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def script(shell: str, verbs: Sequence[str]) -> str:
    """Return the completion script of a shell. Raises KeyError for an unsupported shell."""
    return SHELLS[shell](verbs)
