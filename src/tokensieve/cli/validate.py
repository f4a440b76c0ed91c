"""`tokensieve validate`: check YAML files without training anything."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tokensieve.cli import overrides
from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.errors import UserError


def add_validate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE KEY=VALUE",
        help=f"YAML files, or names of shipped ones (tokensieve configs); then {overrides.HELP}",
    )


def run_validate(args: argparse.Namespace) -> Result:
    from tokensieve import config

    files, values = overrides.split_files(args.files)
    if not files:
        raise UserError("which FILE? Give the path of a YAML file, such as tokensieve validate configs/embedded_vlm.yaml")
    found = [config.validate(file, values) for file in files]
    for one in found if not args.as_json else ():
        for line in one.errors:
            print(line)
        if not one.errors and not args.quiet:
            print(f"{one.file}: ok: {one.summary}")
            for note in one.notes:
                print(f"{one.file}: note: {note}")
    return Result([asdict(one) for one in found], 2 if any(one.errors for one in found) else 0)


COMMANDS.add(
    Command(
        "validate",
        "check YAML files and list all errors",
        "Check YAML files and list all errors, one a line with its place, without training anything.",
        add_validate_flags,
        run_validate,
        usage="tokensieve validate [options] FILE [FILE ...] [KEY=VALUE ...]",
        order=60,
        examples=(
            "tokensieve validate my.yaml",
            "tokensieve validate embedded_clip optimizer.lr=1e-4",
            "tokensieve validate configs/RGBNT201/DeMo_SDTPS.yml SOLVER.IMS_PER_BATCH=64 --json",
        ),
    ),
    origin=__name__,
)
