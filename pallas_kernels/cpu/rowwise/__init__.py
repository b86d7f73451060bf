"""What is done to each row by itself, on CPUs: norms, gates, rotary positions, sums by weights, the
likeliest token."""
