"""Ends a process whose launcher was killed: a launcher that dies of SIGKILL can stop nobody.

A thread compares the parent's process id with the one it was told. That works on every system, needs no privileges and
goes on while the event loop or a model is busy.
"""

from __future__ import annotations

import logging
import os
import signal
import threading

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_GRACE_S = 5.0
EXIT_CODE_ORPHANED = 75


def end_with_parent(parent_pid: int) -> threading.Thread:
    """Sends SIGTERM to this process when its parent is not `parent_pid`, and ends it for good five seconds later.

    Returns:
        The watching thread, a daemon.
    """
    watcher = threading.Thread(target=_watch, args=(parent_pid,), name="parent watch", daemon=True)
    watcher.start()
    return watcher


def _watch(parent_pid: int) -> None:
    never = threading.Event()
    while os.getppid() == parent_pid:
        never.wait(_POLL_S)
    logger.warning("the launcher is gone; ending", extra={"parent_pid": parent_pid})
    os.kill(os.getpid(), signal.SIGTERM)
    never.wait(_GRACE_S)
    os._exit(EXIT_CODE_ORPHANED)
