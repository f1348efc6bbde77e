"""Properties of every suite, one file each, and the table that lists them."""
