"""The oracle that outside implementations are checked with: tolerances now; cases, properties and golden vectors build on them."""
