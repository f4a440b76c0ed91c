"""`tokensieve train`: train what a YAML file describes, or search if the file turns a search on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from tokensieve.cli import overrides
from tokensieve.cli.registry import COMMANDS, Command, Result
from tokensieve.errors import UserError
from tokensieve.flags import COMMON, WANDB


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG KEY=VALUE",
        help=f"YAML file, or the name of a shipped one (tokensieve configs); then {overrides.HELP}",
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
    WANDB.add_to(parser)
    parser.add_argument("--exp_name", metavar="NAME", help="the folder of this name in the one that the file names")


def run_train(args: argparse.Namespace) -> Result:
    from tokensieve import config, files

    path, values = _file_and_values(args)
    if args.data is not None:
        values = {"dataset_settings": f"{{name: {args.data}}}"} | values
    made = config.load(path, values)
    output = args.output
    if args.exp_name is not None:
        if output is not None:
            raise UserError("--output and --exp_name both name the folder of the run; give one of them")
        output = str(made.output / args.exp_name)
    if made.searches:
        from tokensieve import search

        return Result(search.summary(search.run(path, output=output, quiet=args.quiet, overrides=values, wandb=args.wandb)))
    from tokensieve import training
    from tokensieve.training import launch

    launch.start_processes(made, _command(args, path, values))
    folder = training.run(path, resume=args.resume, quiet=args.quiet, output=output, overrides=values, wandb=args.wandb)
    evaluation = folder / "result.json"
    return Result({"folder": str(folder), "evaluation": files.read_json(evaluation) if evaluation.exists() else None})


def _command(args: argparse.Namespace, path: str, values: Mapping[str, str]) -> list[str]:
    """The words of the same command, for processes that take the place of this one."""
    words = ["train", path, *(f"{key}={value}" for key, value in values.items())]
    for name in ("output", "exp_name", "wandb"):
        if getattr(args, name) is not None:
            words += [f"--{name}", getattr(args, name)]
    words += [word for file in args.plugin or () for word in ("--plugin", file)]
    words += [f"--{flag.name}" for flag in COMMON if flag.switch and getattr(args, flag.dest)]
    if args.resume is not False:
        words += ["--resume"] if args.resume is True else ["--resume", str(args.resume)]
    return words


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
    return path, overrides.read_overrides(words)


COMMANDS.add(
    Command(
        "train",
        "train what a YAML file describes",
        "Train what a YAML file describes. Keys of every file: keep_checkpoints (a number, or all; SOLVER.KEEP_CHECKPOINTS for "
        "re-identification) is how many checkpoints stay for --resume STEP and --weights; manager_settings.available_gpus and "
        "gpus_per_subtask start as many processes; manager_settings.mode: optuna searches instead. Keys of two-stage VLM "
        "pruning: monitor (accuracy_hard or loss) chooses the best step; max_vision_tokens and image_max_size save memory. "
        "See docs/guide.md and docs/vlm-pruning.md.",
        add_train_flags,
        run_train,
        usage="tokensieve train [options] CONFIG [KEY=VALUE ...]",
        order=50,
        examples=(
            "tokensieve train embedded_vlm",
            "tokensieve train configs/learned_selector.yaml optimizer.lr=1e-3 steps=30 --output outputs/short",
            "tokensieve train configs/embedded_reid.yml SOLVER.SEED=2 --exp_name second",
        ),
    ),
    origin=__name__,
)
