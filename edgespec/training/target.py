"""Answers of the target to prompts, and its hidden states for texts."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, islice
from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np
import numpy.typing as npt

from edgespec import ContextOverflow, Engine, SamplingParams, TokenIds, open_with_states
from edgespec.system.console import show_progress
from edgespec.training.stored_texts import TextsFile
from edgespec.training.written_prompts import PromptWriter

_TEMPERATURE, _TOP_P = 0.8, 0.95  # of the second answer to a prompt
_NUM_ROUNDS = 2  # answers to a prompt: greedy, then sampled
_SAMPLED = 3  # of ten answers to prompts that the target wrote itself


def write_answers(
    engine: Engine,
    prompts: Sequence[str],
    texts: TextsFile,
    *,
    longest: int,
    limit_s: float,
    most_tokens: int,
    own_share: float = 0.0,
    num_stored: int = 0,
) -> int:
    """Let the target answer prompts that have no answer yet, first greedily, then all again at a temperature.

    As many are answered at once as the engine can. Ends after limit_s seconds, or with most_tokens tokens of
    texts; what is written stays after an interruption.

    Args:
        longest: The most tokens of an answer.
        own_share: Of the answers, those to prompts that the target writes itself. These go on behind the others;
            beside stored texts they end with their share.
        num_stored: Texts that are there in the place of answers to prompts.

    Returns:
        How many prompts were left out, since the context has no room for them and an answer.
    """
    ends = monotonic() + limit_s
    over = Event()
    too_long: set[int] = set()
    writer = PromptWriter(engine, over.is_set)
    num_given = max(_NUM_ROUNDS * len(prompts), num_stored)  # what has a greater number the target wrote itself
    asked = {text.tokens[: text.num_prompt].tobytes() for text in texts.texts}

    def answer(number: int) -> tuple[TokenIds, tuple[int, ...]] | None:
        if over.is_set():
            return None
        is_own, sampling = number >= num_given, SamplingParams()
        if (number - num_given) % 10 < _SAMPLED if is_own else number >= len(prompts):
            sampling = SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, seed=number)
        made: list[int] = []
        try:
            prompt = writer.write(number - num_given) if is_own else prompts[number % len(prompts)]
            tokens = np.array(engine.encode(prompt) if prompt else (), np.int32)
            if not prompt or (is_own and tokens.tobytes() in asked):
                return None
            asked.add(tokens.tobytes())
            with engine.stream(prompt, sampling=sampling, max_tokens=longest) as chunks:
                for chunk in chunks:
                    if over.is_set():
                        return None
                    made += chunk.token_ids
        except ContextOverflow:  # of a user's own corpus; the other prompts count
            if not is_own:
                too_long.add(number % len(prompts))
            return None
        return tokens, tuple(made)

    given = (each for each in range(_NUM_ROUNDS * len(prompts)) if each not in texts.numbers)
    own = (each for each in count(num_given) if each not in texts.numbers)
    num_own = sum(each >= num_given for each in texts.numbers) if num_stored else 0
    wanted = _mixed(given, own, own_share if writer.can_write else 0.0, num_own, num_stored)
    with ThreadPoolExecutor(engine.max_parallel) as pool:
        running: dict[Future[tuple[TokenIds, tuple[int, ...]] | None], int] = {}
        try:
            while True:
                open_places = engine.max_parallel - len(running)
                if monotonic() < ends and texts.num_tokens <= most_tokens:
                    running |= {pool.submit(answer, each): each for each in islice(wanted, open_places)}
                if not running:
                    break
                show_progress(
                    f"the target answers: {len(texts.texts)} texts, {texts.num_answer_tokens} tokens of answers"
                )
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number = running.pop(future)
                    if (text := future.result()) is not None:
                        texts.add(number, *text)
        finally:
            over.set()
    show_progress("")
    return len(too_long)


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

    def read(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        """States of all tokens, [num_tokens, layers · hidden_size]."""
        self.decoder.forget()
        self.decoder.logits(tokens, 1)
        states = self.decoder.hidden_states
        assert states is not None
        return states.read(tokens, 0, self._layers)
