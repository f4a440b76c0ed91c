"""Plans: which methods reduce the tokens, where, and to how many. `grammar` reads their text, `values` are what it means."""

from tokensieve.plan.values import Budget, Plan, Step, Where, as_plan, make_step

__all__ = ["Budget", "Plan", "Step", "Where", "as_plan", "make_step"]
