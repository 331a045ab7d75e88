"""Answers of the target to prompts, and its hidden states for texts."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np
import numpy.typing as npt

from edgespec import ContextOverflow, Engine, SamplingParams, TokenIds, open_with_states
from edgespec.system.console import show_progress
from edgespec.training.stored_texts import TextsFile

_TEMPERATURE, _TOP_P = 0.8, 0.95  # of the second answer to a prompt
_NUM_ROUNDS = 2  # answers to a prompt: greedy, then sampled


def write_answers(
    engine: Engine, prompts: Sequence[str], texts: TextsFile, *, longest: int, limit_s: float, most_tokens: int
) -> int:
    """Let the target answer prompts that have no answer yet, first greedily, then all again at a temperature.

    As many are answered at once as the engine can. Ends after limit_s seconds, or with most_tokens tokens of
    texts; what is written stays after an interruption.

    longest: The most tokens of an answer.

    Returns:
        How many prompts were left out, since the context has no room for them and an answer.
    """
    ends = monotonic() + limit_s
    over = Event()
    too_long: set[int] = set()

    def answer(number: int) -> tuple[TokenIds, tuple[int, ...]] | None:
        if over.is_set():
            return None
        sampling = SamplingParams()
        if number >= len(prompts):
            sampling = SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, seed=number)
        prompt = prompts[number % len(prompts)]
        made: list[int] = []
        try:
            with engine.stream(prompt, sampling=sampling, max_tokens=longest) as chunks:
                for chunk in chunks:
                    if over.is_set():
                        return None
                    made += chunk.token_ids
        except ContextOverflow:  # of a user's own corpus; the other prompts count
            too_long.add(number % len(prompts))
            return None
        return engine.encode(prompt), tuple(made)

    wanted = iter([each for each in range(_NUM_ROUNDS * len(prompts)) if each not in texts.numbers])
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
