"""Access control: keys, their scopes and rates, and refusal of settings that would leave the service open."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from esmeray.common.errors import ConfigError
from esmeray.service.http.access import PUBLIC, new_key, read_keys
from esmeray.service.section import ServiceSettings
from esmeray.train_config.loading import load_settings
from tests.service.serving import Serving, problem

SCOPES: dict[str, dict[str, Any]] = {
    "all": {},
    "vectors": {"endpoints": ["embeddings"]},
    "places": {"models": ["places"]},
    "slow": {"requests_per_minute": 2},
    "small": {"residues_per_minute": 10},
}


def write_keys(path: Path) -> dict[str, str]:
    """Write a file with a key per scope; return the keys by name."""
    made = {name: new_key(name) for name in SCOPES}
    keys = [key.model_copy(update=SCOPES[name]).model_dump(exclude_none=True) for name, (_, key) in made.items()]
    path.write_text(yaml.safe_dump(keys))
    return {name: text for name, (text, _) in made.items()}


class Guarded(NamedTuple):
    """A service with keys, and a client with one of them."""

    client: httpx.Client
    keys: dict[str, str]

    def ask(self, key: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        method = "GET" if body is None else "POST"
        return self.client.request(method, path, json=body, headers={"Authorization": f"Bearer {self.keys[key]}"})


@pytest.fixture(scope="module")
def guarded(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = write_keys(path)
    with serving.client(access={"keys": str(path)}) as client:
        yield Guarded(client, keys)


NO_HOSTS = ("evil@127.0.0.1", "127.0.0.1/evil", "127.0.0.1?evil", "127.0.0.1:80:80", "127.0.0.1 evil")


def test_a_rebound_host_name_is_refused_without_keys(client, guarded):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.0.2.1", "[", "", *NO_HOSTS):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 421, host
    for path in ("/", "/health"):
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 421, path
    for host in ("localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    assert guarded.client.get("/health", headers={"Host": "models.example.org"}).status_code == 200


CROSS = {"Sec-Fetch-Site": "cross-site"}
LINK = {**CROSS, "Sec-Fetch-Mode": "navigate"}


def test_what_a_browser_sends_for_the_page_of_another_site_is_refused(client):
    own = str(client.base_url).rstrip("/")
    for path, headers, status in [
        ("/v1/encode", {"Origin": "https://evil.example"}, 403),
        ("/v1/encode", {"Origin": "null"}, 403),
        ("/v1/encode", {"Origin": "http://localhost:3000"}, 403),
        ("/v1/encode", CROSS, 403),
        ("/v1/encode", LINK, 403),
        ("/metrics", LINK, 403),
        ("/", CROSS, 403),
        ("/", LINK, 200),
        ("/v1/encode", {"Origin": own, "Sec-Fetch-Site": "same-origin"}, 200),
    ]:
        body = {"sequences": ["MKT"]} if path == "/v1/encode" else None
        answer = client.request("POST" if body else "GET", path, json=body, headers=headers)
        assert answer.status_code == status, (path, headers)
        assert status == 200 or "page of another site" in problem(answer, 403)


PATHS = ("/v1/embeddings", "/embed", "/predict", "/", "/metrics", "/info", "/no")
KEYS = (None, "Bearer esm-wrong", "Bearer", "Basic YTpi", "Bearer \u00e9", "Bearer \udcff")


def test_without_a_known_key_nothing_is_answered_but_what_computes_nothing(guarded: Guarded):
    for path, text in product(PATHS, KEYS):
        headers = {} if text is None else {"Authorization": text.encode("utf-8", "surrogateescape")}
        answer = guarded.client.post(path, json={}, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert "esm-wrong" not in answer.text
        if path in ("/embed", "/predict", "/", "/info"):
            assert answer.json()["error_type"] == "Unauthorized"
        else:
            has_key = text is not None and text.startswith("Bearer ")
            assert problem(answer, 401).startswith("the key is wrong" if has_key else "a key is needed")
    statuses = {path: guarded.client.get(path).status_code for path in PUBLIC}
    assert {status for path, status in statuses.items() if path != "/ready"} == {200}, statuses
    assert not {"/v1/models", "/metrics", "/embed"} & set(PUBLIC)


FORBIDDEN: list[tuple[str, str, dict[str, Any] | None]] = [
    ("vectors", "/v1/encode", {"sequences": ["MKT"]}),
    ("vectors", "/predict", {"inputs": "MKT"}),
    ("vectors", "/embed_all", {"inputs": "MKT"}),
    ("vectors", "/v1/tokenize", {"sequences": ["MKT"]}),
    ("vectors", "/v1/decode", {"model": "autoencoder", "latents": [[[0.0] * 8]]}),
    ("vectors", "/metrics", None),
    ("places", "/v1/embeddings", {"input": "MKT"}),
    ("places", "/embed", {"inputs": "MKT"}),
    ("places", "/", {"inputs": "MKT"}),
    ("places", "/v1/models/esm", None),
    ("places", "/info", None),
]


def test_what_is_out_of_scope_is_forbidden_on_every_api(guarded: Guarded):
    for key, path, body in FORBIDDEN:
        answer = guarded.ask(key, path, body)
        assert answer.status_code == 403 and "this key is not for" in answer.text, (key, path)
    assert guarded.ask("vectors", "/v1/embeddings", {"input": "MKT"}).status_code == 200
    for path in ("/embed", "/"):
        assert guarded.ask("vectors", path, {"inputs": "MKT"}).status_code == 200
    assert guarded.ask("places", "/v1/classify", {"model": "places", "sequences": ["MKT"]}).status_code == 200
    assert [model["id"] for model in guarded.ask("places", "/v1/models").json()["data"]] == ["places"]


def test_rates_are_kept_and_say_when_to_come_back(guarded: Guarded):
    assert [guarded.ask("slow", "/v1/models").status_code for _ in range(3)] == [200, 200, 429]
    first = guarded.ask("small", "/v1/embeddings", {"input": "MKTAYIAKQRMKT"})  # over the limit: on credit
    refused = guarded.ask("small", "/v1/embeddings", {"input": "MK"})
    assert first.status_code == 200 and "10 residues a minute" in problem(refused, 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60


DAMAGED = {
    "missing": None,
    "no list": b"a: 1\n",
    "no YAML": b"- name: [\n",
    "no text": b"\xff\xfe\x00",
    "a key in the open": b"- {name: a, sha256: esm-secret}\n",
    "an unknown field": b"- {name: a, sha256: '%s', scope: all}\n" % (b"0" * 64),
    "two of a name": b"- {name: a, sha256: '%s'}\n" % (b"0" * 64) * 2,
}


def test_a_damaged_file_of_keys_is_refused_before_anything_starts(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    for kind, content in DAMAGED.items():
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"access\.keys: .*keys\.yaml: ") as refused:
            read_keys(path)
        assert "secret" not in str(refused.value) and "\n" not in str(refused.value), kind


def host_of(host: str, **access: str) -> str:
    serve = {"models": [{"name": "esm", "source": "esm2_t6_8M"}], "host": host, "access": access}
    return load_settings(ServiceSettings, None, {("serve", key): value for key, value in serve.items()}).serve.host


def test_another_host_than_this_one_needs_keys():
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org"):
        with pytest.raises(ConfigError, match=r"without access\.keys the service listens on 127\.0\.0\.1 alone"):
            host_of(host)
        assert host_of(host, keys="keys.yaml") == host
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert host_of(host) == host
