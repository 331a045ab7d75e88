"""A runtime in a process of its own, which is asked for answers (peers_worker.py)."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, Any

from edgespec.errors import EdgeSpecError
from edgespec.evaluation.peer import PeerReply
from edgespec.text.chat_template import Message

_WORKER = Path(__file__).with_name("peers_worker.py")
# A runtime that takes longer than this to load a model, or to answer, is ended.
_TIMEOUT_S = 900.0
_STDERR_BYTES = 2000


class WorkerProcess:
    """A runtime in one of its ways to decode, in a process that is ended by close().

    Args:
        python: The interpreter that has it.
        draft_path: The file of a drafter model, for the way draft-model.
        eos: Tokens that end an answer, and are no text.
        text_of: The text of tokens, by the tokenizer of the model that is measured.

    Raises:
        EdgeSpecError: It cannot load the file, or ends.
    """

    def __init__(
        self,
        runtime: str,
        way: str,
        path: Path,
        *,
        num_threads: int,
        context_length: int,
        eos: Sequence[int],
        text_of: Callable[[Sequence[int]], str],
        python: str | None = None,
        draft_path: Path | None = None,
    ) -> None:
        self.name, self.way, self.file = runtime, way, path.name
        self._eos, self._text_of = frozenset(eos), text_of
        self._stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python or sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            ready = self._ask(
                runtime=runtime,
                way=way,
                path=str(path.absolute()),
                num_threads=num_threads,
                context_length=context_length,
                eos_token_ids=list(eos),
                draft_path=str(draft_path.absolute()) if draft_path else None,
            )
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self.peak_rss_bytes = int(ready["peak_rss_bytes"])

    def answer(self, messages: Sequence[Message], tokens: Sequence[int], max_tokens: int) -> PeerReply:
        reply = self._ask(tokens=list(tokens), max_tokens=max_tokens)
        self.peak_rss_bytes = int(reply["peak_rss_bytes"])
        made = reply["answer"]
        ids = None if isinstance(made, str) else [int(each) for each in made if each not in self._eos]
        return PeerReply(
            made if ids is None else self._text_of(ids),
            int(reply["num_decoded"]),
            float(reply["decode_s"]),
            float(reply["first_s"]),
            ids,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(OSError):  # a question may be left that the process never read
                if stream:
                    stream.close()

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = Timer(_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise EdgeSpecError(f"{self.name} ended: {self._last_line()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EdgeSpecError(f"{self.name}: {reply['error']}")
        return reply

    def _last_line(self) -> str:
        """The last line that the process wrote to stderr, and its exit code."""
        code = self._process.wait()
        self._stderr.seek(0, 2)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'without a message'} (exit code {code})"
