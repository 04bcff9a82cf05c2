"""Answer checking: every gold against itself and its neighbour, answers per second, and the time of hostile ones.

    python benchmarks/answers.py --gsm8k train.jsonl test.jsonl --mmath en.json --json answers.json

GSM8K files hold one object a line with `answer`; the MMATH file is a list of objects with `answer`. A gold is stated
the way a model would, behind `####` or in a box, and judged against itself and against the next different gold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tba.rewards.answers import Pool, correct, correct_all

BARS = {"right": 1.0, "neighbour wrong": 0.999, "gsm8k per second": 3000.0, "math per second": 200.0}
HOSTILE = {
    "tower of powers": "\\boxed{9^{9^{9^{9}}}}",
    "10^6 digits": "\\boxed{" + "9" * 10**6 + "}",
    "10^5 nested braces": "\\boxed{" + "{" * 10**5 + "1" + "}" * 10**5 + "}",
    "10^5 nested boxes": "\\boxed{" * 10**5 + "1" + "}" * 10**5,
    "NUL, control, bidi": "#### 4\x002\x1b[31m\u202e",
    "half surrogates": "\ud83d#### 42\ud800",
    "1 MB of letters": "a" * 10**6,
    "1 MB of numbers": "1 " * 500_000,
    "hopeless integral": "\\boxed{\\int_0^1 x^{x^{x^x}} \\sin(e^{x^2}) \\, dx}",
}
FORMULAS = [
    ("\\frac{3}{4}", "0.75"), ("2\\sqrt{3}", "\\sqrt{12}"), ("\\{1,3\\}", "\\{3,1\\}"), ("[0,1)", "[0, 1)"),
    ("x+2y=3", "2x+4y=6"), ("3+4i", "4i+3"), ("(x+1)^2", "x^2+2x+1"), ("6\\pi", "\\pi \\cdot 6"), ("x=5", "5"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}"), ("\\pm 2", "2,-2"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"), ("(-\\infty,3)", "x<3"), ("\\log_2 8", "3"),
    ("\\sin 2x", "2\\sin x\\cos x"),
]  # fmt: skip
"""Read here: (gold, contents of the box)."""
SYMBOLIC = [
    ("\\frac{1}{2}", "\\int_0^1 x \\, dx"), ("55", "\\sum_{k=1}^{10} k"),
    ("-2", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"),
]  # fmt: skip
"""Read by the algebra system alone."""


def read_gsm8k(paths: Sequence[Path]) -> list[str]:
    """The final answers of GSM8K files."""
    lines = [line for path in paths for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    return [json.loads(line)["answer"].rsplit("####", 1)[1].strip() for line in lines]


def against(style: str, golds: Sequence[str], pool: Pool) -> dict[str, Any]:
    """Shares of golds that are right against themselves and wrong against the next different one, with exceptions."""

    def stated(gold: str) -> str:
        return f"So it is\n#### {gold}" if style == "gsm8k" else f"So it is $\\boxed{{{gold.strip('$')}}}$."

    following = [next((g for g in [*golds[n + 1 :], *golds] if g != gold), "") for n, gold in enumerate(golds)]
    started = time.perf_counter()
    right = correct_all(style, [stated(gold) for gold in golds], golds, pool=pool)
    neighbour = correct_all(style, [stated(gold) for gold in golds], following, pool=pool)
    return {
        "golds": len(golds), "right": sum(right) / len(golds), "neighbour wrong": 1 - sum(neighbour) / len(golds),
        "not right": [gold for gold, is_right in zip(golds, right, strict=True) if not is_right],
        "neighbour right": [pair[:2] for pair in zip(golds, following, neighbour, strict=True) if pair[2]],
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def rate(judge: Callable[[], int], seconds: float) -> float:
    """Answers per second of wall-clock time, over at least `seconds`."""
    count, started = judge(), time.perf_counter()
    count = 0
    while time.perf_counter() - started < seconds:
        count += judge()
    return count / (time.perf_counter() - started)


def many(style: str, pairs: Sequence[tuple[str, str]], pool: Pool) -> Callable[[], int]:
    """One round over (gold, completion) pairs, all threads of the pool at once."""
    golds, completions = [gold for gold, _ in pairs], [completion for _, completion in pairs]
    return lambda: len(correct_all(style, completions, golds, pool=pool))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    pool = Pool(2)
    pool.start()
    found: dict[str, Any] = {}
    gsm8k = read_gsm8k(arguments.gsm8k) if arguments.gsm8k else [f"{n:,}" for n in range(7, 9000, 9)]
    found["gsm8k golds"] = against("gsm8k", gsm8k, pool)
    if arguments.mmath:
        rows = json.loads(arguments.mmath.read_text("utf-8"))
        found["mmath golds"] = against("math", [str(row["answer"]) for row in rows], pool)
    text = "She sells 16 - 3 - 4 = 9 eggs, so she makes 9 * 2 = 18 dollars.\n" * 4
    marked = [(gold, f"{text}#### {gold if n % 2 else gsm8k[n - 1]}") for n, gold in enumerate(gsm8k[:2000])]
    formulas = [(gold, f"Hence $\\boxed{{{answer}}}$.") for gold, answer in FORMULAS] * 4
    symbolic = [(gold, f"Hence $\\boxed{{{answer}}}$.") for gold, answer in SYMBOLIC]
    found["gsm8k per second"] = rate(many("gsm8k", marked, pool), arguments.seconds)
    found["math per second"] = rate(many("math", formulas, pool), arguments.seconds)
    found["algebra system per second"] = rate(many("math", symbolic * 4, pool), arguments.seconds)
    found["hostile seconds"] = {}
    for name, completion in HOSTILE.items():
        started = time.perf_counter()
        for style in ("gsm8k", "math", "gsm8k_paper"):
            correct(style, completion, "\\sqrt{2}x", pool=pool)
        found["hostile seconds"][name] = (time.perf_counter() - started) / 3
    found["pool"] = {"size": pool.size, "alive": len(pool.alive), "replaced": pool.replaced}
    pool.close()
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = []
    for name in ("gsm8k golds", "mmath golds"):
        if name in found:
            part = found[name]
            shares = f"right {part['right']:.4%}  neighbour wrong {part['neighbour wrong']:.4%}"
            lines.append(f"{name:28} {part['golds']:6}  {shares}")
            lines += [f"  not right: {gold!r}" for gold in part["not right"]]
            lines += [f"  right against its neighbour: {pair!r}" for pair in part["neighbour right"]]
    lines += [f"{name:28} {found[name]:8.0f}" for name in found if name.endswith("per second")]
    lines += [f"{name:28} {seconds:8.3f} s" for name, seconds in found["hostile seconds"].items()]
    return "\n".join([*lines, f"{'pool':28} {found['pool']}"])


def main() -> int:
    """Prints the table and writes the JSON file; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", nargs="*", type=Path, default=[])
    parser.add_argument("--mmath", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), "utf-8")
    golds = [found[name] for name in ("gsm8k golds", "mmath golds") if name in found]
    missed = [name for name, bar in BARS.items()
              if min([part[name] for part in golds if name in part] or [found.get(name, bar)]) < bar]  # fmt: skip
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
