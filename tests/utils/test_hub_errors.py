"""Errors of the hub: one line that shows neither tokens nor signed addresses."""

from __future__ import annotations

from shardtrain.utils.hub_errors import describe_error


def test_tokens_and_signatures_are_removed(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token-of-the-user")
    error = OSError(
        "sent a-token-of-the-user\nto https://cdn.example/x?X-Amz-Signature=0123&Expires=9 and failed"
    )
    assert describe_error(error) == "OSError: sent *** to https://cdn.example/x and failed"


def test_long_and_empty_errors_are_short() -> None:
    assert describe_error(TimeoutError()) == "TimeoutError"
    assert len(describe_error(ValueError("word " * 1000))) == 300
