"""All studies of the paper, one after the other: what each runs, and how long it takes."""
