"""Running checks: search, isolation, verdicts, reports and pytest."""
