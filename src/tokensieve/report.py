"""`tokensieve report`: results as one HTML page that needs nothing else, and asks no other machine for anything."""

from __future__ import annotations

import argparse
import base64
import io
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import results, svg
from tokensieve.errors import UserError
from tokensieve.svg import Point

if TYPE_CHECKING:
    from torch import nn

    from tokensieve.plan import Plan

Result = Mapping[str, Any]

MAIN = {  # the number that counts, by task: the first of these that a result has, or that one of its numbers begins with
    "zeroshot_classification": ("acc1", "mean_average_precision"),
    "zeroshot_retrieval": ("image_retrieval_recall@", "text_retrieval_recall@"),
    "linear_probe": ("lp_acc1",),
    "image_caption_selection": ("acc",),
    "captioning": ("CIDEr",),
    "vqa": ("vqa_score",),
    "reid": ("mAP",),
}
# Metrics whose names hold one of these are shares, shown in percent.
SHARES = ("acc", "recall", "precision", "vqa_score", "exact_match", "mAP", "rank_")
CONTROLS = {"none": "full model", "random": "random (control)", "grid": "grid (control)", "pool": "pool (control)"}
WORDS = 8  # so many points in a plot get their plan's text, more get its number in the table
SCENES = [3 + 8 * number for number in range(100)]  # test scenes that are drawn, in this order
# What makes another experiment of a run, and so another section: settings, each with what a result that does not tell it was
# made with, and fingerprints, which are named where the settings do not tell the sections apart.
SETTINGS: dict[str, Any] = {
    "split": "test",
    "limit": None,
    "seed": 0,
    "dtype": None,
    "model_type": "open_clip",
    "recall_k": 5,
    "train_split": "train",
    "val_split": None,
    "val_proportion": None,
    "fewshot_k": -1,
    "fewshot_epochs": 10,
    "fewshot_lr": 0.1,
    "normalize": True,
    "vqa_prompt": None,
    "max_new_tokens": 16,
    "blind": False,
    "modalities": None,
    "val_identities": None,
}
MARKS = ("amp", "classifiers", "weights", "data")
FINGERPRINT = re.compile("[0-9a-f]{16,}")
NOTHING = "–"  # where there is no value


def run(args: argparse.Namespace) -> Path:
    """Write the page and print its name."""
    path = Path(args.output)
    results.check_writable(path)
    page = build(results.read(args.files), title=args.title, images=args.images)
    if path.exists() and path.read_bytes() != page.encode():
        results.move_aside(path)
    results.write_text(path, page)
    print(path)
    return path


def build(found: Sequence[Result], *, title: str | None = None, images: int = 2) -> str:
    """The page of these results; images: how many example pictures each model gets."""
    if images > len(SCENES):
        raise UserError(f"--images {images}: at most {len(SCENES)}")
    sections = _sections(found)
    heading = title or "Token reduction: quality and cost"
    body = [f"<h1>{escape(heading)}</h1>", f"<p class='soft'>{_summary(found, sections)}</p>"]
    if len(sections) > 1:
        entries = (f"<li><a href='#s{n}'>{escape(name)}</a></li>" for n, (name, _) in enumerate(sections, start=1))
        body.append(f"<nav><ul>{''.join(entries)}</ul></nav>")
    for number, (name, rows) in enumerate(sections, start=1):
        body.append(_section(number, name, rows))
    if images:
        body.append(_examples(found, images))
    return PAGE.format(title=escape(heading), style=STYLE, body="\n".join(body))


# ---------------------------------------------------------------------------------------------------------- what is in a result


def _plan(result: Result) -> str:
    return str(_part(result, "reduction").get("plan") or "none")


def plan_of(result: Result) -> str:
    """The plan's text, with the token fusion where there is one."""
    done = _part(result, "reduction")
    plan, fusion = _plan(result), done.get("token_fusion", "cls")
    if fusion in (None, "cls"):
        return plan
    weight = f" {done['token_fusion_weight']}" if "token_fusion_weight" in done else ""
    return f"{plan}, fusion {fusion}{weight}"


def main_metric(rows: Sequence[Result]) -> str | None:
    """The metric of a section: its task's, or the first number there is."""
    numbers = [name for row in rows for name, value in row["metrics"].items() if number_of(value) is not None]
    for wanted in MAIN.get(str(rows[0].get("task")), ()):
        for name in numbers:
            if name == wanted or (wanted.endswith("@") and name.startswith(wanted) and not name.endswith("_stderr")):
                return name
    return numbers[0] if numbers else None


def number_of(value: Any) -> float | None:
    """A finite number, or None whatever else it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def speed_up(result: Result) -> float | None:
    """Times the speed of the full model, where both were measured."""
    done = _part(result, "reduction")
    speed, full = number_of(done.get("images_per_second")), number_of(done.get("images_per_second_full"))
    return speed / full if speed and full else None


def _part(result: Result, name: str) -> Mapping[str, Any]:
    part = result.get(name)
    return part if isinstance(part, Mapping) else {}


def _sections(found: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Results by model, data set, task, language and what else makes another experiment, of which headings name what differs.

    In a section the full model comes first, then from many tokens to few.
    """
    named: dict[str, dict[tuple[str, ...], list[Result]]] = {}
    seen: set[str] = set()
    for result in found:
        key = _part(result, "run").get("key")
        if key is not None and str(key) in seen:
            continue  # the same run under two names
        seen.add(str(key))
        weights = Path(str(result["pretrained"])).name
        model = f"{result['model']} ({weights})" if weights else str(result["model"])
        language = result.get("language")
        told = [str(result.get("task") or ""), "" if language in (None, "en") else str(language)]
        name = ", ".join([f"{model} on {result['dataset']}", *filter(None, told)])
        named.setdefault(name, {}).setdefault(_experiment(result), []).append(result)
    sections = []
    for name, experiments in named.items():
        for heading, rows in zip(_headings(name, list(experiments)), experiments.values(), strict=True):
            sections.append((heading, sorted(rows, key=_order)))
    return sections


def _order(row: Result) -> tuple[bool, float, str]:
    return _method(row) != "none", -(number_of(_part(row, "reduction").get("tokens_out")) or 0), plan_of(row)


def _experiment(result: Result) -> tuple[str, ...]:
    """The settings, then the fingerprints, of a result as texts."""
    run = _part(result, "run")
    marks = (run.get(name) or None for name in MARKS)
    return (*(_text(run.get(name, default)) for name, default in SETTINGS.items()), *map(_text, marks))


def _headings(name: str, experiments: Sequence[tuple[str, ...]]) -> list[str]:
    """A heading for each experiment: the name that they share, and what tells them apart."""

    def kinds(places: Sequence[int]) -> int:
        return len({tuple(values[place] for place in places) for values in experiments})

    words = [*SETTINGS, *MARKS]
    differ = [place for place in range(len(SETTINGS)) if kinds([place]) > 1]
    for place in range(len(SETTINGS), len(words)):
        if kinds([*differ, place]) > kinds(differ):
            differ.append(place)
    return [", ".join([name, *(_difference(words[place], values[place]) for place in differ)]) for values in experiments]


def _difference(name: str, value: str) -> str:
    """The heading's words for a setting, or for a fingerprint, of which the beginning is enough."""
    return f"{name} not given" if value == NOTHING else f"{name} {FINGERPRINT.sub(lambda mark: mark[0][:8], value)}"


def _summary(found: Sequence[Result], sections: Sequence[tuple[str, list[Result]]]) -> str:
    parts = [f"{sum(len(rows) for _, rows in sections)} results"]
    for name, word in (("model", "model"), ("dataset", "data set"), ("task", "task")):
        values = dict.fromkeys(str(result.get(name)) for result in found)
        parts.append(f"{len(values)} {word}{'s' if len(values) != 1 else ''}")
    versions = _part(_part(found[0], "run"), "versions").get("tokensieve")
    return escape(", ".join(parts) + (f"; made with tokensieve {versions}" if versions else ""))


# ------------------------------------------------------------------------------------------------------------------ one section


def _section(number: int, name: str, rows: Sequence[Result]) -> str:
    metric = main_metric(rows)
    parts = [f"<section id='s{number}'><h2>{escape(name)}</h2>", _table(rows, metric)]
    notes = {note: None for row in rows for note in _part(row, "reduction").get("notes") or ()}
    for row in rows:
        done = _part(row, "reduction")
        if done.get("applied") is False and _method(row) != "none":
            notes[f"{plan_of(row)} was not applied: {done.get('reason')}"] = None
    if notes:
        parts.append("<ul class='notes'>" + "".join(f"<li>{escape(str(note))}</li>" for note in notes) + "</ul>")
    if metric is not None:
        parts.append(_plots(rows, metric, name))
    return "\n".join([*parts, _settings(rows), "</section>"])


def _shown(metric: str) -> tuple[float, str]:
    """What a metric is multiplied with to be shown, and its unit."""
    return (100.0, ", %") if any(word in metric for word in SHARES) else (1.0, "")


def _value(result: Result, metric: str | None) -> str:
    value = None if metric is None else number_of(result["metrics"].get(metric))
    if value is None or metric is None:
        return "–"
    times, unit = _shown(metric)
    error = number_of(result["metrics"].get(f"{metric}_stderr"))

    def said(number: float) -> str:
        return f"{times * number:.2f}" if unit else f"{number:.4g}"

    return said(value) + (f" <span class='soft'>± {said(error)}</span>" if error is not None else "")


def _table(rows: Sequence[Result], metric: str | None) -> str:
    head = [
        "#",
        "plan",
        "patch tokens",
        f"{metric}{_shown(metric)[1]}" if metric else "metric",
        "GFLOPs",
        "images/s",
        "speed-up",
    ]
    lines = []
    for number, row in enumerate(rows, start=1):
        done, faster = _part(row, "reduction"), speed_up(row)
        tokens, cost, speed = done.get("tokens_out"), number_of(done.get("gflops")), number_of(done.get("images_per_second"))
        cells = [
            "–"
            if tokens is None
            else escape(f"{done.get('tokens_in')} → {tokens}" if tokens != done.get("tokens_in") else str(tokens)),
            _value(row, metric),
            "–" if cost is None else f"{cost:.3g}",
            "–" if speed is None else f"{speed:.1f}",
            "–" if faster is None else f"{faster:.2f}×",
        ]
        mark = svg.legend_mark(_kind(row, rows))
        first = f"<td class='soft'>{number}</td><th scope='row'>{mark} <code>{escape(plan_of(row))}</code></th>"
        lines.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in head)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class='wide'>{table}</div>{_all_metrics(rows)}"


def _all_metrics(rows: Sequence[Result]) -> str:
    """Every number of every result, folded away."""
    names = list(dict.fromkeys(name for row in rows for name, value in row["metrics"].items() if number_of(value) is not None))
    names = [name for name in names if not name.endswith("_stderr")]
    if len(names) < 2:
        return ""
    head = "".join(f"<th scope='col'>{escape(name + _shown(name)[1])}</th>" for name in names)
    lines = "".join(
        f"<tr><td class='soft'>{number}</td><th scope='row'><code>{escape(plan_of(row))}</code></th>"
        + "".join(f"<td>{_value(row, name)}</td>" for name in names)
        + "</tr>"
        for number, row in enumerate(rows, start=1)
    )
    table = f"<table><thead><tr><th>#</th><th>plan</th>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f"<details><summary>all metrics</summary><div class='wide'>{table}</div></details>"


def _method(result: Result) -> str:
    """The name at the beginning of the plan."""
    return _plan(result).split("+")[0].split("@")[0].split(":")[0].split("(")[0].strip()


def _kind(result: Result, rows: Sequence[Result]) -> str:
    """The control that a result is, or the number of its method's colour."""
    methods = list(dict.fromkeys(_method(row) for row in rows if _method(row) not in CONTROLS))
    method = _method(result)
    return method if method in CONTROLS else str(methods.index(method) % COLOURS)


def _plots(rows: Sequence[Result], metric: str, name: str) -> str:
    """Quality over measured time and over GFLOPs."""
    times, unit = _shown(metric)

    def points(cost: Callable[[Result], float | None]) -> list[Point]:
        made = []
        for number, row in enumerate(rows, start=1):
            x, y, error = cost(row), number_of(row["metrics"].get(metric)), number_of(row["metrics"].get(f"{metric}_stderr"))
            if x is not None and y is not None:
                label = plan_of(row) if len(rows) <= WORDS else str(number)
                told = f"{plan_of(row)}: {metric} {times * y:.2f}" + (f" ± {times * error:.2f}" if error is not None else "")
                error = None if error is None else times * error
                made.append(Point(x, times * y, error, label, f"{told}, cost {x:.3g}", _kind(row, rows)))
        return made

    figures = []
    for across, cost in (
        ("measured time of an image, full model = 1", lambda row: 1 / faster if (faster := speed_up(row)) else None),
        ("GFLOPs of an image", lambda row: number_of(_part(row, "reduction").get("gflops"))),
    ):
        there = points(cost)
        left_out = len(rows) - len(there)
        if there:
            drawn = svg.plot(there, across, f"{metric}{unit}", f"{metric} over {across}, {name}")
            said = f"<figcaption class='soft'>{left_out} without such a measurement left out</figcaption>" if left_out else ""
            figures.append(f"<figure>{drawn}{said}</figure>")
        else:
            figures.append(
                f"<p class='soft'>No plot over {escape(across.split(',')[0])}: it was not measured in these runs.</p>"
            )
    kinds = dict.fromkeys((_kind(row, rows), CONTROLS.get(_method(row), _method(row))) for row in rows)
    legend = "".join(f"<span>{svg.legend_mark(kind)} {escape(word)}</span>" for kind, word in kinds)
    legend += f"<span>{svg.legend_mark('frontier')} best at its cost</span>"
    numbered = "; numbers are those of the table" if len(rows) > WORDS else ""
    legend += f"<span class='soft'>bars: one standard error{numbered}</span>"
    return f"<div class='legend'>{legend}</div><div class='plots'>{''.join(figures)}</div>"


# ----------------------------------------------------------------------------------------------------------------- to repeat it


def _settings(rows: Sequence[Result]) -> str:
    """What the rows of a section were made with: what they share in a table, commands, and what differs row by row."""
    runs = [{name: value for name, value in _flat(_part(row, "run")).items() if name not in ("key", "seconds")} for row in rows]
    names = list(dict.fromkeys(name for run in runs for name in run))
    lines = []
    for name in names:
        values = list(dict.fromkeys(_text(run.get(name)) for run in runs))
        lines.append(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(' | '.join(values))}</td></tr>")
    together: dict[str, list[Result]] = {}
    for row in rows:
        together.setdefault(shlex.join(_command(row, [])), []).append(row)
    whole = "\n".join(shlex.join(_command(group[0], group)) for group in together.values())
    each = "\n".join(shlex.join(_command(row, [row])) for row in rows)
    table = f"<div class='wide'><table class='settings'><tbody>{''.join(lines)}</tbody></table></div>" if lines else ""
    return (
        f"<details><summary>to repeat it</summary>{table}"
        f"<p>All of it, in one pass over the data:</p><pre>{escape(whole)}</pre>"
        f"<p>Each row by itself, in the order of the table:</p><pre>{escape(each)}</pre></details>"
    )


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in run.items():
        made.update({f"{name} {inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {name: value})
    return made


def _text(value: Any) -> str:
    return NOTHING if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _command(result: Result, rows: Sequence[Result]) -> list[str]:
    """What to type for these rows, which share their settings with result: only what is not a default of `eval` anyway."""
    from tokensieve.cli import build_parser

    run, done = _part(result, "run"), _part(result, "reduction")
    words = ["tokensieve", "eval", "--model", str(result["model"])]
    words += ["--pretrained", str(result["pretrained"])] if result["pretrained"] else []
    words += ["--dataset", str(result["dataset"])]
    words += ["--task", str(result["task"])] if result.get("task") else []
    given = {**run, "language": result.get("language") or "en", "num_workers": run.get("workers")}
    given.pop("weights", None)  # the fingerprint of the model's; what --weights was is among the arguments
    given |= _part(run, "arguments")
    if rows and not any(_trained(row) for row in rows):
        given.pop("weights", None)
    given |= {name: done[name] for name in ("token_fusion", "token_fusion_weight") if name in done}
    if str(run.get("device", "")).startswith("cpu") and not run.get("amp"):
        given.pop("amp", None)
    for action in build_parser()[1]["eval"]._actions:
        if action.dest not in given or action.dest in ("model", "pretrained", "dataset", "task", "plan"):
            continue
        value = given[action.dest]
        if action.nargs == 0:
            words += [action.option_strings[0]] if value is getattr(action, "const", None) else []
        elif value is not None and value != action.default and [value] != action.default:
            words += [action.option_strings[0], *(map(str, value) if isinstance(value, list) else [str(value)])]
    plans = list(dict.fromkeys(_plan(row) for row in rows))
    if plans:
        words += ["--plan", plans[0]] + (["--compare", *plans[1:]] if plans[1:] else [])
    return words


def _trained(result: Result) -> bool:
    """Whether a method of the plan has trained weights: --weights is refused where none has."""
    from tokensieve.plan import Plan

    try:
        return Plan.parse(_plan(result)).is_trained
    except UserError:
        return False


# --------------------------------------------------------------------------------------------------------------------- examples


def _examples(found: Sequence[Result], images: int) -> str:
    """What the plans of each model keep of a few scenes, for models that ship with the package."""
    models: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        models.setdefault((str(result["model"]), str(result["pretrained"])), []).append(result)
    parts = ["<section id='examples'><h2>What the plans keep</h2>"]
    for (model, pretrained), rows in models.items():
        parts.append(f"<h3>{escape(f'{model} ({Path(pretrained).name})' if pretrained else model)}</h3>")
        parts.append(_pictures(model, pretrained, rows, images))
    return "\n".join([*parts, "</section>"])


def _pictures(model: str, pretrained: str, rows: Sequence[Result], images: int) -> str:
    from tokensieve import embedded
    from tokensieve.data.sources import folder_of

    texts = list(dict.fromkeys(_plan(row) for row in rows))
    if pretrained not in embedded.MODELS.get(model, ()):
        kind = str(_part(rows[0], "run").get("model_type", "open_clip"))
        named = shlex.join(
            ["--model", model]
            + (["--pretrained", pretrained] if pretrained else [])
            + (["--model_type", kind] if kind != "open_clip" else [])
        )
        what = f"{rows[0]['dataset']}:0" if kind == "reid" else "IMAGE"
        root = _part(_part(rows[0], "run"), "arguments").get("dataset_root")
        if kind == "reid" and root is not None:
            named += f" {shlex.join(['--dataset_root', folder_of(str(rows[0]['dataset']), str(root))])}"
        command = shlex.join(["--plan", texts[0], *(["--compare", *texts[1:]] if texts[1:] else [])])
        return (
            "<p class='soft'>No pictures: they are drawn here for the models that ship with tokensieve only. To draw some:</p>"
            f"<pre>{escape(f'tokensieve show {what} {named} {command}')}</pre>"
        )
    from tokensieve import pictures, show
    from tokensieve.models import load
    from tokensieve.plan import Plan

    try:
        loaded = load.load(model, pretrained)
    except UserError as error:
        return f"<p class='soft'>No pictures: {escape(str(error))}</p>"
    originals = [show.read(f"{show.EMBEDDED}{scene}", 0) for scene in SCENES[:images]]
    bands: list[list[pictures.Band]] = [[] for _ in originals]
    said = []
    weights = loaded.fingerprint.partition("-")[0]
    if any(str(_part(row, "run").get("weights", weights)).partition("-")[0] != weights for row in rows):
        said.append("These are drawn with the weights that ship now; some of the results were made with others.")
    for text in (text for text in texts if text != "none"):
        try:
            plan = Plan.parse(text)
            trained, remarks = _trained_parts(plan, loaded.model, [row for row in rows if _plan(row) == text])
            for so_far, more in zip(bands, show.make_bands(loaded, [plan], originals, weights=trained), strict=True):
                so_far += more
            said += remarks
        except UserError as error:
            said.append(f"{text} is not drawn: {error}")
    if not any(bands):
        said.append("No pictures: no plan here cuts anything.")
    figures = []
    for (name, _, _), of_image in zip(originals, bands, strict=True):
        if of_image:
            drawn = pictures.draw(of_image, brief=True)
            described = escape(f"{name}: the patches that are kept under {', '.join(band.plan for band in of_image)}")
            figures.append(f"<figure class='card'><img alt='{described}' src='{_data(drawn.png())}'></figure>")
    return "".join([*figures, *(f"<p class='soft'>{escape(line)}</p>" for line in said)])


def _trained_parts(plan: Plan, model: nn.Module, rows: Sequence[Result]) -> tuple[dict[str, nn.Module], list[str]]:
    """The trained weights of a result, from the files it names or those that ship; what to say if results have others."""
    from tokensieve import parts

    wanted = {str(mark) for row in rows if (mark := _part(row, "reduction").get("trained")) is not None}
    named = [_part(_part(row, "run"), "arguments").get("weights") for row in rows]
    for files in named:
        try:
            found = parts.load_parts(plan, model, list(map(str, files)) if isinstance(files, list) else None)
        except UserError:  # the files are gone, or others now
            continue
        if parts.fingerprint(found) in wanted:
            break
    else:
        found = parts.load_parts(plan, model)
    if wanted <= {parts.fingerprint(found)}:
        return found, []
    return found, [f"{plan} is drawn with trained weights that are at hand; some of its results were made with others."]


def _data(png: bytes) -> str:
    """The picture as an address that holds it, in a format that takes less room."""
    from PIL import Image

    small = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(small, "WEBP", quality=86, method=4)
    return f"data:image/webp;base64,{base64.b64encode(small.getvalue()).decode()}"


# --------------------------------------------------------------------------------------------------------------------- the page

COLOURS = 7  # classes k-0 to k-6 of the style
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1a1a;--soft:#666;--line:#ddd;--box:#f6f6f6;--link:#0b57a4;
--c0:#d55e00;--c1:#0072b2;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#7a5195}
@media(prefers-color-scheme:dark){:root{--paper:#16181b;--ink:#e8e8e8;--soft:#a0a4a8;--line:#363a3f;--box:#1f2226;--link:#7db8f0;
--c0:#f58231;--c1:#4aa8e8;--c2:#2fc69b;--c3:#e59cc4;--c4:#f2bb3d;--c5:#8fd0f7;--c6:#b08fd0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:1.2rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:.4rem 0}h2{font-size:1.25rem;margin:2.2rem 0 .7rem;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.2rem 0 .5rem;overflow-wrap:anywhere}a{color:var(--link)}
.soft{color:var(--soft)}.wide{overflow-x:auto}code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.88em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:.32rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;font-weight:400}
thead th{font-weight:600;border-bottom:2px solid var(--line)}
th:first-child,td:first-child,th[scope=row],thead th:nth-child(2){text-align:left}
tbody tr:hover{background:var(--box)}
table.settings{min-width:0}table.settings td{text-align:left;white-space:normal;overflow-wrap:anywhere}
details{margin:.7rem 0;border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem}
summary{cursor:pointer;font-weight:600}
pre{background:var(--box);padding:.7rem;border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere}
.notes{color:var(--soft);font-size:.92rem}nav ul{padding-left:1.2rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:1rem 0 .2rem;font-size:.9rem;align-items:center}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1rem}
figure{margin:0}figcaption{font-size:.85rem}svg.plot{width:100%;height:auto;display:block}
svg.mark{width:14px;height:14px;vertical-align:-2px;overflow:visible}
.card{background:#fff;border:1px solid var(--line);border-radius:8px;padding:.5rem;margin:.8rem 0;overflow-x:auto}
.card img{display:block;width:100%;min-width:640px;height:auto}
svg .grid{stroke:var(--line);stroke-width:1}svg text{fill:var(--ink);font-size:12px}svg .tick{fill:var(--soft)}
svg .label{font-size:11px;paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
svg .frontier{fill:none;stroke:var(--soft);stroke-width:1.5;stroke-dasharray:5 4}
svg .mark{stroke:var(--paper);stroke-width:1}svg .error{stroke:var(--soft);stroke-width:1.2;fill:none}
svg .mark.k-none,svg .mark.k-random,svg .mark.k-grid,svg .mark.k-pool{fill:var(--paper);stroke:var(--ink);stroke-width:1.6}
svg .mark.k-none{fill:var(--ink)}
svg .mark.k-0{fill:var(--c0)}svg .mark.k-1{fill:var(--c1)}svg .mark.k-2{fill:var(--c2)}svg .mark.k-3{fill:var(--c3)}
svg .mark.k-4{fill:var(--c4)}svg .mark.k-5{fill:var(--c5)}svg .mark.k-6{fill:var(--c6)}
svg .error.k-0{stroke:var(--c0)}svg .error.k-1{stroke:var(--c1)}svg .error.k-2{stroke:var(--c2)}svg .error.k-3{stroke:var(--c3)}
svg .error.k-4{stroke:var(--c4)}svg .error.k-5{stroke:var(--c5)}svg .error.k-6{stroke:var(--c6)}
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
