"""Ask an OpenAI-compatible completions endpoint for the most likely tokens after a prompt."""

import http.client
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from posenc.command_line.errors import RunFailed

SECONDS_TO_CONNECT = 10.0
"""Seconds within which the server must take a connection, and say which models it has."""
SECONDS_TO_ANSWER = 600.0
"""Seconds within which it must answer one prompt; chosen, not derived."""
MAX_ANSWER_BYTES = 2**24
"""Bytes of the largest answer that is read."""
MAX_LETTERS_OF_MESSAGE = 300
"""Letters of a server's own message that are shown."""


class Completion(NamedTuple):
    """Hold the text that a server adds to a prompt, and how many tokens of the prompt it says that
    it has read."""

    text: str
    num_read: int


@dataclass(frozen=True)
class CompletionsServer:
    """Ask the server at `url`, which ends in /v1, for completions of its model `model`.

    max_length: tokens that it serves, as it says; None if it does not.
    """

    url: SplitResult
    model: str
    max_length: int | None = None

    def complete(self, prompt: str, num_tokens: int) -> Completion:
        """Return the `num_tokens` most likely tokens after the prompt, as the server makes them.

        Raises: RunFailed for a server that hangs, refuses, or answers something else.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": False,
        }
        answer = _ask(self.url, "/completions", SECONDS_TO_ANSWER, body)
        choices = answer.get("choices")
        usage = answer.get("usage")
        first_choice = choices[0] if isinstance(choices, list) and choices else None
        text = first_choice.get("text") if isinstance(first_choice, dict) else None
        num_read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(text, str):
            raise RunFailed(
                f"{self.url.geturl()}/completions: expected choices[0].text, got {_shown(answer)}."
            )
        if not isinstance(num_read, int) or isinstance(num_read, bool):
            raise RunFailed(
                f"{self.url.geturl()}/completions: its answer has no usage.prompt_tokens, so that "
                "nobody sees whether it read the whole prompt; take a server that counts."
            )
        return Completion(text, num_read)


def find_server(address: str, folder: Path) -> CompletionsServer:
    """Return the server at an address that the user names, with the name of its model: the one that
    is called as `folder`, or its only one, or else the folder's path.

    Raises: ValueError for an address that is none; RunFailed if no server answers there.
    """
    url = _parse_address(address)
    models = _ask(url, "/models", SECONDS_TO_CONNECT).get("data")
    described = [m for m in models if isinstance(m, dict)] if isinstance(models, list) else []
    named = [m for m in described if isinstance(m.get("id"), str)]
    path = str(folder.resolve())
    alike = [m for m in named if m["id"].rstrip("/") in (str(folder), path, folder.resolve().name)]
    chosen = alike or (named if len(named) == 1 else [{"id": path}])
    max_length = chosen[0].get("max_model_len")
    return CompletionsServer(
        url, chosen[0]["id"], max_length if isinstance(max_length, int) else None
    )


def _parse_address(address: str) -> SplitResult:
    """Return the address of the endpoints, ending in /v1. Raises: ValueError for anything but
    http://HOST:PORT or https://HOST:PORT, perhaps with a path."""
    refusal = ValueError(
        f"--server must be the address of a server, as http://localhost:8000, got {address!r}."
    )
    try:
        url = urlsplit(address)
        port_is_right = url.port is None or url.port > 0  # .port raises for other numbers
    except ValueError:
        raise refusal from None
    is_address = url.scheme in ("http", "https") and bool(url.hostname)
    if not is_address or not port_is_right or url.query or url.fragment or "@" in url.netloc:
        raise refusal
    path = url.path.rstrip("/").removesuffix("/completions")
    return url._replace(path=path if path.endswith("/v1") else f"{path}/v1")


def _ask(
    url: SplitResult, endpoint: str, seconds: float, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON object with which the server answers a GET, or a POST of `body`.

    Raises: RunFailed with one sentence for everything else that it may do. Redirects are not
    followed, because they lead to servers that nobody named.
    """
    full_address = url.geturl() + endpoint
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connect(url.hostname or "", url.port, timeout=min(seconds, SECONDS_TO_CONNECT))
    is_too_late = threading.Event()
    timer = threading.Timer(seconds, _hang_up, (connection, is_too_late))
    timer.daemon = True
    try:
        connection.connect()
        connection.sock.settimeout(None)  # the timer ends an answer that takes too long in all
        timer.start()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        method = "GET" if body is None else "POST"
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, url.path + endpoint, content, headers)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        if is_too_late.is_set():
            raise RunFailed(
                f"{full_address}: no answer within {seconds:g} seconds; look at the server."
            ) from None
        reason = " ".join(str(error).split())[:MAX_LETTERS_OF_MESSAGE] or type(error).__name__
        raise RunFailed(
            f"{full_address}: no server answers there ({reason}); start it, and give --server the "
            "address that it prints."
        ) from error
    finally:
        timer.cancel()
        connection.close()
    if is_too_late.is_set():  # what arrived before it was cut off
        raise RunFailed(
            f"{full_address}: no whole answer within {seconds:g} seconds; look at the server."
        )
    return _read_answer(full_address, response, answer)


def _hang_up(connection: http.client.HTTPConnection, is_too_late: threading.Event) -> None:
    """End a connection that another thread waits for."""
    is_too_late.set()
    if connection.sock is not None:
        try:
            connection.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was closed meanwhile
            return


def _read_answer(
    full_address: str, response: http.client.HTTPResponse, answer: bytes
) -> dict[str, Any]:
    """Return the JSON object of an answer. Raises: RunFailed for a refusal, and for no object."""
    if 300 <= response.status < 400:
        target = " ".join(str(response.getheader("Location")).split())[:MAX_LETTERS_OF_MESSAGE]
        raise RunFailed(
            f"{full_address}: it redirects to {target}, which is not followed; give --server the "
            "address that answers."
        )
    try:
        parsed = json.loads(answer) if len(answer) <= MAX_ANSWER_BYTES else None
    except (ValueError, RecursionError):
        parsed = None
    if response.status != http.client.OK:
        raise RunFailed(
            f"{full_address}: the server refuses ({response.status}): "
            f"{_shown(_message_of(parsed, answer))}."
        )
    if not isinstance(parsed, dict):
        raise RunFailed(
            f"{full_address}: expected a JSON object, got {_shown(answer[:MAX_LETTERS_OF_MESSAGE])}"
            "; is it an OpenAI-compatible server?"
        )
    return parsed


def _message_of(parsed: Any, answer: bytes) -> Any:
    """Return the message of a refusal: error.message, message or detail of its JSON, or all of
    it."""
    for holder in (parsed.get("error"), parsed) if isinstance(parsed, dict) else ():
        if isinstance(holder, str):
            return holder
        for name in ("message", "detail"):
            if isinstance(holder, dict) and isinstance(holder.get(name), str):
                return holder[name]
    return answer[:MAX_LETTERS_OF_MESSAGE]


def _shown(value: Any) -> str:
    """Return what a server sent, for a message: one line of printable letters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    line = " ".join(text.split()).rstrip(".")[:MAX_LETTERS_OF_MESSAGE]
    return "".join(c if c.isprintable() else "?" for c in line) or "nothing"
