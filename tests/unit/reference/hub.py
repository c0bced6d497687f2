"""A hub on loopback that serves one dataset of parquet files, and fails when it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
REPOSITORY = "someone/texts"


class StubHub:
    """Serves ``files`` (path in the repository -> bytes) as the dataset ``someone/texts``.

    ``fail`` is asked before each answer and returns a status to fail with, ``"cut"`` to break the connection in the
    middle of the answer, or None.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fail: Callable[[str], int | str | None] = lambda path: None
        self.requests: list[tuple[str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # An answer in one piece: two would wait for each other.
            wbufsize = 2**20
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_POST(self) -> None:
                hub.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range", "")))
        failure = self.fail(path)
        if isinstance(failure, int):
            self._reply(request, failure, b"not now", {})
            return
        status, content, headers = self._find(path, body)
        range_ = request.headers.get("Range")
        if range_ and status == 200:
            first, last = range_.removeprefix("bytes=").split("-")
            size = len(content)
            start = int(first) if first else max(0, size - int(last))
            end = min(int(last) + 1, size) if first and last else size
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            status, content = 206, content[start:end]
        self._reply(request, status, content, headers, cut=failure == "cut")

    def _reply(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], cut: bool = False
    ) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            request.wfile.flush()
            request.close_connection = True

    def _find(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Status, content and headers of what is at ``path``."""
        api = f"/api/datasets/{REPOSITORY}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return 200, json.dumps(info).encode(), {"Content-Type": "application/json"}
        if path.startswith(f"{api}/tree/{COMMIT}"):
            folder = path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")
            entries = self._entries(folder)
            if not entries:
                return 404, b"", {"X-Error-Code": "EntryNotFound"}
            return 200, json.dumps(entries).encode(), {"Content-Type": "application/json"}
        if path.startswith(f"{api}/paths-info/{COMMIT}"):
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else []
            entries = [entry for entry in self._entries(None) if entry["path"] in wanted]
            return 200, json.dumps(entries).encode(), {"Content-Type": "application/json"}
        for revision in ("main", COMMIT):
            path = path.replace(f"/datasets/{REPOSITORY}/resolve/{revision}/", "/resolve/")
        resolve = "/resolve/"
        if path.startswith(resolve) and path.removeprefix(resolve) in self.files:
            content = self.files[path.removeprefix(resolve)]
            return 200, content, {"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        code = "EntryNotFound" if path.startswith(resolve) else "RepoNotFound"
        return 404, b"", {"X-Error-Code": code}

    def _entries(self, folder: str | None) -> list[dict[str, object]]:
        """All files and folders below ``folder``, as the hub's tree has them; None: below the root."""
        prefix = f"{folder}/" if folder else ""
        names = [name for name in self.files if name.startswith(prefix)]
        folders = {"/".join(name.split("/")[:depth]) for name in names for depth in range(1, name.count("/") + 1)}
        entries: list[dict[str, object]] = [
            {"type": "file", "oid": "0" * 40, "size": len(self.files[name]), "path": name} for name in names
        ]
        return entries + [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
            for name in sorted(folders)
            if name.startswith(prefix) and name != folder
        ]
