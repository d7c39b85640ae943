"""Errors of the hub: one line that shows neither tokens nor signed addresses."""

from __future__ import annotations

from shardtrain.utils.hub_errors import one_line


def test_tokens_and_signatures_are_removed(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token-of-the-user")
    error = OSError("sent a-token-of-the-user\nto https://cdn.example/x?X-Amz-Signature=0123&Expires=9 and failed")
    assert one_line(error) == "OSError: sent *** to https://cdn.example/x and failed"


def test_long_and_empty_errors_are_short() -> None:
    assert one_line(TimeoutError()) == "TimeoutError"
    assert len(one_line(ValueError("word " * 1000))) == 300
