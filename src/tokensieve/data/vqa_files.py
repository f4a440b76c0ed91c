"""Questions in files: opened by the layout of the data set, checked, and read with their images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokensieve.data.images import BrokenImage
from tokensieve.data.videos import LONG, Video
from tokensieve.data.vqa_items import QuestionRecord, VqaData, VqaItem
from tokensieve.data.vqa_layouts import gqa, jsonl, mmbench, pope, scienceqa, table, textvqa, videos, vqav2
from tokensieve.data.vqa_layouts.images import VideoFolder
from tokensieve.data.vqa_layouts.layout import Contents, Files, Layout, few
from tokensieve.errors import UserError
from tokensieve.provenance import digest

LAYOUTS = {
    module.LAYOUT.name: module.LAYOUT for module in (vqav2, gqa, textvqa, pope, scienceqa, mmbench, jsonl, table, videos)
}


def build(
    name: str,
    *,
    split: str,
    limit: int | None,
    root: str | os.PathLike[str] | None,
    **files: str | os.PathLike[str] | None,
) -> VqaData:
    """The questions of a layout, such as gqa, gqa:FOLDER or gqa:FILE. files: questions, annotations and images, if named."""
    word, _, given = name.partition(":")
    layout = LAYOUTS[word]
    if not layout.has_annotations and files["annotations"] is not None:
        raise UserError(f"{word} has its answers beside the questions: leave --annotations {files['annotations']} out.")
    paths = {flag: None if path is None else Path(path) for flag, path in files.items()}
    folder = None if root is None else Path(root)
    if given:
        path = Path(given).expanduser()
        if path.is_dir():
            folder = path
        elif paths["questions"] is not None:
            raise UserError(f"--dataset {name} names the file of the questions: leave --questions {paths['questions']} out.")
        elif path.exists():
            folder, paths["questions"] = path.parent, path
        else:
            raise UserError(f"{word}: there is no {path}. {layout.advice}")
    contents = layout.read(Files(layout, split, folder, **paths))
    if not contents.records:
        raise UserError(f"{word} ({split}): there is no question in the files.")
    return FileQuestions(layout, split, contents, contents.records[:limit])


class FileQuestions(VqaData):
    """Questions read from files; some or all of their contents, or all of them in several rotations."""

    def __init__(self, layout: Layout, split: str, contents: Contents, records: list[QuestionRecord]) -> None:
        self.layout, self.contents, self.images, self.records = layout, contents, contents.images, records
        self.name, self.split, self.scoring = layout.name, split, layout.scoring
        self.kind = self.images.kind

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        files = dict.fromkeys(record.file for record in self.records)
        stamps = [(file, *self.images.stamp(file)) for file in files]
        frames = [self.images.frames] if isinstance(self.images, VideoFolder) else []
        return digest([self.name, self.split, self.records, stamps, *frames])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> VqaItem:
        record = self.records[index]
        try:
            seen = self.images.open(record.file)
        except BrokenImage as error:
            raise BrokenImage(f"{record.file} (question {record.id}): {error}") from error
        about = record.id, record.kind, record.file, record.choices, record.turn
        image, video = (seen.frames[0], seen) if isinstance(seen, Video) else (seen, None)
        return VqaItem(image, record.text, list(record.answers), *about, video)

    def with_frames(self, number: int) -> VqaData:
        if not isinstance(self.images, VideoFolder):
            return super().with_frames(number)
        contents = replace(self.contents, images=VideoFolder(self.images.folder, number))
        return FileQuestions(self.layout, self.split, contents, self.records)

    def in_all_rotations(self) -> VqaData:
        if not all(record.choices for record in self.records):
            return super().in_all_rotations()
        rotated = [turned for record in self.records for turned in record.rotations()]
        return FileQuestions(self.layout, self.split, self.contents, rotated)

    def check(self, allowed: float = 0.0) -> list[str]:
        images = self.images.list_names(record.file for record in self.records)
        lost = [_name_of(record) for record in self.records if record.file not in images]
        no_image = f"of {len(self)} questions have no {self.kind} in {self.images}"
        unanswered = [_name_of(record) for record in self.records if not any(map(str.strip, record.answers))]
        ids = Counter((record.id, record.turn) for record in self.records)
        problems = {
            no_image: lost if len(lost) > allowed * len(self) else [],
            "questions have no answer (annotation)": unanswered,
            f"{self.kind}s have no question": [_name_of(record) for record in self.records if not record.question.strip()],
            "question ids come more than once": [key for (key, _), count in ids.items() if count > 1],
        }
        if any(problems.values()):
            raise UserError(f"{self.name} ({self.split}): {'; '.join(summarise_problems(problems))}. {self.layout.advice}")
        same = Counter((record.file, record.text, record.kind) for record in self.records)
        used = images if self.layout.shares_images else {record.file for record in self.contents.records}
        remarks = {
            no_image: lost,
            f"questions are asked of the same {self.kind} more than once": [
                f"{q!r} of {f}" for (f, q, _), n in same.items() if n > 1
            ],
            f"{self.kind}s have no question about them": sorted(images - used),
            **self._unusual_videos(images),
        }
        return [f"{self.name} ({self.split}): {remark}" for remark in [*summarise_problems(remarks), *self.contents.remarks]]

    def _unusual_videos(self, there: set[str]) -> dict[str, list[str]]:
        """The videos of which a few frames show little, or whose frames are not shown as they are, by what is to be said."""
        if not isinstance(self.images, VideoFolder):
            return {}
        long, turned, uneven = list[str](), list[str](), list[str]()
        for file in dict.fromkeys(record.file for record in self.records if record.file in there):
            if (header := self.images.header(file)) is None:
                continue
            if header.seconds is not None and header.seconds > LONG:
                long.append(f"{file} ({header.seconds / 60:.0f} min)")
            if header.is_turned:
                turned.append(file)
            if header.has_variable_rate:
                uneven.append(file)
        return {
            f"videos are longer than {LONG / 60:.0f} minutes, and {self.images.frames} frames of each are shown": long,
            "videos are turned upright, as their headers say": turned,
            "videos have a variable rate, and their frames are picked by time": uneven,
        }


def summarise_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{len(examples)} {what}: {few(examples)}" for what, examples in problems.items() if examples]


def _name_of(record: QuestionRecord) -> str:
    return f"question {record.id} ({record.file})"
