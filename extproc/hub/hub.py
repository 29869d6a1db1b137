"""A Hugging Face hub, or a mirror of one, by the library huggingface_hub: what a model has, and its files.

Each error says what to do; those of the disk are OSErrors. The library retries by itself, so whoever calls bounds the
time (`deadline`) and the size of files (`extproc.hub.commands`).
"""

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from extproc.errors import KvmeshError

PUBLIC_HUB = "https://huggingface.co"
MOST_FILE_BYTES = 256 << 20  # ten times the largest tokenizer that is known
RING_AGAIN_SECONDS = 5.0  # an exception of a signal is lost where Python runs a finalizer
SETTINGS = {  # of the library, read when it is imported
    "HF_HUB_DISABLE_XET": "1",  # plain downloads from where the hub sends one: mirrors and proxies know no other
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",  # only a token that was given to us
    "HF_HUB_VERBOSITY": "error",  # what it would warn of, the error says
}
FORBIDDEN, UNAUTHORIZED, TOO_MANY = 403, 401, 429


class HubError(KvmeshError):
    """The hub does not give a model; the message says why and what to do."""


class UnavailableHubError(HubError):
    """The hub does not answer, or too slowly: it may later."""


class NoRevisionError(HubError):
    """The hub has the model, and no such branch, tag or commit."""


class DamagedFileError(HubError):
    """A file did not arrive as the hub says that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a model, as the hub describes it; what a mirror does not say is None."""

    path: str
    size: int | None  # bytes
    git_sha1: str | None  # of the blob; for files that are kept in git
    sha256: str | None  # for large files


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model at one commit."""

    repository: str
    commit: str
    files: Sequence[HubFile]


class Hub:
    """One hub, asked with one token or none."""

    def __init__(self, endpoint: str, *, token: str | None) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            from huggingface_hub import HfApi  # noqa: PLC0415 - takes half a second, and reads the settings
        except ImportError as error:
            raise HubError(f"{error}: pip install 'kvmesh[models]'") from error
        self.endpoint = endpoint.rstrip("/")
        self._token: str | bool = token or False
        self._api = HfApi(endpoint=self.endpoint, token=self._token, library_name="kvmesh")

    def model(self, repository: str, revision: str | None) -> HubModel:
        """Look up which commit a revision is, and its files. Raise HubError."""
        with self._translated(repository, revision):
            found = self._api.model_info(repository, revision=revision, files_metadata=True, timeout=10)
        if not found.sha:
            raise HubError(f"{self.endpoint} names no commit of {repository}: is it a Hugging Face hub or a mirror?")
        return HubModel(
            repository=repository, commit=found.sha, files=[_file(each) for each in found.siblings or () if each]
        )

    def download(self, model: HubModel, file: HubFile, folder: Path) -> Path:
        """Fetch one file into `folder` and check it. Raise HubError, DamagedFileError for one that differs."""
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - as above

        if file.size is not None and file.size > MOST_FILE_BYTES:
            raise HubError(f"{file.path} of {model.repository} has {file.size} bytes: no tokenizer has that many")
        with self._translated(model.repository, model.commit):
            path = hf_hub_download(
                model.repository,
                file.path,
                revision=model.commit,
                local_dir=folder,
                cache_dir=folder / ".cache",
                token=self._token,
                endpoint=self.endpoint,
                library_name="kvmesh",
            )
        return _checked(Path(path), file, model)

    @contextmanager
    def _translated(self, repository: str, revision: str | None) -> Iterator[None]:
        import httpx2  # noqa: PLC0415 - comes with the library
        from huggingface_hub import errors  # noqa: PLC0415 - as above

        where = f"{repository}{f' at {revision}' if revision else ''}"
        try:
            yield
        except errors.GatedRepoError as error:
            raise HubError(f"{where}: {self._gated(repository)}") from error
        except errors.RevisionNotFoundError as error:
            raise NoRevisionError(
                f"{where}: {self.endpoint} has the model, but no such branch, tag or commit"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise HubError(f"{where}: {self.endpoint} does not have it: {self._access()}") from error
        except errors.OfflineModeIsEnabled as error:
            raise HubError(f"{where}: HF_HUB_OFFLINE is set, so the hub is not asked") from error
        except (errors.LocalEntryNotFoundError, OSError, httpx2.HTTPError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk: those of the network come wrapped
            raise self._failure(where, error) from error
        except Exception as error:  # a page of a proxy that says 200, an address that is none
            raise HubError(
                f"{where}: {self.endpoint} does not answer as a Hugging Face hub or a mirror does "
                f"({type(error).__name__}: {str(error)[:200]})"
            ) from error

    def _failure(self, where: str, error: BaseException) -> HubError:
        """Say what is wrong by the innermost reason: the library wraps connection errors into others."""
        from huggingface_hub import errors  # noqa: PLC0415 - as above

        causes = list(_causes(error))
        answered = next((each for each in causes if isinstance(each, errors.HfHubHTTPError)), None)
        if answered is not None:
            status = answered.response.status_code
            if status in (UNAUTHORIZED, FORBIDDEN):
                return HubError(f"{where}: {self.endpoint} answers {status}: {self._access()}")
            if status < 500 and status != TOO_MANY:
                return HubError(f"{where}: {self.endpoint} answers {status} for {answered.response.url.path}")
            return UnavailableHubError(f"{where}: {self.endpoint} answers {status}: try again later")
        text = " ".join(str(each) for each in causes)
        if "Consistency check failed" in text:
            return DamagedFileError(f"{where}: {self.endpoint} sent a file that is cut off")
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return HubError(
                f"{where}: the certificate of {self.endpoint} is not trusted: name its authority by SSL_CERT_FILE"
            )
        last = str(causes[-1]) or type(causes[-1]).__name__
        return UnavailableHubError(
            f"{where}: {self.endpoint} cannot be reached ({last}): is it the right hub, and does a network policy or "
            "a proxy keep it away?"
        )

    def _gated(self, repository: str) -> str:
        if self._token:
            return f"it is gated, and the token's account has no access: ask for it at {self.endpoint}/{repository}"
        return "it is gated: accept its terms on the hub, and give a token (HF_TOKEN, --hub-token-file)"

    def _access(self) -> str:
        """A hub does not tell what may not be seen from what is not there."""
        if self._token:
            return "is the token right, and may its account see this model, if there is such a one?"
        return "there is no such model, or it needs a token (HF_TOKEN, --hub-token-file)"


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    return HubFile(
        path=sibling.rfilename,
        size=sibling.size,
        git_sha1=None if lfs else sibling.blob_id,
        sha256=lfs.sha256 if lfs else None,
    )


def _checked(path: Path, file: HubFile, model: HubModel) -> Path:
    """Compare a file with what the hub says of it: nothing in between may have changed it."""
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    sums = {
        "size": (file.size, len(content)),
        "checksum": (file.sha256, hashlib.sha256(content).hexdigest()),
        "git checksum": (file.git_sha1, git.hexdigest()),
    }
    for what, (said, found) in sums.items():
        if said is not None and said != found:
            raise DamagedFileError(
                f"{model.repository}: {file.path} arrived with another {what} ({found}) than the hub says ({said})"
            )
    if file.sha256 is None and file.git_sha1 is None and path.suffix == ".json":
        try:
            msgspec.json.decode(content)
        except msgspec.MsgspecError as error:
            raise DamagedFileError(f"{model.repository}: {file.path} arrived as no JSON ({error})") from error
    return path


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class _TooLate(BaseException):
    """Not an Exception: what the library catches to try again must not catch this."""


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise UnavailableHubError once `seconds` are over, whatever the library waits for. In the main thread only."""

    def ring(*_: object) -> None:
        raise _TooLate

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN_SECONDS)
    try:
        yield
    except _TooLate:
        raise UnavailableHubError(f"{what}: not done after {seconds:g} s: the hub is too slow") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
