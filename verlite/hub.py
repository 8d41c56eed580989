"""The Hugging Face hub: does it answer, and files of its data sets.

Its client repeats requests for most of a minute before it says that there is no network. Asking
first takes seconds.
"""

import functools
import re
from pathlib import Path
from urllib.parse import unquote

WAIT_S = 5.0
WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
NAME = re.compile(f"{WORD}(/{WORD})?")
"""A model: OWNER/NAME, or NAME. Any other text is a path."""
SCHEME = "hf://"
FILE = re.compile(rf"hf://datasets/({WORD}/{WORD})(?:@([^/]+))?/(.+)")
"""Data set, revision and file, as in the URLs of huggingface_hub, pandas and datasets."""
SHORT_REVISIONS = {"~parquet": "refs/convert/parquet"}


class HubError(ValueError):
    """A file cannot be had from the hub. The message goes on after the file's name."""


def endpoint() -> str:
    """Return the hub's address, which HF_ENDPOINT sets."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


@functools.cache
def unreachable() -> str | None:
    """Return why the hub cannot be reached, or None. Asks once a process, for at most WAIT_S."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(endpoint(), timeout=WAIT_S)
    except Exception as error:  # of httpx or requests, by the version of huggingface_hub
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def neighbors(path: str) -> str:
    """Return a sentence about the folder that a missing path would be in; "" if there is none."""
    parent = Path(path).parent
    if parent == Path() or not parent.is_dir():
        return ""
    names = sorted(entry.name for entry in parent.iterdir())[:5]
    return f"The folder {parent} here has {', '.join(names) or 'nothing'}. "


def local_file(name: str) -> Path:
    """Return the path of a file here, or of the copy of hf://datasets/OWNER/NAME/FILE.

    The copy is downloaded to the hub's cache at the first call, and used as it is later.

    Raises:
        HubError: the file cannot be downloaded.
    """
    return _download(name) if name.startswith(SCHEME) else Path(name).expanduser()


@functools.cache
def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    parts = FILE.fullmatch(name)
    if parts is None:
        raise HubError(
            "is not a file of a data set on the hub. Write hf://datasets/OWNER/NAME/FILE, or "
            "hf://datasets/OWNER/NAME@REVISION/FILE"
        )
    repo, revision, file = parts[1], unquote(parts[2] or "main"), parts[3]
    revision = SHORT_REVISIONS.get(revision, revision)
    why = unreachable()
    try:
        return Path(
            hf_hub_download(
                repo,
                file,
                repo_type="dataset",
                revision=revision,
                endpoint=endpoint(),
                local_files_only=why is not None,
            )
        )
    except Exception as error:
        if why is not None:
            raise HubError(
                f"is not in the cache, and the hub at {endpoint()} cannot be reached ({why}). "
                f"Download it where the hub can be reached (hf download {repo} {file} "
                "--repo-type dataset --local-dir FOLDER) and name the file"
            ) from error
        raise HubError(_why(error, repo, revision, file)) from error


def _why(error: Exception, repo: str, revision: str, file: str) -> str:
    """Return why the hub, which can be reached, did not give a file."""
    from huggingface_hub import HfApi, errors

    if isinstance(error, errors.GatedRepoError):
        return f"needs access, which {endpoint()}/datasets/{repo} gives, and then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"was not found: the hub at {endpoint()} has no data set {repo}, or shows it only "
            "after `hf auth login`"
        )
    if isinstance(error, errors.EntryNotFoundError):
        names = HfApi(endpoint()).list_repo_files(repo, repo_type="dataset", revision=revision)
        data = [name for name in names if name.endswith((".parquet", ".jsonl", ".json", ".csv"))]
        listed = ", ".join(data[:8]) + (", ..." if len(data) > 8 else "")
        return f"was not found: {repo} has no {file}. Its data files: {listed or 'none'}"
    return f"cannot be downloaded from {endpoint()}: {reason(error)}"
