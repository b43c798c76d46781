"""Call and measure a foreign module."""
