"""What implementations are compared with: slow and obvious, one number at a time; none of it imports what it judges."""
