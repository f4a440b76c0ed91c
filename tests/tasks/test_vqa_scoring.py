"""Yes-or-no and multiple-choice questions: what an answer says, the metrics, and their standard errors, also of differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from tokensieve.tasks.vqa.choices import Choices, chosen_letter
from tokensieve.tasks.vqa.scores import OpenAnswers
from tokensieve.tasks.vqa.scoring import Reference, Scoring
from tokensieve.tasks.vqa.yes_no import YesNo, says_yes


@pytest.mark.parametrize(
    ("answer", "yes"),
    [
        ("yes", True),
        ("Yes, there is a dog.", True),
        ("No", False),
        ("no.", False),
        ("No, there is not", False),
        ("There is not a dog in it. Yes.", False),
        ("Yes. No.", True),  # the first sentence counts
        ("a dog", True),  # as POPE's program has it
        ("nothing", True),
        ("", True),
    ],
)
def test_an_answer_is_yes_unless_it_says_no(answer: str, yes: bool) -> None:
    assert says_yes(answer) is yes


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(C)", "C"),
        ("C.", "C"),
        ("B. a red dog", "B"),
        ("B) a red dog", "B"),
        ("A\nsince it is blue", "A"),
        ("The answer is B.", "B"),
        ("the answer is (C) because", "C"),
        ("Answer: A", "A"),
        ("A red dog.", "B"),  # the text of an option, whose article is no letter
        ("two", "C"),  # compared as open answers are
        ("D", None),  # there are three options
        ("The answer is D", None),
        ("A cat", None),
        ("red", None),
        ("", None),
    ],
)
def test_an_answer_names_an_option_by_letter_or_text(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer, ["blue", "a red dog", "2"]) == letter


def test_a_text_that_two_options_have_names_none() -> None:
    assert chosen_letter("red", ["red", "Red.", "blue"]) is None and chosen_letter("blue", ["red", "Red.", "blue"]) == "C"


# ----------------------------------------------------------------------------------------------------------------- yes or no


def asked(count: int, seed: int) -> list[Reference]:
    """Labels of three kinds, several of each image."""
    rng = random.Random(seed)
    kinds = ("random", "popular", "adversarial")
    return [
        Reference([rng.choice(["yes", "no"])], kinds[min(2, n % 5)], f"{rng.randrange(count // 3)}", str(n), (), 0)
        for n in range(count)
    ]


def answered(references: Sequence[Reference], seed: int, right: float = 0.7) -> list[str]:
    rng = random.Random(seed)
    other = {"yes": "no", "no": "yes"}
    return [one.answers[0] if rng.random() < right else other[one.answers[0]] for one in references]


def weighted(answers: Sequence[str], references: Sequence[Reference], weights: Sequence[float]) -> dict[str, float]:
    """POPE's numbers by counting, every question with a weight."""
    tp = fp = fn = tn = 0.0
    for answer, reference, weight in zip(answers, references, weights, strict=True):
        label = reference.answers[0]
        tp += weight * (answer == label == "yes")
        tn += weight * (answer == label == "no")
        fp += weight * (answer == "yes" and label == "no")
        fn += weight * (answer == "no" and label == "yes")
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    total = tp + fp + fn + tn
    f1 = 2 * precision * recall / (precision + recall)
    return {"accuracy": (tp + tn) / total, "precision": precision, "recall": recall, "f1": f1, "yes_ratio": (tp + fp) / total}


def mean_f1(answers: Sequence[str], references: Sequence[Reference], weights: Sequence[float]) -> float:
    kinds = {one.kind for one in references}
    rows = [[n for n, one in enumerate(references) if one.kind == kind] for kind in kinds]
    subsets = [([answers[n] for n in row], [references[n] for n in row], [weights[n] for n in row]) for row in rows]
    return sum(weighted(*subset)["f1"] for subset in subsets) / len(kinds)


def slow_stderr(metric: Callable[[Sequence[float]], float], references: Sequence[Reference]) -> float:
    """The root of the summed squares of the metric's derivatives by the weight of each image, by finite differences."""
    squares, step = 0.0, 1e-5
    for image in {one.file for one in references}:
        up, down = ([1 + sign * step * (one.file == image) for one in references] for sign in (1, -1))
        squares += ((metric(up) - metric(down)) / (2 * step)) ** 2
    return math.sqrt(squares)


def test_popes_numbers_are_those_of_counting_with_errors_of_whole_images() -> None:
    references = asked(90, 0)
    answers = answered(references, 1)
    batches = [YesNo().record(answers[n : n + 7], references[n : n + 7]) for n in range(0, 90, 7)]
    made = YesNo().metrics(batches)
    for name, value in weighted(answers, references, [1.0] * 90).items():
        assert made[name] == pytest.approx(value, abs=1e-12)
        error = slow_stderr(lambda weights, name=name: weighted(answers, references, weights)[name], references)  # type: ignore[misc]
        assert made[f"{name}_stderr"] == pytest.approx(error, rel=1e-6)
    for kind in ("random", "popular", "adversarial"):
        rows = [n for n, one in enumerate(references) if one.kind == kind]
        subset = [answers[n] for n in rows], [references[n] for n in rows], [1.0] * len(rows)
        assert {name: made[f"{name}_{kind}"] for name in weighted(*subset)} == pytest.approx(weighted(*subset), abs=1e-12)
    assert made["f1_mean"] == pytest.approx(mean_f1(answers, references, [1.0] * 90), abs=1e-12)
    error = slow_stderr(lambda weights: mean_f1(answers, references, weights), references)
    assert made["f1_mean_stderr"] == pytest.approx(error, rel=1e-6)
    assert made["f1_mean"] != pytest.approx(made["f1"], abs=1e-6)


def test_one_kind_alone_has_no_mean_over_kinds_and_no_yes_no_precision() -> None:
    references = [one._replace(kind="random") for one in asked(12, 0)]
    record = YesNo().record(["no"] * 12, references)
    made = YesNo().metrics([record])
    assert "f1_mean" not in made and made["recall"] == made["f1"] == made["yes_ratio"] == 0 and math.isnan(made["precision"])
    assert YesNo().counts([record]) == {"n_unmatched": 0}
    assert YesNo().counts([YesNo().record(["dog", "yes"], references[:2])]) == {"n_unmatched": 1}


# -------------------------------------------------------------------------------------------------------------------- choices


def rotated(questions: int, seed: int) -> list[Reference]:
    """Every question in all rotations of its two to four options."""
    rng = random.Random(seed)
    made = []
    for n in range(questions):
        size, answer = rng.randrange(2, 5), 0
        for turn in range(size):
            letter = "ABCD"[(answer - turn) % size]
            made.append(Reference([letter], f"kind {n % 2}", f"{n // 3}", str(n), ("a",) * size, turn))
    return made


def test_a_question_is_right_if_it_is_in_all_rotations() -> None:
    references = rotated(30, 0)
    rng = random.Random(1)
    answers = [one.answers[0] if rng.random() < 0.8 else "E" for one in references]
    scoring = Choices(circular=True)
    batches = [scoring.record(answers[n : n + 4], references[n : n + 4]) for n in range(0, len(answers), 4)]
    made = scoring.metrics(batches)
    right = {(one.id, one.turn): answer == one.answers[0] for answer, one in zip(answers, references, strict=True)}
    each = {key: all(hit for (other, _), hit in right.items() if other == key) for key, _ in right}
    assert made["accuracy_circular"] == pytest.approx(sum(each.values()) / 30)
    assert made["accuracy"] == pytest.approx(sum(hit for (_, turn), hit in right.items() if turn == 0) / 30)
    assert 0 < made["accuracy_circular"] < made["accuracy"] < 1 and scoring.metric == "accuracy_circular"
    odd = [hit for key, hit in each.items() if int(key) % 2]
    assert made["accuracy_circular_kind_1"] == pytest.approx(sum(odd) / len(odd))
    away = [sum(each[str(n)] - made["accuracy_circular"] for n in range(i, i + 3)) for i in range(0, 30, 3)]  # by image
    assert made["accuracy_circular_stderr"] == pytest.approx(math.sqrt(sum(x * x for x in away)) / 30)
    unmatched = sum(answer == "E" for answer in answers)
    assert scoring.counts(batches) == {"n_questions": 30, "n_unmatched": unmatched}


def test_a_preferred_letter_gains_nothing_in_circular_evaluation() -> None:
    references = rotated(20, 3)
    made = Choices(circular=True).metrics([Choices(circular=True).record(["A"] * len(references), references)])
    assert made["accuracy"] == 1 and made["accuracy_circular"] == 0


# --------------------------------------------------------------------------------------------------------- differences of plans


OPEN = [Reference(["red"] * 6 + ["blue"] * 4, "", str(n // 2), str(n), (), 0) for n in range(20)]
CASES: list[tuple[Scoring, list[Reference], list[str]]] = [
    (OpenAnswers(), OPEN, ["red", "blue", "dog"]),
    (YesNo(), asked(60, 5), ["yes", "no"]),
    (Choices(circular=False), [one for one in rotated(25, 5) if one.turn == 0], ["A", "B"]),
    (Choices(circular=True), rotated(25, 5), ["A", "B", "B"]),
]


@pytest.mark.parametrize(("scoring", "references", "words"), CASES, ids=["open", "yes_no", "choice", "circular"])
def test_the_mean_of_the_samples_is_the_headline(scoring: Scoring, references: list[Reference], words: list[str]) -> None:
    rng = random.Random(0)
    for _ in range(3):
        answers = [one.answers[0] if rng.random() < 0.6 else rng.choice(words) for one in references]
        batches = [scoring.record(answers[n : n + 8], references[n : n + 8]) for n in range(0, len(answers), 8)]
        scores = scoring.sample_scores(batches)
        assert float(scores.values.mean()) == pytest.approx(scoring.metrics(batches)[scoring.metric], abs=1e-12)
        assert len(scores.values) == len(scores.groups) == len({one.id for one in references})


def test_the_error_of_a_difference_of_f1_is_that_of_the_difference() -> None:
    from tokensieve.tasks.statistics import grouped_stderr

    references = asked(60, 7)
    full, cut = answered(references, 8, 0.9), answered(references, 9, 0.7)
    ours, theirs = (YesNo().sample_scores([YesNo().record(answers, references)]) for answers in (full, cut))
    lost = ours.values - theirs.values

    def difference(weights: Sequence[float]) -> float:
        return weighted(full, references, weights)["f1"] - weighted(cut, references, weights)["f1"]

    assert float(lost.mean()) == pytest.approx(difference([1.0] * 60), abs=1e-12)
    assert grouped_stderr(lost, ours.groups) == pytest.approx(slow_stderr(difference, references), rel=1e-6)
