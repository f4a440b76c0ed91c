"""Zero-shot classification gives clip_benchmark's numbers, with standard errors that a simulation confirms."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from clip_benchmark.metrics import zeroshot_classification as theirs
from sklearn.metrics import balanced_accuracy_score
from torch.utils.data import DataLoader, TensorDataset

from tests.support.rounding import assert_near
from tokensieve.errors import UserError
from tokensieve.tasks import statistics
from tokensieve.tasks.zeroshot_classification import task
from tokensieve.tasks.zeroshot_classification.classifier import load_classifiers, prompts, save_classifier, zero_shot_classifier

CPU = torch.device("cpu")
NAMES = ["cat", "dog", "red car", "tree", "house", "fish", "bird"]
TEMPLATES = ["a photo of a {c}.", "{c}", "the {c} there"]


@pytest.fixture(autouse=True)
def working_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """clip_benchmark 1.6.2 calls float() on an array of one element, which numpy 2.4 forbids: the same without that step."""

    def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
        correct = output.topk(max(topk), 1, True, True)[1] == target[:, None]
        return [correct[:, :k].float().sum().item() / len(target) for k in topk]

    monkeypatch.setattr(theirs, "accuracy", accuracy)


class Images(TensorDataset):
    def __init__(self, targets: torch.Tensor, classes: list[str]) -> None:
        images = torch.randn(len(targets), 3, 48, 32, generator=torch.Generator().manual_seed(1))
        super().__init__(images, targets)
        self.classes = classes


def both(
    tiny_clip: SimpleNamespace, targets: torch.Tensor, classes: list[str], templates: object = TEMPLATES
) -> tuple[dict, dict]:
    model, _, tokenizer = tiny_clip.make()
    loader = DataLoader(Images(targets, classes), batch_size=8)
    expected = theirs.evaluate(model, loader, tokenizer, classes, templates, device="cpu", amp=False)
    classifier = zero_shot_classifier(model, tokenizer, classes, templates, CPU, nullcontext)
    with torch.no_grad():
        features = [(torch.nn.functional.normalize(model.encode_image(images), dim=-1), labels) for images, labels in loader]
    return task.metrics([task.record(100 * made @ classifier, labels) for made, labels in features]), expected


@pytest.mark.parametrize("n_classes", [7, 5, 3])
def test_one_label_equals_clip_benchmark(tiny_clip: SimpleNamespace, n_classes: int) -> None:
    targets = torch.randint(n_classes, (43,), generator=torch.Generator().manual_seed(0))
    got, expected = both(tiny_clip, targets, NAMES[:n_classes])
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-6, nan_ok=True)
    assert math.isnan(got["acc5"]) == (n_classes < 5)


def test_class_specific_prompts_equal_clip_benchmark(tiny_clip: SimpleNamespace) -> None:
    templates = {name: [f"one {name}", f"{name} two"] for name in NAMES}
    got, expected = both(tiny_clip, torch.arange(42) % 7, NAMES, templates)
    assert got["acc1"] == pytest.approx(expected["acc1"], abs=1e-6)


def test_several_labels_equal_clip_benchmark(tiny_clip: SimpleNamespace) -> None:
    targets = (torch.rand(43, 7, generator=torch.Generator().manual_seed(0)) < 0.3).long()
    targets[:, 3] = 0  # a class without a positive
    got, expected = both(tiny_clip, targets, NAMES)
    assert got["mean_average_precision"] == pytest.approx(expected["mean_average_precision"], abs=1e-6)
    assert 0 < got["mean_average_precision_stderr"] < 0.2


def test_the_classifier_equals_clip_benchmark(tiny_clip: SimpleNamespace) -> None:
    model, _, tokenizer = tiny_clip.make()
    expected = theirs.zero_shot_classifier(model, tokenizer, NAMES, TEMPLATES, "cpu", amp=False)
    got = zero_shot_classifier(model, tokenizer, NAMES, TEMPLATES, CPU, nullcontext)
    assert_near(got, expected)


def test_mean_per_class_recall_equals_sklearn() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(6, (200,), generator=generator)
    targets[targets == 2] = 3  # a class that does not occur but is answered
    best = torch.randint(6, (200,), generator=generator)
    with pytest.warns(UserWarning, match="y_pred contains classes"):
        expected = balanced_accuracy_score(targets, best)
    assert statistics.mean_per_class_recall(best, targets)[0] == pytest.approx(expected, abs=1e-9)


def test_standard_errors_are_what_repetition_shows() -> None:
    """Many test sets drawn with known accuracies: the spread of the metric is its standard error."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.tensor([0.9, 0.5, 0.2, 0.7])
    targets = torch.arange(200) % 4
    runs = []
    for _ in range(400):
        hit = torch.rand(200, generator=generator) < chance[targets]
        runs.append(statistics.mean_per_class_recall(torch.where(hit, targets, (targets + 1) % 4), targets))
    recall, stderr = torch.tensor(runs, dtype=torch.float64).unbind(1)
    assert stderr.mean().item() == pytest.approx(recall.std().item(), rel=0.15)
    assert statistics.share_stderr(0.5, 100) == pytest.approx(0.05)


def test_bootstrap_is_repeatable_and_near_the_spread() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        targets = (torch.rand(150, 3, generator=generator) < 0.4).long()
        return targets + 1.5 * torch.randn(150, 3, generator=generator), targets

    spread = torch.tensor([statistics.mean_average_precision(*draw()) for _ in range(200)]).std()
    logits, targets = draw()
    stderr = statistics.bootstrap_stderr(statistics.mean_average_precision, logits, targets)
    assert stderr == statistics.bootstrap_stderr(statistics.mean_average_precision, logits, targets)
    assert stderr == pytest.approx(spread.item(), rel=0.4)


def test_saved_classifiers_are_averaged_and_readable_by_clip_benchmark(tmp_path: Path) -> None:
    one, two = torch.rand(4, 3), torch.rand(4, 3)
    save_classifier(tmp_path / "one.pt", one)
    torch.save(two, tmp_path / "two.pt")
    mean = load_classifiers([str(tmp_path / "one.pt"), str(tmp_path / "two.pt")], CPU)
    assert torch.allclose(mean, (one + two) / 2)
    assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True), one)


def test_bad_classifiers_are_named(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "executed",))

    torch.save(Evil(), tmp_path / "evil.pt")
    torch.save(torch.rand(4), tmp_path / "vector.pt")
    torch.save(torch.rand(4, 3), tmp_path / "a.pt")
    torch.save(torch.rand(4, 2), tmp_path / "b.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save(torch.rand(4, 2, dtype=torch.complex64), tmp_path / "complex.pt")
    torch.save(torch.rand(1, 1).expand(10**6, 10**6), tmp_path / "huge.pt")
    for names in (["evil.pt"], ["vector.pt"], ["text.pt"], ["missing.pt"], ["complex.pt"], ["huge.pt"], ["a.pt", "b.pt"]):
        with pytest.raises(UserError, match=names[-1]):
            load_classifiers([str(tmp_path / name) for name in names], CPU)
    assert not (tmp_path / "executed").exists()


def test_bad_prompts_labels_and_features_are_named() -> None:
    with pytest.raises(UserError, match="no prompts for the class 'dog'"):
        prompts("dog", {"cat": ["a cat"]})
    with pytest.raises(UserError, match="may only hold"):
        prompts("dog", ["a {name}"])
    with pytest.raises(UserError, match="a label is 3"):
        task.record(torch.rand(2, 3), torch.tensor([0, 3]))
    with pytest.raises(UserError, match="5 labels an image, but 3"):
        task.record(torch.rand(2, 3), torch.zeros(2, 5))
    with pytest.raises(UserError, match="NaN"):
        task.record(torch.full((2, 3), math.nan), torch.tensor([0, 1]))
