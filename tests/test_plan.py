"""Plans: text and value are inverse, budgets count exactly, mistakes are named."""

import pytest

from tokensieve import Plan, UserError
from tokensieve.plan import Budget

TEXTS = [
    "none",
    "anchor",
    "anchor@6(k=10,m=50,alpha=0.5)",
    "anchor@2:60",
    "anchor(k=10,m=50)",
    "random@3,6,9:70%",
    "pool@*:-8",
    "grid@-2:64",
    "random@0:12.5%",
    "anchor@out(rest=zero)",
    "pool@*.attn:-8",
    "grid@1,-1.attn:64",
    "random@llm.10,20,31:50%",
    "anchor@6:60(normalize=none,rest=merge) + pool@9:16",
]


@pytest.mark.parametrize("text", TEXTS)
def test_parse_and_str_are_inverse(text):
    plan = Plan.parse(text)
    assert str(plan) == text
    assert Plan.parse(str(plan)) == plan


def test_spaces_and_order_of_options_do_not_matter():
    assert str(Plan.parse(" anchor @ 6 ( m = 50 , k=10 ) ")) == "anchor@6(k=10,m=50)"


@pytest.mark.parametrize(
    ("text", "n", "kept"),
    [
        ("60", 196, 60),
        ("60", 49, 49),
        ("40%", 196, 79),
        ("70%", 10, 7),
        ("100%", 7, 7),
        ("0.1%", 9, 1),
        ("-8", 20, 12),
        ("-0", 5, 5),
    ],
)
def test_budget_counts(text, n, kept):
    assert Budget.parse(text).count(n) == kept


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-5%", "1.5", "x", ""])
def test_bad_budgets(text):
    with pytest.raises(UserError, match="budget"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("anchr@6", "Did you mean 'anchor'"),
        ("anchor@6(kk=3)", "Did you mean 'k'"),
        ("grid@6:60(rest=merg)", "Did you mean 'merge'"),
        ("anchor@6(k=0)", "at least one anchor"),
        ("anchor@6(k=-2)", "at least one anchor"),
        ("anchor@6(m=-1)", "below 0"),
        ("anchor@6(alpha=1.5)", r"outside \[0, 1\]"),
        ("anchor@6(alpha=nan)", r"outside \[0, 1\]"),
        ("anchor@6(k=ten)", "not a whole number"),
        ("anchor@6(k=1,k=2)", "twice"),
        ("anchor@6(k)", "name=value"),
        ("anchor@2:60(m=30)", "contradict"),
        ("random@6", "how many tokens"),
        ("random@x:3", "place '@x'"),
        ("random@6,6:3", "twice"),
        ("random@6:60 +", "empty step"),
        ("", "empty step"),
        ("what is this", "not understood"),
        ("none@3", "stands alone"),
        ("anchor@6(rest=zero)", "@out"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(UserError, match=message):
        Plan.parse(text)


def test_budget_and_options_may_agree():
    assert Plan.parse("anchor@2:60(m=50)").steps[0].resolved_budget().count(196) == 60
    assert Plan.parse("anchor@2(k=3,m=4)").steps[0].resolved_budget().count(196) == 7
