"""Process groups and functional collectives."""
