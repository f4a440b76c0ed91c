"""Caption metrics: BLEU, METEOR, ROUGE-L, CIDEr and SPICE as pycocoevalcap computes them, which clip_benchmark uses.

Its PTB tokenizer and METEOR (Java) are run here with a time-out, and with nothing written into its folder where that can be
avoided; its Python scorers are called, and its own runner of SPICE. What cannot be had without a network (SPICE's models) is
left out.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokensieve.errors import UserError, one_line
from tokensieve.models.loading.hub import reachable

SECONDS = 600  # the longest that one Java program may take
_SPICE_HOST = "nlp.stanford.edu"
_LOCALE = ("-Duser.language=en", "-Dfile.encoding=UTF-8")  # a German METEOR would write 0,5
_DRAWS = 200  # of the bootstrap


def check_java() -> None:
    """A UserError if captions cannot be scored on this machine: pycocoevalcap or Java is missing."""
    if find_spec("pycocoevalcap") is None:
        raise UserError("--task captioning needs pycocoevalcap: pip install pycocoevalcap")
    if shutil.which("java") is None:
        raise UserError(
            "--task captioning needs Java to score captions (pycocoevalcap's tokenizer, METEOR and SPICE), and there is no "
            "`java` on the PATH. Install one, such as: apt install default-jre-headless, or: conda install openjdk"
        )


class CaptionScores(NamedTuple):
    """Metrics with their standard errors, and CIDEr of each image, whose mean is CIDEr."""

    metrics: dict[str, float]
    cider: list[float]


def score(written: Sequence[str], references: Sequence[Sequence[str]], warn: Callable[[str], None]) -> CaptionScores:
    """Every metric of one caption for each image; `warn` gets a message for each one left out.

    BLEU is of all captions together: its standard error is that of sets of images drawn with replacement. METEOR's is that of
    the mean over images, though METEOR itself is of all images together.
    """
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    tokenized = _tokenize([*written, *(text for captions in references for text in captions)])
    res = {i: [tokenized[i]] for i in range(len(written))}
    rest = iter(tokenized[len(written) :])
    gts = {i: [next(rest) for _ in captions] for i, captions in enumerate(references)}
    if not any(text for captions in gts.values() for text in captions):
        raise UserError("no reference caption holds a word, so captions cannot be scored by them.")
    values, errors = _bleu(gts, res)
    cider = Cider().compute_score(gts, res)
    scorers = {"METEOR": _meteor, "ROUGE_L": Rouge().compute_score, "CIDEr": lambda gts, res: cider, "SPICE": _spice}
    for name, compute in scorers.items():
        try:
            value, each = compute(gts, res)
        except _LeftOut as reason:
            warn(f"{name} is left out: {reason}")
            continue
        values[name], errors[f"{name}_stderr"] = float(value), _stderr(each)
    return CaptionScores(values | errors, [float(value) for value in cider[1]])


def _stderr(each: Any) -> float:
    """Standard error of a mean over images; 0 of a single one, whose spread is not known."""
    values = np.asarray(each, dtype=np.float64)
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


class _LeftOut(Exception):
    """A metric cannot be had here."""


# ----------------------------------------------------------------------------------------------------------------- Java


def _folder(name: str) -> Path:
    found = find_spec("pycocoevalcap")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / name


def _tokenize(texts: Sequence[str]) -> list[str]:
    """Stanford's tokens in lower case, punctuation left out, joined by spaces."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, STANFORD_CORENLP_3_4_1_JAR

    tokenizer = ("-cp", STANFORD_CORENLP_3_4_1_JAR, "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase")
    command, lines = ["java", *_LOCALE, *tokenizer], [f"{' '.join(text.splitlines())}\n" for text in texts]
    options: dict[str, Any] = {"cwd": _folder("tokenizer"), "encoding": "utf-8", "timeout": SECONDS}
    try:
        done = subprocess.run(command, input="".join(lines), capture_output=True, check=True, **options)
    except subprocess.CalledProcessError as error:
        reason = one_line(error.stderr, 200)
        raise UserError(
            f"tokenizing the captions failed: Java exited with an error ({reason}). Check `java -version`."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"tokenizing the captions failed: {error}. Check `java -version`.") from None
    made = done.stdout.split("\n")[: len(texts)]
    if len(made) != len(texts):
        raise UserError(f"the tokenizer made {len(made)} lines of {len(texts)} captions. Check `java -version`.")
    return [" ".join(word for word in line.rstrip().split(" ") if word not in PUNCTUATIONS) for line in made]


def _meteor(gts: Mapping[int, Sequence[str]], res: Mapping[int, Sequence[str]]) -> tuple[float, list[float]]:
    """METEOR of all images and of each. Its program counts the matches of one image a line, then makes scores of all counts."""
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    command = ["java", *_LOCALE, "-Xmx2G", "-jar", METEOR_JAR, "-", "-", "-stdio", "-l", "en", "-norm"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    program: Any = subprocess.Popen(command, cwd=_folder("meteor"), encoding="utf-8", **pipes)
    watch = threading.Timer(SECONDS, program.kill)
    watch.start()

    def ask(line: str) -> str:
        program.stdin.write(f"{line}\n")
        program.stdin.flush()
        return program.stdout.readline().strip()

    try:
        written = {i: res[i][0].replace("|||", "").replace("  ", " ") for i in res}
        counts = [ask(" ||| ".join(("SCORE", *gts[i], written[i]))) for i in res]
        scores = [float(ask(" ||| ".join(("EVAL", *counts)))), *(float(program.stdout.readline()) for _ in res)]
    except (OSError, ValueError) as error:  # it is gone, or was ended by the watch
        raise _LeftOut(f"its Java program failed, or took more than {SECONDS} s") from error
    finally:
        watch.cancel()
        program.kill()
        program.communicate()
    return scores[-1], scores[:-1]


def _spice(gts: Mapping[int, Sequence[str]], res: Mapping[int, Sequence[str]]) -> tuple[float, list[float]]:
    from pycocoevalcap.spice import get_stanford_models
    from pycocoevalcap.spice.spice import Spice

    models = _folder("spice") / get_stanford_models.SPICELIB / f"{get_stanford_models.JAR}.jar"
    if not models.is_file() and not reachable(_SPICE_HOST):
        raise _LeftOut(f"its models (370 MB) are not in {models.parent} and {_SPICE_HOST} cannot be reached")
    try:
        value, each = Spice().compute_score(gts, res)
    except (OSError, subprocess.SubprocessError, ValueError) as error:  # no room, no rights, a Java it cannot run on
        raise _LeftOut(f"it failed ({one_line(error, 200)}); it is known to need Java 8") from error
    return float(value), [one["All"]["f"] for one in each]


# ----------------------------------------------------------------------------------------------------------------- BLEU


def _bleu(gts: Mapping[int, Sequence[str]], res: Mapping[int, Sequence[str]]) -> tuple[dict[str, float], dict[str, float]]:
    """BLEU 1 to 4 and their standard errors."""
    from pycocoevalcap.bleu.bleu_scorer import BleuScorer

    scorer = BleuScorer(n=4)
    for i in res:
        scorer += (res[i][0], list(gts[i]))
    values, _ = scorer.compute_score(option="closest", verbose=0)
    closest = [min((abs(n - one["testlen"]), n) for n in one["reflen"])[1] for one in scorer.ctest]
    rows = [[*one["guess"], *one["correct"], one["testlen"], n] for one, n in zip(scorer.ctest, closest, strict=True)]
    counts = np.array(rows, dtype=np.float64)  # (n, 10)
    rng = np.random.default_rng(0)
    drawn = np.stack([counts[rng.integers(len(counts), size=len(counts))].sum(0) for _ in range(_DRAWS)])  # (draws, 10)
    spread = corpus_bleu(drawn).std(axis=0, ddof=1)
    names = [f"Bleu_{n}" for n in range(1, 5)]
    errors = {f"{name}_stderr": float(error) for name, error in zip(names, spread, strict=True)}
    return {name: float(value) for name, value in zip(names, values, strict=True)}, errors


def corpus_bleu(counts: np.ndarray) -> np.ndarray:
    """BLEU 1 to 4 (m,4) from sums over captions (m,10): n-grams written, those that match, words written and in references."""
    precision = (counts[:, 4:8] + 1e-15) / (counts[:, :4] + 1e-9)  # as in pycocoevalcap: nothing is divided by zero
    bleu = np.cumprod(precision, axis=1) ** (1 / np.arange(1, 5))
    ratio = (counts[:, 8] + 1e-15) / (counts[:, 9] + 1e-9)
    return bleu * np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1)), 1.0)[:, None]
