"""Other runtimes, or other ways to decode, that answer the prompts of a benchmark as well."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from edgespec import EdgeSpecError, Engine, Message, Report, SamplingParams
from edgespec.evaluation.document import OWN_NAME, AnswerRecord, JudgedTokens, PeerAnswer, PeerInfo
from edgespec.evaluation.exactness import judge_tokens
from edgespec.evaluation.results import peer_key
from edgespec.evaluation.timed_answer import TimedAnswer, clear_cache, settle, time_answer
from edgespec.system.system_info import peak_rss_bytes

Rates = Mapping[tuple[str, int], tuple[float, float]]  # acceptance rates, as Speculation.rates holds them


class PeerReply(NamedTuple):
    """An answer of another runtime. Its decoding leaves out the first token, which took first_s.

    record: What this program knows of an answer of its own.
    """

    text: str
    num_decoded: int
    decode_s: float
    first_s: float
    tokens: Sequence[int] | None = None  # None from a runtime that gives no tokens
    record: AnswerRecord | None = None


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
    """This program in another way to decode, with a session of its own.

    rates: Acceptance rates with which each round begins.
    """

    file = ""

    def __init__(
        self, engine: Engine, way: str, version: str, sampling: SamplingParams, rates: Rates = MappingProxyType({})
    ) -> None:
        self.name, self.way, self.version = OWN_NAME, way, version
        self.engine, self._sampling, self._rates = engine, sampling, dict(rates)
        engine.speculation.save = lambda learned: None

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory of this process, which runs other sessions too."""
        return peak_rss_bytes()

    def answer(self, messages: Sequence[Message], tokens: Sequence[int], max_tokens: int) -> PeerReply:
        timed = time_answer(self.engine, messages, max_tokens, self._sampling)
        made = timed.completion
        return PeerReply(
            made.text, timed.num_decoded, timed.decode_s, timed.first_s, made.token_ids, timed.record()
        )

    def begin_round(self) -> None:
        """Forget what answers of earlier rounds have taught."""
        self.engine.speculation.rates = dict(self._rates)

    def begin_prompt(self) -> None:
        clear_cache(self.engine)


class Panel:
    """Asks the peers in turn, and leaves out those that have failed; own are those of this program."""

    def __init__(self, peers: Sequence[Peer], plain: Engine, report: Report) -> None:
        self._peers, self._queue = list(peers), deque(peers)
        self.own = [peer for peer in peers if isinstance(peer, EnginePeer)]
        self._plain, self._report = plain, report
        self._failures: dict[str, str] = {}
        self._judged: set[str] = set()  # categories

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
        """Records of the answers; of one in each category with how many of its tokens are plausible."""
        is_judged = bool(replies) and category not in self._judged
        self._judged.add(category)
        found: dict[str, PeerAnswer] = {}
        for key, reply in replies.items():
            record: AnswerRecord = reply.record or {
                "decoded": max(0, reply.num_decoded),
                "decode_s": max(0.0, reply.decode_s),
                "first_token_s": max(0.0, reply.first_s),
            }
            is_equal = reply.text.strip() == plain.completion.text.strip()
            judged: JudgedTokens = {}
            if is_judged:
                tokens = self._plain.tokenize(reply.text) if reply.tokens is None else reply.tokens
                few = judge_tokens(self._plain.target, self._plain.encode(messages), tokens)
                judged = {"judged": few.judged, "plausible": few.plausible}
            found[key] = {**record, "is_equal": is_equal, **judged}
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
