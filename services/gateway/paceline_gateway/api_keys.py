"""API keys: who a client is, from the `authorization` that it sends. Both doors ask here.

The file has one `name: key` per line, and # comments. It is read again when it changes, so that keys can be rotated
without a restart; a file that became unusable leaves the old keys in force. Keys are kept as hashes only, and no
message, log line or `repr` has one in it, nor a line of the file, which might be a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigurationError, Unauthenticated

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
_FIELD = "api_keys_file"
_HEADER = "authorization"
_CHECK_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]+")
_HOW = "send the header 'Authorization: Bearer KEY', on gRPC the metadata 'authorization: Bearer KEY'"

_Stamp = tuple[int, int, int, int]


class ApiKeys:
    """The keys that clients may show. Use `load`.

    Args:
        path: the file; None asks for no key.
        clock: seconds, for how often the file is looked at.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._tenants: dict[bytes, str] = {}
        self._stamp: _Stamp | None = None
        self._trouble = ""
        self._checked_at = clock()
        if path is not None:
            self._stamp = _stamp(path)
            self._tenants = _read(path)

    @classmethod
    def load(cls, path: Path | None) -> ApiKeys:
        """Reads a file of keys.

        Args:
            path: one `name: key` per line; None: no key is asked for.

        Raises:
            ConfigurationError: the file cannot be read, is empty, or has a line that is wrong; names the line's number.
        """
        return cls(path)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._tenants)} keys)" if self.required else "ApiKeys(none required)"

    @property
    def required(self) -> bool:
        """Whether clients must show a key."""
        return self._path is not None

    def tenant(self, authorization: str | None) -> str:
        """The name of the key that a client shows; empty where no keys are required.

        Args:
            authorization: value of the header or metadata of that name; None if it was not sent.

        Raises:
            Unauthenticated: there is no key in it, or not one of ours.
        """
        if self._path is None:
            return ""
        self._refresh(self._path)
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if not key or scheme.lower() != "bearer":
            raise Unauthenticated(f"an API key is required: {_HOW}", field=_HEADER)
        shown = _digest(key)
        tenant: str | None = None
        # Every key is compared, and in constant time: how long it takes tells nothing about any of them.
        for digest, name in self._tenants.items():
            if hmac.compare_digest(digest, shown):
                tenant = name
        if tenant is None:
            raise Unauthenticated(f"the API key is not known here; {_HOW}, with a key that is in force", field=_HEADER)
        return tenant

    def _refresh(self, path: Path) -> None:
        """Reads the file again if it is another one than last time; a mounted secret changes by its link."""
        now = self._clock()
        if now - self._checked_at < _CHECK_EVERY_S:
            return
        self._checked_at = now
        try:
            stamp = _stamp(path)
            if stamp == self._stamp:
                return
            self._tenants = _read(path)
        except ConfigurationError as error:
            # Read again next time: a file that was shut to its reader looks the same when it is open.
            self._stamp = None
            if error.message != self._trouble:
                self._trouble = error.message
                logger.error("the old API keys stay in force: %s", error.message)
            return
        self._stamp, self._trouble = stamp, ""
        logger.info("API keys read again", extra={"keys": len(self._tenants)})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp(path: Path) -> _Stamp:
    """What tells one state of the file from the next, at the price of one system call."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _read(path: Path) -> dict[bytes, str]:
    """Hash of each key -> its name."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError:
        raise ConfigurationError(f"the API keys in {path} are no UTF-8 text", field=_FIELD) from None
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, key = _parse(line, f"line {number} of {path}")
            if name in tenants.values():
                raise ConfigurationError(f"line {number} of {path} has the name of an earlier line", field=_FIELD)
            if _digest(key) in tenants:
                raise ConfigurationError(f"line {number} of {path} has the key of an earlier line", field=_FIELD)
            tenants[_digest(key)] = name
    if not tenants:
        raise ConfigurationError(f"{path} has no API key; write one `name: key` on each line", field=_FIELD)
    return tenants


def _parse(line: str, where: str) -> tuple[str, str]:
    name, colon, key = (part.strip() for part in line.partition(":"))
    if not colon:
        raise ConfigurationError(f"{where} is no `name: key`", field=_FIELD)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the name in {where} must have 1 to 64 of the characters A-Z a-z 0-9 _ . -", field=_FIELD
        )
    if len(key) < MIN_KEY_CHARS:
        raise ConfigurationError(
            f"the key in {where} has {len(key)} characters; at least {MIN_KEY_CHARS}", field=_FIELD
        )
    if not _KEY.fullmatch(key):
        raise ConfigurationError(f"the key in {where} must have visible ASCII characters only", field=_FIELD)
    return name, key


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the API keys in {path}: {error.strerror or type(error).__name__}", field=_FIELD
    )
