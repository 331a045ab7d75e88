"""Other runtimes, or other ways to decode, that answer the prompts of a benchmark as well."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError
from edgespec.evaluation.document import PeerAnswer, PeerInfo
from edgespec.evaluation.results import peer_key
from edgespec.evaluation.texts import judge_tokens
from edgespec.evaluation.timed_answer import TimedAnswer, settle, time_answer
from edgespec.system.system_info import peak_rss_bytes
from edgespec.tokenization.chat_template import Message
from edgespec.types import Report


class PeerReply(NamedTuple):
    """An answer of another runtime. Its decoding leaves out the first token, which took first_s."""

    text: str
    num_decoded: int
    decode_s: float
    first_s: float
    tokens: Sequence[int] | None = None  # None from a runtime that gives no tokens


class Peer(Protocol):
    """Another runtime that answers the prompts of a benchmark, between the answers of edgespec."""

    name: str
    way: str
    version: str
    file: str

    @property
    def peak_rss_bytes(self) -> int: ...

    def answer(self, messages: Sequence[Message], tokens: Sequence[int], max_tokens: int) -> PeerReply:
        """Answer greedily; tokens are those of messages. Raises EdgeSpecError: It failed; it is asked no more."""


class EnginePeer:
    """This program in another way to decode, with a session of its own."""

    file = ""

    def __init__(self, engine: Engine, way: str, version: str, sampling: SamplingParams) -> None:
        self.name, self.way, self.version = "edgespec", way, version
        self._engine, self._sampling = engine, sampling
        engine.speculation.save = lambda learned: None

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory of this process, which runs other sessions too."""
        return peak_rss_bytes()

    def answer(self, messages: Sequence[Message], tokens: Sequence[int], max_tokens: int) -> PeerReply:
        timed = time_answer(self._engine, messages, max_tokens, self._sampling)
        made = timed.completion
        return PeerReply(made.text, timed.num_decoded, timed.decode_s, timed.first_s, made.token_ids)

    def forget(self) -> None:
        self._engine.speculation.rates = {}


class Panel:
    """Asks the peers in turn, and leaves out those that have failed."""

    def __init__(self, peers: Sequence[Peer], plain: Engine, report: Report) -> None:
        self._peers, self._queue = list(peers), deque(peers)
        self._plain, self._report = plain, report
        self._failures: dict[str, str] = {}
        self._judged: set[str] = set()  # categories

    def begin_round(self) -> None:
        """Let peers that learn from answers forget what they learned."""
        for peer in self._peers:
            if isinstance(peer, EnginePeer):
                peer.forget()

    def ask(self, messages: Sequence[Message], max_tokens: int) -> dict[str, PeerReply]:
        """The answers of all peers, by peer_key."""
        replies: dict[str, PeerReply] = {}
        if not self._peers:
            return replies
        tokens = [int(token) for token in self._plain.encode(messages)]
        for peer in self._queue:
            key = peer_key(peer.name, peer.way)
            if key in self._failures:
                continue
            settle()
            try:
                replies[key] = peer.answer(messages, tokens, max_tokens)
            except EdgeSpecError as error:
                self._failures[key] = str(error)
                self._report(f"{key} is left out from here on: {error}")
        self._queue.rotate(-1)  # another one is first the next time
        return replies

    def judge(
        self, category: str, messages: Sequence[Message], replies: Mapping[str, PeerReply], plain: TimedAnswer
    ) -> dict[str, PeerAnswer]:
        """What the answers took; of one answer in each category also whether its tokens are plausible."""
        is_judged = bool(replies) and category not in self._judged
        self._judged.add(category)
        found: dict[str, PeerAnswer] = {}
        for key, reply in replies.items():
            found[key] = {
                "decoded": max(0, reply.num_decoded),
                "decode_s": max(0.0, reply.decode_s),
                "first_token_s": max(0.0, reply.first_s),
                "is_equal": reply.text.strip() == plain.completion.text.strip(),
            }
            if is_judged:
                tokens = self._plain.tokenize(reply.text) if reply.tokens is None else reply.tokens
                judged = judge_tokens(self._plain.target, self._plain.encode(messages), tokens)
                found[key] |= {"judged": judged.judged, "plausible": judged.plausible}
        return found

    def infos(self) -> list[PeerInfo]:
        return [
            {
                "name": peer.name,
                "way": peer.way,
                "version": peer.version,
                "file": peer.file,
                "peak_rss_bytes": peer.peak_rss_bytes,
                "failure": self._failures.get(peer_key(peer.name, peer.way)),
            }
            for peer in self._peers
        ]
