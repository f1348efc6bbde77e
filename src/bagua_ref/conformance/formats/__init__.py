"""File formats that golden vectors and traces share."""
