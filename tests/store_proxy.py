"""An HTTP proxy before a store, that can be told to fail: `python store_proxy.py HOST:PORT` prints its own port.

It is a process of its own because some calls of deltalake's hold the interpreter while they wait for an answer. What it
is to do is put to `/_fault`: {"fault", "method", "ending"}; to get that path tells which requests met the fault.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: seconds that a slow store takes for each answer
SLOW = 4.0
CONTROL = "/_fault"
_ENTRY = re.compile(rb"<Contents><Key>[^<]*/(\d{20})\.json</Key>.*?</Contents>", re.DOTALL)


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store = ""
    told: dict[str, str] = {"fault": "", "method": "", "ending": ""}  # noqa: RUF012
    met: list[str] = []  # noqa: RUF012

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == CONTROL:
            self._control(body)
            return
        fault = self._fault()
        if fault.isdigit():
            self._answer(int(fault), {}, b"<Error><Code>Refused</Code></Error>")
            return
        if fault == "slow":
            time.sleep(SLOW)
        status, headers, content = self._forward(body)
        if fault == "lost list" and "list-type=2" in self.path:
            content = without_newest(content)
        if fault == "done, and says 503":
            status, content = 503, b""
        self._answer(status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _control(self, body: bytes) -> None:
        if self.command == "PUT":
            self.met.clear()
            self.told.update(json.loads(body))
        self._answer(200, {}, json.dumps(self.met).encode())

    def _fault(self) -> str:
        """What happens to this request, if anything."""
        told = self.told
        meant = told["method"] in ("", self.command) and self.path.partition("?")[0].endswith(told["ending"])
        if not told["fault"] or not meant:
            return ""
        self.met.append(f"{self.command} {self.path}")
        return told["fault"]

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.store, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        with suppress(ConnectionError):  # it did not wait so long
            self._say(status, headers, content)

    def _say(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def without_newest(page: bytes) -> bytes:
    """A list that lacks the newest commit of the table it is about."""
    found = list(_ENTRY.finditer(page))
    if not found:
        return page
    newest = max(found, key=lambda each: each[1])
    return page.replace(newest[0], b"")


def main() -> None:
    Proxy.store = sys.argv[1]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
