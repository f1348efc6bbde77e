"""Properties of every suite, and the table that lists them."""
