"""The command `flexact`."""
