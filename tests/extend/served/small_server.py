"""A real HTTP server with the two endpoints that are asked, around any function of a prompt."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Complete = Callable[[str, int], dict]
"""Prompt and number of tokens -> the JSON of an answer."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET /v1/models and POST /v1/completions."""

    def do_GET(self):
        self.server.before(self)
        self.send(200, {"object": "list", "data": self.server.models})

    def do_POST(self):
        self.server.before(self)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        status, answer = 200, self.server.complete(asked["prompt"], asked["max_tokens"])
        if isinstance(answer, tuple):
            status, answer = answer
        self.send(status, answer)

    def send(self, status: int, answer: object, **headers: str) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""


def completion(text: str, num_read: int) -> dict:
    """An answer as the OpenAI API has it."""
    return {"choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": num_read}}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """Say nothing of a client that hangs up."""


@contextlib.contextmanager
def serving(
    complete: Complete, models: list | None = None, before: Callable = lambda handler: None
) -> Iterator[Server]:
    """Run a server of `complete`; its address is `server.address`, and `server.asked` collects what
    it was asked. before: called with the handler of each request first."""
    server = Server(("127.0.0.1", 0), Handler)
    server.complete, server.before, server.asked = complete, before, []
    server.models = [{"id": "the model"}] if models is None else models
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
