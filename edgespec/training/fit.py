"""Trains a head in torch until the time is over or it gets no better, with checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import cos, isfinite, pi, sqrt
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgespec import DeviceUnavailable, EdgeSpecError, MemoryExhausted, TokenIds, expected_tokens, return_freed
from edgespec.system.console import info, show_progress
from edgespec.system.signals import defer_signals
from edgespec.system.units import format_time
from edgespec.training.checkpoint import TrainingCheckpoint, TrainingProgress, read_checkpoint, write_checkpoint
from edgespec.training.network import HEAD, HeadShape, Network
from edgespec.training.objective import Agreement, agreement, backward
from edgespec.training.packing import Batch, Floats, Ints, Text, even_sample, num_drafts, num_shared, pack
from edgespec.training.state_rows import StateRows
from edgespec.training.torch_target import faster_precision, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

NUM_COMPARED = 5  # positions of a draft at which agreement is counted
_LAST_RATE = 0.1  # of learning at the end, as a share of that at first
_WARM_UP = 20  # batches
_MOST_GRADIENT = 0.5
_LEAST_OF_MEAN = 0.005  # the share of the last batch's weights in their mean
_ROWS, _GPU_ROWS, _FEWEST_ROWS = 640, 8192, 80  # of a batch, which is halved where there is no memory for it
_LINE_ROWS = 2048  # at most, since each row attends to the whole line
_MOST_LOST = 8  # batches in a row whose loss is no number
# Of held-out texts, an even sample of them; the last comparison has as many as there is time for.
_COMPARED_TOKENS, _GPU_COMPARED_TOKENS = 6000, 60_000
_PATIENCE = 6  # comparisons without a gain, after which training ends
_COMPARE_S, _NUM_COMPARISONS = 20.0, 16
_CHECKPOINT_S = 60.0
_BATCHES_UNTIL_RETURN = 4


class Data(NamedTuple):
    """The data that a head is trained on.

    rows: Hidden states of the texts' tokens, the last hidden_size numbers of a row those after the final norm.
    texts, held_out: To train on, and to compare with.
    embedding: Of the target, [vocab_size, hidden_size].
    tokens: That can be drafted, [draft_vocab_size].
    head: Their rows of the target's vocabulary head, [draft_vocab_size, hidden_size].
    logit_scale, logit_cap: Of the target's logits.
    """

    rows: StateRows
    texts: Sequence[Text]
    held_out: Sequence[Text]
    embedding: Floats
    head: Floats
    tokens: TokenIds
    logit_scale: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    variation: The share of the loss that is total variation: by how much drafts are accepted less often than those
        of the target itself. The rest is cross-entropy, which also tells a head that is far off where to go.
    epochs: How often each token is seen in all runs, by which the learning rate falls; 0 for as often as there is
        time for.
    num_steps: Of a draft in training.
    rate: Of learning at first in batches of 640 rows. It grows with the root of their number (Malladi et al. 2022,
        On the SDEs and scaling rules for adaptive gradient algorithms).
    sharpness: By which the target's logits are multiplied; above 1 its likeliest tokens count for more.
    num_compared: Of how many tokens, the likeliest of each batch, the loss is; 0 for all.
    whole_texts: Train on prompts too, but for what all texts begin with, and not on answers alone.
    num_states, markov_rank: As HeadShape has them.
    """

    variation: float = 0.0
    epochs: float = 0.0
    num_steps: int = 3
    rate: float = 1e-4
    sharpness: float = 1.0
    num_compared: int = 2048
    whole_texts: bool = True
    num_states: int = 3
    markov_rank: int = 0


class Trainer:
    """A head, its optimizer and its checkpoint.

    What is compared and saved is a running mean of the weights over the last batches (Polyak and Juditsky 1992).

    num_a_round: The drafts that begin in the texts, as far as these fit into a line of a batch.
    compared, compared_drafts: The held-out texts that are compared with; the drafts in them, once they were.
    save_best: Called with the mean each time that it is the best so far.
    """

    def __init__(
        self,
        shape: HeadShape,
        data: Data,
        start: Mapping[str, Floats],
        checkpoint: Path,
        save_best: Callable[[Mapping[str, Floats]], None],
        device: str,
        *,
        saved: Mapping[str, Floats] | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        """Go on from the checkpoint, if there is one.

        saved: The weights that save_best wrote in an earlier run, if they are there, which others must beat.

        Raises ModelError: The checkpoint is damaged, or of another head.
        """
        import torch

        self._recipe = recipe or Recipe()
        if self._recipe.whole_texts:
            first = max(1, num_shared(data.texts))
            data = data._replace(texts=[text._replace(num_prompt=first) for text in data.texts])
        self._shape, self._data, self._path, self._save_best = shape, data, checkpoint, save_best
        self.device = find_device(device)
        is_gpu = self.device != "cpu"
        self.compared = even_sample(data.held_out, _GPU_COMPARED_TOKENS if is_gpu else _COMPARED_TOKENS)
        weights, means, self.progress = TrainingCheckpoint(start, start, TrainingProgress())
        if checkpoint.exists():
            weights, means, self.progress = read_checkpoint(checkpoint, shape)
        self._embedding = torch.from_numpy(data.embedding).to(self.device)
        self._head = torch.tensor(weights[HEAD], device=self.device)  # which is not trained
        self._network, self._mean, self._saved = self._open(weights), self._open(means), saved
        self._trained = [each for each in self._network.weights.values() if each.requires_grad]
        self._target_head = torch.from_numpy(data.head).to(self.device)
        self._ids = torch.tensor(data.tokens.astype(np.int64), device=self.device)
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=self._recipe.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.precision = faster_precision(self.device)
        self._rng = np.random.default_rng(self.progress.num_drafts)
        self._num_rows, self._num_lost, self.compared_drafts = _GPU_ROWS if is_gpu else _ROWS, 0, 0
        self.num_a_round = num_drafts(data.texts, self._line_rows)
        self._compare_s = 1e-3  # that the last comparison took

    def run(self, limit_s: float) -> TrainingProgress:
        """Train for limit_s seconds; ends earlier where held-out texts show no gain, or with the recipe's epochs.

        The comparisons at the end, of which the last takes a sixteenth of limit_s at most, are within it.

        KeyboardInterrupt goes through, once the checkpoint is written.

        Raises:
            MemoryExhausted: There is no memory for a small batch.
            EdgeSpecError: The loss is no number any more.
        """
        began = saved = monotonic()
        compare_s = max(_COMPARE_S, limit_s / _NUM_COMPARISONS)
        if self._saved is None:  # the weights at hand are saved then
            self.compare()
        else:
            self._compare_saved(self._saved)
        last_s = limit_s / _NUM_COMPARISONS
        steps_s = max(limit_s / 2, limit_s - self._compare_s - self._last_compare_s(last_s))
        compared = monotonic()
        try:
            for number, batch in enumerate(self._batches()):
                now = monotonic()
                wanted = self._recipe.epochs * self.num_a_round
                seen = self.progress.num_drafts / wanted if wanted else 0.0
                share = min(1.0, max((now - began) / steps_s, seen))
                if not self._try_step(batch, number, share):
                    continue
                self._count(batch, monotonic() - now)
                if number % _BATCHES_UNTIL_RETURN == 0:
                    return_freed()  # blocks of ever other sizes leave gaps, 40 MB a second of processor time
                show_progress(self._describe(steps_s - (now - began)))
                if now - compared > compare_s:
                    self.compare()
                    compared = monotonic()
                if now - saved > _CHECKPOINT_S:
                    self.save()
                    saved = monotonic()
                if share >= 1.0 or self.progress.num_since_best >= _PATIENCE:
                    break
            self.compare()
            self._compare_last(last_s)
        finally:
            with defer_signals():
                self.save()
            show_progress("")
        return self.progress

    def _open(self, weights: Mapping[str, Floats]) -> Network:
        """A head with these weights, of which all but its vocabulary head can be trained."""
        import torch

        found = {name: torch.tensor(each, device=self.device) for name, each in weights.items() if name != HEAD}
        for each in found.values():
            each.requires_grad_()
        return Network(self._shape, {**found, HEAD: self._head}, self._embedding)

    def _last_compare_s(self, most_s: float) -> float:
        """The seconds that _compare_last takes, by what the comparison before it took."""
        num, num_all = len(self.compared), len(self._data.held_out)
        return min(most_s, self._compare_s * num_all / num) if num < num_all else 0.0

    def _compare_last(self, most_s: float) -> None:
        """Compare the saved weights once more, if more held-out texts than before are compared within most_s."""
        assert self._saved is not None
        num_tokens = sum(len(text.tokens) for text in self.compared)
        found = even_sample(self._data.held_out, int(num_tokens * max(1.0, most_s / self._compare_s)))
        if len(found) > len(self.compared):
            self.compared = found
            self._compare_saved(self._saved)

    def _compare_saved(self, weights: Mapping[str, Floats]) -> None:
        self.progress = replace(self.progress, best=self._agreement(self._open(weights)).rates)

    def compare(self) -> Agreement:
        """Agreement with an even sample of the held-out texts; the best weights so far are saved."""
        found = self._agreement(self._mean)
        if not self.progress.best or expected_tokens(found.rates)[-1] > self.progress.tokens_per_pass:
            with defer_signals():
                self._saved = self._mean.arrays()
                self._save_best(self._saved)
            self.progress = replace(self.progress, best=found.rates, num_since_best=0)
        else:
            self.progress = replace(self.progress, num_since_best=self.progress.num_since_best + 1)
        return found

    def _agreement(self, network: Network) -> Agreement:
        while True:
            try:
                return self._count_agreement(network)
            except (MemoryError, RuntimeError) as error:
                self._halve(error)

    def _count_agreement(self, network: Network) -> Agreement:
        reached, right = np.zeros(NUM_COMPARED, np.int64), np.zeros(NUM_COMPARED, np.int64)
        began = monotonic()
        for batch in self._pack(self.compared, None):
            with self._autocast():
                one = agreement(network, batch, self._features(batch), NUM_COMPARED, self._ids)
            reached, right = reached + one.reached, right + one.right
        self.compared_drafts, self._compare_s = int(reached[0]), max(1e-3, monotonic() - began)
        return Agreement(reached, right)

    def save(self) -> None:
        """Write the checkpoint."""
        checkpoint = TrainingCheckpoint(self._network.arrays(), self._mean.arrays(), self.progress)
        write_checkpoint(self._path, checkpoint)

    def _batches(self) -> Iterator[Batch]:
        while True:
            num_rows = self._num_rows
            for batch in self._pack(self._data.texts, self._rng):
                yield batch
                if self._num_rows != num_rows:
                    break

    def _pack(self, texts: Sequence[Text], rng: np.random.Generator | None) -> Iterator[Batch]:
        return pack(texts, self._line_rows, max(1, self._num_rows // _LINE_ROWS), rng)

    @property
    def _line_rows(self) -> int:
        return min(self._num_rows, _LINE_ROWS)

    def _try_step(self, batch: Batch, number: int, share: float) -> bool:
        """Learn from a batch; False where there is no memory for it, and the next ones are smaller."""
        try:
            self._step(batch, number, share)
        except (MemoryError, RuntimeError) as error:
            self._halve(error)
            return False
        return True

    def _halve(self, error: MemoryError | RuntimeError) -> None:
        """Go on with smaller batches where there is no memory; raises the error if it is another one."""
        import torch

        if not is_out_of_memory(error):
            raise error
        self._optimizer.zero_grad()
        if self._num_rows // 2 < _FEWEST_ROWS:
            raise MemoryExhausted(
                f"{self.device} has no memory to train with batches of {self._num_rows} tokens; end other "
                "programs, or choose another --train-device or a smaller --draft-vocab"
            ) from None
        self._num_rows //= 2
        self.num_a_round = num_drafts(self._data.texts, self._line_rows)
        info(f"{self.device} has no memory for a batch; going on with {self._num_rows} tokens at a time")
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _step(self, batch: Batch, number: int, share: float) -> None:
        import torch

        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(number, share)
        with self._autocast():
            given = self._network, batch, self._features(batch), self._after(batch), self._recipe.num_steps
            loss = backward(*given, self._recipe.variation, self._recipe.num_compared)
        size = float(torch.nn.utils.clip_grad_norm_(self._trained, _MOST_GRADIENT))
        if isfinite(loss) and isfinite(size):
            self._optimizer.step()
            self._num_lost = 0
            self._average()
        else:
            self._num_lost += 1
        self._optimizer.zero_grad()
        if self._num_lost > _MOST_LOST:
            raise EdgeSpecError(
                f"the loss of {self._num_lost} batches in a row is not a number; what was trained before is kept. "
                f"Remove {self._path.parent}, whose hidden states may be damaged, and train again"
            )

    def _average(self) -> None:
        """Take the weights behind one more batch into their mean, which is short at first."""
        import torch

        num = self.progress.num_batches
        self.progress = replace(self.progress, num_batches=num + 1)
        with torch.no_grad():
            for name, mean in self._mean.weights.items():
                if name != HEAD:
                    mean.lerp_(self._network.weights[name], max(_LEAST_OF_MEAN, 9 / (10 + num)))

    def _rate(self, number: int, share: float) -> float:
        """The step size of a batch of so many rows, once a share of the training is done."""
        slope = _LAST_RATE + (1 - _LAST_RATE) * (1 + cos(pi * share)) / 2
        return self._recipe.rate * sqrt(self._num_rows / _ROWS) * min(1.0, (number + 1) / _WARM_UP) * slope

    def _features(self, batch: Batch) -> "Tensor":
        return self._stored(batch.stored, self._shape.num_states)

    def _after(self, batch: Batch) -> "Tensor":
        """The target's probabilities after the first token of each draft, [num_drafts, draft_vocab_size]."""
        import torch

        data = self._data
        stored = batch.at(batch.stored, 0)[batch.starts >= 0] + 1
        with torch.no_grad():
            logits = (self._stored(stored, 1) @ self._target_head.T).float() * data.logit_scale
            if data.logit_cap is not None:
                logits = data.logit_cap * torch.tanh(logits / data.logit_cap)
            return (self._recipe.sharpness * logits).softmax(-1)

    def _stored(self, places: Ints, num_states: int) -> "Tensor":
        """Rows of the last states, [*places, num_states · hidden_size]."""
        return self._data.rows.at(places)[..., -num_states * self._shape.hidden_size :].float()

    def _autocast(self) -> AbstractContextManager[Any]:
        import torch

        kind = self.device.partition(":")[0]
        cast: AbstractContextManager[Any] = torch.autocast(kind, torch.bfloat16, enabled=self.precision == "bf16")
        return cast

    def _count(self, batch: Batch, taken_s: float) -> None:
        num_drafts = self.progress.num_drafts + int((batch.starts >= 0).sum())
        self.progress = replace(self.progress, num_drafts=num_drafts, used_s=self.progress.used_s + taken_s)

    def _describe(self, left_s: float) -> str:
        best = self.progress.best
        so_far = f", {best[0]:.0%} of first tokens are right" if best else ""
        return f"training: {format_time(max(0.0, left_s))} left{so_far}"


def find_device(name: str) -> str:
    """The device of torch that is meant; of auto, a GPU of NVIDIA if there is one.

    Raises DeviceUnavailable: It is not there.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        problem = str(error).partition("\n")[0]
        raise DeviceUnavailable(
            f"PyTorch does not run on {name} here ({problem}); choose another --train-device", device=name
        ) from None
    return name
