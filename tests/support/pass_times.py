"""Times of a pass by its width, as devices have them."""

CPU = {width: 22 + 6 * (width - 1) for width in range(1, 40)}  # ms, rows are dear
GPU = {width: 22 + 0.5 * (width - 1) for width in range(1, 40)}  # ms, rows are nearly free
