"""`tokensieve methods`: list the methods that a plan can name."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command


def add_methods_flags(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run_methods(args: argparse.Namespace) -> None:
    from tokensieve import list_methods

    for method in list_methods():
        options = ", ".join(f"{name}={option.default}" for name, option in method.options.items())
        about = [
            f"needs {' and '.join(method.needs) or ('the image alone' if method.on_image else 'nothing but the tokens')}",
            f"options {options}" if options else "no options",
            *([f"paper: {method.paper}"] if method.paper else []),
        ]
        print(f"{method.name:<10} {method.summary}\n{'':<10} {'; '.join(about)}")


COMMANDS.add(
    Command(
        "methods",
        "list the methods a plan can name",
        "List the methods a plan can name.",
        add_methods_flags,
        run_methods,
        order=30,
    ),
    origin=__name__,
)
