"""Answers of mathematics: right or wrong, bounded, and never run."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_pairs import BOXED, CASES_GSM8K, CASES_MATH, GSM8K, MATH, MORE_BOXED, MORE_GSM8K
from tba.rewards.answers import BadGold, Pool, bad_golds, correct, correct_all, final_answer, paper_number, shared_pool
from tba.rewards.answers.characters import plain, squeeze, tidy
from tba.rewards.answers.expressions import UnreadableError, parse
from tba.rewards.answers.numbers import Huge, number
from tba.rewards.answers.units import Quantity, quantity, split_unit
from tba.rewards.answers.values import same_value

THIRD = "\\frac{1}{3}"


def boxed(answer: str) -> str:
    return f"The final answer is $\\boxed{{{answer}}}$."


# ---- pairs with known judgements ----------------------------------------------------------------


@pytest.mark.parametrize(("gold", "completion", "right"), CASES_GSM8K + GSM8K + MORE_GSM8K)
def test_gsm8k(gold: str, completion: str, right: bool) -> None:
    assert correct("gsm8k", completion, gold) is right


@pytest.mark.parametrize(("gold", "completion", "right"), CASES_MATH + MATH)
def test_math(gold: str, completion: str, right: bool) -> None:
    assert correct("math", completion, gold) is right


@pytest.mark.parametrize(("gold", "answer", "right"), BOXED + MORE_BOXED)
def test_boxed(gold: str, answer: str, right: bool) -> None:
    assert correct("math", boxed(answer), gold) is right


WRONG_BOTH_WAYS = [
    (gold, answer) for gold, answer, right in BOXED + MORE_BOXED if not right and gold and "frac{a}{b" not in gold
]


@pytest.mark.parametrize(("gold", "answer"), WRONG_BOTH_WAYS)
def test_what_is_wrong_stays_wrong_with_the_sides_exchanged(gold: str, answer: str) -> None:
    assert not correct("math", boxed(gold), answer)


@pytest.mark.parametrize("text", ["The bill comes to $64.00.", "#### 64.", "#### $64", "#### 64.0"])
def test_dress_of_a_number(text: str) -> None:  # case a01
    assert correct("gsm8k", text, "64")


def test_long_text_behind_the_marker() -> None:  # case a02
    assert correct("gsm8k", "40 + 2 = 42\n#### 42\n" + " The steps above all agree with the story." * 20, "42")


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [(f"{THIRD}^{{40}}", f"{THIRD}^{{41}}", False), ("3*x-2*y+7=0", "3x+2y+7=0", False),
     ("3*x-2*y+7=0", "6x-4y+14=0", True), ("3:45", "4:45", False), ("\\pm 2", "2", False)],
)  # fmt: skip
def test_near_misses(gold: str, answer: str, right: bool) -> None:  # cases a07, a08
    assert correct("math", boxed(answer), gold) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [("$\\fbox{42}$", True), ("$\\boxed 42$", True), ("$\\boxed{}$ and then $\\boxed{42}$", True),
     ("$\\boxed{42", False), ("\\boxed", False), ("", False)],
)  # fmt: skip
def test_shapes_of_a_box(text: str, right: bool) -> None:  # case a10
    assert correct("math", text, "42") is right


def test_the_last_marker_counts_even_where_the_text_goes_on_to_another_question() -> None:  # case a14
    assert correct("gsm8k", "As in the example, 2+2=4 #### 4. Now ours: 3+5=8\n#### 8", "8")
    text = "3+5=8\n#### 8\n\nQuestion: A box holds 6 pens. How many in 4 boxes?\nAnswer: 24\n#### 24"
    assert not correct("gsm8k", text, "8")


def test_an_unknown_style_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no answer style named 'gsm8'; did you mean 'gsm8k'"):
        correct("gsm8", "#### 1", "1")


@pytest.mark.parametrize(
    ("style", "completion", "answer"),
    [("gsm8k", "a\n#### 12 eggs\nCheck: 3", "12 eggs"), ("gsm8k", "it is 7, not 8", None), ("gsm8k", "so 3+4=7.", "7"),
     ("math", "x\\boxed{\\frac{1}{\\sqrt{2}}}y", "\\frac{1}{\\sqrt{2}}"), ("math", "\\boxed{1}, \\boxed{2}", "1, 2"),
     ("math", "no \\boxed{1}. But \\boxed{2}", "2"), ("math", "so $x=4$.", "x=4"), ("math", "nothing", None)],
)  # fmt: skip
def test_final_answer(style: str, completion: str, answer: str | None) -> None:
    assert final_answer(style, completion) == answer


# ---- numbers, units, formulas -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,250.50", Fraction(2501, 2)), ("1,00,000", 100_000), ("1.5e-3", Fraction(3, 2000)), ("3 1/2", Fraction(7, 2)),
     ("-\\frac{3}{4}", Fraction(-3, 4)), ("2\\frac{1}{3}", Fraction(7, 3)), ("0.1\\overline{6}", Fraction(1, 6)),
     ("0.(142857)", Fraction(1, 7)), ("2 \\times 10^{-2}", Fraction(1, 50)), ("(5)", 5), ("-0", 0),
     ("1,25", None), ("12,5000", None), ("1.2.3", None), ("1/0", None), ("4:30", None), ("nan", None), ("", None)],
)  # fmt: skip
def test_number(text: str, value: Fraction | None) -> None:
    assert number(text) == value


def test_a_number_too_long_to_calculate_with_is_compared_by_its_digits() -> None:
    assert number("9" * 5000) == Huge(False, "9" * 5000, 0)
    assert number("1" * 1500 + "000") == number("1" * 1500 + "e3")
    assert number("1e999999999999999999") is None
    assert correct("gsm8k", "#### " + "9" * 1999, "9" * 1999)
    assert not correct("gsm8k", "#### " + "9" * 1998 + "8", "9" * 1999)


@settings(deadline=None, max_examples=50)
@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_every_dress_of_a_decimal_is_its_value(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    sign, whole, rest = "-" if value < 0 else "", abs(digits) // 10**places, abs(digits) % 10**places
    after = f".{rest:0{places}d}" if places else ""
    for text in (f"{sign}{whole}{after}", f"{sign}{whole:,}{after}", f"{digits}e-{places}", f"{digits}/{10**places}",
                 f"\\frac{{{digits}}}{{{10**places}}}"):  # fmt: skip
        assert number(text) == value
        assert correct("gsm8k", f"#### ${text} dollars", str(value))
        assert not correct("gsm8k", f"#### {text}", str(value + Fraction(1, 10**9)))


@pytest.mark.parametrize(
    ("text", "core", "unit"),
    [("3\\text{ cm}", "3", "cm"), ("3\\text{ square inches}", "3", "in^2"), ("3\\text{ in}^2", "3", "in^2"),
     ("60 miles per hour", "60", "mile / h"), ("60 km/h", "60", "km / h"), ("15%", "15", "%"), ("\\$5", "5", "dollar"),
     ("30^\\circ", "30", "degree"), ("5\\text{ apples}", "5", ""), ("5m", "5m", ""), ("x", "x", "")],
)  # fmt: skip
def test_unit(text: str, core: str, unit: str) -> None:
    found = split_unit(text)
    assert (found.core, found.unit) == (core, unit)


def test_a_quantity_is_a_number_and_its_unit() -> None:
    assert quantity("2.5\\text{ million dollars}") == Quantity(Fraction(2_500_000), "dollar")
    assert quantity("5 old men", takes_words=True) == Quantity(Fraction(5))
    assert quantity("5 old men") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1\u200b2", "12"), ("\u0661\u0662", "12"), ("\u221212", "-12"), ("1\x002", "1 2"), ("x\u00b2", "x^{2}"),
     ("\u00bd", " 1/2"), ("4\ud800", "4 \ufffd "), ("\u03c0", "\\pi "), ("\u202e42", "42")],
)  # fmt: skip
def test_characters(text: str, expected: str) -> None:
    assert plain(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("\\dfrac34", "\\frac{3}{4}"), ("\\sqrt2", "\\sqrt{2}"), ("\\left( 1,\\! 2\\right)", "( 1, 2)"),
     ("\\mathrm{cm}", "\\text{cm}"), ("30^{\\circ}", "30^\\circ"), ("1{,}000", "1000"),
     ("\\frac{\\sqrt{2}}3", "\\frac{\\sqrt{2}}{3}")],
)  # fmt: skip
def test_dialect(text: str, expected: str) -> None:
    assert tidy(text) == expected


def test_squeezing_joins_nothing() -> None:
    assert squeeze("1 1/2") == "1 1/2"
    assert squeeze("\\frac{4}{15}") != squeeze("\\frac{41}{5}")
    assert squeeze("2{3}") != squeeze("23")
    assert squeeze("x ^ {2} + 1 .") == squeeze("x^2+1")


@pytest.mark.parametrize("text", ["", "x+", "\\frac{1}", "(1", "2 3", "\\foo", "1" * 1001, "-" * 500 + "1", "(" * 300])
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(UnreadableError):
        parse(text)


POLYNOMIALS = st.lists(st.integers(-9, 9), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(POLYNOMIALS, POLYNOMIALS)
def test_polynomials_are_equal_when_their_coefficients_are(left: list[int], right: list[int]) -> None:
    """The slow twin: multiply out by hand and compare coefficients."""
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    factored = f"({written(left)})({written(right)})"
    assert same_value(parse(factored), parse(written(product)))
    product[-1] += 1
    assert not same_value(parse(factored), parse(written(product)))


def written(coefficients: list[int]) -> str:
    return "+".join(f"({c})x^{{{power}}}" for power, c in enumerate(coefficients))


def test_tiny_values_are_not_zero_and_cancelled_ones_are() -> None:
    assert not correct("math", boxed("2^{-300}"), "2^{-301}")
    assert not correct("math", boxed("2^{-300}"), "0")
    assert correct("math", boxed("\\sqrt{2}\\cdot\\sqrt{3}-\\sqrt{6}"), "0")
    assert correct("math", boxed("(\\sqrt{2}-1)^{40}(\\sqrt{2}+1)^{40}"), "1")


def test_forty_digits_of_pi_are_not_pi() -> None:
    assert not correct("math", boxed("3.14159265358979323846264338327950288419716939937510"), "\\pi")


# ---- the paper's rule ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("18.", 18), ("10-4", -4), ("7-8 hours", -8), ("1/2", 2), ("1.5e3", 3), ("2e3", 2000), ("1,2,3", 123),
     ("5 eggs 2 left", 2), ("v1.2.3", 0.30000001192092896), ("\u0661\u0662", 12), ("none", -999999.25),
     ("", -999999.25)],
)  # fmt: skip
def test_the_papers_number(text: str, value: float) -> None:
    """0.3 and -999999.222222 as float32: the nearest numbers with 24 bits."""
    assert paper_number(text) == value


def test_the_papers_rule_compares_as_float32() -> None:
    assert correct("gsm8k_paper", "it is 16777217", "so\n#### 16777216")
    assert not correct("gsm8k", "#### 16777217", "16777216")
    assert correct("gsm8k_paper", "#### 5 or maybe 6", "#### 6")
    assert correct("gsm8k_paper", "1" + "0" * 400, "9" + "0" * 500)  # both infinite


# ---- golds --------------------------------------------------------------------------------------

GOLDS = [
    "18", "1,080", "-7", "109,200,000", "0", "0.5", "\\frac{3}{4}", "\\frac{\\sqrt{6}}{4}", "8\\sqrt{5} - 16", "$7$",
    "$(-\\infty,-1)\\cup(6,+\\infty)$", "$[-\\frac{1}{4}, 0) \\cup (0, 2)$", "$10^{2^n-n-1}$", "2\\sqrt{2}-2",
    "x \\in [1,4]",
    "$\\lambda=2\\sqrt{2}, A(\\pm 1, 0)$", "\\text{Tuesday}", "\\begin{pmatrix} 1 & 0 \\\\ 0 & 2 \\end{pmatrix}",
    "10^{10^{10}}", "y = 3x - 4", "\\{1, 2\\}", "(3, \\frac{\\pi}{2})", "15\\%", "30^\\circ", "\\text{(B)}", "1011_2",
    "6 - 5i", "\\pm \\sqrt{3}", "x^3 - 3x + 1", "\\emptyset", "2:30", "\\frac{a+b}{c}", "n(n+1)", "3 \\text{ cm}^2",
    "\\$1,250.50", "e^{2\\pi i/3}", "\\log_2 3", "\\tan^{-1} \\frac{1}{3}", "\\lfloor \\frac{n}{2} \\rfloor",
    "\\binom{n}{2}", "-\\infty", "x < 3", "\\text{even}", "1\\frac{1}{2}",
]  # fmt: skip


def test_every_gold_is_itself_and_not_its_neighbour() -> None:
    assert bad_golds("math", [("golds.jsonl", n, gold) for n, gold in enumerate(GOLDS)]) == []
    following = [*GOLDS[1:], GOLDS[0]]
    assert correct_all("math", [boxed(gold) for gold in GOLDS], following) == [False] * len(GOLDS)


def test_golds_that_are_not_themselves_are_reported_by_file_and_line() -> None:  # case a11
    good = ["5", "x \\in [1,4]", "\\text{Tuesday}", GOLDS[17], "10^{10^{10}}"]
    golds = [("data.jsonl", line, gold) for line, gold in enumerate([*good, "\\frac{a}{b", "", None], start=1)]
    found = bad_golds("math", golds)
    assert found == [BadGold(file=f, line=line, gold=gold) for f, line, gold in golds[5:]]
    assert str(found[0]) == "data.jsonl, line 6: the gold answer '\\\\frac{a}{b' is not recognised as itself"
    reference = "She has 9 * 2 = <<9*2=18>>18\n#### 18"
    assert bad_golds("gsm8k", [("a", 1, "18"), ("a", 2, reference), ("a", 3, "many"), ("a", 4, 7)]) == [
        BadGold(file="a", line=3, gold="many")
    ]


# ---- hostile answers ----------------------------------------------------------------------------

DEEP = 100_000
HOSTILE = {
    "tower": boxed("9^{9^{9^{9}}}"), "exponents": boxed("e^{e^{e^{e^{e}}}}"), "factorials": boxed("((9!)!)!"),
    "sum": boxed("\\sum_{k=1}^{10^{30}} \\sin(k)"), "binomial": boxed("\\binom{10^{30}}{10^{29}}"),
    "digits": "#### " + "9" * 10**6, "boxed digits": boxed("9" * 10**6), "decimals": "#### 0." + "9" * 10**6,
    "power of digits": boxed("7" * 900 + "^{" + "7" * 900 + "}"), "braces": boxed("{" * DEEP + "1" + "}" * DEEP),
    "open braces": "{" * DEEP, "boxes in boxes": "\\boxed{" * DEEP + "1" + "}" * DEEP, "open boxes": "\\boxed{" * DEEP,
    "empty boxes": "\\boxed{}" * DEEP, "brackets": boxed("(" * 900 + "1" + ")" * 900), "signs": boxed("-" * 1900 + "1"),
    "roots": boxed("\\sqrt{" * 250 + "2" + "}" * 250), "commas": boxed("1," * 990 + "2"), "bars": boxed("|" * 1000),
    "nul": "#### 4\x002", "control": "\x1b[31m#### 42\x07\x08", "direction": "#### \u202e42\u202c",
    "half": "#### 42\ud800", "other half": "\ud83d#### \udc004", "boxed half": boxed("\udfff x+1"),
    "letters": "a" * 10**6, "spaces": " " * 10**6, "markers": "####\n" * 200_000, "dollars": "$" * 10**6,
    "formulas": "$a$ " * 250_000, "announced": "answer is " * DEEP, "numbers": "1 " * 500_000, "dashes": "1-" * 500_000,
    "thoughts": "<think>" * 150_000, "arabic": "\u0661" * 10**6, "exponent marks": "1e" * 500_000,
    "products": "#### " + "1\u00d7" * 500_000, "units": boxed("5 " + "a per " * 300),
    "pairs": boxed("1 and " * 300 + "1"),
}  # fmt: skip
LIMIT_S = 20.0
"""Seconds of this process for one hostile answer on a busy machine; most take milliseconds."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_bounded(name: str) -> None:
    pool = shared_pool()
    for style, gold in [("gsm8k", "42"), ("math", "\\{x+1, 2\\}"), ("gsm8k_paper", "42")]:
        started = time.process_time()
        assert isinstance(correct(style, HOSTILE[name], gold), bool)
        assert isinstance(correct(style, boxed("3"), HOSTILE[name]), bool)
        assert time.process_time() - started < LIMIT_S
    assert pool.size == 2


def test_what_is_not_seen_joins_and_what_is_not_text_separates() -> None:
    assert correct("gsm8k", HOSTILE["direction"], "42")
    assert correct("gsm8k", HOSTILE["control"], "42")
    assert not correct("gsm8k", HOSTILE["nul"], "42")
    assert not correct("gsm8k", HOSTILE["half"], "41")


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60), st.text(alphabet="0123456789.,+-*/^_=<>(){}[]|\\ abx%$!&#:\n", max_size=40))
def test_any_text_is_right_or_wrong(one: str, other: str) -> None:
    for text in (one, other, f"#### {other}", boxed(other)):
        for style in ("gsm8k", "math", "gsm8k_paper"):
            assert correct(style, text, other) in (True, False)
            assert correct(style, other, text) in (True, False)


@pytest.mark.parametrize("latex", [False, True])
def test_no_code_of_an_answer_ever_runs(tmp_path: Path, latex: bool) -> None:
    mark = tmp_path / "ran"
    payloads = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()", f"open({str(mark)!r},'w')", f"[open({str(mark)!r},'w')]",
        f"exec(\"open({str(mark)!r},'w')\")", f"x.__class__(open({str(mark)!r},'w'))",
        f"1+open({str(mark)!r},'w').close()",
        f"\\write18{{touch {mark}}}", f"\\variable{{open({str(mark)!r},'w')}}", f"lambda: open({str(mark)!r},'w')",
        f"\\text{{__import__('os').system('touch {mark}')}}", f"Symbol(open({str(mark)!r},'w'))", f"$(touch {mark})",
    ]  # fmt: skip
    for payload in payloads:
        text = f"\\frac{{{payload}}}{{2}}" if latex else payload
        for framed in (f"#### {text}", boxed(text), f"The answer is ${text}$", text):
            for style in ("gsm8k", "math", "gsm8k_paper"):
                correct(style, framed, "\\frac{x}{2}")
                correct(style, "\\boxed{\\int_0^1 x\\,dx}", text)
        assert shared_pool().equal(text, "\\frac{x}{2}") is False
    assert not mark.exists()


# ---- the pool -----------------------------------------------------------------------------------

BODY = """
import os, threading
from tba.rewards.child import requests

def serve(connection, limit_s):
    for gold, answer in requests(connection, 60.0):
        if answer == "hang":
            threading.Event().wait()
        if answer == "die":
            os._exit(3)
        connection.send(gold == answer if answer != "odd" else "yes")
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    (tmp_path / "moody_body.py").write_text(BODY, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Pool(2, limit_s=1.0, entry="moody_body:serve")
    yield made
    made.close()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_hangs_is_killed_and_the_rest_is_judged(pool: Pool) -> None:  # case a05
    pool.start()
    before = pool.alive
    assert len(before) == 2
    answers = ["hang"] * 3 + ["5"] * 40
    random.Random(7).shuffle(answers)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda answer: pool.equal("5", answer), answers))
    assert found == [answer == "5" for answer in answers]
    assert pool.replaced == 3
    assert len(pool.alive) == 2
    assert len(set(before) & set(pool.alive)) <= 1
    assert pool.equal("5", "5")


@pytest.mark.parametrize("answer", ["die", "odd"])
def test_what_dies_or_gives_no_bool_is_wrong(pool: Pool, answer: str) -> None:
    assert pool.equal("5", answer) is False
    assert pool.equal("5", "5") is True
    assert pool.replaced == (answer == "die")


def test_a_pool_starts_nothing_until_asked_and_leaves_nothing(pool: Pool) -> None:
    assert pool.alive == []
    pool.equal("5", "5")
    (pid,) = pool.alive
    assert exists(pid)
    pool.close()
    pool.close()
    assert not exists(pid)
    with pytest.raises(RuntimeError, match="is closed"):
        pool.equal("5", "5")


def test_a_pool_that_cannot_start_says_so() -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        Pool(1, entry="no_such_module:serve").equal("1", "1")


SCRIPT = """
import os
from tba.rewards.answers import shared_pool
shared_pool().start()
print(*shared_pool().alive, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_its_owner(end: str) -> None:
    """They notice a closed pipe at once; a parent that is gone, within 5 s."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(end=end)], stdout=subprocess.PIPE, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(exists, pids)) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not any(map(exists, pids))


SYMBOLIC = ("\\int_0^1 x \\, dx", "\\frac{1}{2}")
"""A pair that only the algebra system can judge."""


def judge_symbolic(_: int = 0) -> bool:
    return correct("math", boxed(SYMBOLIC[0]), SYMBOLIC[1]) and not correct("math", boxed(SYMBOLIC[0]), THIRD)


def test_the_algebra_system_is_asked_from_any_context() -> None:  # case a04
    async def task() -> bool:
        return judge_symbolic()

    assert judge_symbolic()
    assert asyncio.run(task())
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(judge_symbolic, range(6)))


def test_a_daemonic_process_may_ask_too() -> None:  # case a04
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        assert processes.map(judge_symbolic, range(2)) == [True, True]


@pytest.mark.slow
def test_a_ray_actor_may_ask_too() -> None:  # case a04
    import ray

    variables = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init("local", num_cpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        assert ray.get(ray.remote(judge_symbolic).remote())
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [("55", "\\sum_{k=1}^{10} k", True), ("\\frac{1}{3}", "\\int_0^1 x^2 \\, dx", True), ("2", "9^{9^{9^{9}}}", False),
     ("x", "\\int_0^{10^{10^{10}}} x dx", False), ("1", "\\frac{", False), ("0.333333", "\\frac{1}{3}", False),
     ("1", "\\sum_{k=1}^{10^{30}} k", False), ("\\text{no}", "\\text{no}", True), ("x", "y", False)],
)  # fmt: skip
def test_the_algebra_system_itself(gold: str, answer: str, right: bool) -> None:
    assert shared_pool().equal(gold, answer) is right


def test_checking_numbers_loads_no_algebra_system() -> None:
    heavy = "{'sympy', 'mpmath', 'torch'} & set(sys.modules)"
    call = "correct('gsm8k', '#### 1,250', '1250')"
    code = f"import sys; from tba.rewards.answers import correct; print({call}, *{heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]
