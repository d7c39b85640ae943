"""Secrets are masked in each form in which messages, logs and files contain them."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from shardtrain.utils.redact import one_line, redact, visible

SECRETS = {
    "DB_PASSWORD": "pw'canary\"and\\more/é x",
    "DB_PASS": "plaincanary",
    "MYSQL_PWD": "othercanary",
    "TLS_PRIVATE_KEY": "-----BEGIN KEY-----\ncanaryMIIEvQIBADANBgkq\ncanaryhkiG9w0BAQEF\n-----END KEY-----\n",
    "MY_TOKEN": "canary\tand\x1b[31mcolour",
}
FORMS: dict[str, Callable[[str], str]] = {
    "text": str,
    "repr": repr,
    "json": json.dumps,
    "json with Unicode": lambda secret: json.dumps(secret, ensure_ascii=False),
    "in an exception": lambda secret: str(KeyError(secret)),
    "in an address": quote,
    "in a query": quote_plus,
    "visible": visible,
    "line by line": lambda secret: " | ".join(secret.splitlines()),
    "one line": one_line,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_masked_in_each_form(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRETS[name])
    shown = redact(f"before {FORMS[form](SECRETS[name])} after")
    assert "canary" not in shown
    assert "more" not in shown
    assert "colour" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:word@host/x", "https://***@host/x"),
        # pathlib collapses the slashes of a URL.
        ("https:/me:word@host/x.toml", "https:/***@host/x.toml"),
        ("s3:/AKIA:word@bucket/x", "s3:/***@bucket/x"),
        ("redis://:word@host:6379/0", "redis://***@host:6379/0"),
        ("postgresql+psycopg://me:word@host", "postgresql+psycopg://***@host"),
        ("https://h/x?sv=1&sig=wo%2Frd&se=2", "https://h/x?sv=1&sig=***&se=2"),
        ("'https://h/x?X-Amz-Signature=word'", "'https://h/x?X-Amz-Signature=***'"),
        (
            "https://h/x?X-Amz-Credential=AK%2Fus&X-Goog-Credential=me",
            "https://h/x?X-Amz-Credential=***&X-Goog-Credential=***",
        ),
        (
            "https://h/x?Policy=eyJ_&Key-Pair-Id=K2JC&Expires=5",
            "https://h/x?Policy=***&Key-Pair-Id=***&Expires=5",
        ),
        ("https://h/x?region=eu&credential=word", "https://h/x?region=eu&credential=***"),
        ("https://h/x?token=word", "https://h/x?token=***"),
        ("https://h/x?a=1&access_token=word&b=2", "https://h/x?a=1&access_token=***&b=2"),
        ("https://h/x#id_token=word", "https://h/x#id_token=***"),
        ("https://h/x?api-key=word", "https://h/x?api-key=***"),
        ("https://h/x?key=word", "https://h/x?key=***"),
        ("https://h/x?client_secret=word", "https://h/x?client_secret=***"),
        ("https://h/x?password=word", "https://h/x?password=***"),
        ("https://abcdefghij0123456789@h/x", "https://***@h/x"),
        ("https://hooks.slack.com/services/T0/B0/word", "https://hooks.slack.com/services/***"),
        ("https://discord.com/api/webhooks/1/word", "https://discord.com/api/webhooks/***"),
        ("https://git@host/x?page=2&keys=3", "https://git@host/x?page=2&keys=3"),
        ("abfss://container@account.dfs.core.windows.net/x",) * 2,
        ("a eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.word b", "a *** b"),
        ("tcp://host:29500/@x", "tcp://host:29500/@x"),
        ("http://[::1]:29500/x", "http://[::1]:29500/x"),
        ("C:/folder/a:b", "C:/folder/a:b"),
        ("git@host:folder/x", "git@host:folder/x"),
    ],
)
def test_a_secret_in_an_address_is_masked(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer word", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic d29yZA=='}", "{'authorization': 'Basic ***'}"),
        ("sent bearer abcdefghij0123456789", "sent bearer ***"),
        ("the bearer of a token", "the bearer of a token"),
        ("AccountName=me;AccountKey=word==;x=1", "AccountName=me;AccountKey=***;x=1"),
        ("SharedAccessSignature=sv=1&sig=word", "SharedAccessSignature=***"),
        ("npm_" + "a1" * 18, "***"),
    ],
)
def test_a_credential_in_a_header_or_connection_string_is_masked(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_the_current_directory_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PWD", "OLDPWD"):
        monkeypatch.setenv(name, "/home/me/project")
    assert redact("in /home/me/project") == "in /home/me/project"
