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

from tests.vllm_server.tiny_folders import IMAGE as IMAGE_ID
from tests.vllm_server.tiny_folders import PROMPT

PLANS = ("none", "cover@out:49(sizes=no)", "anchor@out:49", "visionzip@out:64", "divprune@llm.0:40")  # sizes=no: as in vLLM
IMAGE = "<start> <image> <end>"
PAIRS = 12  # prompts with two images
MERGING = "cover@llm.0:12(sizes=no)"
DROPPING = "divprune@llm.0:25%"
FAMILY_PLANS = ("none", DROPPING, MERGING)
PLANS_OF = {
    "llava_siglip": (*FAMILY_PLANS, "cover@out:16(sizes=no)"),
    "qwen2_vl": ("none", "pool@llm.0:25%(sizes=no)", MERGING),  # by the grid of the image
    "qwen2_5_vl": ("none", "grid@llm.0:25%", MERGING),
}
COMPACT = {"llava_siglip": DROPPING, "qwen2_5_vl": DROPPING}  # plans under which the tokens that stay are numbered anew
SIZES = ((64, 48), (96, 32), (40, 40), (88, 64), (32, 96), (64, 64))
PAIRED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # families that are also asked about two images
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
    from tests.vllm_server.tiny_folders import FAMILIES, save

    made = np.random.default_rng(0)
    images = [Image.fromarray(made.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize(size, Image.BICUBIC) for size in SIZES]
    single = [(PROMPT.format(images=IMAGE, question=question), [image]) for question, image in zip(ASKED, images, strict=True)]
    twice = PROMPT.format(images=f"{IMAGE} {IMAGE}", question=ASKED[0])
    pairs = [(twice, images[:2]), (twice, images[3:5])]
    out: dict[str, Any] = {"requests": {}, "tokens": {}}
    for family in FAMILIES:
        requests = single + (pairs if family in PAIRED else [])
        out["requests"][family] = [{"prompt": prompt, "images": list(map(encode, of))} for prompt, of in requests]
        save(family, folder / family)
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder / family).eval()
        processor = transformers.AutoProcessor.from_pretrained(folder / family)
        prepared = [processor(text=prompt, images=of, return_tensors="pt") for prompt, of in requests]
        for plan in PLANS_OF.get(family, FAMILY_PLANS):
            rows = []
            for inputs in prepared:
                with tokensieve.apply(model, plan), torch.inference_mode():
                    ids = model.generate(**inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
                rows.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
            out["tokens"][f"{family} {plan}"] = rows
        if plan := COMPACT.get(family):
            out["tokens"][f"{family} {plan} compact"] = [answer_compactly(model, inputs, plan) for inputs in prepared]
        print(f"transformers, {family}", flush=True)
    return out


def answer_compactly(model: Any, inputs: Any, plan: str, count: int = 8) -> list[int]:
    """Tokens after a prompt whose images are the embeddings that stay, at plain positions, by the model without a plan."""
    import torch

    from tokensieve.core import View
    from tokensieve.cutting.placement import Cut
    from tokensieve.plan import Plan

    (step,), ids = Plan.parse(plan).steps, inputs["input_ids"][0]
    cut = Cut(step, 0, "llm", 0, step.resolved_budget())
    with torch.inference_mode():
        sizes = {name: inputs[name] for name in ("image_grid_thw",) if name in inputs}
        features = model.model.get_image_features(inputs["pixel_values"], **sizes, return_dict=True).pooler_output
        embeds, at, left = model.get_input_embeddings()(ids), (ids == IMAGE_ID).nonzero()[:, 0], ids != IMAGE_ID
        embeds[at] = torch.cat(list(features)).to(embeds)
        first = 0
        for feature in features:
            view = View(feature[None], feature[None, :0], None)
            chosen = step.method.decide(view, cut.count(len(feature)), **step.arguments())
            left[at[first + chosen.index[0]]] = True
            first += len(feature)
        x, found = embeds[left][None], []
        for _ in range(count):
            positions = torch.arange(x.shape[1])
            rows = positions.expand(3, 1, -1) if sizes else positions[None]  # mRoPE
            states = model.model.language_model(inputs_embeds=x, position_ids=rows, use_cache=False).last_hidden_state
            logits = model.lm_head(states[0, -1])
            logits[model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
            found.append(int(logits.argmax()))
            x = torch.cat([x, model.get_input_embeddings()(torch.tensor([[found[-1]]]))], dim=1)
    return found


def encode(image: Any) -> str:
    """A picture as a data URL."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
