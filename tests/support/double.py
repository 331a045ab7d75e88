"""A base of decoders for tests, and calls that are short in tests."""

from abc import abstractmethod
from collections.abc import Sequence

from edgespec.decoding.decoder import Decoder, Pass, Rows, rows_by_branch
from edgespec.decoding.tree import Tree
from edgespec.types import Logits, TokenIds


class Double(Decoder):
    """A decoder that is written as the rows after the last tokens of a chain; those of a tree come by branch."""

    num_fed = 0

    def run(self, given: Pass) -> Rows:
        if given.is_tree:
            return Rows(self.tree_logits(given.text, given.tree.tokens, given.tree.above, given.num_last))
        return Rows(self.logits(given.tokens, given.num_rows))

    @abstractmethod
    def logits(self, tokens: TokenIds, num_last: int) -> Logits: ...

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        return rows_by_branch(self.logits, tree_pass(tokens, nodes, parents, num_last))


def tree_pass(tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None) -> Pass:
    return Pass(tokens, Tree(nodes, parents=tuple(parents)), num_last)


def tree_logits(
    decoder: Decoder, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
) -> Logits:
    """Logits after the last of tokens and after each node, [num_nodes + 1, vocab_size], or the last of them."""
    return decoder.run(tree_pass(tokens, nodes, parents, num_last)).logits


def branch_logits(decoder: Decoder, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int]) -> Logits:
    """The rows of a tree, from one pass for each branch."""
    return rows_by_branch(decoder.logits, tree_pass(tokens, nodes, parents))
