"""Try the chat template of a source, so that a broken one is found at the export. Knows nothing of weights."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from edgespec.errors import ConversationError, ModelError
from edgespec.export.vocabulary import Vocabulary
from edgespec.text.chat_template import CallMessage, Message, ResultMessage, TemplateProcess, Turn, names_for
from edgespec.text.prompt_encoder import find_thinking_switch
from edgespec.tools.tool import Tool, ToolCall
from edgespec.tools.tool_template import Render, ToolTemplate, fit_messages, probe_template
from edgespec.types import Report

# Texts that no template holds.
_USER, _SYSTEM = Message("user", "Qzvuser"), Message("system", "Qzvsystem")
_CALLED, _GAVE, _TOOL = "Qzvcalled", "Qzvgave", "qzv_weather"
_TOOLS = (
    Tool(
        name=_TOOL,
        description="The weather of a place",
        parameters={"type": "object", "properties": {"place": {"type": "string", "description": "A town"}}},
    ),
)
_CALL = CallMessage("", (ToolCall(id="qzvcallid", name=_TOOL, arguments=json.dumps({"place": _CALLED})),))
_HISTORY = [_USER, Message("assistant", "Qzvassistant"), _USER]


class _Trial(NamedTuple):
    """A conversation, and the texts of it that the prompt has to have.

    what: What fails if it does.
    may_refuse: The template may say that it does not take it.
    """

    what: str
    turns: Sequence[Turn]
    wanted: dict[str, str]
    tools: tuple[Tool, ...] = ()
    switches: dict[str, Any] = {}  # noqa: RUF012  read only
    may_refuse: bool = True


def report_template(vocabulary: Vocabulary, tokenizer: Tokenizer, report: Report) -> None:
    """Report what will go wrong in a chat; a template may refuse a conversation, but not fail or lose a text."""
    template = vocabulary.chat_template
    if not template:
        report("the source has no chat template: the model only continues texts, and may not answer them")
        return
    tokens = {"bos_token": vocabulary.bos_token_id, "eos_token": next(reversed(vocabulary.eos_token_ids), None)}
    special = {name: tokenizer.id_to_token(token) or "" for name, token in tokens.items() if token is not None}
    with closing(TemplateProcess()) as process:
        render = fit_messages(template, process.render, special)
        how = probe_template(template, render, special)
        for trial in _trials(template):
            if said := _find_fault(template, render, how, special, trial):
                report(said)
                return
    if how.variable is None and re.search(r"\btools\b", template):
        report(
            "the chat template fails with tools, or has calls in a form that is not known: a system message "
            "tells the model of them instead"
        )


def _trials(template: str) -> Iterator[_Trial]:
    user = {_USER.content: "what the user says"}
    yield _Trial("Chats", [_USER], user)
    yield _Trial("Chats with a system message", [_SYSTEM, _USER], user | {_SYSTEM.content: "the system message"})
    yield _Trial("Chats of several turns", _HISTORY, user | {"Qzvassistant": "what the assistant said"})
    if switch := find_thinking_switch(template):
        for is_on in (True, False):
            what = f"Chats with reasoning {'on' if is_on else 'off'}"
            yield _Trial(what, _HISTORY, user, switches={switch: is_on})
    yield _Trial("Tools", [_USER], user | {_TOOL: "the tools"}, _TOOLS, may_refuse=False)
    results = user | {_CALLED: "the calls of tools", _GAVE: "the results of tools"}
    yield _Trial("Tools", [_USER, _CALL, ResultMessage(_GAVE, "qzvcallid")], results, _TOOLS, may_refuse=False)


def _find_fault(
    template: str, render: Render, how: ToolTemplate, special: dict[str, str], trial: _Trial
) -> str | None:
    """A line on what goes wrong with a conversation, or none."""
    works = "raw prompts work" if trial.what == "Chats" else "other chats work"
    names = names_for(how, trial.turns, trial.tools, str)
    try:
        text = render(template, add_generation_prompt=True, **names, **special, **trial.switches)
    except ConversationError as refusal:
        return None if trial.may_refuse else f"{refusal}. {trial.what} will not work; {works}"
    except ModelError as error:
        return f"{str(error).rstrip('.')}. {trial.what} with this model will fail; {works}"
    lost = next((what for wanted, what in trial.wanted.items() if wanted not in text), None)
    return f"the chat template leaves out {lost}; {works}" if lost else None
