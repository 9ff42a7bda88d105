"""What was picked, and when: selection, recorder, TensorBoard."""
