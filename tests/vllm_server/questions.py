"""What the servers are asked: questions about embedded scenes, and what transformers with tokensieve answers under each plan.

Run in the project's own virtual environment; the checks, in that of vLLM, read the file it writes.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

PLANS = ("none", "cover@out:49(sizes=no)", "anchor@out:49", "visionzip@out:64", "divprune@llm.0:40")  # sizes=no: as in vLLM
PAIRS = 12  # prompts with two images
MERGING = "cover@llm.0:12(sizes=no)"
FAMILY_PLANS = ("none", "divprune@llm.0:25%", MERGING)
PLANS_OF = {"llava_siglip": (*FAMILY_PLANS, "cover@out:16(sizes=no)")}
SIZES = ((64, 48), (96, 32), (40, 40), (88, 64), (32, 96), (64, 64))
ASKED = ("what is red ?", "how many blue ?", "what is above red ?", "is blue below ?", "what is ?", "how many ?")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=200)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "llava.json").write_text(json.dumps(ask_llava(args.questions)))
    (args.folder / "families.json").write_text(json.dumps(ask_families(args.folder)))


def ask_llava(count: int) -> dict[str, Any]:
    """The embedded LLaVA: questions with one image, and with two."""
    import transformers

    import tokensieve
    from tokensieve.data.vqa_scenes import SceneQuestions
    from tokensieve.embedded import llava_path
    from tokensieve.tasks.vqa.answering import answer, answer_questions

    data = SceneQuestions("embedded-questions", split="val", limit=count)
    items = [data[number] for number in range(count)]
    model = transformers.LlavaForConditionalGeneration.from_pretrained(llava_path()).eval()
    processor = transformers.AutoProcessor.from_pretrained(llava_path())

    def ask_about_two(first: int) -> str:
        template = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": items[first].question}]
        text = processor.apply_chat_template([{"role": "user", "content": template}], add_generation_prompt=True)
        images = [items[first].image, items[first + 1].image]
        return answer(model, processor, dict(processor(text=text, images=images, return_tensors="pt")))[0]

    answers: dict[str, Any] = {}
    for plan in PLANS:
        with tokensieve.apply(model, plan):
            answers[plan] = {
                "one": answer_questions(model, processor, items),
                "two": [ask_about_two(number) for number in range(PAIRS)],
            }
        print(f"transformers, {plan}: {len(items)} answers", flush=True)
    questions = [{"question": item.question, "image": encode(item.image), "answer": item.answer} for item in items]
    return {"questions": questions, "answers": answers}


def ask_families(folder: Path) -> dict[str, Any]:
    """Tiny models with random weights: tokens after prompts with images of several sizes."""
    import numpy as np
    import torch
    import transformers
    from PIL import Image

    import tokensieve
    from tests.vllm_server.tiny_folders import FAMILIES, PROMPT, save

    made = np.random.default_rng(0)
    images = [Image.fromarray(made.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize(size, Image.BICUBIC) for size in SIZES]
    prompts = [PROMPT.format(question=question) for question in ASKED]
    out: dict[str, Any] = {"images": [encode(image) for image in images], "prompts": prompts, "tokens": {}}
    for family in FAMILIES:
        save(family, folder / family)
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder / family).eval()
        processor = transformers.AutoProcessor.from_pretrained(folder / family)
        for plan in PLANS_OF.get(family, FAMILY_PLANS):
            rows = []
            for prompt, image in zip(prompts, images, strict=True):
                inputs = processor(text=prompt, images=image, return_tensors="pt")
                with tokensieve.apply(model, plan), torch.inference_mode():
                    ids = model.generate(**inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
                rows.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
            out["tokens"][f"{family} {plan}"] = rows
        print(f"transformers, {family}", flush=True)
    return out


def encode(image: Any) -> str:
    """A picture as a data URL."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
