"""``shardtrain export --push``: upload a Hugging Face folder as one commit, and compare the hashes of its files.

Requests use ``huggingface_hub``. Predictable errors are raised before the upload. Large files are uploaded
before the commit, so an interrupted command can continue, and nobody sees an incomplete model.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardtrain import __version__
from shardtrain.tools.convert import card
from shardtrain.tools.convert.card import CARD
from shardtrain.tools.hub_client import TOKENS_PAGE, Hub, expected_hash, hash_of_file
from shardtrain.utils.errors import ConfigError, DataError, Problem, ShardtrainError, StorageError
from shardtrain.utils.hub_errors import describe_error
from shardtrain.utils.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
"""Weight files that ``from_pretrained`` would load instead of, or in addition to, the new weights."""


class Push:
    """A repository with write access, and its state before the upload.

    Raises:
        ConfigError: no token exists, the repository is not writable, or it is public although ``private``
            is set.
        StorageError: the hub cannot be reached.
    """

    def __init__(self, repo_id: str, private: bool = False, overwrite_card: bool = False) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        self.repo_id = repo_id
        self._private = private
        self._overwrite_card = overwrite_card
        try:
            validate_repo_id(repo_id)
        except HFValidationError:
            raise self._wrong(
                "is not a valid repository name", "use the form ORGANIZATION/NAME"
            ) from None
        if repo_id.count("/") != 1:
            raise self._wrong("has no organization", "use the form ORGANIZATION/NAME")
        self._hub = Hub(repo_id)
        if not self._hub.token:
            raise ConfigError(
                Problem(
                    "--push",
                    repo_id,
                    rule="requires a token, and none was found",
                    fix=f"set HF_TOKEN to a token with write access ({TOKENS_PAGE}), or log in with hf auth login",
                )
            )
        self._api: HfApi = HfApi(
            self._hub.endpoint,
            token=self._hub.token,
            library_name="shardtrain",
            library_version=__version__,
        )
        # The permissions of a fine-grained token are unknown here, so the hub may still reject it later.
        account = self._ask(self._api.whoami)
        authentication = account.get("auth") or {}
        access_token = authentication.get("accessToken") or {}
        if access_token.get("role") == "read":
            raise self._wrong(
                "is not writable with the current token, which is read-only", self._write_fix()
            )
        self.head, self.theirs, self.card = self._look()

    def _wrong(self, rule: str, fix: str) -> ConfigError:
        return ConfigError(Problem("--push", self.repo_id, rule, fix))

    def _write_fix(self) -> str:
        return f"set HF_TOKEN to a token with write access ({TOKENS_PAGE})"

    def _look(self) -> tuple[str | None, list[str], str | None]:
        """Return commit, file names and card of the repository, or (None, [], None) if it does not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError

        def look() -> Any:
            # The hub also hides private repositories of others. Creating one of the same name fails later.
            try:
                return self._api.model_info(
                    self.repo_id,
                    files_metadata=True,
                    timeout=self._hub.answer_seconds,
                )
            except RepositoryNotFoundError:
                return None

        info = self._ask(look)
        if info is None:
            return None, [], None
        if self._private and info.private is False:
            fix = "remove --private, or make the repository private in its settings on the hub"
            raise self._wrong("exists and is public", fix)
        names = [str(file.rfilename) for file in info.siblings or []]
        text = None
        if CARD in names:
            with tempfile.TemporaryDirectory() as folder:
                path = self._hub.download(CARD, info.sha, Path(folder), force=True)
                text = path.read_text("utf-8", errors="replace")
        return info.sha, names, text

    @property
    def keeps_card(self) -> bool:
        """True if the upload keeps the repository's card.

        Somebody else wrote or changed it, and overwriting is off.
        """
        if self.card is None or self._overwrite_card:
            return False
        return not card.is_own(self.card)

    def send(self, folder: Path, tell: Callable[[str], None] = print) -> str:
        """Upload the files of a folder as one commit, verify their hashes, and return the address of the repository.

        Raises:
            ConfigError: the hub refuses to create the repository or to write to it.
            StorageError: the upload fails. The message names the files that are already stored.
            DataError: the hash of a file in the repository differs from the uploaded file.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        names = sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if _is_sent(path, folder)
        )
        if self.keeps_card and CARD in names:
            names.remove(CARD)
            tell(
                f"{CARD} of {self.repo_id} was not written by shardtrain, so it is kept; --overwrite_card replaces it"
            )
        if self.head is None:
            # The hub's default visibility, unless the user requested a private repository.
            private = True if self._private else None
            self._ask(lambda: self._api.create_repo(self.repo_id, private=private, exist_ok=False))
            suffix = ", private" if private else ""
            tell(f"{self.repo_id}: created{suffix}")

        # Upload large files before the commit that refers to them. If an upload fails, nothing is visible in
        # the repository, and the same command can continue.
        operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = []
        stored: list[str] = []
        for name in names:
            addition = CommitOperationAdd(name, str(folder / name))
            try:
                self._call(
                    partial(
                        self._api.preupload_lfs_files, self.repo_id, [addition], free_memory=False
                    ),
                )
            except ShardtrainError as error:
                raise self._not_all(error, stored, names) from error
            operations.append(addition)
            if addition._is_uploaded:
                stored.append(name)
                tell(f"{name}: {format_bytes((folder / name).stat().st_size)}")

        # One commit adds the new files and deletes the weights of an earlier upload. The hub rejects it if
        # somebody has changed the repository in the meantime.
        for name in self.theirs:
            if _WEIGHTS.fullmatch(name) and name not in names:
                operations.append(CommitOperationDelete(name))
                tell(f"{name}: deleted from {self.repo_id}, because the new weights replace it")
        message = "Upload model with shardtrain"
        try:
            commit = self._call(
                lambda: self._api.create_commit(
                    self.repo_id, operations, commit_message=message, parent_commit=self.head
                )
            )
        except ShardtrainError as error:
            raise self._not_all(error, stored, names) from error
        self._verify(folder, names, commit.oid)
        return f"{self._hub.endpoint}/{self.repo_id}"

    def _verify(self, folder: Path, names: list[str], commit: str) -> None:
        """Compare the hash of every file at the commit. Raise DataError if one differs."""
        info = self._ask(
            lambda: self._api.model_info(self.repo_id, revision=commit, files_metadata=True)
        )
        files = {str(file.rfilename): file for file in info.siblings or []}
        for name in names:
            problem = ""
            if name not in files:
                problem = "is not in"
            elif not _has_hash(folder / name, files[name]):
                problem = "has another hash in"
            if problem:
                raise DataError(
                    f"{name} {problem} {self.repo_id} at {commit}; check its .gitignore, and push again",
                )

    def _not_all(
        self, error: ShardtrainError, stored: list[str], names: list[str]
    ) -> ShardtrainError:
        """Return the error with the files that are already stored. They remain for the next attempt."""
        progress = "no large file is stored"
        if stored:
            progress = f"{', '.join(stored)} of {len(names)} files are stored"
        text = f"{error}; this upload is not visible in {self.repo_id} yet ({progress})"
        return type(error)(f"{text}; run the same command to continue")

    def _ask(self, call: Callable[[], T]) -> T:
        return self._call(lambda: self._hub.ask(call))

    def _call(self, call: Callable[[], T]) -> T:
        """Call the library, and convert its errors to errors with a one-line message."""
        try:
            return call()
        except ShardtrainError:
            raise
        except Exception as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> ShardtrainError:
        """Convert an error of the library."""
        if isinstance(error, ValueError) and "metadata in README.md" in str(error):
            return ConfigError(
                f"the hub rejects the front matter of {CARD} ({describe_error(error)}); correct it",
            )
        response = getattr(error, "response", None)
        if response is None:
            return self._hub.explain(error)
        status = response.status_code
        if status in (401, 403):
            return self._wrong(
                f"is not writable with the current token (status {status})", self._write_fix()
            )
        if status == 404:
            return self._wrong(
                "does not exist, or is not visible with the current token", self._write_fix()
            )
        if status in (409, 412):
            fix = "check the change, and run the same command again"
            return self._wrong("was changed by somebody else during the upload", fix)
        # Status 429 and those from 500 on are temporary, so the hub's client explains them.
        if 400 <= status < 500 and status != 429:
            return StorageError(
                f"{self._hub.endpoint} rejected the upload to {self.repo_id} ({describe_error(error)})",
            )
        return self._hub.explain(error)


def _has_hash(path: Path, facts: Any) -> bool:
    """True if a file has the hash that the hub reports. False if the hub reports none."""
    expected = expected_hash(facts)
    if expected is None:
        return False
    kind, value = expected
    return hash_of_file(path, kind) == value


def _is_sent(path: Path, folder: Path) -> bool:
    """True for files that are not hidden and not in a hidden folder, such as ``.cache``."""
    parts = path.relative_to(folder).parts
    return path.is_file() and not any(part.startswith(".") for part in parts)
