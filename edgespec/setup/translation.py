"""The translation of a drafter whose vocabulary is not the target's, from their folders."""

from edgespec.draft.cross_vocabulary import Translation, find_translation
from edgespec.setup.open_model import ModelFolder, read_tokenizer
from edgespec.types import Report


def load_translation(target: ModelFolder, draft: ModelFolder, report: Report) -> Translation | None:
    """The translation that a drafter needs; None where its vocabulary is the target's.

    Raises VocabularyMismatch: The drafter has too few of the target's tokens.
    """
    if draft.manifest.vocab_sha256 == target.manifest.vocab_sha256:
        return None
    found = find_translation(
        (read_tokenizer(*target), read_tokenizer(*draft)),
        target.manifest.vocab_size,
        (target.manifest.eos_token_ids, draft.manifest.eos_token_ids),
        (target.manifest.name, draft.manifest.name),
    )
    if found is None:
        return None
    translate, share = found
    report(
        f"{draft.manifest.name} has another vocabulary than {target.manifest.name}: it has {share:.0%} of the "
        "tokens of ordinary text, and drafts only these"
    )
    return translate
