"""How many workers, and how much memory, the input pipeline gets on this machine."""
