"""The messages of an answer of gpt-oss as one text: reasoning between <think> and </think>, calls in one form.

The format, harmony, has a header before each message: its channel, analysis, commentary or final, and for a call
of a tool its recipient, in any order. What follows the end of a header is the message. Marks are tokens of their
own; the same spelling in a message is text.
"""

import re

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKS = (START, CHANNEL, "<|constrain|>", MESSAGE, END, "<|call|>", "<|return|>")
ANALYSIS, COMMENTARY, FINAL = (f"{CHANNEL}{each}{MESSAGE}" for each in ("analysis", "commentary", "final"))
CALL = f"{CHANNEL}commentary to="  # and the recipient
CALL_BODY = f" <|constrain|>json{MESSAGE}"
NEXT = f"{END}{START}assistant"  # between two messages
# Marks of reasoning that are tokens of their own: of most families, Seed-OSS, Ministral 3, Hunyuan 3 and Gemma 4.
THINK_MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|channel>", "<channel|>"),
)
# Texts around an answer behind the reasoning, by how the names of the families begin that write them.
ANSWER_MARKS = {"ernie4_5": ("<response>", "</response>"), "hunyuan": ("<answer>", "</answer>")}
THINK_HEADERS = {"<|channel>": "thought\n"}  # what stands behind the first mark and before the reasoning
_OPEN, _CLOSE = "<think>\n", "\n</think>\n\n"
_RECIPIENT, _ANALYSIS = re.compile(r"\bto=([^\s<]+)"), re.compile(r"<\|channel\|>\s*analysis\b")
_FIRST = " to="  # the beginning of an answer whose header names the recipient first


class ChannelText:
    """Takes text and marks of an answer in their order, and gives its text.

    An answer that begins with other text continues a message that the prompt has begun.
    """

    def __init__(self) -> None:
        self._header: str | None = ""  # of a message that begins, as far as it is there; None within a message
        self._is_first = True  # no message has begun in the answer
        self._is_reasoning = False  # the message before is, or the one that has begun
        self._is_answer = False  # likewise: it is for the user

    def text(self, piece: str) -> str:
        if self._header is None:
            return piece
        self._header += piece
        if not self._is_first or _FIRST.startswith(self._header) or self._header.startswith((_FIRST, CHANNEL)):
            return ""
        begun, self._header, self._is_first, self._is_reasoning = self._header, None, False, True
        return begun

    def mark(self, mark: str) -> str:
        if self._header is None:
            self._header = CHANNEL if mark == CHANNEL else ""
            return ""
        if mark != MESSAGE:
            self._header = "" if mark in (START, END) else self._header + mark
            return ""
        header, self._header, self._is_first = self._header, None, False
        recipient, before, was_answer = _RECIPIENT.search(header), self._is_reasoning, self._is_answer
        self._is_reasoning = recipient is None and _ANALYSIS.search(header) is not None
        self._is_answer = recipient is None and not self._is_reasoning
        if self._is_reasoning:
            return "\n\n" if before else _OPEN
        call = f"{CALL}{recipient[1]}{CALL_BODY}" if recipient else ""
        return (_CLOSE if before else "\n\n" if was_answer and self._is_answer else "") + call

    def end(self) -> str:
        """Give what was held back: text of which it was not clear if it is a header."""
        held, self._header = self._header, None
        return held if held and self._is_first and CHANNEL not in held else ""


def read_channels(text: str) -> str:
    """The text of messages whose marks are spelled in it, from within a header on."""
    read = ChannelText()
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    return "".join(read.mark(part) if part in MARKS else read.text(part) for part in parts if part) + read.end()
