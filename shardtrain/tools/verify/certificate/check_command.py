"""``shardtrain verify --check``: report if a certificate still applies to a configuration.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
import json

from shardtrain.config import Loaded, certificate


def main(path: str, loaded: Loaded, is_json: bool) -> int:
    """Print the state of a certificate and the changes since it was written. Return 0 if it applies, else 4.

    Raises:
        ConfigError: the file does not exist, is not a certificate, or is damaged.
    """
    state = certificate.check(path, loaded, "--check")
    status = 0 if state.applies else 4
    if is_json:
        print(
            json.dumps(
                {**dataclasses.asdict(state), "applies": state.applies, "exit_code": status},
                indent=2,
            )
        )
        return status
    if not state.holds:
        print(
            f"{path}: a number differs or a requested dimension was not checked when it was written"
        )
    for change in state.changes:
        print(f"{path}: {change}")
    if state.applies:
        print(f"{path}: applies, written {state.date[:10]}, sha256 {state.sha256[:12]}")
    return status
