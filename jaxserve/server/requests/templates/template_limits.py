"""Limits of a process that renders a chat template.

The first question to the process is the template's source, each later one the variables of a chat.
"""

CPU_S = 2.0
"""CPU seconds for compiling the template and for each render. Real templates take milliseconds for
the longest chats."""
WALL_S = 15.0
"""Wall-clock seconds for the same on a busy machine, and for waiting for one's turn."""
MEMORY = 768 << 20
"""Bytes of address space; Python and Jinja have some 50 MiB of it."""
KEPT = 128 << 20
"""Resident bytes beyond which a process is replaced, since it would not give them back."""
MAX_SOURCE = 1 << 20
"""Most bytes of a template; real ones have up to 20 KiB."""
MAX_PROBLEM = 300
"""Most characters of a template's error message."""
