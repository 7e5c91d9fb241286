"""What an earlier server left in the cache: taken over where it fits, learned anew where it does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def can_be_entered(folder: Path) -> bool:
    """Whether files may lie in the cache's folder. A folder that is not there is no news; one that is no folder, or that
    nobody may enter, is logged once for all that would have been in it."""
    try:
        os.stat(os.path.join(folder, "."))  # a Path would drop the dot, and then a file would do
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("everything is learned anew: the cache cannot be read (%s)", error)
        return False
    return True


def from_cache(path: Path, take_over: Callable[[Path], None], what: str) -> bool:
    """Whether `take_over(path)` took the file over. No file is no news; any other reason not to is logged once.

    A file that nobody may read, one cut short, and one of another model are alike: nobody named it, so the server starts
    as if it were not there. Files that the user names go another way, and their faults end the start.

    Args:
        path: in the cache.
        take_over: raises OSError or ValueError where the file is of no use, and has changed nothing then.
        what: is measured or learned anew, for the log.
    """
    try:
        take_over(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        logger.warning("%s is learned anew: %s", what, error)
        return False
    return True
