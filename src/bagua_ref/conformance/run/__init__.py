"""Running checks: search, verdicts, workers and reports."""
