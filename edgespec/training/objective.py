"""The loss of a batch, how often the head agrees with the target, and what that is expected to gain.

Steps are unrolled as in drafting: after its first token a draft reads the head's own states (training-time test,
Li et al., arXiv:2503.01840), and the tokens of the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec import Profile, best_length, expected_tokens
from edgespec.training.network import KeysAndValues, Network
from edgespec.training.packing import Batch

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_DRAFTS, _GPU_CHUNK_DRAFTS = 512, 4096
INT8_BYTES = 1.125  # of a weight, with the scales of blocks of 32
_AROUND_DRAFT_S = 1e-3  # of a draft outside the head's products (docs/log/training.md)
STEP_WEIGHT = 0.8  # of a step's loss, over that of the step before


def unroll(network: Network, batch: Batch, features: "Tensor", num_steps: int) -> "Iterator[Tensor]":
    """The states of each step of the drafts of a batch, [batch, drafts, hidden_size].

    features: States of the target for the batch's rows, [batch, rows, num_states · hidden_size].
    """
    import torch

    def tensor(values: npt.NDArray[np.generic]) -> "Tensor":
        return torch.from_numpy(values).to(features.device)

    rows = network.join(tensor(batch.tokens), network.fuse(features))
    text = network.remember(rows, tensor(batch.positions))
    line = torch.arange(len(batch.starts), device=features.device)[:, None]
    joined = states = rows[line, tensor(batch.rows(0))]
    seen, own = visible(batch, features.device), list[KeysAndValues]()
    for i in range(num_steps):
        positions = tensor(batch.at(batch.positions, 0) + i)
        if i:
            joined = network.join(tensor(batch.at(batch.tokens, i)), states)
            own.append(network.remember(joined, positions))
        states = network.step(joined, positions, seen, text, own)
        yield states


def visible(batch: Batch, device: Any) -> "Tensor":
    """Which rows each draft attends to, [batch, drafts, rows]: those of its text up to its first token."""
    import torch

    text, first = (torch.from_numpy(each).to(device) for each in (batch.text, batch.rows(0)))
    is_same = text.gather(1, first)[..., None] == text[:, None]
    return is_same & (torch.arange(text.shape[1], device=device) <= first[..., None])


def backward(
    network: Network,
    batch: Batch,
    features: "Tensor",
    after: "Tensor",
    num_steps: int,
    variation: float = 0.0,
    num_compared: int = 0,
) -> float:
    """Add the gradients of a batch's loss to the weights that are trained, and return the loss.

    The loss is the cross-entropy with the target's probabilities, weighted by step. Logits are made for some
    drafts at a time, and go before the next ones are made: 16,000 for each draft and step are gigabytes.

    Args:
        after: The target's probabilities after each draft's first token, over the tokens that can be drafted;
            those after a later token are those of the draft that begins there. [num_drafts, draft_vocab_size]
        variation: The share of the loss that is the total variation between both, and not the cross-entropy.
        num_compared: Of how many tokens, the likeliest of the batch, the loss is; 0 for all.
    """
    import torch

    columns = None
    if 0 < num_compared < after.shape[1]:
        columns = after.sum(0).topk(num_compared).indices
        after = after[:, columns] / after[:, columns].sum(-1, keepdim=True)
    numbers = np.full(batch.tokens.shape, -1)
    line, draft = np.nonzero(batch.starts >= 0)
    numbers[line, batch.starts[line, draft]] = np.arange(len(line))
    num_at_once = _CHUNK_DRAFTS if features.device.type == "cpu" else _GPU_CHUNK_DRAFTS
    total, weights = torch.zeros((), device=features.device), [STEP_WEIGHT**i for i in range(num_steps)]
    all_states, gradients = list["Tensor"](), list["Tensor"]()
    for i, states in enumerate(unroll(network, batch, features, num_steps)):
        number = np.where(batch.has_next(i), batch.at(numbers, i), -1)
        is_compared = torch.from_numpy(number >= 0).to(features.device)
        leaf = states.detach()[is_compared].requires_grad_()
        labels = torch.from_numpy(number[number >= 0]).to(features.device)
        tokens = torch.from_numpy(batch.at(batch.tokens, i)[number >= 0]).to(features.device)
        share = weights[i] / sum(weights) / max(1, len(leaf))
        for rows, wanted, read in zip(*(each.split(num_at_once) for each in (leaf, labels, tokens)), strict=True):
            logs = network.logits(rows, read, columns).float().log_softmax(-1)
            loss = -share * (1 - variation) * (after[wanted] * logs).sum()
            if variation:
                loss = loss + share * variation / 2 * (after[wanted] - logs.exp()).abs().sum()
            loss.backward()
            total += loss.detach()
        gradient = torch.zeros_like(states)
        if leaf.grad is not None:
            gradient[is_compared] = leaf.grad.to(gradient.dtype)
        all_states.append(states)
        gradients.append(gradient)
    torch.autograd.backward(all_states, gradients)
    return float(total)


class Agreement(NamedTuple):
    """How many drafts reached each position with all tokens right until then, and how many were right there."""

    reached: npt.NDArray[np.int64]  # [num_steps]
    right: npt.NDArray[np.int64]

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(float(a / b) if b else 0.0 for a, b in zip(self.right, self.reached, strict=True))


def agreement(network: Network, batch: Batch, features: "Tensor", num_steps: int, ids: "Tensor") -> Agreement:
    """Compare drafts after each token of an answer with the text.

    Drafts that would go beyond the end of their text are left out. ids: The target's id of each token of the head.
    """
    import torch

    reached, right = np.zeros(num_steps, np.int64), np.zeros(num_steps, np.int64)
    with torch.no_grad():
        alive = batch.has_next(num_steps - 1)
        for i, states in enumerate(unroll(network, batch, features, num_steps)):
            rows = states[torch.from_numpy(alive).to(features.device)]
            tokens = torch.from_numpy(batch.at(batch.tokens, i)[alive]).to(features.device)
            best = ids[network.logits(rows, tokens).argmax(-1)].cpu().numpy()
            is_right = best == batch.at(batch.tokens, i + 1)[alive]
            reached[i], right[i] = len(best), is_right.sum()
            alive[alive] = is_right
    return Agreement(reached, right)


@dataclass(frozen=True, kw_only=True)
class ExpectedGain:
    """The gain on greedy text like the held-out texts, if the head alone drafts serially.

    draft_length: That gains the most; 0 where plain decoding is fastest.
    draft_cost: Time of a drafted token over that of a pass of one token, as estimate_draft_cost gives it.
    times: Speed over that of plain decoding.
    """

    draft_length: int
    draft_cost: float
    tokens_per_pass: float
    times: float


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The result of a training.

    agreement: Chance that a drafted token is the target's own if all before it were, by position, in some of the
        held-out texts, and in the drafts of these that no text ends before.
    drafts: That begin in the texts.
    trained_drafts: In all runs.
    gain: None where the target's passes were not measured, since torch ran it.
    coverage: Share of the tokens of these texts that can be drafted at all.
    """

    texts: int
    answer_tokens: int
    held_out_texts: int
    compared_texts: int
    compared_drafts: int
    drafts: int
    trained_drafts: int
    training_s: float
    precision: str
    agreement: tuple[float, ...]
    coverage: float
    gain: ExpectedGain | None


def estimate_draft_cost(num_weights: int, target_bytes: float, profile: Profile) -> float:
    """Time of a drafted token over that of a pass of one token: of reading the weights, and of all around it.

    Args:
        num_weights: Of the head, which is exported in int8.
        target_bytes: That a pass of the target reads.
    """
    return num_weights * INT8_BYTES / target_bytes + _AROUND_DRAFT_S / profile.costs().pass_s(1)


def expected_gain(rates: Sequence[float], draft_cost: float, profile: Profile) -> ExpectedGain:
    """The best draft length and its gain.

    Args:
        rates: Chance that a drafted token is right if all before it were, by position.
        draft_cost: Time of a drafted token over that of a pass of one token.
    """
    totals, costs = expected_tokens(rates), profile.costs()
    step_s = costs.pass_s(1)
    rate, length = best_length(totals, lambda length: costs.pass_s(length + 1) / step_s + length * draft_cost)
    return ExpectedGain(draft_length=length, draft_cost=draft_cost, tokens_per_pass=totals[length], times=rate)
