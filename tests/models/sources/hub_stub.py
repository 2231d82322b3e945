"""A loopback stand-in for a model hub that can cut, refuse, redirect and lie."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        wrong_sums: names whose listed checksum is not that of the bytes.
        honours_range: whether a Range header gives 206.
        token: required bearer token, or None.
        redirect_to: address that file requests are sent on to, or None.
        requests: (name, Range header, Authorization header) of every file request.
    """

    files: dict[str, bytes]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    wrong_sums: set[str] = field(default_factory=set)
    honours_range: bool = True
    token: str | None = None
    redirect_to: str | None = None
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    address: str = ""

    def listing(self) -> dict[str, object]:
        siblings: list[dict[str, object]] = []
        for name, content in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
            if name.endswith(".safetensors"):
                entry["blobId"] = "0" * 40
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            if name in self.wrong_sums:
                entry["blobId"] = "1" * 40
                entry["lfs"] = {"sha256": "1" * 64} if name.endswith(".safetensors") else None
            siblings.append(entry)
        return {"sha": COMMIT, "siblings": siblings}


@contextmanager
def serving(stub: HubStub) -> Iterator[HubStub]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keeps the test output clean."""

        def do_GET(self) -> None:
            is_api = self.path.startswith("/api/")
            name = "api" if is_api else self.path.rsplit("/", 1)[-1]
            authorization = self.headers.get("Authorization")
            if not is_api:
                stub.requests.append((name, self.headers.get("Range"), authorization))
            if stub.statuses.get(name):
                self.send_error(stub.statuses[name].pop(0))
            elif stub.token is not None and authorization != f"Bearer {stub.token}":
                self.send_error(401)
            elif is_api and "/owner/model/" not in self.path:
                self.send_error(404)
            elif is_api:
                self._send(json.dumps(stub.listing()).encode(), 200)
            elif stub.redirect_to is not None:
                self.send_response(302)
                self.send_header("Location", f"{stub.redirect_to}/{name}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._send_file(name)

        def _send_file(self, name: str) -> None:
            content = stub.files[name]
            asked = self.headers.get("Range")
            if asked is None or not stub.honours_range:
                self._send(content, 200, name=name)
                return
            first = int(asked.removeprefix("bytes=").removesuffix("-"))
            if first >= len(content):
                self.send_error(416)
                return
            place = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self._send(content[first:], 206, name=name, place=place)

        def _send(self, content: bytes, status: int, *, name: str = "", place: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if place:
                self.send_header("Content-Range", place)
            self.end_headers()
            cuts = stub.cuts.get(name)
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
