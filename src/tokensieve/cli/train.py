"""`tokensieve train`: train what a YAML file describes, or search if the file turns a search on."""

from __future__ import annotations

import argparse

from tokensieve.cli.registry import COMMANDS, Command
from tokensieve.errors import UserError


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG KEY VALUE",
        help="YAML file, and values that replace those of its keys, such as MODEL.SDTPS_BETA 0.3",
    )
    parser.add_argument("--config_file", metavar="CONFIG", help="the YAML file, if it is not the first word")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="STEP",
        help="go on from the last checkpoint, or from that of a step (see keep_checkpoints in the file)",
    )
    parser.add_argument(
        "--data",
        choices=["embedded"],
        help="train on the embedded questions, whatever data the file names (two-stage VLM pruning)",
    )
    parser.add_argument("--output", metavar="DIR", help="folder of the run (default: the one the file names)")
    parser.add_argument("--exp_name", metavar="NAME", help="the folder of this name in the one that the file names")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run_train(args: argparse.Namespace) -> None:
    from tokensieve import config

    path, overrides = _file_and_values(args)
    if args.data is not None:
        overrides = {"dataset_settings": f"{{name: {args.data}}}"} | overrides
    made = config.load(path, overrides)
    output = args.output
    if args.exp_name is not None:
        if output is not None:
            raise UserError("--output and --exp_name both name the folder of the run; give one of them")
        output = str(made.output / args.exp_name)
    if made.searches:
        from tokensieve import search

        if overrides:
            raise UserError(f"{path} turns a search on, and its trials read the file; write {', '.join(overrides)} there")
        search.run(path, output=output, quiet=args.quiet)
    else:
        from tokensieve import training

        training.run(path, resume=args.resume, quiet=args.quiet, output=output, overrides=overrides)


def _file_and_values(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The file, and the values of keys that come after it."""
    words = list(args.words)
    if isinstance(args.resume, str) and args.resume.isdigit():
        args.resume = int(args.resume)
    elif isinstance(args.resume, str):  # no step: the word that follows --resume is the file
        words, args.resume = [args.resume, *words], True
    path = args.config_file or (words.pop(0) if words else None)
    if path is None:
        raise UserError("which CONFIG? Give the path of a YAML file, such as tokensieve train configs/embedded_reid.yml")
    keys, values = words[::2], words[1::2]
    if len(keys) > len(values):
        raise UserError(f"{keys[-1]} has no value; after the file come pairs KEY VALUE, such as SOLVER.SEED 2")
    return path, dict(zip(keys, values, strict=True))


COMMANDS.add(
    Command(
        "train",
        "train what a YAML file describes",
        "Train what a YAML file describes.",
        add_train_flags,
        run_train,
        usage="tokensieve train [options] CONFIG [KEY VALUE ...]",
        order=50,
    ),
    origin=__name__,
)
