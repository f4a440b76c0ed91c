"""A LLaVA learns to answer questions about scenes: the embedded CLIP's vision tower, a projector, a small Llama.

The result is a stock `LlavaForConditionalGeneration` of transformers. Four things make it learn in an hour on one core:
about ten questions share one picture in one sequence, each attending to the picture and itself only, as if it were alone;
every patch's projected token is read with the language model's own word embeddings and has to predict the colour and the shape
that lie there, and its position, so that tokens and words align early; layers of the language model join late; and Muon.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from tokensieve import embedded, files
from tokensieve.config import recipe
from tokensieve.config.llava import LlavaPhase, LlavaTraining
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import EmbeddedQuestions, as_batch, split_seed
from tokensieve.embedded.recipes.llava_model import PATCH, PROMPT, make_model, make_processor, spread
from tokensieve.embedded.scene_texts import Question, ask, ask_many
from tokensieve.training.log import loss_curve
from tokensieve.training.muon import TwoOptimizers

_NO_ANSWER = -100


class Packing:
    """Several questions about a picture in one sequence: the picture's prompt once, then each question and its answer.

    A question attends to the prompt and itself, and its positions continue from the picture's end: the model computes the same
    for it as for the question alone. So for questions about a clip, with their own prompt and placeholder.
    """

    def __init__(self, words: PreTrainedTokenizerFast, tokens: int, prompt: str = PROMPT, placeholder: str = "<image>") -> None:
        self.words = words
        before, self.after = prompt.split("{question}")
        ids, place = words(before)["input_ids"], words.convert_tokens_to_ids(placeholder)
        index = ids.index(place)
        self.prompt = [*ids[:index], *[place] * tokens, *ids[index + 1 :]]
        self.tokenized: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def _block(self, question: Question) -> tuple[list[int], list[int]]:
        """The ids of a question with its answer, and for each id the label: the next id of the answer, else _NO_ANSWER."""
        key = (question.text, question.answer)
        if key not in self.tokenized:
            ids = self.words(question.text + self.after, add_special_tokens=False)["input_ids"]
            answer = self.words(question.answer, add_special_tokens=False)["input_ids"]
            labels = [_NO_ANSWER] * (len(ids) - 1) + [*answer, self.words.eos_token_id]
            self.tokenized[key] = ([*ids, *answer], labels)
        return self.tokenized[key]

    def __call__(self, questions: Sequence[Sequence[Question]]) -> dict[str, Tensor]:
        """input_ids, position_ids, labels (the next id), question (its number), all (B, L); attention_mask (B, 1, L, L)."""
        rows = [[self._block(question) for question in row] for row in questions]
        start = len(self.prompt)
        length = start + max(sum(len(ids) for ids, _ in row) for row in rows)
        ids = torch.full((len(rows), length), self.words.pad_token_id)
        labels = torch.full((len(rows), length), _NO_ANSWER)
        positions = torch.arange(length).repeat(len(rows), 1).clamp(max=start)
        owner = torch.full((len(rows), length), -1)  # the prompt belongs to all questions
        for b, row in enumerate(rows):
            ids[b, :start] = torch.tensor(self.prompt)
            at = start
            for number, (block, targets) in enumerate(row):
                end = at + len(block)
                ids[b, at:end], labels[b, at:end] = torch.tensor(block), torch.tensor(targets)
                positions[b, at:end] = torch.arange(start, start + len(block))
                owner[b, at:end] = number
                at = end
        order = torch.arange(length)
        shared = (order < start)[None, None, :] | (owner[:, :, None] == owner[:, None, :])  # (B, L, L)
        mask = (shared & (order[:, None] >= order[None, :]))[:, None]
        return {"input_ids": ids, "position_ids": positions, "labels": labels, "question": owner, "attention_mask": mask}


def phase_of(phases: Iterable[LlavaPhase], index: int) -> tuple[LlavaPhase, int]:
    """The phase of a step, and the step's number in it."""
    for phase in phases:
        if index < phase.steps:
            return phase, index
        index -= phase.steps
    raise IndexError(index)


def rate_of(config: LlavaTraining, index: int) -> float:
    """The learning rate of a step: its phase's own, or else the optimizer's."""
    phase, step = phase_of(config.phases, index)
    if phase.lr is None:
        return config.optimizer.rate(index, config.horizon or config.steps)
    first, last = phase.lr
    return first + (last - first) * step / max(1, phase.steps - 1)


class LlavaLearner:
    """The model, its optimizers and its scenes, driven by training.loop."""

    def __init__(self, config: LlavaTraining) -> None:
        import open_clip

        torch.manual_seed(config.seed)
        embedded.register()
        visual = open_clip.create_model(embedded.MODEL, pretrained=str(embedded.weights_path(config.start))).visual
        mean, std = (visual.preprocess_cfg[key] for key in ("mean", "std"))
        self.config = config
        self.processor = make_processor(mean, std)
        self.model = make_model(self.processor, visual, config.layers)
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (mean, std))
        self.packing = Packing(self.processor.tokenizer, self.model.config.image_seq_length)
        one_word = self.processor.tokenizer.convert_tokens_to_ids
        self.colours = torch.tensor(one_word([*scenes.COLOURS, "background"]))
        self.shapes = torch.tensor(one_word([*scenes.SHAPES, "background"]))
        self.axes = [one_word([low, high]) for low, high in (("left", "right"), ("above", "below"))]
        self.optimizers = TwoOptimizers(self.model, config.optimizer, lambda name: ".layers." in name)
        self.seconds = 0.0

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        phase, _ = phase_of(self.config.phases, index)
        drawn, questions = self.draw(index)
        rate = rate_of(self.config, index)
        self.optimizers.start_step(rate)
        self.model.train()
        features = self.model.model.get_image_features(self.pixels(drawn), return_dict=True)
        tokens = torch.stack(features.pooler_output)  # (B, N, D)
        losses = self.name_patches(tokens, drawn)
        loss = phase.patches * (losses["patch_colour"] + losses["patch_shape"]) + phase.places * losses["patch_place"]
        if phase.questions:
            losses |= self._answer(features, questions, phase.layers or self.config.layers)
            loss = loss + losses["answer"]
        loss.backward()
        self.optimizers.step()
        self.seconds += time.perf_counter() - began
        return {name: float(value.detach()) for name, value in losses.items()}

    def draw(self, index: int) -> tuple[list[scenes.Scene], list[list[Question]]]:
        """The scenes of a step and the questions about each, made from the seed and the step alone."""
        phase, _ = phase_of(self.config.phases, index)
        seed = split_seed("train", self.config.seed)
        first = 500_000_000 + index * 1000  # far from the CLIP's scenes; batches are smaller than 1000, so none comes twice
        drawn = [ask_many(seed, first + i, phase.questions, scenes.SEEN, phase.kinds) for i in range(phase.batch)]
        return [scene for scene, _ in drawn], [questions for _, questions in drawn]

    def pixels(self, drawn: list[scenes.Scene]) -> Tensor:
        """The scenes as input of the tower.  (B, 3, h, w)"""
        images = torch.from_numpy(as_batch([scenes.render(scene) for scene in drawn])).float()
        return (images - self.mean) / self.std

    def name_patches(self, tokens: Tensor, drawn: list[scenes.Scene]) -> dict[str, Tensor]:
        """Losses of predicting what lies in each patch from its token (B, N, D), read with the word embeddings."""
        colours, shapes = list(scenes.COLOURS), list(scenes.SHAPES)
        colour, shape = [], []
        for scene in drawn:
            cells = scenes.cells(scene, PATCH).ravel()  # (N,)
            # GROUND and EDGE are negative: their labels come last.
            colour.append(np.array([*(colours.index(t.colour) for t in scene.objects), _NO_ANSWER, len(colours)])[cells])
            shape.append(np.array([*(shapes.index(t.shape) for t in scene.objects), _NO_ANSWER, len(shapes)])[cells])
        read = F.rms_norm(tokens, tokens.shape[-1:])
        words: Tensor = self.model.get_input_embeddings().weight
        losses = {}
        for name, ids, labels in (("patch_colour", self.colours, colour), ("patch_shape", self.shapes, shape)):
            logits = (read @ words[ids].T).flatten(0, 1)  # (B N, words)
            losses[name] = F.cross_entropy(logits, torch.from_numpy(np.concatenate(labels)), ignore_index=_NO_ANSWER)
        return losses | {"patch_place": self._place_patches(read)}

    def _place_patches(self, read: Tensor) -> Tensor:
        """Loss of predicting where each patch lies with "right" against "left" and "below" against "above"."""
        words: Tensor = self.model.get_input_embeddings().weight
        axes = torch.stack([words[high] - words[low] for low, high in self.axes])  # (2, D)
        side = scenes.SIZE // PATCH
        share = (torch.arange(side) + 0.5) / side
        wanted = torch.stack([share.repeat(side), share.repeat_interleave(side)], dim=-1)  # (N, 2): across, down
        logits = read @ axes.T  # (B, N, 2)
        return F.binary_cross_entropy_with_logits(logits, wanted.expand_as(logits))

    def _answer(self, features: Any, questions: list[list[Question]], layers: int) -> dict[str, Tensor]:
        """The mean loss of the answers' words, and the share of right answers of each kind of question."""
        batch = self.packing(questions)
        labels, owner = batch.pop("labels"), batch.pop("question")
        language = self.model.model.language_model
        every = language.layers
        language.layers = nn.ModuleList(spread(every, layers))
        hidden = self.model.model(**batch, mm_encoder_outputs={"image": features}, use_cache=False).last_hidden_state
        language.layers = every
        answers = labels != _NO_ANSWER  # (B, L)
        logits = self.model.lm_head(hidden[answers])  # (answer tokens, words)
        losses = {"answer": F.cross_entropy(logits, labels[answers])}
        right = torch.ones(len(questions), max(map(len, questions)), dtype=torch.bool)
        picture = torch.arange(len(questions))[:, None].expand_as(owner)[answers]
        wrong = logits.argmax(-1) != labels[answers]
        right[picture[wrong], owner[answers][wrong]] = False
        kinds = sorted({question.kind for row in questions for question in row})
        for kind in kinds:
            of_kind = [
                right[b, i] for b, row in enumerate(questions) for i, question in enumerate(row) if question.kind == kind
            ]
            losses[kind] = torch.stack(of_kind).float().mean()
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "model": {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"},
            **self.optimizers.state(),
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        missing, unexpected = self.model.load_state_dict(state["model"], strict=False)
        assert missing == ["lm_head.weight"] and not unexpected, "it is tied to the embedding"
        self.optimizers.restore(state)
        self.seconds = state["seconds"]


@torch.inference_mode()
def answers(model: Any, processor: Any, data: EmbeddedQuestions, batch: int = 50) -> list[str]:
    """The model's answer to each question of the data, by greedy decoding."""
    answers: list[str] = []
    for start in range(0, len(data), batch):
        images, questions = zip(*(data[i] for i in range(start, min(start + batch, len(data)))), strict=True)
        prompts = [PROMPT.format(question=question.text) for question in questions]
        inputs = processor(images=list(images), text=prompts, padding=True, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answers += processor.batch_decode(ids, skip_special_tokens=True)
    return answers


def accuracy(answers: Sequence[str], questions: Sequence[Question]) -> dict[str, float]:
    """The share of answers that are exactly right, over all and for each kind that was asked, with standard errors."""
    right = np.array([answer == question.answer for answer, question in zip(answers, questions, strict=True)])
    asked = np.array([question.kind for question in questions])
    out: dict[str, float] = {}
    for name, part in (("accuracy", right), *((str(kind), right[asked == kind]) for kind in sorted(set(asked)))):
        p = float(part.mean())
        out |= {name: round(p, 4), f"{name}_stderr": round(math.sqrt(p * (1 - p) / len(part)), 4)}
    return out | {"n": len(right)}


def blind_answers(questions: Sequence[Question], n_train: int = 50_000) -> list[str]:
    """The best answers without the image: the most common answer to the same question among training questions.

    For a question that never occurred, the most common answer to its kind.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seed = split_seed("train")
    for index in range(n_train):
        _, question = ask(seed, index, scenes.SEEN)
        for words in (question.text, question.kind):
            counts[words][question.answer] += 1
    return [counts[question.text if question.text in counts else question.kind].most_common(1)[0][0] for question in questions]


def measure(model: Any, processor: Any, split: str, pairs: str) -> tuple[dict[str, float], dict[str, float]]:
    """The accuracies of the model on a split, and of blind answers."""
    data = EmbeddedQuestions(split, pairs)
    questions = [data.ask(i)[1] for i in range(len(data))]
    return accuracy(answers(model, processor, data), questions), accuracy(blind_answers(questions), questions)


def save(model: Any, processor: Any, folder: Path) -> None:
    """Write a folder for `from_pretrained`: weights in float16, tokenizer, image processor and chat template."""
    whole = {name: value.half() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(folder, state_dict=whole)
    processor.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def export(learner: LlavaLearner, run: Path) -> dict[str, Any]:
    """Write what ships, a folder for `from_pretrained` with its card, and the loss curve as a table. Returns the card."""
    config, folder = learner.config, run / embedded.LLAVA
    save(learner.model, learner.processor, folder)
    curve = loss_curve(run)
    measured, blind = {}, {}
    if config.evaluate:
        model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()  # what ships is measured
        for split, pairs in (("val", "seen"), ("val", "all"), ("test", "seen"), ("test", "all")):
            measured[f"{split}/{pairs}"], blind[f"{split}/{pairs}"] = measure(model, learner.processor, split, pairs)
    model = learner.model.model
    card = {
        "model": embedded.LLAVA,
        "data": "tokensieve.embedded.scenes with one to four objects, questions of five kinds; 68 pairs of colour and shape",
        "objective": "the words of the answers, also to where one object is in the picture, which is never tested; and each "
        "patch's projected token, read with the word embeddings, tells the colour and the shape that lie there, and its place",
        "tokens": "every step sees all 196 patches; nothing in training knows of token reduction",
        "layers": "phases with fewer layers run evenly spread ones; the others begin as the identity and join later",
        "begins_with": config.start,
        "recipe": json.loads(config.model_dump_json(exclude={"output"})),
        "seed": config.seed,
        "steps": config.steps,
        "pictures": sum(phase.steps * phase.batch for phase in config.phases),
        "questions": sum(len(questions) for index in range(config.steps) for questions in learner.draw(index)[1]),
        "seconds": round(learner.seconds),
        "parameters": {
            "vision": sum(p.numel() for p in model.vision_tower.parameters()),
            "projector": sum(p.numel() for p in model.multi_modal_projector.parameters()),
            "language": sum(p.numel() for p in model.language_model.parameters()),
            "all": sum(p.numel() for p in learner.model.parameters()),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
        "accuracy": measured,
        "blind": blind,
        "loss_curve": curve,
    }
    files.write_json(folder / "card.json", card)
    return card
