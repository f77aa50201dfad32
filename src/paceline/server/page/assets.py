"""The files of the page: read once, immutable under a path with their hash, closed to other sites."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.web.api_errors import ApiError

FOLDER: Final = Path(__file__).parent
ASSETS: Final = "/assets/{version}/{name:path}"
MEDIA: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX: Final = "index.html"
IMMUTABLE: Final = "public, max-age=31536000, immutable"
VERSION: Final = b"VERSION"  # in the index: the hash of all files

# No inline script or style, nothing from elsewhere, and no text is ever parsed as HTML (Trusted Types).
CONTENT_SECURITY_POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class PageAssets:
    """A page's files in memory. A new version has new paths, so that browsers may keep the old ones.

    shared: files of the page at `/` that another page has, too. headers: of all its files.
    """

    def __init__(
        self,
        folder: Path = FOLDER,
        shared: Sequence[str] = (),
        headers: Mapping[str, str] = SECURITY_HEADERS,
    ) -> None:
        self.headers = headers
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in MEDIA
        }
        files |= {name: (FOLDER / name).read_bytes() for name in shared}
        digest = sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.version = digest.hexdigest()[:16]
        self._index = files.pop(INDEX).replace(VERSION, self.version.encode())
        self._files = files

    async def index(self, http: Request) -> Response:
        tag = f'"{self.version}"'
        headers = {**self.headers, "cache-control": "no-cache", "etag": tag}
        if tag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._index, headers=headers, media_type=MEDIA[".html"])

    async def asset(self, http: Request) -> Response:
        name = http.path_params["name"]
        content = self._files.get(name)
        if content is None or http.path_params["version"] != self.version:
            raise ApiError(404, "no such path")
        headers = {**self.headers, "cache-control": IMMUTABLE}
        return Response(content, headers=headers, media_type=MEDIA[Path(name).suffix])
