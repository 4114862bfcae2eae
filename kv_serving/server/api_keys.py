"""Who may ask, and whose cache is whose.

Contract: a key is compared with every key that there is, in constant time, and only digests are kept. Each key is a
tenant: what was cached for one is never found by another, whatever salts they choose.
"""

import hashlib
import hmac
from collections.abc import Sequence

from kv_common.errors import JaxkvError


class ApiKeyError(JaxkvError):
    """A key that protects nothing."""


class ApiKeys:
    """The keys of a server; with none, anyone may ask. Raises ApiKeyError for an empty one."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(key.strip() for key in keys):
            raise ApiKeyError("an API key is empty: give at least one character, or leave it out")
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, authorization: bytes | None) -> str | None:
        """The tenant that the value of an `Authorization` header names; None where it may not ask."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return digest.hex() if any(matches) and scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
