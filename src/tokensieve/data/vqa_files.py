"""Questions in files: VQAv2 and GQA as they are published, and a plain JSONL."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.data.images import BrokenImage, open_image
from tokensieve.data.vqa import PREFIX
from tokensieve.data.vqa_items import QuestionRecord, VqaData, VqaItem
from tokensieve.errors import UserError, did_you_mean
from tokensieve.provenance import digest, file_stat

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
EXAMPLES = 3  # of every kind of problem are named
COCO = {"train": "train2014", "val": "val2014", "test": "test2015", "test-dev": "test2015"}  # split: COCO's name of it
GQA = {"train": "train_balanced", "val": "val_balanced", "testdev": "testdev_balanced", "test": "test_balanced"}
UNANSWERED = {"vqav2": ("test", "test-dev"), "gqa": ("test",)}  # splits whose answers are not published
ADVICE = {
    "vqav2": "Questions and annotations are at https://visualqa.org/download.html, images (train2014.zip, val2014.zip) at "
    "https://cocodataset.org/#download; unpack them into one folder and give it as --dataset_root, or the files by "
    "--questions, --annotations and --images.",
    "gqa": "Questions (questions1.2.zip) and images are at https://cs.stanford.edu/people/dorarad/gqa/download.html; "
    "unpack them into one folder and give it as --dataset_root, or the files by --questions and --images.",
    "jsonl": 'A line is {"image": "a/b.jpg", "question": "...", "answers": ["..."]}, paths from the file or --images.',
}


def build(
    name: str,
    *,
    split: str,
    limit: int | None,
    root: str | os.PathLike[str] | None,
    **files: str | os.PathLike[str] | None,
) -> VqaData:
    """The questions of vqav2, gqa or jsonl:FILE. files: questions, annotations and images, where they are named."""
    if name.startswith(PREFIX):
        files["questions"] = files["questions"] or name.removeprefix(PREFIX) or None
        name = "jsonl"
    if name != "vqav2" and files["annotations"] is not None:
        raise UserError(f"{name} has its answers beside the questions: leave --annotations {files['annotations']} out.")
    paths = {flag: None if path is None else Path(path) for flag, path in files.items()}
    reader = {"vqav2": read_vqav2, "gqa": read_gqa, "jsonl": read_jsonl}[name]
    records, folder, remarks = reader(split, None if root is None else Path(root), **paths)
    if not records:
        raise UserError(f"{name} ({split}): there is no question in the files.")
    return FileQuestions(name, split, records, folder, limit, remarks)


class FileQuestions(VqaData):
    """Questions read from files, about images in a folder. remarks: what was odd in the files."""

    def __init__(
        self, name: str, split: str, records: list[QuestionRecord], folder: Path, limit: int | None, remarks: list[str]
    ) -> None:
        self.name, self.split, self.folder, self.remarks = name, split, folder, remarks
        self.all_records, self.records = records, records[:limit]

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        files = dict.fromkeys(record.file for record in self.records)
        return digest([self.name, self.split, self.records, [(file, *file_stat(self.folder / file)) for file in files]])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> VqaItem:
        record = self.records[index]
        try:
            image = open_image(self.folder / record.file)
        except BrokenImage as error:
            raise BrokenImage(f"{record.file} (question {record.id}): {error}") from error
        return VqaItem(image, record.question, list(record.answers), record.id, record.kind, record.file)

    def check(self, allowed: float = 0.0) -> list[str]:
        images = _list_images(self.folder, (record.file for record in self.records))
        lost = [_name_of(record) for record in self.records if record.file not in images]
        no_image = f"of {len(self)} questions have no image in {self.folder}"
        unanswered = [_name_of(record) for record in self.records if not any(map(str.strip, record.answers))]
        ids = Counter(record.id for record in self.records)
        problems = {
            no_image: lost if len(lost) > allowed * len(self) else [],
            "questions have no answer (annotation)": unanswered,
            "images have no question": [_name_of(record) for record in self.records if not record.question.strip()],
            "question ids come more than once": [key for key, count in ids.items() if count > 1],
        }
        if any(problems.values()):
            raise UserError(f"{self.name} ({self.split}): {'; '.join(summarise_problems(problems))}. {ADVICE[self.name]}")
        same = Counter((record.file, record.question) for record in self.records)
        remarks = {
            no_image: lost,
            "questions are asked of the same image more than once": [f"{q!r} of {f}" for (f, q), n in same.items() if n > 1],
            "images have no question about them": sorted(images - {record.file for record in self.all_records}),
        }
        return [f"{self.name} ({self.split}): {remark}" for remark in [*summarise_problems(remarks), *self.remarks]]


def summarise_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{len(examples)} {what}: {_few(examples)}" for what, examples in problems.items() if examples]


def _name_of(record: QuestionRecord) -> str:
    return f"question {record.id} ({record.file})"


def _few(examples: Sequence[str]) -> str:
    return ", ".join(examples[:EXAMPLES]) + (f" and {len(examples) - EXAMPLES} more" if len(examples) > EXAMPLES else "")


def _list_images(folder: Path, files: Iterable[str]) -> set[str]:
    """All images in the folders where these files should be, relative to `folder`."""
    images: set[str] = set()
    for inside in dict.fromkeys(os.path.dirname(file) for file in files):
        try:
            with os.scandir(folder / inside) as listing:
                names = [entry.name for entry in listing if entry.name.lower().endswith(PICTURES)]
        except OSError:
            names = []
        images.update(os.path.join(inside, name) for name in names)
    return images


def _refuse_unanswered(name: str, split: str, known: Mapping[str, str]) -> None:
    if split not in known:
        raise UserError(f"{name} has no split {split!r}: there are {', '.join(known)}.{did_you_mean(split, known)}")
    if split in UNANSWERED[name]:
        scored = [other for other in known if other not in UNANSWERED[name]]
        raise UserError(
            f"the answers of {name}'s split {split!r} are not published, so nothing can be scored: "
            f"give --split {' or '.join(reversed(scored))}."
        )


def _find(what: str, path: Path | None, name: str, root: Path | None, usual: Sequence[str]) -> Path:
    """The file or folder that the user named, or the first of the usual ones under the root; a UserError if it is missing."""
    if path is not None:
        if path.exists():
            return path
        raise UserError(f"{name}: there is no {path} (--{what}). {ADVICE[name]}")
    if root is None:
        raise UserError(f"{name} needs --{what}, or --dataset_root with the folder that holds {usual[0]}. {ADVICE[name]}")
    for inside in usual:
        if (root / inside).exists():
            return root / inside
    raise UserError(f"{name}: there is no {usual[0]} in {root} (--dataset_root). {ADVICE[name]}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from error


def _entries(content: Any, key: str, path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    """The list under a key of a file, every entry with what it needs."""
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UserError(f'{path} is not as published: it has no list "{key}".{_swapped(content, key)}')
    for number, entry in enumerate(entries):
        missing = [name for name in needed if name not in entry] if isinstance(entry, dict) else list(needed)
        if missing:
            raise UserError(f'{path}: entry {number} of "{key}" has no {", ".join(missing)}.')
    return entries


def _swapped(content: Any, key: str) -> str:
    other = {"questions": "annotations", "annotations": "questions"}[key]
    return f" It has {other}: is it the file for --{other}?" if isinstance(content, dict) and other in content else ""


def read_vqav2(
    split: str, root: Path | None, questions: Path | None, annotations: Path | None, images: Path | None
) -> tuple[list[QuestionRecord], Path, list[str]]:
    if questions is None or annotations is None:
        _refuse_unanswered("vqav2", split, COCO)
    subset = COCO.get(split, split)
    texts, answers = f"v2_OpenEnded_mscoco_{subset}_questions.json", f"v2_mscoco_{subset}_annotations.json"
    questions = _find("questions", questions, "vqav2", root, [texts, f"questions/{texts}"])
    annotations = _find("annotations", annotations, "vqav2", root, [answers, f"annotations/{answers}"])
    content = _read(questions)
    in_file = content.get("data_subtype") if isinstance(content, dict) else None
    in_name = re.search(r"(train|val|test)\d{4}", questions.name)
    subset = in_file if isinstance(in_file, str) else in_name[0] if in_name else subset
    folder = _find("images", images, "vqav2", root, [subset, f"images/{subset}", "images", "."])
    folder = folder / subset if (folder / subset).is_dir() else folder
    entries = _entries(content, "questions", questions, ("image_id", "question", "question_id"))
    annotated = {
        entry["question_id"]: entry
        for entry in _entries(_read(annotations), "annotations", annotations, ("question_id", "answers"))
    }
    records = []
    for entry in entries:
        annotation = annotated.get(entry["question_id"], {})
        try:
            people = tuple(str(person["answer"]) for person in annotation.get("answers", ()))
            file = f"COCO_{subset}_{int(entry['image_id']):012d}.jpg"
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"question {entry['question_id']} of {questions} is not as published: {error!r}.") from error
        kind = str(annotation.get("answer_type", ""))
        records.append(QuestionRecord(file, str(entry["question"]), people, str(entry["question_id"]), kind))
    unused = sorted(map(str, annotated.keys() - {entry["question_id"] for entry in entries}))
    remarks = [f"{len(unused)} annotations have no question: {_few(unused)}"] if unused else []
    return records, folder, remarks


def read_gqa(
    split: str, root: Path | None, questions: Path | None, annotations: Path | None, images: Path | None
) -> tuple[list[QuestionRecord], Path, list[str]]:
    if questions is None:
        _refuse_unanswered("gqa", split, GQA)
    file = f"{GQA.get(split, split)}_questions.json"
    questions = _find("questions", questions, "gqa", root, [file, f"questions1.2/{file}", f"questions/{file}"])
    folder = _find("images", images, "gqa", root, ["images", "."])
    content = _read(questions)
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise UserError(f"{questions} is not as published: it is not a table of questions by their ids. {ADVICE['gqa']}")
    records = []
    for key, entry in content.items():
        missing = [name for name in ("imageId", "question", "answer") if name not in entry]
        if missing:
            raise UserError(
                f"{questions}: question {key} has no {', '.join(missing)}. GQA's test and challenge splits have no answers: "
                f"give those of val or testdev."
            )
        image = str(entry["imageId"])
        if not re.fullmatch(r"[\w-]+", image):
            raise UserError(f"{questions}: question {key} names the image {image!r}, which is no id of GQA.")
        kinds = entry.get("types")
        kind = str(kinds.get("structural") or "") if isinstance(kinds, dict) else ""
        records.append(QuestionRecord(f"{image}.jpg", str(entry["question"]), (str(entry["answer"]),), str(key), kind))
    return records, folder, []


def read_jsonl(
    split: str, root: Path | None, questions: Path | None, annotations: Path | None, images: Path | None
) -> tuple[list[QuestionRecord], Path, list[str]]:
    if questions is None:
        raise UserError(f"--dataset jsonl needs a file: --dataset jsonl:/path/to/questions.jsonl. {ADVICE['jsonl']}")
    questions = _find("questions", questions, "jsonl", None, [])
    folder = questions.parent if images is None else _find("images", images, "jsonl", None, [])
    records, problems = [], []
    try:
        lines = questions.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {questions} as text: {error}.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(_from_line(line, number, folder))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise UserError(f"{questions}: {len(problems)} lines are wrong; {_few(problems)}. {ADVICE['jsonl']}")
    return records, folder, []


def _from_line(line: str, number: int, folder: Path) -> QuestionRecord:
    """One line of a JSONL; a ValueError with the problem if it is wrong."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError("it is not a table of values by name")
    for name in ("image", "question"):
        if not isinstance(entry.get(name), str):
            raise ValueError(f"it has no {name} (a text)")
    answers = entry.get("answers", entry.get("answer"))
    answers = [answers] if isinstance(answers, (str, int, float)) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, (str, int, float)) for answer in answers):
        raise ValueError("it has no answers (a list of texts) and no answer (a text)")
    inside = os.path.normpath(entry["image"])
    if os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir:
        raise ValueError(f"the image {entry['image']!r} is outside {folder}")
    key = str(entry.get("id", entry.get("question_id", number)))
    return QuestionRecord(inside, entry["question"], tuple(map(str, answers)), key, str(entry.get("kind", "")))
