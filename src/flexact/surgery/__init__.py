"""Changing a user's network: finding activations, putting sites in their place, and taking them out."""
