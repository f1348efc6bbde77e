"""What is counted and recorded of a training."""
