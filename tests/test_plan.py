"""Plans: text and value are inverse, budgets count exactly, errors show the place and what was probably meant."""

import copy
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest

from tokensieve import Plan, UserError
from tokensieve.errors import PlanError, one_line
from tokensieve.methods.registry import describe, get_method
from tokensieve.plan import Budget, Step, Where, as_plan, make_step

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
    "random@0:0.00001%",
    "random@0:33.333333333333333333333%",
    "random@99999999999999999999:99999999999999999999",
    "anchor@out(rest=zero)",
    "pool@*.attn:-8",
    "grid@1,-1.attn:64",
    "random@llm.10,20,31:50%",
    "cover@6:16(clip=inf)",
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
        ("anchr@6", "Did you mean 'anchor@6'"),
        ("anchor@6(kk=3)", r"Did you mean 'anchor@6\(k=3\)'"),
        ("grid@6:60(rest=merg)", "Did you mean 'merge'"),
        ("anchor@6(k=0)", "at least one anchor"),
        ("anchor@6(k=-2)", "at least one anchor"),
        ("anchor@6(m=-1)", "below 0"),
        ("anchor@6(alpha=1.5)", r"outside \[0, 1\]"),
        ("anchor@6(alpha=nan)", "not a number"),
        ("anchor@6(k=1_0)", "not a whole number"),
        ("anchor@6(alpha=٣)", "not a number"),
        ("anchor@6(k=ten)", "not a whole number"),
        ("anchor@6(k=1,k=2)", "twice"),
        ("anchor@6(k)", "name=value"),
        ("anchor@2:60(m=30)", "contradict"),
        ("random@6", "how many tokens"),
        ("random@x:3", "place '@x'"),
        ("random@6,6:3", "twice"),
        ("random@6:60 +", "empty step"),
        ("", "empty step"),
        ("what is this", "no method named 'what'"),
        ("none@3", "stands alone"),
        ("anchor@6(rest=zero)", "@out"),
    ],
)
def test_errors_are_named(text, message):
    with pytest.raises(UserError, match=message):
        Plan.parse(text)


def test_budget_and_options_may_agree():
    assert Plan.parse("anchor@2:60(m=50)").steps[0].resolved_budget().count(196) == 60
    assert Plan.parse("anchor@2(k=3,m=4)").steps[0].resolved_budget().count(196) == 7


# ---------------------------------------------------------------------------------------------------- where, and what was meant


@pytest.mark.parametrize(
    ("text", "caret", "meant"),
    [
        ("anchor@4 60", "        ^", "anchor@4:60"),
        ("anchor@4:", "         ^", "anchor@4:60"),
        ("anchor@4(k=3", "            ^", "anchor@4(k=3)"),
        ("anchor@x:60", "       ^", None),
        ("random@6 7:4", "        ^", "random@6,7:4"),
        ("anchr@4:60", "^", "anchor@4:60"),
        ("anchor4:60", "^", "anchor@4:60"),
        ("anchor 4:60", "      ^", "anchor@4:60"),
        ("anchor@4;60", "        ^", "anchor@4:60"),
        ("anchor@4.60", "        ^", "anchor@4:60"),
        ("anchor@@4:60", "       ^", "anchor@4:60"),
        ("anchor@4:60 %", "           ^", "anchor@4:60%"),
        ("anchor@4:0.4", "         ^", "anchor@4:40%"),
        ("anchor@4:60x", "           ^", None),
        ("anchor@4(k=3))", "             ^", "anchor@4(k=3)"),
        ("anchor@4[k=3]", "        ^", "anchor@4(k=3)"),
        ("anchor@4(k=3):60", "             ^", "anchor@4:60(k=3)"),
        ("anchor@4:60 pool@9:16", "           ^", "anchor@4:60 + pool@9:16"),
        ("anchor@4(k=3 + pool@9:16", "                        ^", "anchor@4(k=3) + pool@9:16"),
        ("anchor@6.atn:60", "        ^", "anchor@6.attn:60"),
        ("random@llm10:60", "       ^", "random@llm.10:60"),
        ("random@outt:4", "          ^", "random@out:4"),
        ("random@6:60 +", "             ^", "random@6:60"),
        ("  random@6,6:3 ", "      ^", None),
        ("anchor@6(m=5, kk=3)", "              ^", "anchor@6(k=3,m=5)"),
    ],
)
def test_an_error_shows_where_and_what_was_meant(text, caret, meant):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    message, shown, below = str(caught.value).split("\n")
    assert (shown, below) == (f"  {text.strip()}", f"  {caret}")
    assert message.endswith(f" Did you mean {meant!r}?") if meant else "Did you mean" not in message
    assert one_line(caught.value) == f"plan {text.strip()!r}: {message}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_long_plan_is_shown_around_the_place():
    with pytest.raises(PlanError) as caught:
        Plan.parse("random@" + ",".join(map(str, range(300))) + ",x:4" + "0" * 200)
    message, shown, caret = str(caught.value).split("\n")
    assert len(message) < 200 and len(shown) < 120
    assert shown.startswith("  ...") and shown.endswith("...") and shown[caret.index("^")] == "x"


def test_texts_have_a_limit():
    longest = "random@6:60 + " * 142 + "pool@9:16"
    assert 1990 < len(longest) <= 2000 and len(Plan.parse(longest).steps) == 143
    assert str(Plan.parse("random@6:" + "9" * 1900)) == "random@6:" + "9" * 1900
    with pytest.raises(UserError, match="at most 2,000 characters"):
        Plan.parse(longest + "+" + "x" * 20)


@pytest.mark.parametrize("text", ["anchor@6\x1b[31m:60", "anch\u202eor@6:60", "anchor@6(k=\x003)", "x\ud800@6:60"])
def test_control_characters_are_not_echoed(text):
    with pytest.raises(UserError) as caught:
        Plan.parse(text)
    assert str(caught.value).replace("\n", "").isprintable() and one_line(caught.value).isprintable()


@pytest.mark.parametrize("text", ["anchor@\u0663:60", "anchor@6:\u0666\u0660", "anchor@6(k=\u0663)"])
def test_digits_are_those_of_ascii(text):
    with pytest.raises(UserError):
        Plan.parse(text)


def test_whitespace_of_any_kind_is_a_space():
    assert str(Plan.parse("anchor@6:60\n  + pool@9\t:16\n")) == "anchor@6:60 + pool@9:16"


# ----------------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("text", TEXTS)
def test_plans_are_hashable_values(text):
    plan, same = Plan.parse(text), Plan.parse(text)
    assert plan is not same and plan == same and hash(plan) == hash(same)
    assert {plan: 1}[same] == 1 and len({plan, same, Plan.parse("grid@3:4")}) == 2
    assert repr(plan) == f"Plan({text!r})" and copy.deepcopy(plan) == plan == copy.copy(plan)
    restored = pickle.loads(pickle.dumps(plan))
    assert restored == plan and hash(restored) == hash(plan) and str(restored) == text
    assert pickle.loads(pickle.dumps(plan.steps)) == plan.steps
    for step in plan.steps:
        assert len({step, step.where, step.budget, step.method}) == 4


def test_a_plan_with_a_method_that_is_not_registered_is_copied_but_not_pickled():
    def unknown(view, keep):
        """A method for this test."""

    plan = Plan((make_step(describe(unknown), None, Budget.parse("4")),))
    assert copy.deepcopy(plan) == plan
    with pytest.raises(UserError, match="'unknown' is not registered, so it cannot be pickled"):
        pickle.dumps(plan)


def test_the_order_of_options_does_not_matter():
    one, other = (make_step(get_method("anchor"), None, None, o) for o in ({"k": 3, "m": 4}, {"m": 4, "k": 3}))
    assert one == other and hash(one) == hash(other) and str(one) == "anchor(k=3,m=4)"
    assert one.explicit_options == (("k", 3), ("m", 4)) and one.options["alpha"] == 0.5


def test_values_made_in_python_equal_those_of_a_text():
    anchor = get_method("anchor")
    step = make_step(anchor, Where("block", [6]), None, {"k": np.int64(3), "m": 4, "alpha": 1})
    assert Plan((step,)) == Plan.parse("anchor@6(k=3,m=4,alpha=1)") == Plan.parse(str(Plan([step])))
    assert str(step) == "anchor@6(k=3,m=4,alpha=1.0)"
    assert Budget("keep", 60) == Budget.parse("60") and Budget("share", 0.4) == Budget.parse("40%")
    assert Budget("share", Fraction(2, 5)).count(196) == 79


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan.parse(None), r"a plan is a text, .* not None \(NoneType\)"),
        (lambda: Plan.parse(3), r"not 3 \(int\)"),
        (lambda: Plan.parse(b"anchor"), "bytes"),
        (lambda: as_plan(3), r"not 3 \(int\)"),
        (lambda: as_plan(["anchor@4:60", "pool@9:16"]), r"join its steps with '\+', as in 'anchor@4:60 \+ pool@9:16'"),
        (lambda: Plan("anchor@4:60"), "Plan.parse"),
        (lambda: Plan(["anchor@4:60"]), "Plan.parse"),
        (lambda: Budget("half", 3), "not one of keep, share, remove"),
        (lambda: Budget("keep", 2.5), "whole number of at least 1, not 2.5"),
        (lambda: Budget("keep", 0), "at least 1"),
        (lambda: Budget("keep", "60"), r"not '60' \(str\)"),
        (lambda: Budget("share", 40), "at most 1"),
        (lambda: Budget("share", float("nan")), "nan"),
        (lambda: Budget.parse(60), r"a budget is a text, not 60 \(int\)"),
        (lambda: Budget.parse("60 x"), "budget '60 x' is not understood"),
        (lambda: Where("inside"), "not one of block, attn, out, llm, half"),
        (lambda: Where("block", 3), r"not 3 \(int\)"),
        (lambda: Where("block", (3, 2.5)), "whole numbers"),
        (lambda: Where("block", (3, 3)), "twice"),
        (lambda: Where.parse(6), r"a place is a text, not 6 \(int\)"),
        (lambda: Where.parse("6 7"), "place '6 7' is not understood"),
        (lambda: Step("anchor"), r"get_method\('anchor'\)"),
        (lambda: Step(get_method("anchor"), "6"), "Where.parse"),
        (lambda: Step(get_method("anchor"), Where("out"), 60), "Budget.parse"),
        (lambda: make_step(get_method("anchor"), options={"k": 2.5}), "k=2.5 is not a whole number; for example k=10"),
        (lambda: make_step(get_method("anchor"), options={"k": "3"}), "k=3 is not a whole number"),
        (lambda: make_step(get_method("anchor"), options={"k": True}), "k=True is not a whole number"),
        (lambda: make_step(get_method("anchor"), options={"k": [3]}), r"k=\[3\] \(list\) is not a whole number"),
        (lambda: make_step(get_method("anchor"), options={"alpha": None}), "is not a number"),
        (lambda: make_step(get_method("anchor"), options={"normalize": True}), "not one of minmax, none"),
        (lambda: make_step(get_method("anchor"), options={"rest": "merg"}), "Did you mean 'merge'"),
        (lambda: make_step(get_method("anchor"), options={"kk": 3}), "no option 'kk'.*Did you mean 'k'"),
    ],
)
def test_a_wrong_type_is_a_user_error(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_plan_in_a_file(tmp_path):
    file = tmp_path / "with a space.json"
    file.write_text(json.dumps({"plan": "resize(size=96) + cover@4:16", "front": []}))
    assert Plan.parse(f" @{file} ") == as_plan(f"@{file}") == Plan.parse("resize(size=96) + cover@4:16")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*: No such file"),
        ("{", "is not JSON"),
        ("[1]", "holds no plan"),
        ('{"plan": null}', "holds no plan"),
        ('{"plan": "@other.json"}', "holds no plan"),
        ('{"plan": "covre:16"}', "Did you mean 'cover:16'"),
    ],
)
def test_a_file_without_a_plan_is_a_user_error(tmp_path, content, message):
    file = tmp_path / "tune.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        Plan.parse(f"@{file}")
    with pytest.raises(UserError, match="read from a file"):
        Plan.parse("@")
