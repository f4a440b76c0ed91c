"""The command line: it only parses arguments; each command lives in the module of its name.

`tokensieve eval` takes every flag of `clip_benchmark eval` (1.6.2) under the same name. Nothing heavy is imported before a
command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tokensieve import __version__
from tokensieve.drawing.registry import SHOW_INPUTS
from tokensieve.errors import ProcessLostError, UserError, did_you_mean
from tokensieve.flags import add_flags

TASKS = (
    *("zeroshot_classification", "zeroshot_retrieval", "linear_probe", "captioning", "image_caption_selection", "vqa", "reid"),
    "auto",
)
MODEL_TYPES = ("open_clip", "ja_clip", "hf", "timm", "vlm", "reid")
FUSIONS = ("cls", "weighted", "mean")


class Parser(argparse.ArgumentParser):
    """argparse, but whole flag names only, and a mistake is a UserError of one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def one_of(*options: str) -> Callable[[str], str]:
    """An argument type: one of these words, with the nearest one named when it is another."""

    def check(word: str) -> str:
        if word not in options:
            hint = did_you_mean(word, options)
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(options)}.{hint}")
        return word

    return check


def boolean(word: str) -> bool:
    """An argument type: true or false as it is written (`--normalize False` means False)."""
    if word.lower() in ("true", "yes", "on", "1"):
        return True
    if word.lower() in ("false", "no", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False")


def integer_in(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument type: a whole number that is not below `least`, nor above `most` if there is one."""

    def check(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{word} is too small: at least {least}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"{word} is too large: at most {most}")
        return number

    return check


def fraction(word: str) -> float:
    """An argument type: a number from 0 to 1."""
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 to 1") from None
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not from 0 to 1")
    return number


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and the parser of each command by its name."""
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")

    parser = Parser(
        prog="tokensieve",
        parents=[common],
        description="Keep the vision tokens that matter: select, prune, merge and measure in CLIP models.",
        epilog="tokensieve COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"tokensieve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, help: str, description: str) -> Parser:
        return commands.add_parser(name, help=help, description=description, parents=[common])

    by_name = {
        "eval": command(
            "eval",
            "evaluate models with and without token reduction",
            "Evaluate models on data sets under one or several plans. Without arguments: the model that ships with the "
            "package on its own test set, full and with the plans anchor, random and grid.",
        ),
        "build": command("build", "fold result files into one CSV", "Fold JSON result files into one CSV file."),
        "methods": command("methods", "list the methods a plan can name", "List the methods a plan can name."),
        "bench": command(
            "bench",
            "measure speed against the unreduced model and the oracle",
            "Measure plans in one interleaved run: time, memory and GFLOPs against the unreduced model, and against the "
            "oracle (the same number of tokens, chosen at no cost).",
        ),
        "train": command("train", "train what a YAML file describes", "Train what a YAML file describes."),
        "validate": command(
            "validate",
            "tell every mistake in YAML files",
            "Tell every mistake in YAML files, one a line with its place, without training anything.",
        ),
        "search": command(
            "search",
            "try values for keys of a YAML file",
            "Train what a YAML file describes with many values of the keys that its search_settings name, and keep the best. "
            "The same command again goes on with a search that was stopped.",
        ),
        "show": command(
            "show",
            "draw which patches are kept",
            "Draw into the image which patches a plan keeps, drops and merges, and by which scores.",
        ),
        "report": command("report", "make one HTML page of results", "Make one self-contained HTML page of result files."),
        "families": command(
            "families",
            "list what models can be cut, and where",
            "Try a small model of every family and tell what can be cut where.",
        ),
    }
    by_name["eval"].usage = "tokensieve eval [--dataset NAME ...] [--model NAME ...] [--plan PLAN] [FLAGS]"
    _eval_flags(by_name["eval"])
    _build_flags(by_name["build"])
    _bench_flags(by_name["bench"])
    _train_flags(by_name["train"])
    by_name["validate"].add_argument("files", nargs="+", metavar="FILE", help="YAML files")
    _search_flags(by_name["search"])
    _show_flags(by_name["show"])
    _report_flags(by_name["report"])
    by_name["families"].add_argument("--output", metavar="FILE", help="also write the table as Markdown")
    return parser, by_name


def _eval_flags(parser: Parser) -> None:
    what = parser.add_argument_group("what to evaluate")
    what.add_argument(
        "--dataset",
        nargs="+",
        metavar="NAME",
        help="data sets: names, collections (vtab, vtab+, imagenet_robustness, retrieval), or text files with one name a "
        "line; wds/NAME reads webdataset shards under --dataset_root; with questions: embedded-questions, "
        "embedded-questions-all, vqav2, gqa, jsonl:FILE; to find again: embedded-reid, RGBNT201, RGBNT100, MSVR310 "
        "(default: embedded; for vqa embedded-questions; for reid embedded-reid)",
    )
    what.add_argument(
        "--dataset_root", default="root", metavar="DIR", help="folder of the data; may hold {dataset} and {dataset_cleaned}"
    )
    what.add_argument(
        "--split",
        "--test_split",
        dest="split",
        default="test",
        help="split to evaluate on (default: test; for reid test is query and gallery, val validation identities)",
    )
    what.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help="open_clip architectures (default: the embedded one); with --model_type hf folders or Hub ids, with timm names; "
        "for vqa folders or Hub ids of vision-language models (default: sieve-llava-8); for reid folders of trainings "
        "(default: sieve-reid-6)",
    )
    what.add_argument(
        "--pretrained",
        nargs="+",
        metavar="TAG",
        help="weights for --model: open_clip tags or files; every model is run with every one (default: the embedded ones)",
    )
    what.add_argument(
        "--pretrained_model",
        nargs="+",
        metavar="MODEL,TAG",
        help="instead of --model and --pretrained: pairs, collections (openai, openclip_base, openclip_multilingual, "
        "openclip_all), or text files with one pair a line",
    )
    _model_type_flag(what)
    what.add_argument(
        "--task",
        type=one_of(*TASKS),
        default="auto",
        metavar="TASK",
        help=f"one of {', '.join(TASKS)}; auto takes the data set's own (default)",
    )
    what.add_argument("--language", nargs="+", default=["en"], help="languages of class names and prompts (default: en)")
    what.add_argument("--limit", type=integer_in(1), metavar="N", help="only the first N samples")

    plans = parser.add_argument_group("token reduction (at most one of --plan, --enable_pruning, --enable_token_selection)")
    plans.add_argument("--plan", metavar="PLAN", help="for example 'anchor@6(k=10,m=50,alpha=0.5)', 'random:60', 'none'")
    plans.add_argument("--compare", nargs="+", default=[], metavar="PLAN", help="more plans for the same run")
    plans.add_argument(
        "--enable_pruning", action="store_true", help="cut tokens inside the tower: CLS, k anchors, m more go on"
    )
    plans.add_argument("--k_anchors", type=int, metavar="K", help="with --enable_pruning: anchors (default: 10)")
    plans.add_argument("--top_m", type=int, metavar="M", help="with --enable_pruning: tokens besides the anchors (default: 50)")
    plans.add_argument("--alpha", type=float, help="with --enable_pruning: importance against diversity (default: 0.5)")
    plans.add_argument(
        "--prune_layer", type=int, metavar="L", help="with --enable_pruning: cut after L blocks (default: half of them)"
    )
    plans.add_argument("--enable_token_selection", action="store_true", help="zero the output tokens that are not selected")
    plans.add_argument("--token_selection_k", type=int, metavar="K", help="with it: anchors (default: 10)")
    plans.add_argument("--token_selection_m", type=int, metavar="M", help="with it: tokens besides the anchors (default: 50)")
    plans.add_argument("--token_selection_alpha", type=float, metavar="ALPHA", help="with it: default 0.5")
    plans.add_argument(
        "--token_fusion",
        type=one_of(*FUSIONS),
        default="cls",
        metavar="{" + ",".join(FUSIONS) + "}",
        help="the image feature: the model's own (default), mixed with the selected patches, or their mean (a control)",
    )
    plans.add_argument(
        "--token_fusion_weight",
        type=fraction,
        metavar="W",
        help="with --token_fusion weighted: share of the model's own feature (default: 0.8)",
    )
    _weights_flag(plans)
    plans.add_argument("--strict", action="store_true", help="a tower that cannot be cut is an error, not a remark")

    how = parser.add_argument_group("how to run")
    how.add_argument("--batch_size", type=integer_in(1), default=64, metavar="N", help="default: 64")
    how.add_argument("--num_workers", type=integer_in(0), default=4, metavar="N", help="processes that read data (default: 4)")
    how.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    how.add_argument("--amp", action="store_true", default=None, help="mixed precision (default on CUDA, off elsewhere)")
    how.add_argument("--no_amp", action="store_false", dest="amp", help="full precision everywhere")
    how.add_argument("--seed", type=integer_in(0, 2**32 - 1), default=0, help="default: 0")
    how.add_argument(
        "--distributed",
        action="store_true",
        help="share the data among the processes that SLURM or MPI started (torchrun and srun are noticed without it)",
    )
    how.add_argument(
        "--timeout",
        type=integer_in(1),
        default=1800,
        metavar="SECONDS",
        help="with several processes: how long one may wait for another's part of the data (default: 1800)",
    )
    how.add_argument("--max_broken", type=fraction, default=0.01, help="share of images that may be unreadable (default: 0.01)")
    how.add_argument("--quiet", dest="verbose", action="store_false", help="no progress, no table")

    texts = parser.add_argument_group("class names and prompts")
    texts.add_argument("--custom_classname_file", metavar="JSON", help="class names by data set")
    texts.add_argument("--custom_template_file", metavar="JSON", help="prompts by data set, e.g. cupl_prompts.json")
    texts.add_argument("--dump_classnames", action="store_true", help="put the class names into the result")
    texts.add_argument("--dump_templates", action="store_true", help="put the prompts into the result")
    texts.add_argument("--save_clf", metavar="FILE", help="save the classifier that the text tower makes")
    texts.add_argument("--load_clfs", nargs="+", default=[], metavar="FILE", help="use the mean of saved classifiers")

    files = parser.add_argument_group("files")
    files.add_argument(
        "--output",
        metavar="TEMPLATE",
        help="result file; may hold {dataset} {pretrained} {pretrained_full_path} {model} {language} {task} {plan} "
        "(default: {dataset}_{pretrained}_{model}_{language}_{task}.json)",
    )
    files.add_argument(
        "--skip_existing", action="store_true", help="skip a run whose result is there, made by the same settings"
    )
    files.add_argument("--model_cache_dir", metavar="DIR", help="where downloaded weights are kept")
    files.add_argument("--wds_cache_dir", metavar="DIR", help="where downloaded webdataset shards are kept")
    files.add_argument("--annotation_file", default="", metavar="FILE", help="captions, where a data set has them apart")

    retrieval = parser.add_argument_group("zeroshot_retrieval")
    retrieval.add_argument(
        "--recall_k", nargs="+", type=integer_in(1), default=[5], metavar="K", help="the k of recall@k (default: 5)"
    )

    vqa = parser.add_argument_group("vqa")
    vqa.add_argument("--questions", metavar="FILE", help="of vqav2 or gqa (default: the published file in --dataset_root)")
    vqa.add_argument("--annotations", metavar="FILE", help="answers of vqav2 (default: the published file in --dataset_root)")
    vqa.add_argument("--images", metavar="DIR", help="of the images (default: in --dataset_root, or the folder of the JSONL)")
    vqa.add_argument(
        "--vqa_prompt",
        metavar="TEXT",
        help="what is asked; holds {question} (default: '{question}' for embedded data, else with "
        "'Answer the question using a single word or phrase.' on a line below)",
    )
    vqa.add_argument("--max_new_tokens", type=integer_in(1), default=16, metavar="N", help="longest answer (default: 16)")
    vqa.add_argument("--blind", action="store_true", help="show a grey picture in place of every image: what guessing gives")

    reid = parser.add_argument_group("reid (its plans by default: the model's own, none, random, grid and anchor)")
    reid.add_argument(
        "--modalities",
        nargs="+",
        metavar="A,B",
        help="modalities to compare objects by, for example RGB,NI,TI RGB,NI RGB; the first is the headline "
        "(default: every combination of the model's, all first)",
    )
    reid.add_argument(
        "--val_identities",
        type=integer_in(1),
        metavar="N",
        help="with --split val: how many identities of the training set are for validation (default: the training's)",
    )

    probe = parser.add_argument_group("linear_probe")
    probe.add_argument("--train_split", nargs="+", default=["train"], help="training split of each data set (default: train)")
    held_out = probe.add_mutually_exclusive_group()
    held_out.add_argument("--val_split", nargs="+", help="validation split of each data set, to choose the weight decay")
    held_out.add_argument(
        "--val_proportion", nargs="+", type=fraction, help="share of the training split held out for that instead"
    )
    probe.add_argument("--fewshot_k", type=int, default=-1, metavar="K", help="images of each class (default: -1, all)")
    probe.add_argument("--fewshot_epochs", type=integer_in(1), default=10, metavar="N", help="default: 10")
    probe.add_argument("--fewshot_lr", type=float, default=0.1, metavar="LR", help="default: 0.1")
    probe.add_argument("--normalize", type=boolean, default=True, metavar="True|False", help="unit features (default: True)")
    probe.add_argument("--feature_root", default="features", metavar="DIR", help="where features are kept (default: features)")
    probe.add_argument("--skip_load", action="store_true", help="the features are there from an earlier run: load no model")


def _model_type_flag(parser: Any) -> None:
    parser.add_argument(
        "--model_type",
        type=one_of(*MODEL_TYPES),
        default="open_clip",
        metavar="{" + ",".join(MODEL_TYPES) + "}",
        help="the library that the model comes from (default: open_clip)",
    )


def _weights_flag(parser: Any) -> None:
    parser.add_argument(
        "--weights",
        nargs="+",
        metavar="FILE",
        help="trained weights of methods in the plan, such as learned: files, folders, ids on the Hub",
    )


def _build_flags(parser: Parser) -> None:
    parser.add_argument("files", nargs="+", help="JSON result files, or folders of them")
    parser.add_argument("--output", default="benchmark.csv", metavar="FILE", help="default: benchmark.csv")


def _bench_flags(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name of an architecture (default: the ViT-B/16 of its type); with --model_type vlm a folder or a Hub id "
        "(default: sieve-llava-8)",
    )
    _model_type_flag(parser)
    parser.add_argument("--pretrained", default="", metavar="TAG", help="weights (default: random ones; speed is the same)")
    parser.add_argument(
        "--plan", nargs="+", metavar="PLAN", help="plans to measure (default: anchor(k=10,m=50); with vlm anchor@out:50%%)"
    )
    parser.add_argument("--batch_size", nargs="+", type=integer_in(1), metavar="N", help="default: 16; with vlm 1 and 16")
    parser.add_argument("--repeats", type=integer_in(1), default=10, help="rounds of the interleaved run (default: 10)")
    _weights_flag(parser)
    parser.add_argument("--image_size", type=integer_in(1), metavar="PIXELS", help="default: the model's own")
    vlm = parser.add_argument_group("vision-language models (--model_type vlm)")
    vlm.add_argument("--new_tokens", type=integer_in(1), default=16, metavar="N", help="tokens to generate (default: 16)")
    vlm.add_argument("--text_tokens", type=integer_in(2), default=16, metavar="N", help="words of the prompt (default: 16)")
    vlm.add_argument(
        "--break_even",
        action="store_true",
        help="also find from how many vision tokens on a plan is faster, on models of this shape with random weights, one at a "
        "time, each beside the model itself: twice its memory",
    )
    parser.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--output", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")


def _train_flags(parser: Parser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", metavar="DIR", help="folder of the run (default: the one the file names)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _search_flags(parser: Parser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file with search_settings")
    parser.add_argument("--output", metavar="DIR", help="folder of the search (default: the one the file names)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")


def _show_flags(parser: Parser) -> None:
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="; ".join(kind.summary for kind in SHOW_INPUTS.values()),
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="default: anchor(k=10,m=50,alpha=0.5); of re-identification what the model was trained with",
    )
    parser.add_argument("--compare", nargs="+", default=[], metavar="PLAN", help="more plans, side by side")
    for kind in SHOW_INPUTS.values():
        add_flags(parser, kind.flags)
    parser.add_argument(
        "--model", metavar="NAME", help="default: the embedded one; of re-identification also the folder of a training"
    )
    parser.add_argument("--pretrained", metavar="TAG", help="weights of the model")
    _model_type_flag(parser)
    _weights_flag(parser)
    parser.add_argument("--output", metavar="FILE", help="the PNG to write")
    parser.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--seed", type=integer_in(0, 2**32 - 1), default=0, help="default: 0")


def _report_flags(parser: Parser) -> None:
    parser.add_argument("files", nargs="+", metavar="RESULTS", help="JSON result files, or folders of them")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="default: report.html")
    parser.add_argument("--title", help="the page's heading")
    parser.add_argument(
        "--images", type=integer_in(0), default=2, metavar="N", help="example pictures for each model (default: 2)"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, or a UserError that names the nearest command or flag."""
    parser, by_name = build_parser()
    first = next((word for word in argv if not word.startswith("-")), None)
    if first is not None and first not in by_name:
        raise UserError(f"{first!r} is not a command: use {', '.join(by_name)}.{did_you_mean(first, by_name)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        current = by_name.get(args.command, parser)
        word = next((u for u in unknown if u.startswith("-")), unknown[0])
        known = [flag for action in current._actions for flag in action.option_strings]
        flag = word.split("=", 1)[0]
        raise UserError(f"{current.prog} has no argument {flag!r}.{did_you_mean(flag, known)} (see {current.prog} --help)")
    if args.command is None:
        parser.print_help()
    return args


def dispatch(args: argparse.Namespace) -> int:
    """Run the command that was parsed; the exit code."""
    if args.command == "eval":
        from tokensieve.evaluation import run

        run.run(args)
    elif args.command == "build":
        from tokensieve.evaluation import csv_table

        rows = csv_table.build_csv(args.files, args.output)
        print(f"{rows} results in {args.output}")
    elif args.command == "methods":
        _print_methods()
    elif args.command == "bench" and args.model_type == "vlm":
        _bench_vlm(args)
    elif args.command == "bench":
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler speaks up unless told before torch is loaded
        from tokensieve.measuring import vision

        vision.run(
            args.model,
            args.pretrained,
            args.plan,
            args.batch_size,
            args.repeats,
            args.device,
            args.output,
            args.quiet,
            image_size=args.image_size,
            model_type=args.model_type,
            weights=args.weights,
        )
    elif args.command == "train":
        from tokensieve import config, search, training

        if config.load(args.config).searches:
            search.run(args.config, output=args.output, quiet=args.quiet)
        else:
            training.run(args.config, resume=args.resume, quiet=args.quiet, output=args.output)
    elif args.command == "validate":
        from tokensieve import config

        return config.validate(args.files)
    elif args.command == "search":
        from tokensieve import search

        search.run(args.config, output=args.output, quiet=args.quiet)
    elif args.command == "show":
        from tokensieve.drawing import show

        show.run(args)
    elif args.command == "report":
        from tokensieve import report

        report.run(args)
    elif args.command == "families":
        from tokensieve.measuring import families

        families.run(args)
    return 0


def _bench_vlm(args: argparse.Namespace) -> None:
    for flag in ("pretrained", "image_size"):
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --model_type vlm: the model's own weights and image size are measured.")
    from tokensieve.measuring.vlm import run

    run(
        args.model,
        args.plan,
        args.batch_size,
        args.repeats,
        args.new_tokens,
        args.text_tokens,
        args.device,
        args.output,
        args.quiet,
        weights=args.weights,
        crossing=args.break_even,
    )


def _print_methods() -> None:
    from tokensieve import list_methods

    for method in list_methods():
        options = ", ".join(f"{name}={option.default}" for name, option in method.options.items())
        about = [
            f"needs {' and '.join(method.needs)}" if method.needs else "needs nothing but the tokens",
            f"options {options}" if options else "no options",
            *([f"paper: {method.paper}"] if method.paper else []),
        ]
        print(f"{method.name:<10} {method.summary}\n{'':<10} {'; '.join(about)}")


def _exit_on_sigterm(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 a fault of ours, 2 a mistake in the input, 130 interrupted, 143 terminated."""
    argv = sys.argv[1:] if argv is None else list(argv)
    in_charge = threading.current_thread() is threading.main_thread()  # only there can signals be taken
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm) if in_charge else None
    try:
        code = dispatch(parse(argv))
        sys.stdout.flush()
    except UserError as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(f"tokensieve: error: {error}", file=sys.stderr)
        return 2
    except ProcessLostError as error:
        print(f"tokensieve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tokensieve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`tokensieve methods | head`): not our error, but nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--debug" in argv:
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"tokensieve: unforeseen {said} (run again with --debug for the traceback)", file=sys.stderr)
        return 1
    finally:
        if in_charge:
            signal.signal(signal.SIGTERM, before)
    return code
