"""Operations on each row by itself, on CPUs: norms, gates, rotary positions, sums by weights, the
likeliest token."""
