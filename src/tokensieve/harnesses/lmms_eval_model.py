"""The model `tokensieve` of lmms-eval: its LLaVA of transformers, with a plan on it, that fails loudly."""

from __future__ import annotations

from typing import Any

from lmms_eval.models.chat.llava_hf import LlavaHf

from tokensieve import embedded
from tokensieve.cutting.handle import apply
from tokensieve.device import find_device
from tokensieve.harnesses.arguments import model_path, read_plan, read_seed
from tokensieve.harnesses.failures import end_run, raise_failures


class PlannedLlava(LlavaHf):
    """LlavaHf with a plan attached for its whole life.

    The arguments of --model_args are `plan` (with ; for , or @FILE), `seed` and `weights`, and those of llava_hf. That class
    logs an error of generate() and scores an empty answer; here the program ends with the error.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = embedded.LLAVA,
        plan: str | None = None,
        seed: Any = 0,
        weights: str | None = None,
        device: str | None = None,
        device_map: str = "",
        **arguments: Any,
    ) -> None:
        with end_run():
            parsed, first_seed, name = read_plan(plan), read_seed(seed), str(find_device(device))
            super().__init__(pretrained=model_path(pretrained), device=name, device_map=device_map or name, **arguments)
            self.handle = apply(self.model, parsed, seed=first_seed, weights=weights)

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """The answers; the program ends if one could not be generated."""
        with end_run(), raise_failures(self.model):
            answers: list[Any] = super().generate_until(requests)
        return answers
