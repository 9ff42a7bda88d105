"""Reading what users give, and writing files whole."""
