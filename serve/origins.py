"""Who may speak to a server that asks for no key: checks of Host and Origin, and what lets a configured origin in.

A page on the web can make its reader's browser post to a loopback address, or have its own name resolve to one. Both
show in headers that a page cannot choose.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from serve.config import ServerConfig
from serve.errors import ApiError

_PREFLIGHT_AGE_S = 600


def is_loopback(host: str) -> bool:
    """True for addresses and names that lead back to this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class OriginPolicy:
    """Hosts are checked where the server is keyless on a loopback address, or told its hosts; origins where keyless."""

    def __init__(self, config: ServerConfig) -> None:
        self._is_keyless = not config.api_keys
        self._hosts = {config.host.lower(), *(host.lower() for host in config.allowed_hosts)}
        self._checks_hosts = bool(config.allowed_hosts) or (self._is_keyless and is_loopback(config.host))
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)

    def check(self, request: web.BaseRequest) -> None:
        """Raises ApiError 403 for a request made under a foreign name or by a foreign page."""
        if self._checks_hosts:
            for host in request.headers.getall("Host", ()):
                if not self._is_known(_name_of(host)):
                    raise _forbidden("Host", host, "allowed_hosts (--allowed-host)")
        if self._is_keyless:
            for origin in request.headers.getall("Origin", ()):
                if origin.lower() not in self._origins and not _is_same(origin, request.headers.get("Host", "")):
                    raise _forbidden("Origin", origin, "allowed_origins (--allowed-origin)")

    def headers_for(self, request: web.BaseRequest) -> dict[str, str]:
        """Response headers that let the page of a configured origin read the answer."""
        origin = request.headers.get("Origin", "")
        if origin.lower() not in self._origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "x-request-id, retry-after",
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a browser that asks whether a configured origin may send a request."""
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not self.headers_for(request):
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    def _is_known(self, name: str) -> bool:
        return name in self._hosts or is_loopback(name)


def _forbidden(header: str, value: str, setting: str) -> ApiError:
    message = f"{header}: {value!r} is not one of this server's; {setting} adds it"
    return ApiError(403, message, kind="permission_error", code="forbidden_" + header.lower())


def _name_of(host: str) -> str:
    """A Host header without its port."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_same(origin: str, host: str) -> bool:
    """True if a page came from where it sends its request to."""
    parts = urlsplit(origin)
    port = {"http": ":80", "https": ":443"}.get(parts.scheme, "")
    return bool(parts.netloc) and host.lower() in (parts.netloc.lower(), parts.netloc.lower().removesuffix(port))
