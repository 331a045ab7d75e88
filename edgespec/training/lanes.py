"""Prompts and answers that a target writes itself, many in step: each lane gets a token in each pass.

All tokens of a pass lie at one place of the KV cache, whatever their positions, so that nothing is padded, copied
or read twice. A lane whose answer has ended begins another text behind it, which does not see what lies before.
The hidden states of a text are there once it is written.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgespec import MemoryExhausted, Report, TokenIds, free_memory
from edgespec.training.prompts import PromptWriter
from edgespec.training.stored_texts import Halves
from edgespec.training.torch_reader import to_halves
from edgespec.training.torch_target import TorchTarget, is_out_of_memory
from edgespec.training.torch_writer import choose

if TYPE_CHECKING:
    from torch import Tensor

_CAPACITY = 384  # passes, after which the cache is empty again
_MOST_LANES, _FEWEST_LANES = 256, 8
_MEMORY_SHARE = 0.4  # of what is free
_PASSES_TIMED = 2
_FEWEST, _MOST = 2, 128  # tokens of a user's turn
_TURN_SHARE, _SHORT = 0.25, 8  # of the passes that there is time for, where these are few; at least so many
_LEAST_ANSWER = 16  # tokens of an answer that is awaited beyond the time
_TURN_TEMPERATURE, _TURN_TOP_P = 1.0, 0.98
_ANSWER_TEMPERATURE, _ANSWER_TOP_P, _SAMPLED = 0.8, 0.95, 0.3  # the share of answers that are sampled


class OwnText(NamedTuple):
    """A prompt that a target wrote, its answer, and the hidden states of both, [num_tokens, width]."""

    prompt: TokenIds
    answer: tuple[int, ...]
    states: Halves


class _Lane:
    """The text that a lane writes: a template's beginning, the user's turn, the template's middle, the answer.

    given: Tokens that come next, whatever the target would write.
    num_prompt: Known, and not 0, once the turn has ended.
    """

    def __init__(self, begin: TokenIds, first: int, temperature: float) -> None:
        """first: The place in the cache of its first token. temperature: Of the answer."""
        self.first, self.temperature, self.num_begin = first, temperature, len(begin)
        self.given, self.tokens, self.num_prompt = deque(begin.tolist()), list[int](), 0

    def go_on(self, chosen: int, ends: set[int], middle: TokenIds, longest: int, longest_turn: int) -> bool:
        """Put the next token in front, the target's or the template's; False where the text has ended."""
        if self.given:
            return True
        is_end, num_turn = chosen in ends, len(self.tokens) - self.num_begin
        if self.num_prompt:
            if is_end or len(self.tokens) - self.num_prompt >= longest:
                return False
        elif is_end or chosen == middle[0] or num_turn >= longest_turn:
            self.given.extend(middle.tolist())
            self.num_prompt = len(self.tokens) + len(middle)
            return num_turn >= _FEWEST
        self.given.append(chosen)
        return True

    def has_answer(self, num_tokens: int) -> bool:
        """True where the answer has so many tokens at least."""
        return 0 < self.num_prompt <= len(self.tokens) - num_tokens


class Lanes:
    """Texts of a target in torch on a CPU, written in step."""

    def __init__(
        self,
        target: TorchTarget,
        layers: Sequence[int],
        prompter: PromptWriter,
        longest: int,
        *,
        seed: int,
        report: Report,
    ) -> None:
        """layers: Whose hidden states are kept. longest: The most tokens of an answer. seed: Of what is drawn."""
        import torch

        config = target.config
        self._target, self._layers, self._longest, self._report = target, layers, longest, report
        self._begins, self._middle = prompter.begins, prompter.middle
        self._rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self._ends = {*target.source.vocabulary.eos_token_ids}
        self._capacity = min(_CAPACITY, config.context_length)
        self._width = len(layers) * config.hidden_size
        lane_bytes = self._capacity * (target.token_bytes + 2 * self._width) + 16 * config.vocab_size
        fitting = int(_MEMORY_SHARE * free_memory().free_bytes / lane_bytes)
        self.num_lanes = min(_MOST_LANES, max(_FEWEST_LANES, fitting))

    def write(self, limit_s: float, fewest: int = 0) -> Iterator[OwnText]:
        """Texts, as they end, for so many seconds; the answers under way end there too.

        fewest: Texts that are awaited beyond that, for as long again at most.
        """
        import torch

        self._limit_s, self._ends_at = limit_s, monotonic() + limit_s
        self._num_awaited, self._is_late = fewest, False
        while self._has_time(monotonic(), ()):
            try:
                with torch.no_grad():
                    yield from self._fill()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.num_lanes == 1:
                    raise MemoryExhausted("cpu has no memory for an answer; end other programs") from None
                self.num_lanes //= 2
                self._report(f"cpu has no memory for the answers; going on with {self.num_lanes} at a time")

    def _has_time(self, now: float, lanes: Sequence[_Lane]) -> bool:
        if now < self._ends_at:
            return True
        num_awaited = self._num_awaited - sum(each.has_answer(_LEAST_ANSWER) for each in lanes)
        if num_awaited <= 0 or now >= self._ends_at + self._limit_s:
            return False
        if not self._is_late:
            longer = f"{num_awaited} more texts are wanted; going on for {self._limit_s:.0f} s at most"
            self._report(f"the time for writing is over, and {longer}")
            self._is_late = True
        return True

    def _fill(self) -> Iterator[OwnText]:
        """Write until the cache is full; nothing, and fewer lanes, where there is no time for that.

        The fewest lanes go on without that time, with shorter turns.
        """
        import torch

        config, num, began = self._target.config, self.num_lanes, monotonic()
        shape = (config.num_layers, num, config.num_kv_heads, self._capacity, config.head_dim)
        keys, values = (torch.empty(shape, dtype=self._target.dtype) for _ in range(2))
        states = np.empty((num, self._capacity, self._width), np.float16)
        lanes, longest_turn = [self._begin(0) for _ in range(num)], _MOST
        for at in range(self._capacity):
            now = monotonic()
            if not self._has_time(now, lanes):
                break
            if at == _PASSES_TIMED:
                num_passes = (self._ends_at - began) * at / (now - began)
                if num_passes < self._capacity and num > _FEWEST_LANES:
                    self.num_lanes = max(_FEWEST_LANES, int(num * num_passes / self._capacity))
                    return
                longest_turn = min(_MOST, max(_SHORT, int(_TURN_SHARE * num_passes)))
            for lane in lanes:
                lane.tokens.append(lane.given.popleft())
            states[:, at], chosen = self._pass(lanes, keys, values, at)
            for i, (lane, token) in enumerate(zip(lanes, chosen.tolist(), strict=True)):
                if not lane.go_on(token, self._ends, self._middle, self._longest, longest_turn):
                    yield from self._text(lane, states[i])
                    lanes[i] = self._begin(at + 1)
        for i, lane in enumerate(lanes):
            yield from self._text(lane, states[i])

    def _begin(self, first: int) -> _Lane:
        begin = self._begins[self._rng.integers(len(self._begins))]
        return _Lane(begin, first, _ANSWER_TEMPERATURE if self._rng.random() < _SAMPLED else 0.0)

    def _text(self, lane: _Lane, states: Halves) -> Iterator[OwnText]:
        """The text of a lane, if it has an answer, from the states of its places of the cache."""
        if lane.has_answer(1):
            self._num_awaited -= 1
            prompt, answer = lane.tokens[: lane.num_prompt], lane.tokens[lane.num_prompt :]
            own = states[lane.first : lane.first + len(lane.tokens)].copy()
            yield OwnText(np.array(prompt, np.int32), tuple(answer), own)

    def _pass(self, lanes: Sequence[_Lane], keys: "Tensor", values: "Tensor", at: int) -> tuple[Halves, TokenIds]:
        """The states of each lane's last token, and the token that the target chooses behind it."""
        import torch

        tokens = torch.tensor([lane.tokens[-1] for lane in lanes])
        firsts = torch.tensor([lane.first for lane in lanes])
        *kept, normed = self._target.in_step(tokens, firsts, keys, values, at, self._layers)
        logits = self._target.logits(normed)
        chosen = logits.argmax(-1)
        warmth = [
            0.0 if each.given else each.temperature if each.num_prompt else _TURN_TEMPERATURE for each in lanes
        ]
        if warm := [i for i, each in enumerate(warmth) if each]:
            temperature = torch.tensor([warmth[i] for i in warm])
            top_p = torch.tensor([_ANSWER_TOP_P if lanes[i].num_prompt else _TURN_TOP_P for i in warm])
            chosen[warm] = choose(logits[warm], temperature, top_p)
        return to_halves([*kept, normed]), chosen.numpy().astype(np.int32)
