"""What routing costs: the paper's overhead table."""
