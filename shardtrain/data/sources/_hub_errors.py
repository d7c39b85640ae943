"""Convert errors of the hub and its libraries to a ConfigError with a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.data.sources import Request
from shardtrain.utils.errors import ConfigError, Problem, causes
from shardtrain.utils.hub_errors import describe_error


def refusal(
    error: BaseException, request: Request, name: str, arguments: Mapping[str, Any]
) -> ConfigError:
    """Return the error for a dataset that cannot be opened.

    ``arguments`` are those of ``load_dataset``, with the subset ("name") and the split.
    """
    rule, fix = _reason(error, request, name, arguments)
    return ConfigError(Problem(request.option, name, f"{rule} ({describe_error(error)})", fix))


def _reason(
    error: BaseException, request: Request, name: str, arguments: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the rule and the fix for the error."""
    # Look at all chained errors, because the library and the hub client wrap each other's errors. Compare
    # class names, because the classes have moved between versions.
    kinds: set[str] = set()
    statuses = set()
    texts = []
    for link in causes(error):
        kinds.update(kind.__name__ for kind in type(link).__mro__)
        response = getattr(link, "response", None)
        statuses.add(getattr(response, "status_code", None))
        texts.append(str(link))
    text = " ".join(texts).lower()
    if "OfflineModeIsEnabled" in kinds or "offlinemodeisenabled" in text:
        fix = f"run once online, or: hf download {name} --repo-type dataset; then name that folder"
        return "is not in the local cache, and HF_HUB_OFFLINE forbids access to the hub", fix
    if "GatedRepoError" in kinds or "gated dataset" in text:
        fix = f"accept its terms on https://huggingface.co/datasets/{name} and set HF_TOKEN to a token of that account"
        return "is gated", fix
    if 429 in statuses:
        fix = "wait, or set HF_TOKEN for a higher limit"
        return "is not available: too many requests to the hub", fix
    if statuses & {500, 502, 503, 504}:
        fix = "try again later, or name a local copy"
        return "is not available: the hub reports a server error", fix
    if statuses & {401, 403}:
        return "requires permission", "set HF_TOKEN to a token that may read it"
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        fix = "correct the name, or set HF_TOKEN to a token that may read it"
        return "is not a dataset on the hub, or is private", fix
    if "dataset scripts" in text or "custom code" in text:
        return (
            "requires its own code, which is never run",
            "use a copy of it in Parquet or JSON lines",
        )
    if "config name is missing" in text or "builderconfig" in text:
        subset = arguments.get("name") or "by default"
        return f"has no subset {subset}", f"set {request.subset_option} to an existing subset"
    if "split" in text:
        split = arguments.get("split")
        return f'has no split "{split}"', f"set {request.split_option} to an existing split"
    # These are network errors of the system, of requests and of httpx.
    if kinds & {"OSError", "RequestException", "TransportError"}:
        fix = "check the network, set HF_HUB_OFFLINE=1 to use what was downloaded before, or name a local copy"
        return "is not available: the hub cannot be reached", fix
    return "cannot be opened", "correct the name, or name a local copy"
