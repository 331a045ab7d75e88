"""Try the chat template of a source, so that a broken one is found at the export. Knows nothing of weights."""

from contextlib import closing

from tokenizers import Tokenizer

from edgespec.errors import ConversationError, ModelError
from edgespec.export.vocabulary import Vocabulary
from edgespec.text.template_process import TemplateProcess
from edgespec.tools.tool_template import fit_contents
from edgespec.types import Report

_SAID = "Qzvsaid"  # which no template holds
_SYSTEM, _USER, _ASSISTANT = ({"role": role, "content": _SAID} for role in ("system", "user", "assistant"))
_CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _ASSISTANT, _USER])


def report_template(vocabulary: Vocabulary, tokenizer: Tokenizer, report: Report) -> None:
    """Report what will go wrong in a chat; a template may refuse a conversation, but not fail or lose a text."""
    template = vocabulary.chat_template
    if not template:
        report("the source has no chat template: the model continues texts, and may not answer them")
        return
    tokens = {"bos_token": vocabulary.bos_token_id, "eos_token": next(reversed(vocabulary.eos_token_ids), None)}
    special = {name: tokenizer.id_to_token(token) or "" for name, token in tokens.items() if token is not None}
    with closing(TemplateProcess()) as process:
        render = fit_contents(template, process.render, special)
        for messages in _CONVERSATIONS:
            try:
                text = render(template, messages=messages, add_generation_prompt=True, **special)
            except ConversationError:
                continue
            except ModelError as error:
                report(f"{str(error).rstrip('.')}. Chats with this model will fail; raw prompts work")
                return
            if _SAID not in text:
                report("the chat template leaves out what the user says; raw prompts work")
                return
