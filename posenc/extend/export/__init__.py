"""Write the extended folder, and prove in a fresh process that stock tools read it right."""
