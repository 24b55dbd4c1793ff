"""A Hub on localhost: as much of the Hub's HTTP interface as pushing and loading a model needs, all in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "other"}  # of the many that the Hub knows


@dataclass
class Repository:
    """Commits, each with all of its files, and the branches that point to them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(files.items())}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Name -> content."""
        return self.commits[self.branches[revision]]


class HubError(Exception):
    """An answer that isn't 200."""

    def __init__(self, status: int, code: str = "", content: Any = None) -> None:
        super().__init__(status, code)
        self.status, self.code, self.content = status, code, content or {"error": code or f"of status {status}"}


class LocalHub:
    """The server's state, with the tokens of users."""

    def __init__(self, **users: str) -> None:
        self.users = {token: user for user, token in users.items()}  # who may write to repositories of that name
        self.repositories: dict[str, Repository] = {}  # by "user/name"
        self.requests: list[str] = []  # "METHOD /path"
        self.is_full = False  # takes no commits
        self.lock = threading.Lock()
        self.endpoint = ""

    def add(self, name: str, files: dict[str, str] | None = None, *, private: bool = False) -> None:
        """Puts a repository there."""
        self.repositories[name] = Repository(private)
        content = {".gitattributes": "*.safetensors filter=lfs\n", **(files or {})}
        self.repositories[name].commit("main", {path: text.encode() for path, text in content.items()})


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: LocalHub

    def respond(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {unquote(path)}")
            try:
                for pattern, handle in ROUTES.items():
                    method, _, route = pattern.partition(" ")
                    if (match := re.fullmatch(route, path)) and self.command in (method, "HEAD"):
                        handle(self, *(group and unquote(group) for group in match.groups()))
                        return
                raise HubError(404, "EntryNotFound")
            except HubError as error:
                self.answer(error.content, error.status, {"X-Error-Code": error.code} if error.code else {})

    do_GET = do_HEAD = do_POST = respond  # noqa: N815

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    # What the routes need

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise HubError(401, content={"error": "Invalid credentials in Authorization header"})
        return self.hub.users.get(token)

    def repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and self.user() != name.split("/")[0]):
            raise HubError(404, "RepoNotFound")
        return found

    def writable(self, name: str) -> Repository:
        if (user := self.user()) is None:
            raise HubError(401)
        found = self.repository(name)
        if user != name.split("/")[0]:
            raise HubError(403)
        return found

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self.repository(name)
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            raise HubError(404, "RevisionNotFound")
        return sha, repository.commits[sha]

    # The routes

    def create(self) -> None:
        wanted, user = json.loads(self.body), self.user()
        if user is None:
            raise HubError(401)
        owner = wanted.get("organization") or user
        name = f"{owner}/{wanted['name']}"
        if owner != user:
            raise HubError(403)
        url = {"url": f"{self.hub.endpoint}/{name}", "name": name}
        if name in self.hub.repositories:
            raise HubError(409, content=url)
        self.hub.add(name, private=wanted.get("visibility") == "private")
        self.answer(url)

    def info(self, name: str, revision: str = "main") -> None:
        sha, files = self.files(name, revision)
        said = {"private": self.hub.repositories[name].private, "siblings": [{"rfilename": path} for path in files]}
        self.answer({"id": name, "sha": sha, "tags": [], "downloads": 0, **said})

    def branch(self, name: str, branch: str) -> None:
        repository = self.writable(name)
        if branch in repository.branches:
            raise HubError(409)
        repository.branches[branch] = repository.branches["main"]
        self.answer({})

    def tree(self, name: str, revision: str) -> None:
        files = self.files(name, revision)[1].items()
        self.answer([{"type": "file", "path": path, "size": len(one), "oid": _digest(one)} for path, one in files])

    def validate(self) -> None:
        data = yaml.safe_load(json.loads(self.body)["content"].split("---\n")[1])
        if (licence := data.get("license")) is not None and licence not in LICENSES:
            raise HubError(400, content={"errors": [{"message": f'"license" must be one of {sorted(LICENSES)}'}]})
        self.answer({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        self.writable(name)
        paths = [one["path"] for one in json.loads(self.body)["files"]]
        self.answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})

    def commit(self, name: str, branch: str) -> None:
        repository = self.writable(name)
        if branch not in repository.branches:
            raise HubError(404, "RevisionNotFound")
        if self.hub.is_full:
            raise HubError(507)
        files = dict(repository.files(branch))
        for entry in map(json.loads, self.body.splitlines()):
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                del files[entry["value"]["path"]]
        sha = repository.commit(branch, files)
        self.answer({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, name: str, revision: str, path: str) -> None:
        sha, files = self.files(name, revision)
        if path not in files:
            raise HubError(404, "EntryNotFound")
        headers = {"ETag": f'"{_digest(files[path])}"', "X-Repo-Commit": sha, "Content-Type": "text/plain"}
        self.answer(files[path], headers=headers)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


NAME = r"([^/]+/[^/]+)"
ROUTES: dict[str, Callable[..., None]] = {
    "POST /api/repos/create": Handler.create,
    "POST /api/validate-yaml": Handler.validate,
    f"GET /api/(?:models|datasets)/{NAME}": Handler.info,
    f"GET /api/models/{NAME}/revision/(.+)": Handler.info,
    f"POST /api/models/{NAME}/branch/(.+)": Handler.branch,
    f"GET /api/models/{NAME}/tree/([^/]+)": Handler.tree,
    f"POST /api/models/{NAME}/preupload/(.+)": Handler.preupload,
    f"POST /api/models/{NAME}/commit/(.+)": Handler.commit,
    f"GET /{NAME}/resolve/([^/]+)/(.+)": Handler.resolve,
}


@contextmanager
def running(hub: LocalHub) -> Iterator[LocalHub]:
    """Serves a hub, whose `endpoint` says where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HandlerOfOne", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
