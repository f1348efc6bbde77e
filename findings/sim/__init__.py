"""Public programs under `bagua-ref sim`."""
