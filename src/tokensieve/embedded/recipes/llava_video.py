"""A LLaVA-OneVision learns to answer questions about clips: the embedded LLaVA, its tower and projector frozen.

The result is a stock `LlavaOnevisionForConditionalGeneration` of transformers. Four things make it learn in half an hour on one
core: it begins with a language model that reads single pictures; the tokens of every clip are computed once and used forwards
and backwards, which is another clip with other answers; about ten questions share one clip in one sequence; and the language
model's states at the clip's tokens, read with its own word embeddings, have to tell when in the clip they are, and what the
object there does.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import LlavaForConditionalGeneration, LlavaOnevisionForConditionalGeneration, LlavaProcessor

from tokensieve import embedded, files
from tokensieve.config import recipe
from tokensieve.config.llava_video import LlavaVideoTraining
from tokensieve.config.schema import Optimizer
from tokensieve.embedded import scenes
from tokensieve.embedded.clip_texts import CLIP_QUESTION_KINDS, ask_clip, ask_many_clip
from tokensieve.embedded.clips import DOINGS, FRAMES, WAYS, Clip
from tokensieve.embedded.datasets import EmbeddedClips, as_batch, split_seed
from tokensieve.embedded.recipes.llava import Packing, accuracy, save
from tokensieve.embedded.recipes.llava_video_model import PROMPT, VIDEO, make_model, make_processor
from tokensieve.embedded.scene_texts import Question
from tokensieve.parts.checkpoints import BEST, CHECKPOINTS
from tokensieve.training import checkpoint
from tokensieve.training.log import loss_curve
from tokensieve.training.muon import TwoOptimizers

_NO_ANSWER = -100
CELL = 2 * 8  # side of what one token sees after pooling, in pixels
CELLS = (scenes.SIZE // CELL) ** 2  # tokens of a frame
DOING_LAYER = 3  # the states behind so many layers have to tell what the object at each token does
SEEN_ENOUGH = 3  # from this frame on a move can be told
BACKGROUND = 0.05  # weight of tokens without an object
MEASURED = 150  # questions of the test split by which what ships is measured
_TRAIN_START, _VAL_START = 600_000_000, 700_000_000  # far from other data of the splits


class LlavaVideoLearner:
    """The model, its optimizers and its clips, driven by training.loop."""

    monitor = ("accuracy", "max")

    def __init__(self, config: LlavaVideoTraining) -> None:
        torch.manual_seed(config.seed)
        llava = LlavaForConditionalGeneration.from_pretrained(embedded.llava_path(), dtype=torch.float32)
        known = LlavaProcessor.from_pretrained(embedded.llava_path())
        self.config = config
        self.processor = make_processor(known)
        self.model = make_model(self.processor, llava, known, config.layers)
        for part in (self.model.model.vision_tower, self.model.model.multi_modal_projector):
            part.requires_grad_(False)
        words = self.processor.tokenizer
        self.packing = Packing(words, FRAMES * CELLS + 1, PROMPT, VIDEO)
        one_word = words.convert_tokens_to_ids
        self.early, self.late = one_word(["early", "late"])
        self.said = (*DOINGS, *WAYS, "background")  # what the object at a token does
        self.said_ids = torch.tensor(one_word(list(self.said)))
        settings = Optimizer(weight_decay=config.weight_decay, clip=config.clip)  # `step` sets the learning rate
        self.optimizers = TwoOptimizers(self.model, settings, lambda name: ".layers." in name)
        shape = (config.clips, FRAMES, CELLS, self.model.config.text_config.hidden_size)
        self.clip_tokens = ClipTokens(self.model, self.processor, config.output / "clip_tokens.npy", shape)
        self.seconds = 0.0
        self.val: list[tuple[Tensor, list[Question]]] = []

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        phase, rate = self.config.phase(index)
        self.optimizers.start_step(rate)
        self.model.train()
        clips, questions, tokens = self.draw(index)
        answered, states = self.answer(tokens, questions)
        losses = answered.pop("answer"), *self.name_tokens(clips, states[phase.time_layer], states[DOING_LAYER])
        loss = losses[0] + self.config.times * losses[1] + self.config.doings * losses[2]
        loss.backward()
        self.optimizers.step()
        self.seconds += time.perf_counter() - began
        named = dict(zip(("answer", "time", "doing"), losses, strict=True)) | answered
        return {name: float(value.detach()) for name, value in named.items()}

    def draw(self, index: int) -> tuple[list[Clip], list[list[Question]], Tensor]:
        """The clips of a step, the questions about each, and their tokens (B, frames, cells, D); from seed and step alone."""
        clips, questions, tokens = [], [], []
        for number, backwards in self.picked(index):
            clip, asked = self.clip(number, backwards)
            row = self.clip_tokens.read(number, self.clip(number)[0])
            clips.append(clip)
            questions.append(asked)
            tokens.append(row.flip(0) if backwards else row)
        return clips, questions, torch.stack(tokens)

    def questions(self, index: int) -> list[list[Question]]:
        """The questions of a step."""
        return [self.clip(number, backwards)[1] for number, backwards in self.picked(index)]

    def picked(self, index: int) -> list[tuple[int, bool]]:
        """The clips of a step by their numbers, and whether they run backwards: all of them once, then the other way."""
        config, made = self.config, []
        for place in range(index * config.batch, (index + 1) * config.batch):
            turn, number = divmod(place, config.clips)
            number = int(np.random.default_rng([config.seed, turn]).permutation(config.clips)[number])
            backwards = bool(np.random.default_rng([config.seed, number]).integers(2) ^ turn % 2)
            made.append((number, backwards))
        return made

    def clip(self, number: int, backwards: bool = False) -> tuple[Clip, list[Question]]:
        seed = split_seed("train", self.config.seed)
        return ask_many_clip(seed, _TRAIN_START + number, self.config.questions, backwards, scenes.SEEN)

    def answer(self, tokens: Tensor, questions: Sequence[Sequence[Question]]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The loss of the answers' words and the share of right answers of each kind; states of all layers (B, L, D).

        tokens: (B, frames, cells, D), as the projector makes them of frames.
        """
        batch = self.packing(questions)
        labels, owner = batch.pop("labels"), batch.pop("question")
        inner = self.model.model
        embeds = inner.get_input_embeddings()(batch.pop("input_ids"))  # (B, L, D)
        newline = inner.image_newline.expand(len(tokens), 1, -1)
        start = self.packing.prompt.index(self.model.config.video_token_id)
        seen = torch.cat([tokens.flatten(1, 2), newline], dim=1)  # (B, frames cells + 1, D)
        embeds = torch.cat([embeds[:, :start], seen, embeds[:, start + seen.shape[1] :]], dim=1)
        with torch.autocast("cpu", torch.bfloat16):
            out = inner.language_model(inputs_embeds=embeds, **batch, use_cache=False, output_hidden_states=True)
        answers = labels != _NO_ANSWER  # (B, L)
        logits = self.model.lm_head(out.last_hidden_state[answers].float())  # (answer words, vocabulary)
        losses = {"answer": F.cross_entropy(logits, labels[answers])}
        right = torch.ones(len(questions), max(map(len, questions)), dtype=torch.bool)
        wrong = logits.argmax(-1) != labels[answers]
        row = torch.arange(len(questions))[:, None].expand_as(owner)[answers]
        right[row[wrong], owner[answers][wrong]] = False
        judged: dict[str, list[Tensor]] = defaultdict(list)
        for b, asked in enumerate(questions):
            for i, question in enumerate(asked):
                judged[question.kind].append(right[b, i])
        losses |= {kind: torch.stack(judged[kind]).float().mean() for kind in CLIP_QUESTION_KINDS if kind in judged}
        clip = slice(start, start + FRAMES * CELLS)
        return losses, [state[:, clip].float() for state in out.hidden_states]

    def name_tokens(self, clips: Sequence[Clip], early: Tensor, late: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of telling, from states (B, frames cells, D), when each token is, and what the object there does."""
        words: Tensor = self.model.get_input_embeddings().weight
        read = F.rms_norm(early, early.shape[-1:])
        wanted = torch.linspace(0, 1, FRAMES).repeat_interleave(CELLS)
        logits = read @ (words[self.late] - words[self.early])
        when = F.binary_cross_entropy_with_logits(logits, wanted.expand_as(logits))
        read = F.rms_norm(late, late.shape[-1:])
        labels = torch.from_numpy(np.stack([self.doings(clip) for clip in clips]))
        weight = torch.ones(len(self.said))
        weight[-1] = BACKGROUND
        what = F.cross_entropy((read @ words[self.said_ids].T).flatten(0, 1), labels.flatten(), weight, ignore_index=_NO_ANSWER)
        return when, what

    def doings(self, clip: Clip) -> np.ndarray:
        """What the object at each token has done until this frame, as a place in `self.said`.  (frames cells,)

        Where an object is gone it has vanished. A move cannot be told from the first frames, nor can what covers a bit only.
        """
        gone, background = self.said.index("vanish"), len(self.said) - 1
        made = []
        for frame in range(FRAMES):
            scene, actors = clip.scene(frame), clip.present(frame)
            done = []
            for actor in actors:
                shown = {"vanish": "stay", "move": actor.doing.way if frame >= SEEN_ENOUGH else ""}
                word = shown.get(actor.doing.name, actor.doing.name)
                done.append(self.said.index(word) if word else _NO_ANSWER)
            label = np.array([*done, _NO_ANSWER, background])[scenes.cells(scene, CELL)]
            absent = [actor for actor in clip.actors if actor.doing.name == "vanish" and actor not in actors]
            for actor in absent:
                alone = replace(scene, objects=(actor.at(frame),))
                label[scenes.cells(alone, CELL) == 0] = gone
            made.append(label.ravel())
        return np.concatenate(made)

    @torch.inference_mode()
    def evaluate(self, done: int) -> dict[str, float]:
        """The accuracy on clips of the val split: over all kinds of questions, each with the same weight, and by kind."""
        if not self.val:
            for number in range(self.config.val_clips):
                clip, questions = ask_many_clip(
                    split_seed("val"), _VAL_START + number, self.config.questions, pairs=scenes.SEEN
                )
                self.val.append((self.clip_tokens.compute(clip), questions))
        self.model.eval()
        right: Counter[str] = Counter()
        asked: Counter[str] = Counter()
        for tokens, questions in self.val:
            answered, _ = self.answer(tokens[None], [questions])
            kinds = Counter(question.kind for question in questions)
            asked.update(kinds)
            for kind, number in kinds.items():
                right[kind] += round(float(answered[kind]) * number)
        by_kind = {kind: right[kind] / asked[kind] for kind in CLIP_QUESTION_KINDS}
        return {"accuracy": sum(by_kind.values()) / len(by_kind)} | by_kind

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "model": {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"},
            **self.optimizers.state(),
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        self.load_weights(state)
        self.optimizers.restore(state)
        self.seconds = state["seconds"]

    def load_weights(self, state: dict[str, Any]) -> None:
        missing, unexpected = self.model.load_state_dict(state["model"], strict=False)
        assert missing == ["lm_head.weight"] and not unexpected, "it is tied to the embedding"


class ClipTokens:
    """What the frozen tower and projector make of clips, computed when first read and kept in a file."""

    def __init__(self, model: Any, processor: Any, path: Path, shape: tuple[int, ...]) -> None:
        self.inner = model.model
        pixels = processor.video_processor
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) * 255 for v in (pixels.image_mean, pixels.image_std))
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = path.exists() and np.load(path, mmap_mode="r").shape == shape
        self.table = np.lib.format.open_memmap(path, "r+" if is_there else "w+", np.float16, shape)

    def read(self, number: int, clip: Clip) -> Tensor:
        """The tokens (frames, cells, D) of a clip, which has this number in the file."""
        if not self.table[number, 0, 0].any():  # a new file is all zeros
            self.table[number] = self.compute(clip).half().numpy()
        return torch.from_numpy(self.table[number].astype(np.float32))

    @torch.inference_mode()
    def compute(self, clip: Clip) -> Tensor:
        """(frames, cells, D)"""
        pixels = torch.from_numpy(as_batch([scenes.render(scene) for scene in clip.scenes()])).float()
        frames = (pixels - self.mean) / self.std
        tokens = self.inner.get_video_features(frames[None], return_dict=True).pooler_output  # (1, frames cells + 1, D)
        return tokens[0, : FRAMES * CELLS].unflatten(0, (FRAMES, CELLS)).clone()


@torch.inference_mode()
def answers(model: Any, processor: Any, data: EmbeddedClips, batch: int = 20) -> list[str]:
    """The model's answer to each question of the data, by greedy decoding."""
    answers: list[str] = []
    for start in range(0, len(data), batch):
        clips, questions = zip(*(data[i] for i in range(start, min(start + batch, len(data)))), strict=True)
        prompts = [PROMPT.format(question=question.text) for question in questions]
        videos = [np.stack([np.asarray(frame) for frame in frames]) for frames in clips]
        inputs = processor(videos=videos, text=prompts, padding=True, padding_side="left", return_tensors="pt")
        inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answers += processor.batch_decode(ids, skip_special_tokens=True)
    return answers


def blind_answers(questions: Sequence[Question], n_train: int = 5_000) -> list[str]:
    """The best answers without the clip: the most common answer to the same question among training questions.

    For a question that never occurred, the most common answer to its kind; of "which appears first" the first of the two.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for index in range(n_train):
        _, question = ask_clip(split_seed("train"), _TRAIN_START + index, scenes.SEEN)
        for words in (question.text, question.kind):
            counts[words][question.answer] += 1
    said = []
    for question in questions:
        seen = counts.get(question.text)
        if seen is None and question.kind == "order":
            said.append(question.answers[0])
        else:
            said.append((seen or counts[question.kind]).most_common(1)[0][0])
    return said


def export(learner: LlavaVideoLearner, run: Path) -> dict[str, Any]:
    """Write what ships, a folder for `from_pretrained` with its card: the weights that were best on val."""
    config, folder = learner.config, run / embedded.LLAVA_VIDEO
    best = checkpoint.load(run / CHECKPOINTS / BEST)
    learner.load_weights(best.state["learner"])
    save(learner.model, learner.processor, folder)
    (folder / "model.safetensors").chmod(0o644)
    curve = loss_curve(run)
    measured, blind = {"val": best.state["progress"]["evaluation"]}, {}
    if config.evaluate:
        model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()  # what ships
        data = EmbeddedClips("test", length=MEASURED)
        questions = [data.ask(i)[1] for i in range(len(data))]
        measured["test"] = accuracy(answers(model, learner.processor, data), questions)
        blind["test"] = accuracy(blind_answers(questions), questions)
    parts = learner.model.model
    card = {
        "model": embedded.LLAVA_VIDEO,
        "data": "tokensieve.embedded.clips with two to four objects, questions of five kinds; 68 pairs of colour and shape",
        "objective": "the words of the answers; and the states of the language model at the clip's tokens, read with the word "
        "embeddings, tell when they are and what the object there does",
        "tokens": "every step sees all 392 tokens of a clip; nothing in training knows of token reduction",
        "begins_with": f"{embedded.LLAVA}: tower and projector stay as they are, {config.layers} layers of the language model",
        "recipe": json.loads(config.model_dump_json(exclude={"output"})),
        "seed": config.seed,
        "steps": best.step,
        "clips": f"{config.clips}, forwards and backwards",
        "questions": sum(len(questions) for index in range(best.step) for questions in learner.questions(index)),
        "seconds": round(best.state["learner"]["seconds"]),
        "parameters": {
            "vision": sum(p.numel() for p in parts.vision_tower.parameters()),
            "projector": sum(p.numel() for p in parts.multi_modal_projector.parameters()),
            "language": sum(p.numel() for p in parts.language_model.parameters()),
            "all": sum(p.numel() for p in learner.model.parameters()),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
        "accuracy": measured,
        "blind": blind,
        "loss_curve": curve,
    }
    files.write_json(folder / "card.json", card)
    return card
