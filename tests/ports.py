"""TCP ports on which a program and its descendants listen, and each port's reply to a request without a token."""

from contextlib import suppress

import grpc
import httpx
import psutil

PATHS = ("/metrics", "/api/jobs/", "/api/v0/nodes", "/api/cluster_status", "/health", "/v1/models", "/")
CALLS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.rpc.RayletDriver/ClusterInfo",
    "ray.serve.ASGIService/HandleRequest",
)
NO_SERVER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def listening(root: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports on which a process and its descendants listen."""
    sockets = set()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # the process may have ended meanwhile
            bound = [part.laddr for part in process.net_connections("tcp") if part.status == "LISTEN"]
            sockets |= {(at.ip.removeprefix("::ffff:"), at.port) for at in bound}
    return sockets


def reply(address: str, port: int) -> str:
    """Return the reply without a token: HTTP statuses by path, or the first gRPC status, or ``silent``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address, address)
    return _http(f"http://{host}:{port}") or _grpc(f"{host}:{port}") or "silent"


def _http(base: str) -> str:
    statuses = {}
    with httpx.Client(base_url=base, timeout=5, trust_env=False) as client, suppress(httpx.HTTPError):
        for path in PATHS:
            statuses.setdefault(client.get(path).status_code, []).append(path)
    return ", ".join(f"{status} {' '.join(paths)}" for status, paths in sorted(statuses.items()) if status != 404)


def _grpc(target: str) -> str:
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        for call in CALLS:
            try:
                channel.unary_unary(f"/{call}")(b"", timeout=5)
            except grpc.RpcError as error:
                if error.code() in NO_SERVER:
                    return ""
                if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    return f"{error.code().name} {call}"
            else:
                return f"OK {call}"
    return "UNIMPLEMENTED"
