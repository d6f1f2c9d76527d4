"""Threads that the system may refuse: at a container's limit of processes Python says so by an error that defects have, too."""

from __future__ import annotations

import errno
import threading


def refused(error: RuntimeError) -> OSError:
    """What the system refused, as it says so itself: it is tried again, and is no defect of ours."""
    return OSError(errno.EAGAIN, f"a thread cannot be started ({error}); raise the limit of processes")


def start(thread: threading.Thread) -> None:
    """@raises OSError where the system has no more of them now"""
    try:
        thread.start()
    except RuntimeError as error:
        raise refused(error) from error
