"""Independent, slow and obvious implementations to compare with; none of them imports the package that they judge."""
