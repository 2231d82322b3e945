"""Asks a llama.cpp server for the ids of many Unicode texts: a second reading of the vocabulary in a GGUF file.

    python -m tests.recipes.make_unicode_ids http://127.0.0.1:8080    # writes tests/data/smollm2_unicode_ids.json

The server must have loaded the GGUF file of `smollm2-135m`.
"""

from __future__ import annotations

import json
import random
import sys
import unicodedata
import urllib.request
from collections import defaultdict
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "data" / "smollm2_unicode_ids.json"
LETTERS_PER_CATEGORY = 6
MIXED = [
    "Add ¼ cup and ½ tsp, then 1¾ l.",
    "x² + y³ = ⅔; Ⅳ. Ludwig ⅩⅡ",
    "٣٤٥ ၁၂ ๑๒ 一二三 ①②③ \U0001d7d9\U0001d7da ౩",
    "e\u0301 n\u0303o a\u0308\u0304 क\u093cि தமி\u0bb4\u0bcd \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👍🏽 🇩🇪🇯🇵 1\ufe0f\u20e3",
    "東京タワー3階で待つ。한국어 12월, 中文１２３",
    "Привет, мир! Γειά 5€ — 10 ₽ «так»",
    "مرحبا ١٢ שלום 7 नमस्ते ८",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\tg\v h",
    "don't I'LL we\u2019ve 'tis 5's",
    "tab\t\t  end \n\n\n  x\r\n y ",
    "\u200b\ufeff\u200e\u00ad soft\u00adhyphen",
    "ﬁ ﬂ Ǆ ǅ ǆ ß ẞ İ \u0131 ﷺ ㎏ ㋿",
]


def texts() -> list[str]:
    """Letters of every category, alone and in company, and texts of mixed scripts."""
    categories: dict[str, list[str]] = defaultdict(list)
    for code in range(0x20000):
        category = unicodedata.category(chr(code))
        if category not in ("Cs", "Cn", "Co"):  # surrogates and what Unicode leaves open
            categories[category].append(chr(code))
    rng = random.Random(2)
    found = list(MIXED)
    for _, letters in sorted(categories.items()):
        for letter in rng.sample(letters, min(LETTERS_PER_CATEGORY, len(letters))):
            found += [f" {letter}", f"a{letter}b {letter}{letter} 1{letter}2 ,{letter}"]
    return found


def ask(url: str, text: str) -> list[int]:
    """The server's ids of a text without special tokens."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
    with urllib.request.urlopen(f"{url}/tokenize", body) as response:
        ids: list[int] = json.load(response)["tokens"]
    return ids


def main(url: str) -> None:
    rows = [json.dumps([text, ask(url, text)]) for text in texts()]
    PATH.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} texts -> {PATH}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
