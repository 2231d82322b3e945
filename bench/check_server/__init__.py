"""`python -m bench check-server URL`: does a server that speaks OpenAI's API keep its promises?"""

from bench.check_server.command import main

__all__ = ["main"]
