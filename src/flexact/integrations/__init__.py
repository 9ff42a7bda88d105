"""Flex-Act inside other libraries' training loops, one file each; nothing here is imported unless asked for."""
