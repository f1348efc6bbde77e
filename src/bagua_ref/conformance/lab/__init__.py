"""The harness of the checks: calls between canaries, scripts, simulated worlds, servers."""
