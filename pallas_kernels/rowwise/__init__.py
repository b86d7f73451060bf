"""What is done to each row by itself: norms, gates, rotary positions, sums by weights, the
likeliest token."""
