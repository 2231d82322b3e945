"""A loopback stand-in for a model hub that can cut, refuse, redirect and lie."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class HubStub:
    """What the stand-in serves and how it misbehaves.

    Attributes:
        files: name -> bytes of the repository `owner/model`.
        cuts: name -> numbers of bytes after which the connection closes, one for each coming request.
        statuses: name -> HTTP statuses that the coming requests get ("api" stands for the listing).
        honours_range: whether a Range header gives 206.
        token: required bearer token, or None.
        redirect_to: address that file requests are sent on to, or None.
        requests: (name, Range header) of every file that is asked for.
        tokens: Authorization headers of all requests.
    """

    files: dict[str, bytes]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    honours_range: bool = True
    token: str | None = None
    redirect_to: str | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    address: str = ""

    def listing(self) -> list[dict[str, object]]:
        """What the hub says about the files."""
        entries: list[dict[str, object]] = []
        for name, content in self.files.items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content)}
            if name.endswith(".safetensors"):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
            entries.append(entry)
        return entries


@contextmanager
def serving(stub: HubStub) -> Iterator[HubStub]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keeps the test output clean."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            is_api = path.startswith("/api/")
            name = "api" if is_api else path.rsplit("/", 1)[-1]
            authorization = self.headers.get("Authorization")
            stub.tokens.add(authorization)
            if not is_api and self.command == "GET":
                stub.requests.append((name, self.headers.get("Range")))
            if stub.statuses.get(name):
                self.send_error(stub.statuses[name].pop(0))
            elif stub.token is not None and authorization != f"Bearer {stub.token}":
                self.send_error(401)
            elif "/owner/model/" not in path or (is_api and "/revision/" in path and not path.endswith("/main")):
                self.send_error(404)
            elif is_api:
                info = {"id": "owner/model", "sha": COMMIT, "siblings": []}
                self._send(json.dumps(info if "/revision/" in path else stub.listing()).encode(), 200)
            elif name not in stub.files or (COMMIT not in path and "/main/" not in path):
                self.send_error(404)
            elif stub.redirect_to is not None:
                self._redirect(name)
            else:
                self._send_file(name)

        def _redirect(self, name: str) -> None:
            self.send_response(302)
            self.send_header("Location", f"{stub.redirect_to}/owner/model/resolve/{COMMIT}/{name}")
            self.send_header("X-Linked-Size", str(len(stub.files[name])))
            self.send_header("X-Linked-Etag", f'"{git_sha1(stub.files[name])}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send_file(self, name: str) -> None:
            content = stub.files[name]
            asked = self.headers.get("Range")
            if asked is None or not stub.honours_range:
                self._send(content, 200, name=name)
                return
            first = int(asked.removeprefix("bytes=").removesuffix("-"))
            place = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self._send(content[first:], 206, name=name, place=place)

        def _send(self, content: bytes, status: int, *, name: str = "", place: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{git_sha1(stub.files.get(name, b""))}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if place:
                self.send_header("Content-Range", place)
            self.end_headers()
            if self.command == "GET":
                cuts = stub.cuts.get(name)
                with suppress(ConnectionError):  # a client that was interrupted has left
                    self.wfile.write(content[: cuts.pop(0)] if cuts else content)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
