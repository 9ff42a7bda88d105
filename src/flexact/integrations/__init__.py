"""Callbacks for the training loops of other libraries. None is imported by `import flexact`."""
