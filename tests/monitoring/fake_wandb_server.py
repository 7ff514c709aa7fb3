"""A W&B server for tests, on 127.0.0.1, that answers what wandb 0.31 needs to record a run."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeWandbServer(ThreadingHTTPServer):
    """HTTP server that records its requests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.history: list[dict[str, Any]] = []
        """Rows of the run's history; a stream overwrites rows from its own offset on."""
        self.known_run: dict[str, Any] | None = None
        self.artifacts_stall = False
        """Whether requests for artifacts are never answered."""

    @property
    def url(self) -> str:
        """Value for WANDB_BASE_URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def values(self) -> list[dict[str, Any]]:
        """Rows of the history without W&B's own columns."""
        return [{name: value for name, value in row.items() if not name.startswith("_")} for row in self.history]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: these tests kill clients in the middle of requests."""


@contextmanager
def fake_wandb_server() -> Iterator[FakeWandbServer]:
    """Run a server in threads of this process while the block runs."""
    server = FakeWandbServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeWandbServer
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = json.dumps(self._result(body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _serve  # noqa: N815 - names that http.server calls

    def _result(self, body: bytes) -> dict[str, Any]:
        if self.path.endswith("/file_stream"):
            self.server.requests.append("file_stream")
            self._take_stream(json.loads(body))
            return {"exitcode": None, "limits": {}}
        if self.path != "/graphql":
            return {}
        request = json.loads(body)
        operation = request["operationName"] or request["query"].split("(")[0].split("{")[0].split()[1]
        self.server.requests.append(operation)
        return {"data": self._graphql(operation, request.get("variables") or {})}

    def _take_stream(self, content: dict[str, Any]) -> None:
        part = (content.get("files") or {}).get("wandb-history.jsonl")
        if part is not None:
            rows = [json.loads(row) for row in part["content"]]
            history = self.server.history
            history[part["offset"] : part["offset"] + len(rows)] = rows

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "cA==", "name": variables.get("project"), "entity": {"id": "ZQ==", "name": "tester"}}
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": self._bucket()}}
        if operation == "Viewer":
            user = {"id": "dXNlcg==", "username": "tester", "entity": "tester", "flags": "{}"}
            return {"viewer": {**user, "teams": {"edges": []}}}
        if operation == "ArtifactType":
            return {"project": None}
        if operation == "CreateArtifact" and self.server.artifacts_stall:
            time.sleep(600)
        if operation == "UpsertBucket":
            sent = {name: variables[name] for name in ("tags", "notes") if variables.get(name)}
            self.server.known_run = {**(self.server.known_run or {}), **sent}
            bucket = {"id": "cg==", "name": variables["name"], "displayName": "n", "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.server.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "cg==", "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self) -> dict[str, Any] | None:
        rows = self.server.history
        if self.server.known_run is None:
            return None
        summary = {key: value for row in rows for key, value in row.items()}
        counts = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]), "eventsTail": "[]"}
        described = {"config": "{}", "wandbConfig": '{"t": 1}', "summaryMetrics": json.dumps(summary)}
        return {"id": "cg==", "name": "r", **counts, **tails, **described, **self.server.known_run}

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""
