"""Fetches the tokenizer files of models into a cache, keeps what is there and whole, and mends what is not."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from extproc.hub.hub import (
    DamagedFileError,
    Hub,
    HubError,
    HubFile,
    HubModel,
    NoRevisionError,
    UnavailableHubError,
    deadline,
)
from extproc.hub.kept_folder import (
    CacheError,
    FetchRecord,
    FileSum,
    as_json,
    damage,
    link_to,
    new_folder,
    read_record,
    remove_old,
    sha256_of,
    write_record,
)
from extproc.hub.token_files import token_files
from extproc.hub.wanted_models import COMMIT, WantedModel
from extproc.models.model_folders import TOKENIZER_FILES

TRIES = 3
MOST_FILES = 64  # of one model: real ones have fifteen at most, and as many chat templates as they like
BACKOFF_SECONDS = 1.0  # doubled after each try


class Outcome(StrEnum):
    """What became of one model."""

    FETCHED = "fetched"
    KEPT = "kept"  # it was there, whole
    MENDED = "mended"  # it was there, damaged, and was fetched again
    FAILED = "failed"  # what was there before is as it was


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What became of a model, for people and programs."""

    model: WantedModel
    folder: Path
    outcome: Outcome
    record: FetchRecord | None  # of what is there now
    reason: str = ""  # why it was fetched again, or failed

    def line(self) -> str:
        """Say it in one line."""
        what = f": {self.reason}" if self.reason else ""
        at = f" ({self.record.repository} at {self.record.commit[:12]})" if self.record else ""
        return f"{self.outcome} {self.model.served}{at}{what}"

    def as_json(self) -> dict[str, Any]:
        """Say it with stable field names."""
        return {
            "model": self.model.served,
            "folder": str(self.folder),
            "outcome": self.outcome.value,
            "reason": self.reason,
            **({"fetched": as_json(self.record)} if self.record else {}),
        }


def fetch(
    model: WantedModel,
    into: Path,
    *,
    hub: Callable[[], Hub],
    renew: bool = False,
    offline: bool = False,
    timeout_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Have one model in the cache `into`, as it was asked for. Nothing is raised: the outcome says what went wrong.

    The commit of the first time is kept until `renew` or another revision is asked for, so that replicas agree, and a
    restart needs no hub.
    """
    folder = model.folder(into)
    record = read_record(folder)
    fits = record is not None and (record.repository, record.revision) == (model.repository, model.revision)
    wrong = damage(folder, record) if record is not None and fits else []
    if record is not None and fits and not wrong and (offline or not renew):
        return Fetched(model=model, folder=folder, outcome=Outcome.KEPT, record=record)
    reason = "; ".join(wrong)
    try:
        if offline:
            raise HubError(reason or "it is not in the cache, and the hub is not asked (HF_HUB_OFFLINE)")
        pinned = record.commit if record is not None and fits and not renew else model.revision
        with deadline(timeout_seconds, model.repository):
            new = _with_retries(lambda: _fetch(hub(), model, pinned, folder), sleep)
    except (HubError, CacheError) as error:
        told = f"{error} ({reason})" if wrong and not offline else str(error)
        if wrong and isinstance(error, NoRevisionError):
            told += "; its history was changed: --renew takes what the branch is now"
        return Fetched(model=model, folder=folder, outcome=Outcome.FAILED, record=record, reason=told)
    except OSError as error:
        told = f"it cannot be kept in {into}: {error.strerror}"
        return Fetched(model=model, folder=folder, outcome=Outcome.FAILED, record=record, reason=told)
    outcome = Outcome.MENDED if wrong else Outcome.KEPT if fits and new == record else Outcome.FETCHED
    return Fetched(model=model, folder=folder, outcome=outcome, record=new, reason=reason)


def _with_retries(work: Callable[[], FetchRecord], sleep: Callable[[float], None]) -> FetchRecord:
    for tries_left in range(TRIES - 1, -1, -1):
        try:
            return work()
        except (UnavailableHubError, DamagedFileError):
            if not tries_left:
                raise
            sleep(BACKOFF_SECONDS * 2 ** (TRIES - 1 - tries_left))
    raise AssertionError


def _fetch(hub: Hub, model: WantedModel, revision: str | None, link: Path) -> FetchRecord:
    found = hub.model(model.repository, revision)
    if revision is not None and COMMIT.fullmatch(revision) and found.commit != revision:
        raise HubError(f"{model.repository}: the hub gives commit {found.commit} for commit {revision}")
    files = _chosen(found)
    folder = new_folder(link, found.commit)
    try:
        sums = {file.path: _sum(hub.download(found, file, folder)) for file in files}
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's own notes
        record = FetchRecord(
            repository=model.repository,
            revision=model.revision,
            commit=found.commit,
            endpoint=hub.endpoint,
            files=sums,
        )
        write_record(folder, record)
        link_to(link, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    remove_old(link)
    return record


def _chosen(model: HubModel) -> Sequence[HubFile]:
    paths = token_files(file.path for file in model.files)
    if not any(fnmatchcase(path, pattern) for path in paths for pattern in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        raise HubError(f"{model.repository} has none of {names}: its pods can be asked for tokens (`tokens: render`)")
    if len(paths) > MOST_FILES:
        raise HubError(f"{model.repository} has {len(paths)} files of a tokenizer: no model has more than {MOST_FILES}")
    return [file for file in model.files if file.path in paths]


def _sum(path: Path) -> FileSum:
    return FileSum(bytes=path.stat().st_size, sha256=sha256_of(path))
