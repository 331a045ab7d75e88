"""A process that renders chat templates, and is ended if one takes too long or too much memory.

A template comes with a model. template_sandbox.py decides what it may touch; how long it may run and how much
memory it may hold can only be bounded from another process.
"""

import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

from edgespec.errors import ConversationError, ModelError
from edgespec.system.line_process import LineProcess, WorkEnded, ask_bounded, dispose, start_python
from edgespec.system.printable import one_line

_MAX_S = 10.0
_MAX_BYTES = 400 << 20
_BYTES_PER_CHARACTER = 40  # of the request; its escapes and copies take some 20
_MAX_WORDS = 300  # characters of what a template says
_MAX_ROLES = 8  # of messages, that are named
_SANDBOX = Path(__file__).with_name("template_sandbox.py")
_REFUSED = "the chat template of this model does not take the conversation"


class TemplateProcess:
    """Starts with start(), while a model is being loaded, or with the first rendering."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process: LineProcess | None = None

    def start(self) -> LineProcess:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                try:
                    self._process = start_python(str(_SANDBOX))
                except OSError as error:
                    raise ModelError(f"cannot start Python to render the chat template ({error})") from None
                self._end = weakref.finalize(self, dispose, self._process)
            return self._process

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        if self._process is not None:
            self._end()
            self._process = None

    def render(self, template: str, **names: Any) -> str:
        """Render a template with these names, whose values JSON can hold.

        Raises:
            ConversationError: The template refuses the conversation.
            ModelError: The template is broken, does what the sandbox forbids, or takes more than 10 s or some
                400 MB.
        """
        request = json.dumps({"template": template, "names": names}).encode() + b"\n"
        with self._lock:
            try:
                most_bytes = _MAX_BYTES + _BYTES_PER_CHARACTER * len(request)
                answer = json.loads(ask_bounded(self.start(), request, _MAX_S, most_bytes))
            except BaseException as error:  # its late answer would be taken for the next request's
                self.close()
                if isinstance(error, WorkEnded):
                    raise ModelError(f"{_REFUSED}: {error}") from None
                raise
        if "refusal" in answer:
            said, roles = one_line(answer["refusal"], _MAX_WORDS), _roles(names.get("messages", ()))
            raise ConversationError(
                f"the chat template of this model refuses the conversation: {said} (the roles of its messages are "
                f"{roles}); send messages that the template takes"
            )
        if "error" in answer:
            raise ModelError(f"{_REFUSED}: {answer['error']}")
        return str(answer["text"])


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    """The roles of messages in their order, the first of them."""
    shown = [one_line(str(each.get("role")), 20) for each in messages[:_MAX_ROLES]]
    num_more = len(messages) - len(shown)
    return ", ".join([*shown, *([f"and {num_more} more"] if num_more else [])]) or "none"
