"""Two hundred strings that tokenizers disagree about: digits, blanks, scripts, control words."""
# ruff: noqa: E501, RUF001

from __future__ import annotations

import random

FIXED = [
    "", " ", "  ", "\n", "\t", "a", " a", "  a", "a ", "a  ", "\n\n", " \n", "\r\n", "\t\ta\t",
    "1", "12", "123", "1234567890", "3.14159", "1,000,000", "2024-05-17", "0x1F", "v1.2.3", "½ ² ٣",
    "don't", "DON'T", "I'll we've you're he'd she's I'm", "'s 's'", "l’été", "rock 'n' roll",
    "Hello, world!", "HELLO world", "CamelCaseWord snake_case_word", "naïve café", "straße ÄÖÜ",
    "😀", "👩‍👩‍👧‍👦 family", "🇩🇪🇫🇷", "a😀b😀", "漢字", "漢字かな交じり文。", "你好，世界！", "안녕하세요 세계", "Привет, мир",
    "مرحبا بالعالم", "שלום", "हिन्दी", "ไทย", "e\u0301 \u0301", "\u200b\u00a0\u3000x", "\ufffd\ufeff",
    "def f(x):\n    return x ** 2\n", "if (a && b) {\n\tc += 1;\n}", "<div class=\"x\">&amp;</div>",
    "SELECT * FROM t WHERE a='b';", "{\"k\": [1, 2, null]}", "path/to/file.txt", "https://a.b/c?d=e#f",
    "user@example.org", "$100 €50 £20", "==== ---- ____ ....", "!!!???", "a...b", "()[]{}<>", "\\n \\t",
    "the  quick   brown    fox", "trailing blanks   ", "   leading blanks", "line\n  indented\n    more\n",
    "x = 1\n\n\ny = 2", "tab\tseparated\tvalues", "a\u2028b", "…—–‘’“”", "A" * 40, " " * 40, "=" * 40, "ab" * 30,
]  # fmt: skip
PARTS = [
    "word", " Word", "  ", "\n", "\t", "7", "42", " 1999", "'s", "n't", "é", "漢", "字典", "🙂", "...", "!", " ?",
    "_x", "(y)", " {", "}\n", "ﬁ", "ß", " the", "ing", " -", "--", "\u0301", "\u00a0", "Ω", " и", "न", "\r\n",
]  # fmt: skip


def mixed_strings(control_words: list[str]) -> list[str]:
    """Two hundred strings, the same each time."""
    draw = random.Random(2)
    strings = list(FIXED)
    for word in control_words[:6]:
        strings += [word, f"a{word}b", f" {word} x", f"{word}{word}", word[:-1]]
    while len(strings) < 200:
        parts = draw.choices(PARTS + control_words[:6], k=draw.randint(2, 12))
        strings.append("".join(parts))
    return strings[:200]
