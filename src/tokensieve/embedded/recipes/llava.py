"""A LLaVA learns to answer questions about scenes: the embedded CLIP's vision tower, a projector, a small Llama.

What comes out is a stock `LlavaForConditionalGeneration` of transformers. Four things make it learn in an hour on one core:
about ten questions share one picture in one sequence, each of which sees the picture and itself only, as if it were asked
alone; every patch's projected token is read with the language model's own word embeddings and has to tell the colour and the
shape that lie there, and its place, so that tokens and words meet early; layers of the language model join late; and Muon.
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
from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

from tokensieve import embedded, files
from tokensieve.config import recipe
from tokensieve.config.llava import LlavaPhase, LlavaTraining
from tokensieve.config.schema import Optimizer
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import EmbeddedQuestions, as_batch, split_seed
from tokensieve.embedded.recipes.llava_model import PATCH, PROMPT, make_model, make_processor
from tokensieve.embedded.scene_texts import QUESTION_KINDS, Question, ask, ask_many
from tokensieve.training.log import loss_curve
from tokensieve.training.muon import Muon

_NO_ANSWER = -100


class Packing:
    """Several questions about a picture in one sequence: the picture's prompt once, then each question and its answer.

    A question sees the prompt and itself, and its positions go on from the picture's end: what the model computes for it
    is what it computes for the question alone.
    """

    def __init__(self, words: PreTrainedTokenizerFast, image_tokens: int) -> None:
        self.words = words
        before, after = PROMPT.format(question="{question}").split("{question}")
        self.after = after
        prompt = words(before)["input_ids"]
        place = prompt.index(words.image_token_id)
        self.prompt = [*prompt[:place], *[words.image_token_id] * image_tokens, *prompt[place + 1 :]]
        self.known: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def _block(self, question: Question) -> tuple[list[int], list[int]]:
        """The ids of a question with its answer, and at each id the one to be said next (or _NO_ANSWER)."""
        key = (question.text, question.answer)
        if key not in self.known:
            asked = self.words(question.text + self.after, add_special_tokens=False)["input_ids"]
            answer = self.words(question.answer, add_special_tokens=False)["input_ids"]
            told = [_NO_ANSWER] * (len(asked) - 1) + [*answer, self.words.eos_token_id]
            self.known[key] = ([*asked, *answer], told)
        return self.known[key]

    def __call__(self, asked: Sequence[Sequence[Question]]) -> dict[str, Tensor]:
        """input_ids, position_ids, labels (the next id), question (its number), all (B, L); attention_mask (B, 1, L, L)."""
        rows = [[self._block(question) for question in questions] for questions in asked]
        start = len(self.prompt)
        length = start + max(sum(len(ids) for ids, _ in row) for row in rows)
        ids = torch.full((len(rows), length), self.words.pad_token_id)
        labels = torch.full((len(rows), length), _NO_ANSWER)
        places = torch.arange(length).repeat(len(rows), 1).clamp(max=start)
        owner = torch.full((len(rows), length), -1)  # the prompt is everyone's
        for b, row in enumerate(rows):
            ids[b, :start] = torch.tensor(self.prompt)
            at = start
            for number, (block, told) in enumerate(row):
                end = at + len(block)
                ids[b, at:end], labels[b, at:end] = torch.tensor(block), torch.tensor(told)
                places[b, at:end] = torch.arange(start, start + len(block))
                owner[b, at:end] = number
                at = end
        order = torch.arange(length)
        shared = (order < start)[None, None, :] | (owner[:, :, None] == owner[:, None, :])  # (B, L, L)
        mask = (shared & (order[:, None] >= order[None, :]))[:, None]
        return {"input_ids": ids, "position_ids": places, "labels": labels, "question": owner, "attention_mask": mask}


def phase_of(phases: Iterable[LlavaPhase], index: int) -> tuple[LlavaPhase, int]:
    """The phase of a step, and the step's number in it."""
    for phase in phases:
        if index < phase.steps:
            return phase, index
        index -= phase.steps
    raise IndexError(index)


def rate_of(config: LlavaTraining, index: int) -> float:
    """The learning rate of a step: its phase's own, or else the optimizer's."""
    phase, place = phase_of(config.phases, index)
    if phase.lr is None:
        return config.optimizer.rate(index, config.horizon or config.steps)
    first, last = phase.lr
    return first + (last - first) * place / max(1, phase.steps - 1)


def spread(layers: Sequence[nn.Module], number: int) -> list[nn.Module]:
    """So many of the layers, evenly spread, the last one among them."""
    return [layers[(i + 1) * len(layers) // number - 1] for i in range(number)]


class LlavaLearner:
    """The model, its two optimizers and the scenes: what the loop drives."""

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
        self.axes = [one_word([here, there]) for here, there in (("left", "right"), ("above", "below"))]
        self.muon, self.adamw = _optimizers(self.model, config.optimizer)
        self.seconds = 0.0

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        phase, _ = phase_of(self.config.phases, index)
        shown, asked = self.draw(index)
        rate = rate_of(self.config, index)
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        self.model.train()
        features = self.model.model.get_image_features(self.pixels(shown), return_dict=True)
        tokens = torch.stack(features.pooler_output)  # (B, N, D)
        losses = self.name_patches(tokens, shown)
        loss = phase.patches * (losses["patch_colour"] + losses["patch_shape"]) + phase.places * losses["patch_place"]
        if phase.questions:
            losses |= self._answer(features, asked, phase.layers or self.config.layers)
            loss = loss + losses["answer"]
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in self.adamw.param_groups for p in g["params"]], self.config.optimizer.clip)
        self.muon.step()
        self.adamw.step()
        self.seconds += time.perf_counter() - began
        return {name: float(value.detach()) for name, value in losses.items()}

    def draw(self, index: int) -> tuple[list[scenes.Scene], list[list[Question]]]:
        """The scenes of a step and the questions about each, made from the seed and the step alone."""
        phase, _ = phase_of(self.config.phases, index)
        seed = split_seed("train", self.config.seed)
        first = 500_000_000 + index * 1000  # far from the CLIP's scenes; batches are smaller than 1000, so none comes twice
        drawn = [ask_many(seed, first + i, phase.questions, scenes.SEEN, phase.kinds) for i in range(phase.batch)]
        return [scene for scene, _ in drawn], [questions for _, questions in drawn]

    def pixels(self, shown: list[scenes.Scene]) -> Tensor:
        """The scenes as the tower takes them.  (B, 3, h, w)"""
        images = torch.from_numpy(as_batch([scenes.render(scene) for scene in shown])).float()
        return (images - self.mean) / self.std

    def name_patches(self, tokens: Tensor, shown: list[scenes.Scene]) -> dict[str, Tensor]:
        """How well each patch's token (B, N, D), read as the language model reads its last one, says what lies there."""
        colours, shapes = list(scenes.COLOURS), list(scenes.SHAPES)
        colour, shape = [], []
        for scene in shown:
            found = scenes.cells(scene, PATCH).ravel()  # (N,)
            # GROUND and EDGE count from the end: what they stand for comes after the objects'.
            colour.append(np.array([*(colours.index(t.colour) for t in scene.objects), _NO_ANSWER, len(colours)])[found])
            shape.append(np.array([*(shapes.index(t.shape) for t in scene.objects), _NO_ANSWER, len(shapes)])[found])
        read = F.rms_norm(tokens, tokens.shape[-1:])
        words: Tensor = self.model.get_input_embeddings().weight
        losses = {}
        for name, ids, told in (("patch_colour", self.colours, colour), ("patch_shape", self.shapes, shape)):
            logits = (read @ words[ids].T).flatten(0, 1)  # (B N, words)
            losses[name] = F.cross_entropy(logits, torch.from_numpy(np.concatenate(told)), ignore_index=_NO_ANSWER)
        return losses | {"patch_place": self._place_patches(read)}

    def _place_patches(self, read: Tensor) -> Tensor:
        """How well "right" against "left" and "below" against "above" say where each patch lies, as a share of the way."""
        words: Tensor = self.model.get_input_embeddings().weight
        axes = torch.stack([words[there] - words[here] for here, there in self.axes])  # (2, D)
        side = scenes.SIZE // PATCH
        share = (torch.arange(side) + 0.5) / side
        wanted = torch.stack([share.repeat(side), share.repeat_interleave(side)], dim=-1)  # (N, 2): across, down
        said = read @ axes.T  # (B, N, 2)
        return F.binary_cross_entropy_with_logits(said, wanted.expand_as(said))

    def _answer(self, features: Any, asked: list[list[Question]], layers: int) -> dict[str, Tensor]:
        """The mean loss of the answers' words, and the share of right answers of each kind of question."""
        batch = self.packing(asked)
        labels, owner = batch.pop("labels"), batch.pop("question")
        language = self.model.model.language_model
        every = language.layers
        language.layers = nn.ModuleList(spread(every, layers))
        hidden = self.model.model(**batch, mm_encoder_outputs={"image": features}, use_cache=False).last_hidden_state
        language.layers = every
        told = labels != _NO_ANSWER
        logits = self.model.lm_head(hidden[told])  # (answer tokens, words)
        losses = {"answer": F.cross_entropy(logits, labels[told])}
        right = torch.ones(len(asked), max(map(len, asked)), dtype=torch.bool)
        picture = torch.arange(len(asked))[:, None].expand_as(owner)[told]
        wrong = logits.argmax(-1) != labels[told]
        right[picture[wrong], owner[told][wrong]] = False
        kinds = sorted({question.kind for row in asked for question in row})
        for kind in kinds:
            here = [right[b, i] for b, row in enumerate(asked) for i, question in enumerate(row) if question.kind == kind]
            losses[kind] = torch.stack(here).float().mean()
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "model": {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"},
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        missing, unexpected = self.model.load_state_dict(state["model"], strict=False)
        assert missing == ["lm_head.weight"] and not unexpected, "it is the embedding, tied"
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.seconds = state["seconds"]


def _optimizers(model: nn.Module, how: Optimizer) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices of both transformers' layers; AdamW for the rest, of which gains and biases do not decay."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    gains: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (gains if parameter.ndim < 2 else matrices if ".layers." in name else others).append(parameter)
    groups = [{"params": others, "weight_decay": how.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return Muon(matrices, lr=how.lr, weight_decay=how.weight_decay), torch.optim.AdamW(groups, lr=how.lr, betas=(0.9, 0.98))


@torch.inference_mode()
def answers(model: Any, processor: Any, data: EmbeddedQuestions, batch: int = 50) -> list[str]:
    """What the model answers to each question of the data, word by word the likeliest."""
    said: list[str] = []
    for start in range(0, len(data), batch):
        images, questions = zip(*(data[i] for i in range(start, min(start + batch, len(data)))), strict=True)
        prompts = [PROMPT.format(question=question.text) for question in questions]
        inputs = processor(images=list(images), text=prompts, padding=True, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        said += processor.batch_decode(ids, skip_special_tokens=True)
    return said


def accuracy(said: Sequence[str], asked: Sequence[Question]) -> dict[str, float]:
    """The share of answers that are right word for word, over all and for each kind, with standard errors."""
    right = np.array([answer == question.answer for answer, question in zip(said, asked, strict=True)])
    kinds = np.array([question.kind for question in asked])
    out: dict[str, float] = {}
    for kind in ("accuracy", *QUESTION_KINDS):
        p = float(right.mean() if kind == "accuracy" else right[kinds == kind].mean())
        n = len(right) if kind == "accuracy" else int((kinds == kind).sum())
        out |= {kind: round(p, 4), f"{kind}_stderr": round(math.sqrt(p * (1 - p) / n), 4)}
    return out | {"n": len(right)}


def blind_answers(asked: Sequence[Question], known: int = 50_000) -> list[str]:
    """The best answers of one who does not look: the commonest answer to these words among training questions.

    To words that never came up, the commonest answer to that kind of question.
    """
    told: dict[str, Counter[str]] = defaultdict(Counter)
    seed = split_seed("train")
    for index in range(known):
        _, question = ask(seed, index, scenes.SEEN)
        for words in (question.text, question.kind):
            told[words][question.answer] += 1
    return [told[question.text if question.text in told else question.kind].most_common(1)[0][0] for question in asked]


def measure(model: Any, processor: Any, split: str, pairs: str) -> tuple[dict[str, float], dict[str, float]]:
    """What the model reaches on a split, and one who does not look."""
    data = EmbeddedQuestions(split, pairs)
    asked = [data.ask(i)[1] for i in range(len(data))]
    return accuracy(answers(model, processor, data), asked), accuracy(blind_answers(asked), asked)


def save(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write what `from_pretrained` reads: the weights in float16, the tokenizer, how pictures and prompts are made."""
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
        "questions": sum(len(asked) for index in range(config.steps) for asked in learner.draw(index)[1]),
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
