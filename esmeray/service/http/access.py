"""Callers: API keys with what each may do, kept as hashes, and how much.

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

from esmeray.common.errors import ConfigError, expanded
from esmeray.common.text import first_line
from esmeray.service.http.refusals import RefusalError
from esmeray.service.section import CallerSection, is_loopback

PUBLIC = (
    *("/", "/page.js", "/page.css", "/docs", "/openapi.json", "/swagger-ui-bundle.js", "/swagger-ui.css"),
    *("/health", "/ready"),
)
"""Paths without a key: nothing is computed there."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
"""A name or an address, and maybe a port: not evil@127.0.0.1."""


class Key(CallerSection):
    """A caller, known by the hash of its key."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def allows(self, model: str) -> bool:
        return not {"*", model}.isdisjoint(self.models)

    def check_endpoint(self, endpoint: str) -> None:
        if {"*", endpoint}.isdisjoint(self.endpoints):
            raise RefusalError(403, f"this key is not for {endpoint}; ask for one that is")


ANYBODY = Key(name="anybody", sha256="0" * 64)


def new_key(name: str) -> tuple[str, Key]:
    """A random key, to be shown once, and what is kept of it."""
    text = f"esm-{secrets.token_urlsafe(32)}"
    return text, Key(name=name, sha256=_hash(text))


def read_keys(path: str | Path) -> list[Key]:
    """The keys of a file. Raises ConfigError where it can't be read as one."""
    try:
        # An empty file is one without keys: nobody may call until there are some.
        keys = TypeAdapter(list[Key]).validate_python(yaml.safe_load(expanded(path).read_text(encoding="utf-8")) or [])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        # pydantic's own text repeats the value: a key that somebody put there in the open.
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
        raise ConfigError(f"access.keys: {path}: no list of keys ({reason}); see 'esmeray serve key --help'") from error
    if len({key.name for key in keys}) < len(keys):
        raise ConfigError(f"access.keys: {path}: two keys have the same name; rename one")
    return keys


@dataclass
class _Bucket:
    """Remainder of an amount a minute; it fills up steadily, to a minute's amount at most."""

    per_minute: float
    left: float = math.inf
    seen_s: float = field(default_factory=time.monotonic)

    def take(self, amount: float) -> float:
        """Take an amount, or return the seconds until it is there. Of more than a minute's, the rest is on credit."""
        now_s = time.monotonic()
        self.left = min(self.per_minute, self.left + (now_s - self.seen_s) * self.per_minute / 60)
        self.seen_s = now_s
        # A request of more than a minute's amount would otherwise wait for ever.
        needed = min(amount, self.per_minute)
        if self.left < needed:
            return (needed - self.left) * 60 / self.per_minute
        self.left -= amount
        return 0.0


@dataclass
class Access:
    """The keys of the service; ``keys`` None allows everybody everything."""

    _keys: list[Key] | None
    _buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)

    def check_host(self, host: str) -> None:
        """Refuse another host's name (421) where no key is needed: a web page may have its own name stand for us.

        That is DNS rebinding; ``host`` is the header that a browser sends. Without keys the service listens on a
        loopback address alone.
        """
        # The whole header is matched: a parser could take another part of it for the host than the browser did.
        match = _HOST.fullmatch(host)
        if self._keys is None and not (match and is_loopback(match[1].strip("[]").lower())):
            raise RefusalError(
                421, "without keys the service answers as 127.0.0.1 or localhost alone; see 'esmeray serve key --help'"
            )

    def key_of(self, path: str, authorization: str) -> Key:
        """The caller of a request by its header; raises RefusalError (401) where it has no key that is known."""
        if self._keys is None or path in PUBLIC:
            return ANYBODY
        scheme, _, text = authorization.partition(" ")
        # Plain SHA-256, fast: a key has 256 random bits, which nobody finds by trying, and each request is checked.
        digest = _hash(text.strip()) if scheme.lower() == "bearer" else ""
        # All keys are compared, so that the time says nothing.
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.sha256)]
        if not matches:
            problem = "the key is wrong" if digest and text else "a key is needed"
            raise RefusalError(401, f"{problem}: send the header 'Authorization: Bearer KEY'")
        return matches[-1]

    def charge(self, key: Key, unit: str, amount: int) -> None:
        """Take ``requests`` or ``residues`` of the key's rate; raises RefusalError (429) where none is left."""
        per_minute = key.requests_per_minute if unit == "requests" else key.residues_per_minute
        if per_minute is None:
            return
        # In each ingress process its own: they share no memory, so several together let more through.
        wait_s = self._buckets.setdefault((key.name, unit), _Bucket(per_minute)).take(amount)
        if wait_s:
            raise RefusalError(
                429,
                f"the key's {per_minute:,} {unit} a minute are used up; try again later",
                retry_after_s=int(wait_s) + 1,  # rounded up: who comes back a fraction early would be refused again
                limit=f"{unit}_per_minute",
            )


def check_page(host: str, scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuse what a browser sends for the page of another site (403); programs send none of these headers.

    Its answer could not be read there, but it would be computed. A link that leads to a page of ours may be followed.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    is_link = headers.get(b"sec-fetch-mode") == b"navigate" and scope["method"] == "GET" and scope["path"] in PUBLIC
    # Browsers that know no Sec-Fetch-Site send Origin with whatever is not a plain GET.
    is_foreign = headers.get(b"sec-fetch-site") == b"cross-site" and not is_link
    if is_foreign or (origin and origin.partition("://")[2] != host):
        raise RefusalError(403, "the request comes from the page of another site; send it from a program or our page")


def _hash(text: str) -> str:
    # Headers may hold any byte; what is no text is a wrong key, not an error.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
