"""`tokensieve methods`: a table of the methods that a plan can name, and one page about each."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import TYPE_CHECKING, Any

from tokensieve.cli.registry import COMMANDS, Command, Result

if TYPE_CHECKING:
    from tokensieve.methods.registry import Method

INTRODUCTION = """# Methods

Every method that a plan can name, written by `tokensieve methods --markdown`. A name alone means what its authors mean: their
place and their budget, at the same relative depth of any model. `@` and `:` replace them: `tome` is `tome@*.attn:-8`,
`evit:50%` stands in the paper's blocks with another rate. Places are those of a tower of 12 blocks and a decoder of 32 layers.
`tokensieve methods NAME` prints the page of a method with its options. [add-a-method.md](add-a-method.md) says how to add
one."""


def add_methods_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print the page of this method: its rule, its options and a plan to copy")
    parser.add_argument("--markdown", action="store_true", help="print all methods as a Markdown page")


def run_methods(args: argparse.Namespace) -> Result:
    from tokensieve.methods.registry import get_method, list_methods

    methods = list_methods() if args.name is None else [get_method(args.name)]
    if args.as_json:
        return Result([as_json(method) for method in methods])
    if args.name is not None:
        print(method_page(methods[0]))
    elif args.markdown:
        print(markdown())
    else:
        for method in methods:
            about = [*facts(method).values(), *([f"paper: {method.paper}"] if method.paper else [])]
            print(f"{method.name:<13} {method.summary}\n{'':<13} {'; '.join(about)}")
    return Result(None)


def as_json(method: Method) -> dict[str, Any]:
    """A method as JSON."""
    options = {name: {"default": option.default, "type": option.kind.__name__} for name, option in method.options.items()}
    about = {"name": method.name, "summary": method.summary, "plan": default_plan(method), "needs": list(method.needs)}
    return {**about, "options": options, "trained": method.part is not None, "adaptive": method.adaptive, "paper": method.paper}


def facts(method: Method) -> dict[str, str]:
    """What a table says about a method."""
    needs = " and ".join(method.needs) or ("the image alone" if method.on_image else "nothing but the tokens")
    options = ", ".join(f"{name}={option.default}" for name, option in method.options.items())
    found = {
        "plan": f"plan {default_plan(method)}",
        "needs": f"needs {needs}",
        "options": f"options {options}" if options else "no options",
    }
    if method.part is not None:
        found["trained"] = "trained"
    if method.adaptive:
        found["adaptive"] = "the image decides how many tokens"
    return found


def default_plan(method: Method) -> str:
    """The method as a plan with everything that it means by itself, in a tower of 12 blocks and a decoder of 32 layers."""
    from tokensieve.plan import Step

    if method.on_image or method.name == "none" or (method.part is not None and not method.where):
        return method.name  # an image method, or as its weights were trained
    step = Step(method)
    where = str(step.resolved_where()) or "@6"
    budget = ":50%" if method.budget is None else f":{method.budget(step.options)}"
    return f"{method.name}{where}{budget}"


def method_page(method: Method) -> str:
    """Everything about one method, as text."""
    module = sys.modules.get(method.decide.__module__)
    text = (inspect.getdoc(module) if module is not None else None) or inspect.getdoc(method.decide) or method.summary
    lines = [f"{method.name}: {method.summary}", "", text, ""]
    lines += [f"Plan with its own place and budget:  {default_plan(method)}"]
    lines += [f"Needs:  {' and '.join(method.needs) or 'nothing but the tokens'}"]
    if method.part is not None:
        lines += [f"Trained by:  {method.recipe}"]
    if method.paper:
        lines += [f"Paper:  {method.paper}"]
    lines += ["Options:" if method.options else "No options."]
    for name, option in method.options.items():
        words = f", one of {', '.join(option.choices)}" if option.choices else ""
        default = f" = {option.default}" if option.default != "" else ""
        lines.append(f"  {name}{default} ({option.kind.__name__}{words})")
    return "\n".join(lines)


def markdown() -> str:
    """All methods as a Markdown page."""
    from tokensieve.methods.registry import list_methods

    rows = ["| method | idea | by itself | needs | paper |", "|---|---|---|---|---|"]
    for method in list_methods():
        marks = [mark for mark, is_set in (("trained", method.part is not None), ("adaptive", method.adaptive)) if is_set]
        idea = method.summary + (f" ({', '.join(marks)})" if marks else "")
        cells = (f"`{method.name}`", idea, f"`{default_plan(method)}`", ", ".join(method.needs), method.paper)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([INTRODUCTION, "", *rows])


COMMANDS.add(
    Command(
        "methods",
        "list the methods a plan can name",
        "List the methods a plan can name, or print the page of one of them.",
        add_methods_flags,
        run_methods,
        order=30,
        examples=("tokensieve methods", "tokensieve methods visionzip", "tokensieve methods --markdown"),
    ),
    origin=__name__,
)
