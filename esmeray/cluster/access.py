"""Access to a Ray cluster: find out whether it answers, whether it needs Ray's token, and whether ours is right.

The result is the value for ``RAY_AUTH_MODE``. For an explicit address, Ray (2.60) takes the mode from the shell only.
If the cluster has another mode or another token, Ray retries and logs for 20 s before it fails.
"""

import os
from pathlib import Path

import grpc
from ray._common.tls_utils import load_certs_from_env
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from esmeray.common.errors import ResourceError
from esmeray.common.own_folders import check_private

_CLIENT = "ray://"
_GCS_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_CLIENT_QUESTION = "/ray.rpc.RayletDriver/ClusterInfo"
_TIMEOUT_S = 10.0
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes without an answer from Ray. Another program may have the port by now (UNIMPLEMENTED)."""


class NoAnswerError(ResourceError):
    """No Ray cluster answers at an address."""


def authentication_mode(address: str) -> str:
    """Query the authentication mode, ``token`` or ``disabled``, of the cluster at HOST:PORT or ray://HOST:PORT.

    Raises NoAnswerError if nothing answers, and ResourceError if the token that Ray finds is missing or wrong.
    """
    if _accepted(address, {}):
        return "disabled"
    token = own_token()
    if token and _accepted(address, token):
        return "token"
    token_here = "the token on this machine is not valid for it" if token else "no token was found on this machine"
    raise ResourceError(
        f"ray.address: the cluster at {address} requires a token, but {token_here}: run 'ray get-auth-token' on "
        "its head node and save the output as ~/.ray/auth_token on this machine (RAY_AUTH_TOKEN and "
        "RAY_AUTH_TOKEN_PATH override the file)"
    )


def own_token() -> dict[str, str]:
    """HTTP header with the token that Ray finds here; empty without a token.

    Raises ResourceError if the token can't be read, or if others can access its file in the home folder. A file named
    by RAY_AUTH_TOKEN_PATH is not checked: in containers its owner and mode depend on the mount.
    """
    file = Path.home() / ".ray" / "auth_token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() and file.exists():
        check_private(file, f"create a new token, or if no one else has read this one, run: chmod 600 {file}")
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()  # the token may have been created since the last call
    try:
        return dict(loader.get_token_for_http_header(ignore_auth_mode=True))
    except AuthenticationError as error:
        raise ResourceError(f"Ray's token can't be read: {error.message}") from error


def _channel(address: str) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0)]  # the shell's proxy can't reach the nodes of a cluster
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options)
    chain, key, authority = load_certs_from_env()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, chain), options)


def _accepted(address: str, header: dict[str, str]) -> bool:
    """Send the first request of every client. Returns False if the cluster rejects the token in ``header``."""
    question = _CLIENT_QUESTION if address.startswith(_CLIENT) else _GCS_QUESTION
    with _channel(address.removeprefix(_CLIENT)) as channel:
        try:
            channel.unary_unary(question)(b"", timeout=_TIMEOUT_S, metadata=tuple(header.items()))
        except grpc.RpcError as error:
            if error.code() in _NO_ANSWER:
                raise NoAnswerError(f"ray.address: no Ray cluster answers at {address}") from error
            # Any other error comes from a cluster that accepted the token.
            return bool(error.code() != grpc.StatusCode.UNAUTHENTICATED)
    return True
