"""What every request of the page passes: it must be for this machine and from this page. And what every answer says.

A page of another site could send requests to a server on this machine, or make its own name point to it (DNS rebinding). Its
requests have another Host or Origin, so they are refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokensieve.errors import short

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
LOCAL = ("localhost", "127.0.0.1", "::1")


class Guard:
    """An ASGI middleware.

    Args:
        hosts: the names and addresses by which the server may be called.
        takes_numbers: any address in numbers too, which no other site can make its own.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = LOCAL, takes_numbers: bool = False) -> None:
        self.app, self.hosts, self.takes_numbers = app, frozenset(map(str.lower, hosts)), takes_numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no websockets

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", []))
                given = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*own, *(header for header in given if header[0] not in dict(own))]}
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reason = self._problem(scope, headers)
        if reason is None:
            await self.app(scope, receive, send_with_headers)
            return
        from starlette.responses import JSONResponse

        await JSONResponse({"error": {"message": reason}}, status_code=403)(scope, receive, send_with_headers)

    def _problem(self, scope: dict[str, Any] | Any, headers: dict[str, str]) -> str | None:
        host = headers.get("host", "")
        if not self._is_ours(host_name(host)):
            return f"this server is not {short(host)!r}; open the address that `tokensieve demo` printed"
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            return "requests of other sites are refused"
        if headers.get("sec-fetch-site", "none") in ("cross-site", "same-site") and scope["path"] != "/":
            return "requests of other sites are refused"
        return None

    def _is_ours(self, name: str) -> bool:
        if name in self.hosts or not self.takes_numbers:
            return name in self.hosts
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("127.0.0.1:7860"), host_name("[::1]:7860"), host_name("localhost")
    ('127.0.0.1', '::1', 'localhost')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
