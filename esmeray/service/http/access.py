"""API keys: who may call which models and endpoints, and how often.

In: a YAML file with a list of keys: name, sha256 (hex), models and endpoints (lists; '*' for all), requests_per_minute
and residues_per_minute. Out: the key of a request, or a refusal. Without a file everything is allowed.
"""

import hashlib
import hmac
import math
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from starlette.types import Scope

from esmeray.common.errors import ConfigError, expanded, first_line
from esmeray.service.http.refusals import RefusalError
from esmeray.service.section import CallerSection, is_loopback

PUBLIC = (
    *("/", "/page.js", "/page.css", "/docs", "/openapi.json", "/swagger-ui-bundle.js", "/swagger-ui.css"),
    *("/health", "/ready"),
)
"""Paths that need no key, since nothing is computed there."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
"""Host name or address with an optional port; evil@127.0.0.1 does not match."""


class Key(CallerSection):
    """Caller, identified by the hash of its key."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def allows(self, model: str) -> bool:
        return not {"*", model}.isdisjoint(self.models)

    def check_endpoint(self, endpoint: str) -> None:
        if {"*", endpoint}.isdisjoint(self.endpoints):
            raise RefusalError(403, f"this key is not for {endpoint}; ask for one that is")


ANYBODY = Key(name="anybody", sha256="0" * 64)


def new_key(name: str) -> tuple[str, Key]:
    """Return a random key, which is shown once, and its record, which is kept."""
    text = f"esm-{secrets.token_urlsafe(32)}"
    return text, Key(name=name, sha256=_hash(text))


def read_keys(path: str | Path) -> list[Key]:
    """Read a file of keys. Raises ConfigError if it can't be read."""
    try:
        # An empty file holds no keys: all calls are refused until it has some.
        keys = TypeAdapter(list[Key]).validate_python(yaml.safe_load(expanded(path).read_text(encoding="utf-8")) or [])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        # pydantic's own text would repeat the value, e.g. a key in plain text.
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
        raise ConfigError(
            f"access.keys: {path}: is not a list of keys ({reason}); see 'esmeray serve key --help'"
        ) from error
    if len({key.name for key in keys}) < len(keys):
        raise ConfigError(f"access.keys: {path}: two keys have the same name; rename one")
    return keys


@dataclass
class _Bucket:
    """Token bucket: it fills steadily, up to the amount of one minute."""

    per_minute: float
    left: float = math.inf
    seen_s: float = field(default_factory=time.monotonic)

    def spend(self, amount: float) -> float:
        """Take an amount, or return the seconds until it is available. More than a minute's amount is on credit."""
        now_s = time.monotonic()
        self.left = min(self.per_minute, self.left + (now_s - self.seen_s) * self.per_minute / 60)
        self.seen_s = now_s
        # Otherwise a request of more than a minute's amount would never be accepted.
        needed = min(amount, self.per_minute)
        if self.left < needed:
            return (needed - self.left) * 60 / self.per_minute
        self.left -= amount
        return 0.0


@dataclass
class Access:
    """Keys of the service; None allows everybody everything."""

    _keys: list[Key] | None
    _buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)

    def check_host(self, host: str) -> None:
        """Refuse (421) a ``Host`` header that is not a loopback name if the service has no keys.

        Otherwise a web page whose own name resolves to 127.0.0.1 (DNS rebinding) could call the service. Without keys
        it listens on a loopback address only.
        """
        # Matches the whole header: a parser might see another host in it than the browser did.
        match = _HOST.fullmatch(host)
        if self._keys is None and not (match and is_loopback(match[1].strip("[]").lower())):
            raise RefusalError(
                421, "without keys the service answers as 127.0.0.1 or localhost only; see 'esmeray serve key --help'"
            )

    def key_of(self, path: str, authorization: str) -> Key:
        """Return the caller of a request by its header. Raises RefusalError (401) without a known key."""
        if self._keys is None or path in PUBLIC:
            return ANYBODY
        scheme, _, text = authorization.partition(" ")
        # Plain SHA-256, since every request is hashed: a key has 256 random bits, so a slow hash adds no security.
        digest = _hash(text.strip()) if scheme.lower() == "bearer" else ""
        # Compare with all keys, so that the time reveals nothing.
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.sha256)]
        if not matches:
            problem = "the key is wrong" if digest and text else "a key is needed"
            raise RefusalError(401, f"{problem}: send the header 'Authorization: Bearer KEY'")
        return matches[-1]

    def charge(self, key: Key, unit: str, amount: int) -> None:
        """Charge the key's rate of ``requests`` or ``residues``. Raises RefusalError (429) if it is used up."""
        per_minute = key.requests_per_minute if unit == "requests" else key.residues_per_minute
        if per_minute is None:
            return
        # One bucket per ingress process. They share no memory, so several processes together allow more.
        wait_s = self._buckets.setdefault((key.name, unit), _Bucket(per_minute)).spend(amount)
        if wait_s:
            raise RefusalError(
                429,
                f"the key's {per_minute:,} {unit} a minute are used up; try again later",
                retry_after_s=int(wait_s) + 1,  # rounded up: a retry a fraction early would be refused again
                limit=f"{unit}_per_minute",
            )


def check_page(host: str, scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuse (403) what a browser sends for the page of another site. Programs send none of these headers.

    The other site could not read the answer, but it would be computed. Links to our pages are allowed.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    is_link = headers.get(b"sec-fetch-mode") == b"navigate" and scope["method"] == "GET" and scope["path"] in PUBLIC
    # Browsers without Sec-Fetch-Site send Origin with everything but a plain GET.
    is_foreign = headers.get(b"sec-fetch-site") == b"cross-site" and not is_link
    if is_foreign or (origin and origin.partition("://")[2] != host):
        raise RefusalError(403, "the request comes from the page of another site; send it from a program or our page")


def _hash(text: str) -> str:
    # Headers may hold any byte; invalid UTF-8 is a wrong key, not an error.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
