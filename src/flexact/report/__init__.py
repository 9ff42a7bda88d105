"""The report of any result folder: figures, and one page that opens offline."""
