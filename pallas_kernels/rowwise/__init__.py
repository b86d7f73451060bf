"""Operations on each row by itself: norms, gates, rotary positions, sums by weights, the likeliest
token."""
