"""Running of checks: search, isolation, verdicts, reports, and both ways to run them under pytest."""
