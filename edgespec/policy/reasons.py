"""Why nothing was drafted, as users read it."""

NO_DRAFTER = "no drafter is in use"
NO_LENGTH = "drafts have no tokens (draft-length 0)"
NO_GUESS = "no drafter had a guess"
NO_GAIN = "no guess was likely to save time"
ENDING = "the answer or the context ends here"
