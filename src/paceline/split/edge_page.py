"""The page of drafts in the browser, at /edge: its files, and those of models that draft there.

The page is cross-origin isolated, which threads of WebAssembly need. Its modules are in page/:

index.html          the page
main.js             form, figures, the answer with its provisional end
session.js          an answer over one WebSocket: drafts, commits, resumption; without a page
wire.js             the messages as bytes: a mirror of wire.py
vocabulary.js       ids to text, and the fingerprint
ngram.js            prompt lookup: a mirror of drafters/ngram.py
wllama_drafter.js   a model by wllama, in WebAssembly
onnx_drafter.js     a model by onnxruntime-web, on the GPU or in WebAssembly
download.js         a file, with its progress
edge.css            rules besides those of server/page/page.css
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paceline.server.app import App
from paceline.server.page import assets
from paceline.split.npm_packages import ONNXRUNTIME, WLLAMA, NpmPackage
from paceline.target.weights.gguf import SPLIT
from paceline.web.api_errors import ApiError, Handler, with_error_responses

PATH: Final = "/edge"
FOLDER: Final = Path(__file__).parent / "page"
SHARED: Final = ("page.css", "api.js", "dom.js", "format.js", "theme.js", "icon.svg")  # of the page at /
MAX_MODEL_BYTES: Final = 512 << 20  # that a browser is asked to load
PACKAGE_MEDIA: Final[Mapping[str, str]] = {
    ".js": assets.MEDIA[".js"],
    ".mjs": assets.MEDIA[".js"],
    ".wasm": "application/wasm",
}
PACKAGES: Final = {package.folder.name: package for package in (WLLAMA, ONNXRUNTIME)}

# WebAssembly is compiled, and wllama makes its worker from a blob, which Trusted Types would refuse.
CONTENT_SECURITY_POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self' 'wasm-unsafe-eval'",
        "worker-src 'self' blob:",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self' blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS: Final[Mapping[str, str]] = {
    **assets.SECURITY_HEADERS,
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-embedder-policy": "require-corp",
}


class EdgePage:
    """gguf, onnx: files of a model for drafts in the browser, with the vocabulary of the target."""

    def __init__(self, gguf: Path | None = None, onnx: Path | None = None) -> None:
        self._models = {"model.gguf": gguf, "model.onnx": onnx}
        self.assets = assets.PageAssets(FOLDER, SHARED, HEADERS)

    def routes(self, app: App) -> list[BaseRoute]:
        paths: list[tuple[str, Handler]] = [
            (PATH, self.assets.index),
            (f"{PATH}/about", self.about),
            (f"{PATH}/models/{{name}}", app.authenticated(self.model)),
            (f"{PATH}/packages/{{package}}/{{name:path}}", self.package),
            (f"{PATH}/{{version}}/{{name}}", self.assets.asset),
        ]
        return [Route(path, with_error_responses(call), methods=["GET"]) for path, call in paths]

    async def about(self, http: Request) -> Response:
        """Where the page finds what runs a model, and models, or why there are none."""
        found = {
            "wllama": self._offer(WLLAMA, "model.gguf"),
            "onnxruntime": self._offer(ONNXRUNTIME, "model.onnx"),
        }
        reason = None if any(found.values()) else self._why_no_model()
        return JSONResponse({**found, "reason": reason}, headers={"cache-control": "no-cache"})

    def _offer(self, package: NpmPackage, model: str) -> dict[str, str] | None:
        if self._models[model] is None or not package.is_pulled:
            return None
        return {"base": f"{PATH}/packages/{package.folder.name}", "model": f"{PATH}/models/{model}"}

    def _why_no_model(self) -> str:
        if not any(self._models.values()):
            return "The server offers no model for drafts in the browser: n-grams only."
        return "Drafts by a model need wllama on the server: paceline split pull. Until then, n-grams only."

    async def package(self, http: Request) -> Response:
        package, name = PACKAGES.get(http.path_params["package"]), http.path_params["name"]
        if package is None or name not in package.files or not package.is_pulled:
            raise ApiError(404, "no such path")
        headers = {**HEADERS, "cache-control": assets.IMMUTABLE}
        media = PACKAGE_MEDIA[Path(name).suffix]
        return FileResponse(package.folder / name, headers=headers, media_type=media)

    async def model(self, http: Request) -> Response:
        path = self._models.get(http.path_params["name"])
        if path is None:
            raise ApiError(404, "no such path")
        headers = {**HEADERS, "cache-control": "private, no-cache"}
        return FileResponse(path, headers=headers, media_type="application/octet-stream")


def browser_model(target: Path) -> Path | None:
    """The model for drafts in the browser: the target itself, if it is one small GGUF file."""
    whole = target.is_file() and target.suffix == ".gguf" and not SPLIT.fullmatch(target.name)
    return target if whole and target.stat().st_size <= MAX_MODEL_BYTES else None


def mount_page(app: App, gguf: Path | None = None, onnx: Path | None = None) -> EdgePage:
    """Adds the page to a server's application, beside the endpoint of cloud.py."""
    page = EdgePage(gguf, onnx)
    app.extra_routes += page.routes(app)
    return page
