"""From results to what may be said: who is first, how sure, and what the study cannot say."""
