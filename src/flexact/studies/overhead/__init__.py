"""What routing costs: the paper's overhead table, the operation alone, and cost against candidates and depth."""
