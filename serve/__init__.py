"""The HTTP server: an engine on its own thread behind OpenAI-compatible and other APIs."""

from serve.config import ServerConfig
from serve.server import HttpServer

__all__ = ["HttpServer", "ServerConfig"]
