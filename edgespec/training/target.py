"""What training asks of the target: answers to prompts, and the hidden states of texts."""

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.errors import ContextOverflow
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.system.console import show_progress
from edgespec.training.texts_file import TextsFile
from edgespec.types import TokenIds

_TEMPERATURE, _TOP_P = 0.8, 0.95  # of the second answer to a prompt
_NUM_ROUNDS = 2  # answers to a prompt: greedy, then sampled


def write_answers(
    engine: Engine, prompts: Sequence[str], texts: TextsFile, *, longest: int, limit_s: float, most_tokens: int
) -> None:
    """Let the target answer prompts that have no answer yet, first greedily, then all again at a temperature.

    Ends after limit_s seconds, or with most_tokens tokens of texts; what is written stays after an interruption.

    Args:
        longest: The most tokens of an answer.
    """
    began = monotonic()
    for number in range(_NUM_ROUNDS * len(prompts)):
        if number in texts.numbers:
            continue
        if monotonic() - began > limit_s or texts.num_tokens > most_tokens:
            break
        show_progress(f"the target answers: {len(texts.texts)} texts, {texts.num_answer_tokens} tokens of answers")
        sampling = SamplingParams()
        if number >= len(prompts):
            sampling = SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, seed=number)
        prompt = prompts[number % len(prompts)]
        try:
            answer = engine.generate(prompt, sampling=sampling, max_tokens=longest)
        except ContextOverflow:  # of a user's own corpus; the other prompts count
            continue
        texts.add(number, engine.encode(prompt), answer.token_ids)
    show_progress("")


class StatesReader:
    """Runs texts through the target and gives the hidden states behind some of its layers."""

    def __init__(self, folder: Path, manifest: Manifest, layers: tuple[int, ...]) -> None:
        """folder: Of a target that was exported with the hidden states of these layers."""
        self._layers = layers
        self._decoder = OnnxDecoder(folder, manifest, find_device("cpu"), hidden_layers=layers)

    def read(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        """States of all tokens, [num_tokens, layers · hidden_size]."""
        self._decoder.forget()
        self._decoder.logits(tokens, 1)
        states = self._decoder.hidden_states
        assert states is not None
        return states.read(tokens, 0, self._layers)

    @property
    def decoder(self) -> OnnxDecoder:
        return self._decoder
