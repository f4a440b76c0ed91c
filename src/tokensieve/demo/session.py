"""What the page asks for: the models, an image under plans, their times, and the picture. The models run in one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tokensieve.cutting.handle import Handle
from tokensieve.demo import choices
from tokensieve.demo.outcome import colours, describe_band
from tokensieve.demo.subject import ModelName, Shown, Subject
from tokensieve.demo.uploads import MAX_PIXELS, MAX_UPLOAD, Uploads, preview
from tokensieve.device import find_device
from tokensieve.errors import PlanError, UserError, did_you_mean, short
from tokensieve.installation.packages import naming_extras
from tokensieve.measuring.clock import counts_cpu_time, describe_machine
from tokensieve.measuring.rounds import Ratio, Variant, detached_handle, interleaved
from tokensieve.models import loading
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.plan.file import SIGN
from tokensieve.registry import resolve

MAX_PLANS = 2
SAMPLE = "sample:"  # how a sample is named where an image is
TIMING = 1.2  # seconds that the rounds of a timing may take
ROUNDS = (3, 25)  # of a timing, at least and at most
BATCHES = (1, 8, 32)  # images that are timed together


class Session:
    """The models of the page, loaded when they are first used, and the images that it has sent."""

    def __init__(self, names: Sequence[ModelName], device: str | None = None, weights: Weights = None) -> None:
        self.names = {name.model: name for name in names}
        self.device, self.weights = find_device(device), weights
        self.uploads = Uploads()
        self._subjects: dict[str, Subject] = {}
        self._methods: dict[str, list[dict[str, str]]] = {}  # those that fit, by model
        self._last_full: tuple[Any, dict[str, Any]] | None = None
        self._counted: dict[tuple[Any, ...], float] = {}  # GFLOPs by model, image, text and plan

    def subject(self, model: str) -> Subject:
        """A model by its name."""
        name = self.names.get(model)
        if name is None:
            raise UserError(
                f"there is no model {short(model)!r} here: {', '.join(self.names)}.{did_you_mean(model, self.names)}"
            )
        if model not in self._subjects:
            kind = MODEL_TYPES.get_or_fail(name.model_type)
            with naming_extras():
                loaded = loading.load(name.model, name.pretrained, model_type=name.model_type, device=self.device)
                subject: Subject = resolve(kind.demo)(loaded, name, self.weights)
            self.uploads.together = max(self.uploads.together, len(subject.slots))
            self._subjects[model] = subject
        return self._subjects[model]

    def is_loaded(self, model: str) -> bool:
        """Whether a model has been used before."""
        return model in self._subjects

    def setup(self, model: str) -> dict[str, Any]:
        """All that the page needs to know about a model before an image is chosen."""
        subject = self.subject(model or next(iter(self.names)))
        if subject.name.model not in self._methods:
            self._methods[subject.name.model] = choices.fitting_methods(subject.model, subject.weights)
        return {
            "models": list(self.names),
            "model": subject.name.model,
            "device": str(self.device),
            "kind": subject.kind,
            "slots": subject.slots,
            "samples": [{"number": number, "prompt": subject.prompt(number)} for number in subject.samples],
            "prompt_label": subject.prompt_label,
            "max_prompt": subject.max_prompt,
            "plan": subject.plan,
            "methods": self._methods[subject.name.model],
            "places": choices.places(subject.depth),
            "colours": colours(),
            "batches": BATCHES,
            "max_upload": MAX_UPLOAD,
            "max_pixels": MAX_PIXELS,
            "notes": subject.loaded.notes,
        }

    def sample_image(self, model: str, number: int, slot: str) -> bytes:
        """An image of a sample, or of the gallery, as a PNG. Of a model that is loaded, any thread may ask for it."""
        subject = self.subject(model)
        known = (*subject.samples, *getattr(subject, "gallery", ()))
        if number not in known or slot not in subject.slots:
            raise UserError(f"there is no sample {number} with {short(slot)!r}")
        return preview(subject.sample(number)[slot])

    def find_images(self, subject: Subject, images: Mapping[str, str], files: Mapping[str, str]) -> Shown:
        """The images that a request names: samples, or images that were sent before."""
        if not images or (unknown := [slot for slot in images if slot not in subject.slots]):
            wanted = ", ".join(subject.slots)
            raise UserError(f"choose an image{f', not {short(unknown[0])!r}' if images else ''}: the model takes {wanted}")
        names = {slot: images[slot] for slot in subject.slots if slot in images}
        key = tuple(f"{slot}={name}" for slot, name in names.items())
        first = next(iter(names.values()))
        if first.startswith(SAMPLE):
            number = first.removeprefix(SAMPLE)
            if (
                not number.isascii()
                or not number.isdigit()
                or int(number) not in subject.samples
                or {*names.values()} != {first}
            ):
                raise UserError(f"{short(first)} is none of the samples {', '.join(map(str, subject.samples))}")
            return Shown(subject.sample(int(number)), {}, int(number), key)
        found = {slot: self.uploads.get(name) for slot, name in names.items()}
        shown = {slot: short(files.get(slot) or f"{slot}.png", 200) for slot in names}
        return Shown(found, shown, None, key)

    def handle(self, subject: Subject, text: str) -> Handle:
        """A plan for the model. Files of this machine are not read for a page."""
        if text.lstrip().startswith(SIGN):
            raise UserError("the page reads no files: paste the plan that is in it")
        return detached_handle(subject.model, Plan.parse(text), subject.weights)

    def run(
        self, model: str, images: Mapping[str, str], files: Mapping[str, str], prompt: str, plans: Sequence[str]
    ) -> dict[str, Any]:
        """What the model says with all tokens and under each plan, and what each plan did to the images."""
        subject = self.subject(model)
        shown, prompt = self.find_images(subject, images, files), subject.check_prompt(prompt)
        full = self._full(subject, shown, prompt)
        found, valid = [], []
        for text in plans:
            try:
                handle = self.handle(subject, text)
                found.append(self._under(subject, shown, prompt, handle))
                valid.append(text.strip())
            except UserError as error:
                found.append({"error": describe_error(error, text)})
        code = (
            {"command": subject.command(shown, prompt, valid), "python": subject.python(shown, prompt, valid[0])}
            if valid
            else None
        )
        return {"full": full, "plans": found, "code": code, "title": subject.title(shown)}

    def _full(self, subject: Subject, shown: Shown, prompt: str) -> dict[str, Any]:
        """What the model says with all tokens. While a slider moves, the image stays: the last one is kept."""
        key = (subject.name, shown.key, prompt)
        if self._last_full is None or self._last_full[0] != key:
            self._last_full = (key, self._under(subject, shown, prompt, detached_handle(subject.model, "none")))
        return self._last_full[1]

    def _under(self, subject: Subject, shown: Shown, prompt: str, handle: Handle) -> dict[str, Any]:
        with torch.inference_mode():
            said = subject.says(shown, prompt, handle)
        bands = subject.bands(shown, handle)
        return {
            "plan": str(handle.plan),
            "steps": choices.describe_steps(handle.plan, subject.depth),
            "says": said,
            "images": {slot: describe_band(band) for slot, band in bands.items()},
            "gflops": self._gflops(subject, shown, prompt, handle),
        }

    def _gflops(self, subject: Subject, shown: Shown, prompt: str, handle: Handle) -> float:
        # with the image: how many tokens are left may depend on it
        key = (subject.name, shown.key, prompt if subject.kind == "question" else "", str(handle.plan))
        if key not in self._counted:
            if len(self._counted) > 1000:
                self._counted.clear()
            self._counted[key] = subject.gflops(subject.inputs(shown, prompt), handle)
        return self._counted[key]

    def measure(
        self, model: str, images: Mapping[str, str], files: Mapping[str, str], prompt: str, plans: Sequence[str], batch: int
    ) -> dict[str, Any]:
        """The time of an image with all tokens and under each plan that fits, in interleaved rounds."""
        subject = self.subject(model)
        shown, prompt = self.find_images(subject, images, files), subject.check_prompt(prompt)
        handles: list[Handle | None] = []
        for text in plans:
            try:
                handles.append(self.handle(subject, text))
            except UserError:
                handles.append(None)
        inputs = subject.inputs(shown, prompt, batch)
        attached = [handle for handle in (detached_handle(subject.model, "none"), *handles) if handle is not None]
        variants = [Variant(lambda: subject.call(inputs), handle) for handle in attached]
        with torch.inference_mode():
            start = time.perf_counter()
            for variant in variants:
                variant.run()
            took = time.perf_counter() - start
            rounds = min(max(ROUNDS[0], int(TIMING / max(took, 1e-9))), ROUNDS[1])
            times = interleaved(variants, self.device, range(rounds))
        counted = [[one.counted(self.device) for one in column] for column in times]
        rows = []
        for seconds, column in zip(counted, times, strict=True):
            ratio = Ratio.of(counted[0], seconds)
            rows.append(
                {
                    "seconds": statistics.median(seconds) / batch,
                    "clock": "cpu" if counts_cpu_time(self.device) else "wall",
                    "wall_seconds": statistics.median(one.wall for one in column) / batch,
                    **ratio.entries("speedup"),
                }
            )
        machine = describe_machine(rows)
        by_plan = iter(rows[1:])
        return {
            "full": rows[0],
            "plans": [None if handle is None else next(by_plan) for handle in handles],
            "rounds": rounds,
            "batch": batch,
            "threads": machine["threads"],
            "warning": machine["warning"],
        }

    def picture(
        self, model: str, images: Mapping[str, str], files: Mapping[str, str], prompt: str, plans: Sequence[str]
    ) -> bytes:
        """The picture that `show` draws, as a PNG."""
        subject = self.subject(model)
        shown, prompt = self.find_images(subject, images, files), subject.check_prompt(prompt)
        bands = []
        for text in plans:
            handle = self.handle(subject, text)
            with torch.inference_mode():
                subject.says(shown, prompt, handle)
            bands.append(subject.bands(shown, handle))
        return subject.picture(shown, bands).png()


def describe_error(error: UserError, typed: str) -> dict[str, Any]:
    """An error of a plan, with its place in the text that was typed where it is known."""
    if isinstance(error, PlanError):
        leading = len(typed) - len(typed.lstrip())
        reason = error.reason.partition(". Did you mean '")[0] if error.meant else error.reason
        return {"message": reason, "position": leading + error.position, "meant": error.meant}
    return {"message": str(error), "position": None, "meant": ""}
