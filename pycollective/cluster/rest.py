"""Requests to an HTTP API with JSON answers, for the resolvers that need one.

Every rank imports this module, but few send requests. The slow import of the HTTP modules is therefore
done at the first request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

SECONDS = 10.0
_LIMIT = 64 << 20
_SHOWN = 300


class Refusal(RuntimeError):
    """An error that the API answered.

    Attributes
    ----------
    status : int
        The HTTP status.
    """

    def __init__(self, what: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{what} answers {status}: {text}")


def ask(
    what: str,
    url: str,
    *,
    token: str = "",
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    direct: bool = False,
) -> dict[str, Any]:
    """Send a request and return the JSON object of the answer."""
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """A handler that refuses redirects, because another server would get the token."""

        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    sent = {"Accept": "application/json", **(headers or {})}
    if token:
        sent["Authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        data, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
    handlers: list[Any] = [NoRedirects()]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    if direct:
        handlers.append(urllib.request.ProxyHandler({}))
    where = urllib.parse.urlsplit(url).netloc
    request = urllib.request.Request(url, data, sent)
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=SECONDS) as answer:
            text = answer.read(_LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            raise Refusal(what, error.code, _message(error.read(1 << 16), error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise RuntimeError(f"{what} cannot be reached at {where}: {reason}") from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RuntimeError(f"{what} at {where} did not answer with a JSON object: {text[:60]!r}")
    return found


def _message(text: bytes, reason: str) -> str:
    """Return the text in an error's body; Kubernetes and Google have different keys for it."""
    try:
        found = json.loads(text)
        said = found.get("message") or found["error"]["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        said = reason
    return "".join(c if c.isprintable() else "?" for c in str(said)[:_SHOWN])
