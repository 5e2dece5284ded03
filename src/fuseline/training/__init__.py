"""One training loop, and the rooms it is made of."""
