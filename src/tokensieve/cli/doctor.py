"""`tokensieve doctor`: check the installation."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict

from tokensieve.cli.registry import COMMANDS, Command, Result

WIDTH, NAME = 79, 15  # letters of a line, and of the names in it


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """It has the flags of every command only."""


def run_doctor(args: argparse.Namespace) -> Result:
    from tokensieve.testing import doctor

    found, section = [], ""
    for finding in doctor.examine():
        found.append(finding)
        if args.as_json or (args.quiet and finding.state != doctor.BAD):
            continue
        if finding.section != section:
            print(f"{finding.section}", flush=True)
            section = finding.section
        head = f"  {finding.state:<8} {finding.name:<{NAME}} "
        lines = textwrap.wrap(finding.text, WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
        print(head + f"\n{' ' * len(head)}".join(lines), flush=True)
    problems = [finding.name for finding in found if finding.state == doctor.BAD]
    if not args.as_json and not args.quiet:
        print(f"problems: {', '.join(problems)}" if problems else "everything that is installed works")
    return Result({"findings": [asdict(finding) for finding in found], "problems": problems}, 1 if problems else 0)


COMMANDS.add(
    Command(
        "doctor",
        "check the installation, with a self-test",
        "Check the installation: versions against their bounds, extras that are missing and what they are for, devices, "
        "folders, and a plan on the embedded model, applied and removed. Takes about ten seconds. The exit code is 1 if "
        "something is to be mended; a missing extra is not.",
        add_doctor_flags,
        run_doctor,
        order=110,
        examples=("tokensieve doctor", "tokensieve doctor --quiet", "tokensieve doctor --json"),
    ),
    origin=__name__,
)
