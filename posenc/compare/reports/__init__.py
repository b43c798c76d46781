"""Several runs as one, losses of other trainers, and the published leaderboard."""
