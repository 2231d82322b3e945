"""The HTTP server: an engine on its own thread behind OpenAI-compatible and other APIs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.config import ServerConfig
    from serve.server import HttpServer

__all__ = ["HttpServer", "ServerConfig"]


def __getattr__(name: str) -> Any:
    # Imported when first asked for: the command line, which is a module of this package, comes up without a server.
    if name == "HttpServer":
        from resin.plan.extras import require

        require("serve")
        from serve.server import HttpServer

        return HttpServer
    if name == "ServerConfig":
        from serve.config import ServerConfig

        return ServerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
