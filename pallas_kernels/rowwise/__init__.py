"""What is done to each row by itself: norms, gates, rotary positions, the likeliest token."""
