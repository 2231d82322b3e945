"""`/`: the chat page and the files it is made of, all served by this process."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

PAGE = Path(__file__).parent.parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_FILES = {str(path.relative_to(PAGE)): path for path in PAGE.rglob("*") if path.suffix in _TYPES}
# Scripts only from here, nothing from elsewhere. TeX is laid out with style attributes.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; font-src 'self'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def get_page(request: web.Request) -> web.FileResponse:
    """The page, or one of its files."""
    name = request.match_info.get("name", "index.html")
    path = _FILES.get(name)
    if path is None:
        raise web.HTTPNotFound
    caching = "no-cache" if name == "index.html" else "max-age=3600"
    return web.FileResponse(path, headers=_HEADERS | {"Content-Type": _TYPES[path.suffix], "Cache-Control": caching})
