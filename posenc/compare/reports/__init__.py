"""Several runs as one, and the published leaderboard."""
