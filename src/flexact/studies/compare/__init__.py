"""A user's own network and training with each fixed activation and with Flex-Act, paired by seed."""
