"""The only training, the only evaluation of a run, and the test of learning rates; both doors call them."""
