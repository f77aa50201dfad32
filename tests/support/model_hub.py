"""A model hub on this machine that speaks the protocol of the Hugging Face hub, and faults to give it.

Two addresses: the hub, and a content server on a host of its own, to which large files are redirected.
"""

import asyncio
import hashlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from huggingface_hub import constants, file_download
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from support.servers import START_S, own_home, until

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_a_member"
STRANGER = "hf_of_a_stranger"  # valid, but of nobody who may see private or gated repositories
CHUNK = 1024
LARGE = (".gguf", ".safetensors")


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    files: dict[str, bytes]
    private: bool = False
    gated: bool = False
    licence: str = "mit"
    commit: str = COMMIT
    revisions: "dict[str, Repository]" = field(default_factory=dict)  # by branch, tag and commit, but main

    def at(self, revision: str) -> "Repository | None":
        return self if revision in ("main", self.commit) else self.revisions.get(revision)


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    range: str
    authorization: str


@dataclass
class ModelHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # the next answers with content end after so many bytes
    resets: bool = False  # such ends are those of a broken network, not of a closed connection
    spoiled: set[str] = field(default_factory=set)  # files that are sent with a wrong byte
    ignores_ranges: bool = False
    status: int = 0  # if not 0, of every answer
    held: threading.Event = field(default_factory=threading.Event)  # content is sent while this is set
    hold_after: int = 0  # bytes of an answer that are sent all the same
    url: str = ""
    content_url: str = ""
    server: uvicorn.Server | None = None

    def __post_init__(self) -> None:
        self.held.set()

    def reset(self) -> None:
        """Empty and sound, at the same addresses."""
        fresh = ModelHub(url=self.url, content_url=self.content_url, server=self.server)
        self.__dict__.update(fresh.__dict__)

    def add(self, name: str, files: Mapping[str, bytes], **settings: bool | str) -> None:
        self.repositories[name] = Repository(dict(files), **settings)  # type: ignore[arg-type]

    def revise(self, name: str, revision: str, files: Mapping[str, bytes]) -> str:
        """Adds a branch or tag to a repository; its commit."""
        commit = hashlib.sha1(revision.encode()).hexdigest()
        known = self.repositories[name].revisions
        known[revision] = known[commit] = Repository(dict(files), commit=commit)
        return commit

    def downloads(self) -> list[str]:
        """Files that were asked for, each time, with the bytes they were asked from."""
        return [
            f"{asked.path.rpartition('/')[2]} {asked.range}".strip()
            for asked in self.asked
            if "/resolve/" in asked.path and asked.method == "GET"
        ]

    def app(self) -> Starlette:
        methods = ["GET", "HEAD"]
        routes = [
            Route("/api/models/{owner}/{name}", self._info),
            Route("/api/models/{owner}/{name}/revision/{revision:path}", self._info),
            Route("/api/models/{owner}/{name}/tree/{revision}", self._tree),
            Route("/{owner}/{name}/resolve/{revision}/{path:path}", self._resolve, methods=methods),
            Route("/content/{digest}", self._content, methods=methods),
        ]
        return Starlette(routes=routes)

    def _enter(self, request: Request) -> Response | Repository:
        """The repository, or the answer that the hub gives instead."""
        self._note(request)
        if self.status:
            return Response(status_code=self.status)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN, STRANGER):
            return refused(401, "", "Invalid credentials in Authorization header")
        name = f"{request.path_params['owner']}/{request.path_params['name']}"
        repository = self.repositories.get(name)
        if repository is None or (repository.private and token != TOKEN):
            # Whoever is not logged in does not learn which it is.
            return refused(404 if token else 401, "RepoNotFound" if token else "", "Repository not found")
        revised = repository.at(request.path_params.get("revision", "main"))
        if revised is None:
            return refused(404, "RevisionNotFound", "Invalid rev id")
        if repository.gated and token != TOKEN and "/resolve/" in request.url.path:
            return refused(403 if token else 401, "GatedRepo", "Access to this repository is restricted")
        return revised

    def _note(self, request: Request) -> None:
        asked = (request.headers.get(name, "") for name in ("range", "authorization"))
        self.asked.append(Asked(request.method, request.url.path, *asked))

    async def _info(self, request: Request) -> Response:
        repository = self._enter(request)
        if isinstance(repository, Response):
            return repository
        blobs = "blobs" in request.query_params
        return JSONResponse(
            {
                "id": f"{request.path_params['owner']}/{request.path_params['name']}",
                "sha": repository.commit,
                "private": repository.private,
                "gated": "manual" if repository.gated else False,
                "cardData": {"license": repository.licence},
                "tags": [],
                "siblings": [
                    {"rfilename": path, **(blob(path, content) if blobs else {})}
                    for path, content in repository.files.items()
                ],
            }
        )

    async def _tree(self, request: Request) -> Response:
        repository = self._enter(request)
        if isinstance(repository, Response):
            return repository
        listed = []
        for path, content in repository.files.items():
            known = blob(path, content)
            entry = {"type": "file", "path": path, "size": len(content), "oid": known["blobId"]}
            if "lfs" in known:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
            listed.append(entry)
        return JSONResponse(listed)

    async def _resolve(self, request: Request) -> Response:
        repository = self._enter(request)
        if isinstance(repository, Response):
            return repository
        path = request.path_params["path"]
        if path not in repository.files:
            return refused(404, "EntryNotFound", "Entry not found")
        content, headers = repository.files[path], {"X-Repo-Commit": repository.commit}
        if not path.endswith(LARGE):
            return await self._send(request, path, content, headers | {"ETag": f'"{git_hash(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return RedirectResponse(f"{self.content_url}/content/{digest}", 302, headers)

    async def _content(self, request: Request) -> Response:
        self._note(request)
        named = self.repositories.values()
        for repository in [*named, *(one for each in named for one in each.revisions.values())]:
            for path, content in repository.files.items():
                digest = hashlib.sha256(content).hexdigest()
                if digest == request.path_params["digest"]:
                    return await self._send(request, path, content, {"ETag": f'"{digest}"'})
        return Response(status_code=404)

    async def _send(self, request: Request, path: str, content: bytes, headers: dict[str, str]) -> Response:
        if path in self.spoiled:
            content = bytes([content[0] ^ 1]) + content[1:]
        total, begin, status = len(content), 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        if asked and not self.ignores_ranges:
            begin, status = int(asked[1]), 206
            if begin >= total:
                return Response(status_code=416, headers={"Content-Range": f"bytes */{total}"})
            headers["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
        headers |= {"Content-Length": str(total - begin), "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers)
        end = begin + self.cuts.pop(0) if self.cuts else total
        resets = self.resets and end < total
        return StreamingResponse(self._pieces(content[begin:end], request, resets), status, headers)

    async def _pieces(self, content: bytes, request: Request, resets: bool) -> AsyncIterator[bytes]:
        """Fewer than Content-Length says make the server close the connection."""
        for start in range(0, len(content), CHUNK):
            if start >= self.hold_after:
                await asyncio.to_thread(self.held.wait)
            yield content[start : start + CHUNK]
        if resets:
            await self._reset(request)

    async def _reset(self, request: Request) -> None:
        """Sends what was written, then RST instead of FIN."""
        assert self.server
        peer = tuple(request.client or ())
        for connection in self.server.server_state.connections:
            transport: Any = getattr(connection, "transport", None)
            if transport and tuple(transport.get_extra_info("peername") or ()) == peer:
                while transport.get_write_buffer_size():
                    await asyncio.sleep(0)
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                transport.abort()


def blob(path: str, content: bytes) -> dict[str, object]:
    known: dict[str, object] = {"size": len(content), "blobId": git_hash(content)}
    if path.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        known["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return known


def refused(status: int, code: str, message: str) -> Response:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return JSONResponse({"error": message}, status, headers)


def use(hub: ModelHub, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes it the hub of this process, without a token, and gives paceline a home in the folder."""
    patch.setenv("HF_ENDPOINT", hub.url)
    patch.setenv("PACELINE_HOME", str(own_home(folder)))
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    patch.delenv("HF_TOKEN", raising=False)
    patch.delenv("HF_HUB_OFFLINE", raising=False)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    patch.setenv("HF_TOKEN_PATH", str(folder / "token"))  # for processes that are started
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)  # else 10 MB
    patch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [one.getsockname()[1] for one in sockets]
    hub.url, hub.content_url = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"
    server = uvicorn.Server(uvicorn.Config(hub.app(), log_config=None, log_level="critical", lifespan="off"))
    hub.server = server
    thread = threading.Thread(target=server.run, args=(sockets,), name="model hub", daemon=True)
    thread.start()
    try:
        assert until(lambda: server.started, START_S)
        yield hub
    finally:
        hub.held.set()
        server.should_exit = True
        thread.join(START_S)
