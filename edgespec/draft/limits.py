"""Bounds of draft lengths, and the gains that a decision asks for, each with its reason."""

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS

# The closed forms of plans go no further: the chance that so many tokens are all accepted is small.
MAX_PLANNED_TOKENS = 16
# The most that a user may ask for, or a simulation is given. Memory is estimated for the length that is in use.
MAX_FIXED_TOKENS = 64

# The most rows of a drafter's step: memory is estimated for as many.
MAX_BRANCHES = MAX_DRAFT_TOKENS + 1
# The most alternatives that are named for a token. Where none of so many comes true, the drafter knows nothing.
MAX_OTHERS = 8
# The most tokens that a drafter is ahead of the text; a job that is never stopped ends there.
MAX_AHEAD_TOKENS = 2 * MAX_FIXED_TOKENS + 1
# A step of a drafter whose tokens come to be used less often than this is left out, for the power that it takes.
MIN_USED_TOKENS = 0.05

# Two lanes never slow each other down more than this: a factor beyond it is a machine that does something else.
MAX_CONTENTION = 16.0

# A draft from the text has to promise more than plain decoding by this many standard deviations of what is unsure
# of its gain: the best of many estimates is mostly lucky (docs/log/draft-policy.md).
CAUTION = 0.5
# A draft is tried that would pay if its pass took less by so many standard deviations of what is unsure of that.
OPTIMISM = 2.0
# What a draft of a model has to promise at first, for the same reason.
MIN_GAIN = 1.06
# A model that drafts goes on while it promises this much: by then its gain is no luck.
MIN_GAIN_TO_STAY = 1.01
# A draft of a model has to promise this much more than one from the text (docs/log/draft-policy.md).
MIN_GAIN_OVER_TEXT = 1.06
# A more involved schedule has to promise this much more than a simpler one: plans are not more exact than that.
MIN_GAIN_OF_SCHEDULE = 1.03
# Separate cores for target and drafter have to promise this much more than all cores shared.
MIN_GAIN_OF_SPLIT = 1.1
# A pair whose measured gain is less is judged as not worth it: the noise of a run is as large.
MIN_GAIN_OF_PAIR = 1.05

# Drafts that are made only to learn whether their source pays by now may take this share of the time.
TRIAL_SHARE = 0.01
# A trial never counts as cheaper than this share of a step, or a source at break-even were tried always.
MIN_LOSS_OF_TRIAL = 0.05
