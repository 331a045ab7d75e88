"""A text, a conversation or token ids as the tokens of one model. Knows nothing of decoding."""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np

from edgespec.errors import ContextOverflow, UsageError
from edgespec.manifest import Manifest
from edgespec.system.arguments import require_kind
from edgespec.text.chat_template import (
    ROLES,
    CallMessage,
    Message,
    ResultMessage,
    TemplateProcess,
    Turn,
    encode_chat,
    parse_calls,
    require_answerable,
)
from edgespec.text.tokenizer import Tokenizer
from edgespec.tools.tool import Tool, is_too_deep
from edgespec.tools.tool_template import Render, ToolTemplate, fit_messages, probe_template
from edgespec.types import TokenIds

_THINKING = "enable_thinking"  # as the templates of Qwen3, SmolLM3 and others name their switch
# As those of Granite and DeepSeek V3.1 do, in a condition.
_ASKS_THINKING = re.compile(r"\{%-?\s*(?:el)?if\b[^%]*(?<![\w.'\"\[])thinking(?![\w'\"(=.])")
_OWN_NAMES = frozenset(
    {
        *("messages", "tools", "xml_tools", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "raise_exception", "strftime_now", "self", "template"),
    }
)
_THOUGHT = "<think>\n{}\n</think>\n\n"
_TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a message
_LONG = 16  # characters a token, more than nearly any text has

Prompt = str | Sequence[Turn | Mapping[str, Any]] | Sequence[int] | TokenIds
_Parsed = str | list[Turn] | TokenIds  # a raw text, a conversation, or token ids


class PromptEncoder:
    """The tokenizer and the chat template of a model."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        template: str | None = None,
        renderer: TemplateProcess | None = None,
        context_length: int | None = None,
    ) -> None:
        """context_length: Tokens that fit in memory; the renderer of the template is closed with this encoder."""
        self.tokenizer = tokenizer
        self.context_length = context_length or manifest.context_length
        self._manifest = manifest
        self.template = template  # None where the model only continues texts
        self._renderer = renderer or TemplateProcess()

    def close(self) -> None:
        self._renderer.close()

    @cached_property
    def tool_template(self) -> ToolTemplate:
        """How the chat template takes tools, which is tried out once."""
        return probe_template(self.template, self._render, self._special_tokens)

    @cached_property
    def _render(self) -> Render:
        return fit_messages(self.template, self._renderer.render, self._special_tokens)

    @property
    def can_switch_thinking(self) -> bool:
        """True if the chat template asks if the model is to reason first."""
        return self._thinking_switch is not None

    @cached_property
    def _thinking_switch(self) -> str | None:
        return find_thinking_switch(self.template or "")

    def spells_in_template(self, text: str) -> bool:
        return self.template is not None and text in self.template

    def encode(
        self,
        prompt: Prompt,
        system: str | None = None,
        *,
        raw: bool = False,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        is_bounded: bool = False,
    ) -> TokenIds:
        """Tokens of a prompt, [num_tokens]; token ids stay as they are.

        Args:
            raw: The prompt is a text that the model reads as it is, without the chat template. Special tokens that
                it spells are special tokens. An empty one is the token that begins texts, where the model has one.
            tools: What the model may call.
            thinking: Whether the model is to reason first; None leaves that to its chat template.
            template_options: Further names that the chat template reads.
            is_bounded: Refuse texts that exceed the context, before they are encoded: 10 MB take 10 s.

        Raises:
            ContextOverflow: The prompt is bounded, and its texts exceed the context.
            ConversationError: The chat template refuses the messages.
            UsageError: It is neither a text nor a list of messages nor token ids of the model; or thinking is
                given, and the chat template has no such switch.
        """
        parsed = self._parse(prompt, system, raw=raw)
        if template_options is not None:
            _require_template_options(template_options)
        if is_bounded:
            options = [json.dumps(template_options)] if template_options else []
            tools_stated = (str(tool.as_dict()) for tool in tools)
            self._require_short("".join(chain(_texts(parsed), tools_stated, options)))
        if thinking is not None and not (isinstance(thinking, bool) and self.can_switch_thinking):
            raise UsageError(
                f"thinking is {thinking!r}, but the chat template of {self._manifest.name} has no switch for it; "
                "leave it out"
            )
        if tools and not isinstance(parsed, list):
            raise UsageError(
                "tools have no place in a raw prompt or in token ids; give messages, or leave tools out"
            )
        if isinstance(parsed, np.ndarray):
            return parsed
        if isinstance(parsed, str):
            tokens = self.tokenizer.encode(parsed, special=True)
            bos = self._manifest.bos_token_id
            return tokens if len(tokens) or bos is None else np.array([bos], np.int32)
        return encode_chat(
            self.template,
            self._render,
            parsed,
            self.tokenizer,
            self._special_tokens,
            {
                **(template_options or {}),
                **({} if thinking is None else {self._thinking_switch or _THINKING: thinking}),
            },
            tools,
            lambda: self.tool_template,
        )

    def encode_prefill(self, prefill: str | Sequence[int] | TokenIds) -> TokenIds:
        """Tokens of the beginning of an answer, [num_tokens]. Raises as a bounded encode does."""
        if not isinstance(prefill, str):
            if not isinstance(prefill, (Sequence, np.ndarray)) or isinstance(prefill, bytes):
                raise UsageError(f"prefill is {prefill!r}; wanted a text or token ids")
            return parse_ids(prefill, self._manifest.vocab_size, "prefill")
        self._require_short(prefill)
        return self.tokenizer.encode(prefill, is_behind_text=True)

    def _parse(self, prompt: Prompt, system: str | None, *, raw: bool) -> _Parsed:
        require_kind("raw", raw, bool, "True or False")
        if not raw and not is_ids(prompt):
            return _messages(prompt, system)
        if system is not None:
            raise UsageError(
                "system has no place in a raw prompt or in token ids; put its text into the prompt itself"
            )
        if is_ids(prompt):
            return parse_ids(prompt, self._manifest.vocab_size, "the prompt")
        if not isinstance(prompt, str):
            raise UsageError(f"the raw prompt has the type {type(prompt).__name__}; wanted a text or token ids")
        return prompt

    def _require_short(self, text: str) -> None:
        if len(text) > _LONG * self.context_length:
            num_tokens = self.tokenizer.least_tokens(text, self.context_length)
            if num_tokens > self.context_length:
                raise ContextOverflow(num_tokens, self.context_length, self._manifest.context_length, is_all=False)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        names = {"bos_token": self._manifest.bos_token_id}
        if self._manifest.eos_token_ids:
            names["eos_token"] = self._manifest.eos_token_ids[-1]
        pieces = {name: self.tokenizer.piece(token) for name, token in names.items() if token is not None}
        return {name: piece for name, piece in pieces.items() if piece is not None}


def find_thinking_switch(template: str) -> str | None:
    """The name by which a chat template asks if the model is to reason first."""
    if _THINKING in template:
        return _THINKING
    return "thinking" if _ASKS_THINKING.search(template) else None


def _require_template_options(stated: Any) -> None:
    """Raises UsageError: They are no JSON with names, or have a name that a template is given anyway."""
    if not _is_json(stated):
        raise UsageError(f"template_options is {reprlib.repr(stated)}; wanted names with values of JSON")
    if taken := sorted(_OWN_NAMES & stated.keys()):
        raise UsageError(
            f"template_options has {taken[0]!r}, which edgespec gives to the chat template itself; leave it out"
        )


def _is_json(stated: Any) -> bool:
    """True of an object of JSON that is not too deep."""
    if not isinstance(stated, Mapping) or is_too_deep(stated) or not all(isinstance(name, str) for name in stated):
        return False
    with suppress(TypeError, ValueError):
        json.dumps(stated)
        return True
    return False


def _texts(parsed: _Parsed) -> list[str]:
    if isinstance(parsed, np.ndarray):
        return []
    if isinstance(parsed, str):
        return [parsed]
    calls = [call.arguments for message in parsed if isinstance(message, CallMessage) for call in message.calls]
    reasoning = [message.reasoning for message in parsed if not isinstance(message, ResultMessage)]
    return [*(message.content for message in parsed), *reasoning, *calls]


def _messages(prompt: Prompt, system: str | None) -> list[Turn]:
    require_kind("system", system, (str, NoneType), "a text")
    if not isinstance(prompt, (str, Mapping)) and not is_conversation(prompt):
        raise UsageError(f"the prompt is {prompt!r:.60}; wanted a text, a list of messages or token ids")
    turns = parse_messages([Message("user", prompt)] if isinstance(prompt, str) else prompt)
    return [Message("system", system), *turns] if system else turns


def parse_messages(messages: Iterable[object]) -> list[Turn]:
    """The turns of a conversation, from messages and from dicts in the form of OpenAI's API.

    Raises UsageError: One is no message, or the result of a call stands before it; or they are a single message.
    """
    if isinstance(messages, (Mapping, Message, CallMessage, ResultMessage)):
        raise UsageError(f"the prompt is one message; put it in a list: [{messages!r:.60}]")
    turns = [_message(each) for each in messages]
    require_answerable(turns)
    return turns


def split_begun(turns: list[Turn], what: str = "the conversation") -> tuple[list[Turn], str]:
    """A conversation, and the beginning of its answer: the text of a last message of the assistant, taken away.

    Raises UsageError: Nothing is left to answer.
    """
    begun, last = "", turns[-1] if turns else None
    if isinstance(last, Message) and last.role == "assistant":
        begun = _THOUGHT.format(last.reasoning) + last.content if last.reasoning else last.content
        turns = turns[:-1]
    if not turns:
        raise UsageError(f"{what} has nothing to answer; give a message of the user")
    return turns, begun


def _message(each: object) -> Turn:
    if isinstance(each, (CallMessage, ResultMessage)):
        return each
    if isinstance(given := each, (int, float, np.generic)):
        raise UsageError(f"the prompt has {each!r}; wanted token ids, which are whole numbers, or messages")
    if isinstance(each, Mapping):
        if (role := each.get("role")) == "tool" or each.get("tool_calls"):
            return _tool_message(role, each)
        if not {"role", "content"} <= each.keys():
            raise UsageError(f"a message has the keys {sorted(each)}; wanted role and content")
        _require_no_media(each["content"])
        each = Message(each["role"], _joined(each["content"]), each.get("reasoning_content") or "")
    if not isinstance(each, tuple) or len(each) not in (2, 3) or not all(isinstance(part, str) for part in each):
        raise UsageError(f"a message is {given!r:.200}; wanted a role and a content, which is text")
    if each[0] not in ROLES:
        raise UsageError(f"a message has the role '{each[0]}'; known are {', '.join((*ROLES, 'tool'))}")
    return Message(*each)


def _require_no_media(content: object) -> None:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and (kind := str(part.get("type", "text"))[:40]) not in _TEXT_PARTS:
            raise UsageError(f"a message has a part of the type {kind!r}; wanted text alone: images are not read")


def _joined(content: Any) -> Any:
    """The text of a content that consists of parts of text, as OpenAI's API has them; any other content itself."""
    if not isinstance(content, list) or not content:
        return content
    texts: list[Any] = [each.get("text") if isinstance(each, Mapping) else None for each in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _tool_message(role: object, stated: Mapping[str, Any]) -> Turn:
    """A message with calls, or one with what a tool gave back."""
    content = _joined(stated.get("content") or "")
    if not isinstance(content, str):
        raise UsageError(f"a message has the content {content!r}; wanted a text")
    if role == "tool":
        return ResultMessage(content, str(stated.get("tool_call_id") or ""), str(stated.get("name") or ""))
    if role != "assistant":
        raise UsageError(f"a message of the role {role!r} has tool_calls; only those of the assistant have them")
    reasoning = stated.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise UsageError(f"a message has the reasoning_content {reasoning!r}; wanted a text")
    return CallMessage(content, parse_calls(stated["tool_calls"]), reasoning)


def is_conversation(prompt: Any) -> bool:
    """True if a prompt is meant as messages."""
    is_sequence = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray, memoryview))
    return is_sequence and not is_ids(prompt)


def is_ids(found: Any) -> bool:
    """True if something is meant as token ids: an array, or a sequence that begins with a whole number."""
    if isinstance(found, np.ndarray):
        return True
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)) or not found:
        return False
    return isinstance(found[0], (int, np.integer)) and not isinstance(found[0], bool)


def parse_ids(found: Any, vocab_size: int, what: str) -> TokenIds:
    """Token ids of a vocabulary, [num_tokens].

    what: What they are to the caller, for the message, such as "the prompt".

    Raises UsageError: They are no row of whole numbers, or one of them is no token of the vocabulary.
    """
    wanted = f"wanted token ids, whole numbers from 0 to {vocab_size - 1}"
    if isinstance(found, (list, tuple)) and not found:
        return np.zeros(0, np.int32)
    try:
        ids = np.asarray(found if is_ids(found) else None)
    except ValueError:  # it holds lists of several lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(f"{what} is {reprlib.repr(found)}; {wanted}")
    if not len(ids):
        return np.zeros(0, np.int32)
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise UsageError(f"{what} has the token {extreme}, which the model lacks; {wanted}")
    return ids.astype(np.int32)
