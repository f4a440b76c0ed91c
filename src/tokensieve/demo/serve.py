"""Starting the server of the page."""

from __future__ import annotations

import argparse
import socket
import sys

from tokensieve.demo.guard import LOCAL
from tokensieve.errors import UserError
from tokensieve.installation.packages import naming_extras


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    with naming_extras():
        import uvicorn

        from tokensieve.demo.app import make_app
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
        is_local = args.host in LOCAL
        if not is_local:
            print(f"tokensieve: --host {args.host}: others on the network can use this page too", file=sys.stderr)
        app = make_app(session, hosts=host_names(args.host), takes_numbers=not is_local)
        config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=2, ws="none")
        uvicorn.Server(config).run(sockets=[opened])
        for worker in app.state.workers:
            worker.close()
    return 0


def host_names(host: str) -> tuple[str, ...]:
    """The names by which a server of `--host` may be called: on the network also those of this machine."""
    return LOCAL if host in LOCAL else (*LOCAL, host, socket.gethostname())


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
