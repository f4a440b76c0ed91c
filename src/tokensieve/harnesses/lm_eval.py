"""The model `tokensieve` of lm-eval (EleutherAI's harness): a vision-language model of transformers with a plan on it.

    python -m tokensieve.harnesses.lm_eval run --model tokensieve --model_args pretrained=FOLDER,plan=cover@out:25% ...

is `lm-eval run ...` with this model and our tasks. In Python, `import tokensieve.harnesses.lm_eval` declares the model, for
`lm_eval.simple_evaluate(model="tokensieve", ...)`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tokensieve import embedded
from tokensieve.cutting.handle import apply
from tokensieve.errors import UserError
from tokensieve.harnesses.arguments import model_path, read_plan, read_seed

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.hf_vlms import HFMultimodalLM
except ImportError as error:
    raise UserError(f"lm-eval is not installed ({error}): pip install 'tokensieve[lm-eval]'") from None

NAME = "tokensieve"
TASKS = Path(__file__).parent / "tasks"  # for --include_path


@register_model(NAME)
class PlannedModel(HFMultimodalLM):
    """HFMultimodalLM with a plan attached for its whole life.

    The arguments of --model_args are `plan` (with ; for , or @FILE), `seed` and `weights`, and those of hf-multimodal. Random
    methods number images in the order in which lm-eval asks.
    """

    def __init__(
        self,
        pretrained: Any = embedded.LLAVA,
        plan: str | None = None,
        seed: int = 0,
        weights: str | None = None,
        convert_img_format: bool = True,
        **arguments: Any,
    ) -> None:
        parsed, first_seed = read_plan(plan), read_seed(seed)
        super().__init__(model_path(pretrained), convert_img_format=convert_img_format, **arguments)
        self.handle = apply(self.model, parsed, seed=first_seed, weights=weights)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model."""
        return {**super().get_model_info(), "plan": str(self.handle.plan)}


def main(arguments: list[str]) -> None:
    """lm-eval's command line, with our tasks besides its own."""
    from lm_eval.__main__ import cli_evaluate

    own = [] if "--include_path" in arguments or arguments[:1] not in (["run"], ["validate"], ["ls"]) else [str(TASKS)]
    sys.argv = ["lm-eval", *arguments, *(["--include_path", *own] if own else [])]
    cli_evaluate()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"tokensieve: error: {error}")
