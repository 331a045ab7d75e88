"""Texts on which tokenizers differ, always the same ones."""

from random import Random

NUM_TEXTS = 200
ATOMS = (
    "", " ", "  ", "   \t ", "\n", "\n\n", "\r\n", "\r",
    " \n", "\n ", "\t\n x", "a", "The", " the", "I'm", "WE'LL",
    "don't",
    "O'Brien's", "'s", " 'tis", "’s", "camelCase", "HTTPServer2Go", "snake_case_x", "ÀÉîõ", "école",
    "e\u0301cole", "A\u030angstro\u0308m", "\u212bngström", "ﬁne ½ ² Ⅷ", "ｆｕｌｌ　ｗｉｄｔｈ", "0", "12",
    "123",
    "1234567", "3.14159", "1,000,000", "٣٤٥",
    "१२३", "x1y22z333", "日本語のテキスト", "中文，标点。", "한국어 문장",
    "ไทยภาษา", "नमस्ते दुनिया", "مرحبا بالعالم", "שָׁלוֹם", "Привет, мир!", "ΑΒγδ",
    "ǅungla ǈ", "ʰaʷ", "🙂",
    "👩‍👩‍👧‍👦",
    "🇩🇪🇫🇷", "❤️", "a\u200bb", "\u00a0x\u00a0", "\u3000", "\u2028y", "\ufeffstart", "\u0085", "\x00", "\x07\x1b[0m",
    "!", "!!!", "...", "?!", "$5+3=8", "a/b\\c", "http://x.org/?q=1&r=2#z", "<b>bold</b>", "{\"k\": [1, null]}",
    "def f(x):\n    return x**2\n", "/* c */\r\n// d\n", "  - item\n  - more", "| a | b |\n|---|---|", "``", "~~~",
    "—–-", "“quoted”", "«a»", "__init__", "@user #tag", "▁",
    "▁the", "a▁b", "Ġ", "Ċ", "<0x41>", "the\u0301", "\u0301",
    "ΣΑΣ ß ẞ İı", "ĳĲ", "𝔘𝔫𝔦", "𐍈", "\U000e0001", "\ue000", "\ufffd", "\u1e9b\u0323", "ガ", "カ\u3099", "ｶﾞ", "각",
    "\u1100\u1161\u11a8",
)  # fmt: skip


def nasty_texts() -> list[str]:
    """Each of the atoms alone, then rows of them."""
    random, texts = Random(7), list(ATOMS)
    while len(texts) < NUM_TEXTS:
        texts.append(random.choice(("", " ")).join(random.choices(ATOMS, k=random.randint(2, 6))))
    return texts
