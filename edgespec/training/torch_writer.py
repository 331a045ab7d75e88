"""Answers of a target in torch: many at once, each in a place of one KV cache, as many as memory has room for."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec import ContextOverflow, MemoryExhausted, PromptEncoder, Report, TokenIds, Tokenizer, require_writer
from edgespec.export.layout import lay_out, rule_of
from edgespec.export.options import ExportOptions
from edgespec.export.output import write_text
from edgespec.export.sources import LoadedSource
from edgespec.system.disk import explain_write_errors
from edgespec.training.prompts import LONGEST_WRITTEN, Asked, Dialogue, Followed, Result, Said, Turns
from edgespec.training.torch_reader import MOST_ROWS, in_batches, padded
from edgespec.training.torch_target import TorchTarget, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

_MOST_PLACES, _FEW_PLACES = 1024, 8  # answers at once on a GPU, and on a CPU
_MEMORY_SHARE = 0.7  # of what is free, for the KV cache and the logits of answers
_STEPS = 16  # tokens of each answer between two looks at which have ended
_WINDOW = 128  # the cache is read up to a multiple of so many tokens
_LEAST_CAPACITY = 640  # tokens of a place: what the target writes itself, and an answer
_CANDIDATES = 256  # the likeliest tokens, among which one is drawn
_ANSWERS_PER_RESERVE = 4  # that are made, for each prompt that is encoded ahead


class _AskedPlace(NamedTuple):
    """An answer that is made: the dialogue that waits for it, and what it asked."""

    number: int
    dialogue: Dialogue[Any]
    asked: Asked


class AnswerBatch:
    """Answers that are made at once, each in a place of the KV cache, which is free again where one ends."""

    def __init__(
        self, target: TorchTarget, num_places: int, capacity: int, longest: int, *, has_graphs: bool = False
    ) -> None:
        """longest: The most tokens of an answer; capacity: those that a place has room for, the prompt's too."""
        import torch

        config, device = target.config, target.device
        self._target, self._capacity, self.has_graphs = target, capacity, has_graphs
        self.running: dict[int, _AskedPlace] = {}
        self._num_steps = [0] * num_places  # since each answer began, at least as many as were run
        shape = (config.num_layers, num_places, config.num_kv_heads, capacity, config.head_dim)
        # Zeros: what lies behind a text has no weight in its attention, but must be a number.
        self._keys, self._values = (torch.zeros(shape, dtype=target.dtype, device=device) for _ in range(2))
        self._ends = torch.tensor(target.source.vocabulary.eos_token_ids, device=device)
        counts = torch.zeros((6, num_places), dtype=torch.long, device=device)
        self._counts, self._written = counts, counts.new_zeros((num_places, longest + 1))
        self._tokens, self._positions, self._made, self._most, self._is_done, self._has_ended = counts
        self._is_done.fill_(1)
        self._temperature, self._top_p = torch.ones((2, num_places), device=device)
        self._graphs: dict[int, Any] = {}
        self._pool = torch.cuda.graph_pool_handle() if has_graphs else None  # graphs run one after the other

    @property
    def free(self) -> list[int]:
        return [place for place in range(self._counts.shape[1]) if place not in self.running]

    def put(self, begun: Sequence[_AskedPlace]) -> None:
        """Read the prompts of answers into free places, the last token of each with its first step."""
        places = dict(zip(self.free, sorted(begun, key=lambda each: len(each.asked.tokens)), strict=False))
        self.running |= places
        for place in places:
            self._num_steps[place] = 0
        for part in in_batches(places, lambda place: len(places[place].asked.tokens), MOST_ROWS):
            self._read([(place, places[place].asked) for place in part])

    def _read(self, begun: Sequence[tuple[int, Asked]]) -> None:
        import torch

        device, width = self._counts.device, max(len(asked.tokens) for _, asked in begun) - 1
        places = torch.tensor([place for place, _ in begun], device=device)

        def store(i: int, keys: "Tensor", values: "Tensor") -> None:
            self._keys[i][places, :, :width], self._values[i][places, :, :width] = keys, values

        if width:
            self._target.read(padded([asked.tokens[:-1] for _, asked in begun], device), (), store)
        rows = [(int(each.tokens[-1]), len(each.tokens) - 1, 0, each.longest, 0, 0) for _, each in begun]
        self._counts[:, places] = torch.tensor(rows, device=device).T
        chosen = [(each.sampling.temperature, each.sampling.top_p) for _, each in begun]
        self._temperature[places], self._top_p[places] = torch.tensor(chosen, device=device).T

    def run(self) -> None:
        """Make some tokens of each answer; returns before the device is done."""
        for place in self.running:
            self._num_steps[place] += _STEPS
        longest = max(len(each.asked.tokens) + self._num_steps[place] for place, each in self.running.items())
        window = min(self._capacity, -(-longest // _WINDOW) * _WINDOW)
        step = self._graph(window) if self.has_graphs else lambda: self._step(window)
        for _ in range(_STEPS):
            step()

    def _graph(self, window: int) -> Callable[[], None]:
        """A step as one graph of CUDA, which starts its thousand kernels at once."""
        import torch

        if window not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            if not self._graphs:  # what libraries set up at their first call cannot be part of a graph
                is_done = self._is_done.clone()
                self._is_done.fill_(1)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        self._step(window)
                torch.cuda.current_stream().wait_stream(side)
                self._is_done.copy_(is_done)
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(window)
            self._graphs[window] = graph
        replay: Callable[[], None] = self._graphs[window].replay
        return replay

    def _step(self, window: int) -> None:
        logits = self._target.next_logits(self._tokens, self._positions, self._keys, self._values, window)
        chosen = choose(logits, self._temperature, self._top_p)
        self._written.scatter_(1, self._made[:, None], chosen[:, None])
        goes_on = 1 - self._is_done
        is_end = (chosen[:, None] == self._ends).any(-1).long()
        self._made += goes_on * (1 - is_end)  # an end token is no part of an answer
        self._positions += goes_on
        self._tokens += goes_on * (chosen - self._tokens)
        self._has_ended += goes_on * is_end
        self._is_done |= is_end | (self._made >= self._most).long()

    def collect(self) -> list[tuple[_AskedPlace, tuple[int, ...], bool]]:
        """The answers that are done, with True for those that came to an end; their places are free."""
        _, _, made, _, is_done, has_ended = self._counts.cpu().numpy()
        places = [place for place in self.running if is_done[place]]
        written = self._written[places].cpu().numpy()
        return [
            (self.running.pop(place), tuple(tokens[: made[place]].tolist()), bool(has_ended[place]))
            for place, tokens in zip(places, written, strict=True)
        ]


def choose(logits: "Tensor", temperature: "Tensor", top_p: "Tensor") -> "Tensor":
    """A token of each row, the likeliest where the temperature is 0, [rows]."""
    likeliest, ids = logits.topk(min(_CANDIDATES, logits.shape[1]), -1)
    divisor = temperature.clamp_min(1e-3)[:, None]
    shares = (likeliest / divisor - (logits / divisor).logsumexp(-1, keepdim=True)).exp()
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= top_p[:, None], 0.0)
    drawn = (shares / shares.new_empty(shares.shape).exponential_()).argmax(-1)
    return ids.gather(1, (drawn * (temperature > 0))[:, None])[:, 0]


class TorchWriter:
    """Runs dialogues in as many places as the device's memory has room for."""

    def __init__(
        self, target: TorchTarget, work: Path, prompts: Sequence[str], longest: int, report: Report
    ) -> None:
        """work: A folder for the tokenizer's files. prompts: That it will be given, the longest ones at least.

        longest: The most tokens that it is asked for.
        """
        self.target, self._report = target, report
        self._encoder = open_encoder(target.source, work)
        self._longest = max(longest, LONGEST_WRITTEN)
        needed = max((len(self.encode(prompt)) for prompt in prompts), default=0) + self._longest
        self._capacity = min(target.config.context_length, max(_LEAST_CAPACITY, -(-needed // _WINDOW) * _WINDOW))
        self._waiting: deque[_AskedPlace] = deque()
        self._has_graphs = target.device != "cpu"

    def encode(self, prompt: str | Turns) -> TokenIds:
        return self._encoder.encode(prompt)

    def close(self) -> None:
        """Give back the device's memory."""
        import torch

        self._encoder.close()
        del self.target
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @cached_property
    def num_places(self) -> int:
        """How many answers are made at once."""
        import torch

        if self.target.device == "cpu":
            return _FEW_PLACES
        logits_bytes = 16 * self.target.config.vocab_size  # in float32, and what is made of them
        free_bytes, _ = torch.cuda.mem_get_info()
        place_bytes = self._capacity * self.target.token_bytes + logits_bytes
        return max(1, min(_MOST_PLACES, int(_MEMORY_SHARE * free_bytes / place_bytes)))

    def follow(self, wanted: Iterator[tuple[int, Dialogue[Result]]]) -> Followed[Result]:
        """Run dialogues, many at once, and give the number and the result of each as it ends.

        While the device makes tokens, the dialogues that got their answer go on, and prompts are encoded.
        """
        batch: AnswerBatch | None = None
        done: list[tuple[_AskedPlace, tuple[int, ...], bool]] = []
        while True:
            try:
                batch = batch or self._open_batch()
                self._start(batch)
            except (RuntimeError, MemoryError) as error:
                self._step_back(error)
                self._waiting.extendleft(batch.running.values() if batch else ())
                batch = None
                continue
            for place, tokens, has_ended in done:
                said = Said(tokens, self._encoder.tokenizer.decode(tokens), has_ended)
                yield from self._go_on(place.number, place.dialogue, said)
            num_ahead = -(-self.num_places // _ANSWERS_PER_RESERVE)
            while len(self._waiting) < num_ahead and (found := next(wanted, None)) is not None:
                yield from self._go_on(*found, None)
            if not batch.running and not self._waiting:
                return
            done = batch.collect()

    def _open_batch(self) -> AnswerBatch:
        import torch

        with torch.no_grad():
            return AnswerBatch(
                self.target, self.num_places, self._capacity, self._longest, has_graphs=self._has_graphs
            )

    def _start(self, batch: AnswerBatch) -> None:
        """Put what waits into free places, and begin to make tokens."""
        import torch

        with torch.no_grad():
            num_begun = min(len(batch.free), len(self._waiting))
            batch.put([self._waiting.popleft() for _ in range(num_begun)])
            if batch.running:
                batch.run()

    def _step_back(self, error: BaseException) -> None:
        """Go on with fewer answers at once, or without CUDA graphs; raises the error if neither is its reason."""
        import torch

        device = self.target.device
        if is_out_of_memory(error):
            if self.num_places == 1:
                raise MemoryExhausted(f"{device} has no memory for an answer; end other programs") from None
            self.num_places //= 2
            self._report(f"{device} has no memory for the answers; going on with {self.num_places} at a time")
        elif self._has_graphs:
            self._has_graphs = False
            self._report(f"CUDA graphs do not work here ({error}); going on without them, which takes longer")
        else:
            raise error
        if device != "cpu":
            torch.cuda.empty_cache()

    def _go_on(self, number: int, dialogue: Dialogue[Result], said: Said | None) -> Iterator[tuple[int, Result]]:
        """Tell a dialogue what was said, None at first, and give its result, or let it wait for what it asks."""
        try:
            asked = next(dialogue) if said is None else dialogue.send(said)
            while len(asked.tokens) >= self._capacity:
                asked = dialogue.throw(ContextOverflow(len(asked.tokens), self._capacity))
        except StopIteration as end:
            yield number, end.value
        else:
            longest = min(asked.longest, self._capacity - len(asked.tokens))
            self._waiting.append(_AskedPlace(number, dialogue, asked._replace(longest=longest)))


def open_encoder(source: LoadedSource, work: Path) -> PromptEncoder:
    """The prompt encoder of a source, whose tokenizer and chat template are written to a folder.

    Raises UnsuitedModel: It is no model that writes.
    """
    options, vocabulary = ExportOptions(precision="fp32"), source.vocabulary
    manifest = lay_out(source.source.name, source, rule_of(source, options), options)
    require_writer(manifest)
    with explain_write_errors(work, len(vocabulary.tokenizer_json)):
        write_text(work, vocabulary, manifest)
    tokenizer = Tokenizer(work / manifest.tokenizer, manifest.bos_token_id, manifest.add_bos)
    return PromptEncoder(manifest, tokenizer, vocabulary.chat_template)
