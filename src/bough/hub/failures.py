"""Translates errors of the hub's client to ours."""

import contextlib
import errno
from collections.abc import Generator

from bough.errors import BoughError, DownloadFailed, ModelNotFound, ResourceError
from bough.hub.names import RepoName

LOG_IN = "set HF_TOKEN to a token of yours, or run: hf auth login"


@contextlib.contextmanager
def explained(name: RepoName, site: str) -> Generator[None]:
    """Translate errors that the client raises for a repository."""
    from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import logging

    # Our error replaces the client's log lines, which would break a progress bar.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except BoughError:
        raise
    except HTTPError as error:
        raise _explain(error, name, site) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{name.repo!r} cannot be a repository: {error}") from error
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(
            f"{name} was not fetched: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk is full: {name} could not be stored", "make room, or set HF_HOME to another disk"
            ) from error
        raise DownloadFailed(
            f"{name} could not be stored: {error}", "set HF_HOME to a folder you may write"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _explain(error: Exception, name: RepoName, site: str) -> BoughError:
    from huggingface_hub import errors

    page = f"{site}/{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(
            f"{name.repo} is gated: its owner wants you to accept a licence first",
            f"accept it at {page} and then {LOG_IN}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"{name.repo} was not found at {site}: it does not exist or is private",
            f"check the spelling; for a private one {LOG_IN}",
        )
    if isinstance(error, errors.DisabledRepoError):
        return ModelNotFound(f"{name.repo} was disabled by {site}", f"see {page}")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFound(
            f"{name.repo} lost a file while it was being fetched", "run the same command again"
        )
    response = getattr(error, "response", None)
    if response is None:
        return DownloadFailed(
            f"{site} cannot be reached: {str(error) or type(error).__name__}",
            "check the network; what is in the cache needs none: HF_HUB_OFFLINE=1",
        )
    if response.status_code == 401:
        return ModelNotFound(f"{site} refused the token it was sent (401)", LOG_IN)
    if response.status_code == 429:
        return DownloadFailed(f"{site} asks to slow down (429)", f"wait a few minutes; or {LOG_IN}")
    return DownloadFailed(
        f"{site} answered {response.status_code} for {name.repo}", "try again later; what was fetched is kept"
    )
