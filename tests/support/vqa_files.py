"""Small files of questions in their published layouts, and a tiny LLaVA in a folder."""

from __future__ import annotations

import base64
import csv
import json
from pathlib import Path
from typing import Any

from tests.support.pictures import picture, png
from tests.support.vlm_models import IMAGE, PAD, llava

WORDS = [
    "user",
    "assistant",
    ":",
    "?",
    "what",
    "colour",
    "is",
    "this",
    "there",
    "a",
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "yes",
    "no",
    "dog",
    "the",
    "answer",
    "word",
]


def vqav2(root: Path, images: int = 4, part: str = "val2014", each: int = 2) -> list[dict[str, Any]]:
    """`each` questions of every image with ten answers each; the annotations."""
    (root / part).mkdir(parents=True)
    questions, annotations = [], []
    for image in range(images):
        picture(image % 6, image).save(root / part / f"COCO_{part}_{image + 9:012d}.jpg")
        for number in range(each):
            key = (image + 9) * 1000 + number
            questions.append(
                {"image_id": image + 9, "question": ("is this red ?", "what colour is this ?")[number], "question_id": key}
            )
            said = ["red"] * (6 + number) + ["blue"] * (4 - number)
            annotations.append(
                {
                    "question_id": key,
                    "image_id": image + 9,
                    "question_type": "what colour",
                    "answer_type": "other" if number else "yes/no",
                    "multiple_choice_answer": "red",
                    "answers": [{"answer": word, "answer_confidence": "yes", "answer_id": i} for i, word in enumerate(said, 1)],
                }
            )
    published(root, part, questions, annotations)
    return annotations


def published(root: Path, part: str, questions: Any, annotations: Any) -> None:
    """Both files of VQAv2 under their names."""
    asked = {"info": {}, "data_type": "mscoco", "data_subtype": part, "questions": questions}
    (root / f"v2_OpenEnded_mscoco_{part}_questions.json").write_text(json.dumps(asked))
    (root / f"v2_mscoco_{part}_annotations.json").write_text(json.dumps({"info": {}, "annotations": annotations}))


def gqa(root: Path, split: str = "val") -> None:
    (root / "images").mkdir(parents=True)
    asked = {}
    for number, (kind, answer) in enumerate((("query", "red"), ("verify", "yes"), ("query", "blue"))):
        picture(number, number).save(root / "images" / f"n{number}.jpg")
        asked[f"0{number}"] = {
            "imageId": f"n{number}",
            "question": "what is this ?",
            "answer": answer,
            "fullAnswer": f"It is {answer}.",
            "types": {"structural": kind, "semantic": "attr", "detailed": "x"},
        }
    (root / f"{split}_balanced_questions.json").write_text(json.dumps(asked))


def textvqa(root: Path, split: str = "val") -> Path:
    """Two questions about one image and one about another, ten answers each; the file."""
    (root / "train_images").mkdir(parents=True)
    entries = []
    for number, image in enumerate(("003a8ae2ef43b901", "003a8ae2ef43b901", "4a7f")):
        picture(number, number).save(root / "train_images" / f"{image}.jpg")
        entries.append(
            {
                "question_id": 34602 + number,
                "question": f"what is the word{number} ?",
                "image_id": image,
                "image_classes": ["dog"],
                "answers": ["red"] * (10 - number) + ["dog"] * number,
                "set_name": split,
            }
        )
    file = root / f"TextVQA_0.5.1_{split}.json"
    file.write_text(json.dumps({"dataset_type": split, "dataset_name": "textvqa", "dataset_version": "0.5.1", "data": entries}))
    return file


POPE = {"random": "yes no yes no", "popular": "yes no yes yes", "adversarial": "no no"}  # labels by subset


def pope(root: Path) -> None:
    """The three files, about two images."""
    (root / "coco").mkdir(parents=True)
    (root / "val2014").mkdir()
    for number in range(2):
        picture(number, number).save(root / "val2014" / f"COCO_val2014_{number:012d}.jpg")
    for subset, labels in POPE.items():
        lines = [
            {"question_id": n, "image": f"COCO_val2014_{n % 2:012d}.jpg", "text": f"is there a word{n} ?", "label": label}
            for n, label in enumerate(labels.split(), 1)
        ]
        (root / "coco" / f"coco_pope_{subset}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def scienceqa(root: Path) -> dict[str, Any]:
    """Four test questions, one of them without an image, and one of another split; the problems."""
    problems: dict[str, Any] = {}
    for number, (key, split) in enumerate((("4", "test"), ("5", "test"), ("11", "test"), ("12", "test"), ("2", "train"))):
        problems[key] = {
            "question": "what colour is this ?",
            "choices": ["red", "green", "blue"][: 2 + number % 2],
            "answer": number % 2,
            "hint": "the dog is red" if number == 1 else "",
            "image": None if key == "11" else "image.png",
            "split": split,
            "subject": "natural science" if number % 2 else "social science",
        }
        if key != "11":
            folder = root / "images" / split / key
            folder.mkdir(parents=True)
            picture(number, number).save(folder / "image.png")
    (root / "problems.json").write_text(json.dumps(problems))
    splits = {"train": ["2"], "test": ["4", "5", "11", "12"], "minitest": ["5"]}
    (root / "pid_splits.json").write_text(json.dumps(splits))
    return problems


COLUMNS = ("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "source", "l2-category", "split")


def mmbench(root: Path, columns: tuple[str, ...] = COLUMNS, copies: bool = False) -> Path:
    """Three questions: four, two and four options, the last two about one image. copies: also all rotations, as later files."""
    root.mkdir(parents=True, exist_ok=True)
    rows = []
    options = (["red", "green", "blue", "dog"], ["yes", "no"], ["one", "two", "three", "red, a dog"])
    for number, (choices, answer) in enumerate(zip(options, (0, 1, 3), strict=True)):
        image = "1" if number == 2 else base64.b64encode(png(picture(number, number))).decode()
        for turn in range(len(choices) if copies else 1):
            rotated = choices[turn:] + choices[:turn]
            row = {"index": number + turn * 1_000_000, "question": f"what is word{number} ?", "image": image, "split": "dev"}
            row |= {"hint": "look at\nthe dog" if number == 1 else "nan", "category": "c", "l2-category": f"kind {number % 2}"}
            row |= dict(zip("ABCD", rotated, strict=False)) | {"answer": "ABCD"[rotated.index(choices[answer])]}
            rows.append(row)
    file = root / "mmbench_dev_20230712.tsv"
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, columns, restval="", extrasaction="ignore", delimiter="\t")
        table.writeheader()
        table.writerows(sorted(rows, key=lambda row: row["index"]))
    return file


def jsonl(root: Path, lines: list[dict[str, Any]] | None = None) -> Path:
    """questions.jsonl beside a/0.png to a/2.png."""
    (root / "a").mkdir(parents=True, exist_ok=True)
    for number in range(3):
        picture(number, number).save(root / "a" / f"{number}.png")
    if lines is None:
        lines = [{"image": f"a/{n}.png", "question": "is this red ?", "answer": ("yes", "no", "no")[n]} for n in range(3)]
    file = root / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def save_llava(folder: Path, seed: int = 0) -> str:
    """A LLaVA of 36 vision tokens with random weights, a processor and a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    special = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    known = [*special, *WORDS]
    known += [f"word{number}" for number in range(IMAGE - len(known))] + ["<image>"]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="right",  # as many are published
    )
    assert tokenizer.pad_token_id == PAD and tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    side = {"height": 24, "width": 24}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 24}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for m in messages %}user : {% for part in m['content'] %}{% if part['type'] == 'image' %}<image> "
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %} assistant :",
    )
    model = llava(seed=seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
