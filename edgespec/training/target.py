"""Answers of the target to prompts, and its hidden states for texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import count, islice, takewhile
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec import ContextOverflow, Engine, SamplingParams, TokenIds, open_with_states
from edgespec.system.console import show_progress
from edgespec.system.context_managers import contextmanager
from edgespec.training.prompts import Asked, Dialogue, Followed, PromptWriter, Result, Said, Turns
from edgespec.training.stored_texts import TextsFile

_TEMPERATURE, _TOP_P = 0.8, 0.95  # of the second answer to a prompt
FIRST_OWN = 1 << 30  # of the numbers of texts that the target wrote itself beside stored ones
_SAMPLED = 3  # of ten answers to prompts that the target wrote itself


class TargetWriter(Protocol):
    """A target that writes: an engine, or torch on a GPU."""

    def encode(self, prompt: str | Turns) -> Sequence[int] | TokenIds:
        """The tokens of a prompt; raises ContextOverflow: They are more than it reads."""

    def follow(self, wanted: Iterator[tuple[int, Dialogue[Result]]]) -> Followed[Result]:
        """Run dialogues, several at once, and give the number and the result of each as it ends."""


class EngineWriter:
    """Runs as many dialogues at once as the engine can."""

    def __init__(self, engine: Engine) -> None:
        self.encode = engine.encode
        self._engine = engine

    def follow(self, wanted: Iterator[tuple[int, Dialogue[Result]]]) -> Followed[Result]:
        num_places, over = self._engine.max_parallel, Event()
        with ThreadPoolExecutor(num_places) as pool:
            running: dict[Future[Result], int] = {}
            try:
                while True:
                    for number, dialogue in islice(wanted, num_places - len(running)):
                        running[pool.submit(self._run, dialogue, over)] = number
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                over.set()

    def _run(self, dialogue: Dialogue[Result], over: Event) -> Result:
        try:
            asked = next(dialogue)
            while True:
                try:
                    said = self._answer(asked, over)
                except ContextOverflow as error:
                    asked = dialogue.throw(error)
                else:
                    asked = dialogue.send(said)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _answer(self, asked: Asked, over: Event) -> Said:
        made, parts, reason = list[int](), list[str](), None
        tokens, sampling, longest = asked.tokens, asked.sampling, asked.longest
        with self._engine.stream(tokens, sampling=sampling, max_tokens=longest) as chunks:
            for chunk in chunks:
                if over.is_set():
                    break
                made += chunk.token_ids
                parts.append(chunk.text)
                reason = chunk.finish_reason
        return Said(tuple(made), "".join(parts), reason == "stop")


@contextmanager
def open_engine_writer(open_engine: Callable[[], Engine]) -> Iterator[EngineWriter]:
    with open_engine() as engine:
        yield EngineWriter(engine)


def write_answers(
    writer: TargetWriter,
    prompts: Sequence[str],
    texts: TextsFile,
    *,
    longest: int,
    limit_s: float,
    most_tokens: int,
    own_share: float = 0.0,
    num_stored: int = 0,
    is_held_out: bool = False,
) -> int:
    """Let the target answer prompts that have no answer yet, first greedily, then all again at a temperature.

    As many are answered at once as the writer can. Ends after limit_s seconds, or with most_tokens tokens of
    texts; what is written stays after an interruption.

    Args:
        longest: The most tokens of an answer.
        own_share: Of the answers, those to prompts that the target writes itself. These go on behind the others;
            beside stored texts they end with their share.
        num_stored: Texts that are there in the place of answers to prompts.
        is_held_out: The prompts are answered once, greedily, and their texts have numbers below 0.

    Returns:
        How many prompts were left out, since the context has no room for them and an answer.
    """
    began, before = monotonic(), texts.num_answer_tokens
    num_given = FIRST_OWN if num_stored else 2 * len(prompts)
    asked = {text.prompt for text in texts.texts}
    dialogues = _Dialogues(writer, prompts, longest, num_given, asked)
    wanted = range(-len(prompts), 0) if is_held_out else range(2 * len(prompts))
    given = (each for each in wanted if each not in texts.numbers)
    own = (each for each in count(num_given) if each not in texts.numbers)
    num_own = sum(each >= num_given for each in texts.numbers) if num_stored else 0
    numbers = _mixed(given, own, own_share if dialogues.prompter.can_write else 0.0, num_own, num_stored)
    in_time = takewhile(lambda _: monotonic() - began < limit_s and texts.num_tokens <= most_tokens, numbers)
    with closing(writer.follow((number, dialogues.answer(number)) for number in in_time)) as results:
        for number, text in results:
            if text is not None:
                texts.add(number, *text)
            made = texts.num_answer_tokens
            rate = (made - before) / max(1e-3, monotonic() - began)
            show_progress(f"the target answers: {len(texts.texts)} texts, {made} tokens of answers, {rate:.0f}/s")
    show_progress("")
    return len(dialogues.too_long)


class _Dialogues:
    """The dialogues that give texts, by the numbers of these.

    num_given: What has a greater number the target wrote itself; below it stand the prompts, in rounds.
    asked: The tokens of prompts that were asked, as bytes; the target's own are not asked again.
    """

    def __init__(
        self, writer: TargetWriter, prompts: Sequence[str], longest: int, num_given: int, asked: set[bytes]
    ) -> None:
        self._writer, self._prompts, self._longest = writer, prompts, longest
        self._num_given, self._asked = num_given, asked
        self.prompter = PromptWriter(writer.encode)
        self.too_long: set[int] = set()  # prompts, by their number in a round

    def answer(self, number: int) -> Dialogue[tuple[TokenIds, tuple[int, ...]] | None]:
        """A prompt and its answer, as tokens; None where there is no prompt, or no room for both."""
        is_own, in_round = number >= self._num_given, number % max(1, len(self._prompts))
        try:
            prompt = (
                (yield from self.prompter.write(number - self._num_given)) if is_own else self._prompts[in_round]
            )
            tokens = np.array(self._writer.encode(prompt) if prompt else (), np.int32)
            if not prompt or (is_own and tokens.tobytes() in self._asked):
                return None
            self._asked.add(tokens.tobytes())
            said = yield Asked(tokens, self._longest, self._sampling(number))
        except ContextOverflow:  # of a user's own corpus; the other prompts count
            if not is_own:
                self.too_long.add(in_round)
            return None
        return tokens, said.tokens

    def _sampling(self, number: int) -> SamplingParams:
        own = number - self._num_given
        if own % 10 < _SAMPLED if own >= 0 else number >= len(self._prompts):
            return SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, seed=number)
        return SamplingParams()


def _mixed(given: Iterable[int], own: Iterator[int], share: float, num_own: int, num_stored: int) -> Iterator[int]:
    """The numbers of texts to write: a share of own ones among the given ones or the stored ones."""
    given, num_other = iter(given), num_stored
    while True:
        is_own = num_own + 1 <= share * (num_own + num_other + 1)
        number = None if is_own else next(given, None)
        if number is None and (not share or (num_stored and not is_own)):
            return
        num_own, num_other = num_own + (number is None), num_other + (number is not None)
        yield next(own) if number is None else number


class StatesReader:
    """Runs texts through the target and gives the hidden states after some of its layers."""

    def __init__(self, folder: Path, layers: tuple[int, ...]) -> None:
        """folder: Of a target that was exported with the hidden states of these layers."""
        self._layers = layers
        # As chats run it, so that its passes take what theirs do.
        self.decoder = open_with_states(folder, layers, deterministic=True)

    def read(self, texts: Sequence[TokenIds]) -> list[npt.NDArray[np.float32]]:
        """States of all tokens of texts, [num_tokens, layers · hidden_size] each."""
        return [self._read(tokens) for tokens in texts]

    def _read(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        self.decoder.forget()
        self.decoder.logits(tokens, 1)
        states = self.decoder.hidden_states
        assert states is not None
        return states.read(tokens, 0, self._layers)
