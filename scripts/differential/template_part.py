"""Chat templates: what edgespec gives a model to read, beside what transformers renders."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from made_tokenizers import tokenizer_json

from differential.conversations import SWITCHES, TOOLS, draw_conversation
from differential.difference import Difference, Row
from differential.made_templates import draw_form, write_template
from differential.snippets import SNIPPETS
from edgespec.errors import EdgeSpecError, ModelError
from edgespec.text.chat_template import encode_chat
from edgespec.text.prompt_encoder import parse_messages
from edgespec.text.template_sandbox import render
from edgespec.text.tokenizer import Tokenizer
from edgespec.tools.call_events import join_calls
from edgespec.tools.call_parser import CallParser
from edgespec.tools.formats import find_format
from edgespec.tools.tool import parse_tools
from edgespec.tools.tool_template import Render, ToolTemplate, fit_messages, probe_template

NUM_TEMPLATES, NUM_CONVERSATIONS = 200, 40
_EACH = 12  # conversations of a template
_SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
_WIDE = r"%s|\.format\(|ljust|wordwrap"
# The roles whose contents are lists of parts, where a template takes such.
_PART_ROLES = tuple(("user", "tool", *more) for more in (("system", "assistant"), ("assistant",), ("system",), ()))
_SHOWN = 100  # characters before and behind the first that differs


@dataclass(frozen=True)
class Asked:
    """A conversation, and what else a template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    switches: Mapping[str, Any] = field(default_factory=dict)


def template_rows(_: Path) -> Iterator[Row]:
    where = "chat templates, made by chance, beside transformers"
    if find_spec("transformers") is None:
        yield Row(where, 0, skipped="the package transformers is not installed")
        return
    random, explained, found, num_tried = Random(11), Counter[str](), list[Difference](), 0
    asked = [_draw(random) for _ in range(NUM_CONVERSATIONS)]
    for i in range(NUM_TEMPLATES):
        form = draw_form(random)
        mine = _Template(write_template(form))
        for each in random.sample(asked, _EACH):
            num_tried += 1
            ours = mine.ours(each)
            theirs = mine.theirs(each, ours)
            if ours == theirs:
                continue
            if reason := mine.explain(each, ours, theirs):
                explained[reason] += 1
            else:
                found.append(_difference(f"{where}: number {i}, {form}\n{mine.text}", each, ours, theirs))
                break
    yield Row(where, num_tried, tuple(found), dict(explained))


def snippet_rows(_: Path) -> Iterator[Row]:
    where = "what templates do in Jinja, beside transformers"
    if find_spec("transformers") is None:
        yield Row(where, 0, skipped="the package transformers is not installed")
        return
    found, explained = list[Difference](), Counter[str]()
    for text in SNIPPETS:
        asked = Asked([{"role": "user", "content": " a\n<b>"}, {"role": "assistant", "content": "é"}], ())
        given = "{% set m = messages %}" + text
        try:
            ours = _render(given, messages=asked.messages, add_generation_prompt=True, **_SPECIAL)
        except ModelError as error:
            ours = f"refused: {error}"
        theirs = _theirs(given, asked)
        if ours == theirs:
            continue
        if ours.startswith("refused: ") and theirs.startswith("refused: "):
            explained["refused by both"] += 1
        elif re.search(_WIDE, text) and ours.startswith("refused: "):
            explained["refused by edgespec alone, as they take widths that fill the memory"] += 1
        else:
            found.append(Difference(where, text, repr(ours), repr(theirs)))
    yield Row(where, len(SNIPPETS), tuple(found), dict(explained))


def _draw(random: Random) -> Asked:
    with_tools = random.random() < 0.5
    messages = draw_conversation(random, with_tools=with_tools)
    return Asked(messages, TOOLS if with_tools else (), random.choice(SWITCHES))


def _difference(where: str, asked: Asked, ours: str, theirs: str) -> Difference:
    """With the place of the first difference, and some text around it."""
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    around = slice(max(0, same - _SHOWN), same + _SHOWN)
    return Difference(where, str(asked), repr(ours[around]), repr(theirs[around]))


def _in_parts(messages: Sequence[Mapping[str, Any]], roles: Sequence[str]) -> list[dict[str, Any]]:
    """The messages, with contents as lists of parts for some roles."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}] if each["content"] else []}
        if each["role"] in roles
        else dict(each)
        for each in messages
    ]


class _Template:
    def __init__(self, text: str) -> None:
        self.text = text
        self.render: Render = fit_messages(text, _render, _SPECIAL)
        self.how: ToolTemplate = probe_template(text, self.render, _SPECIAL)

    def ours(self, asked: Asked) -> str:
        """The prompt of edgespec, or its refusal."""
        return self._ours(asked)[0]

    def _ours(self, asked: Asked) -> tuple[str, Asked]:
        """The prompt, and what edgespec gives to the template for it."""
        found, given = "", asked

        def keep(template: str, **names: Any) -> str:
            nonlocal found, given
            tools = next((names[name] for name in ("tools", "xml_tools") if names.get(name)), ())
            given = Asked(names["messages"], tools, asked.switches)
            found = self.render(template, **names)
            return found

        try:
            turns, tools = parse_messages(asked.messages), parse_tools(asked.tools)
            encode_chat(
                self.text, keep, turns, _TOKENIZER, _SPECIAL, dict(asked.switches), tools, lambda: self.how
            )
        except EdgeSpecError as error:
            return f"refused: {error}", given
        return found, given

    def theirs(self, asked: Asked, ours: str) -> str:
        """The prompt of transformers, or that it fails, with contents as the template takes them."""
        forms = [asked]
        if self.render is not _render:
            given = [_in_parts(asked.messages, roles) for roles in _PART_ROLES]
            forms += [Asked(each, asked.tools, asked.switches) for each in given]
        found = [_theirs(self.text, form) for form in forms]
        return ours if ours in found else found[0]

    def explain(self, asked: Asked, ours: str, theirs: str) -> str:
        """The reason why both may differ, or none.

        Where edgespec tells of tools in its own words, the template has to make its prompt of these, and all that
        the conversation says of tools has to be in it.
        """
        if ours.startswith("refused: ") and theirs.startswith("refused: "):
            return "refused by both"
        reason = self._reason(asked, theirs)
        if not reason or self.theirs(self._ours(asked)[1], ours) != ours:
            return ""
        if ours.startswith("refused: "):
            return "refused in words, as the template does not take what edgespec says of tools in its place"
        is_told = all(text in ours or json.dumps(text)[1:-1] in ours for text in _said_of_tools(asked))
        return reason if is_told else ""

    def _reason(self, asked: Asked, theirs: str) -> str:
        """What the template does not do with the conversation, by what transformers makes of it."""
        how, calls = self.how, [each for each in asked.messages if each.get("tool_calls")]
        is_refused = theirs.startswith("refused: ")
        results = [each["content"].strip() for each in asked.messages if each["role"] == "tool"]
        if asked.tools and how.variable is None:
            if find_format(self.text) is None:
                return "with tools whose calls nothing could read: edgespec tells of them"
            if is_refused or "The time" not in theirs:
                return "with tools that the template leaves out: edgespec tells of them"
        elif calls and not how.writes_calls:
            wanted = [call["function"] for each in calls for call in each["tool_calls"]]
            if is_refused or not all(call["name"] in theirs for call in wanted):
                return "with calls that the template leaves out or refuses: edgespec writes them"
            if _read_calls(how, theirs) != [(call["name"], call["arguments"]) for call in wanted]:
                return "with calls that nothing could read: edgespec writes them"
        elif any(each["content"] not in theirs for each in calls) and not how.writes_both:
            return "with text beside calls, which the template leaves out: edgespec writes both"
        elif (
            calls
            and not how.takes_results
            and (is_refused or not all(each and each in theirs for each in results))
        ):
            return "with results that the template leaves out or refuses: edgespec gives them as the user's"
        return ""


def _said_of_tools(asked: Asked) -> Iterator[str]:
    """What a prompt has to have of tools, their calls and their results."""
    for tool in asked.tools:
        yield from (tool["function"]["name"], tool["function"]["description"].split('"')[0])
    for each in asked.messages:
        for call in each.get("tool_calls") or ():
            yield call["function"]["name"]
            yield from (str(value) for value in call["function"]["arguments"].values())
        if each["role"] == "tool":
            yield each["content"].strip()


def _read_calls(how: ToolTemplate, text: str) -> list[tuple[str, object]]:
    parser = CallParser(how.format, parse_tools(TOOLS), holds_arguments=True)
    return [(call.name, json.loads(call.arguments)) for call in join_calls(parser.push(text) + parser.flush())]


def _render(template: str, **names: Any) -> str:
    """Renders in this process. Raises ModelError: The template fails."""
    try:
        return render(template, names)
    except Exception as error:
        raise ModelError(str(error)) from None


def _theirs(template: str, asked: Asked) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [asked.messages],
            tools=list(asked.tools) or None,
            chat_template=template,
            add_generation_prompt=True,
            **_SPECIAL,
            **asked.switches,
        )
    except Exception as error:
        return f"refused: {error}"
    text: str = rendered[0]
    return text


def _tokenizer() -> Tokenizer:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(tokenizer_json("qwen2"), encoding="utf-8")
        return Tokenizer(path)


_TOKENIZER = _tokenizer()
