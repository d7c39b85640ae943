"""TCP ports that processes of a run listen on."""

from __future__ import annotations

RENDEZVOUS_PORT = 29500
"""Port of the rendezvous on the first host, unless a user sets another. The default of torchrun and of PyTorch."""
