"""The loss of a batch, and how often the head agrees with the target, over the steps of a draft.

Steps are unrolled as in drafting: after its first token a draft reads the head's own states (training-time test,
Li et al., arXiv:2503.01840), and the tokens of the text.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.training.network import KeysAndValues, Network
from edgespec.training.packing import Batch

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_DRAFTS = 512
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
    visible, own = tensor(batch.visible), list[KeysAndValues]()
    for i in range(num_steps):
        positions = tensor(batch.at(batch.positions, 0) + i)
        if i:
            joined = network.join(tensor(batch.at(batch.tokens, i)), states)
            own.append(network.remember(joined, positions))
        states = network.step(joined, positions, visible, text, own)
        yield states


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
    total, weights = 0.0, [STEP_WEIGHT**i for i in range(num_steps)]
    all_states, gradients = list["Tensor"](), list["Tensor"]()
    for i, states in enumerate(unroll(network, batch, features, num_steps)):
        number = np.where(batch.has_next(i), batch.at(numbers, i), -1)
        is_compared = torch.from_numpy(number >= 0).to(features.device)
        leaf = states.detach()[is_compared].requires_grad_()
        labels = torch.from_numpy(number[number >= 0]).to(features.device)
        tokens = torch.from_numpy(batch.at(batch.tokens, i)[number >= 0]).to(features.device)
        share = weights[i] / sum(weights) / max(1, len(leaf))
        for rows, wanted, read in zip(
            *(each.split(_CHUNK_DRAFTS) for each in (leaf, labels, tokens)), strict=True
        ):
            logs = network.logits(rows, read, columns).float().log_softmax(-1)
            loss = -share * (1 - variation) * (after[wanted] * logs).sum()
            if variation:
                loss = loss + share * variation / 2 * (after[wanted] - logs.exp()).abs().sum()
            loss.backward()
            total += loss.item()
        gradient = torch.zeros_like(states)
        if leaf.grad is not None:
            gradient[is_compared] = leaf.grad.to(gradient.dtype)
        all_states.append(states)
        gradients.append(gradient)
    torch.autograd.backward(all_states, gradients)
    return total


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
