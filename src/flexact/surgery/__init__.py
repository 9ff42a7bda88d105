"""Edits of a user's network: finding activations, replacing them by sites, and extracting the plain network."""
