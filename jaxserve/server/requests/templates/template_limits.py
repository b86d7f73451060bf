"""What a process that renders a chat template may take.

The first question to it is the template's source, each other one the variables of a chat.
"""

CPU_S = 2.0
"""Of the processor, for compiling the template and for each render: real ones take milliseconds for
the longest chats."""
WALL_S = 15.0
"""For the same on a machine that has others to serve, and for waiting until it is one's turn."""
MEMORY = 768 << 20
"""Bytes of address space; Python and Jinja have some 50 MiB of it."""
KEPT = 128 << 20
"""Resident bytes beyond which a process is not used again: it would keep them."""
MAX_SOURCE = 1 << 20
"""Bytes of a template: real ones have up to 20 KiB."""
MAX_PROBLEM = 300
"""Characters of what a template says is wrong."""
