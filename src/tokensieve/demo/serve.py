"""Starting the server of the page."""

from __future__ import annotations

import argparse
import socket
import sys

from tokensieve.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    try:
        import uvicorn

        from tokensieve.demo.app import make_app
    except ImportError as error:
        if error.name and error.name.partition(".")[0] not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise UserError("tokensieve demo needs FastAPI and uvicorn: type pip install 'tokensieve[demo]'") from error
    from tokensieve.demo.guard import LOCAL
    from tokensieve.demo.session import Session
    from tokensieve.demo.subject import find_models

    opened = bind(args.host, args.port)
    with opened:
        names = find_models(args)
        session = Session(names, args.device, args.weights)
        if len(names) == 1:
            session.subject(names[0].model)  # what is wrong with it is said before the address is
        port = opened.getsockname()[1]
        shown = f"[{args.host}]" if ":" in args.host else args.host
        print(f"tokensieve demo: open http://{shown}:{port} in a browser; Ctrl-C ends it", flush=True)
        is_local = args.host in LOOPBACK
        if not is_local:
            print(f"tokensieve: --host {args.host}: others on the network can use this page too", file=sys.stderr)
        app = make_app(session, hosts=LOCAL if is_local else ())
        config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=2, ws="none")
        uvicorn.Server(config).run(sockets=[opened])
        app.state.worker.close()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; a UserError if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--host {host} is no address of this machine: use 127.0.0.1") from error
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen()
    except OSError as error:
        opened.close()
        raise UserError(
            f"--port {port} of {host} cannot be used ({error.strerror}): another program has it, say. Give another one, "
            f"such as --port {port + 1 if 0 < port < 65535 else 7860}, or --port 0 for any that is free"
        ) from error
    return opened
