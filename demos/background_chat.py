"""A conversation that a thread of its own answers, for programs whose main thread draws a window.

What happens comes out of a queue, so that the window alone touches its widgets. Knows nothing of windows.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Literal, NamedTuple

from edgespec import Conversation, EdgeSpecError, Engine, Stats

MAX_TOKENS = 800


class Event(NamedTuple):
    """What happened.

    stage: text is a line about what is being done. ready: the model is loaded; text is its name.
    text: a piece of the answer. done: the answer ended, with its stats; text is why.
    failed: text is what went wrong; an answer is over then.
    """

    kind: Literal["stage", "ready", "text", "done", "failed"]
    text: str
    stats: Stats | None = None


class _Closed(Exception):
    pass


class BackgroundChat:
    """One question at a time: ask() again after "done" or "failed"."""

    def __init__(self, load_engine: Callable[[Callable[[str], None]], Engine]) -> None:
        """load_engine is given where to report to, and runs in the thread."""
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._load_engine = load_engine
        self._questions: SimpleQueue[str | None] = SimpleQueue()  # None: no more
        self._lock = Lock()  # holds the three below together
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
        """End the answer at once; what there is of it stays in the conversation."""
        with self._lock:
            self._is_stopped = True
            if self._cancel is not None:
                self._cancel()

    def close(self) -> None:
        """End the answer, or the loading at its next stage, and wait for the thread."""
        self._is_closed = True
        self._questions.put(None)
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._load_engine(self._stage) as engine:
                self._tell("ready", engine.manifest.name)
                talk = engine.chat(overflow="drop-oldest", max_tokens=MAX_TOKENS)
                while (question := self._questions.get()) is not None and not self._is_closed:
                    self._reply(talk, question)
        except _Closed:
            pass
        except (EdgeSpecError, OSError) as error:
            self._tell("failed", str(error))

    def _stage(self, line: str) -> None:
        if self._is_closed:
            raise _Closed
        self._tell("stage", line)

    def _reply(self, talk: Conversation, question: str) -> None:
        try:
            with talk.stream(question) as reply:
                self._let_stop(reply.cancel)
                if reply.dropped:
                    self._tell("stage", f"{len(reply.dropped)} earlier messages no longer fit the context")
                for chunk in reply:
                    self._tell("text", chunk.text)
            self._tell("done", chunk.finish_reason or "", chunk.stats)
        except EdgeSpecError as error:
            self._tell("failed", str(error))
        finally:
            self._let_stop(None)

    def _let_stop(self, cancel: Callable[[], None] | None) -> None:
        with self._lock:
            self._cancel = cancel
            if cancel is not None and self._is_stopped:
                cancel()

    def _tell(
        self, kind: Literal["stage", "ready", "text", "done", "failed"], text: str, stats: Stats | None = None
    ) -> None:
        self.events.put(Event(kind, text, stats))
