"""A text or a conversation as the tokens of one model. Knows nothing of decoding."""

from collections.abc import Mapping, Sequence

from edgespec.errors import ContextOverflow, UsageError
from edgespec.manifest import Manifest
from edgespec.tokenization.chat_template import ROLES, Message, encode_chat
from edgespec.tokenization.template_process import TemplateProcess
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import TokenIds

_LONG = 16  # characters a token, more than nearly any text has

Prompt = str | Sequence[Message | Mapping[str, str]]


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
        self._template = template
        self._renderer = renderer or TemplateProcess()

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def encode(self, prompt: Prompt, system: str | None = None) -> TokenIds:
        """Tokens of a prompt, [num_tokens]. Raises UsageError: it is neither a text nor a list of messages."""
        return self._encode(_messages(prompt, system))

    def encode_fitting(self, prompt: Prompt, system: str | None = None) -> TokenIds:
        """Encode a prompt unless a message is far too long, since 10 MB take 10 s and 2 GB to encode.

        Raises UsageError, as encode does, and ContextOverflow: one message alone exceeds the context.
        """
        messages = _messages(prompt, system)
        for message in messages:
            if len(message.content) > _LONG * self.context_length:
                num_tokens = self.tokenizer.least_tokens(message.content, self.context_length)
                if num_tokens > self.context_length:
                    raise ContextOverflow(
                        num_tokens, self.context_length, self._manifest.context_length, is_all=False
                    )
        return self._encode(messages)

    def count(self, prompt: Prompt, system: str | None = None) -> int:
        """The number of tokens of a prompt; a message far longer than the context is counted in part."""
        try:
            return len(self.encode_fitting(prompt, system))
        except ContextOverflow as error:
            return error.num_tokens

    def _encode(self, messages: Sequence[Message]) -> TokenIds:
        return encode_chat(self._template, self._renderer.render, messages, self.tokenizer, self._special_tokens())

    def _special_tokens(self) -> dict[str, str]:
        names = {"bos_token": self._manifest.bos_token_id}
        if self._manifest.eos_token_ids:
            names["eos_token"] = self._manifest.eos_token_ids[-1]
        pieces = {name: self.tokenizer.piece(token) for name, token in names.items() if token is not None}
        return {name: piece for name, piece in pieces.items() if piece is not None}


def _messages(prompt: Prompt, system: str | None) -> list[Message]:
    if system is not None and not isinstance(system, str):
        raise UsageError(f"system is {system!r}; wanted a text")
    if isinstance(prompt, Mapping) or not isinstance(prompt, (str, Sequence)):
        raise UsageError(f"the prompt has the type {type(prompt).__name__}; wanted a text or a list of messages")
    messages = [Message("user", prompt)] if isinstance(prompt, str) else [_message(each) for each in prompt]
    if unknown := [message.role for message in messages if message.role not in ROLES]:
        raise UsageError(f"a message has the role '{unknown[0]}'; known are {', '.join(ROLES)}")
    if system is not None:
        messages.insert(0, Message("system", system))
    return messages


def _message(each: Message | Mapping[str, str]) -> Message:
    if isinstance(each, Mapping):
        if not {"role", "content"} <= each.keys():
            raise UsageError(f"a message has the keys {sorted(each)}; wanted role and content")
        each = Message(each["role"], each["content"])
    if not isinstance(each, tuple) or len(each) != 2 or not all(isinstance(part, str) for part in each):
        raise UsageError(f"a message is {each!r}; wanted a role and a content, both text")
    return Message(*each)
