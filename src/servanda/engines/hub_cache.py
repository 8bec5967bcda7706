# Models of the Hugging Face Hub, in the cache that its own tools fill.
#
# Nothing is downloaded unless SERVANDA_HUB_DOWNLOAD=1 is set: a contract that someone else wrote
# must not fetch what it names.

from __future__ import annotations

import os
from pathlib import Path

from servanda.contract.hub_name import hub_parts
from servanda.engines.foreign_code import code_is_refused, is_allowed
from servanda.errors import MeasurementError

DOWNLOAD = "SERVANDA_HUB_DOWNLOAD"
# what engines read of a repository; pickles, of which no engine reads any, are left out
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def cached_folder(model: str) -> Path:
    """The folder of a model's snapshot, whose name is the commit.

    Args:
        model: hf://ORGANISATION/NAME, or with @REVISION: a branch, a tag or a commit.

    Raises:
        MeasurementError: another form of name, no huggingface_hub, not in the cache, or the
            download failed.
    """
    parts = hub_parts(model)
    if parts is None:
        raise MeasurementError(
            f"{model!r} is no name of a model on the Hub",
            hint="write hf://ORGANISATION/NAME, or hf://ORGANISATION/NAME@REVISION",
        )
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise MeasurementError(
            f"{model!r} is read by huggingface_hub, which is not installed",
            hint="pip install huggingface_hub, or name the model's folder",
        ) from None
    repo, revision = parts
    download = os.environ.get(DOWNLOAD) == "1" and (
        not code_is_refused() or is_allowed(constants.ENDPOINT)
    )
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, local_files_only=not download, allow_patterns=[*_FILES]
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        command = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
        if download and not constants.HF_HUB_OFFLINE:
            reason = str(error).strip().splitlines()[0]
            raise MeasurementError(
                f"{model!r} could not be downloaded: {reason}",
                hint=f"try {command}, whose cache is read here",
            ) from error
        raise MeasurementError(
            f"{model!r} is not in the Hub's cache {constants.HF_HUB_CACHE}{_there(repo)}",
            hint=f"run {command}, or set {DOWNLOAD}=1 to let Servanda download it",
        ) from None
    return Path(folder)


def missing_hint(folder: Path) -> str:
    """What completes a snapshot of the cache that lacks files; "" for any other folder."""
    repo = repository_of(folder)
    command = f"hf download {repo} --revision {folder.name}"
    return f"the download is not complete: run {command}" if repo else ""


def repository_of(folder: Path) -> str:
    """The repository whose snapshot a folder is; "" for any other folder."""
    whole = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not whole.startswith("models--"):
        return ""
    return whole.removeprefix("models--").replace("--", "/", 1)


def _there(repo: str) -> str:
    """What the cache has of a repository."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"))
    refs = place / "refs"
    names = sorted(p.relative_to(refs).as_posix() for p in refs.rglob("*") if p.is_file())
    commits = sorted(p.name for p in (place / "snapshots").glob("*"))
    if not commits:
        return ""
    return f", which has of it {', '.join([*names, *(commit[:12] for commit in commits)])}"
