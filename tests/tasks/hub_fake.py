"""A hub that serves data sets from memory, spoken to by the real client."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Data sets by name, each a file's content by path; what is asked for is kept in `asked`."""

    def __init__(self, sets: dict[str, dict[str, bytes]]) -> None:
        self.sets = sets
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) > 4:
            files = self.sets.get("/".join(parts[2:4]))
            if files is None:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if parts[0] == "datasets" and len(parts) > 5 and parts[3] == "resolve":
            data = self.sets["/".join(parts[1:3])]["/".join(parts[5:])]
            etag = hashlib.sha1(data).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, data
        return 200 if parts == [""] else 404, {}, b""

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Its address while it runs."""
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                status, headers, body = hub.answer(self.path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            yield self.url
        finally:
            server.shutdown()
            server.server_close()
