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


@dataclass(frozen=True)
class File:
    """A file of a commit; a large one is in the store of large files, and the repository has its digest."""

    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        """The name that git or LFS gives the content."""
        if self.large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    """Commits, each with all of its files, and the branches that point to them."""

    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, File]) -> str:
        """Adds a commit to a branch."""
        contents = sorted((name, file.oid) for name, file in files.items())
        sha = hashlib.sha1(f"{[*self.commits]} {branch} {contents}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def sha(self, revision: str) -> str | None:
        """The commit that a branch, or a commit's own name, stands for."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Name -> content."""
        return {name: file.content for name, file in self.commits[self.branches[revision]].items()}


class HubError(Exception):
    """An answer that isn't 200."""

    def __init__(self, status: int, code: str = "", content: Any = None) -> None:
        super().__init__(status, code)
        self.status, self.code, self.content = status, code, content or {"error": code or f"of status {status}"}


class LocalHub:
    """The server's state.

    Attributes:
        users: Token -> user, who may write to repositories of that name.
        repositories: "user/name" -> the repository.
        large: Digest -> content, of the large files that have arrived.
        requests: "METHOD /path" of all requests.
        refuses_upload: Says of a large file's content whether its upload fails.
    """

    def __init__(self, **users: str) -> None:
        self.users = {token: user for user, token in users.items()}
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuses_upload: Callable[[bytes], bool] = lambda content: False
        self.lock = threading.Lock()
        self.endpoint = ""

    def add(self, name: str, files: dict[str, str] | None = None, *, private: bool = False) -> Repository:
        """Puts a repository there."""
        repository = self.repositories[name] = Repository(private)
        content = {".gitattributes": "*.safetensors filter=lfs\n", **(files or {})}
        repository.commit("main", {path: File(text.encode(), large=False) for path, text in content.items()})
        return repository

    def sent(self, method: str = "") -> list[str]:
        """The requests that would change something, or those with a method."""
        return [one for one in self.requests if one.startswith(method or ("POST", "PUT", "DELETE"))]


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: LocalHub

    def do_GET(self) -> None:
        self.respond("GET")

    def do_HEAD(self) -> None:
        self.respond("HEAD")

    def do_POST(self) -> None:
        self.respond("POST")

    def do_PUT(self) -> None:
        self.respond("PUT")

    def respond(self, method: str) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{method} {unquote(path)}")
            try:
                for pattern, handle in ROUTES.items():
                    route_method, _, route = pattern.partition(" ")
                    if (match := re.fullmatch(route, path)) and (method == route_method or method == "HEAD"):
                        handle(self, *(group and unquote(group) for group in match.groups()))
                        return
                raise HubError(404, "EntryNotFound")
            except HubError as error:
                headers = {"X-Error-Code": error.code} if error.code else {}
                self.answer(error.content, error.status, headers)

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        defaults = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in {**defaults, **(headers or {})}.items():
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

    def files(self, name: str, revision: str) -> tuple[str, dict[str, File]]:
        repository = self.repository(name)
        sha = repository.sha(revision)
        if sha is None:
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
        siblings = [{"rfilename": path} for path in files]
        private = self.hub.repositories[name].private
        self.answer({"id": name, "sha": sha, "private": private, "siblings": siblings, "tags": [], "downloads": 0})

    def branch(self, name: str, branch: str) -> None:
        repository = self.writable(name)
        if branch in repository.branches:
            raise HubError(409)
        repository.branches[branch] = repository.branches["main"]
        self.answer({})

    def tree(self, name: str, revision: str, folder: str | None = None) -> None:
        _, files = self.files(name, revision)
        shown = {path: file for path, file in files.items() if folder is None or path.startswith(f"{folder}/")}
        if folder is not None and not shown:
            raise HubError(404, "EntryNotFound")
        entries = [
            {"type": "file", "path": path, "size": len(file.content), "oid": file.oid} for path, file in shown.items()
        ]
        self.answer(entries)

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        data = yaml.safe_load(content.split("---\n")[1])
        if (licence := data.get("license")) is not None and licence not in LICENSES:
            raise HubError(400, content={"errors": [{"message": f'"license" must be one of {sorted(LICENSES)}'}]})
        self.answer({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        self.writable(name)
        _, there = self.files(name, revision)
        answer = []
        for one in json.loads(self.body)["files"]:
            path = one["path"]
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            old = there[path].oid if path in there else None
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": old})
        self.answer({"files": answer})

    def batch(self, name: str) -> None:
        self.repository(name)
        if self.user() is None:
            raise HubError(401)
        objects = []
        for one in json.loads(self.body)["objects"]:
            action = {"upload": {"href": f"{self.hub.endpoint}/large/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in self.hub.large else {"actions": action})})
        self.answer({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        assert "Authorization" not in self.headers, "the store of large files is another company's"
        if self.hub.refuses_upload(self.body):
            raise HubError(507)
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.large[oid] = self.body
        self.answer({})

    def commit(self, name: str, branch: str) -> None:
        repository = self.writable(name)
        if branch not in repository.branches:
            raise HubError(404, "RevisionNotFound")
        files = dict(repository.commits[repository.branches[branch]])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), large=False)
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.large:
                    raise HubError(400)
                files[value["path"]] = File(self.hub.large[value["oid"]], large=True)
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(branch, files)
        self.answer({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, name: str, revision: str, path: str) -> None:
        sha, files = self.files(name, revision)
        if path not in files:
            raise HubError(404, "EntryNotFound")
        headers = {"ETag": f'"{files[path].oid}"', "X-Repo-Commit": sha, "Content-Type": "text/plain"}
        self.answer(files[path].content, headers=headers)


NAME = r"([^/]+/[^/]+)"
ROUTES: dict[str, Callable[..., None]] = {
    "POST /api/repos/create": Handler.create,
    "POST /api/validate-yaml": Handler.validate,
    f"GET /api/models/{NAME}": Handler.info,
    f"GET /api/models/{NAME}/revision/(.+)": Handler.info,
    f"POST /api/models/{NAME}/branch/(.+)": Handler.branch,
    f"GET /api/models/{NAME}/tree/([^/]+)": Handler.tree,
    f"GET /api/models/{NAME}/tree/([^/]+)/(.+)": Handler.tree,
    f"POST /api/models/{NAME}/preupload/(.+)": Handler.preupload,
    f"POST /{NAME}.git/info/lfs/objects/batch": Handler.batch,
    "PUT /large/(.+)": Handler.upload,
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
