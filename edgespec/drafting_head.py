"""What a manifest says of a model that was made for drafting: a drafting head, or a parallel drafter model."""

from dataclasses import dataclass

from edgespec.bounds import Count, Index, Size, Width

_KINDS = ("recurrent", "steps", "block")


@dataclass(frozen=True, kw_only=True)
class Head:
    """A drafting head, which reads hidden states of its target beside tokens.

    method: eagle3, eagle, mtp, medusa, mlp_speculator, hydra, dflash or dspark.
    kind: recurrent, where the state that it gives with a token is read with the next one; steps, where each token
        of a draft has a graph of its own and none attends to the text; or block, where a pass drafts a block.
    target_layers: Layers of the target whose hidden states it reads, in this order; the number of the target's
        layers stands for the state after its final norm.
    state_size: Numbers in a state that goes with a token.
    fuse_graph: From hidden states of the target, [1, n, layers * target_hidden_size], to states,
        [1, n, state_size]; None where they are read as they are.
    step_graphs: A graph for each token of a draft; of the kinds steps and block.
    block_tokens: Tokens of a block, the known one included.
    has_confidence: Each step gives the chance that its token is accepted, too.
    """

    method: str
    kind: str
    target_layers: tuple[Index, ...]
    target_hidden_size: Width
    state_size: Count
    fuse_graph: str | None = None
    step_graphs: tuple[str, ...] = ()
    block_tokens: Size = 1
    mask_token_id: Index | None = None
    has_confidence: bool = False

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of its graphs beside the manifest's own."""
        return (*([self.fuse_graph] if self.fuse_graph else []), *dict.fromkeys(self.step_graphs))

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens it drafts in a pass."""
        return max(1, self.block_tokens - 1) if self.kind == "block" else 1

    def find_problem(self, vocab_size: int) -> str | None:
        """What is wrong with these values for a vocabulary; None if nothing is."""
        if self.kind not in _KINDS:
            return f"the kind of its head is {self.kind!r}, known are {', '.join(_KINDS)}"
        if not self.target_layers:
            return "its head reads no layer of the target"
        if not self.step_graphs and self.kind == "steps":
            return "its head has no step graphs"
        if self.mask_token_id is None and self.kind == "block":
            return "its head names no mask token"
        if (self.mask_token_id or 0) >= vocab_size:
            return f"the mask token {self.mask_token_id} is not in the vocabulary"
        return None


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A drafter model that drafts num_tokens tokens in one pass, all but the first in the place of mask tokens."""

    mask_token_id: Index
    num_tokens: Size
