"""A conversation that runs in a thread of its own, for programs whose main thread draws a window.

Events come out of a queue, so that only the main thread touches its widgets. This module knows nothing of windows.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Literal, NamedTuple

from edgespec import Conversation, EdgeSpecError, Engine, Stats

MAX_TOKENS = 800
Kind = Literal["stage", "ready", "text", "done", "failed"]


class Event(NamedTuple):
    """Something that happened in the thread.

    kind is one of:
        stage: text says what the thread is doing.
        ready: the model is loaded; text is its name.
        text: text is a piece of the answer.
        done: the answer has ended; text is the finish reason, and stats are its figures.
        failed: text says what went wrong. If an answer was being made, it is over.
    """

    kind: Kind
    text: str
    stats: Stats | None = None


class _Closed(Exception):
    pass


class BackgroundChat:
    """Answers one question at a time: call ask() again after "done" or "failed"."""

    def __init__(self, load_engine: Callable[[Callable[[str], None]], Engine]) -> None:
        """load_engine runs in the thread; its argument is a function that reports what is being done."""
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._load_engine = load_engine
        self._questions: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread
        self._lock = Lock()  # protects the next three
        self._cancel: Callable[[], None] | None = None
        self._is_stopped = False
        self._is_closed = False
        self._thread = Thread(target=self._run, name="background chat")
        self._thread.start()

    def ask(self, question: str) -> None:
        with self._lock:
            self._is_stopped = False
        self._questions.put(question)

    def stop(self) -> None:
        """End the answer at once; what has been written stays in the conversation."""
        with self._lock:
            self._is_stopped = True
            if self._cancel is not None:
                self._cancel()

    def close(self) -> None:
        """End the answer, or the loading at its next stage, and wait for the thread to end."""
        self._is_closed = True
        self._questions.put(None)
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._load_engine(self._report_stage) as engine:
                self._report("ready", engine.manifest.name)
                conversation = engine.chat(overflow="drop-oldest", max_tokens=MAX_TOKENS, ends_loops=True)
                while (question := self._questions.get()) is not None and not self._is_closed:
                    self._answer(conversation, question)
        except _Closed:
            pass
        except (EdgeSpecError, OSError) as error:
            self._report("failed", str(error))

    def _report_stage(self, line: str) -> None:
        if self._is_closed:
            raise _Closed
        self._report("stage", line)

    def _answer(self, conversation: Conversation, question: str) -> None:
        try:
            with conversation.stream(question) as reply:
                self._set_cancel(reply.cancel)
                if reply.dropped:
                    self._report("stage", f"{len(reply.dropped)} earlier messages no longer fit the context")
                for chunk in reply:
                    self._report("text", chunk.text)
            self._report("done", chunk.finish_reason or "", chunk.stats)
        except EdgeSpecError as error:
            self._report("failed", str(error))
        finally:
            self._set_cancel(None)

    def _set_cancel(self, cancel: Callable[[], None] | None) -> None:
        with self._lock:
            self._cancel = cancel
            if cancel is not None and self._is_stopped:  # stop() was called before the answer began
                cancel()

    def _report(self, kind: Kind, text: str, stats: Stats | None = None) -> None:
        self.events.put(Event(kind, text, stats))
