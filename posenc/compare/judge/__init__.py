"""From results to what may be said: who is first, what the seeds tell, what others found."""
