"""Whether plans fit a model, found out from its architecture before its weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cutting.handle import Handle
from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.loading.outline import outline
from tokensieve.plan import Plan


def check_plans(model: str, model_type: str, plans: Sequence[Plan], strict: bool) -> None:
    """A UserError for a plan that does not fit; with strict also for one that cannot be carried out as it is written.

    Plans with trained weights are left out, and so are models whose architecture is not known here: they are checked when
    they are applied.
    """
    known = [plan for plan in plans if not plan.is_trained and not plan.is_identity]
    bare = outline(model, model_type) if known else None
    if bare is None:
        return
    for plan in known:
        try:
            handle = Handle(bare, plan)
        except Uncuttable:  # evaluated with all tokens, and --strict refuses it with the reason
            continue
        if strict:
            refuse_excess(handle)


def refuse_excess(handle: Handle) -> None:
    """A UserError if a step of the plan keeps more tokens than it says."""
    if handle.excess:
        raise UserError(f"--strict: {'; '.join(handle.excess)}")
