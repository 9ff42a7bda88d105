"""The routed activation on a CPU in C, compiled at first use with the machine's C compiler."""
