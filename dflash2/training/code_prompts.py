"""Programming prompts for `dflash2 synth`, made from a list of small tasks.

Prompt collections for chat hold little code, and a drafter accepts little where it was never trained. The tasks, the
examples and the wording are ours; no benchmark's problems are among them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash2.command import run_command

__all__ = ["main", "prompts"]

Make = Callable[[random.Random], tuple[Any, ...]]
WORDS = ["river", "stone", "apple", "cloud", "window", "garden", "pencil", "bridge", "candle", "forest"]
WORDS += ["winter", "level", "radar", "silver", "orange"]


def _ints(low: int = -9, high: int = 30, most: int = 7) -> Make:
    return lambda r: ([r.randint(low, high) for _ in range(r.randint(3, most))],)


def _int(low: int = 2, high: int = 60) -> Make:
    return lambda r: (r.randint(low, high),)


def _text(words: int = 3) -> Make:
    return lambda r: (" ".join(r.choices(WORDS, k=r.randint(1, words))),)


def _texts() -> Make:
    return lambda r: (r.choices(WORDS, k=r.randint(3, 5)),)


def _both(*parts: Make) -> Make:
    return lambda r: tuple(x for part in parts for x in part(r))


def _nested() -> Make:
    return lambda r: ([[r.randint(0, 9) for _ in range(3)] for _ in range(r.randint(2, 3))],)


#: name, arguments, what it does (completes "a function that ..."), example arguments, solution for the examples.
TASKS: tuple[tuple[str, str, str, Make, Callable[..., Any]], ...] = (
    ("sum_even", "numbers", "returns the sum of the even numbers in a list", _ints(), lambda x: sum(n for n in x if n % 2 == 0)),
    ("count_odd", "numbers", "counts the odd numbers in a list", _ints(), lambda x: sum(n % 2 for n in x)),
    ("running_total", "numbers", "returns the list of running totals", _ints(), lambda x: [sum(x[: i + 1]) for i in range(len(x))]),
    ("largest_gap", "numbers", "returns the largest difference between neighbours in a list", _ints(), lambda x: max(abs(a - b) for a, b in itertools.pairwise(x))),
    ("second_largest", "numbers", "returns the second largest distinct number of a list", lambda r: (r.sample(range(40), 5),), lambda x: sorted(set(x))[-2]),
    ("drop_duplicates", "items", "removes duplicates from a list and keeps the order", _ints(0, 5), lambda x: list(dict.fromkeys(x))),
    ("rotate_left", "items, steps", "rotates a list to the left by a number of steps", _both(_ints(), _int(1, 3)), lambda x, k: x[k % len(x) :] + x[: k % len(x)]),
    ("chunk", "items, size", "splits a list into parts of a given size", _both(_ints(), _int(2, 3)), lambda x, k: [x[i : i + k] for i in range(0, len(x), k)]),
    ("moving_average", "numbers, width", "returns the averages of every window of a given width", _both(_ints(0, 9), _int(2, 2)), lambda x, k: [sum(x[i : i + k]) / k for i in range(len(x) - k + 1)]),
    ("is_sorted", "numbers", "checks whether a list is in ascending order", _ints(), lambda x: x == sorted(x)),
    ("merge_sorted", "a, b", "merges two sorted lists into one sorted list", lambda r: (sorted(r.sample(range(20), 3)), sorted(r.sample(range(20), 3))), lambda a, b: sorted(a + b)),
    ("common_items", "a, b", "returns the sorted items that two lists share", lambda r: (r.sample(range(9), 5), r.sample(range(9), 5)), lambda a, b: sorted(set(a) & set(b))),
    ("flatten", "rows", "flattens a list of lists", _nested(), lambda x: [v for row in x for v in row]),
    ("transpose", "matrix", "swaps the rows and columns of a matrix", _nested(), lambda x: [list(c) for c in zip(*x, strict=True)]),
    ("row_sums", "matrix", "returns the sum of every row of a matrix", _nested(), lambda x: [sum(row) for row in x]),
    ("diagonal_max", "matrix", "returns the largest value in each column of a matrix", _nested(), lambda x: [max(c) for c in zip(*x, strict=True)]),
    ("count_vowels", "text", "counts the vowels in a string", _text(), lambda s: sum(c in "aeiou" for c in s)),
    ("reverse_words", "text", "reverses the order of the words in a sentence", _text(4), lambda s: " ".join(s.split()[::-1])),
    ("capitalize_words", "text", "capitalizes the first letter of every word", _text(4), lambda s: s.title()),
    ("longest_word", "text", "returns the longest word of a sentence", _text(4), lambda s: max(s.split(), key=len)),
    ("char_counts", "text", "returns a dictionary with the number of times each letter occurs", _text(1), lambda s: {c: s.count(c) for c in s}),
    ("remove_spaces", "text", "removes all spaces from a string", _text(4), lambda s: s.replace(" ", "")),
    ("first_unique", "text", "returns the first character that occurs only once", _text(1), lambda s: next((c for c in s if s.count(c) == 1), None)),
    ("shift_letters", "text, steps", "shifts every letter of a lower-case word forward in the alphabet", _both(_text(1), _int(1, 4)), lambda s, k: "".join(chr((ord(c) - 97 + k) % 26 + 97) if c.isalpha() else c for c in s)),
    ("word_lengths", "words", "returns the length of every word in a list", _texts(), lambda x: [len(w) for w in x]),
    ("sort_by_length", "words", "sorts words by their length and then alphabetically", _texts(), lambda x: sorted(x, key=lambda w: (len(w), w))),
    ("join_with_dash", "words", "joins words with dashes in upper case", _texts(), lambda x: "-".join(x).upper()),
    ("group_by_letter", "words", "groups words by their first letter in a dictionary", _texts(), lambda x: {c: [w for w in x if w[0] == c] for c in sorted({w[0] for w in x})}),
    ("starts_with", "words, letter", "keeps the words that start with a letter", lambda r: (r.choices(WORDS, k=4), r.choice("crws")), lambda x, c: [w for w in x if w.startswith(c)]),
    ("is_anagram", "a, b", "checks whether two words are anagrams of each other", lambda r: (r.choice(WORDS), r.choice(WORDS)), lambda a, b: sorted(a) == sorted(b)),
    ("digit_sum", "n", "returns the sum of the digits of a number", _int(10, 9999), lambda n: sum(map(int, str(n)))),
    ("reverse_number", "n", "reverses the digits of a number", _int(10, 9999), lambda n: int(str(n)[::-1])),
    ("to_binary", "n", "returns the binary form of a number as a string", _int(), lambda n: bin(n)[2:]),
    ("divisors", "n", "returns all divisors of a number", _int(), lambda n: [d for d in range(1, n + 1) if n % d == 0]),
    ("is_perfect_square", "n", "checks whether a number is a perfect square", _int(), lambda n: int(n**0.5) ** 2 == n),
    ("collatz_steps", "n", "counts the steps of the Collatz sequence until it reaches 1", _int(2, 12), lambda n: _collatz(n)),
    ("count_primes", "n", "counts the prime numbers below a number", _int(), lambda n: sum(all(p % d for d in range(2, p)) for p in range(2, n))),
    ("power_of_two", "n", "checks whether a number is a power of two", _int(), lambda n: n & (n - 1) == 0),
    ("celsius", "degrees", "converts Fahrenheit to Celsius, rounded to one decimal", _int(20, 110), lambda n: round((n - 32) * 5 / 9, 1)),
    ("least_common_multiple", "a, b", "returns the least common multiple of two numbers", _both(_int(2, 15), _int(2, 15)), lambda a, b: next(m for m in range(a, a * b + 1, a) if m % b == 0)),
    ("clamp", "value, low, high", "limits a value to a range", lambda r: (r.randint(-9, 30), 0, 20), lambda v, a, b: max(a, min(v, b))),
    ("invert", "table", "swaps the keys and values of a dictionary", lambda r: ({w: i for i, w in enumerate(r.sample(WORDS, 3))},), lambda d: {v: k for k, v in d.items()}),
    ("merge_counts", "a, b", "adds up two dictionaries of counts", lambda r: ({"x": r.randint(1, 5), "y": 2}, {"x": 1, "z": r.randint(1, 5)}), lambda a, b: {k: a.get(k, 0) + b.get(k, 0) for k in sorted({*a, *b})}),
    ("top_key", "table", "returns the key with the largest value", lambda r: ({w: r.randint(1, 50) for w in r.sample(WORDS, 3)},), lambda d: max(d, key=lambda k: d[k])),
    ("pairs_with_sum", "numbers, total", "counts the pairs that add up to a total", lambda r: ([r.randint(1, 9) for _ in range(6)], r.randint(6, 12)), lambda x, t: sum(x[i] + x[j] == t for i in range(len(x)) for j in range(i))),
    ("balanced", "text", "checks whether the round brackets in a string are balanced", lambda r: (r.choice(["(a)(b)", "((x)", ")(", "(()())", "a(b)c"]),), lambda s: _balanced(s)),
    ("compress", "text", "replaces runs of a letter by the letter and the length of the run", lambda r: ("".join(c * r.randint(1, 4) for c in "abca"),), lambda s: _runs(s)),
    ("median", "numbers", "returns the median of a list of numbers", lambda r: (r.sample(range(30), 5),), lambda x: sorted(x)[len(x) // 2]),
    ("index_of_max", "numbers", "returns the index of the largest number", _ints(), lambda x: x.index(max(x))),
    ("interleave", "a, b", "interleaves two lists of the same length", lambda r: (r.sample(range(9), 3), r.sample(range(9), 3)), lambda a, b: [v for p in zip(a, b, strict=True) for v in p]),
)  # fmt: skip

LANGUAGES = ("JavaScript", "Java", "C++", "Go", "Rust", "TypeScript", "C", "Bash")


def _collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def _balanced(text: str) -> bool:
    depth = 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if depth < 0:
            return False
    return depth == 0


def _runs(text: str) -> str:
    out, i = "", 0
    while i < len(text):
        n = len(text[i:]) - len(text[i:].lstrip(text[i]))
        out, i = out + f"{text[i]}{n}", i + n
    return out


def _wordings(name: str, args: str, does: str, calls: Sequence[tuple[str, str]], language: str) -> Iterator[str]:
    sentence = does[0].upper() + does[1:]
    doctest = "".join(f"    >>> {call}\n    {result}\n" for call, result in calls)
    asserts = "\n".join(f"assert {call} == {result}" for call, result in calls)
    stub = f'def {name}({args}):\n    """{sentence}.\n\n{doctest}    """'
    yield f"Write a Python function `{name}({args})` that {does}."
    yield f"Write a Python function that {does}. Explain how it works."
    yield f"Finish this Python function:\n\n```python\n{stub}\n```"
    yield f"Here is the start of a Python function. Please implement it.\n\n```python\n{stub}\n```"
    yield f"I need Python code that {does}. These checks must pass:\n{asserts}"
    yield f"Implement `{name}` in Python with type hints. It {does}.\n\nExample: {calls[0][0]} gives {calls[0][1]}."
    yield f"Write a {language} function that {does}."
    yield f"Write unit tests for a Python function `{name}({args})` that {does}."


def prompts(variants: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Every task in every wording, ``variants`` times with other examples, in the format that `dflash2 synth` reads."""
    rng = random.Random(seed)
    for name, args, does, make, solve in TASKS:
        for variant in range(variants):
            examples = [make(rng) for _ in range(rng.randint(1, 3))]
            calls = [(f"{name}({', '.join(map(repr, e))})", repr(solve(*e))) for e in examples]
            for i, text in enumerate(_wordings(name, args, does, calls, rng.choice(LANGUAGES))):
                yield {"id": f"code/{name}/{variant}/{i}", "domain": "code", "turns": [text]}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the prompts as JSONL, each text once."""
    parser = argparse.ArgumentParser(description="Programming prompts for dflash2 synth.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unique = {p["turns"][0]: p for p in prompts(args.variants, args.seed)}
    args.out.write_text("".join(json.dumps(p) + "\n" for p in unique.values()))
    print(f"{len(unique)} prompts in {args.out}")


if __name__ == "__main__":
    raise SystemExit(run_command("dflash2.training.code_prompts", main))
