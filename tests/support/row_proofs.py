"""A proof that fails, as on a machine whose kernels differ by the width of a pass."""

from edgespec.setup.row_proof import RowProof

FAILS = RowProof(
    holds=False,
    reason="3 of 60 rows differ with the cut of the text into passes",
    num_rows=60,
    num_different=3,
    max_difference=0.2,
    longest_past=40,
    seconds=3.0,
)
