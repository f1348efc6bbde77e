"""What every other room stands on: the current world, launch environments, memory, streams and untrusted input."""
